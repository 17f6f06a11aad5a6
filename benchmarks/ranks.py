"""Wall time of a round on the four-layer CNN (W3): one process with one thread against ranks with one thread each.

    python -m benchmarks.ranks [--ranks 2] [--repeats 7] [--rounds 5]

It starts itself under torchrun. In turns, the first rank runs the embedded engine while the others wait, and all of
them run the distributed one, FedAvg on the same data. That both end with the same model is checked in float64: in
float32 a max-pooling that takes another pixel makes more of rounding than a comparison can tell from a mistake.
``ranks.json`` gets the seconds of every round, the machine with its load, and the commit; ``ranks.md`` the medians.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.peers.report import machine
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


def measure(work: str, repeats: int, rounds: int, out: Path) -> None:
    """What each rank does; the first one has the clock."""
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    where = machine(ROOT, torch.__version__, None) if first else {}
    times: dict[str, list[list[float]]] = {"embedded": [], "distributed": []}
    engines = list(times) if first else ["distributed"]
    models = [timed(engine, work, 1, torch.float64)[1].params for engine in engines]
    for _ in range(repeats):
        for engine in engines:
            times[engine].append(timed(engine, work, rounds)[0])
    if not first:
        return
    apart = max(float((models[0][name] - part).abs().max()) for name, part in models[1].items())
    where["load_at_end"] = os.getloadavg()
    found = summary(times) | {"work": work, "ranks": int(os.environ["WORLD_SIZE"]), "apart": apart}
    write(out, {"machine": where, **found, "seconds_of_rounds": times})
    if apart > BOUND:
        sys.exit(f"The models are {apart:.3g} apart, which is more than rounding.")


def summary(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians over turns of the medians over a turn's rounds, and the ratio of each turn."""
    turns = {engine: [statistics.median(turn) for turn in each] for engine, each in times.items()}
    ratios = [one / several for one, several in zip(*turns.values(), strict=True)]
    medians = {engine: statistics.median(each) for engine, each in turns.items()}
    return {"seconds_a_round": medians, "ratio": statistics.median(ratios), "ratios": ratios}


def write(out: Path, found: dict[str, Any]) -> None:
    where, ratios, seconds = found["machine"], found["ratios"], found["seconds_a_round"]
    ranks, verdict = found["ranks"], ""
    if found["work"] == "W3" and ranks == 2:
        verdict = f" The aim was {AIM} times: {'reached' if found['ratio'] >= AIM else '**not reached**'}."
    text = (
        f"Seconds a round of {found['work']}, FedAvg, one thread a process, {len(ratios)} turns:\n\n"
        f"| one process | {ranks} ranks | ratio, its median (least to most) | models apart in float64 |\n"
        "|---|---|---|---|\n"
        f"| {seconds['embedded']:.3f} | {seconds['distributed']:.3f} | {found['ratio']:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | {found['apart']:.0e} |\n\n"
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}; commit {where['commit']}, "
        f"{where['date']}; load "
        f"{where['load_at_start'][0]:.1f} at the start and {where['load_at_end'][0]:.1f} at the end.{verdict}\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "ranks.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "ranks.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="One process against several ranks, one thread each.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default="W3", choices=WORKS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.work, given.repeats, given.rounds, given.out)
        return
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", "-m", "benchmarks.ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([sys.executable, *start, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
