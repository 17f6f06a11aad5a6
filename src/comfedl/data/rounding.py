"""From shares to sample counts: rounding that keeps each client's total and never overdraws a class."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

_EPS = 1e-9  # a float this close to an integer counts as one


def largest_total(shares: NDArray[np.float64], pool: Rows) -> int:
    """The largest k for which ``shares * k``, summed over clients, stays within the pool in every class."""
    demand = shares.sum(axis=0)
    owned = demand > _EPS
    return math.floor(float((pool[owned] / demand[owned]).min()) + _EPS)


def round_within(quotas: NDArray[np.float64], capacity: Rows) -> Rows | None:
    """Round each entry up or down so that row sums (integers) stay and columns fit the capacity; None if impossible.

    Starts from the largest remainders of each row. While a column is over capacity, its surplus moves along a shortest
    augmenting path of swaps within rows to a column with room (Edmonds and Karp's maximum flow). So a rounding is found
    whenever one exists, and one exists whenever the column sums of ``quotas`` are within capacity.
    """
    clients, classes = quotas.shape
    floor = np.floor(quotas + _EPS).astype(np.int64)
    if (floor.sum(axis=0) > capacity).any():
        return None
    remainders = np.round(np.maximum(quotas - floor, 0), 9)
    round_ups = np.rint(quotas.sum(axis=1)).astype(np.int64) - floor.sum(axis=1)
    # Each client breaks ties starting at another class, or one class would get them all.
    tie_order = (np.arange(classes) - np.arange(clients)[:, None]) % classes
    up = np.argsort(np.lexsort((tie_order, -remainders), axis=1), axis=1) < round_ups[:, None]
    while (over := floor.sum(axis=0) + up.sum(axis=0) - capacity).max() > 0:
        movable = up.T.astype(float) @ ((remainders > 0) & ~up)  # [from, to]: how many rows can swap
        path = _shortest_path(movable > 0, int(over.argmax()), over < 0)
        if path is None:
            return None
        moved = int(min(over.max(), -over[path[-1]], *(movable[step] for step in pairwise(path))))
        for a, b in pairwise(path):
            rows = np.flatnonzero(up[:, a] & ~up[:, b] & (remainders[:, b] > 0))
            rows = rows[np.argsort(remainders[rows, a] - remainders[rows, b], kind="stable")[:moved]]
            up[rows, a], up[rows, b] = False, True
    return np.asarray(floor + up)


def _shortest_path(edges: NDArray[np.bool_], source: int, goals: NDArray[np.bool_]) -> list[int] | None:
    """A shortest path from ``source`` to any of ``goals``, by breadth-first search."""
    paths = {source: [source]}
    queue = [source]
    for node in queue:  # the queue grows during the loop
        if goals[node]:
            return paths[node]
        for after in map(int, np.flatnonzero(edges[node])):
            if after not in paths:
                paths[after] = [*paths[node], after]
                queue.append(after)
    return None
