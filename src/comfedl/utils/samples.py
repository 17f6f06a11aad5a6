"""Samples: a tensor with one row per sample, or a tuple or dict of such tensors.

A model takes a tensor as ``model(x)``, a tuple as ``model(*x)`` and a dict as ``model(**x)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfedl.utils import tree

Samples = Any
"""A tensor, or a tuple or dict of tensors of the same length."""


def first(samples: Samples) -> Tensor:
    """The tensor, or the first one of several."""
    return samples if isinstance(samples, Tensor) else tree.leaves(samples)[0]


def count(samples: Samples) -> int:
    """The number of samples."""
    return len(samples if isinstance(samples, Tensor) else first(samples))


def select(samples: Samples, rows: Tensor) -> Samples:
    """The samples at these positions, copied."""
    if isinstance(samples, Tensor):
        return samples.index_select(0, rows)
    return tree.map(lambda part: part.index_select(0, rows), samples)


def between(samples: Samples, start: int, stop: int) -> Samples:
    """The samples from ``start`` to ``stop - 1``, as views."""
    return samples[start:stop] if isinstance(samples, Tensor) else tree.map(lambda part: part[start:stop], samples)


def shaped(samples: Samples, shape: Sequence[int]) -> Samples:
    """The same samples with these dimensions in place of the first one."""
    return tree.map(lambda part: part.view(*shape, *part.shape[1:]), samples)


def cat(parts: Sequence[Samples]) -> Samples:
    """The samples of several parts, one after another."""
    return tree.map(lambda *leaves: torch.cat(leaves), *parts)


def named(samples: Samples) -> list[tuple[str, Tensor]]:
    """The tensors with how each is reached: ``""``, ``"[0]"`` or ``"['ids']"``."""
    if isinstance(samples, Tensor):
        return [("", samples)]
    pairs = samples.items() if isinstance(samples, dict) else enumerate(samples)
    return [(f"[{key!r}]", part) for key, part in pairs]


def structure(samples: Samples) -> str:
    """What the samples are, in words."""
    if isinstance(samples, Tensor):
        return "one tensor"
    if isinstance(samples, dict):
        return f"a dict of {', '.join(map(repr, samples))}"
    return f"a tuple of {len(samples)}"


def shapes(samples: Samples) -> Any:
    """The shape of one sample; for several tensors a tuple or dict of shapes."""
    return tree.map(lambda part: tuple(part.shape[1:]), samples)


def described(samples: Samples) -> str:
    """The shape and dtype of each tensor, for a message."""
    parts = [f"{key}{' ' if key else ''}{tuple(part.shape[1:])} {part.dtype}" for key, part in named(samples)]
    return ", ".join(parts)
