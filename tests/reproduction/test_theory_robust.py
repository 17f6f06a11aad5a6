"""Eq. (5) on the synthetic problem: the safe step's descent against its bound, and estimates of the losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian as derivative

from comfedl_reproduction.theory import robust
from comfedl_reproduction.theory.problem import F64
from comfedl_reproduction.theory.robust import DESCENT_ROUNDS, STARTS, Descent, Estimate, RobustProblem, bennett

GAMMAS = (10.0, 1.0, 0.1, 0.03, 0.01, 0.003)


def models(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)


def measured(rows: list[dict[str, object]]) -> dict[str, float]:
    return {str(row["quantity"]): float(str(row["value"])) for row in rows}


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_gradient_is_autograds(gamma: float) -> None:
    problem = RobustProblem(gamma)
    for w in models(4):
        assert torch.allclose(problem.gradient(w), derivative(problem.value, w), atol=1e-10)
        assert float(problem.losses(w).mean()) == pytest.approx(float(problem.synthetic.objective(w)))


def test_the_limits_of_gamma() -> None:
    w = models(10)
    assert torch.allclose(RobustProblem(1e6).value(w), RobustProblem(1.0).synthetic.objective(w), atol=1e-5)
    smallest = RobustProblem(1e-4)
    assert torch.allclose(smallest.value(w), smallest.losses(w).amax(dim=-1), atol=2e-4)


def test_each_clients_gradient_has_the_constant() -> None:
    problem = RobustProblem(1.0)
    w, step = models(5000), 0.1 * models(5000, 1)
    change = problem.synthetic.client_gradients(w + step) - problem.synthetic.client_gradients(w)
    assert float((change.norm(dim=-1) / step.norm(dim=-1)[:, None]).max()) <= problem.L


def safe(problem: RobustProblem, w: Tensor) -> Tensor:
    """One safe step from each model, by the definition in docs/robust.md."""
    eta, r = 1 / problem.L, problem.weights(w)
    moves = -eta * problem.synthetic.client_gradients(w)
    mean = (r[..., None] * moves).sum(dim=-2)
    variance = (r * moves.square().sum(dim=-1)).sum(dim=-1) - mean.square().sum(dim=-1)
    return w + mean / (1 + variance / (problem.gamma * eta))[..., None]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_bound_holds_at_any_model(gamma: float) -> None:
    problem, w = RobustProblem(gamma), models(20_000)
    sure = problem.guaranteed(w, 1 / problem.L)
    fallen = problem.value(w) - problem.value(safe(problem, w))
    assert bool((fallen >= sure - 1e-12).all())
    if gamma <= 0.01:
        assert bool((sure < 0).any()) and bool((fallen < 0).any())  # descent is not certain where the softmax turns
    if gamma >= 1:
        assert bool((sure > 0).all())


def test_half_of_the_linear_descent_is_sure_for_a_large_gamma() -> None:
    problem, w = RobustProblem(1e6), models(100)
    eta = 1 / problem.L
    assert torch.allclose(problem.guaranteed(w, eta), eta * problem.gradient(w).square().sum(dim=-1) / 2, rtol=1e-5)


def test_bennetts_function() -> None:
    c = torch.tensor([-2.0, -1e-4, 0.0, 1e-4, 1e-3, 3.0], dtype=F64)
    series = [sum(float(x) ** k / math.factorial(k + 2) for k in range(40)) for x in c]
    assert torch.allclose(bennett(c), torch.tensor(series, dtype=F64), atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.01])
def test_a_descent_point_is_what_the_engine_did(gamma: float) -> None:
    problem, changes = RobustProblem(gamma), []
    for start in STARTS:
        w = torch.tensor(start, dtype=F64)
        for _ in range(DESCENT_ROUNDS):
            after = safe(problem, w)
            if float(problem.gradient(w).norm()) > 1e-5:
                changes.append(float(problem.value(after) - problem.value(w)))
            w = after
    found = measured(Descent(gamma, 1, "safe").rows())
    assert found["share of rounds that rise"] == pytest.approx(sum(change > 0 for change in changes) / len(changes))
    assert found["guaranteed over measured descent, at most"] < 1
    assert found["change less its bound, at most"] <= 0


def test_the_plain_step_rises_where_the_safe_one_falls() -> None:
    plain, short = (measured(Descent(0.03, 1, step).rows()) for step in ("plain", "safe"))
    assert short["share of rounds that rise"] == 0 < plain["share of rounds that rise"]


def test_without_noise_all_estimates_of_eq_5_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the moving averages, whose prediction of how losses change is of first order."""
    monkeypatch.setattr(robust, "NOISE", 0.0)
    exact = measured(Estimate("eq. (5), losses of all data", 64, 0).rows())
    batch = measured(Estimate("eq. (5), losses of one batch", 64, 0).rows())
    memory = measured(Estimate("eq. (5), memory 0.98", 64, 0).rows())
    assert batch == pytest.approx(exact, rel=1e-9)
    assert memory["all rounds"] == pytest.approx(exact["all rounds"], rel=0.05)


def test_a_memory_is_better_than_a_batch() -> None:
    end = {
        name: sum(measured(Estimate(f"eq. (5), {name}", 256, seed).rows())["last quarter"] for seed in (0, 1))
        for name in ("losses of all data", "losses of one batch", "memory 0.98")
    }
    assert end["losses of all data"] < end["memory 0.98"] < end["losses of one batch"] / 2
