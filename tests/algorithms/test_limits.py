"""Where methods meet: every method's plain limit is uniform averaging, every robust limit the worst client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.context import RoundContext
from helpers.reference import (
    SIZES,
    Array,
    Normed,
    apart,
    batchable,
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
)

N, LR, STEPS = len(SIZES), 0.3, 3
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
BATCHED: dict[str, Any] = {**FULL, "batch_size": 4}


def outer_limits(options: dict[str, Any]) -> dict[str, Algorithm]:
    """Methods that draw the batches of FedAvg, where they are uniform averaging."""
    return {
        "comfedl": cf.ComFedL(**options),
        "cvar at level 0": cf.ComFedL(outer=cf.CVaR(0.0), **options),
        "chi-square without room": cf.ComFedL(outer=cf.ChiSquare(0.0), **options),
        "kl with a large gamma": cf.ComFedL(outer=cf.KL(1e13), **options),
        "kl with cap 1": cf.ComFedL(outer=cf.KL(0.01, cap=1.0), **options),
        "power 0": cf.ComFedL(outer=cf.Power(0.0), **options),
        "term without tilt": cf.TERM(1e-13, **options),
        "q-fedavg with q 0": cf.QFedAvg(q=0.0, **options),
        "afl without dual step": cf.AFL(dual_lr=0.0, average=False, **options),
        "ditto": cf.Ditto(lam=0.7, weighting="uniform", **options),
    }


def meta_limits(options: dict[str, Any]) -> dict[str, Algorithm]:
    """Meta-learning that adapts by nothing."""
    return {
        "fedmaml": cf.FedMAML(0.0, **options),
        "fedmaml, two steps": cf.FedMAML(0.0, adapt_steps=2, **options),
        "fedmaml, first order": cf.FedMAML(0.0, "first", **options),
        "fedmaml, hessian-free": cf.FedMAML(0.0, "hessian-free", **options),
        "tr-maml": cf.TRMAML(0.0, 0.0, **options),
        "damaml": cf.DAMAML(0.0, 1e13, **options),
        "damaml with cap 1": cf.DAMAML(0.0, 0.01, cap=1.0, **options),
    }


def uniform(options: dict[str, Any]) -> cf.FedAvg:
    return cf.FedAvg(weighting="uniform", **options)


@pytest.mark.parametrize("name", outer_limits(FULL) | meta_limits(FULL))
def test_plain_limits(name: str) -> None:
    method = (outer_limits(FULL) | meta_limits(FULL))[name]
    found = run(method)
    assert apart(found, run(uniform(FULL))) < 1e-11
    np.testing.assert_allclose(recorded(found, "weight"), 1 / N, atol=1e-12)


@pytest.mark.parametrize("name", outer_limits(BATCHED))
def test_plain_limits_with_batches(name: str) -> None:
    for some in (None, 2) if name != "afl without dual step" else (None,):  # AFL asks everybody
        found = run(outer_limits(BATCHED)[name], clients_per_round=some)
        assert apart(found, run(uniform(BATCHED), clients_per_round=some)) < 1e-11


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("name", outer_limits(FULL) | meta_limits(FULL))
def test_plain_limits_with_batch_norm(name: str, running: bool) -> None:
    """Parameters and buffers; each method's buffers take its weights, and its meta-steps move them once."""
    method = (outer_limits(FULL) | meta_limits(FULL))[name]
    plain, found = (cf.fit(Normed(running), batchable(), each, rounds=3) for each in (uniform(FULL), method))
    assert apart(found, plain) < 1e-10
    assert not running or int(found.buffers["layers.1.num_batches_tracked"]) == 3 * STEPS
    assert bool(found.buffers) == running


@pytest.mark.parametrize("running", [True, False])
def test_drfa_is_uniform_averaging_where_everybody_is_drawn_once(
    running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once:
        def choice(self, n: int, size: int, replace: bool, p: Array) -> Array:
            return np.arange(n)

        def integers(self, low: int, high: int) -> int:
            return 2

    plain = cf.fit(Normed(running), batchable(), uniform(BATCHED), rounds=3)
    monkeypatch.setattr(RoundContext, "rng", lambda self, purpose: Once())
    found = cf.fit(Normed(running), batchable(), cf.DRFA(dual_lr=0.0, **BATCHED), rounds=3)
    assert apart(found, plain) < 1e-12


@pytest.mark.parametrize("running", [True, False])
def test_deltafl_is_fedavg_at_level_0_with_batch_norm(running: bool) -> None:
    plain, found = (
        cf.fit(Normed(running), batchable(), method, rounds=3)
        for method in (cf.FedAvg(**BATCHED), cf.DeltaFL(0.0, **BATCHED))
    )
    assert same(plain, found)


def test_chi_square_tends_to_uniform_as_its_root() -> None:
    plain = run(uniform(FULL))
    gaps = [apart(run(cf.ComFedL(outer=cf.ChiSquare(rho), **FULL)), plain) for rho in (1e-4, 1e-6, 1e-8)]
    assert 8 < gaps[0] / gaps[1] < 12 and 8 < gaps[1] / gaps[2] < 12


def test_kl_tends_to_uniform_as_gamma_grows() -> None:
    plain = run(uniform(FULL))
    gaps = [apart(run(cf.ComFedL(outer=cf.KL(gamma), **FULL)), plain) for gamma in (1e2, 1e4, 1e6)]
    assert 90 < gaps[0] / gaps[1] < 110 and 90 < gaps[1] / gaps[2] < 110


# The worst client.


def follow(sign: int) -> tuple[Array, list[Array]]:
    """Every round goes to where the client with the largest (or smallest) loss of the model sent has ended."""
    clients, W, weights = by_hand_clients(), start(), []
    for _ in range(5):
        k = int(np.argmax([sign * loss(W, c) for c in clients]))
        weights.append(np.eye(N)[k])
        W = locally(W, lambda V, k=k: gradient(V, clients[k]), LR, STEPS)[-1]
    return W, weights


@pytest.mark.parametrize(
    ("method", "sign"),
    [
        (cf.ComFedL(outer=cf.CVaR(0.8), **FULL), 1),
        (cf.ComFedL(outer=cf.CVaR(0.9999), **FULL), 1),
        (cf.ComFedL(outer=cf.KL(1e-5), **FULL), 1),
        (cf.ComFedL(outer=cf.KL(1e-5, cap=5.0), **FULL), 1),
        (cf.ComFedL(outer=cf.ChiSquare(2.0), **FULL), 1),
        (cf.ComFedL(outer=cf.ChiSquare(1e6), **FULL), 1),
        (cf.TERM(1e5, **FULL), 1),
        (cf.TERM(-1e5, **FULL), -1),
        (cf.DeltaFL(0.9999, **FULL), 1),
    ],
)
def test_robust_limits(method: Algorithm, sign: int) -> None:
    W, weights = follow(sign)
    found = run(method, 5)
    close(matrix(found.params), W)
    np.testing.assert_allclose(recorded(found, "weight"), weights, atol=1e-9)
    assert found.rounds[-1]["effective_clients"] == pytest.approx(1)


def test_the_worst_client_of_the_test_above_changes() -> None:
    assert len({int(weights.argmax()) for weights in follow(1)[1]}) > 1


def test_a_large_q_weighs_by_the_largest_loss() -> None:
    """q-FedAvg does not go all the way to the worst client, its step is shorter; but of the step all is the worst's."""
    weights = recorded(run(cf.QFedAvg(q=300.0, **FULL), 1), "weight")[0]
    worst = int(np.argmax([loss(start(), c) for c in by_hand_clients()]))
    assert weights[worst] / weights.sum() > 0.999 and weights.sum() < 1


# The weights of CVaR and chi-square against a numerical maximum.

quick = settings(max_examples=60, deadline=None, derandomize=True)
values_of = st.lists(st.floats(0, 5) | st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=8)


def vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cvar_maximum(f: Array, level: float) -> float:
    """The linear programme: max r f with 0 <= r <= 1 / (n (1 - level)), sum r = 1."""
    most = min(1.0, 1 / (len(f) * (1 - level)))
    found = linprog(-f, A_eq=np.ones((1, len(f))), b_eq=[1.0], bounds=[(0, most)] * len(f))
    assert found.status == 0
    return -float(found.fun)


@quick
@given(values_of, st.sampled_from([0.0, 0.25, 0.5, 0.9]) | st.floats(0, 0.99))
@example([1.0], 0.5)
@example([2.0, 2.0, 2.0], 0.4)
@example([1.0, 1.0 + 1e-15, 1.0 - 1e-15, 0.0], 0.6)
def test_cvar_weights_are_the_maximum(values: list[float], level: float) -> None:
    f, n = np.array(values), len(values)
    r = cf.CVaR(level).weights(vector(values)).numpy()
    assert r.min() >= 0 and r.sum() == pytest.approx(1, abs=1e-9) and r.max() <= 1 / (n * (1 - level)) + 1e-9
    assert r @ f == pytest.approx(cvar_maximum(f, level), abs=1e-7)
    assert float(cf.CVaR(level).objective(vector(values))) == pytest.approx(r @ f, abs=1e-12)
    for value in {*values}:  # equal losses, equal weights
        assert np.ptp(r[f == value]) < 1e-12


def chi_square_maximum(f: Array, rho: float) -> Array:
    """r proportional to max(f - mu, 0), mu by bisection; or all on the largest, where the ball holds that."""
    n, gap = len(f), (f - f.max()).astype(np.longdouble)
    top = gap == 0
    if n / top.sum() - 1 <= 2 * rho:
        return (top / top.sum()).astype(np.float64)
    low, high = -200.0, 200.0  # of the logarithm of max f - mu
    for _ in range(300):
        middle = (low + high) / 2
        r = np.maximum(gap + np.exp(np.longdouble(middle)), 0)
        r = r / r.sum()
        low, high = (middle, high) if np.square(n * r - 1).sum() / (2 * n) > rho else (low, middle)
    return r.astype(np.float64)


NEAR_TIES = [[0.0, *(5.0 + k * gap for k in range(4))] for gap in (1e-6, 1e-8, 1e-10, 1e-12, 1e-15)]


def check_chi_square(values: Sequence[float], rho: float) -> tuple[Array, Array]:
    f, n = np.array(values), len(values)
    r, best = cf.ChiSquare(rho).weights(vector(values)).numpy(), chi_square_maximum(f, rho)
    assert r.min() >= 0 and r.sum() == pytest.approx(1, abs=1e-9)
    assert np.square(n * r - 1).sum() / (2 * n) <= rho * (1 + 1e-3) + 1e-9, "outside the ball"
    assert r @ f >= best @ f - 1e-7
    assert float(cf.ChiSquare(rho).objective(vector(values))) == pytest.approx(r @ f, abs=1e-12)
    return r, best


@quick
@given(values_of, st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5]) | st.floats(0, 5))
@example([1.0], 0.5)
@example([2.0, 2.0, 2.0], 0.4)
@example([3.0, 3.0, 1.0, 0.0], 0.5)
@example([3.0, 3.0, 1.0, 0.0], 0.6)
def test_chi_square_weights_are_the_maximum(values: list[float], rho: float) -> None:
    r, best = check_chi_square(values, rho)
    distinct = np.diff(np.unique(values))
    if (len(distinct) == 0 or distinct.min() > 1e-3) and (rho == 0 or rho > 1e-6):
        np.testing.assert_allclose(r, best, atol=1e-6)


@pytest.mark.parametrize("rho", [0.05, 0.128, 0.3])
@pytest.mark.parametrize("values", NEAR_TIES)
def test_chi_square_weights_stay_in_the_ball_where_losses_are_all_but_equal(values: list[float], rho: float) -> None:
    """Four clients with the same loss but for rounding, and one with none: nobody may take the whole model."""
    check_chi_square(values, rho)


def test_chi_square_against_a_solver() -> None:
    """The bisection above is itself a closed form: one more, that knows nothing of the solution."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        n, rho = int(rng.integers(2, 7)), float(rng.uniform(0.02, 1.0))
        f = rng.uniform(0, 3, size=n)
        found = minimize(
            lambda r, f=f: -r @ f,
            np.full(n, 1 / n),
            jac=lambda r, f=f: -f,
            bounds=[(0, 1)] * n,
            constraints=[
                {"type": "eq", "fun": lambda r: r.sum() - 1},
                {"type": "ineq", "fun": lambda r, n=n, rho=rho: rho - np.square(n * r - 1).sum() / (2 * n)},
            ],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert float(cf.ChiSquare(rho).objective(vector(f.tolist()))) == pytest.approx(found.x @ f, abs=1e-6)


@pytest.mark.parametrize(
    "outer",
    [cf.CVaR(0.0), cf.ChiSquare(0.0), cf.KL(1e13), cf.KL(0.01, cap=1.0), cf.Tilt(1e-13), cf.Tilt(-1e-13)],
)
@pytest.mark.parametrize("values", [[1.0], [0.3, 0.3, 0.3], [0.1, 5.0, 2.0, 2.0], [0.0, 1e-9, 3.0]])
def test_the_weights_of_plain_limits_are_uniform(outer: Any, values: list[float]) -> None:
    np.testing.assert_allclose(outer.weights(vector(values)), 1 / len(values), atol=1e-12)
    assert float(outer.objective(vector(values))) == pytest.approx(np.mean(values), abs=1e-9)


@pytest.mark.parametrize("outer", [cf.CVaR(0.999), cf.ChiSquare(50.0), cf.KL(1e-6), cf.Tilt(1e6)])
@pytest.mark.parametrize("values", [[1.0], [0.3, 0.3, 0.3], [0.1, 5.0, 2.0, 2.0], [4.0, 1.0, 4.0]])
def test_the_weights_of_robust_limits_are_shared_by_the_worst(outer: Any, values: list[float]) -> None:
    worst = np.array(values) == max(values)
    np.testing.assert_allclose(outer.weights(vector(values)), worst / worst.sum(), atol=1e-9)
    assert float(outer.objective(vector(values))) == pytest.approx(max(values), abs=1e-5)


@pytest.mark.parametrize("outer", [cf.CVaR(0.6), cf.ChiSquare(0.3), cf.KL(0.5), cf.KL(0.5, cap=1.5), cf.Tilt(-2.0)])
def test_the_weights_do_not_depend_on_a_common_shift_or_on_the_order(outer: Any) -> None:
    values = [0.1, 5.0, 2.0, 2.0, 0.7]
    r = outer.weights(vector(values))
    for shift in (1e3, 1e6):
        np.testing.assert_allclose(outer.weights(vector(values) + shift), r, atol=1e-8)
    order = [3, 0, 4, 1, 2]
    np.testing.assert_allclose(outer.weights(vector(values)[order]), r[order], atol=1e-12)
    assert math.isclose(float(r[2]), float(r[3]), rel_tol=1e-12)
