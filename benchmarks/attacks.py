"""What two attackers among ten do to the worst honest client, by method, defence and attack.

Digits, ten clients drawn by Dirichlet(1), logistic regression, 60 rounds; for bad buffers a network with BatchNorm. The
table has the worst honest client's test accuracy, its mean over seeds. "absent" is the run without the two: what their
data are worth.

    python -m benchmarks.attacks [--seeds 5] [--first 0] [--rounds 60] [--only strong,mean] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.engines.faults import Fault
from comfedl.models import zoo

METHODS: dict[str, Callable[..., Algorithm]] = {
    "FedAvg": lambda **more: cf.FedAvg(lr=0.1, **more),
    "equal weights": lambda **more: cf.FedAvg(lr=0.1, weighting="uniform", **more),
    "KL .3": lambda **more: cf.ComFedL(outer=cf.KL(0.3), lr=0.1, **more),
    "Robust .1": lambda **more: cf.Robust(0.1, lr=0.1, **more),
}
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {"aggregate": "median"},
    "trim .25": {"aggregate": "trimmed-mean", "trim": 0.25},
    "geometric": {"aggregate": "geometric-median"},
    "krum": {"aggregate": "krum", "trim": 0.2},
    "multi-krum": {"aggregate": "multi-krum", "trim": 0.2},
    "clip .3": {"clip_update_norm": 0.3},
    "strong": {"defence": "strong"},
}


def attacks(bad: Sequence[str]) -> dict[str, list[Fault]]:
    """The faults of each attack by these clients."""
    lie = cf.faults.LossLie(bad, 1e6)
    return {
        "none": [],
        "absent": [cf.faults.Dropout(1.0, bad)],
        "labels flipped": [cf.faults.LabelFlip(bad)],
        "update times -1": [cf.faults.SignFlip(bad)],
        "loss 1e6 and update times -1": [cf.faults.SignFlip(bad), lie],
        "loss 1e6 and update times -10": [cf.faults.SignFlip(bad, 10.0), lie],
        "loss 1e6 and update times -1e15": [cf.faults.SignFlip(bad, 1e15), lie],
        "none (BatchNorm)": [],
        "bad buffers (BatchNorm)": [cf.faults.BadBuffers(bad, 1000.0)],
        "loss 1e6 and bad buffers (BatchNorm)": [cf.faults.BadBuffers(bad, 1000.0), lie],
    }


def make_model(attack: str, seed: int) -> nn.Module:
    """Logistic regression, or a network with BatchNorm where buffers are attacked."""
    if not attack.endswith("(BatchNorm)"):
        return zoo.build(zoo.MODELS["logistic"], (64,), 10, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def worst_honest(method: Algorithm, attack: str, rounds: int, seed: int) -> float:
    """The test accuracy of the worst client that is not an attacker."""
    fed = cf.load("digits", partition=cf.partition.Dirichlet(10, 1.0), seed=seed)
    bad = list(fed.names[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of combinations that do not hold: they are what is measured
        try:
            result = cf.fit(
                make_model(attack, seed), fed, method, rounds, seed, eval_every=rounds, faults=attacks(bad)[attack]
            )
        except (cf.Diverged, cf.QuorumError):
            return 0.0
    last = [row for row in result.clients if row["round"] == rounds and row["client"] not in bad]
    return min(float(row["test.accuracy"]) for row in last)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--methods", default=",".join(METHODS), help="of these, by comma")
    parser.add_argument("--only", default=",".join(DEFENCES), help="of these defences, by comma")
    parser.add_argument("--attacks", default=",".join(attacks(["a"])), help="of these, by comma")
    parser.add_argument("--out", type=Path, help="write the numbers of all seeds as JSON")
    given = parser.parse_args(arguments)
    names, defences = given.methods.split(","), given.only.split(",")
    print("| method | attack | " + " | ".join(defences) + " |")
    print("|---|---|" + "---|" * len(defences))
    numbers: dict[str, list[float]] = {}
    for name in names:
        for attack in given.attacks.split(","):
            cells = []
            for defence in defences:
                method = METHODS[name](**DEFENCES[defence])
                found = [worst_honest(method, attack, given.rounds, given.first + k) for k in range(given.seeds)]
                numbers[f"{name} / {attack} / {defence}"] = found
                cells.append(f"{mean(found):.3f}".lstrip("0"))
            print(f"| {name} | {attack} | " + " | ".join(cells) + " |", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
