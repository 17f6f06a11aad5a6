"""Wall time of a round on the four-layer CNN (W3): one process with one thread against ranks with one thread each.

    python -m benchmarks.ranks [--ranks 2] [--repeats 5] [--rounds 5]

It starts itself under torchrun. In turns, the first rank runs the embedded engine while the others wait, and all of
them run the distributed one; both are FedAvg on the same data and end with the same model, to rounding, which is
checked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

import torch

import comfedl as cf
from benchmarks.cores import Clock
from benchmarks.workloads import LR, STEPS, WORKS, build, parts

BOUND = 1e-4  # rounding, after some rounds of a network with batch statistics in float32


def timed(engine: str, work: str, rounds: int) -> tuple[list[float], cf.Result]:
    """Seconds of each round, and the result. The first round warms up, and the last has the evaluation."""
    fed = cf.FederatedData({f"{i:04d}": part for i, part in enumerate(parts(WORKS[work]))})
    clock, algorithm = Clock(), cf.FedAvg(lr=LR, local_steps=STEPS, batch_size=WORKS[work].batch)
    count = rounds + 2
    result = cf.fit(
        build(WORKS[work]), fed, algorithm, count, eval_every=count, callbacks=[clock], engine=engine,
        engine_options={"workers": 1},
    )  # fmt: skip
    return [after - before for before, after in zip(clock.times, clock.times[1:-1], strict=False)], result


def measure(work: str, repeats: int, rounds: int) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    times: dict[str, list[float]] = {"embedded": [], "distributed": []}
    timed("distributed", work, 1)  # to warm up, and to meet
    apart = 0.0
    for _ in range(repeats):
        models = {}
        for engine in times if first else ("distributed",):
            seconds, result = timed(engine, work, rounds)
            models[engine] = result.params
            if first:
                times[engine].append(statistics.median(seconds))
        if first:
            pairs = zip(*(model.values() for model in models.values()), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in pairs))
    if not first:
        return
    one, several = (statistics.median(each) for each in times.values())
    ratios = sorted(a / b for a, b in zip(*times.values(), strict=True))
    print(f"{work}: seconds a round: {one:.4f} in one process, {several:.4f} on {os.environ['WORLD_SIZE']} ranks")
    print(f"ratio {one / several:.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}); models {apart:.1e} apart at most")
    if apart > BOUND:
        sys.exit(f"The models are {apart:.3g} apart, which is more than rounding.")


def main() -> None:
    parser = argparse.ArgumentParser(description="One process against several ranks, one thread each.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default="W3", choices=WORKS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.work, given.repeats, given.rounds)
        return
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", "-m", "benchmarks.ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([sys.executable, *start, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
