"""Wall time of a round, of the four-layer CNN (W3) above all: one process and thread against ranks with one each.

    python -m benchmarks.ranks [--ranks 2] [--repeats 7] [--rounds 5] [--works W1 W3]

It starts itself under torchrun. In turns, the first rank runs the embedded engine while the others wait, and all of
them run the distributed one, FedAvg on the same data. That both end with the same model is checked in float64: in
float32 they were 1.5e-4 apart after five rounds of W3, which a bound could not tell from a small mistake.
``ranks.json`` gets the seconds of every round, the machine with its load, and the commit; ``ranks.md`` the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import comfedl as cf
from benchmarks.cores import Clock
from benchmarks.peers.report import machine, told, write_found
from benchmarks.workloads import LR, STEPS, WORKS, build, parts

ROOT = Path(__file__).resolve().parents[1]
BOUND = 1e-10  # rounding, after some rounds in float64
AIM = 1.6  # for two ranks


def timed(engine: str, work: str, rounds: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], cf.Result]:
    """Seconds of each round, and the result. The first round warms up, and the last has the evaluation."""
    fed = cf.FederatedData({f"{i:04d}": part for i, part in enumerate(parts(WORKS[work]))})
    clock, algorithm = Clock(), cf.FedAvg(lr=LR, local_steps=STEPS, batch_size=WORKS[work].batch)
    count = rounds + 2
    result = cf.fit(
        build(WORKS[work]).to(dtype), fed, algorithm, count, eval_every=count, callbacks=[clock], engine=engine,
        engine_options={"workers": 1},
    )  # fmt: skip
    return [after - before for before, after in pairwise(clock.times[:-1])], result


def measure(works: list[str], repeats: int, rounds: int, out: Path) -> None:
    """What each rank does; the first one has the clock."""
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    where = machine(ROOT, torch.__version__, None) if first else {}
    found = {work: one_work(work, repeats, rounds, first) for work in works}
    if not first:
        return
    where["load_at_end"] = os.getloadavg()
    write(out, {"machine": where, "ranks": int(os.environ["WORLD_SIZE"]), "works": found})
    for work, each in found.items():
        if each["apart"] > BOUND:
            sys.exit(f"The models of {work} are {each['apart']:.3g} apart, which is more than rounding.")


def one_work(work: str, repeats: int, rounds: int, first: bool) -> dict[str, Any]:
    """Medians over turns of the medians over a turn's rounds, and the ratio of each turn; for the first rank alone."""
    times: dict[str, list[list[float]]] = {"embedded": [], "distributed": []}
    engines = list(times) if first else ["distributed"]
    models = [timed(engine, work, 1, torch.float64)[1].params for engine in engines]
    for _ in range(repeats):
        for engine in engines:
            times[engine].append(timed(engine, work, rounds)[0])
    if not first:
        return {}
    turns = {engine: [statistics.median(turn) for turn in each] for engine, each in times.items()}
    ratios = [one / several for one, several in zip(*turns.values(), strict=True)]
    return {
        "seconds_a_round": {engine: statistics.median(each) for engine, each in turns.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "apart": max(float((models[0][name] - part).abs().max()) for name, part in models[1].items()),
        "seconds_of_rounds": times,
    }


def write(out: Path, found: dict[str, Any]) -> None:
    ranks = found["ranks"]
    lines = [
        "Wall milliseconds a round, FedAvg, one thread a process, medians over turns:",
        "",
        f"| | one process | {ranks} ranks | ratio, its median (least to most) | models apart in float64 |",
        "|---|---|---|---|---|",
    ]
    for work, each in found["works"].items():
        one, several = (f"{1e3 * value:.{1 if value < 0.1 else 0}f}" for value in each["seconds_a_round"].values())
        spread = f"{each['ratio']:.2f} ({min(each['ratios']):.2f} to {max(each['ratios']):.2f})"
        lines.append(f"| {work} | {one} | {several} | {spread} | {each['apart']:.0e} |")
    lines += [
        "",
        told(found["machine"]),
    ]
    if "W3" in found["works"] and ranks == 2:
        reached = found["works"]["W3"]["ratio"] >= AIM
        lines.append(f"The aim on W3 was {AIM} times: {'reached' if reached else '**not reached**'}.")
    write_found(out, "ranks", found, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="One process against several ranks, one thread each.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--works", nargs="+", default=["W1", "W3"], choices=WORKS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.works, given.repeats, given.rounds, given.out)
        return
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", "-m", "benchmarks.ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([sys.executable, *start, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
