"""Images in memory with the channels last, and pooling them there.

To what works channel by channel (batch norm, pooling), the channels at one place of one image are a row, and a batch of
images is a matrix of rows [samples * height * width, channels]. Features [samples, features] are rows as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

aten = torch.ops.aten

Pool = Callable[[Tensor, torch.Size], tuple[Tensor, Tensor, torch.Size]]
"""Max-pooling of the rows of images of this shape: the pooled rows, their flat places in the input, the new shape."""


def channels_last(x: Tensor) -> Tensor:
    """Images with the channels last in memory, the layout of torch's fast kernels; other tensors as they are."""
    if x.ndim != 4:
        return x
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    if channels == 1:  # fits both layouts; by its strides torch would choose the other one, with slower kernels
        x = x.as_strided(x.shape, (height * width, 1, width, 1))
    return x


def to_rows(x: Tensor) -> Tensor:
    """The rows of images or features, without a copy where the channels are last already."""
    return x.contiguous() if x.ndim != 4 else channels_last(x).permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_images(rows: Tensor, shape: torch.Size) -> Tensor:
    """The images (or features) of this shape whose rows these are, without a copy."""
    if len(shape) != 4:
        return rows
    samples, channels, height, width = shape
    return rows.view(samples, height, width, channels).permute(0, 3, 1, 2)


def max_pool(
    rows: Tensor, shape: torch.Size, sizes: Sequence[Sequence[int]], ceil: bool
) -> tuple[Tensor, Tensor, torch.Size]:
    """A ``Pool``, but for the sizes that torch wants."""
    out, index = aten.max_pool2d_with_indices(to_images(rows, shape), *sizes, ceil)
    # Torch counts within a plane; what is wanted is the place in the flat rows.
    places = torch.add(_plane_starts(shape), index, alpha=shape[1])
    return to_rows(out), to_rows(places).view(-1), out.shape


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _plane_starts(shape: torch.Size) -> Tensor:
    """Where each plane begins in the flat rows, [samples, channels, 1, 1]."""
    samples, channels, height, width = shape
    firsts = torch.arange(samples, device="cpu") * (channels * height * width)
    return (firsts.view(-1, 1) + torch.arange(channels, device="cpu")).view(samples, channels, 1, 1)


def gather(rows: Tensor, places: Tensor) -> Tensor:
    """The rows of the numbers at these flat places."""
    return rows.view(-1).index_select(0, places).view(-1, rows.shape[1])


def scatter_add(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``out`` with the values added at these flat places; overlapping windows may name a place twice."""
    out.view(-1).scatter_add_(0, places, values.view(-1))
    return out
