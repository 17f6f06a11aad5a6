"""Images in channels-last memory layout, and max-pooling in it.

Operations per channel (batch norm, pooling) see a batch of images as a matrix of rows, one per pixel:
[samples * height * width, channels]. Flat features [samples, features] are rows already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

aten = torch.ops.aten

Pool = Callable[[Tensor, torch.Size], tuple[Tensor, Tensor, torch.Size]]
"""Max-pools rows of images of this shape: the pooled rows, their flat indices in the input, the new shape."""


def channels_last(x: Tensor) -> Tensor:
    """Images in channels-last layout, that of torch's fast kernels; other tensors unchanged."""
    if x.ndim != 4:
        return x
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    if channels == 1:  # fits both layouts; without these strides torch would pick the other, with slower kernels
        x = x.as_strided(x.shape, (height * width, 1, width, 1))
    return x


def to_rows(x: Tensor) -> Tensor:
    """The rows of images or features; no copy if the layout is channels-last already."""
    return x.contiguous() if x.ndim != 4 else channels_last(x).permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_images(rows: Tensor, shape: torch.Size) -> Tensor:
    """The images (or features) of this shape with these rows, without a copy."""
    if len(shape) != 4:
        return rows
    samples, channels, height, width = shape
    return rows.view(samples, height, width, channels).permute(0, 3, 1, 2)


def max_pool(
    rows: Tensor, shape: torch.Size, sizes: Sequence[Sequence[int]], ceil: bool
) -> tuple[Tensor, Tensor, torch.Size]:
    """A ``Pool``, once the sizes and the rounding mode are bound."""
    out, index = aten.max_pool2d_with_indices(to_images(rows, shape), *sizes, ceil)
    # Torch's indices are within a plane; convert them to indices into the flat rows.
    places = torch.add(_plane_starts(shape), index, alpha=shape[1])
    return to_rows(out), to_rows(places).view(-1), out.shape


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _plane_starts(shape: torch.Size) -> Tensor:
    """The index of each plane's first value in the flat rows, [samples, channels, 1, 1]."""
    samples, channels, height, width = shape
    firsts = torch.arange(samples, device="cpu") * (channels * height * width)
    return (firsts.view(-1, 1) + torch.arange(channels, device="cpu")).view(samples, channels, 1, 1)


def gather(rows: Tensor, places: Tensor) -> Tensor:
    """The values at these flat indices, as rows."""
    return rows.view(-1).index_select(0, places).view(-1, rows.shape[1])


def scatter_add(out: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add values to ``out`` at these flat indices, which repeat if pooling windows overlap."""
    out.view(-1).scatter_add_(0, places, values.view(-1))
    return out
