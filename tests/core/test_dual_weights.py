"""Dual weights: the same whether all weights are stored, or only those of seen clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import comfedl as cf
from comfedl.algorithms.context import RoundContext
from comfedl.core import dual_weights
from comfedl.utils import tree


def few(clients: int) -> Any:
    """Uniform weights in the sparse form, however few clients there are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dual_weights, "FEW", 0)
        return dual_weights.uniform(clients)


@settings(deadline=None)
@given(data=st.data(), clients=st.integers(1, 30), floor=st.sampled_from([0.0, 0.01]))
def test_the_seen_and_one_number_are_all_the_weights(data: st.DataObject, clients: int, floor: float) -> None:
    kept, plain = few(clients), dual_weights.uniform(clients)
    assert isinstance(plain, torch.Tensor) and isinstance(kept, dict)
    for _ in range(4):
        who = data.draw(st.lists(st.integers(0, clients - 1), unique=True, min_size=1))
        by = torch.tensor(data.draw(st.lists(st.floats(-2, 2), min_size=len(who), max_size=len(who))))
        scaled = by.double() * data.draw(st.sampled_from([1e-3, 0.1, 10.0]))
        before = dual_weights.to_tensor(kept).clone()
        moved = dual_weights.apply_floor(dual_weights.ascend(kept, who, scaled), floor)
        assert torch.equal(dual_weights.to_tensor(kept), before)
        kept, plain = moved, dual_weights.apply_floor(dual_weights.ascend(plain, who, scaled), floor)
        found = dual_weights.to_tensor(kept)
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)
        assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
        asked = data.draw(st.lists(st.integers(0, clients - 1)))
        torch.testing.assert_close(dual_weights.take(kept, asked), dual_weights.take(plain, asked), rtol=0, atol=1e-12)


@settings(deadline=None)
@given(data=st.data(), clients=st.integers(2, 20))
def test_clients_are_drawn_in_proportion(data: st.DataObject, clients: int) -> None:
    """Evenly spaced uniforms hit each client in proportion to its weight, up to one at either end."""
    kept = few(clients)
    for _ in range(2):
        who = data.draw(st.lists(st.integers(0, clients - 1), unique=True, min_size=1, max_size=clients))
        kept = dual_weights.ascend(kept, who, torch.rand(len(who), dtype=torch.float64) * 0.5)
    barred = sorted(data.draw(st.sets(st.integers(0, clients - 1), max_size=clients - 1)))
    weights = dual_weights.to_tensor(kept).numpy().copy()
    weights[barred] = 0
    if not weights.any():
        weights[[i for i in range(clients) if i not in barred]] = 1.0
    many = 4000
    found = dual_weights.sample(kept, (np.arange(many) + 0.5) / many, barred)
    assert found == sorted(found) and all(type(i) is int for i in found)
    counts = np.bincount(found, minlength=clients)
    np.testing.assert_allclose(counts, many * weights / weights.sum(), atol=2)
    assert not counts[weights == 0].any()
    ends = dual_weights.sample(kept, np.array([0.0, np.nextafter(1.0, 0.0)]), barred)
    assert all(weights[i] > 0 for i in ends)


def test_a_step_of_a_million_clients_keeps_those_that_were_seen() -> None:
    start = dual_weights.uniform(1_000_000)
    moved = dual_weights.ascend(start, [7, 999_999, 3], torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64))
    assert max(leaf.numel() for leaf in tree.leaves(moved)) == 3 and moved["seen"].tolist() == [3, 7, 999_999]
    assert float(dual_weights.to_tensor(moved).sum()) == pytest.approx(1)
    assert dual_weights.sample(moved, np.array([0.05, 0.2]), []) == [7, 999_999]
    never = dual_weights.sample(moved, np.array([0.4, 0.6, 0.99]), [])
    assert never == sorted(set(never) - {3, 7, 999_999}) and never[-1] > 900_000


@pytest.mark.parametrize("method", [cf.DRFA(dual_lr=0.01), cf.DRFA(dual_lr=0.01, floor=0.02), cf.TRMAML(dual_lr=0.02)])
def test_a_run_is_the_same_either_way(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_all(self: RoundContext, weights: Any) -> list[int]:
        return self.sample_by(dual_weights.to_tensor(weights).numpy(), replace=True)

    monkeypatch.setattr(RoundContext, "sample_by_duals", by_all)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=generator, dtype=torch.float64)
    fed = cf.FederatedData.from_flat((x, (x[:, 0] > 0).long(), np.arange(10) * 10))
    found = []
    for most in (100, 0):
        monkeypatch.setattr(dual_weights, "FEW", most)
        torch.manual_seed(0)
        found.append(cf.fit(nn.Linear(3, 2).double(), fed, method, rounds=6, clients_per_round=3))
    one, other = (torch.cat([leaf.flatten() for leaf in tree.leaves(each.params)]) for each in found)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    weights = [[row["dual"] for row in each.clients] for each in found]
    assert weights[0] == pytest.approx(weights[1], abs=1e-10) and len(set(weights[0])) > 9
