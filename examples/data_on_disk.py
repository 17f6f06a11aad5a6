"""Data on disk: a federation larger than the memory that it may take, trained to the same model to the bit.

For anyone whose images or records do not fit into memory. With lazy=True only the participants of a round are read,
and at most `memory_mb` of their samples are in memory at a time. Here each of 200 shops has a file of 500 samples;
all together are 40 MB, and 2 MB of them may be in memory. In a config the same is

    [data]
    name = "folder"
    path = "shops"
    lazy = true
    memory_mb = 2

Expect the model of the same data in memory, to the bit.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

import comfedl as cf

SHOPS, EACH, WIDTH = 200, 500, 100


def write(folder: Path) -> None:
    """A file for each shop; what customers like differs a little from shop to shop."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=WIDTH)
    for k in range(SHOPS):
        x = rng.normal(size=(EACH, WIDTH)).astype(np.float32)
        np.savez(folder / f"shop-{k:03d}.npz", x=x, y=(x @ (common + rng.normal(size=WIDTH)) > 0).astype(np.int64))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        total = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{SHOPS} files, {total:.0f} MB in all")
        feds = {
            "in memory": cf.FederatedData.from_folder(folder),
            "on disk": cf.FederatedData.from_folder(folder, lazy=True, memory_mb=2),
        }
        torch.manual_seed(0)
        model = torch.nn.Linear(WIDTH, 2)
        options = {"rounds": 20, "clients_per_round": 20, "eval_every": 20}
        results = {where: cf.fit(model, fed, cf.Robust(gamma=0.1, lr=0.1), **options) for where, fed in feds.items()}
    for where, result in results.items():
        last = result.rounds[-1]
        mean, worst = last["validation.accuracy.mean"], last["validation.accuracy.worst10"]
        print(f"{where:9} accuracy: mean {mean:.3f}, worst tenth {worst:.3f}")
    memory, disk = results["in memory"], results["on disk"]
    print("the same to the bit:", all(torch.equal(part, disk.params[key]) for key, part in memory.params.items()))


if __name__ == "__main__":
    main()
