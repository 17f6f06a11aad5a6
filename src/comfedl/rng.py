"""Random draws keyed by (seed, purpose, round, client), never by the order of calls.

So a run does not depend on the engine, on the order in which clients are visited, or on whether it was
stopped and resumed: whoever needs a draw can make it from its key alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(seed: int, purpose: str, round: int = 0, client: str = "") -> int:
    """A 64-bit key; different arguments give independent streams."""
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A numpy generator for the draws of one purpose."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, round, client)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def subsets(keys: Sequence[int], sizes: Sequence[int], count: int, size: int) -> NDArray[np.int64]:
    """Draw ``count`` batches of ``size`` positions for every client at once.

    Client ``i`` has the key ``keys[i]`` and ``sizes[i]`` samples; the result has the shape
    ``[clients, count, size]``. A batch is a subset (Floyd's algorithm), every subset equally likely; where
    the client holds fewer than ``size`` samples, it is drawn with replacement. The numbers come from
    SplitMix64 on a counter, so a client's draws do not depend on who is drawn beside it.
    """
    n = np.asarray(sizes, dtype=np.uint64)[:, None, None]
    counter = np.arange(1, count * size + 1, dtype=np.uint64).reshape(1, count, size)
    bits = _mix(np.asarray(keys, dtype=np.uint64)[:, None, None] + counter * _GOLDEN) >> np.uint64(32)
    small = np.asarray(sizes) < size
    slots = np.arange(size, dtype=np.uint64)
    # Slot j of Floyd's algorithm draws from the first n - size + j + 1 samples.
    bound = np.where(small[:, None, None], n, n - np.uint64(size) + slots + np.uint64(1))
    drawn = ((bits * bound) >> np.uint64(32)).astype(np.int64)
    subset = drawn[~small]
    last = (bound[~small] - np.uint64(1)).astype(np.int64)
    for j in range(1, size):
        taken = (subset[:, :, :j] == subset[:, :, j : j + 1]).any(axis=2)
        subset[:, :, j] = np.where(taken, np.broadcast_to(last[:, :, j], taken.shape), subset[:, :, j])
    drawn[~small] = subset
    return drawn
