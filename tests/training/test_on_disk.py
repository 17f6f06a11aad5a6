"""Data on disk: a run on them is, to the bit, the run on the same data in memory; and what is said when they fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.predict import predict
from comfedl.analysis.robust_advice import advise
from comfedl.cli import data_tables, tables
from comfedl.config.schema import parse_config, run_config
from comfedl.utils import tree
from comfedl.utils.fingerprint import fingerprint
from helpers.on_disk import CLASSES, FORMS, SIZES
from helpers.ranks import forked

MB = 0.1  # so little that clients are read over and over


class TwoInputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(width + 2, CLASSES)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([x, ids / 100], dim=1))
        return out


def model_for(fed: cf.FederatedData) -> nn.Module:
    torch.manual_seed(0)
    x, _ = fed.train.head(1)
    if isinstance(x, dict):
        return TwoInputs(x["x"].shape[1])
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 8), nn.ReLU(), nn.Linear(8, CLASSES))


def assert_same(one: cf.Result, other: cf.Result) -> None:
    assert all(torch.equal(part, other.params[name]) for name, part in one.params.items())
    assert one.rounds == other.rounds and list(one.clients) == list(other.clients)


@pytest.mark.parametrize("form", FORMS)
def test_the_data_are_the_same(form: str, tmp_path: Path) -> None:
    memory, disk = FORMS[form](tmp_path, MB)
    assert disk.names == memory.names and repr(disk) == repr(memory) and disk.encoding == memory.encoding
    for name in ("train", "validation", "test"):
        ours, theirs = memory.split(name), disk.split(name)
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert not theirs.at_hand and list(ours) == list(theirs) and theirs.row_bytes == ours.row_bytes
        for client in ours:
            i = ours.position(client)
            pairs = [(ours[client], theirs[client]), (ours.y_of(i), theirs.y_of(i))]
            for left, right in pairs:
                assert all(map(torch.equal, tree.leaves(left), tree.leaves(right)))
                assert [part.dtype for part in tree.leaves(left)] == [part.dtype for part in tree.leaves(right)]


@pytest.mark.parametrize("vectorize", ["auto", "serial"])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_is_the_same_to_the_bit(form: str, vectorize: str, tmp_path: Path) -> None:
    """With partial participation, personal models, whole data and batches, and evaluation of all clients."""
    feds = FORMS[form](tmp_path, MB)
    for method in (cf.Ditto(lr=0.1, batch_size=8), cf.Robust(lr=0.1, batch_size=None, gamma=0.5)):
        runs = [
            cf.fit(
                model_for(fed), fed, method, rounds=4, clients_per_round=3, eval_every=2,
                engine_options={"vectorize": vectorize}, metrics=["auc"] if form == "parquet" else None,
            )
            for fed in feds
        ]  # fmt: skip
        assert_same(*runs)
        assert runs[0].clients_table() == runs[1].clients_table()
        ours, theirs = (run.personal("eva") for run in runs)
        assert all(torch.equal(part, theirs[name]) for name, part in ours.items())


OTHERS: list[tuple[cf.Algorithm, dict[str, Any]]] = [
    (cf.Robust(lr=0.1, on="outer"), {"outer_share": 0.4}),
    (cf.FedAvg(lr=0.1), {"faults": [cf.faults.LabelFlip(["bob", "eva"])], "loss": cf.losses.CrossEntropy("balanced")}),
    (cf.FedMAML(lr=0.1, adapt_lr=0.1), {"transform": cf.transform.Noise(0.1)}),
    (cf.DRFA(lr=0.1, dual_lr=0.1), {"loss": nn.functional.cross_entropy, "eval_clients": 2}),
]


@pytest.mark.parametrize("form", ["flat_arrays", "packed_npz", "datasets"])
@pytest.mark.parametrize("k", range(len(OTHERS)))
def test_what_needs_the_labels_of_all_is_the_same(form: str, k: int, tmp_path: Path) -> None:
    (method, options), feds = OTHERS[k], FORMS[form](tmp_path, MB)
    assert_same(*(cf.fit(model_for(fed), fed, method, rounds=3, clients_per_round=4, **options) for fed in feds))


@pytest.mark.parametrize("form", ["flat_arrays", "npz", "parquet", "dict_datasets"])
def test_a_run_resumes_to_the_bit(form: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    memory, disk = FORMS[form](tmp_path / "data", MB)
    options: dict[str, Any] = {"clients_per_round": 3, "eval_every": 1}
    whole = cf.fit(model_for(memory), memory, cf.Ditto(lr=0.1), rounds=5, **options)
    cf.fit(model_for(disk), disk, cf.Ditto(lr=0.1), rounds=2, out=tmp_path / "run", **options)
    assert_same(whole, cf.fit(model_for(disk), disk, cf.Ditto(lr=0.1), 5, out=tmp_path / "run", resume=True, **options))


@pytest.mark.parametrize("form", ["flat_arrays", "npz", "images", "parquet", "dict_datasets"])
def test_two_ranks_are_the_same_as_in_memory(form: str, tmp_path: Path) -> None:
    feds = FORMS[form](tmp_path, MB)
    options: dict[str, Any] = {"rounds": 3, "clients_per_round": 4, "engine": "distributed", "eval_every": 1}

    def run(which: int) -> Any:
        def on_rank(rank: int) -> Any:
            result = cf.fit(model_for(feds[which]), feds[which], cf.Ditto(lr=0.1, batch_size=8), **options)
            return dict(result.params), result.rounds, list(result.clients)

        return forked(2, on_rank)

    (memory, _), (disk, other) = run(0), run(1)
    assert memory[1:] == disk[1:] and all(torch.equal(part, disk[0][name]) for name, part in memory[0].items())
    assert all(torch.equal(part, other[0][name]) for name, part in memory[0].items())


TABLES: dict[str, dict[str, Any]] = {
    "npz": {"name": "folder", "path": "files"},
    "images": {"name": "folder", "path": "files"},
    "parquet": {"name": "parquet", "path": "files/all.parquet", "client": "site", "target": "y", "impute": "median"},
    "parquet_folder": {"name": "folder", "path": "files", "target": "y", "missing": "drop"},
}


@pytest.mark.parametrize("form", TABLES)
def test_configs_evaluate_predict_and_resume(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = tmp_path / "files"
    files.mkdir()
    FORMS[form](files, MB)

    def run(name: str, rounds: int = 3, resume: bool = False, **more: Any) -> SavedRun:
        settings = {
            **{"rounds": rounds, "clients_per_round": 3, "eval_every": 1, "data": {**TABLES[form], **more}},
            **{"model": {"name": "mlp"}, "algorithm": {"name": "ditto", "lr": 0.1, "batch_size": 8}},
        }
        run_config(parse_config(settings), out=tmp_path / name, resume=resume)
        return cf.load_run(tmp_path / name)

    run("disk", rounds=2, lazy=True, memory_mb=0.1)
    runs = [run("memory"), run("disk", resume=True, lazy=True, memory_mb=0.2)]
    assert "lazy" not in (tmp_path / "memory" / "config.toml").read_text()
    for client in (None, "eva"):
        ours, theirs = (each.tensors if client is None else each.personal(client) for each in runs)
        assert all(torch.equal(part, theirs[name]) for name, part in ours.items())
    scores = [evaluate(each) for each in runs]
    assert scores[0].split == "test" and scores[0].rows == scores[1].rows and scores[0].table == scores[1].table
    new = files / "ann" / "class-0" if form == "images" else next(path for path in files.rglob("*") if path.is_file())
    assert predict(runs[0], new) == predict(runs[1], new)
    for table in (tables.clients, lambda fed: "".join(data_tables.small_clients(fed))):
        shown = [table(each.settings.make_data()) for each in runs]
        texts = [one if isinstance(one, str) else [[*column.cells] for column in one.columns] for one in shown]
        assert texts[0] == texts[1]
    advice = [advise(each.settings, warmup=2).losses for each in runs]
    assert advice[0].tolist() == advice[1].tolist() and len(advice[0]) == len(SIZES)


def test_a_run_in_memory_is_not_continued_on_disk(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    memory, disk = FORMS["npz"](tmp_path / "data", MB)
    cf.fit(model_for(memory), memory, cf.FedAvg(lr=0.1), rounds=1, out=tmp_path / "run")
    with pytest.raises(cf.ComfedlError, match="data"):
        cf.fit(model_for(disk), disk, cf.FedAvg(lr=0.1), rounds=2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("form", ["flat_arrays", "npz", "images", "parquet"])
def test_ranks_on_two_machines_may_have_copies(form: str, tmp_path: Path) -> None:
    """With other times of change; a file of another size is another file."""
    feds = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        FORMS[form](folder, MB)
        for path in folder.rglob("*"):
            os.utime(path, (rank + 1, rank + 1))
        make: Any = {"flat_arrays": opened, "parquet": table_in}.get(form, folder_in)
        feds.append(make(folder))
    assert feds[0].digest() != feds[1].digest()
    assert fingerprint(*feds[0].contents(times=False)) == fingerprint(*feds[1].contents(times=False))

    def on_rank(rank: int) -> Any:
        run = cf.fit(model_for(feds[rank]), feds[rank], cf.FedAvg(lr=0.1), rounds=1, engine="distributed")
        return dict(run.params)

    one, other = forked(2, on_rank)
    assert all(torch.equal(part, other[name]) for name, part in one.items())


def opened(folder: Path) -> cf.FederatedData:
    x, y = (np.load(folder / f"train-{part}.npy", mmap_mode="r") for part in "xy")
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    return cf.FederatedData.from_flat((x, y, offsets), lazy=True)


def folder_in(folder: Path) -> cf.FederatedData:
    return cf.FederatedData.from_folder(folder, lazy=True)


def table_in(folder: Path) -> cf.FederatedData:
    path = folder / "all.parquet"
    return cf.FederatedData.from_csv(path, client="site", target="y", impute="median", lazy=True)


def test_touched_files_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times are what is known of them, so the refusal says how to keep them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    FORMS["npz"](tmp_path / "files", MB)
    settings = {
        **{"rounds": 1, "data": {"name": "folder", "path": "files", "lazy": True}, "model": {"name": "mlp"}},
        **{"algorithm": {"name": "fedavg", "lr": 0.1}},
    }
    run_config(parse_config(settings), out=tmp_path / "run")
    for path in (tmp_path / "files").iterdir():
        os.utime(path, (1, 1))
    said = r"known by their size and time of change.*cp -p and rsync -a keep the times"
    with pytest.raises(cf.RunFolderError, match=said):
        run_config(parse_config({**settings, "rounds": 2}), out=tmp_path / "run", resume=True)
    with pytest.raises(cf.RunFolderError, match=said):
        evaluate(cf.load_run(tmp_path / "run"))
