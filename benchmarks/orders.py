"""CPU time of a round of one-step MAML on the four-layer CNN (W4): exact against first order, in turns in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.orders [--repeats 7] [--rounds 3] [--out results/benchmarks]

``benchmarks.peers`` measures both as well, but one after the other, and minutes apart the machine may not be the same.
``orders.json`` gets the seconds of every round, the machine with its load, and the commit; ``orders.md`` the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

import comfedl as cf
from benchmarks.cores import Clock
from benchmarks.peers.ours import federated, method
from benchmarks.peers.report import machine, spread, told, write_found
from benchmarks.workloads import WORKS, build

ROOT = Path(__file__).resolve().parents[1]
ORDERS = ("first", "exact")
AIM = 1.6


def timed(order: str, rounds: int) -> list[float]:
    """Seconds of each round. The first round warms up, and the last has the evaluation."""
    work, clock, count = WORKS[f"W4 {order}"], Clock(time.process_time), rounds + 2
    options = {"eval_every": count, "callbacks": [clock], "engine_options": {"workers": 1}}
    cf.fit(build(work), federated(work), method(work), count, **options)
    return [after - before for before, after in pairwise(clock.times[:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact MAML against first order.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    where = machine(ROOT, torch.__version__, None)
    times: dict[str, list[list[float]]] = {order: [] for order in ORDERS}
    for _ in range(given.repeats):
        for order in ORDERS:
            times[order].append(timed(order, given.rounds))
    turns = {order: [statistics.median(turn) for turn in each] for order, each in times.items()}
    ratio = spread([exact / first for first, exact in zip(turns["first"], turns["exact"], strict=True)])
    where["load_at_end"] = os.getloadavg()
    first, exact = (1e3 * statistics.median(turns[order]) for order in ORDERS)
    lines = [
        "CPU milliseconds a round of W4, one thread, medians over turns:",
        "",
        "| first order | exact | exact over first order, its median and quartiles |",
        "|---|---|---|",
        f"| {first:.0f} | {exact:.0f} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |",
        "",
        told(where),
        f"The aim was {AIM}: {'reached' if ratio.median <= AIM else '**not reached**'}.",
    ]
    write_found(given.out, "orders", {"machine": where, "ratio": ratio._asdict(), "seconds_of_rounds": times}, lines)


if __name__ == "__main__":
    main()
