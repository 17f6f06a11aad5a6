"""Data on disk against the same data in memory: ``python -m benchmarks.on_disk``.

``ratio``: rounds per second on disk over rounds per second in memory, for 100 of 1,000 clients of a federation of 3 GB
(``--gb``). Both run in this process, in turns of a few rounds, after one turn each that fills the page cache. All of
``memory_mb`` is far less than the data, and only what a round draws is read, again in every round.

``large``: a federation of 20 GB, of which an MLP is trained for a few rounds and evaluated once at every client, in a
process of its own. The peak of its resident memory counts pages that are mapped from files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import comfedl as cf

ROOT = Path(__file__).parents[1]
CLIENTS, ASKED, CLASSES = 1000, 100, 10
SHAPE = (3, 32, 32)
MODELS = ("cnn4", "mlp")
MEMORY_MB = 500


def samples_in(gb: float) -> int:
    """The number of samples of each client."""
    return round(gb * 1e9 / (4 * np.prod(SHAPE) * CLIENTS))


def write(folder: Path, gb: float) -> None:
    """x and y of all clients, in one file each; x is all zeros and takes no space on the disk."""
    count = samples_in(gb) * CLIENTS
    np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.float32, shape=(count, *SHAPE)).flush()
    np.save(folder / "y.npy", np.random.default_rng(0).integers(0, CLASSES, count))


def federation(folder: Path, lazy: bool) -> cf.FederatedData:
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r" if lazy else None) for name in "xy")
    offsets = np.arange(CLIENTS + 1) * (len(y) // CLIENTS)
    more: dict[str, Any] = {"lazy": True, "memory_mb": MEMORY_MB} if lazy else {}
    return cf.FederatedData.from_flat((x, y, offsets), **more)


class Clock(cf.Callback):
    """The seconds of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def round_done(self, round: int) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def train(fed: cf.FederatedData, model: nn.Module, rounds: int, eval_clients: int, seed: int = 0) -> list[float]:
    """The seconds of each round but the first, which sets up, and the last, which evaluates."""
    clock = Clock()
    cf.fit(
        model, fed, cf.FedAvg(lr=0.01, local_steps=5, batch_size=32), rounds=rounds, clients_per_round=ASKED,
        eval_every=rounds, eval_clients=eval_clients, seed=seed, save_personal=False, callbacks=[clock],
    )  # fmt: skip
    return clock.seconds[1:-1]


def ratio(folder: Path, gb: float, rounds: int, repeats: int, models: Sequence[str]) -> dict[str, Any]:
    write(folder, gb)
    feds = {"memory": federation(folder, False), "disk": federation(folder, True)}
    found: dict[str, Any] = {"gb": gb, "memory_mb": MEMORY_MB, "load": os.getloadavg()[0]}
    for name in models:
        model = cf.models.build(name, SHAPE, CLASSES, 0)
        turns: dict[str, list[float]] = {where: [] for where in feds}
        for turn in range(repeats + 1):
            for where, fed in feds.items():
                seconds = statistics.median(train(fed, model, rounds + 2, 10, seed=turn))
                if turn:
                    turns[where].append(seconds)
        ratios = [memory / disk for memory, disk in zip(turns["memory"], turns["disk"], strict=True)]
        found[name] = {
            **{f"{where}_ms": round(1e3 * statistics.median(seconds), 1) for where, seconds in turns.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(each, 3) for each in ratios],
        }
    return found


def large(folder: Path, gb: float, rounds: int) -> dict[str, Any]:
    write(folder, gb)
    command = [sys.executable, "-m", "benchmarks.on_disk", "--train", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return {"gb": (folder / "x.npy").stat().st_size / 1e9, **json.loads(done.stdout)}


def train_large(folder: Path, rounds: int) -> dict[str, Any]:
    """What the process of ``large`` does: peak memory in MB, after the imports, after training, and at the end."""

    def peak() -> float:
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    imports, start = peak(), time.perf_counter()
    fed = federation(folder, True)
    seconds = train(fed, cf.models.build("mlp", SHAPE, CLASSES, 0), rounds + 2, CLIENTS)
    return {
        "peak_mb_after_imports": imports,
        "peak_mb": peak(),
        "round_s": round(statistics.median(seconds), 2),
        "all_s": round(time.perf_counter() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3, help="of the comparison")
    parser.add_argument("--large", type=float, default=20, help="GB of the sparse file; 0 leaves it out")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of the comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="turns of the comparison; 0 leaves it out")
    parser.add_argument("--folder", type=Path, help="where the files are written and removed; a temporary one")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train_large(options.train, options.rounds)))
        return
    torch.set_num_threads(1)
    if options.repeats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(
                json.dumps(
                    {"ratio": ratio(Path(folder), options.gb, options.rounds, options.repeats, options.models)},
                    indent=1,
                )
            )
    if options.large:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps({"large": large(Path(folder), options.large, options.rounds)}, indent=1))


if __name__ == "__main__":
    main()
