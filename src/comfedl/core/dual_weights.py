"""Client weights on the simplex, learnt by gradient ascent: DRFA's lambda, TR-MAML's p.

A step raises the weights of the clients it saw, and the projection subtracts the same threshold from all. So all
clients that were never seen share one weight: with many clients, only the weights of seen clients and that one number
are stored. A step is O(clients ever seen), not O(clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.simplex import project
from comfedl.utils.tree import Tree

FEW = 16_384  # up to this many clients, all weights are stored in one tensor


def uniform(clients: int) -> Tree:
    """Equal float64 weights for all clients."""
    if clients <= FEW:
        return torch.full((clients,), 1 / clients, dtype=torch.float64)
    seen, weights = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    share = torch.tensor(1 / clients, dtype=torch.float64)
    return {"seen": seen, "weights": weights, "others": share, "clients": torch.tensor(clients)}


def to_tensor(duals: Tree) -> Tensor:
    """All clients' weights as one tensor."""
    if isinstance(duals, Tensor):
        return duals
    weights: Tensor = duals["others"].repeat(int(duals["clients"]))
    weights[duals["seen"]] = duals["weights"]
    return weights


def take(duals: Tree, clients: Sequence[int]) -> Tensor:
    """The weights of these clients."""
    if isinstance(duals, Tensor):
        return duals[clients]
    tracked = _track(duals, clients)
    found: Tensor = tracked["weights"][_rows(tracked, clients)]
    return found


def ascend(duals: Tree, clients: Sequence[int], by: Tensor) -> Tree:
    """Add ``by`` to these clients' weights, and project back onto the simplex."""
    if isinstance(duals, Tensor):
        raised = duals.clone()
        raised[clients] += by
        return project(raised)
    tracked = _track(duals, clients)
    raised = tracked["weights"].clone()
    raised[_rows(tracked, clients)] += by
    unseen = _unseen(tracked)
    if unseen == 0:
        return {**tracked, "weights": project(raised)}
    counts = torch.ones(len(raised) + 1, dtype=raised.dtype)
    counts[-1] = unseen
    moved = project(torch.cat([raised, tracked["others"][None]]), counts)
    return {**tracked, "weights": moved[:-1], "others": moved[-1]}


def apply_floor(duals: Tree, floor: float) -> Tree:
    """Raise every weight to at least ``floor``, and rescale the sum to 1."""
    if isinstance(duals, Tensor):
        raised = duals.clamp(min=floor)
        return raised / raised.sum()
    weights, others = duals["weights"].clamp(min=floor), duals["others"].clamp(min=floor)
    total = weights.sum() + _unseen(duals) * others
    return {**duals, "weights": weights / total, "others": others / total}


def sample(duals: Tree, uniforms: NDArray[np.float64], excluded: Sequence[int]) -> list[int]:
    """Sample clients in proportion to their weights by inverting the CDF at ``uniforms``; sorted, none excluded.

    It is for many clients. If all the weight is on excluded clients, the others are equally likely.
    """
    tracked = _track(duals, excluded)
    seen, weights, others = tracked["seen"].numpy(), tracked["weights"].numpy().copy(), float(tracked["others"])
    weights[_rows(tracked, excluded)] = 0.0
    unseen = _unseen(tracked)
    if not weights.any() and unseen * others == 0:
        others, weights = 1.0, np.ones_like(weights)
        weights[_rows(tracked, excluded)] = 0.0
    masses = np.append(weights, unseen * others)  # the last entry stands for all unseen clients
    cdf = masses.cumsum()
    targets = uniforms * cdf[-1]
    rows = np.minimum(cdf.searchsorted(targets, side="right"), np.flatnonzero(masses)[-1])
    found = np.append(seen, -1)[rows]
    is_unseen = rows == len(seen)
    if is_unseen.any():
        before = cdf[-2] if len(seen) else 0.0
        nth = np.minimum((targets[is_unseen] - before) / others, unseen - 1).astype(np.int64)  # nth unseen client
        found[is_unseen] = nth + (seen - np.arange(len(seen))).searchsorted(nth, side="right")
    return sorted(found.tolist())


def _track(duals: dict[str, Any], clients: Sequence[int]) -> dict[str, Any]:
    """The same weights, with these clients among the seen ones."""
    seen, weights = duals["seen"].numpy(), duals["weights"].numpy()
    wanted = np.unique(np.array(clients, dtype=np.int64))
    new = wanted[np.append(seen, -1)[seen.searchsorted(wanted)] != wanted]
    if not len(new):
        return duals
    at = seen.searchsorted(new)
    inserted = np.insert(weights, at, float(duals["others"]))
    return {**duals, "seen": torch.from_numpy(np.insert(seen, at, new)), "weights": torch.from_numpy(inserted)}


def _rows(duals: dict[str, Any], clients: Sequence[int]) -> NDArray[np.int64]:
    """The positions of these clients among the seen ones."""
    rows: NDArray[np.int64] = duals["seen"].numpy().searchsorted(np.array(clients, dtype=np.int64))
    return rows


def _unseen(duals: dict[str, Any]) -> int:
    return int(duals["clients"]) - len(duals["seen"])
