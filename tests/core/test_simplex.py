"""Weights on the simplex: Lemma 1 against a numerical maximum, and properties that hold for all inputs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as st
from scipy.optimize import minimize
from torch import Tensor

from comfedl.core.simplex import capped_weights, chi_square_weights, log_mean_exp, project, softmax_weights, top_weights

quick = settings(max_examples=80, deadline=None, derandomize=True)

losses = st.lists(st.floats(-20, 20), min_size=1, max_size=9)
wild = st.lists(st.floats(-1e30, 1e30) | st.floats(0, 1e-30) | st.floats(0, 10), min_size=1, max_size=9)
gammas = st.floats(0.05, 50)
caps = st.floats(1, 12)


def vector(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def regularised(r: np.ndarray, values: np.ndarray, gamma: float) -> float:
    """Eq. (4): sum_i r_i f_i - gamma * sum_i r_i log(n r_i)."""
    r = np.asarray(r)
    inside = np.where(r > 0, r * np.log(np.where(r > 0, len(r) * r, 1.0)), 0.0)
    return float(r @ values - gamma * inside.sum())


def maximise(values: np.ndarray, gamma: float, most: float) -> np.ndarray:
    """The numerical maximum of eq. (4) over the simplex with r_i <= most, by SLSQP from a feasible point."""
    n, scale = len(values), max(1.0, float(np.abs(values).max()))
    found = minimize(
        lambda r: -regularised(r, values, gamma) / scale,
        np.full(n, 1 / n),
        jac=lambda r: -(values - gamma * (np.log(n * np.maximum(r, 1e-300)) + 1)) / scale,
        bounds=[(1e-12, max(most, 1 / n))] * n,
        constraints={"type": "eq", "fun": lambda r: r.sum() - 1, "jac": lambda r: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return np.asarray(found.x)


CASES = [
    ([0.3, 2.3, 1.0], 0.2),
    ([0.3, 2.3, 1.0], 1.0),
    ([0.3, 2.3, 1.0], 50.0),
    ([1.0, 1.0, 1.0, 1.0], 0.5),
    ([-1.0, 0.0, 0.5, 0.6, 0.7], 0.4),
    ([5.0, 4.9, 0.1, 0.2, 0.3, 0.4, 2.0], 0.8),
]


@pytest.mark.parametrize(("values", "gamma"), CASES)
def test_lemma_1(values: list[float], gamma: float) -> None:
    """The maximum of eq. (4) is eq. (5), and it is taken at the softmax weights."""
    f = np.array(values)
    best = maximise(f, gamma, 1.0)
    r = softmax_weights(vector(values), gamma).numpy()
    np.testing.assert_allclose(r, best, atol=2e-5)
    assert regularised(r, f, gamma) == pytest.approx(float(log_mean_exp(vector(values), gamma)), abs=1e-12)
    assert regularised(best, f, gamma) == pytest.approx(float(log_mean_exp(vector(values), gamma)), abs=1e-8)


@pytest.mark.parametrize("cap", [1.1, 1.5, 2.0, 2.7])
@pytest.mark.parametrize(("values", "gamma"), CASES)
def test_lemma_1_with_cap(values: list[float], gamma: float, cap: float) -> None:
    f = np.array(values)
    best = maximise(f, gamma, cap / len(f))
    r = capped_weights(vector(values), gamma, cap).numpy()
    np.testing.assert_allclose(r, best, atol=2e-5)
    assert regularised(r, f, gamma) >= regularised(best, f, gamma) - 1e-10


@quick
@given(losses, gammas)
def test_softmax_weights_are_weights(values: list[float], gamma: float) -> None:
    r = softmax_weights(vector(values), gamma)
    assert bool((r >= 0).all()) and float(r.sum()) == pytest.approx(1, abs=1e-12)
    expected = np.exp((np.array(values) - max(values)) / gamma)
    np.testing.assert_allclose(r, expected / expected.sum(), atol=1e-12)


@quick
@given(losses, gammas, st.floats(-1e3, 1e3))
def test_a_common_shift_changes_nothing(values: list[float], gamma: float, shift: float) -> None:
    moved = vector(values) + shift
    np.testing.assert_allclose(softmax_weights(moved, gamma), softmax_weights(vector(values), gamma), atol=1e-9)
    assert float(log_mean_exp(moved, gamma) - shift) == pytest.approx(
        float(log_mean_exp(vector(values), gamma)), abs=1e-9
    )


@quick
@given(losses, gammas)
def test_the_slope_of_eq_5_is_the_softmax(values: list[float], gamma: float) -> None:
    """Invariant 2: autograd of gamma * LME."""
    f = vector(values).requires_grad_()
    (slope,) = torch.autograd.grad(log_mean_exp(f, gamma), f)
    np.testing.assert_allclose(slope, softmax_weights(f.detach(), gamma), atol=1e-12)


@quick
@given(losses, gammas)
def test_eq_5_lies_between_mean_and_maximum(values: list[float], gamma: float) -> None:
    found = float(log_mean_exp(vector(values), gamma))
    assert np.mean(values) - 1e-9 <= found <= max(values) + 1e-9


@pytest.mark.parametrize("gamma", [1e3, 1e6, 1e9, 1e12, 1e15, 1e18, 1e100])
def test_a_large_gamma_is_the_mean(gamma: float) -> None:
    """Eq. (5) tends to the mean, with an error of (max - min)^2 / (8 gamma) at most, not to the maximum."""
    values = vector([0.0, 1.0, 4.0])
    assert float(log_mean_exp(values, gamma)) == pytest.approx(5 / 3, abs=2 / gamma + 1e-12)
    np.testing.assert_allclose(softmax_weights(values, gamma), 1 / 3, atol=2 / gamma)
    np.testing.assert_allclose(capped_weights(values, gamma, 2.0), 1 / 3, atol=2 / gamma + 1e-15)


@pytest.mark.parametrize("gamma", [1e-2, 1e-3, 1e-9, 1e-100])
def test_a_small_gamma_is_the_worst_client(gamma: float) -> None:
    values = vector([0.0, 5.0, 1.0])
    assert float(log_mean_exp(values, gamma)) == pytest.approx(5, abs=2 * gamma)
    np.testing.assert_allclose(softmax_weights(values, gamma), [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(capped_weights(values, gamma, 3.0), [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(capped_weights(values, gamma, 2.0), [0, 2 / 3, 1 / 3], atol=1e-12)


@quick
@given(wild, st.floats(0.01, 100))
@example([1e4, 9999.0, 0.0], 0.1)
@example([1e30, 1e-30], 0.1)
def test_nothing_overflows(values: list[float], gamma: float) -> None:
    r, f = softmax_weights(vector(values), gamma), vector(values)
    assert float(r.sum()) == pytest.approx(1, abs=1e-9) and bool((r >= 0).all())
    assert min(values) * (1 + 1e-9 * math.copysign(1, -min(values))) - 1e-9 <= float(log_mean_exp(f, gamma))
    assert math.isfinite(float(log_mean_exp(f, gamma)))


@quick
@given(wild, st.floats(0.01, 100), caps)
@example([1e4, 9999.0, 0.0], 0.1, 2.0)
@example([1e17, 1.0, 0.9, 0.5], 0.1, 2.0)
def test_capped_weights_are_weights_whatever_is_reported(values: list[float], gamma: float, cap: float) -> None:
    r = capped_weights(vector(values), gamma, cap)
    assert bool(torch.isfinite(r).all()) and bool((r >= 0).all())
    assert float(r.max()) <= cap / len(values) * (1 + 1e-9)
    assert float(r.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("lie", [1e2, 1e6, 1e10, 1e15, 1e17, 1e30, 1e308])
def test_a_liar_leaves_the_others_their_weights(lie: float) -> None:
    """Whatever one client reports, it gets at most the cap, and the others share the rest by softmax."""
    honest = [1.0, 0.9, 0.5]
    r = capped_weights(vector([lie, *honest]), 0.1, 2.0)
    assert float(r[0]) == pytest.approx(0.5)
    np.testing.assert_allclose(r[1:], 0.5 * softmax_weights(vector(honest), 0.1), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capped_weights_in_either_precision(dtype: torch.dtype) -> None:
    """Even if a cap of n / k makes the number of capped clients an integer only up to rounding."""
    for n, k in itertools.combinations(range(1, 24), 2):
        n, k = k, n
        r = capped_weights(torch.linspace(0, 5, n, dtype=dtype), 0.01, n / k)
        assert bool(torch.isfinite(r).all()) and r.dtype == dtype
        assert float(r.sum()) == pytest.approx(1, abs=1e-4 if dtype == torch.float32 else 1e-10), (n, k)


@quick
@given(losses, gammas)
def test_cap_1_is_uniform(values: list[float], gamma: float) -> None:
    np.testing.assert_allclose(capped_weights(vector(values), gamma, 1.0), 1 / len(values), atol=1e-12)


@quick
@given(losses, gammas, st.floats(0, 5))
def test_a_cap_of_n_is_none(values: list[float], gamma: float, more: float) -> None:
    r = capped_weights(vector(values), gamma, len(values) + more)
    np.testing.assert_allclose(r, softmax_weights(vector(values), gamma), atol=1e-12)


@quick
@given(losses, gammas, caps, st.integers(0, 2**32 - 1))
def test_capped_weights_are_the_best_allowed(values: list[float], gamma: float, cap: float, seed: int) -> None:
    """In the simplex, below the cap, in the order of the values, and no random feasible point is better."""
    f, n = np.array(values), len(values)
    r = capped_weights(vector(values), gamma, cap).numpy()
    assert r.sum() == pytest.approx(1, abs=1e-9) and (r >= 0).all()
    assert r.max() <= cap / n * (1 + 1e-9)
    assert (np.diff(r[np.argsort(f, kind="stable")]) >= -1e-9).all()
    rng = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 10.0):
        other = rng.dirichlet(np.full(n, spread))
        if other.max() > cap / n:  # pull it towards uniform until it is allowed
            pull = (other.max() - cap / n) / max(other.max() - 1 / n, 1e-300)
            other = (1 - pull) * other + pull / n
        assert regularised(r, f, gamma) >= regularised(other, f, gamma) - 1e-9 * (1 + np.abs(f).max())
        near = 0.99 * r + 0.01 * other
        assert regularised(r, f, gamma) >= regularised(near, f, gamma) - 1e-9 * (1 + np.abs(f).max())


@quick
@given(losses, gammas, caps, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(values: list[float], gamma: float, cap: float, random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    f = vector(values)
    for weights in (lambda v: softmax_weights(v, gamma), lambda v: capped_weights(v, gamma, cap), project):
        np.testing.assert_allclose(weights(f[order]), weights(f)[order], atol=1e-10)


# The Euclidean projection, invariant 9.


@quick
@given(losses, st.floats(-1e3, 1e3))
def test_projection(values: list[float], shift: float) -> None:
    p = project(vector(values))
    assert bool((p >= 0).all()) and float(p.sum()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(project(p), p, atol=1e-12)
    np.testing.assert_allclose(project(vector(values) + shift), p, atol=1e-9)
    # Optimality: <v - p, q - p> <= 0 for every corner q of the simplex.
    gap = vector(values) - p
    assert float((gap - (gap * p).sum()).max()) <= 1e-9


@pytest.mark.parametrize("values", [[0.5, 0.5], [3.0, 0.0, 2.9], [-4.0, -4.1, -3.9, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5]])
def test_projection_is_the_nearest_point(values: list[float]) -> None:
    v, n = np.array(values), len(values)
    best = minimize(
        lambda p: ((p - v) ** 2).sum() / 2,
        np.full(n, 1 / n),
        jac=lambda p: p - v,
        bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-15},
    ).x
    np.testing.assert_allclose(project(vector(values)), best, atol=1e-6)


# CVaR and chi-square.


def linear(values: np.ndarray, most: float, constraints: list[dict]) -> float:
    n = len(values)
    found = minimize(
        lambda r: -r @ values,
        np.full(n, 1 / n),
        jac=lambda r: -values,
        bounds=[(0, most)] * n,
        constraints=[{"type": "eq", "fun": lambda r: r.sum() - 1}, *constraints],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return float(found.x @ values)


@pytest.mark.parametrize("level", [0.0, 0.25, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [0.3, 0.1, 2.0, 1.9, 0.5], [1.0, 1.0, 1.0], [2.0, 2.0, 0.0]])
def test_top_weights(values: list[float], level: float) -> None:
    f, most = np.array(values), min(1.0, 1 / (len(values) * (1 - level)))
    r = top_weights(vector(values), level).numpy()
    assert (r >= 0).all() and r.sum() == pytest.approx(1, abs=1e-12) and r.max() <= most + 1e-12
    assert r @ f == pytest.approx(linear(f, most, []), abs=1e-7)
    for i, j in itertools.combinations(range(len(f)), 2):
        assert f[i] != f[j] or r[i] == pytest.approx(r[j])


@quick
@given(losses, st.floats(0, 0.99))
def test_top_weights_of_anything(values: list[float], level: float) -> None:
    r = top_weights(vector(values), level)
    assert bool((r >= -1e-12).all()) and float(r.sum()) == pytest.approx(1, abs=1e-9)
    assert float(r.max()) <= min(1.0, 1 / (len(values) * (1 - level))) + 1e-9


@pytest.mark.parametrize("rho", [0.0, 0.05, 0.3, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [0.3, 0.1, 2.0, 1.9, 0.5], [2.0, 2.0, 0.0]])
def test_chi_square_weights(values: list[float], rho: float) -> None:
    f, n = np.array(values), len(values)
    r = chi_square_weights(vector(values), rho).numpy()
    assert (r >= 0).all() and r.sum() == pytest.approx(1, abs=1e-12)
    assert ((n * r - 1) ** 2).sum() / (2 * n) <= rho + 1e-9
    ball = {"type": "ineq", "fun": lambda q: rho - ((n * q - 1) ** 2).sum() / (2 * n)}
    assert r @ f >= linear(f, 1.0, [ball]) - 1e-6


@quick
@given(losses, st.floats(0, 10), st.integers(0, 2**32 - 1))
def test_chi_square_weights_are_the_best_allowed(values: list[float], rho: float, seed: int) -> None:
    assume(len(values) > 1)
    f, n = np.array(values), len(values)
    r = chi_square_weights(vector(values), rho).numpy()
    assert (r >= 0).all() and r.sum() == pytest.approx(1, abs=1e-9)
    assert ((n * r - 1) ** 2).sum() / (2 * n) <= rho + 1e-6
    rng = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 10.0):
        other = rng.dirichlet(np.full(n, spread))
        radius = ((n * other - 1) ** 2).sum() / (2 * n)
        pull = math.sqrt(rho / radius) if radius > rho else 1.0
        other = pull * other + (1 - pull) / n
        assert r @ f >= other @ f - 1e-6 * (1 + np.abs(f).max())


@settings(deadline=None)
@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_projecting_many_values_without_sorting(values: list[float], scale: float) -> None:
    given_ = torch.tensor(values, dtype=torch.float64) * scale
    expected = project(given_)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("comfedl.core.simplex.MANY", 0)
        before = given_.clone()
        found = project(given_)
        assert torch.equal(given_, before)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
