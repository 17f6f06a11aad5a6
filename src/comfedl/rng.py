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

    Client ``i`` has the key ``keys[i]`` and ``sizes[i]`` samples; the result has the shape ``[clients, count, size]``.
    A batch is a subset (Floyd's algorithm), every subset equally likely; where the client holds fewer than ``size``
    samples, it is drawn with replacement. The numbers come from SplitMix64 on a counter, so a client's draws do not
    depend on who is drawn beside it.
    """
    have = np.asarray(sizes, dtype=np.int64)
    counter = np.arange(1, count * size + 1, dtype=np.uint64).reshape(count, size).T[:, None, :]
    bits = _mix(np.asarray(keys, dtype=np.uint64)[:, None] + counter * _GOLDEN) >> np.uint64(32)
    # Slots first, so that each turn below reads whole rows. Slot j of Floyd's algorithm draws from the first
    # n - size + j + 1 samples, and takes the last of them where the draw is already in the batch.
    bound = np.where(have < size, have, have - size + 1 + np.arange(size)[:, None])[:, :, None]
    drawn = ((bits * bound.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
    whole = have >= size
    if size > 1 and whole.all():
        drawn = _settled(drawn, bound - 1, int(have.max()))
    elif size > 1 and whole.any():
        drawn[:, whole] = _settled(drawn[:, whole], bound[:, whole] - 1, int(have.max()))
    return np.ascontiguousarray(drawn.transpose(1, 2, 0))


# Up to how many batches, and positions in all of them, a table of who came first is quicker than a turn for each slot.
FEW, TABLE = 100, 1_000_000


def _settled(drawn: NDArray[np.int64], last: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Floyd's rule for ``drawn`` [slots, clients, batches]: a slot whose draw is in the batch already takes ``last``.

    Positions are below ``most``.
    """
    slots, batches = len(drawn), drawn[0].size
    if batches > FEW or batches * most > TABLE:
        for j in range(1, slots):
            taken = np.logical_or.reduce(drawn[:j] == drawn[j])
            np.copyto(drawn[j], last[j], where=taken)
        return drawn
    # All slots at once, and again while that changes anything: what a slot takes may be what a later one has drawn.
    first = np.arange(0, batches * most, most).reshape(drawn.shape[1:])
    cells, turns = drawn + first, np.arange(slots, dtype=np.int32).repeat(batches)
    chosen, taken = drawn, np.zeros(drawn.shape, dtype=bool)
    while True:
        earliest = np.full(batches * most, slots, dtype=np.int32)
        earliest[(chosen + first).ravel()[::-1]] = turns[::-1]  # of those that write to one cell, the last one stays
        now = earliest[cells] < turns.reshape(drawn.shape)
        if (now == taken).all():
            return chosen
        chosen, taken = np.where(now, last, drawn), now
