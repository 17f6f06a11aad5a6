"""The strong defence: capped weights, clipped updates and the geometric median, under every method."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.aggregation import STRONG_CAP, clip_factors
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import TRUSTED, measure
from comfedl.core.learner import Model
from comfedl.core.simplex import limited_weights
from comfedl.engines.replies import LocalReplies, ReplyPart, StackedReplies

numbers = st.lists(st.just(0.0) | st.floats(1e-9, 100), min_size=1, max_size=12).filter(any)


@settings(max_examples=100, deadline=None)
@given(numbers, st.floats(1, 20))
def test_limited_weights_are_weights_within_the_cap(values: list[float], cap: float) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    found = limited_weights(weights, cap)
    assert float(found.sum()) == pytest.approx(float(weights.sum()))
    assert float(found.max()) <= cap * float(weights.mean()) * (1 + 1e-9)
    assert float(found.min()) >= 0
    torch.testing.assert_close(limited_weights(weights.flip(0), cap), found.flip(0))
    below = found < cap * weights.mean() * (1 - 1e-9)
    ratio = found[below & (weights > 0)] / weights[below & (weights > 0)]
    assert not len(ratio) or float(ratio.max() / ratio.min()) == pytest.approx(1)


@settings(max_examples=50, deadline=None)
@given(numbers)
def test_a_cap_of_all_is_none_and_of_one_is_uniform(values: list[float]) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(limited_weights(weights, len(values)), weights)
    torch.testing.assert_close(limited_weights(weights, 1), weights.mean().expand(len(values)))


def test_fedavgs_cap_bounds_a_clients_share(three_clients: cf.FederatedData) -> None:
    sizes = three_clients.train.sizes
    assert max(sizes) / sum(sizes) > 1.2 / 3
    capped = cf.fit(nn.Linear(4, 3).double(), three_clients, cf.FedAvg(max_weight=1.2), rounds=1)
    assert max(row["weight"] for row in capped.clients) == pytest.approx(1.2 / 3)
    plain, all_of_it = (
        cf.fit(nn.Linear(4, 3).double(), three_clients, cf.FedAvg(max_weight=cap), rounds=2, seed=1).params
        for cap in (None, 3)
    )
    torch.manual_seed(0)
    assert plain.keys() == all_of_it.keys()
    with pytest.raises(cf.ConfigError, match="max_weight"):
        cf.FedAvg(max_weight=0.5)


def test_a_client_that_counts_twice_is_one_client() -> None:
    """DRFA draws with replacement."""
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    found = cf.DRFA(defence="strong").limited(weights, [0, 0, 0, 1, 2])
    assert float(found[:3].sum()) == pytest.approx(STRONG_CAP / 3)
    assert float(found.sum()) == pytest.approx(1)


def method_of(cls: type[Algorithm]) -> Algorithm:
    needed: dict[str, Any] = {"comfedl": {"outer": cf.KL(0.5)}}
    return cls(lr=0.1, **needed.get(cls.name, {}))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_learns_behind_it(three_clients: cf.FederatedData, name: str) -> None:
    method = replace(method_of(ALGORITHMS[name]), defence="strong")
    result = cf.fit(nn.Linear(4, 3).double(), three_clients, method, rounds=12, eval_every=4)
    assert result.rounds[-1]["train.loss.mean"] < result.rounds[0]["train.loss.mean"]


@pytest.mark.parametrize("name", ["fedavg", "comfedl", "robust", "scaffold", "q-fedavg"])
def test_among_equal_clients_it_costs_nothing(name: str) -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fed = cf.FederatedData(train={client: (x, (x[:, 0] > 0).long()) for client in "abcde"})
    torch.manual_seed(0)
    model, method = nn.Linear(4, 2).double(), replace(method_of(ALGORITHMS[name]), batch_size=None)
    plain = cf.fit(model, fed, method, rounds=6).params
    strong = cf.fit(model, fed, replace(method, defence="strong"), rounds=6).params
    for key, part in plain.items():
        torch.testing.assert_close(strong[key], part, rtol=0, atol=1e-7)


def test_a_part_that_is_given_replaces_the_defences() -> None:
    method = cf.Robust(0.1, defence="strong", cap=2.0, aggregate="median", clip_update_norm=3.0)
    assert (method.g.cap, method.weight_cap, method.rule) == (2.0, 2.0, "median")
    assert cf.Robust(0.1, defence="strong").g.cap == STRONG_CAP
    with pytest.raises(cf.ConfigError, match="defence"):
        cf.FedAvg(defence="weak")


def test_clip_factors_by_hand() -> None:
    lengths = torch.tensor([0.0, 1.0, 2.0, 4.0, torch.inf], dtype=torch.float64)
    assert clip_factors(lengths, None).tolist() == [1, 1, 1, 0.5, 0]
    assert clip_factors(lengths, 1.0).tolist() == [1, 1, 0.5, 0.25, 0]


@pytest.mark.parametrize("size", [1e3, 1e15, 1e30])
@pytest.mark.parametrize("stacked", [False, True])
def test_row_8_an_enormous_update_does_not_reach_the_memory(stacked: bool, size: float) -> None:
    """Neither the Gram matrix nor the predicted losses: the others' are as if it were short, and its own is bounded."""
    updates = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    updates[3] *= size
    origin = {"w": torch.zeros(6)}
    if stacked:
        replies: Any = StackedReplies(range(4), [ReplyPart(range(4), {"model": {"params": {"w": updates}}})])
    else:
        replies = LocalReplies(range(4), [{"model": {"params": {"w": row}}} for row in updates])
    previous = {"w": -torch.ones(6)}
    found, plain = measure(replies, origin, previous, 0.5, None), measure(replies, origin, previous, 0.5)
    assert found.gram is not None and plain.gram is not None
    assert bool(found.gram.isfinite().all()) and bool(found.change.isfinite().all())
    most = updates[:3].norm(dim=1).median()
    assert float(found.gram.diagonal().max()) <= 1.8 * float(most**2) / 0.5
    torch.testing.assert_close(found.change[:3], plain.change[:3], rtol=1e-5, atol=1e-5)
    assert abs(float(found.change[3])) <= 1.5 * TRUSTED * float(most) * 6**0.5 / 0.5


@pytest.mark.parametrize("method", [cf.Robust(0.1), cf.ComFedL(outer=cf.KL(0.3)), cf.TERM(2.0)], ids=lambda m: m.name)
def test_row_8_robust_weights_that_undo_the_rule_are_warned_of(
    three_clients: cf.FederatedData, method: Algorithm
) -> None:
    model = nn.Linear(4, 3).double()
    with pytest.warns(UserWarning, match="reports a false loss gets nearly all the weight"):
        cf.fit(model, three_clients, replace(method, aggregate="geometric-median"), rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.fit(model, three_clients, method, rounds=1)
        cf.fit(model, three_clients, replace(method, defence="strong"), rounds=1)
        cf.fit(model, three_clients, cf.Robust(0.1, cap=1.5, aggregate="median"), rounds=1)


def test_buffers_beside_it_are_medians() -> None:
    models = [
        {"model": Model(params={"w": torch.full((2,), float(k))}, buffers={"seen": torch.tensor(k)})} for k in range(5)
    ]
    replies, weights = LocalReplies(range(5), models), torch.full((5,), 0.2, dtype=torch.float64)
    start = Model(params={"w": torch.zeros(2)}, buffers={"seen": torch.tensor(0)})
    found = cf.FedAvg(defence="strong").averaged(start, replies, weights)
    assert int(found["buffers"]["seen"]) == 2
    torch.testing.assert_close(found["params"]["w"], torch.full((2,), 2.0))
