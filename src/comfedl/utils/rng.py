"""Random draws keyed by (seed, purpose, round, client), never by the order of calls.

So a run does not depend on the engine, on the order of the clients, or on whether it was stopped and resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The constants of SplitMix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_ROUNDS = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST_SHIFT, _HALF_WORD = np.uint64(31), np.uint64(32)


def key(seed: int, purpose: str, round: int = 0, client: str = "") -> int:
    """A 64-bit key; different arguments give independent streams."""
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A numpy generator with this key."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, round, client)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64, in place."""
    for shift, factor in _MIX_ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST_SHIFT
    return x


# Up to this many batches and table cells, one table lookup for all slots is faster than a loop over the slots.
MAX_TABLE_BATCHES, MAX_TABLE_CELLS = 400, 1_000_000


class Subsets:
    """Draws ``count`` batches of ``size`` positions for every client at once; client ``i`` has ``sizes[i]`` samples.

    A batch is a uniformly random subset (Floyd's algorithm); a client with fewer than ``size`` samples draws with
    replacement. The random numbers are SplitMix64 of a counter, so a client's draws do not depend on the other clients.
    Whatever does not depend on the keys is computed once.
    """

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], count: int, size: int) -> None:
        n = np.asarray(sizes, dtype=np.int64)
        steps = np.arange(1, count * size + 1, dtype=np.uint64) * _GOLDEN
        # [slots, clients, batches]: slots first, so that the loop over slots reads contiguous rows.
        self._counters = np.ascontiguousarray(steps.reshape(count, size).T)[:, None, :]
        # Floyd's algorithm: slot j draws from the first n - size + j + 1 samples, and takes the last of these if the
        # draw is already in the batch.
        self._without_replacement = n >= size
        last = np.where(self._without_replacement, n - size, n - 1)
        last = last + np.arange(size)[:, None] * self._without_replacement
        self._last = last[:, :, None]
        self._bounds = (self._last + 1).view(np.uint64)
        self._floyd = None
        if size > 1 and self._without_replacement.any():
            self._floyd = _Floyd(self._last[:, self._without_replacement], count, int(n.max()))

    def __call__(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """The batches of clients with these keys, [clients, count, size]."""
        # Multiply-shift (Lemire, 2019): the upper half of each word, times the bound, divided by 2**32.
        bits = _mix(np.array(keys, dtype=np.uint64)[:, None] + self._counters)
        bits >>= _HALF_WORD
        bits *= self._bounds
        bits >>= _HALF_WORD
        drawn = bits.view(np.int64)
        if self._floyd is not None and self._without_replacement.all():
            drawn = self._floyd(drawn)
        elif self._floyd is not None:
            drawn[:, self._without_replacement] = self._floyd(drawn[:, self._without_replacement])
        return np.ascontiguousarray(drawn.transpose(1, 2, 0))


def subsets(keys: Sequence[int], sizes: Sequence[int], count: int, size: int) -> NDArray[np.int64]:
    """The batches of ``Subsets``, drawn once."""
    return Subsets(sizes, count, size)(keys)


class _Floyd:
    """Floyd's rule: a slot whose draw is already in the batch takes ``last``, the last position it may draw."""

    def __init__(self, last: NDArray[np.int64], count: int, positions: int) -> None:
        """``last`` is [slots, clients, 1]; all draws are below ``positions``."""
        self._last, slots, self._batches = last, len(last), last.shape[1] * count
        self._by_table = self._batches <= MAX_TABLE_BATCHES and self._batches * positions <= MAX_TABLE_CELLS
        if self._by_table:
            self._slots = np.arange(slots, dtype=np.int32).repeat(self._batches)
            self._starts = np.arange(0, self._batches * positions, positions).reshape(last.shape[1], count)
            self._first = np.empty(self._batches * positions, dtype=np.int32)

    def __call__(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Apply the rule to draws, [slots, clients, batches]."""
        if not self._by_table:
            for j in range(1, len(drawn)):
                taken = np.logical_or.reduce(drawn[:j] == drawn[j])
                np.copyto(drawn[j], self._last[j], where=taken)
            return drawn
        # A draw is in the batch if an earlier slot has drawn it too: that slot took it, or it was there already.
        cells = (drawn + self._starts).ravel()
        self._first[cells[::-1]] = self._slots[::-1]  # the last write to a cell wins: the first slot
        taken = self._first[cells] < self._slots
        # It is also there if an earlier slot took it as its last position, which may in turn depend on a slot before.
        owner = (drawn - self._last[0]).ravel()
        undecided = np.flatnonzero((owner >= 0) > taken)
        while len(undecided):
            found = taken[owner[undecided] * self._batches + undecided % self._batches]
            newly_taken = undecided[found]
            if not len(newly_taken):
                break
            taken[newly_taken] = True
            undecided = undecided[~found]
        return np.where(taken.reshape(drawn.shape), self._last, drawn)
