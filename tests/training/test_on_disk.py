"""Data on disk: a run on them is, to the bit, the run on the same data in memory; and what is said when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.utils import tree
from helpers.on_disk import CLASSES, FORMS
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
