"""Structured inputs and transforms on two ranks: the embedded engine's run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from helpers.inputs import CASES, F64, rolled
from helpers.ranks import assert_close, forked

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

METHODS = {
    "robust": cf.Robust(0.3, lr=0.1, batch_size=4),
    "adapt": cf.ComFedL(inner=cf.Adapt(0.05), outer=cf.KL(0.5), lr=0.1, batch_size=4, local_steps=2),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_embedded_run(name: str) -> None:
    def results(engine: str) -> list[Any]:
        options: dict[str, Any] = {"rounds": 3, "clients_per_round": 2, "engine": engine, "transform": rolled}
        runs = [CASES[name].fit(method, **options) for method in METHODS.values()]
        return [[run.params, run.rounds, list(run.clients), run.personal("b")] for run in runs]

    ranks = forked(2, lambda rank: results("distributed"))
    assert not any(isinstance(rank, BaseException) for rank in ranks), ranks
    plain = results("embedded")
    for rank in ranks:
        assert_close(rank, plain, 1e-9)


def test_ranks_with_other_inputs_are_refused() -> None:
    """They have the same tensors, under other names."""

    def run(rank: int) -> Any:
        def named(x: Any, y: Any) -> Any:
            return ({"one": x[0], "other": x[1]} if rank else {"one": x[0], "two": x[1]}), y["kind"]

        fed = CASES["two outputs"].data()
        torch.manual_seed(0)
        model = Either().to(F64)
        data = cf.FederatedData({name: named(*pair) for name, pair in fed.train.items()})
        return cf.fit(model, data, METHODS["robust"], rounds=1, engine="distributed")

    errors = forked(2, run)
    assert all("different data" in str(error) for error in errors), errors


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 2)

    def forward(self, **x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([*x.values()], dim=1))
        return found
