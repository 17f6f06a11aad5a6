"""The yardstick of the methods' tests: softmax regression and the simplex by hand, with no autograd, in float64.

Everything is written another way than in comfedl: sums over samples, a dense Hessian, projection by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.context import RoundContext
from comfedl.core.learner import Params

Array = np.ndarray

CLASSES, FEATURES = 3, 4
SIZES = {"a": 12, "b": 5, "c": 30, "d": 1, "e": 8}
NAMES = list(SIZES)


class Client(NamedTuple):
    """A client's data; X has a last column of ones, so that W, [classes, features + 1], holds the bias too."""

    X: Array
    y: Array


# Softmax regression.


def loss(W: Array, client: Client) -> float:
    return float(np.mean([np.log(np.exp(W @ x).sum()) - W[label] @ x for x, label in zip(*client, strict=True)]))


def _chances(W: Array, x: Array) -> Array:
    odds = np.exp(W @ x)
    return odds / odds.sum()


def gradient(W: Array, client: Client) -> Array:
    return np.mean(
        [np.outer(_chances(W, x) - np.eye(CLASSES)[label], x) for x, label in zip(*client, strict=True)], axis=0
    )


def hessian_times(W: Array, client: Client, V: Array) -> Array:
    """The Hessian, mean of (diag p - p p^T) kron (x x^T), formed whole and multiplied."""
    H = np.zeros((W.size, W.size))
    for x in client.X:
        p = _chances(W, x)
        H += np.kron(np.diag(p) - np.outer(p, p), np.outer(x, x)) / len(client.X)
    return (H @ V.reshape(-1)).reshape(W.shape)


# Meta-learning: f(w - a grad f(w)), with several steps of adapting.


def adapted(W: Array, client: Client, rate: float, steps: int = 1) -> list[Array]:
    """The path of adapting, from W on."""
    path = [W]
    for _ in range(steps):
        path.append(path[-1] - rate * gradient(path[-1], client))
    return path


def meta_loss(W: Array, client: Client, rate: float, steps: int = 1) -> float:
    return loss(adapted(W, client, rate, steps)[-1], client)


def meta_gradient(
    W: Array, client: Client, rate: float, steps: int = 1, order: str = "exact", delta: float = 1e-3
) -> Array:
    """prod_k (I - a H(w_k)) grad f(w_K), with H dropped or as a central difference, as ``order`` says."""
    *path, end = adapted(W, client, rate, steps)
    v = gradient(end, client)
    for at in reversed(path):
        if order == "exact":
            v = v - rate * hessian_times(at, client, v)
        elif order == "hessian-free":
            v = v - rate * (gradient(at + delta * v, client) - gradient(at - delta * v, client)) / (2 * delta)
    return v


# The simplex.


def project(values: Array) -> Array:
    """The Euclidean projection on the simplex: max(v - theta, 0) with theta by bisection."""
    values = np.asarray(values, dtype=np.float64)
    low, high = values.min() - 1.0, values.max()
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(values - theta, 0).sum() > 1 else (low, theta)
    return np.maximum(values - (low + high) / 2, 0)


# The clients and the runs.


def train_data(sizes: Mapping[str, int] = SIZES) -> dict[str, tuple[Array, Array]]:
    """Clients of unequal size, a single sample included, each with its own place and labels."""
    rng = np.random.default_rng(11)
    return {
        name: (rng.normal(loc=0.3 * i, size=(n, FEATURES)), (rng.integers(0, 2, size=n) + i) % CLASSES)
        for i, (name, n) in enumerate(sizes.items())
    }


def by_hand_clients() -> list[Client]:
    return [Client(np.column_stack([x, np.ones(len(x))]), y) for x, y in train_data().values()]


def linear() -> nn.Linear:
    """The initial model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(FEATURES, CLASSES).double()


def matrix(params: Params) -> Array:
    return np.column_stack([params["weight"].detach().numpy(), params["bias"].detach().numpy()])


def start() -> Array:
    return matrix(dict(linear().named_parameters()))


def run(algorithm: Algorithm, rounds: int = 3, **options: Any) -> cf.Result:
    return cf.fit(linear(), cf.FederatedData(train_data()), algorithm, **{"rounds": rounds, **options})


def locally(W: Array, direction: Callable[[Array], Array], lr: float, steps: int) -> list[Array]:
    """Local training: the path from W on."""
    path = [W]
    for _ in range(steps):
        path.append(path[-1] - lr * direction(path[-1]))
    return path


def close(found: Array, expected: Array, tolerance: float = 1e-9) -> None:
    """Equal to rounding, and not because nothing moved."""
    assert np.abs(expected - start()).max() > 1e-2, "the run must have moved"
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def recorded(result: cf.Result, key: str) -> list[Array]:
    """One vector a round of what is recorded for every client, in the order of their names."""
    rounds = [row["round"] for row in result.rounds]
    return [np.array([row[key] for row in result.clients if row["round"] == number]) for number in rounds]


def apart(one: cf.Result, other: cf.Result) -> float:
    """The largest difference in parameters and buffers."""
    assert one.params.keys() == other.params.keys() and one.buffers.keys() == other.buffers.keys()
    pairs = [(part[name], other_part[name]) for part, other_part in _parts(one, other) for name in part]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def same(one: cf.Result, other: cf.Result) -> bool:
    """Equal to the bit, buffers included."""
    return all(torch.equal(part[name], other_part[name]) for part, other_part in _parts(one, other) for name in part)


def _parts(one: cf.Result, other: cf.Result) -> list[tuple[Params, Params]]:
    return [(one.params, other.params), (one.buffers, other.buffers)]


@contextmanager
def taking_part(rounds: Sequence[Sequence[int]]) -> Iterator[None]:
    """Say who takes part in each round, in place of a draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundContext, "sample", lambda self, purpose="clients": list(rounds[self.number - 1]))
        yield


# Models with more to them than a linear layer, and data for them.


class Normed(nn.Module):
    """A small network with BatchNorm, and dropout where asked for."""

    def __init__(self, running: bool = True, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layers = nn.Sequential(
                nn.Linear(FEATURES, 6),
                nn.BatchNorm1d(6, track_running_stats=running),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(6, CLASSES),
            ).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def batchable() -> cf.FederatedData:
    """Clients that all hold a few samples: batch statistics need two."""
    return cf.FederatedData(train_data({"a": 12, "b": 5, "c": 30, "d": 3, "e": 8}))
