"""Layers that are taken in another way against torch's kernels, over sizes and channels, in turns on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.layers [--repeats 9] [--out results/benchmarks]

Convolutions by tiles (``engines/tiles.py``), and a first convolution, its batch norm and pooling as one layer
(``engines/entry.py``). For each shape: the time over that with torch's convolution, for a gradient alone and for one
with a Hessian's product; for tiles also what their rule expects, and the constants that fit best, which are where
``COSTS`` comes from. ``layers.json`` gets all of it with the machine and the commit, ``layers.md`` the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.report import machine, told, write_found
from comfedl.core.objectives import Params
from comfedl.engines.kernels import allocator, winograd
from comfedl.engines.kernels.first_conv import Entry
from comfedl.engines.kernels.layers import Convolution, Layer, Norm, Parts, Pass
from comfedl.engines.kernels.layouts import WITHIN, last, pooled
from comfedl.engines.kernels.winograd import Tiles

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 32
MOST = SAMPLES * 64 * 32 * 32  # numbers of the images
CHANNELS = ((8, 8), (16, 16), (32, 32), (16, 64), (64, 64), (128, 128))
SIDES = (4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 28, 32, 48)
FIRST = [(ins, kernel, 2 ** (4 + k)) for ins, kernel in ((1, 3), (1, 5), (2, 3), (3, 3)) for k in range(3)]
FIRST_SIDES = (14, 28, 32, 48, 64)

Way = Callable[[], Sequence[Layer]]


def timed(layers: Sequence[Layer], images: Sequence[Tensor | None], v: Params) -> tuple[float, float]:
    """Seconds of a gradient, and of one with a Hessian's product, from the input, the cotangent, and their changes."""
    x, d, dx, dd = images
    begin = time.perf_counter()
    for layer in layers:
        assert x is not None
        x = layer.forward(x)
    for layer in reversed(layers):
        assert d is not None
        d = layer.backward(d, {})
    between = time.perf_counter()
    for layer in layers:
        dx = layer.forward_along(dx, v)
    for layer in reversed(layers):
        assert dd is not None
        dd = layer.backward_along(dd, {})
    return between - begin, time.perf_counter() - begin


def compared(ways: Sequence[tuple[Way, Sequence[Tensor | None]]], v: Params, repeats: int) -> list[float]:
    """The time of the second way over the first, for a gradient and with a Hessian's product, medians over turns."""
    turns = []
    for _ in range(repeats + 2):
        theirs, ours = (timed(way(), images, v) for way, images in ways)
        turns.append([b / a for a, b in zip(theirs, ours, strict=True)])
    return [statistics.median(ratios) for ratios in zip(*turns[2:], strict=True)]


def within(x: Tensor) -> Tensor:
    """Images as a layer by tiles is handed them by its like."""
    return x.permute(WITHIN).contiguous().permute(WITHIN)


def images(channels: int, side: int) -> Tensor:
    return last(torch.randn(SAMPLES, channels, side, side))


def by_tiles(ins: int, outs: int, side: int, repeats: int) -> list[float]:
    layer = nn.Conv2d(ins, outs, 3, padding=1).to(memory_format=torch.channels_last)
    params = {name: part.detach() for name, part in layer.named_parameters()}
    given = [images(channels, side) for channels in (ins, outs, ins, outs)]

    def way(kind: type[Convolution | Tiles]) -> Sequence[Layer]:
        return [kind("", layer, Pass(params, {}), [1, 1], centred=True)]

    ways = [(partial(way, Convolution), given), (partial(way, Tiles), [within(x) for x in given])]
    return compared(ways, {name: torch.randn_like(part) for name, part in params.items()}, repeats)


def as_one(ins: int, kernel: int, outs: int, side: int, repeats: int) -> list[float]:
    module = nn.Sequential(nn.Conv2d(ins, outs, kernel, padding=kernel // 2), nn.BatchNorm2d(outs))
    params = {name: part.detach() for name, part in module.to(memory_format=torch.channels_last).named_parameters()}
    pool = partial(pooled, sizes=[[2, 2], [2, 2], [0, 0], [1, 1]], ceil=False)
    padding, passing = [kernel // 2] * 2, Pass(params, {})

    def apart() -> Sequence[Layer]:
        first = Convolution("0", module[0], passing, padding, centred=True)
        first.lowest = True
        return [first, Norm("1", module[1], passing, pool)]

    def one() -> Sequence[Layer]:
        return [Entry(Parts("0", module[0], passing), padding, "1", module[1], passing, pool)]

    x, *given = images(ins, side), *(images(outs, side // 2) for _ in range(2))
    ways = [(apart, [x, given[0], None, given[1]]), (one, [x, within(given[0]), None, within(given[1])])]
    return compared(ways, {name: torch.randn_like(part) for name, part in params.items()}, repeats)


def fitted(found: Sequence[dict[str, Any]], i: int) -> list[float]:
    """The constants of the rule that fit best, errors being relative."""
    filled = np.array([winograd.filled((row["side"], row["side"])) for row in found])
    ratios = np.array([row["ratios"][i] for row in found])
    far = np.array([row["side"] / min(row["ins"], row["outs"]) for row in found])
    fit: list[float] = np.linalg.lstsq(
        np.stack([filled / ratios, filled * far / ratios], axis=1), np.ones(len(found)), rcond=None
    )[0].tolist()
    return fit


def main() -> None:
    parser = argparse.ArgumentParser(description="Layers taken in another way against torch's kernels.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    allocator.keep(512 * 2**20)
    where = machine(ROOT, torch.__version__, None)
    tiled = []
    for ins, outs, side in [(*pair, side) for pair in CHANNELS for side in SIDES]:
        if SAMPLES * max(ins, outs) * side**2 <= MOST:
            expected = [winograd.expected((side, side), min(ins, outs), twice) for twice in (False, True)]
            ratios = by_tiles(ins, outs, side, given.repeats)
            tiled.append({"ins": ins, "outs": outs, "side": side, "ratios": ratios, "expected": expected})
    first = [
        {"ins": ins, "kernel": kernel, "outs": outs, "side": side, "ratios": as_one(*shape, given.repeats)}
        for shape in ((*sort, side) for sort in FIRST for side in FIRST_SIDES)
        for ins, kernel, outs, side in [shape]
        if ins * kernel**2 <= outs
    ]
    fits = {name: fitted(tiled, i) for i, name in enumerate(("gradient", "with product"))}
    where["load_at_end"] = os.getloadavg()
    lines = [
        f"Time by tiles over that of torch's convolution, kernels of three by three, {SAMPLES} samples, one thread; in",
        "brackets what the rule expects:",
        "",
        "| channels in, out | side | gradient | with a Hessian's product |",
        "|---|---|---|---|",
    ]
    for row in tiled:
        cells = (f"{r:.2f} ({e:.2f})" for r, e in zip(row["ratios"], row["expected"], strict=True))
        lines.append(f"| {row['ins']}, {row['outs']} | {row['side']} | {' | '.join(cells)} |")
    lines += [
        "",
        "The constants that fit best: " + "; ".join(f"{name} {a:.2f}, {b:.2f}" for name, (a, b) in fits.items()) + ".",
        "",
        "Time of a first convolution, batch norm and pooling of two by two as one layer over that of torch's kernels:",
        "",
        "| channels in, out | kernel | side | gradient | with a Hessian's product |",
        "|---|---|---|---|---|",
    ]
    for row in first:
        cells = (f"{r:.2f}" for r in row["ratios"])
        lines.append(f"| {row['ins']}, {row['outs']} | {row['kernel']} | {row['side']} | {' | '.join(cells)} |")
    lines += ["", told(where)]
    write_found(given.out, "layers", {"machine": where, "tiles": tiled, "first": first, "fits": fits}, lines)


if __name__ == "__main__":
    main()
