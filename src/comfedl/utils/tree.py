"""Trees of tensors: nested dicts, tuples and lists. Messages, states and checkpoints are such trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# A nested dict, tuple or list with tensors at its leaves.
Tree = Any

# Above this, torch._foreach_sub may raise an overflow error where a product would be infinite.
MAX_RATE = 1e30


def map(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply ``fn`` leaf by leaf to trees of the same structure."""
    first = trees[0]
    if isinstance(first, dict):
        if len(trees) == 1:  # the common case, made fast
            return {name: fn(part) if isinstance(part, Tensor) else map(fn, part) for name, part in first.items()}
        return {name: map(fn, *[tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple | list):
        parts = [map(fn, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return fn(*trees)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    if isinstance(tree, Tensor) or not isinstance(tree, dict | tuple | list):
        return [tree]
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += leaves(part)
    return found


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) pairs; paths look like "rest/1/deep"."""
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from named_leaves(part, f"{prefix}/{name}" if prefix else str(name))


def nbytes(tree: Tree) -> int:
    """The total size of the tensors in bytes."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def finite(tree: Tree) -> bool:
    """Whether every floating-point number in the tree is finite."""
    # A finite sum has only finite terms and is faster to check; an infinite one may have overflowed.
    return all(
        math.isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())
        for leaf in leaves(tree)
        if leaf.is_floating_point()
    )


def step(tree: Tree, rate: float, direction: Tree) -> Tree:
    """A descent step, ``tree - rate * direction``."""
    rate = float(rate)
    if abs(rate) > MAX_RATE:
        return map(lambda leaf, u: leaf - rate * u, tree, direction)
    moved = iter(torch._foreach_sub(leaves(tree), leaves(direction), alpha=rate))
    return map(lambda leaf: next(moved), tree)


def step_in_place(tree: Tree, rate: float, direction: Tree) -> Tree:
    """The same step, bit for bit, in place; the caller must own the tree."""
    rate = float(rate)
    if abs(rate) > MAX_RATE:
        return step(tree, rate, direction)
    torch._foreach_sub_(leaves(tree), leaves(direction), alpha=rate)
    return tree
