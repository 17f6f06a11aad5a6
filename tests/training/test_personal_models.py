"""Personal models of many clients: one safetensors file, written in batches and read row by row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import comfedl as cf
from comfedl.training import personal_models
from comfedl.training.personal_models import PersonalModels
from comfedl.utils.files import SAFETENSORS_DTYPES, TensorFile


def fed(clients: int = 25, names: list[str] | None = None) -> cf.FederatedData:
    x = torch.randn(3 * clients, 4, generator=torch.Generator().manual_seed(0))
    return cf.FederatedData.from_flat((x, (x[:, 0] > 0).long(), np.arange(clients + 1) * 3), names=names)


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    return model


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal_models, "MOST_FILES", 10)


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("method", [cf.Ditto(lam=0.5), cf.FedAvg()], ids=lambda method: method.name)
def test_one_file_holds_what_many_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    options = {"rounds": 3, "clients_per_round": 6, "engine_options": {"vectorize": "serial"}}
    stored = cf.fit(net(), fed(), method, out=tmp_path / "one", **options)
    monkeypatch.setattr(personal_models, "MOST_FILES", 1000)
    single = cf.fit(net(), fed(), method, out=tmp_path / "many", **options)
    whole = load_file(tmp_path / "one" / "personal" / "models.safetensors")
    names = json.loads((tmp_path / "one" / "personal" / "clients.json").read_text())
    assert names == list(fed().names) and len(names) == 25
    read = PersonalModels(tmp_path / "one" / "personal")
    assert list(read) == names and len(read) == 25 and "99" not in read
    for i, name in enumerate(names):
        own = load_file(tmp_path / "many" / "personal" / f"{name}.safetensors")
        for found in ({key: part[i] for key, part in whole.items()}, read[name], stored.state_dict(name)):
            assert found.keys() == own.keys()
            assert all(torch.equal(found[key], part) and found[key].dtype == part.dtype for key, part in own.items())
        assert list(stored.personal(name)) == list(single.personal(name))
        assert list(stored.personal_model(name)["buffers"]) == list(single.personal_model(name)["buffers"])
    net().load_state_dict(stored.state_dict("07"))


@pytest.mark.usefixtures("few_files")
def test_the_file_is_read_when_a_model_is_asked_for(tmp_path: Path) -> None:
    result = cf.fit(net(), fed(), cf.FedAvg(), rounds=1, out=tmp_path / "run")
    with safe_open(tmp_path / "run" / "personal" / "models.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("0.weight")[3:4][0], result.personal("03")["0.weight"])
    with pytest.raises(KeyError):
        PersonalModels(tmp_path / "run" / "personal")["nobody"]
    shutil.rmtree(tmp_path / "run" / "personal")
    with pytest.raises(cf.RunFolderError, match="cannot be read"):
        result.personal("03")
    with pytest.raises(cf.RunFolderError, match="cannot be read"):
        PersonalModels(tmp_path / "run" / "personal")


@pytest.mark.usefixtures("few_files")
def test_names_of_any_kind(tmp_path: Path) -> None:
    names = sorted(["a/b", "..", 'quo"te', "new\nline", "zoé", "\U0001f600", *"cdefghij"])
    result = cf.fit(net(), fed(len(names), names), cf.FedAvg(), rounds=1, out=tmp_path / "run")
    read = PersonalModels(tmp_path / "run" / "personal")
    assert list(read) == names
    for name in names:
        assert torch.equal(read[name]["2.weight"], result.personal(name)["2.weight"])


@pytest.mark.usefixtures("few_files")
def test_a_failure_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: TensorFile, name: str, part: torch.Tensor, row: int = 0) -> None:
        if row:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(personal_models, "BATCH", 1000)
    monkeypatch.setattr(personal_models.TensorFile, "write", full)
    with pytest.raises(cf.RunFolderError, match="No space left"):
        cf.fit(net(), fed(), cf.FedAvg(), rounds=1, out=tmp_path / "run")
    left = {path.name for path in (tmp_path / "run").rglob("*")}  # the training is not lost
    assert not any("part" in name for name in left) and not left & {"summary.json", "models.safetensors"}
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["round-000000001"]


@pytest.mark.usefixtures("few_files")
def test_the_room_is_looked_at_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(cf.RunFolderError, match=r"will take .* GB, .*save_personal = false"):
        cf.fit(net(), fed(), cf.FedAvg(), rounds=1, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    cf.fit(net(), fed(), cf.FedAvg(), rounds=1, out=tmp_path / "run", save_personal=False)


def test_personal_models_need_not_be_saved(tmp_path: Path) -> None:
    result = cf.fit(net(), fed(), cf.FedAvg(), rounds=1, out=tmp_path / "run", save_personal=False)
    assert not (tmp_path / "run" / "personal").exists()
    assert "save_personal = false" in (tmp_path / "run" / "config.toml").read_text()
    assert result.personal("03")["0.weight"].shape == (5, 4)
    with pytest.raises(cf.ConfigError, match="save_personal is 'no'"):
        cf.fit(net(), fed(), cf.FedAvg(), save_personal="no")  # type: ignore[arg-type]


def test_an_unknown_client_among_many() -> None:
    result = cf.fit(nn.Linear(4, 2), fed(1500), cf.FedAvg(), rounds=1, clients_per_round=2, eval_clients=2)
    with pytest.raises(cf.ConfigError) as caught:
        result.personal("ann")
    assert "from '0000' to '1499'" in str(caught.value) and len(str(caught.value)) < 200
    with pytest.raises(cf.ConfigError, match="7 is not a client"):
        result.personal(7)  # type: ignore[arg-type]


# The file itself.


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
def test_tensors_of_every_type_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {
        "odd": torch.arange(3).to(torch.int8),
        "mine": (torch.arange(12).reshape(4, 3) % 5).to(dtype),
        "single": torch.tensor(1).to(dtype),
        "empty": torch.zeros(4, 0, dtype=dtype),
        "strided": torch.arange(12.0).reshape(3, 4).T,
    }
    with (tmp_path / "file").open("wb") as file:
        out = TensorFile(file, {name: (part.dtype, part.shape) for name, part in given.items()})
        for name, part in given.items():
            if part.ndim == 2:  # a row at a time, backwards
                for row in reversed(range(len(part))):
                    out.write(name, part[row], row)
            else:
                out.write(name, part)
    found = load_file(tmp_path / "file")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], part) and found[name].dtype == part.dtype for name, part in given.items())
