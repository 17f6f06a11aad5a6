"""Wall time per round: one process against several ranks, one thread each.

    python -m benchmarks.ranks [--ranks 2] [--repeats 7] [--rounds 5] [--works W1 W3 W5 W6 W7]

It starts itself under torchrun. In turns, the first rank runs the embedded engine while the others wait, and all ranks
run the distributed engine, with FedAvg on the same data. The script checks in float64 that both end with the same
model; in float32 they differed by 1.5e-4 after five rounds of W3, too much to rule out a small mistake. It writes the
seconds of every round, the machine with its load and the commit to ``ranks.json``, the medians to ``ranks.md``.
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
from benchmarks.peers.report import machine, machine_line, write_results
from benchmarks.workloads import LR, STEPS, WORKS, build, parts

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-10  # rounding errors after a few rounds in float64
GOAL, HEAVY = 1.6, ("W3", "W5", "W6", "W7")  # speed-up with two ranks, and where


def timed(engine: str, work: str, rounds: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], cf.Result]:
    """Seconds of each round, and the result. The first round is a warm-up, and the last has the evaluation."""
    fed = cf.FederatedData({f"{i:04d}": (as_dtype(x, dtype), y) for i, (x, y) in enumerate(parts(WORKS[work]))})
    clock, algorithm = Clock(), cf.FedAvg(lr=LR, local_steps=STEPS, batch_size=WORKS[work].batch)
    count = rounds + 2
    result = cf.fit(
        build(WORKS[work]).to(dtype), fed, algorithm, count, eval_every=count, callbacks=[clock], engine=engine,
        engine_options={"workers": 1},
    )  # fmt: skip
    return [after - before for before, after in pairwise(clock.times[:-1])], result


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x  # token ids stay whole numbers


def measure(works: list[str], repeats: int, rounds: int, out: Path) -> None:
    """Run on every rank; the first one measures."""
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    where = machine(ROOT, torch.__version__, None) if first else {}
    found = {work: one_work(work, repeats, rounds, first) for work in works}
    if not first:
        return
    where["load_at_end"] = os.getloadavg()
    write(out, {"machine": where, "ranks": int(os.environ["WORLD_SIZE"]), "works": found})
    for work, each in found.items():
        if each["apart"] > TOLERANCE:
            sys.exit(f"The models of {work} differ by {each['apart']:.3g}, more than rounding errors.")


def one_work(work: str, repeats: int, rounds: int, first: bool) -> dict[str, Any]:
    """The median over turns of each turn's median, and the ratio of each turn; only on the first rank."""
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
        "Wall milliseconds per round, FedAvg, one thread per process, medians over turns:",
        "",
        f"| | one process | {ranks} ranks | median ratio (min to max) | difference of the models in float64 |",
        "|---|---|---|---|---|",
    ]
    for work, each in found["works"].items():
        one, several = (f"{1e3 * value:.{1 if value < 0.1 else 0}f}" for value in each["seconds_a_round"].values())
        spread = f"{each['ratio']:.2f} ({min(each['ratios']):.2f} to {max(each['ratios']):.2f})"
        lines.append(f"| {work} | {one} | {several} | {spread} | {each['apart']:.0e} |")
    lines += [
        "",
        machine_line(found["machine"]),
    ]
    if ranks == 2:
        missed = [work for work, each in found["works"].items() if each["ratio"] < GOAL and work in HEAVY]
        lines.append(
            f"The goal on {', '.join(HEAVY)} was {GOAL}: {'missed on ' + ', '.join(missed) if missed else 'reached'}."
        )
    write_results(out, "ranks", found, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="One process against several ranks, one thread each.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--works", nargs="+", default=["W1", "W3", "W5", "W6", "W7"], choices=WORKS)
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
