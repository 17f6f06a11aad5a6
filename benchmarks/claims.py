"""Comparisons quoted in the documentation, all sides in one run: ``python benchmarks/claims.py NAME``.

demo: the demo's three methods on twenty seeds, 100 to 119. participation: two ways for
``KL`` to weight four of forty clients per round: among themselves, as it does, or by n / m from the last known losses.
optimizers: an MLP on digits after 30 rounds with momentum or Adam, and after 30 and 100 of plain SGD, once with the
default learning rate and once with the best of eight, chosen for 30 rounds (SGD: for 100) on seeds 100 and 101.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import comfedl as cf
from comfedl.algorithms.base import State
from comfedl.algorithms.comfedl import known_weights
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.cli import demo
from comfedl.config.schema import run_config
from comfedl.core import client_vector
from comfedl.core.outer_functions import Coupled

METRICS = ("validation.accuracy.worst", "validation.accuracy.mean", "train.loss.worst", "train.accuracy.worst")


@dataclass(frozen=True)
class WeightsFromLastLosses(cf.ComFedL):
    """Weights (k / m) r_i over the k known clients, scaled down to a sum of 1 if it exceeds that."""

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        losses = client_vector.put(state["losses"], replies.clients, replies.numbers("loss"))
        known = ~client_vector.to_tensor(losses).isnan()
        assert isinstance(self.g, Coupled)
        present = known_weights(self.g, losses)[replies.clients]
        weights = present * min(int(known.sum()) / len(present), 1 / max(float(present.sum()), 1e-300))
        state = self.advance({**state, "losses": losses}, replies, weights)
        return state, Participation(replies.clients, weights)


def show(rows: dict[str, list[list[float]]]) -> None:
    for name, values in rows.items():
        numbers = np.array(values)
        error = numbers.std(axis=0, ddof=1) / len(numbers) ** 0.5
        text = ", ".join(f"{m} {a:.3f} ± {e:.3f}" for m, a, e in zip(METRICS, numbers.mean(axis=0), error, strict=True))
        print(f"{name:46} {text}   worst by seed: {numbers[:, 0].round(3).tolist()}")


def on_fresh_sites() -> None:
    rows: dict[str, list[list[float]]] = {name: [] for name in demo.METHODS}
    for seed in range(100, 120):
        for name, config in demo.configs(seed).items():
            last = run_config(config).rounds[-1]
            rows[name].append([float(last[metric] or 0) for metric in METRICS])
    show(rows)
    worst = {name: np.array(values)[:, 0] for name, values in rows.items()}
    others = np.maximum(worst["FedAvg"], worst["equal weights"])
    print(f"Robust is above both others in {int((worst['Robust'] > others).sum())} of {len(others)} seeds.")


def participation() -> None:
    rows: dict[str, list[list[float]]] = {}
    for seed in range(3):
        fed = cf.load("digits", cf.partition.Dirichlet(clients=40, alpha=0.3), seed=seed)
        model = cf.models.build("logistic", (1, 8, 8), 10, seed=0)
        for name, method in (
            ("uniform", cf.FedAvg(weighting="uniform", lr=0.5)),
            ("KL(0.2), participants", cf.ComFedL(outer=cf.KL(0.2), lr=0.5)),
            ("KL(0.2), n/m by table", WeightsFromLastLosses(outer=cf.KL(0.2), lr=0.5)),
        ):
            run = cf.fit(model, fed, method, rounds=100, seed=seed, clients_per_round=4, eval_every=100)
            rows.setdefault(name, []).append([float(run.rounds[-1][metric] or 0) for metric in METRICS])
    show(rows)


OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain SGD": (100, {}),
    "client momentum 0.9": (30, {"client_optimizer": cf.optim.SGD(momentum=0.9)}),
    "server momentum 0.9": (30, {"server_optimizer": cf.optim.SGD(momentum=0.9)}),
    "client Adam": (30, {"client_optimizer": cf.optim.Adam()}),
}
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DEFAULTS = {"client Adam": 0.01}  # 0.1 for the others, the default of every method


def trained(lr: float, seed: int, rounds: int, options: Mapping[str, Any]) -> dict[int, list[float]]:
    """The metrics after 30 rounds and after the last, by round."""
    fed = cf.load("digits", cf.partition.Dirichlet(clients=10, alpha=0.3), seed=seed)
    model = cf.models.build("mlp", (1, 8, 8), 10, seed=seed)
    run = cf.fit(model, fed, cf.FedAvg(lr=lr, **options), rounds=rounds, seed=seed, eval_every=10)
    return {int(row["round"]): [float(row[metric] or 0) for metric in METRICS] for row in run.rounds}  # type: ignore[arg-type]


def optimizers() -> None:
    rows: dict[str, list[list[float]]] = {}
    for name, (rounds, options) in OPTIMIZERS.items():
        tuned = max(RATES, key=lambda lr: sum(trained(lr, seed, rounds, options)[rounds][1] for seed in (100, 101)))
        for label, lr in (("default", DEFAULTS.get(name, 0.1)), ("tuned", tuned)):
            for seed in range(10):
                found = trained(lr, seed, rounds, options)
                for number in sorted({30, rounds}):
                    rows.setdefault(f"{name}, {label} lr {lr:g}, {number} rounds", []).append(found[number])
    show(rows)


if __name__ == "__main__":
    {"demo": on_fresh_sites, "participation": participation, "optimizers": optimizers}[sys.argv[1]]()
