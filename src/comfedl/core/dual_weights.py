"""Weights of the clients on the simplex that are learnt by ascent: lambda of DRFA, p of TR-MAML.

A step raises the weights of the clients that it has seen, and the projection then takes the same from all. So whoever
was never seen has one and the same weight: for many clients the weights of those that were seen are kept, and that one
number for all others. A step then costs what there are clients that were ever seen, and not what there are.
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

FEW = 16_384  # up to so many clients all weights are kept, as one tensor


def uniform(clients: int) -> Tree:
    """The same weight for every client, in float64."""
    if clients <= FEW:
        return torch.full((clients,), 1 / clients, dtype=torch.float64)
    seen, weights = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    each = torch.tensor(1 / clients, dtype=torch.float64)
    return {"seen": seen, "weights": weights, "others": each, "clients": torch.tensor(clients)}


def whole(duals: Tree) -> Tensor:
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
    known = _with(duals, clients)
    found: Tensor = known["weights"][_places(known, clients)]
    return found


def ascended(duals: Tree, clients: Sequence[int], by: Tensor) -> Tree:
    """The weights after these clients' have been raised by so much each, back on the simplex."""
    if isinstance(duals, Tensor):
        raised = duals.clone()
        raised[clients] += by
        return project(raised)
    known = _with(duals, clients)
    raised = known["weights"].clone()
    raised[_places(known, clients)] += by
    rest = _unseen(known)
    if rest == 0:
        return {**known, "weights": project(raised)}
    counts = torch.ones(len(raised) + 1, dtype=raised.dtype)
    counts[-1] = rest
    moved = project(torch.cat([raised, known["others"][None]]), counts)
    return {**known, "weights": moved[:-1], "others": moved[-1]}


def floored(duals: Tree, floor: float) -> Tree:
    """The weights, none of them below the floor, scaled to add up to 1."""
    if isinstance(duals, Tensor):
        raised = duals.clamp(min=floor)
        return raised / raised.sum()
    weights, others = duals["weights"].clamp(min=floor), duals["others"].clamp(min=floor)
    total = weights.sum() + _unseen(duals) * others
    return {**duals, "weights": weights / total, "others": others / total}


def drawn(duals: Tree, chances: NDArray[np.float64], barred: Sequence[int]) -> list[int]:
    """The clients, in order, that these numbers from [0, 1) fall on, in proportion to the weights; none that is barred.

    It is for many clients. Where all the weight is on those who are barred, all others are as likely.
    """
    known = _with(duals, barred)
    seen, weights, others = known["seen"].numpy(), known["weights"].numpy().copy(), float(known["others"])
    weights[_places(known, barred)] = 0.0
    rest = _unseen(known)
    if not weights.any() and rest * others == 0:
        others, weights = 1.0, np.ones_like(weights)
        weights[_places(known, barred)] = 0.0
    upto = np.append(weights, rest * others).cumsum()  # the last stands for all who were never seen
    at = chances * upto[-1]
    place = np.minimum(upto.searchsorted(at, side="right"), np.flatnonzero(np.append(weights, rest * others))[-1])
    found = np.append(seen, -1)[place]
    one = place == len(seen)
    if one.any():
        before = upto[-2] if len(seen) else 0.0
        turn = np.minimum((at[one] - before) / others, rest - 1).astype(np.int64)  # which of those never seen
        found[one] = turn + (seen - np.arange(len(seen))).searchsorted(turn, side="right")
    return sorted(found.tolist())


def _with(duals: dict[str, Any], clients: Sequence[int]) -> dict[str, Any]:
    """The same weights, these clients' among those that are kept."""
    seen, weights = duals["seen"].numpy(), duals["weights"].numpy()
    who = np.unique(np.array(clients, dtype=np.int64))
    new = who[np.append(seen, -1)[seen.searchsorted(who)] != who]
    if not len(new):
        return duals
    at = seen.searchsorted(new)
    kept = np.insert(weights, at, float(duals["others"]))
    return {**duals, "seen": torch.from_numpy(np.insert(seen, at, new)), "weights": torch.from_numpy(kept)}


def _places(duals: dict[str, Any], clients: Sequence[int]) -> NDArray[np.int64]:
    """Where these clients' weights are among those that are kept."""
    places: NDArray[np.int64] = duals["seen"].numpy().searchsorted(np.array(clients, dtype=np.int64))
    return places


def _unseen(duals: dict[str, Any]) -> int:
    return int(duals["clients"]) - len(duals["seen"])
