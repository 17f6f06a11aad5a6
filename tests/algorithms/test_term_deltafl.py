"""TERM, Delta-FL and the further outer functions of ComFedL, sections 7e and 7bis, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from helpers.reference import (
    SIZES,
    Array,
    Client,
    apart,
    by_hand_clients,
    close,
    gradient,
    locally,
    loss,
    matrix,
    recorded,
    run,
    same,
    start,
    taking_part,
)

N, LR, STEPS, ROUNDS = len(SIZES), 0.3, 3, 4
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
BATCHED: dict[str, Any] = {**FULL, "batch_size": 4}
COUNTS = np.array(list(SIZES.values()))
EVERYBODY = [list(range(N))] * ROUNDS

Weights = Callable[[Array], Array]


def plain(W: Array, client: Client) -> Array:
    return gradient(W, client)


def by_hand(
    weights: Weights, direction: Callable[[Array, Client], Array] = plain, rounds: int = ROUNDS
) -> tuple[Array, list[Array]]:
    """Rounds in which the server weighs by the losses of the model that it sent."""
    clients, W, used = by_hand_clients(), start(), []
    for _ in range(rounds):
        used.append(weights(np.array([loss(W, c) for c in clients])))
        ends = [locally(W, lambda V, c=c: direction(V, c), LR, STEPS)[-1] for c in clients]
        W = np.tensordot(used[-1], ends, axes=1)
    return W, used


def check(algorithm: Algorithm, weights: Weights) -> cf.Result:
    W, used = by_hand(weights)
    result = run(algorithm, ROUNDS)
    close(matrix(result.params), W)
    np.testing.assert_allclose(recorded(result, "weight"), used, atol=1e-9)
    return result


def last_losses(result: cf.Result) -> Array:
    return np.array([loss(matrix(result.params), client) for client in by_hand_clients()])


# TERM.


def tilted(t: float) -> Weights:
    return lambda f: np.exp(t * f) / np.exp(t * f).sum()


@pytest.mark.parametrize("t", [0.1, 1.0, 10.0, -0.1, -1.0, -10.0])
def test_term_by_hand(t: float) -> None:
    result = check(cf.TERM(t, **FULL), tilted(t))
    expected = np.log(np.exp(t * last_losses(result)).mean()) / t
    assert result.rounds[-1]["objective"] == pytest.approx(expected, abs=1e-12)


def test_the_sign_of_t_decides_whom_it_favours() -> None:
    values = np.array([loss(start(), client) for client in by_hand_clients()])
    up, down = (recorded(run(cf.TERM(t, **FULL), 1), "weight")[0] for t in (3.0, -3.0))
    assert np.argmax(up) == np.argmax(values) == np.argmin(down)
    assert np.argmin(up) == np.argmin(values) == np.argmax(down)


@pytest.mark.parametrize("some", [None, 2])
@pytest.mark.parametrize("options", [FULL, BATCHED])
def test_term_is_kl_with_gamma_1_over_t(some: int | None, options: dict[str, Any]) -> None:
    """Invariant 3."""
    term, kl = (
        run(method, 5, clients_per_round=some)
        for method in (cf.TERM(4.0, **options), cf.ComFedL(outer=cf.KL(0.25), **options))
    )
    assert same(term, kl) and term.rounds == kl.rounds and term.clients == kl.clients


@pytest.mark.parametrize("t", [1e-9, -1e-9])
def test_a_small_tilt_is_uniform_averaging(t: float) -> None:
    assert apart(run(cf.TERM(t, **BATCHED)), run(cf.FedAvg(weighting="uniform", **BATCHED))) < 1e-8


@pytest.mark.parametrize("t", [0.0, math.nan, math.inf, "1", True])
def test_a_tilt_that_is_none_is_refused(t: Any) -> None:
    with pytest.raises(cf.ConfigError):
        cf.TERM(t)


# Delta-FL.


def tail(level: float) -> Weights:
    """The clients with a loss at or above the quantile, weighed by samples.

    The quantile by its definition: the least loss such that clients with at most that loss hold the share ``level``.
    """

    def weights(f: Array) -> Array:
        quantile = min(value for value in f if COUNTS[f <= value].sum() >= level * COUNTS.sum() * (1 - 1e-12))
        kept = COUNTS * (f >= quantile)
        return kept / kept.sum()

    return weights


@pytest.mark.parametrize("level", [0.0, 0.1, 0.2, 0.5, 0.7, 0.9, 0.999])
def test_deltafl_by_hand(level: float) -> None:
    result = check(cf.DeltaFL(level, **FULL), tail(level))
    assert result.rounds[-1]["participants"] == np.count_nonzero(recorded(result, "weight")[-1])


def test_the_levels_above_keep_different_clients() -> None:
    kept = [np.count_nonzero(by_hand(tail(level))[1][0]) for level in (0.0, 0.1, 0.2, 0.5, 0.7, 0.9, 0.999)]
    assert kept == sorted(kept, reverse=True) and kept[0] == N and kept[-1] == 1 and len({*kept}) >= 4


def test_deltafl_by_hand_with_some_of_the_clients() -> None:
    """The quantile is that of the sampled clients alone."""
    clients, W = by_hand_clients(), start()
    sets = [[0, 1, 2], [1, 2, 4], [0, 3, 4], [0, 2, 4]]
    for chosen in sets:
        f, n = np.array([loss(W, clients[k]) for k in chosen]), COUNTS[chosen]
        quantile = min(value for value in f if n[f <= value].sum() >= 0.6 * n.sum())
        share = n * (f >= quantile)
        ends = [locally(W, lambda V, k=k: gradient(V, clients[k]), LR, STEPS)[-1] for k in chosen]
        W = np.tensordot(share / share.sum(), ends, axes=1)
    with taking_part(sets):
        result = run(cf.DeltaFL(0.6, **FULL), len(sets), clients_per_round=3)
    close(matrix(result.params), W)


@pytest.mark.parametrize("some", [None, 2])
def test_deltafl_at_level_0_is_fedavg(some: int | None) -> None:
    assert same(
        run(cf.DeltaFL(0.0, **BATCHED), clients_per_round=some), run(cf.FedAvg(**BATCHED), clients_per_round=some)
    )


def test_deltafl_keeps_all_of_equal_losses() -> None:
    """Two clients with the same data and the same loss: neither the order nor the name decides."""
    x, y = np.ones((3, 2)), np.array([0, 1, 2])
    fed = cf.FederatedData({"a": (x, y), "b": (x, y), "c": (0 * x, y)})
    result = cf.fit(cf.models.logistic((2,), 3).double(), fed, cf.DeltaFL(0.9, **FULL), rounds=1)
    assert [row["weight"] for row in result.clients] == pytest.approx([1 / 3, 1 / 3, 1 / 3])


def test_deltafl_trains_the_model_that_it_sent_this_round() -> None:
    """The model travels with the question for the loss; a client asked to train later starts from the newest."""
    sets = [[0, 1], [0, 1], [2, 3], [0, 1]]
    with taking_part(sets):
        one = run(cf.DeltaFL(0.0, **BATCHED), 4, clients_per_round=2)
        other = run(cf.FedAvg(**BATCHED), 4, clients_per_round=2)
    assert same(one, other)


@pytest.mark.parametrize("level", [-0.1, 1.0, 1.5])
def test_deltafl_refuses_levels_out_of_range(level: float) -> None:
    with pytest.raises(cf.ConfigError):
        cf.DeltaFL(level)


# ComFedL with the other outer functions.


def worst_share(level: float) -> Weights:
    """CVaR by filling: the worst client first, each with at most 1 / (n (1 - level))."""

    def weights(f: Array) -> Array:
        left, r = 1.0, np.zeros(N)
        for k in np.argsort(-f):
            r[k] = min(left, 1 / (N * (1 - level)))
            left -= r[k]
        return r

    return weights


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5, 0.65, 0.9])
def test_cvar_by_hand(level: float) -> None:
    result = check(cf.ComFedL(outer=cf.CVaR(level), **FULL), worst_share(level))
    f = last_losses(result)
    assert result.rounds[-1]["objective"] == pytest.approx(worst_share(level)(f) @ f, abs=1e-12)


def chi_square(rho: float) -> Weights:
    """r proportional to max(f - mu, 0), with mu by bisection such that (1/2n) sum (n r - 1)^2 is rho."""

    def weights(f: Array) -> Array:
        low, high = f.min() - 1e7, f.max()
        for _ in range(300):
            mu = (low + high) / 2
            r = np.maximum(f - mu, 0)
            r = r / r.sum()
            low, high = (mu, high) if np.square(N * r - 1).sum() / (2 * N) < rho else (low, mu)
            if high - low < 1e-15 * abs(high):
                break
        return r

    return weights


@pytest.mark.parametrize("rho", [0.01, 0.2, 0.7, 1.5])
def test_chi_square_by_hand(rho: float) -> None:
    result = check(cf.ComFedL(outer=cf.ChiSquare(rho), **FULL), chi_square(rho))
    weights = recorded(result, "weight")[-1]
    assert np.square(N * weights - 1).sum() / (2 * N) == pytest.approx(rho, abs=1e-9)
    f = last_losses(result)
    assert result.rounds[-1]["objective"] == pytest.approx(chi_square(rho)(f) @ f, abs=1e-9)


def uniform(f: Array) -> Array:
    return np.full(N, 1 / N)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 1.5])
def test_power_by_hand(q: float) -> None:
    """The literal q-FFL: each local gradient by f^q at that very point, the plain mean at the server."""
    W, _ = by_hand(uniform, lambda V, c: loss(V, c) ** q * gradient(V, c))
    result = run(cf.ComFedL(outer=cf.Power(q), **FULL), ROUNDS)
    close(matrix(result.params), W)
    expected = np.power(last_losses(result), q + 1).mean() / (q + 1)
    assert result.rounds[-1]["objective"] == pytest.approx(expected, abs=1e-12)


def test_custom_by_hand() -> None:
    """g(y) = log(1 + y^2), with the slope 2 y / (1 + y^2)."""
    W, _ = by_hand(uniform, lambda V, c: 2 * loss(V, c) / (1 + loss(V, c) ** 2) * gradient(V, c))
    outer = cf.Custom(lambda y: (1 + y**2).log(), lambda y: 2 * y / (1 + y**2))
    result = run(cf.ComFedL(outer=outer, **FULL), ROUNDS)
    close(matrix(result.params), W)
    expected = np.log(1 + last_losses(result) ** 2).mean()
    assert result.rounds[-1]["objective"] == pytest.approx(expected, abs=1e-12)


def test_power_0_and_custom_identity_are_averaging() -> None:
    plain_run = run(cf.FedAvg(weighting="uniform", **BATCHED))
    identity = cf.Custom(lambda y: y, lambda y: y**0)
    for outer in (cf.Power(0.0), identity):
        assert apart(run(cf.ComFedL(outer=outer, **BATCHED)), plain_run) < 1e-12
