"""How images lie in memory, and pooling them there.

The channels come last. The samples are first, as torch's kernels want it, or next to the channels, as tiles do. To what
works channel by channel it is the same: the channels at one place are a row, and images are as many rows as they have
places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

# The order of images' dimensions in memory.
FIRST, WITHIN = (0, 2, 3, 1), (2, 3, 0, 1)


class Form(NamedTuple):
    """How images of a shape lie in memory, the samples ``within`` or first. Features are rows as they are."""

    shape: torch.Size
    strides: tuple[int, ...]
    within: bool

    @classmethod
    def of(cls, x: Tensor) -> Form:
        """That of some images, or the one to bring them into."""
        first = form(x.shape, False)
        if x.ndim != 4 or x.stride() == first.strides:
            return first
        return form(x.shape, x.permute(WITHIN).is_contiguous())

    def rows(self, x: Tensor, length: int | None = None) -> Tensor:
        """The rows of images, which are copied where they lie otherwise; of the channels or of another length."""
        length = self.shape[1] if length is None else length
        if x.stride() == self.strides:
            return x.as_strided((x.numel() // length, length), (length, 1))
        if x.ndim == 4:
            x = x.permute(WITHIN if self.within else FIRST)
        return x.contiguous().view(-1, length)

    def images(self, rows: Tensor) -> Tensor:
        """The images of these rows."""
        return rows.as_strided(self.shape, self.strides)


@lru_cache(maxsize=64)
def form(shape: torch.Size, within: bool) -> Form:
    """The form of images of a shape."""
    samples, channels, height, width = (*shape, 1, 1)[:4]
    if within:
        strides = channels, 1, width * samples * channels, samples * channels
    else:
        strides = height * width * channels, 1, width * channels, channels
    return Form(shape, strides[: len(shape)], within)


Pool = Callable[[Tensor, Form], tuple[Tensor, Tensor, Form]]
"""Max-pooling of images' rows: those of each window's largest, the places of all these among the images, and the
form."""


def pooled(x: Tensor, laid: Form, sizes: Sequence[Sequence[int]], ceil: bool) -> tuple[Tensor, Tensor, Form]:
    """A ``Pool``, but for the sizes that torch wants."""
    samples, channels, height, width = laid.shape
    # With the samples within, the channels of all are as those of one.
    whole = form(torch.Size((1, samples * channels, height, width)), False) if laid.within else laid
    out, index = aten.max_pool2d_with_indices(whole.images(x), *sizes, ceil)
    torch.add(_firsts(whole.shape), index, alpha=whole.shape[1], out=index)
    pooled_form = form(index.shape, False)
    out, at = (pooled_form.rows(part, channels) for part in (out, index))
    return out, at.view(-1), form(torch.Size((samples, channels, *index.shape[2:])), laid.within)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _firsts(shape: torch.Size) -> Tensor:
    """Where each plane begins, [samples, channels, 1, 1]."""
    samples, channels, height, width = shape
    firsts = torch.arange(samples, device="cpu") * (channels * height * width)
    return (firsts.view(-1, 1) + torch.arange(channels, device="cpu")).view(samples, channels, 1, 1)


def picked(x: Tensor, at: Tensor) -> Tensor:
    """The rows of what x has at these places."""
    return x.view(-1).index_select(0, at).view(-1, x.shape[1])


def put(out: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """``out`` with the values added at these places."""
    out.view(-1).scatter_add_(0, at, values.view(-1))
    return out


def last(x: Tensor) -> Tensor:
    """Images with the channels last and the samples first, as torch's kernels want them, and do not all give them."""
    if x.ndim != 4:
        return x
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    if channels == 1:  # lies either way; by its strides torch would take it for the other one, and its slower kernels
        x = x.as_strided(x.shape, (height * width, 1, width, 1))
    return x
