"""The comparisons that the documents quote, both sides in one run: ``python benchmarks/claims.py demo|participation``.

demo: the demo's two methods on splits (seeds 100 to 109) that had no part in choosing its setting. participation: how
``KL`` may weigh four of forty clients a round: among themselves, as it does, or by n / m from the table of last losses.
"""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import torch

import comfedl as cf
from comfedl import demo
from comfedl.algorithms import comfedl
from comfedl.config import parse_config, run_config
from comfedl.outer import Coupled

METRICS = ("validation.accuracy.worst", "validation.accuracy.mean", "train.loss.worst", "train.accuracy.worst")


def table_weights(
    outer: Coupled, losses: torch.Tensor, chosen: list[int], recorded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (k / m) r_i over the k known clients, scaled back to 1 where they add up to more."""
    known = ~losses.isnan()
    r = torch.zeros_like(losses)
    r[known] = outer.weights(losses[known])
    present = r[chosen]
    return present * min(int(known.sum()) / len(chosen), 1 / max(float(present.sum()), 1e-300)), r


def show(rows: dict[str, list[list[float]]]) -> None:
    for name, values in rows.items():
        numbers = np.array(values)
        error = numbers.std(axis=0, ddof=1) / len(numbers) ** 0.5
        told = ", ".join(f"{m} {a:.3f} ± {e:.3f}" for m, a, e in zip(METRICS, numbers.mean(axis=0), error, strict=True))
        print(f"{name:24} {told}   worst by seed: {numbers[:, 0].round(3).tolist()}")


def on_fresh_splits() -> None:
    rows: dict[str, list[list[float]]] = {name: [] for name in demo.METHODS}
    for seed in range(100, 110):
        for name, method in demo.METHODS.items():
            config = parse_config({**demo.COMMON, "seed": seed, "eval_every": 80, "algorithm": method})
            last = run_config(config).rounds[-1]
            rows[name].append([float(last[metric] or 0) for metric in METRICS])
    show(rows)


def participation() -> None:
    rows: dict[str, list[list[float]]] = {}
    for seed in range(3):
        fed = cf.load("digits", cf.partition.Dirichlet(clients=40, alpha=0.3), seed=seed)
        model = cf.models.build("logistic", (1, 8, 8), 10, seed=0)
        for name, method, weights in (
            ("uniform", cf.FedAvg(weighting="uniform", lr=0.5), None),
            ("KL(0.2), participants", cf.ComFedL(outer=cf.KL(0.2), lr=0.5), None),
            ("KL(0.2), n/m by table", cf.ComFedL(outer=cf.KL(0.2), lr=0.5), table_weights),
        ):
            with mock.patch.object(comfedl, "partial_weights", weights or comfedl.partial_weights):
                run = cf.fit(model, fed, method, rounds=100, seed=seed, clients_per_round=4, eval_every=100)
            rows.setdefault(name, []).append([float(run.rounds[-1][metric] or 0) for metric in METRICS])
    show(rows)


if __name__ == "__main__":
    {"demo": on_fresh_splits, "participation": participation}[sys.argv[1]]()
