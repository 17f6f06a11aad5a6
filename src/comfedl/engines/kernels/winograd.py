"""Convolutions of three by three by tiles, with about a quarter of the multiplications (Winograd's minimal filtering).

The output is cut into tiles of up to four by four. Let them be of four: along one axis, a tile's four sums of three
products are coefficients of a product of polynomials, and its values at six points fix them. So images, kernels and
what comes back are taken to their values at these points, are multiplied there, channels with channels, and the product
is taken back. The derivatives of a convolution are products of the same values: with the ways to the points paid once,
the six convolutions of a Hessian's product have no more ways to go than the three of a gradient. Images come out with
the samples next to the channels in memory, which is how they are wanted by the next such layer.

A way is a matrix for each axis, with the padding in it, and its transpose is the way of the derivative. All is exact
but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from comfedl.core.objectives import Params
from comfedl.engines.kernels.layers import Pass, Weighted
from comfedl.engines.kernels.layouts import WITHIN
from comfedl.engines.kernels.small_products import added, products

KERNEL = 3
# Where polynomials are taken, for a tile of n the first n + 1 and infinity. These round less than most others of their
# number. With one more, for tiles of five, it would be ten times as much as a plain convolution's in place of three.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)
# The time by tiles of four over that of torch's convolution, for a gradient alone and for one with a Hessian's product:
# a part for the products, and one for the ways, which counts for each pixel of a side and goes with one over the
# channels. A little above what ``benchmarks.layers`` finds to fit best: where it is close, convolutions stay torch's.
COSTS = {False: (0.7, 0.55), True: (0.55, 0.37)}
WORTH = 0.95  # tiles are taken below this
# For a gradient alone only with so many channels: with fewer the gain is small, and none on two threads that share a
# processor's multipliers.
MANY = 64


class Tiles(Weighted):
    """``nn.Conv2d`` with a kernel of three by three and no stride, dilation or groups."""

    def __init__(self, name: str, layer: nn.Module, within: Pass, padding: list[int], centred: bool) -> None:
        super().__init__(name, layer, within)
        self.padding, self.centred = padding, centred

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        self.images, self.outputs, self.kernels = ways(height, width, *self.padding, x.dtype)
        self.x, self.w, self.samples = there(x, self.images), self._kernels(self.weight), len(x)
        return self._result(products(self.x, self.w.mT), self.bias)

    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        self.d = there(d, self.outputs)
        if self.trained[0]:
            self._give(found, products(self.d.mT, self.x))
        self._give_bias(found, d)
        return None if self.lowest else back(products(self.d, self.w), self.samples, self.images)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        weight, bias = self.along(v)
        self.v = self._kernels(weight)
        if dx is None:
            self.dx, y = None, products(self.x, self.v.mT)
        else:
            self.dx = there(dx, self.images)
            y = added(products(self.dx, self.w.mT), self.x, self.v.mT)
        return self._result(y, None if self.centred else bias)

    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        moved = there(dd, self.outputs)
        if self.trained[0]:
            weight = products(moved.mT, self.x)
            self._give(found, weight if self.dx is None else added(weight, self.d.mT, self.dx))
        self._give_bias(found, dd)
        if self.lowest:
            return None
        return back(added(products(moved, self.w), self.d, self.v), self.samples, self.images)

    def _kernels(self, weight: Tensor) -> Tensor:
        """A weight's values at the points, [points, channels out, channels in]."""
        values = self.kernels @ weight.permute(3, 2, 0, 1).reshape(KERNEL**2, -1)
        return values.view(-1, *weight.shape[:2])

    def _result(self, y: Tensor, bias: Tensor | None) -> Tensor:
        out = back(y, self.samples, self.outputs)
        return out if bias is None else out.add_(bias[:, None, None])

    def _give(self, found: Params, values: Tensor) -> None:
        """Hand over the weight's part, from its values at the points."""
        weight = self.kernels.t() @ values.flatten(1)
        found[self.names[0]] = weight.view(KERNEL, KERNEL, *values.shape[1:]).permute(2, 3, 1, 0)

    def _give_bias(self, found: Params, d: Tensor) -> None:
        if self.trained[1]:
            found[self.names[1]] = d.new_zeros(d.shape[1]) if self.centred else d.sum(dim=(0, 2, 3))


def tiled(layer: nn.Conv2d, padding: list[int], x: Tensor, twice: bool) -> bool:
    """Whether a convolution of these images can be taken by tiles, and is faster for it."""
    plain = layer.stride == (1, 1) == layer.dilation and layer.groups == 1
    if layer.kernel_size != (KERNEL, KERNEL) or not plain:
        return False
    sizes = [size + 2 * pad - KERNEL + 1 for size, pad in zip(x.shape[2:], padding, strict=True)]
    if min(sizes) < 1:
        return False
    fewest = min(layer.weight.shape[:2])
    return (twice or fewest >= MANY) and expected(sizes, fewest, twice) < WORTH


def expected(sizes: Sequence[int], channels: int, twice: bool) -> float:
    """The time by tiles over that of torch's convolution, for an output of these sizes."""
    multiplied, moved = COSTS[twice]
    return filled(sizes) * (multiplied + moved * max(sizes) / channels)


def filled(sizes: Sequence[int]) -> float:
    """How many values at points an output of these sizes takes, over those of tiles of four that it fills."""
    return math.prod(-(-size // cut(size)) * (cut(size) + KERNEL - 1) / (1.5 * size) for size in sizes)


class Way(NamedTuple):
    """The way of images to the points as batched products: across every row, then down every column of what that gives.

    Where tiles have no number in common, ``tile`` is the way of one, both axes at once, and the fewer multiplications.
    """

    across: Tensor  # [height, points of the width and tiles, width]
    down: Tensor  # [points of the width, points of the height and tiles, height]
    tile: Tensor | None  # [1, points, numbers of a tile]
    points: int
    tiles: tuple[int, int]

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, apart: bool) -> Way:
        """From that of each axis, [points, tiles, numbers], and whether tiles have no number in common."""
        tile = None
        if apart:
            high, wide = (way[:, 0, : way.shape[2] // way.shape[1]] for way in (rows, columns))
            # The points of the width come first, and the numbers of the height.
            tile = torch.einsum("rh,cw->crhw", high, wide).flatten(2).flatten(0, 1)[None]
        across = columns.flatten(0, 1).expand(rows.shape[2], -1, -1)
        down = rows.flatten(0, 1).expand(len(columns), -1, -1)
        return cls(across, down, tile, len(columns) * len(rows), (rows.shape[1], columns.shape[1]))


def there(x: Tensor, way: Way) -> Tensor:
    """Images' values at the points, [points, tiles * samples, channels]."""
    _, channels, height, width = x.shape
    x, (across, down, tile, points, (high, wide)) = x.permute(WITHIN), way
    if tile is None:
        x = products(across, x.reshape(height, width, -1)).view(height, len(down), -1)
        return products(down, x.transpose(0, 1)).view(points, -1, channels)
    x = x.reshape(high, height // high, wide, width // wide, -1).permute(1, 3, 0, 2, 4)
    return products(tile, x.reshape(1, tile.shape[2], -1)).view(points, -1, channels)


def back(y: Tensor, samples: int, way: Way) -> Tensor:
    """The transpose of ``there``."""
    across, down, tile, points, (high, wide) = way
    height, width = len(across), across.shape[2]
    if tile is None:
        y = y.view(len(down), down.shape[1], -1)
        x = y.new_empty(height, len(down), y.shape[2])
        products(down.mT, y, out=x.transpose(0, 1))
        x = products(across.mT, x.view(height, across.shape[1], -1))
    else:
        x = products(tile.mT, y.view(1, points, -1)).view(height // high, width // wide, high, wide, -1)
        x = x.permute(2, 0, 3, 1, 4).reshape(height, width, -1)
    return x.view(height, width, samples, -1).permute(WITHIN)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def ways(height: int, width: int, up: int, left: int, dtype: torch.dtype) -> tuple[Way, Way, Tensor]:
    """The ways to the points of images of a size, of their outputs, and of kernels, [points, numbers]."""
    (images, outputs, kernels), others = (axis(*each, dtype) for each in ((height, up), (width, left)))
    both = outputs, others[1]
    alone = all(way.shape[1] == 1 for way in both)
    full = all(way.shape[2] == way.shape[1] * cut(way.shape[2]) for way in both)  # the last tile as well
    return Way.of(images, others[0], alone), Way.of(*both, full), torch.kron(others[2], kernels)


def axis(size: int, padding: int, dtype: torch.dtype) -> list[Tensor]:
    """The ways of one axis."""
    out = size + 2 * padding - KERNEL + 1
    side = cut(out)
    count, tiles = side + KERNEL - 1, -(-out // side)
    images, outputs = np.zeros((count, tiles, tiles * side + KERNEL - 1)), np.zeros((count, tiles, tiles * side))
    for tile in range(tiles):
        first = tile * side
        images[:, tile, first : first + count] = _of_images(count)
        outputs[:, tile, first : first + side] = _powers(count, side)
    found = images[:, :, padding : padding + size], outputs[:, :, :out], _powers(count, KERNEL)
    return [torch.tensor(part, dtype=dtype, device="cpu") for part in found]


def cut(size: int) -> int:
    """The side of the tiles that cover so many numbers with the fewest values at points."""
    return min(range(1, len(POINTS)), key=lambda side: -(-size // side) * (side + KERNEL - 1))


def _powers(count: int, length: int) -> NDArray[np.float64]:
    """The values at so many points of the polynomials 1, x, x^2, ...; at infinity, of the leading coefficient."""
    values = np.zeros((count, length))
    values[:-1] = np.power.outer(np.array(POINTS[: count - 1]), np.arange(length))
    values[-1, -1] = 1.0
    return values


def _of_images(count: int) -> NDArray[np.float64]:
    """Lagrange's polynomials of the points, coefficient by coefficient, and the one that is zero at all of them."""
    found, points = np.zeros((count, count)), POINTS[: count - 1]
    for i, point in enumerate(points):
        others = np.array([p for p in points if p != point])
        found[i, :-1] = np.poly(others)[::-1] / np.prod(point - others)
    found[-1] = np.poly(points)[::-1]
    return found
