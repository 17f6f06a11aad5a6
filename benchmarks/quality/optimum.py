"""The optimum of the objective, computed centrally: what no federated method can pass by optimising better.

Eq. (5) and the mean of the clients' losses are minimised over all training data by L-BFGS in float64, from several
milder gammas downwards. Only for logistic regression, where the problem is convex.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import comfedl as cf
from benchmarks.quality.federations import FEDERATIONS
from benchmarks.quality.runs import SEEDS
from comfedl.utils.files import write_atomic

GAMMAS = (math.inf, 0.3, 0.1, 0.03)
ITERATIONS = 300


def centrally(fed: cf.FederatedData, gammas: Iterable[float] = GAMMAS) -> dict[str, dict[str, float]]:
    """For each gamma the optimum's value, and the clients' accuracies on test data there."""
    train = [_client(fed.train[name]) for name in fed.names]
    classes = int(fed.train.y.max()) + 1
    w = torch.zeros(train[0][0].shape[1], classes, dtype=torch.float64, requires_grad=True)
    found: dict[str, dict[str, float]] = {}
    for gamma in gammas:
        value = _minimise(w, train, gamma)
        assert fed.test is not None
        with torch.no_grad():
            tests = [_client(fed.test[name]) for name in fed.names if name in fed.test]
            accuracies = [float(((x @ w).argmax(dim=1) == y).double().mean()) for x, y in tests]
        found[f"{gamma:g}"] = {
            "objective": value,
            "test.accuracy.worst": min(accuracies),
            "test.accuracy.mean": sum(accuracies) / len(accuracies),
        }
    return found


def _client(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Flat inputs with a 1 for the bias, and labels."""
    x = pair[0].reshape(len(pair[0]), -1).double()
    return torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1), pair[1]


def _minimise(w: Tensor, clients: list[tuple[Tensor, Tensor]], gamma: float) -> float:
    solver = torch.optim.LBFGS(
        [w],
        max_iter=ITERATIONS,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def value() -> Tensor:
        solver.zero_grad()
        losses = torch.stack([cross_entropy(x @ w, y) for x, y in clients])
        if math.isinf(gamma):
            total = losses.mean()
        else:
            total = gamma * (torch.logsumexp(losses / gamma, 0) - math.log(len(losses)))
        total.backward()  # type: ignore[no-untyped-call]
        return total

    solver.step(value)  # type: ignore[arg-type, no-untyped-call]
    return float(value().detach())


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def complete(federations: Iterable[str], path: Path) -> None:
    """Add the optima that are missing, on the data of the first seed."""
    found = load(path)
    for name in federations:
        if FEDERATIONS[name].convex and name not in found:
            found[name] = centrally(FEDERATIONS[name].make(SEEDS[0]))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(found, indent=1).encode())
            print(f"{name:16} optimum", flush=True)
