"""What evaluation costs: whole runs evaluated after every round, by ``eval_every = "auto"``, and after the last alone.

    OMP_NUM_THREADS=1 python -m benchmarks.evaluation [W1 W2 W3] [--repeats 5]

The workloads are in ``workloads.py``. The three kinds of run take turns in one process; prints median CPU milliseconds
per round, and the share of a run's time that evaluation takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import comfedl as cf
from benchmarks.peers.ours import federated, method
from benchmarks.workloads import WORKS, Work, build

ROUNDS = {"W1": 200, "W2": 100, "W3": 20, "W4": 20}


def shares(work: Work, rounds: int, repeats: int) -> dict[str, tuple[float, float]]:
    """CPU milliseconds per round for each way to evaluate, and evaluation's share of them."""
    fed, ways = federated(work), {"every round": 1, "auto": "auto", "last only": rounds}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, every in ways.items():
            start = time.process_time()
            cf.fit(build(work), fed, method(work), rounds=rounds if repeat else 2, eval_every=every)
            if repeat:  # the first is a warm-up
                times[name].append(1e3 * (time.process_time() - start) / rounds)
    ms = {name: statistics.median(spent) for name, spent in times.items()}
    return {name: (spent, 1 - ms["last only"] / spent) for name, spent in ms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time what evaluation costs.")
    parser.add_argument("works", nargs="*", default=["W1", "W2", "W3"], metavar="W", help=", ".join(WORKS))
    parser.add_argument("--rounds", type=int, help="by default 200 for W1, 100 for W2, 20 for W3 and W4")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.works:
        if name not in WORKS:
            parser.error(f"{name!r} is not a workload; choose from {', '.join(map(repr, WORKS))}.")
    torch.set_num_threads(1)
    for name in arguments.works:
        for way, (ms, share) in shares(WORKS[name], arguments.rounds or ROUNDS[name], arguments.repeats).items():
            print(f"{name}  {way:12}  {ms:8.2f} ms  {share:4.0%}", flush=True)


if __name__ == "__main__":
    main()
