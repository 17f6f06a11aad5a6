"""Models that no rule covers: a trial decides between vmap and one client after another, and is remembered."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.engines.embedded import Embedded
from comfedl.engines.kernels import trial


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMFEDL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials.json"


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Looks(nn.Module):
    """Its forward pass looks at values, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x if float(x.sum()) > 0 else -x)
        return out


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + torch.randn(4))
        return out


def data(clients: int = 6) -> cf.FederatedData:
    rng = np.random.default_rng(0)
    return cf.FederatedData(
        {f"{i}": (rng.normal(size=(9 + i, 4)).astype("f4"), rng.integers(0, 3, 9 + i)) for i in range(clients)}
    )


def run(model: nn.Module, way: str = "auto", **more: Any) -> cf.Result:
    return cf.fit(model, data(), cf.FedAvg(batch_size=5), 2, engine_options={"vectorize": way}, **more)


def paced(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """The clock of the trial: vmap takes the first, one after another the second."""
    turns = iter(list(seconds) * trial.REPEATS)
    monkeypatch.setattr(trial, "_seconds", lambda run: next(turns))


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_taken_and_said(
    faster: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paced(monkeypatch, *((1.0, 2.0) if faster else (2.0, 1.0)))
    together: list[int] = []
    real = Embedded._together
    monkeypatch.setattr(Embedded, "_together", lambda self, *a: (together.append(1), real(self, *a))[1])
    with caplog.at_level(logging.INFO, "comfedl"):
        result = run(normed())
    assert bool(together) == faster
    assert ("by vmap: BatchNorm1d is not" in caplog.text) == faster and "a trial found vmap" in caplog.text
    serial = run(normed(), "serial")
    for name, part in serial.params.items():
        torch.testing.assert_close(result.params[name], part)


def test_the_trial_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, 1.0, 2.0)
    one = run(normed())
    assert len(json.loads(cache.read_text())) == 1
    monkeypatch.setattr(trial, "_trial", lambda *a: pytest.fail("a second trial"))
    other = run(normed())
    assert all(torch.equal(part, other.params[name]) for name, part in one.params.items())


def test_another_model_has_a_trial_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, *(1.0, 2.0) * 2)
    run(normed())
    run(nn.Sequential(normed(), nn.Linear(3, 3)))
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("model", [Looks, Random])
def test_what_vmap_cannot_run_is_serial(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    with caplog.at_level(logging.INFO, "comfedl"):
        result = run(made)
    assert "vmap cannot run it" in caplog.text
    serial = run(made, "serial")
    assert all(torch.equal(part, serial.params[name]) for name, part in result.params.items())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}'])
def test_a_spoilt_memory_is_made_anew(cache: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    paced(monkeypatch, 1.0, 2.0)
    run(normed())
    assert len(json.loads(cache.read_text())) == 1


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMFEDL_DATA", str(tmp_path / "file" / "below"))
    run(normed())


def test_torchs_generator_is_left_as_it_was() -> None:
    model, before = Random(), torch.get_rng_state()
    run(model)
    assert torch.equal(before, torch.get_rng_state())
