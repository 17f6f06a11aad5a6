"""What optimisers and robust weights cost: rounds with each of them against plain FedAvg's, in one process, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizers [W1 W2] [--repeats 9]

The workloads are in ``workloads.py``. Prints median CPU milliseconds per round and the ratio to plain SGD; ratios carry
over to other machines, times do not.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

import comfedl as cf
from benchmarks.ours import TURN, ours, seconds
from benchmarks.peers.ours import method
from benchmarks.workloads import WORKS, Work
from comfedl.algorithms.base import Algorithm

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "weight decay": {"client_optimizer": cf.optim.SGD(weight_decay=1e-4)},
    "momentum": {"client_optimizer": cf.optim.SGD(momentum=0.9)},
    "momentum, weight decay": {"client_optimizer": cf.optim.SGD(momentum=0.9, weight_decay=1e-4)},
    "nesterov": {"client_optimizer": cf.optim.SGD(momentum=0.9, nesterov=True)},
    "adam": {"client_optimizer": cf.optim.Adam()},
    "adamw": {"client_optimizer": cf.optim.AdamW()},
    "adam, kept": {"client_optimizer": cf.optim.Adam(keep_state=True)},
    "clipped": {"clip_grad_norm": 1.0},
    "cosine": {"lr_schedule": cf.schedule.Cosine(rounds=10**9, end=0.1)},
    "server momentum": {"server_optimizer": cf.optim.SGD(momentum=0.9)},
    "server yogi": {"server_optimizer": cf.optim.Yogi()},
}


def variants(work: Work) -> dict[str, Algorithm]:
    """The workload's method with each optimiser, the two methods that correct local steps, and the robust ones."""
    plain = method(work)
    common = {"lr": plain.lr, "local_steps": plain.local_steps, "batch_size": plain.batch_size}
    found: dict[str, Algorithm] = {name: replace(plain, **changes) for name, changes in VARIANTS.items()}  # type: ignore[arg-type]
    return found | {
        "fedprox": cf.FedProx(**common),  # type: ignore[arg-type]
        "scaffold": cf.Scaffold(**common),  # type: ignore[arg-type]
        "robust": cf.Robust(**common),  # type: ignore[arg-type]
        "kl": cf.ComFedL(outer=cf.KL(0.1), **common),  # type: ignore[arg-type]
    }


def medians(work: Work, repeats: int, only: Sequence[str] = ()) -> dict[str, float]:
    """CPU milliseconds per round of each variant, measured in turns."""
    chosen = {name: each for name, each in variants(work).items() if not only or name in ("plain", *only)}
    rounds = {name: ours(work, "auto", algorithm) for name, algorithm in chosen.items()}
    turns = 1 + int(TURN / max(seconds(rounds["plain"], 3), 1e-6))
    for each in rounds.values():
        each()  # a warm-up
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(repeats):
        for name, each in rounds.items():
            times[name].append(1e3 * seconds(each, turns))
    return {name: statistics.median(spent) for name, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rounds with optimisers against plain SGD.")
    parser.add_argument("works", nargs="*", default=["W1", "W2"], metavar="W", help=", ".join(WORKS))
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="some of the variants; default all")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    for name in arguments.works:
        if name not in WORKS:
            parser.error(f"{name!r} is not a workload; choose from {', '.join(map(repr, WORKS))}.")
    torch.set_num_threads(1)
    for name in arguments.works:
        ms = medians(WORKS[name], arguments.repeats, arguments.only)
        for variant, spent in ms.items():
            print(f"{name:9}{variant:24}{spent:10.3f} ms{spent / ms['plain']:8.2f}")


if __name__ == "__main__":
    main()
