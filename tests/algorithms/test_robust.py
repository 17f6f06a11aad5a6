"""The safe step, weights with a memory, and ``Robust``: references by hand, and limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import comfedl as cf
from comfedl.algorithms import ALGORITHMS, comfedl as compositional
from comfedl.core.proximal import proximal_length, proximal_weights

GAMMA, LR, TAU = 0.3, 0.2, 4
COMMON = {"lr": LR, "local_steps": TAU, "batch_size": None}


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def loss_and_gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Of softmax regression with the bias as a last column, by hand."""
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    shares = torch.softmax(inputs @ w.T, dim=1)
    loss = -shares[torch.arange(len(y)), y].log().mean()
    shares[torch.arange(len(y)), y] -= 1
    return float(loss), shares.T @ inputs / len(y)


def flat(params: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([params["weight"], params["bias"][:, None]], dim=1)


def one_round(fed: cf.FederatedData, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The clients' losses at w, and their updates."""
    losses, updates = [], []
    for name in fed.names:
        x, y = fed.train[name]
        losses.append(loss_and_gradient(w, x, y)[0])
        moved = w.clone()
        for _ in range(TAU):
            moved = moved - LR * loss_and_gradient(moved, x, y)[1]
        updates.append(moved - w)
    return torch.tensor(losses, dtype=torch.float64), torch.stack(updates)


def trained(fed: cf.FederatedData, method: compositional.Compositional, rounds: int, **options: object) -> torch.Tensor:
    return flat(cf.fit(linear(), fed, method, rounds=rounds, **options).params)  # type: ignore[arg-type]


# The safe step.


def test_the_safe_step_by_hand(three_clients: cf.FederatedData) -> None:
    w = flat(dict(linear().state_dict()))
    for _ in range(3):
        losses, updates = one_round(three_clients, w)
        r = torch.softmax(losses / GAMMA, dim=0)
        mean = (r[:, None, None] * updates).sum(dim=0)
        variance = (r * updates.square().sum(dim=(1, 2))).sum() - mean.square().sum()
        w = w + mean / (1 + variance / (GAMMA * LR * TAU))
    for outer in (cf.KL(GAMMA), cf.Tilt(1 / GAMMA), cf.KL(GAMMA, cap=3.0)):
        found = trained(three_clients, cf.ComFedL(outer=outer, step="safe", **COMMON), 3)  # type: ignore[arg-type]
        torch.testing.assert_close(found, w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("outer", [cf.Identity(), cf.Tilt(-2.0), cf.KL(1e9)], ids=["identity", "tilt", "large gamma"])
def test_where_the_safe_step_is_plain(three_clients: cf.FederatedData, outer: cf.KL) -> None:
    plain, safe = (trained(three_clients, cf.ComFedL(outer=outer, step=s, **COMMON), 3) for s in ("plain", "safe"))  # type: ignore[arg-type]
    torch.testing.assert_close(safe, plain, rtol=0, atol=1e-8)


def same_clients(count: int = 3) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return cf.FederatedData({f"c{i}": (x, (x[:, 0] > 0).long()) for i in range(count)})


def test_identical_clients_are_averaged() -> None:
    plain = trained(same_clients(), cf.ComFedL(**COMMON), 4)  # type: ignore[arg-type]
    safe = trained(same_clients(), cf.ComFedL(outer=cf.KL(0.01), step="safe", **COMMON), 4)  # type: ignore[arg-type]
    torch.testing.assert_close(safe, plain, rtol=0, atol=1e-9)


def test_momentum_at_the_clients_reaches_further() -> None:
    assert cf.optim.SGD().reach(5) == 5
    assert cf.optim.SGD(momentum=0.5).reach(3) == pytest.approx(1 + 1.5 + 1.75)
    assert cf.optim.SGD(momentum=0.5, nesterov=True).reach(2) == pytest.approx(1.5 + 1.75)
    assert cf.optim.SGD(momentum=0.5, keep_state=True).reach(3) == pytest.approx(6)


@pytest.mark.parametrize("rule", ["median", "geometric-median"])
def test_the_safe_step_beside_a_robust_mean(three_clients: cf.FederatedData, rule: str) -> None:
    method = cf.ComFedL(outer=cf.KL(GAMMA, cap=2), step="safe", aggregate=rule, clip_update_norm=0.1, **COMMON)  # type: ignore[arg-type]
    plain = cf.ComFedL(outer=cf.KL(GAMMA, cap=2), aggregate=rule, clip_update_norm=0.1, **COMMON)  # type: ignore[arg-type]
    start = flat(dict(linear().state_dict()))
    safe_move, plain_move = (trained(three_clients, each, 1) - start for each in (method, plain))
    ratio = float(safe_move.norm() / plain_move.norm())
    assert 0 < ratio < 1
    torch.testing.assert_close(safe_move, ratio * plain_move, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "outer", [cf.Exp(1.0), cf.Power(2.0), cf.CVaR(0.5), cf.ChiSquare(0.1), cf.KL(effective_clients=2)], ids=str
)
def test_no_safe_step_is_known(outer: cf.KL) -> None:
    with pytest.raises(cf.ConfigError, match=r'step is "safe", but .* has no curvature'):
        cf.ComFedL(outer=outer, step="safe")


def test_bad_values() -> None:
    with pytest.raises(cf.ConfigError, match="step is 'far'"):
        cf.ComFedL(step="far")
    with pytest.raises(cf.ConfigError, match="client_optimizer is 'adam', but robust takes"):
        cf.Robust(client_optimizer=cf.optim.Adam())
    for gamma in (0, -1, float("nan")):
        with pytest.raises(cf.ConfigError, match="gamma is"):
            cf.Robust(gamma=gamma)
    with pytest.raises(cf.ConfigError, match="memory is"):
        cf.Robust(memory=1.5)
    with pytest.raises(cf.ConfigError, match="inner is 3"):
        cf.Robust(inner=3)  # type: ignore[arg-type]


# Weights that look ahead.

FloatArray = NDArray[np.float64]


def objective(r: FloatArray, losses: FloatArray, gram: FloatArray, gamma: float) -> float:
    n = len(r)
    return float(r @ losses - gamma * (r * np.log(np.maximum(n * r, 1e-300))).sum() - r @ gram @ r / 2)


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, float]:
    n = draw(st.integers(1, 8))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    updates = generator.normal(size=(n, 5)) * draw(st.sampled_from([1e-4, 0.1, 1.0, 10.0]))
    losses = generator.normal(size=n) * draw(st.sampled_from([0.01, 1.0, 30.0]))
    return losses, updates @ updates.T, draw(st.sampled_from([1e-3, 0.03, 0.3, 10.0]))


@settings(deadline=None)
@given(problems())
def test_the_weights_are_the_maximisers(problem: tuple[FloatArray, FloatArray, float]) -> None:
    losses, gram, gamma = problem
    r = proximal_weights(cf.KL(gamma), losses, gram)
    assert r.min() >= 0 and r.sum() == pytest.approx(1)
    # The condition of the maximum: the weights are those of the losses after their own step.
    after = (losses - gram @ r) / gamma
    expected = np.exp(after - after.max())
    steep = 1 + float(np.abs(gram).max()) / gamma  # how much the right side amplifies rounding
    np.testing.assert_allclose(r, expected / expected.sum(), rtol=0, atol=1e-10 * steep)


@pytest.mark.parametrize("seed", [1231, 2711, 2902, 4039, 5000])
def test_the_weights_are_exact_where_the_value_is_all_rounding(seed: int) -> None:
    """Newton's method once took the rounding of a value near zero for a rise, and stopped early."""
    generator = np.random.default_rng(seed)
    updates, losses = generator.normal(size=(6, 5)), 0.01 * generator.normal(size=6)
    gram = updates @ updates.T
    r = proximal_weights(cf.KL(0.001), losses, gram)
    after = (losses - gram @ r) / 0.001
    expected = np.exp(after - after.max())
    np.testing.assert_allclose(r, expected / expected.sum(), rtol=0, atol=1e-10 * np.abs(gram).max() / 0.001)


@settings(deadline=None)
@given(problems(), st.floats(1.0, 4.0))
def test_capped_weights_are_the_maximisers_too(problem: tuple[FloatArray, FloatArray, float], cap: float) -> None:
    losses, gram, gamma = problem
    r = proximal_weights(cf.KL(gamma, cap=cap), losses, gram)
    n = len(r)
    assert r.min() >= 0 and r.sum() == pytest.approx(1) and r.max() <= max(1, cap) / n + 1e-9
    best, generator = objective(r, losses, gram, gamma), np.random.default_rng(0)
    for _ in range(20):
        other = generator.dirichlet(np.ones(n))
        other = other if other.max() <= cap / n else np.full(n, 1 / n)
        for share in (0.01, 0.3, 1.0):
            assert objective(r + share * (other - r), losses, gram, gamma) <= best + 1e-6 * max(1, abs(best))


def test_limits_of_the_weights() -> None:
    losses, gram = np.array([1.0, 2.0, 4.0]), np.diag([3.0, 1.0, 2.0])
    shares = np.exp(losses / 0.5)
    np.testing.assert_allclose(proximal_weights(cf.KL(0.5), losses, 0 * gram), shares / shares.sum(), atol=1e-12)
    np.testing.assert_allclose(proximal_weights(cf.KL(1e9), losses, 0 * gram), np.full(3, 1 / 3), atol=1e-8)
    # With gamma = 0 and equal losses it is the shortest vector in the updates' convex hull (MGDA): r ~ 1 / |d_i|^2.
    expected = 1 / np.diag(gram)
    np.testing.assert_allclose(
        proximal_weights(cf.KL(1e-7), np.ones(3), gram), expected / expected.sum(), rtol=0, atol=1e-5
    )


def test_the_length_of_a_step_is_the_best() -> None:
    generator = np.random.default_rng(5)
    updates, losses, g = generator.normal(size=(4, 6)), generator.normal(size=4), cf.KL(0.3)
    r = g.weights(torch.from_numpy(losses)).numpy()
    direction = r @ updates
    products, square = updates @ direction, float(direction @ direction)
    s = proximal_length(g, losses, products, square)

    def bound(s: float) -> float:
        return float(g.objective(torch.from_numpy(losses - s * products))) + s * s * square / 2

    assert 0 < s < 1
    assert all(bound(s) <= bound(other) + 1e-12 for other in np.linspace(0, 1, 101))
    assert proximal_length(g, losses, 0 * products, 0.0) == pytest.approx(0, abs=1e-9)


# Robust.


def by_hand(fed: cf.FederatedData, rounds: int, memory: float | None, momentum: float = 0.9) -> torch.Tensor:
    """Robust with full batches: the reach is lr * tau, and the first batch's loss is the loss."""
    w, reach = flat(dict(linear().state_dict())), LR * TAU
    moved, estimate, average = torch.zeros_like(w), None, torch.zeros_like(w)
    for number in range(1, rounds + 1):
        losses, updates = one_round(fed, w)
        change = -(updates * moved).sum(dim=(1, 2)) / reach
        if memory is not None:
            share = max(1 - memory, 1 / number)
            estimate = losses if estimate is None else (1 - share) * (estimate + change) + share * losses
            losses = estimate
        coming = losses + momentum * change
        gram = torch.einsum("iab,jab->ij", updates, updates) / reach
        log_r = torch.log_softmax(coming / GAMMA, dim=0)
        for _ in range(4000):  # mirror ascent, unlike Newton's method in the code
            target = (coming - gram @ log_r.exp()) / GAMMA
            log_r = torch.log_softmax(log_r + 0.05 * (target - log_r), dim=0)
        moved = momentum * moved + (log_r.exp()[:, None, None] * updates).sum(dim=0)
        w = w + moved
        average = average + max(0.1, 1 / number) * (w - average)
    return average


@pytest.mark.parametrize("memory", [0.98, 0.5, None])
@pytest.mark.parametrize("path", ["auto", "serial", "vmap"])
def test_robust_by_hand(three_clients: cf.FederatedData, memory: float | None, path: str) -> None:
    method = cf.Robust(gamma=GAMMA, memory=memory, **COMMON)  # type: ignore[arg-type]
    found = trained(three_clients, method, 5, engine_options={"vectorize": path})
    torch.testing.assert_close(found, by_hand(three_clients, 5, memory), rtol=0, atol=1e-9)


def test_robust_without_momentum_by_hand(three_clients: cf.FederatedData) -> None:
    method = cf.Robust(gamma=GAMMA, server_optimizer=None, **COMMON)  # type: ignore[arg-type]
    found = trained(three_clients, method, 4)
    torch.testing.assert_close(found, by_hand(three_clients, 4, 0.98, momentum=0.0), rtol=0, atol=1e-9)


def test_a_large_gamma_is_equal_weights_with_momentum(three_clients: cf.FederatedData) -> None:
    robust = trained(three_clients, cf.Robust(gamma=1e9, **COMMON), 5)  # type: ignore[arg-type]
    equal = cf.ComFedL(server_optimizer=cf.optim.SGD(momentum=0.9), server_average=0.9, **COMMON)  # type: ignore[arg-type]
    torch.testing.assert_close(robust, trained(three_clients, equal, 5), rtol=0, atol=1e-6)


def test_it_reaches_the_optimum_of_its_objective(three_clients: cf.FederatedData) -> None:
    gamma = 0.05
    w = flat(dict(linear().state_dict())).requires_grad_()
    solver = torch.optim.LBFGS([w], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    decay = 0.02  # the optimum is finite

    def value() -> torch.Tensor:
        solver.zero_grad()
        losses = []
        for name in three_clients.names:
            x, y = three_clients.train[name]
            inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            losses.append(torch.nn.functional.cross_entropy(inputs @ w.T, y))
        total = gamma * (torch.logsumexp(torch.stack(losses) / gamma, 0) - np.log(3)) + decay / 2 * w.square().sum()
        total.backward()
        return total

    solver.step(value)
    best = float(value().detach())
    optimizer = cf.optim.SGD(weight_decay=decay)
    method = cf.Robust(gamma=gamma, lr=0.05, local_steps=1, batch_size=None, client_optimizer=optimizer)
    with torch.no_grad():
        w.copy_(trained(three_clients, method, 400))
    assert float(value().detach()) == pytest.approx(best, abs=1e-4)


def test_many_clients_have_a_length_instead(three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than FEW clients: the same first-order model along one direction, on every path."""
    monkeypatch.setattr(compositional, "FEW", 2)
    w, reach, moved, g = flat(dict(linear().state_dict())), LR * TAU, 0.0, cf.KL(GAMMA)
    estimate = None
    for number in range(1, 5):
        losses, updates = one_round(three_clients, w)
        change = -(updates * moved).sum(dim=(1, 2)) / reach
        share = max(0.02, 1 / number)
        estimate = losses if estimate is None else (1 - share) * (estimate + change) + share * losses
        coming = estimate + 0.9 * change
        update = (g.weights(coming)[:, None, None] * updates).sum(dim=0)
        products = (updates * update).sum(dim=(1, 2)) / reach
        lengths = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)
        values = coming[:, None] - products[:, None] * lengths
        bound = GAMMA * torch.logsumexp(values / GAMMA, 0) + lengths.square() * update.square().sum() / (2 * reach)
        moved = 0.9 * moved + lengths[bound.argmin()] * update
        w = w + moved
    for path in ("auto", "serial"):
        method = cf.Robust(gamma=GAMMA, server_average=None, **COMMON)  # type: ignore[arg-type]
        found = trained(three_clients, method, 4, engine_options={"vectorize": path})
        torch.testing.assert_close(found, w, rtol=0, atol=1e-5)


def test_some_of_the_clients(three_clients: cf.FederatedData) -> None:
    """With partial participation losses are measured: memory makes no difference."""
    methods = [cf.Robust(gamma=GAMMA, memory=memory, lr=0.1, batch_size=4) for memory in (0.98, None)]
    first, second = (trained(three_clients, each, 4, clients_per_round=2) for each in methods)
    assert torch.equal(first, second)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("lr", [1e12, 1e21, 1e30])
def test_updates_whose_squares_overflow(lr: float, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run trains on, or says that it diverged."""
    if many:
        monkeypatch.setattr(compositional, "FEW", 1)
    generator = torch.Generator().manual_seed(0)
    data = {name: (torch.randn(20, 4, generator=generator), torch.arange(20) % 3) for name in "abc"}
    torch.manual_seed(0)
    try:
        result = cf.fit(torch.nn.Linear(4, 3), cf.FederatedData(data), cf.Robust(0.01, lr=lr, local_steps=1), rounds=3)
    except cf.Diverged as error:
        assert error.round > 1
    else:
        assert all(value.isfinite().all() for value in result.params.values())


def test_a_value_of_meta_learning_is_the_adapted_loss(three_clients: cf.FederatedData) -> None:
    """With full batches the first batch's value is the measured one, also for the paper's eq. (7)."""
    adapt = cf.Adapt(lr=0.1)
    methods = [cf.Robust(gamma=GAMMA, inner=adapt, memory=memory, **COMMON) for memory in (0.0, None)]  # type: ignore[arg-type]
    first, second = (trained(three_clients, each, 1) for each in methods)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_stopped_and_resumed(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    method = cf.Robust(gamma=GAMMA, lr=0.1, batch_size=4)
    cf.fit(linear(), three_clients, method, rounds=3, out=tmp_path / "run")
    cf.fit(linear(), three_clients, method, rounds=7, out=tmp_path / "run", resume=True)
    cf.fit(linear(), three_clients, method, rounds=7, out=tmp_path / "once")
    for name in ("clients.jsonl", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


# The average of the server's models.


def test_limits_of_the_average(three_clients: cf.FederatedData) -> None:
    """0 reports the last model; 1 reports the plain mean of all rounds' models."""
    last, zero, mean = (
        trained(three_clients, cf.FedAvg(server_average=share, **COMMON), 3)  # type: ignore[arg-type]
        for share in (None, 0.0, 1.0)
    )
    torch.testing.assert_close(zero, last, rtol=0, atol=0)
    each = [trained(three_clients, cf.FedAvg(**COMMON), rounds) for rounds in (1, 2, 3)]  # type: ignore[arg-type]
    torch.testing.assert_close(mean, sum(each, torch.zeros_like(last)) / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_can_report_an_average(three_clients: cf.FederatedData, name: str) -> None:
    options = {"average": False} if name == "afl" else {}
    method = ALGORITHMS[name](server_average=1.0, lr=0.05, local_steps=1, **options)  # type: ignore[arg-type]
    found = trained(three_clients, method, 2)
    each = [trained(three_clients, replace(method, server_average=None), rounds) for rounds in (1, 2)]
    torch.testing.assert_close(found, (each[0] + each[1]) / 2, rtol=0, atol=1e-12)


def test_bad_averages() -> None:
    with pytest.raises(cf.ConfigError, match="server_average is 2"):
        cf.FedAvg(server_average=2)
    with pytest.raises(cf.ConfigError, match="average and server_average are both given"):
        cf.AFL(server_average=0.9)


# The warning.


def opposed() -> cf.FederatedData:
    """Three clients that cannot all be served: one input, three labels."""
    x = torch.ones(20, 4, dtype=torch.float64)
    return cf.FederatedData({f"c{i}": (x, torch.full((20,), i)) for i in range(3)})


def test_weights_that_jump_are_warned_of() -> None:
    jumping = cf.ComFedL(outer=cf.KL(0.02), lr=0.5)
    with pytest.warns(UserWarning, match=r"over the last 20 rounds, \d+% of the weight moved") as caught:
        cf.fit(linear(), opposed(), jumping, rounds=60)
    assert len(caught) == 1
    result = cf.fit(linear(), opposed(), cf.Robust(gamma=0.02, lr=0.5), rounds=60)  # a warning would be an error
    losses = [row["train.loss"] for row in result.clients if row["round"] == 60]
    assert losses == pytest.approx([np.log(3)] * 3, abs=0.02)
