"""Wall time per round of FedAvg with one thread and with several, in turns.

    python -m benchmarks.cores [--workers 2] [--repeats 5] [--rounds 5] [--works W3 W5 W6 W7]

Both run in this process on the same data; the script checks that they end with bitwise the same model. It writes the
seconds of every turn, the machine with its load and the commit to ``cores.json``, the medians to ``cores.md``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import comfedl as cf
from benchmarks.peers.report import machine, machine_line, write_results
from benchmarks.workloads import LR, STEPS, WORKS, Work, build, parts
from comfedl.engines.thread_pool import TRIAL
from comfedl.training.callbacks import Callback

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.6  # speed-up with two threads
WARM = len(TRIAL) + 1  # rounds in which the engine may still try out threads


class Clock(Callback):
    """Records the time at the end of each round, by the wall clock or another one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.times: list[float] = []
        self._now = now

    def round_done(self, number: int) -> None:
        self.times.append(self._now())


def timed(work: Work, workers: int, rounds: int) -> tuple[float, cf.Result]:
    """Median seconds per round, and the result. The first rounds are a warm-up, and the last has the evaluation."""
    torch.set_num_threads(workers)
    fed = cf.FederatedData({f"{i:04d}": part for i, part in enumerate(parts(work))})
    algorithm = cf.FedAvg(lr=LR, local_steps=STEPS, batch_size=work.batch)
    clock, options, count = Clock(), {"workers": workers}, WARM + rounds + 1
    result = cf.fit(build(work), fed, algorithm, count, eval_every=count, callbacks=[clock], engine_options=options)
    return statistics.median(b - a for a, b in pairwise(clock.times[WARM - 1 : -1])), result


def one_work(work: Work, workers: int, repeats: int, rounds: int) -> dict[str, Any]:
    """The median over turns, and the ratio of each turn; the first turn is a warm-up."""
    times: dict[int, list[float]] = {1: [], workers: []}
    models = []
    for repeat in range(repeats + 1):
        for count in times:
            seconds, result = timed(work, count, rounds)
            models.append(result.params)
            if repeat:
                times[count].append(seconds)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        "seconds_a_round": {count: statistics.median(each) for count, each in times.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "equal": all(torch.equal(part, models[0][name]) for model in models for name, part in model.items()),
        "seconds_of_turns": times,
    }


def write(out: Path, found: dict[str, Any]) -> None:
    workers = found["workers"]
    lines = [
        "Wall milliseconds per round, FedAvg, in one process, medians over turns:",
        "",
        f"| | one thread | {workers} threads | median ratio (min to max) | models |",
        "|---|---|---|---|---|",
    ]
    for work, each in found["works"].items():
        one, several = (f"{1e3 * seconds:.0f}" for seconds in each["seconds_a_round"].values())
        spread = f"{each['ratio']:.2f} ({min(each['ratios']):.2f} to {max(each['ratios']):.2f})"
        same = "equal to the bit" if each["equal"] else "**different**"
        lines.append(f"| {work} | {one} | {several} | {spread} | {same} |")
    lines += ["", machine_line(found["machine"])]
    if workers == 2:
        missed = [work for work, each in found["works"].items() if each["ratio"] < GOAL]
        lines.append(
            f"The goal was a speed-up of {GOAL}: {'not reached on ' + ', '.join(missed) if missed else 'reached'}."
        )
    write_results(out, "cores", found, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="One thread against several.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--works", nargs="+", default=["W3", "W5", "W6", "W7"], choices=WORKS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    where = machine(ROOT, torch.__version__, None)
    works = {name: one_work(WORKS[name], given.workers, given.repeats, given.rounds) for name in given.works}
    where["load_at_end"] = os.getloadavg()
    write(given.out, {"machine": where, "workers": given.workers, "works": works})


if __name__ == "__main__":
    main()
