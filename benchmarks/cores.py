"""Wall time per round of FedAvg on the four-layer CNN (W3) with one thread and with several, in turns.

    python -m benchmarks.cores [--workers 2] [--repeats 5] [--rounds 5]

Both run in this process on the same data; the script checks that they end with bitwise the same model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

import comfedl as cf
from comfedl.training.callbacks import Callback


def data(clients: int = 10, samples: int = 200) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (clients * samples,), generator=generator)
    cut = {f"{i:02d}": slice(i * samples, (i + 1) * samples) for i in range(clients)}
    return cf.FederatedData({name: (x[rows], y[rows]) for name, rows in cut.items()})


class Clock(Callback):
    """Records the time at the end of each round, by the wall clock or another one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.times: list[float] = []
        self._now = now

    def round_done(self, number: int) -> None:
        self.times.append(self._now())


def timed(fed: cf.FederatedData, workers: int, rounds: int) -> tuple[float, cf.Result]:
    """Median seconds per round, and the result. The first round is a warm-up, and the last has the evaluation."""
    model = cf.models.build("cnn4", (3, 32, 32), 10, 0)
    algorithm = cf.FedAvg(lr=0.1, local_steps=5, batch_size=32)
    clock, options = Clock(), {"workers": workers}
    result = cf.fit(model, fed, algorithm, rounds + 2, eval_every=rounds + 2, callbacks=[clock], engine_options=options)
    return statistics.median(b - a for a, b in pairwise(clock.times[:-1])), result


def main() -> None:
    parser = argparse.ArgumentParser(description="One thread against several on the four-layer CNN.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    fed = data()
    torch.set_num_threads(arguments.workers)
    times: dict[int, list[float]] = {1: [], arguments.workers: []}
    models = []
    for repeat in range(arguments.repeats + 1):
        for workers in times:
            seconds, result = timed(fed, workers, arguments.rounds)
            models.append(result.params)
            if repeat:
                times[workers].append(seconds)
    assert all(torch.equal(part, models[0][name]) for model in models for name, part in model.items())
    one, several = (statistics.median(times[workers]) for workers in times)
    ratios = sorted(a / b for a, b in zip(*times.values(), strict=True))
    print(f"seconds per round: {one:.3f} on one thread, {several:.3f} on {arguments.workers}")
    print(f"ratio {one / several:.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}); the models are bitwise equal")


if __name__ == "__main__":
    main()
