"""Outer functions: slopes, weights and objectives agree with each other and with the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import comfedl as cf
from comfedl.core.outer_functions import OUTERS, ChiSquare, Coupled, Custom, CVaR, Outer, Power, Separable, Tilt

quick = settings(max_examples=60, deadline=None, derandomize=True)

losses = st.lists(st.floats(0, 20), min_size=1, max_size=9)
coupled = st.one_of(
    st.builds(cf.KL, st.floats(0.05, 50)),
    st.builds(cf.KL, st.floats(0.05, 50), cap=st.floats(1, 12)),
    st.builds(Tilt, st.floats(0.02, 20)),
    st.builds(CVaR, st.floats(0, 0.95)),
    st.builds(ChiSquare, st.floats(0, 5)),
)


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean_exp(values: Tensor, gamma: float) -> Tensor:
    """Eq. (6), read as its gradient says: mean_i exp(f_i / gamma)."""
    return torch.exp(values / gamma).mean()


@pytest.mark.parametrize("gamma", [0.2, 1.0, 5.0])
def test_exp_has_the_papers_slope(gamma: float) -> None:
    """exp(f / gamma) / gamma, which is n times the derivative of eq. (6)."""
    f = vector([0.1, math.log(10), 3.0]).requires_grad_()
    (slope,) = torch.autograd.grad(mean_exp(f, gamma), f)
    np.testing.assert_allclose(cf.Exp(gamma).slope(f.detach()), len(f) * slope, rtol=1e-12)


@pytest.mark.parametrize(("gamma", "weight"), [(0.1, 1e11), (0.2, 5e5), (0.5, 200), (1, 10), (2, 1.58), (5, 0.32)])
def test_the_literal_weight_at_the_start(gamma: float, weight: float) -> None:
    """The slopes of the literal method at a loss of ln 10."""
    assert float(cf.Exp(gamma).slope(vector([math.log(10)]))) == pytest.approx(weight, rel=0.02)


@quick
@given(losses, st.floats(0.2, 50))
def test_literal_is_z_over_gamma_times_normalised(values: list[float], gamma: float) -> None:
    """Invariant 2: the literal weight of client i, over n, is (Z / gamma) r_i."""
    f = vector(values)
    Z = mean_exp(f, gamma)
    np.testing.assert_allclose(cf.Exp(gamma).slope(f) / len(f), Z / gamma * cf.KL(gamma).weights(f), rtol=1e-9)


@quick
@given(losses, st.floats(0.05, 10))
def test_term_is_kl(values: list[float], t: float) -> None:
    """Invariant 3: TERM's objective (1/t) log mean exp(t f), its value and its gradient."""
    f = vector(values).requires_grad_()
    term = (torch.logsumexp(t * f, dim=0) - math.log(len(values))) / t
    (slope,) = torch.autograd.grad(term, f)
    for outer in (cf.KL(1 / t), Tilt(t)):
        assert float(outer.objective(f.detach())) == pytest.approx(term.item(), abs=1e-9)
        np.testing.assert_allclose(outer.weights(f.detach()), slope, atol=1e-9)


@quick
@given(losses, st.floats(0.05, 10))
def test_a_negative_tilt_plays_down_the_worst(values: list[float], t: float) -> None:
    f = vector(values)
    outer = Tilt(-t)
    expected = -(torch.logsumexp(-t * f, dim=0) - math.log(len(values))) / t
    assert float(outer.objective(f)) == pytest.approx(float(expected), abs=1e-9)
    assert float(outer.weights(f)[f.argmax()]) <= 1 / len(values) + 1e-9


@quick
@given(losses, coupled)
def test_the_weights_of_a_coupled_outer_are_its_slope(values: list[float], outer: Coupled) -> None:
    """Danskin's theorem: the derivative of the maximum along d is r . d, even if a cap binds."""
    f, n = vector(values), len(values)
    r = outer.weights(f)
    assert r.dtype == torch.float64 and bool((r >= 0).all())
    assert float(r.sum()) == pytest.approx(1, abs=1e-9)
    # The objective is convex and a maximum of linear functions: the plane at f lies below it everywhere.
    for d in (torch.ones(n), torch.linspace(-1, 1, n), torch.eye(n)[0], -torch.eye(n)[-1]):
        for h in (1e-3, 1.0):
            d = d.double()
            if isinstance(outer, Tilt) and outer.t < 0:
                continue
            assert float(outer.objective(f + h * d)) >= float(outer.objective(f) + h * (r * d).sum()) - 1e-8


@quick
@given(losses, coupled, st.floats(0, 100))
def test_a_common_shift_moves_the_objective_alone(values: list[float], outer: Coupled, shift: float) -> None:
    f = vector(values)
    assert float(outer.objective(f + shift)) == pytest.approx(float(outer.objective(f)) + shift, abs=1e-7)


@quick
@given(losses, st.sampled_from([cf.Identity(), cf.Exp(3.0), Power(0.0), Power(0.5), Power(2.0)]))
def test_the_slope_of_a_separable_outer_is_its_derivative(values: list[float], outer: Separable) -> None:
    f = (vector(values) + 0.01).requires_grad_()
    objective = mean_exp(f, outer.gamma) if isinstance(outer, cf.Exp) else outer.objective(f)
    (slope,) = torch.autograd.grad(objective, f)
    np.testing.assert_allclose(outer.slope(f.detach()), len(values) * slope, rtol=1e-9)


def test_limits() -> None:
    f = vector([0.5, 3.0, 1.0, 1.5])
    for outer in (cf.KL(1e7), cf.KL(0.1, cap=1.0), CVaR(0.0), ChiSquare(0.0)):
        np.testing.assert_allclose(outer.weights(f), 0.25, atol=1e-6)
        assert float(outer.objective(f)) == pytest.approx(1.5, abs=1e-6)
    for outer in (cf.KL(1e-3), cf.KL(1e-3, cap=4.0), CVaR(0.9), ChiSquare(1.5)):
        np.testing.assert_allclose(outer.weights(f), [0, 1, 0, 0], atol=1e-8)
        assert float(outer.objective(f)) == pytest.approx(3.0, abs=2e-3)
    assert float(cf.Identity().objective(f)) == 1.5
    assert float(Power(0.0).objective(f)) == pytest.approx(1.5)


@pytest.mark.parametrize("gamma", [0.05, 1.0, 1e3, 1e6])
def test_a_cap_that_never_binds_leaves_the_objective(gamma: float) -> None:
    f = vector(np.linspace(0, 1, 49).tolist())
    assert float(cf.KL(gamma, cap=49).objective(f)) == pytest.approx(float(cf.KL(gamma).objective(f)), abs=1e-8)


def test_a_cap_lowers_the_objective() -> None:
    f = vector([0.5, 3.0, 1.0, 1.5])
    found = [float(cf.KL(0.2, cap=cap).objective(f)) for cap in (1.0, 1.5, 2.0, 3.0, 4.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(float(f.mean())) and found[-1] == pytest.approx(float(cf.KL(0.2).objective(f)))


@pytest.mark.parametrize("outer", [cf.KL(0.1), cf.KL(0.1, cap=2), cf.Exp(0.1)])
def test_large_losses_stay_finite(outer: Outer) -> None:
    """Invariant 10: losses of 1e4 at gamma 0.1."""
    f = vector([1e4, 9999.0, 0.0])
    assert 0 < float(outer.objective(f)) <= 1e4
    if isinstance(outer, Coupled):
        assert float(outer.weights(f).sum()) == pytest.approx(1)


def test_custom() -> None:
    square = Custom(lambda y: y**2 / 2, lambda y: y)
    f = vector([1.0, 3.0])
    assert float(square.objective(f)) == 2.5 and square.slope(f).tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: cf.KL(0),
        lambda: cf.KL(-1.0),
        lambda: cf.KL(math.nan),
        lambda: cf.KL(math.inf),
        lambda: cf.KL("0.2"),
        lambda: cf.KL(True),
        lambda: cf.KL(0.2, cap=0.5),
        lambda: cf.Exp(0.0),
        lambda: Tilt(0.0),
        lambda: CVaR(1.0),
        lambda: CVaR(-0.1),
        lambda: ChiSquare(-1.0),
        lambda: Power(-0.5),
    ],
)
def test_values_out_of_range(make) -> None:
    with pytest.raises(cf.ConfigError):
        make()


def test_they_are_all_in_the_register() -> None:
    def concrete(kind: type) -> set[type]:
        found = set() if kind.__abstractmethods__ else {kind}
        return found.union(*(concrete(each) for each in kind.__subclasses__()))

    ours = {kind for kind in concrete(Outer) if kind.__module__ == "comfedl.core.outer_functions"}
    assert ours - {Custom} == set(OUTERS.values())  # a config cannot name a user-defined function


def blow_up(gamma: float) -> cf.Diverged:
    """Two clients: the gradient is zero at the first, and training diverges at the second."""
    x, y = torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(cf.Diverged) as caught:
        cf.fit(
            model,
            cf.FederatedData({"calm": (0 * x, 0.1 * y), "wild": (x, y)}),
            cf.ComFedL(outer=cf.Exp(gamma), lr=0.1, local_steps=5, batch_size=None),
            loss=lambda output, y: ((output - y) ** 2).mean(),
            rounds=3,
        )
    return caught.value


def test_the_literal_outer_says_why_it_fails() -> None:
    """Round, client, loss, gamma and weight, and what to use instead."""
    error = blow_up(0.02)
    assert (error.round, error.client) == (1, "wild") and error.step in range(1, 6)
    for part in ("Round 1", "'wild'", "gamma = 0.02", "KL(gamma=0.02)", f"{error.loss:.3g}", f"{error.weight:.3g}"):
        assert part in str(error), part
