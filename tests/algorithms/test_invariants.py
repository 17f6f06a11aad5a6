"""Equalities between methods, and limits: they hold whatever the numbers are."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import known_weights
from comfedl.algorithms.context import RoundContext
from comfedl.core.outer_functions import Coupled

quick = settings(max_examples=40, deadline=None, derandomize=True)

SIZES = (12, 5, 30, 3, 8, 20)


def clients(count: int = len(SIZES)) -> dict[str, tuple[Tensor, Tensor]]:
    """Clients of unequal size, each with its own labels, in float64."""
    generator = torch.Generator().manual_seed(7)

    def client(i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(SIZES[i], 4, generator=generator, dtype=torch.float64) + 0.3 * i
        return x, ((x.sum(dim=1) > i).long() + (x[:, 0] > 0.3 * i).long() + i) % 3

    return {"abcdef"[i]: client(i) for i in range(count)}


def model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).double()


COMMON: dict[str, Any] = {"lr": 0.3, "local_steps": 3, "batch_size": 4}
FULL: dict[str, Any] = {"lr": 0.3, "local_steps": 1, "batch_size": None}


def trained(algorithm: Algorithm, data: dict[str, tuple[Tensor, Tensor]] | None = None, **options: Any) -> cf.Result:
    return cf.fit(model(), cf.FederatedData(data or clients()), algorithm, **{"rounds": 4, **options})


def apart(one: cf.Result, other: cf.Result) -> float:
    return max(float((one.params[name] - other.params[name]).abs().max()) for name in one.params)


def same(one: cf.Result, other: cf.Result) -> bool:
    return all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def local_losses(linear: nn.Linear, data: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([cross_entropy(linear(x), y) for x, y in data.values()])


# 1. Limits of gamma.


@pytest.mark.filterwarnings("ignore:With one client per round")
@pytest.mark.parametrize("taking_part", [None, 1, 2, 5])
@pytest.mark.parametrize("inner", [None, cf.Adapt(0.2)])
def test_a_large_gamma_is_uniform_averaging(taking_part: int | None, inner: cf.Adapt | None) -> None:
    """Also where only some take part: every participant counts 1 / m, those seen long ago change nothing."""
    plain = cf.ComFedL(inner=inner, **COMMON) if inner else cf.FedAvg(weighting="uniform", **COMMON)
    one = trained(cf.ComFedL(inner=inner, outer=cf.KL(1e9), **COMMON), clients_per_round=taking_part)
    other = trained(plain, clients_per_round=taking_part)
    assert apart(one, other) < 1e-8
    assert [row["weight"] for row in one.clients] == pytest.approx([row["weight"] for row in other.clients], abs=1e-8)


def test_a_small_gamma_is_the_worst_client() -> None:
    """One round: the model moves to where the worst client of the model received ended."""
    losses = local_losses(model(), clients()).tolist()
    worst = "abcdef"[int(np.argmax(losses))]
    everybody = trained(cf.ComFedL(outer=cf.KL(1e-4), **COMMON), rounds=1)
    alone = trained(cf.FedAvg(**COMMON), {worst: clients()[worst]}, rounds=1)
    assert apart(everybody, alone) < 1e-12
    assert {row["client"]: row["weight"] for row in everybody.clients}[worst] == pytest.approx(1)


def test_weights_move_from_uniform_to_the_worst_as_gamma_falls() -> None:
    worst = int(local_losses(model(), clients()).argmax())
    shares = []
    for gamma in (100.0, 10.0, 1.0, 0.5, 0.1, 0.01):
        result = trained(cf.ComFedL(outer=cf.KL(gamma), **COMMON), rounds=1)
        shares.append(result.clients[worst]["weight"])
        assert sum(row["weight"] for row in result.clients) == pytest.approx(1)
    assert shares == sorted(shares) and shares[0] < 0.17 and shares[-1] > 0.99


# 2. The literal and the normalised direction.


@pytest.mark.parametrize("gamma", [0.5, 1.0, 5.0])
def test_literal_is_normalised_with_another_lr(gamma: float) -> None:
    """One local step, everybody present: the literal step is the normalised one with the lr times Z / gamma."""
    Z = float(torch.exp(local_losses(model(), clients()).detach() / gamma).mean())
    literal = trained(cf.ComFedL(outer=cf.Exp(gamma), **FULL), rounds=1)
    normalised = trained(cf.ComFedL(outer=cf.KL(gamma), **{**FULL, "lr": FULL["lr"] * Z / gamma}), rounds=1)
    assert apart(literal, normalised) < 1e-10 * Z / gamma


@pytest.mark.parametrize("gamma", [0.5, 1.0, 5.0])
def test_the_literal_step_descends_eq_6(gamma: float) -> None:
    start = model()
    torch.exp(local_losses(start, clients()) / gamma).mean().backward()
    found = trained(cf.ComFedL(outer=cf.Exp(gamma), **FULL), rounds=1)
    for name, part in start.named_parameters():
        torch.testing.assert_close(found.params[name], part.detach() - FULL["lr"] * part.grad, rtol=1e-10, atol=1e-10)


# 3. TERM.


@pytest.mark.parametrize("t", [0.1, 1.0, 5.0])
def test_term_is_kl(t: float) -> None:
    """Descent on TERM's objective (1/t) log mean exp(t f) is KL(1/t) with one local step."""
    start = model()
    for _ in range(4):
        start.zero_grad()
        term = torch.log(torch.exp(t * local_losses(start, clients())).mean()) / t
        term.backward()
        with torch.no_grad():
            for part in start.parameters():
                part -= FULL["lr"] * part.grad
    found = trained(cf.ComFedL(outer=cf.KL(1 / t), **FULL))
    for name, part in start.named_parameters():
        torch.testing.assert_close(found.params[name], part.detach(), rtol=0, atol=1e-10)
    term = torch.log(torch.exp(t * local_losses(start, clients())).mean()) / t
    assert found.rounds[-1]["objective"] == pytest.approx(term.item(), abs=1e-10)


def test_kl_descends_eq_5_where_the_client_steps_are_many() -> None:
    result = trained(cf.ComFedL(outer=cf.KL(0.2), lr=0.05, local_steps=3, batch_size=None), rounds=30)
    objectives = [row["objective"] for row in result.rounds]
    assert objectives == sorted(objectives, reverse=True)


# 10. Large losses.


@pytest.mark.parametrize("outer", [cf.KL(0.1), cf.KL(0.1, cap=2.0)])
@pytest.mark.parametrize("size", [1e4, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_losses_stay_finite(outer: cf.KL, size: float, dtype: torch.dtype) -> None:
    """One client reports a loss of this size; the others are ordinary."""
    data = {name: (x.to(dtype), y.to(dtype)) for name, (x, y) in clients().items()}
    data["a"] = (data["a"][0], data["a"][1] + size)
    result = cf.fit(
        nn.Linear(4, 1).to(dtype),
        cf.FederatedData(data),
        cf.ComFedL(outer=outer, lr=1e-3, local_steps=2),
        loss=lambda output, y: (output[:, 0] - y).abs().mean(),
        rounds=3,
    )
    assert all(bool(torch.isfinite(part).all()) for part in result.params.values())
    for number in (1, 2, 3):
        weights = [row["weight"] for row in result.clients if row["round"] == number]
        assert sum(weights) == pytest.approx(1, abs=1e-9)
        assert max(weights) == pytest.approx(weights[0]) == pytest.approx(1.0 if outer.cap is None else 2 / 6)
    assert math.isfinite(result.rounds[-1]["objective"])


# 13. Small clients and clients that are never asked.


@pytest.mark.parametrize("algorithm", [cf.FedAvg(batch_size=64), cf.ComFedL(outer=cf.KL(0.2), batch_size=64)])
def test_a_client_smaller_than_a_batch_trains(algorithm: Algorithm) -> None:
    start = model()
    for samples in (1, 3):
        x, y = clients()["a"]
        result = trained(algorithm, {"a": (x[:samples], y[:samples])})
        assert all(bool((result.params[name] != part).all()) for name, part in start.named_parameters())
        assert result.rounds[-1]["train.loss.mean"] < local_losses(start, {"a": (x[:samples], y[:samples])}).item()


def test_a_small_client_moves_the_common_model() -> None:
    """Not only when alone: without its data the model is another."""
    data = clients()
    x, y = data["d"]
    one = trained(cf.FedAvg(weighting="uniform", **{**COMMON, "batch_size": 16}), data)
    other = trained(cf.FedAvg(weighting="uniform", **{**COMMON, "batch_size": 16}), {**data, "d": (x + 1, y)})
    assert apart(one, other) > 1e-3


METHODS = [
    cf.FedAvg(**COMMON),
    cf.ComFedL(outer=cf.KL(0.2), **COMMON),
    cf.ComFedL(outer=cf.KL(0.2, cap=1.5), inner=cf.Adapt(0.1), **COMMON),
    cf.ComFedL(outer=cf.Exp(5.0), **COMMON),
]


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_client_never_sampled_changes_nothing(algorithm: Algorithm) -> None:
    one = trained(algorithm, clients_per_round=2, rounds=2)
    asked = {row["client"] for row in one.clients if row["weight"] > 0}
    idle = sorted(set("abcdef") - asked)
    assert idle
    data = clients()
    for name in idle:
        x, y = data[name]
        data[name] = (x.repeat(3, 1) * 5 - 2, (y.repeat(3) + 1) % 3)
    other = trained(algorithm, data, clients_per_round=2, rounds=2)
    assert same(one, other)
    assert [row["weight"] for row in one.clients] == [row["weight"] for row in other.clients]
    assert one.rounds[-1]["train.loss.mean"] != other.rounds[-1]["train.loss.mean"]


def test_a_client_that_is_sampled_changes_something() -> None:
    """The counterpart of the test above."""
    one = trained(cf.FedAvg(**COMMON), clients_per_round=2, rounds=2)
    asked = next(row["client"] for row in one.clients if row["weight"] > 0)
    data = clients()
    data[asked] = (data[asked][0] + 1, data[asked][1])
    assert apart(one, trained(cf.FedAvg(**COMMON), data, clients_per_round=2, rounds=2)) > 1e-3


# Partial participation.


class Nobody:
    """As much of an engine as sampling needs."""

    names = tuple("abcde")
    sizes = np.ones(5, dtype=np.int64)


@pytest.mark.parametrize("taking_part", [1, 2, 4])
def test_every_set_of_clients_is_equally_likely(taking_part: int) -> None:
    places = {chosen: i for i, chosen in enumerate(combinations(range(5), taking_part))}
    rounds = 300 * len(places)
    seen = [places[tuple(RoundContext(s, 0, taking_part, Nobody()).sample())] for s in range(1, rounds + 1)]
    assert chisquare(np.bincount(seen, minlength=len(places))).pvalue > 1e-3


def test_everybody_is_everybody() -> None:
    assert RoundContext(3, 0, 5, Nobody()).sample() == [0, 1, 2, 3, 4]


def test_fedavg_normalises_over_those_who_take_part() -> None:
    result = trained(cf.FedAvg(**COMMON), clients_per_round=3)
    for number in range(1, 5):
        weights = {row["client"]: row["weight"] for row in result.clients if row["round"] == number}
        present = {name: SIZES["abcdef".index(name)] for name, weight in weights.items() if weight > 0}
        assert len(present) == 3
        expected = {name: size / sum(present.values()) for name, size in present.items()}
        assert {name: weights[name] for name in present} == pytest.approx(expected)


losses = st.lists(st.floats(0, 10) | st.just(math.nan), min_size=1, max_size=8)
outers = st.builds(cf.KL, st.floats(0.01, 50)) | st.builds(cf.KL, st.floats(0.01, 50), cap=st.floats(1, 8))


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@quick
@given(losses, outers, st.data())
def test_known_weights(values: list[float], outer: Coupled, data: st.DataObject) -> None:
    """The outer's weights of the clients that are known; for a softmax, those of a few are these, scaled."""
    known = [i for i, value in enumerate(values) if not math.isnan(value)]
    if not known:
        return
    duals = known_weights(outer, vector(values))
    r = outer.weights(vector([values[i] for i in known]))
    np.testing.assert_array_equal(duals[known], r)
    assert float(duals.sum()) == pytest.approx(1)
    chosen = sorted(data.draw(st.sets(st.sampled_from(known), min_size=1)))
    found, present = outer.weights(vector([values[i] for i in chosen])), duals[chosen]
    assert float(found.sum()) == pytest.approx(1)
    if isinstance(outer, cf.KL) and outer.cap is None and float(present.min()) > 1e-200:
        np.testing.assert_allclose(found, present / present.sum(), rtol=1e-9)


@quick
@given(st.lists(st.floats(0, 10), min_size=1, max_size=6), outers, st.integers(1, 3))
def test_clients_never_seen_are_left_out(values: list[float], outer: Coupled, unseen: int) -> None:
    duals = known_weights(outer, vector([*values, *[math.nan] * unseen]))
    assert torch.equal(duals[: len(values)], known_weights(outer, vector(values)))
    assert not bool(duals[len(values) :].any())


def test_a_liar_stays_within_its_cap_whoever_is_present() -> None:
    values, outer = vector([1e6, 0.1, 5.0, 0.2, 0.15]), cf.KL(0.05, cap=1.5)
    for m in (2, 3, 4, 5):
        for chosen in combinations(range(5), m):
            assert float(outer.weights(values[[*chosen]]).max()) <= 1.5 / m + 1e-12


def test_a_round_uses_the_last_known_losses() -> None:
    """KL with two of six: rebuilt from who took part and the losses at the models they received."""
    result = trained(cf.ComFedL(outer=cf.KL(0.5), **COMMON), clients_per_round=2, rounds=6)
    rows = {(row["round"], row["client"]): row for row in result.clients}
    before = dict(zip("abcdef", local_losses(model(), clients()).tolist(), strict=True))
    table = dict.fromkeys("abcdef", math.nan)
    for number in range(1, 7):
        present = [name for name in "abcdef" if rows[number, name]["weight"] > 0]
        table |= {name: before[name] for name in present}
        expected = cf.KL(0.5).weights(vector([table[name] for name in present]))
        duals = known_weights(cf.KL(0.5), vector(list(table.values())))
        assert [rows[number, name]["weight"] for name in present] == pytest.approx(expected.tolist(), abs=1e-9)
        assert [rows[number, name]["dual"] for name in "abcdef"] == pytest.approx(duals.tolist(), abs=1e-9)
        before = {name: rows[number, name]["train.loss"] for name in "abcdef"}


# Traffic, counted from what travels.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("taking_part", [None, 2])
def test_traffic(dtype: torch.dtype, taking_part: int | None) -> None:
    """FedAvg moves the model down and up; KL one more number up a participant; evaluation is not counted."""
    linear = nn.Linear(4, 3).to(dtype)
    model_bytes = 15 * dtype.itemsize
    for algorithm, extra in (
        (cf.FedAvg(**COMMON), 0),
        (cf.ComFedL(**COMMON), 0),
        (cf.ComFedL(outer=cf.Exp(5.0), **COMMON), 0),
        (cf.ComFedL(inner=cf.Adapt(0.1), **COMMON), 0),
        (cf.ComFedL(outer=cf.KL(0.5), **COMMON), dtype.itemsize),
        (cf.ComFedL(outer=cf.KL(0.5), inner=cf.Adapt(0.1), **COMMON), dtype.itemsize),
    ):
        result = cf.fit(linear, cf.FederatedData(clients()), algorithm, rounds=3, clients_per_round=taking_part)
        trips = 3 * (taking_part or len(SIZES))
        assert result.traffic == {"up_bytes": trips * (model_bytes + extra), "down_bytes": trips * model_bytes}
        assert [row["up_bytes"] for row in result.rounds] == [
            (i + 1) * result.traffic["up_bytes"] // 3 for i in range(3)
        ]
