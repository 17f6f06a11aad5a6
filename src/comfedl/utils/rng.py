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
_MIXING = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
_LAST, _HALF = np.uint64(31), np.uint64(32)


def key(seed: int, purpose: str, round: int = 0, client: str = "") -> int:
    """A 64-bit key; different arguments give independent streams."""
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, round: int = 0, client: str = "") -> np.random.Generator:
    """A numpy generator for the draws of one purpose."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, round, client)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, in place."""
    for shift, factor in _MIXING:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST
    return x


# Up to how many batches, and positions in all of them, a table of who came first is quicker than a turn for each slot.
FEW, TABLE = 400, 1_000_000


class Subsets:
    """Draws ``count`` batches of ``size`` positions for every client at once; client ``i`` has ``sizes[i]`` samples.

    A batch is a subset (Floyd's algorithm), every subset equally likely; where the client holds fewer than ``size``
    samples, it is drawn with replacement. The numbers come from SplitMix64 on a counter, so a client's draws do not
    depend on who is drawn beside it. What does not depend on the keys is worked out once.
    """

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], count: int, size: int) -> None:
        have = np.asarray(sizes, dtype=np.int64)
        steps = np.arange(1, count * size + 1, dtype=np.uint64) * _GOLDEN
        # Slots first, so that each turn below reads whole rows: [slots, clients, batches].
        self._counters = np.ascontiguousarray(steps.reshape(count, size).T)[:, None, :]
        # Slot j of Floyd's algorithm draws from the first n - size + j + 1 samples, and takes the last of them where
        # the draw is already in the batch.
        self._whole = have >= size
        last = np.where(self._whole, have - size, have - 1) + np.arange(size)[:, None] * self._whole
        self._last = last[:, :, None]
        self._bounds = (self._last + 1).view(np.uint64)
        self._rule = None
        if size > 1 and self._whole.any():
            self._rule = _Floyd(self._last[:, self._whole], count, int(have.max()))

    def __call__(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """The draws of clients with these keys, [clients, count, size]."""
        bits = _mix(np.array(keys, dtype=np.uint64)[:, None] + self._counters)
        bits >>= _HALF
        bits *= self._bounds
        bits >>= _HALF
        drawn = bits.view(np.int64)
        if self._rule is not None and self._whole.all():
            drawn = self._rule(drawn)
        elif self._rule is not None:
            drawn[:, self._whole] = self._rule(drawn[:, self._whole])
        return np.ascontiguousarray(drawn.transpose(1, 2, 0))


def subsets(keys: Sequence[int], sizes: Sequence[int], count: int, size: int) -> NDArray[np.int64]:
    """The draws of ``Subsets`` where they are wanted once."""
    return Subsets(sizes, count, size)(keys)


class _Floyd:
    """Floyd's rule: a slot whose draw is in the batch already takes ``last``, the last one that it draws from."""

    def __init__(self, last: NDArray[np.int64], count: int, most: int) -> None:
        """``last`` is [slots, clients, 1]; positions are below ``most``."""
        self._last, slots, self._batches = last, len(last), last.shape[1] * count
        self._at_once = self._batches <= FEW and self._batches * most <= TABLE
        if self._at_once:
            self._turns = np.arange(slots, dtype=np.int32).repeat(self._batches)
            self._starts = np.arange(0, self._batches * most, most).reshape(last.shape[1], count)
            self._first = np.empty(self._batches * most, dtype=np.int32)

    def __call__(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """The draws [slots, clients, batches] by this rule."""
        if not self._at_once:
            for j in range(1, len(drawn)):
                taken = np.logical_or.reduce(drawn[:j] == drawn[j])
                np.copyto(drawn[j], self._last[j], where=taken)
            return drawn
        # What a slot has drawn is in the batch if an earlier one has drawn it: that one has taken it or found it there.
        cells = (drawn + self._starts).ravel()
        self._first[cells[::-1]] = self._turns[::-1]  # of those that write to one cell, the last one stays
        taken = self._first[cells] < self._turns
        # Or if it is an earlier slot's last, and that slot has taken it; which may be so by a slot before that.
        earlier = (drawn - self._last[0]).ravel()
        open = np.flatnonzero((earlier >= 0) > taken)
        while len(open):
            found = taken[earlier[open] * self._batches + open % self._batches]
            more = open[found]
            if not len(more):
                break
            taken[more] = True
            open = open[~found]
        return np.where(taken.reshape(drawn.shape), self._last, drawn)
