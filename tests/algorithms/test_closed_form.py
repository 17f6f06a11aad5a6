"""Whole runs against a computation by hand: softmax regression in numpy, with no autograd and nothing of comfedl.

Clients have unequal sizes, batches are all of a client's data, everybody takes part, everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import comfedl as cf

Array = np.ndarray
Clients = list[tuple[Array, Array]]

CLASSES, FEATURES = 3, 4
ROUNDS, STEPS, LR = 4, 3, 0.3
SIZES = {"a": 12, "b": 5, "c": 30, "d": 1}


# The model: W is [classes, features + 1], the last column the bias; X has a last column of ones.


def probabilities(W: Array, X: Array) -> Array:
    logits = X @ W.T
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def loss(W: Array, X: Array, y: Array) -> float:
    return float(-np.log(probabilities(W, X)[np.arange(len(y)), y]).mean())


def slope(W: Array, X: Array, y: Array) -> Array:
    return (probabilities(W, X) - np.eye(CLASSES)[y]).T @ X / len(y)


def hessian_times(W: Array, X: Array, y: Array, V: Array) -> Array:
    P, moved = probabilities(W, X), X @ V.T
    return (P * (moved - (P * moved).sum(axis=1, keepdims=True))).T @ X / len(y)


# The clients, the server's weights and the loop.


def data(seed: int, names: dict[str, int] = SIZES) -> dict[str, tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(loc=0.5 * i, size=(n, FEATURES)), rng.integers(0, CLASSES, size=n))
        for i, (name, n) in enumerate(names.items())
    }


TRAIN, OUTER = data(1), data(2, {"a": 7, "b": 9, "c": 2, "d": 4})


def with_ones(clients: dict[str, tuple[Array, Array]]) -> Clients:
    return [(np.column_stack([x, np.ones(len(x))]), y) for x, y in clients.values()]


def module() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(FEATURES, CLASSES).double()


def matrix(weight: torch.Tensor, bias: torch.Tensor) -> Array:
    return np.column_stack([weight.detach().numpy(), bias.detach().numpy()])


def uniform(W: Array) -> Array:
    return np.full(len(SIZES), 1 / len(SIZES))


def by_samples(W: Array) -> Array:
    return np.array(list(SIZES.values())) / sum(SIZES.values())


def tilted(value: Callable[[Array, int], float], gamma: float, cap: float = np.inf) -> Callable[[Array], Array]:
    """min(exp((f_i - eta) / gamma), cap) / n with eta found by bisection: plain softmax where the cap is infinite."""

    def weights(W: Array) -> Array:
        values = np.array([value(W, i) for i in range(len(SIZES))])
        low, high = values.min() - 50 * gamma, values.max() + 50 * gamma
        for _ in range(200):
            eta = (low + high) / 2
            r = np.minimum(np.exp((values - eta) / gamma), cap) / len(values)
            low, high = (eta, high) if r.sum() > 1 else (low, eta)
        return r

    return weights


def by_hand(
    direction: Callable[[Array, int], Array],
    weights: Callable[[Array], Array] = uniform,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    lr: float = LR,
) -> Array:
    W = matrix(*module().parameters())
    for _ in range(rounds):
        r, ends = weights(W), []
        for i in range(len(SIZES)):
            local = W
            for _ in range(steps):
                local = local - lr * direction(local, i)
            ends.append(local)
        W = sum(share * end for share, end in zip(r, ends, strict=True))
    return W


def trained(
    algorithm: cf.ComFedL | cf.FedAvg, outer: dict[str, tuple[Array, Array]] | None = None, rounds: int = ROUNDS
) -> Array:
    result = cf.fit(module(), cf.FederatedData(TRAIN, outer=outer), algorithm, rounds=rounds)
    return matrix(result.params["weight"], result.params["bias"])


def close(found: Array, expected: Array, tolerance: float = 1e-9) -> None:
    assert np.abs(expected - matrix(*module().parameters())).max() > 1e-2, "the run must have moved"
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


COMMON = {"lr": LR, "local_steps": STEPS, "batch_size": None}
train = with_ones(TRAIN)


def local_loss(W: Array, i: int) -> float:
    return loss(W, *train[i])


def local_slope(W: Array, i: int) -> Array:
    return slope(W, *train[i])


def test_the_derivatives_by_hand_are_right() -> None:
    """The yardstick itself, against central differences."""
    rng = np.random.default_rng(0)
    W, V = rng.normal(size=(2, CLASSES, FEATURES + 1))
    X, y = train[0]
    h = 1e-5
    along = (loss(W + h * V, X, y) - loss(W - h * V, X, y)) / (2 * h)
    assert abs(along - (slope(W, X, y) * V).sum()) < 1e-8
    bent = (slope(W + h * V, X, y) - slope(W - h * V, X, y)) / (2 * h)
    np.testing.assert_allclose(hessian_times(W, X, y, V), bent, atol=1e-8)


def test_fedavg_by_samples() -> None:
    close(trained(cf.FedAvg(**COMMON)), by_hand(local_slope, by_samples))


def test_fedavg_uniform() -> None:
    close(trained(cf.FedAvg(weighting="uniform", **COMMON)), by_hand(local_slope))


@pytest.mark.parametrize("outer", [None, cf.Identity()])
def test_comfedl_is_federated_averaging_with_uniform_weights(outer: cf.Identity | None) -> None:
    close(trained(cf.ComFedL(outer=outer, **COMMON)), by_hand(local_slope))


def test_literal_exp() -> None:
    """u = exp(f / gamma) / gamma * grad f, refreshed at every local step; plain mean at the server."""
    gamma = 5.0

    def direction(W: Array, i: int) -> Array:
        return np.exp(local_loss(W, i) / gamma) / gamma * local_slope(W, i)

    close(trained(cf.ComFedL(outer=cf.Exp(gamma), **COMMON)), by_hand(direction))


@pytest.mark.parametrize("gamma", [0.05, 0.3, 4.0])
def test_kl(gamma: float) -> None:
    """Plain local steps; the server weighs by the loss of the model that it sent."""
    close(trained(cf.ComFedL(outer=cf.KL(gamma), **COMMON)), by_hand(local_slope, tilted(local_loss, gamma)))


@pytest.mark.parametrize("cap", [1.0, 1.3, 2.0, 3.9, 4.0, 10.0])
def test_kl_with_cap(cap: float) -> None:
    algorithm = cf.ComFedL(outer=cf.KL(0.3, cap=cap), **COMMON)
    close(trained(algorithm), by_hand(local_slope, tilted(local_loss, 0.3, cap)))


def test_the_cap_of_the_other_test_binds() -> None:
    free = tilted(local_loss, 0.3)(matrix(*module().parameters()))
    assert free.max() > 1.3 / len(SIZES)


# Meta-learning, eq. (7) and (10).

ADAPT = 0.4


def adapted_path(W: Array, i: int, steps: int) -> list[Array]:
    path = [W]
    for _ in range(steps):
        path.append(path[-1] - ADAPT * local_slope(path[-1], i))
    return path


def meta(outer: Clients, steps: int = 1, second_order: bool = True) -> Callable[[Array, int], Array]:
    """prod_k (I - a H(w_k)) grad f(w_K)."""

    def direction(W: Array, i: int) -> Array:
        *path, end = adapted_path(W, i, steps)
        v = slope(end, *outer[i])
        for at in reversed(path) if second_order else ():
            v = v - ADAPT * hessian_times(at, *train[i], v)
        return v

    return direction


def meta_loss(outer: Clients, steps: int = 1) -> Callable[[Array, int], float]:
    return lambda W, i: loss(adapted_path(W, i, steps)[-1], *outer[i])


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("own_outer", [False, True])
def test_adapt_exact(steps: int, own_outer: bool) -> None:
    outer = OUTER if own_outer else TRAIN
    found = trained(cf.ComFedL(inner=cf.Adapt(ADAPT, steps), **COMMON), OUTER if own_outer else None)
    close(found, by_hand(meta(with_ones(outer), steps)))


@pytest.mark.parametrize("steps", [1, 2])
def test_adapt_first_order(steps: int) -> None:
    found = trained(cf.ComFedL(inner=cf.Adapt(ADAPT, steps, order="first"), **COMMON))
    close(found, by_hand(meta(train, steps, second_order=False)))
    assert np.abs(found - by_hand(meta(train, steps))).max() > 1e-3


@pytest.mark.parametrize("steps", [1, 2])
def test_hessian_free_tends_to_exact(steps: int) -> None:
    """A central difference: a hundredth of the error for a tenth of delta."""
    exact = by_hand(meta(train, steps))
    errors = []
    for delta in (1e-1, 1e-2, 1e-3, 1e-4):
        adapt = cf.Adapt(ADAPT, steps, order="hessian-free", delta=delta)
        errors.append(np.abs(trained(cf.ComFedL(inner=adapt, **COMMON)) - exact).max())
    assert errors[-1] < 1e-9
    assert 70 < errors[0] / errors[1] < 140
    assert 70 < errors[1] / errors[2] < 140


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("own_outer", [False, True])
def test_adapt_with_kl(steps: int, own_outer: bool) -> None:
    """DAMAML: weights from the loss after adapting, at the model received."""
    outer = with_ones(OUTER if own_outer else TRAIN)
    algorithm = cf.ComFedL(inner=cf.Adapt(ADAPT, steps), outer=cf.KL(0.3), **COMMON)
    expected = by_hand(meta(outer, steps), tilted(meta_loss(outer, steps), 0.3))
    close(trained(algorithm, OUTER if own_outer else None), expected)
    assert np.abs(expected - by_hand(meta(outer, steps), tilted(local_loss, 0.3))).max() > 1e-5


def test_adapt_first_order_with_kl_and_cap() -> None:
    algorithm = cf.ComFedL(inner=cf.Adapt(ADAPT, order="first"), outer=cf.KL(0.3, cap=1.3), **COMMON)
    close(trained(algorithm), by_hand(meta(train, second_order=False), tilted(meta_loss(train), 0.3, 1.3)))


def test_adapt_with_literal_exp() -> None:
    """Section 7b: u = exp(f(y) / gamma) / gamma * (I - a H) grad f(y)."""
    gamma = 5.0
    value, plain = meta_loss(train), meta(train)

    def direction(W: Array, i: int) -> Array:
        return np.exp(value(W, i) / gamma) / gamma * plain(W, i)

    close(trained(cf.ComFedL(inner=cf.Adapt(ADAPT), outer=cf.Exp(gamma), **COMMON)), by_hand(direction))


@pytest.mark.parametrize("order", ["exact", "first", "hessian-free"])
def test_adapting_by_nothing_is_uniform_averaging(order: str) -> None:
    close(trained(cf.ComFedL(inner=cf.Adapt(0.0, order=order), **COMMON)), by_hand(local_slope))


# What is recorded.


def recorded(algorithm: cf.ComFedL | cf.FedAvg) -> tuple[float, Array, Array]:
    """The last round's objective, every client's loss, and the weights of that round."""
    result = cf.fit(module(), cf.FederatedData(TRAIN), algorithm, rounds=2)
    last = [row for row in result.clients if row["round"] == 2]
    assert [row["client"] for row in last] == list(SIZES)
    losses, weights = (np.array([row[key] for row in last]) for key in ("train.loss", "weight"))
    W = matrix(result.params["weight"], result.params["bias"])
    np.testing.assert_allclose(losses, [local_loss(W, i) for i in range(len(SIZES))], atol=1e-12)
    return float(result.rounds[-1]["objective"]), losses, weights


def log_mean_exp(values: Array, gamma: float) -> float:
    return gamma * float(np.log(np.exp(values / gamma).mean()))


def test_objective_of_fedavg_is_the_mean_over_samples() -> None:
    objective, losses, weights = recorded(cf.FedAvg(**COMMON))
    assert objective == pytest.approx(by_samples(losses) @ losses, abs=1e-12)
    assert abs(objective - losses.mean()) > 1e-3
    np.testing.assert_allclose(weights, by_samples(losses))


@pytest.mark.parametrize("algorithm", [cf.FedAvg(weighting="uniform", **COMMON), cf.ComFedL(**COMMON)])
def test_objective_of_uniform_averaging_is_the_mean_over_clients(algorithm: cf.ComFedL | cf.FedAvg) -> None:
    objective, losses, _ = recorded(algorithm)
    assert objective == pytest.approx(losses.mean(), abs=1e-12)


@pytest.mark.parametrize("outer", [cf.KL(0.3), cf.Exp(5.0)])
def test_objective_of_kl_and_exp_is_eq_5(outer: cf.KL | cf.Exp) -> None:
    objective, losses, _ = recorded(cf.ComFedL(outer=outer, **COMMON))
    assert objective == pytest.approx(log_mean_exp(losses, outer.gamma), abs=1e-12)


def test_objective_of_adapt_is_the_loss_after_adapting() -> None:
    result = cf.fit(module(), cf.FederatedData(TRAIN), cf.ComFedL(inner=cf.Adapt(ADAPT), **COMMON), rounds=2)
    W = matrix(result.params["weight"], result.params["bias"])
    expected = np.mean([meta_loss(train)(W, i) for i in range(len(SIZES))])
    assert result.rounds[-1]["objective"] == pytest.approx(expected, abs=1e-12)


def test_the_weight_recorded_is_that_of_the_model_received() -> None:
    """A round's weights belong to the model before it, its losses to the model after it."""
    before = by_hand(local_slope, tilted(local_loss, 0.3), rounds=1)
    _, _, weights = recorded(cf.ComFedL(outer=cf.KL(0.3), **COMMON))
    np.testing.assert_allclose(weights, tilted(local_loss, 0.3)(before), atol=1e-9)
