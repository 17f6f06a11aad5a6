"""Products of many small matrices, by the library that is faster at them on this processor.

Torch's are MKL's, which is written for Intel's processors. NumPy's are mostly OpenBLAS's: with AVX-512 that takes a
product of at most a million multiplications as it lies in memory, in the calling thread alone, where MKL packs it.
"""

from __future__ import annotations

import platform
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SMALL = 10**6
NARROW = 64  # a larger product is cut along its longer side, into no less than this


def products(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.bmm``, of what needs no gradient."""
    cuts = _cuts(a, b)
    if cuts == 0:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if out is None:
        out = a.new_empty(len(a), a.shape[1], b.shape[2])
    left, right, found = a, b if b.stride(2) == 1 else b.contiguous(), out  # turned, it would not be taken as small
    if cuts > 1 and a.shape[1] > b.shape[2]:
        left, right, found = _cut(left, 1, cuts), right[:, None], _cut(found, 1, cuts)
    elif cuts > 1:
        left, right, found = left[:, None], *(_cut(part, 2, cuts).transpose(1, 2) for part in (right, found))
    with np.errstate(all="ignore"):  # like torch it gives inf and nan without a word
        np.matmul(left.numpy(), right.numpy(), out=found.numpy())
    return out


def added(to: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``to`` with the products added in place."""
    return to.baddbmm_(a, b) if _cuts(a, b) == 0 else to.add_(products(a, b))


def _cuts(a: Tensor, b: Tensor) -> int:
    """Into how many small ones a product is cut, along the longer side of the result; 0 where torch shall take it."""
    rows, inner, columns = *a.shape[1:], b.shape[2]
    vectors = min(rows, columns) == 1  # for which OpenBLAS may take several threads
    if vectors or a.dtype != torch.float32 or not small_by_numpy():
        return 0
    return _evenly(max(rows, columns), rows * inner * columns)


@lru_cache(maxsize=256)
def _evenly(side: int, size: int) -> int:
    """Into how many equal parts to cut a side so that each has its share of a size that is small; 0 if it cannot be."""
    least = -(-size // SMALL)
    return 1 if least <= 1 else next((n for n in range(least, side // NARROW + 1) if side % n == 0), 0)


def _cut(x: Tensor, side: int, cuts: int) -> Tensor:
    """A view with one side as two."""
    return x.view(*x.shape[:side], cuts, x.shape[side] // cuts, *x.shape[side + 1 :])


@cache
def small_by_numpy() -> bool:
    """Whether NumPy's products of small matrices are faster than torch's."""
    return not fast_products() and torch.backends.cpu.get_cpu_capability() == "AVX512" and "openblas" in _numpys()


def _numpys() -> str:
    """The library that NumPy was built with."""
    try:
        return str(np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"])
    except (KeyError, TypeError):  # built by other means than its wheels
        return "unknown"


@cache
def fast_products() -> bool:
    """Whether torch's products of matrices are as near to the processor's limit as its convolutions.

    On an AMD EPYC they are not: a first layer with large patches took longer by products than by convolutions.
    """
    try:
        return b"GenuineIntel" in Path("/proc/cpuinfo").read_bytes()
    except OSError:  # not Linux
        return "Intel" in platform.processor()
