"""Whole numbers of samples from shares: rounding that keeps every client's total and never overdraws a class."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

_EPS = 1e-9  # a share times a count is a float: this near to a whole number, it is one


def proportional(shares: NDArray[np.float64], pool: Rows) -> int:
    """The largest k for which ``shares * k``, summed over the clients, is within the pool for every class."""
    demand = shares.sum(axis=0)
    owned = demand > _EPS
    return math.floor(float((pool[owned] / demand[owned]).min()) + _EPS)


def rounded(quotas: NDArray[np.float64], capacity: Rows) -> Rows | None:
    """Round entries up or down: row sums (whole) stay, columns stay within capacity; None if impossible.

    Starts from the largest remainders of each row. While a column is too full, a shortest path of exchanges
    within rows takes the surplus to one with room. That is maximum flow, so it finds a rounding whenever
    there is one; and there is, whenever the columns of ``quotas`` themselves are within capacity.
    """
    clients, classes = quotas.shape
    floor = np.floor(quotas + _EPS).astype(np.int64)
    if (floor.sum(axis=0) > capacity).any():
        return None
    rest = np.round(np.maximum(quotas - floor, 0), 9)
    ups = np.rint(quotas.sum(axis=1)).astype(np.int64) - floor.sum(axis=1)
    # Ties begin at another class for each client, lest one class get them all.
    turn = (np.arange(classes) - np.arange(clients)[:, None]) % classes
    up = np.argsort(np.lexsort((turn, -rest), axis=1), axis=1) < ups[:, None]
    while (over := floor.sum(axis=0) + up.sum(axis=0) - capacity).max() > 0:
        movable = up.T.astype(float) @ ((rest > 0) & ~up)  # [from, to]: how many rows could exchange
        path = _path(movable > 0, int(over.argmax()), over < 0)
        if path is None:
            return None
        moved = int(min(over.max(), -over[path[-1]], *(movable[step] for step in pairwise(path))))
        for a, b in pairwise(path):
            rows = np.flatnonzero(up[:, a] & ~up[:, b] & (rest[:, b] > 0))
            rows = rows[np.argsort(rest[rows, a] - rest[rows, b], kind="stable")[:moved]]
            up[rows, a], up[rows, b] = False, True
    return np.asarray(floor + up)


def _path(edges: NDArray[np.bool_], source: int, goals: NDArray[np.bool_]) -> list[int] | None:
    """A shortest path from ``source`` to any of ``goals``, by breadth-first search."""
    paths = {source: [source]}
    queue = [source]
    for node in queue:  # grows as it is read
        if goals[node]:
            return paths[node]
        for after in map(int, np.flatnonzero(edges[node])):
            if after not in paths:
                paths[after] = [*paths[node], after]
                queue.append(after)
    return None
