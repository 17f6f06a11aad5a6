"""Models with other inputs and outputs: a run that is killed goes on to the bit, and what is saved predicts."""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import comfedl as cf
from comfedl.cli import main
from comfedl.config.schema import parse_config, run_config
from comfedl.training import checkpoint
from comfedl.training.callbacks import Callback
from comfedl.utils import samples, tree
from helpers.inputs import CASES, MODELS, both_losses
from helpers.stopped import files

METHOD = cf.Ditto(lam=0.5, lr=0.1, local_steps=3, batch_size=4)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class KillAt(Callback):
    """The process dies after a round, as when the machine kills it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def settled(self, snapshot: checkpoint.Snapshot) -> None:
        if snapshot.round == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("frozen", [True, False], ids=["all saved", "only what is trained"])
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_goes_on_to_the_bit(name: str, frozen: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2, "clients_per_round": 2, "save_frozen": frozen}
    whole = CASES[name].fit(METHOD, out=tmp_path / "whole", **options)
    if (child := os.fork()) == 0:
        try:
            CASES[name].fit(METHOD, out=tmp_path / "cut", callbacks=[KillAt(3)], **options)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "cut" / "summary.json").exists()
    resumed = CASES[name].fit(METHOD, out=tmp_path / "cut", resume=True, **options)
    assert resumed.rounds == whole.rounds and list(resumed.clients) == list(whole.clients)
    assert all(torch.equal(part, whole.params[key]) for key, part in resumed.params.items())
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def parts(output: Any) -> list[Tensor]:
    """The tensors of an output that have a row for each sample."""
    if isinstance(output, Tensor):
        return [output]
    if (logits := getattr(output, "logits", None)) is None and not isinstance(output, dict):
        return [output.kind, output.size]
    return [output["logits"] if logits is None else logits]


@pytest.mark.parametrize("client", [None, "b"])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_run_predicts_in_python(name: str, client: str | None, tmp_path: Path) -> None:
    result = CASES[name].fit(METHOD, rounds=2, out=tmp_path / "run", save_frozen=False)
    x, _ = CASES[name].data().train["c"]
    module = result.to_module(client)
    with torch.no_grad():
        wanted = module(**x) if isinstance(x, dict) else module(*x)
    found = cf.load_run(tmp_path / "run", CASES[name].model()).predict(x, client)
    for ours, theirs in zip(parts(found), parts(wanted), strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def saved(name: str, out: Path) -> cf.Result:
    """A run of the case from a config, so that the command line can use it."""
    loss = {"loss": "helpers.inputs:both_losses"} if CASES[name].loss is both_losses else {}
    settings = {
        "rounds": 2,
        "data": {"name": "helpers.inputs:for_config", "case": name},
        "model": {"name": f"helpers.inputs:{MODELS[name]}"},
        "algorithm": {"name": "ditto", "batch_size": 4},
        **loss,
    }
    return run_config(parse_config(settings), out=out)


def command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["comfedl", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def write(x: Any, file: Path) -> None:
    named = x if isinstance(x, dict) else {f"x{k}": part for k, part in enumerate(x)}
    np.savez(file, **{key: part.numpy() for key, part in named.items()})


@pytest.mark.parametrize("name", CASES)
def test_the_command_predicts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = saved(name, tmp_path / "run")
    x, _ = CASES[name].data().train["c"]
    write(x, tmp_path / "new.npz")
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "new.npz"), "--client", "b", "--trust"]
    assert command([*words, "--out", str(tmp_path / "p.csv")], monkeypatch) == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(rows) == samples.count(x)
    module = result.to_module("b")
    with torch.no_grad():
        outputs = parts(module(**x) if isinstance(x, dict) else module(*x))
    if name == "two outputs":
        kind, size = outputs
        columns = {"kind 1": kind[:, 0], "kind 2": kind[:, 1], "size": size}
    elif name in ("lstm", "transformer"):
        columns = {f"prediction {k + 1}": best for k, best in enumerate(outputs[0].argmax(dim=-1).unbind(dim=1))}
    else:
        chances = outputs[0].softmax(dim=1)
        columns = {f"probability of {k}": chance for k, chance in enumerate(chances.unbind(dim=1))}
        assert [int(row["prediction"]) for row in rows] == outputs[0].argmax(dim=1).tolist()
    for column, values in columns.items():
        found = torch.tensor([float(row[column]) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(found, values.double(), rtol=1e-5, atol=1e-6)


def test_the_command_evaluates_and_personalises_a_file_of_several_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = saved("dict", tmp_path / "run")
    x, y = CASES["dict"].data().train["c"]
    np.savez(tmp_path / "new.npz", y=y.numpy(), **{key: part.numpy() for key, part in x.items()})
    run, file = str(tmp_path / "run"), str(tmp_path / "new.npz")
    scores = cf.load_run(run, trust=True)
    from comfedl.analysis.evaluate import evaluate

    (row,) = evaluate(scores, data=tmp_path / "new.npz").rows
    with torch.no_grad():
        right = (result.to_module()(**x)["logits"].argmax(dim=1) == y).double().mean()
    assert row["accuracy"] == pytest.approx(float(right))
    words = ["personalise", run, "--data", file, "--steps", "3", "--lr", "0.1", "--trust"]
    assert command([*words, "--out", str(tmp_path / "own.safetensors")], monkeypatch) == 0
    assert (tmp_path / "own.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: {key: part for key, part in x.items() if key != "mask"}, "no array 'mask'"),
        (lambda x: {**x, "ids": x["ids"].double()}, "ids of .* has floating-point numbers.*trained on int64"),
        (lambda x: {**x, "mask": x["mask"][:3]}, "3 rows in mask, .*give as many of each"),
    ],
)
def test_a_file_with_other_inputs_is_one_sentence(change: Any, words: str, tmp_path: Path) -> None:
    from comfedl.analysis.predict import predict

    saved("dict", tmp_path / "run")
    write(change(tree.map(lambda part: part, CASES["dict"].data().train["c"][0])), tmp_path / "new.npz")
    with pytest.raises(cf.DataError, match=words):
        predict(cf.load_run(tmp_path / "run", trust=True), tmp_path / "new.npz")
