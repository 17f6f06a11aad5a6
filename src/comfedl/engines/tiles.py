"""Convolutions of three by three by tiles, with a quarter of the multiplications (Winograd's minimal filtering).

The output is cut into tiles of four by four. Along one axis, a tile's four sums of three products are coefficients of a
product of polynomials, and its values at six points fix them. So images, kernels and what comes back are taken to their
values at these points, are multiplied there, channels with channels, and the product is taken back. The derivatives of
a convolution are products of the same values: with the ways to the points paid once, the six convolutions of a
Hessian's product have no more ways to go than the three of a gradient.

A way is a matrix for each axis, with the padding in it, and its transpose is the way of the derivative. All is exact
but for rounding.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from comfedl.engines.layers import Pass, Weighted, last, wide
from comfedl.problem import Params

KERNEL = 3
TILE = 4
# Where polynomials are taken; the last point is infinity. These round less than others of their number.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)
COUNT = len(POINTS) + 1
# The time by tiles that fill the images over that of torch's convolution, for a gradient alone and for one with a
# Hessian's product: a part for the products, and one for the ways, which counts for each pixel of a side and goes with
# one over the channels. Fitted to 8 to 128 channels and sides of 4 to 48.
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
        ways = [way(size, padding, x.dtype) for size, padding in zip(x.shape[2:], self.padding, strict=True)]
        (self.images, self.outputs), self.samples = zip(*ways, strict=True), len(x)
        self.x, self.w = there(x, *self.images), self._kernels(self.weight)
        return self._result(torch.bmm(self.x, self.w), self.bias)

    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        self.d = there(d, *self.outputs)
        self._give(found, torch.bmm(self.x.mT, self.d), d)
        return None if self.lowest else back(torch.bmm(self.d, self.w.mT), self.samples, *self.images)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        weight, bias = self.along(v)
        self.v = self._kernels(weight)
        y = torch.bmm(self.x, self.v)
        self.dx = None if dx is None else there(dx, *self.images)
        return self._result(y if self.dx is None else y.baddbmm_(self.dx, self.w), None if self.centred else bias)

    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        moved = there(dd, *self.outputs)
        weight = torch.bmm(self.x.mT, moved)
        self._give(found, weight if self.dx is None else weight.baddbmm_(self.dx.mT, self.d), dd)
        if self.lowest:
            return None
        return back(torch.bmm(moved, self.w.mT).baddbmm_(self.d, self.v.mT), self.samples, *self.images)

    def _kernels(self, weight: Tensor) -> Tensor:
        """A weight's values at the points, [points, channels in, channels out]."""
        outs, ins = weight.shape[:2]
        values = _square(weight.dtype) @ weight.permute(3, 2, 1, 0).reshape(KERNEL**2, ins * outs)
        return values.view(COUNT**2, ins, outs)

    def _result(self, y: Tensor, bias: Tensor | None) -> Tensor:
        out = back(y, self.samples, *self.outputs)
        return out if bias is None else out.add_(wide(bias, out))

    def _give(self, found: Params, values: Tensor, d: Tensor) -> None:
        """Hand over the weight's part, from its values at the points, and the bias's."""
        ins, outs = values.shape[1:]
        weight = _square(values.dtype).t() @ values.view(COUNT**2, ins * outs)
        weight = weight.view(KERNEL, KERNEL, ins, outs).permute(3, 2, 1, 0)
        sums = self.trained[1] and not self.centred
        self.give(found, weight, d.sum(dim=(0, 2, 3)) if sums else d.new_zeros(outs))


def tiled(layer: nn.Conv2d, padding: list[int], x: Tensor, twice: bool) -> bool:
    """Whether a convolution of these images can be taken by tiles, and is faster for it."""
    plain = layer.stride == (1, 1) == layer.dilation and layer.groups == 1
    if layer.kernel_size != (KERNEL, KERNEL) or not plain:
        return False
    sizes = [size + 2 * pad - KERNEL + 1 for size, pad in zip(x.shape[2:], padding, strict=True)]
    if min(sizes) < 1:
        return False
    fewest = min(layer.weight.shape[:2])
    if not twice and fewest < MANY:
        return False
    filled = math.prod(-(-size // TILE) * TILE / size for size in sizes)
    multiplied, moved = COSTS[twice]
    return filled * (multiplied + moved * max(sizes) / fewest) < WORTH


def there(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Images' values at the points, [points, tiles * samples, channels]; the points of the width come first."""
    samples, channels, height, width = x.shape
    x = x.permute(2, 3, 0, 1).reshape(height, width, samples * channels)
    x = torch.bmm(columns.expand(height, -1, -1), x).view(height, COUNT, -1).transpose(0, 1)
    return torch.bmm(rows.expand(COUNT, -1, -1), x).view(COUNT**2, -1, channels)


def back(y: Tensor, samples: int, rows: Tensor, columns: Tensor) -> Tensor:
    """The transpose of ``there``."""
    height = rows.shape[1]
    x = y.new_empty(height, COUNT, y.numel() // (len(rows) * COUNT))
    torch.bmm(rows.t().expand(COUNT, -1, -1), y.view(COUNT, len(rows), -1), out=x.transpose(0, 1))
    x = torch.bmm(columns.t().expand(height, -1, -1), x.view(height, len(columns), -1))
    return last(x.view(height, columns.shape[1], samples, -1).permute(2, 3, 0, 1))


@lru_cache(maxsize=64)
def way(size: int, padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ways of an axis to the points from an image's numbers and from its output's, [points * tiles, numbers]."""
    out = size + 2 * padding - KERNEL + 1
    tiles = -(-out // TILE)
    images, outputs = np.zeros((COUNT, tiles, tiles * TILE + KERNEL - 1)), np.zeros((COUNT, tiles, tiles * TILE))
    for tile in range(tiles):
        first = tile * TILE
        images[:, tile, first : first + COUNT] = _of_images()
        outputs[:, tile, first : first + TILE] = _powers(TILE)
    parts = images[:, :, padding : padding + size], outputs[:, :, :out]
    found = [torch.tensor(part.reshape(COUNT * tiles, -1), dtype=dtype, device="cpu") for part in parts]
    return found[0], found[1]


@lru_cache(maxsize=8)
def _square(dtype: torch.dtype) -> Tensor:
    """The way of kernels to the points, for both axes at once."""
    return torch.tensor(np.kron(_powers(KERNEL), _powers(KERNEL)), dtype=dtype, device="cpu")


def _powers(length: int) -> NDArray[np.float64]:
    """The values at the points of the polynomials 1, x, x^2, ...; at infinity, of the leading coefficient."""
    values = np.zeros((COUNT, length))
    values[:-1] = np.power.outer(np.array(POINTS), np.arange(length))
    values[-1, -1] = 1.0
    return values


def _of_images() -> NDArray[np.float64]:
    """Lagrange's polynomials of the points, coefficient by coefficient, and the one that is zero at all of them."""
    found = np.zeros((COUNT, COUNT))
    for i, point in enumerate(POINTS):
        others = np.array([p for p in POINTS if p != point])
        found[i, :-1] = np.poly(others)[::-1] / np.prod(point - others)
    found[-1] = np.poly(POINTS)[::-1]
    return found
