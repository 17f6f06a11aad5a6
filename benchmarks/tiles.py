"""Convolutions by tiles against torch's own, over sizes and channels, in turns on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.tiles [--repeats 9] [--out results/benchmarks]

For each shape: the time by tiles over that of torch's convolution, for a gradient alone and for one with a Hessian's
product, and what the rule of ``engines/tiles.py`` expects. At the end, the constants that fit best: they are where
``COSTS`` comes from. ``tiles.json`` gets all of it with the machine and the commit, ``tiles.md`` the table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.report import machine, told, write_found
from comfedl.engines import memory, tiles
from comfedl.engines.layers import Convolution, Pass
from comfedl.engines.rows import WITHIN, last
from comfedl.engines.tiles import Tiles
from comfedl.problem import Params

ROOT = Path(__file__).resolve().parents[1]
CHANNELS = ((8, 8), (16, 16), (32, 32), (16, 64), (64, 64), (128, 128))
SIDES = (4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 28, 32, 48)
SAMPLES = 32
MOST = SAMPLES * 64 * 32 * 32  # numbers of the images
KINDS: tuple[type[Convolution | Tiles], ...] = (Convolution, Tiles)


def timed(kind: type[Convolution | Tiles], layer: nn.Conv2d, images: list[Tensor], v: Params) -> tuple[float, float]:
    """Seconds of a gradient, and of one with a Hessian's product."""
    params = {name: part.detach() for name, part in layer.named_parameters()}
    x, d, dx, dd = images
    begin = time.perf_counter()
    made = kind("", layer, Pass(params, {}), [1, 1], centred=True)
    made.forward(x)
    made.backward(d, {})
    between = time.perf_counter()
    made.forward_along(dx, v)
    made.backward_along(dd, {})
    return between - begin, time.perf_counter() - begin


def measured(ins: int, outs: int, side: int, repeats: int) -> list[float]:
    """The time by tiles over torch's, for a gradient and with a Hessian's product, medians over turns."""
    layer = nn.Conv2d(ins, outs, 3, padding=1).to(memory_format=torch.channels_last)
    v = {name: torch.randn_like(part) for name, part in layer.named_parameters()}
    first = [last(torch.randn(SAMPLES, channels, side, side)) for channels in (ins, outs, ins, outs)]
    # As a layer by tiles is handed them by its like.
    within = [x.permute(WITHIN).contiguous().permute(WITHIN) for x in first]
    turns = []
    for _ in range(repeats + 2):
        direct, tiled = (timed(kind, layer, x, v) for kind, x in zip(KINDS, (first, within), strict=True))
        turns.append([b / a for a, b in zip(direct, tiled, strict=True)])
    return [statistics.median(ratios) for ratios in zip(*turns[2:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Convolutions by tiles against torch's own.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    memory.keep(512 * 2**20)
    where = machine(ROOT, torch.__version__, None)
    shapes = [(*pair, side) for pair in CHANNELS for side in SIDES if SAMPLES * max(pair) * side**2 <= MOST]
    found = []
    for ins, outs, side in shapes:
        ratios = measured(ins, outs, side, given.repeats)
        expected = [tiles.expected((side, side), min(ins, outs), twice) for twice in (False, True)]
        found.append({"ins": ins, "outs": outs, "side": side, "ratios": ratios, "expected": expected})
        print(
            f"{ins} to {outs}, {side}: "
            + ", ".join(f"{r:.2f} ({e:.2f})" for r, e in zip(ratios, expected, strict=True))
        )
    fits = {}
    for i, name in enumerate(("gradient", "with product")):
        filled = np.array([tiles.filled((row["side"], row["side"])) for row in found])
        ratios = np.array([row["ratios"][i] for row in found])
        far = np.array([row["side"] / min(row["ins"], row["outs"]) for row in found])
        # Errors count relative to what is found.
        left = np.stack([filled / ratios, filled * far / ratios], axis=1)
        fits[name] = np.linalg.lstsq(left, np.ones(len(found)), rcond=None)[0].tolist()
    where["load_at_end"] = os.getloadavg()
    lines = [
        f"Time by tiles over that of torch's convolution, kernels of three by three, {SAMPLES} samples, one thread;",
        "in brackets what the rule expects:",
        "",
        "| channels in, out | side | gradient | with a Hessian's product |",
        "|---|---|---|---|",
        *(
            f"| {row['ins']}, {row['outs']} | {row['side']} | "
            + " | ".join(f"{r:.2f} ({e:.2f})" for r, e in zip(row["ratios"], row["expected"], strict=True))
            + " |"
            for row in found
        ),
        "",
        "The constants that fit best: " + "; ".join(f"{name} {a:.2f}, {b:.2f}" for name, (a, b) in fits.items()) + ".",
        "",
        told(where),
    ]
    write_found(given.out, "tiles", {"machine": where, "shapes": found, "fits": fits}, lines)


if __name__ == "__main__":
    main()
