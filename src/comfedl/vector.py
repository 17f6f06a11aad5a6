"""One number a client, as a value of which a round changes a few places: that costs as many, not as there are clients.

For few clients it is a plain tensor. For many it is a dict of blocks, and a change copies the blocks that it touches;
all others are shared with the vector before it, and those that were never touched with one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comfedl.tree import Tree

FEW = 16_384  # up to so many clients a copy of all is as quick
BLOCK = 256


def full(clients: int, value: float) -> Tree:
    """The vector with this number for every client, in float64."""
    if clients <= FEW:
        return torch.full((clients,), value, dtype=torch.float64)
    block = torch.full((BLOCK,), value, dtype=torch.float64)
    sizes = [min(BLOCK, clients - start) for start in range(0, clients, BLOCK)]
    return {str(k): block if size == BLOCK else block[:size].clone() for k, size in enumerate(sizes)}


def put(vector: Tree, clients: Sequence[int], values: Tensor) -> Tree:
    """The vector with these clients' numbers changed; the one given stays as it is."""
    if isinstance(vector, Tensor):
        return vector.index_put((torch.tensor(clients),), values)
    changed = dict(vector)
    for client, value in zip(clients, values.tolist(), strict=True):
        block = str(client // BLOCK)
        if changed[block] is vector[block]:
            changed[block] = vector[block].clone()
        changed[block].numpy()[client % BLOCK] = value
    return changed


def take(vector: Tree, clients: Sequence[int]) -> Tensor:
    """The numbers of these clients."""
    if isinstance(vector, Tensor):
        return vector[clients]
    found = [float(vector[str(client // BLOCK)].numpy()[client % BLOCK]) for client in clients]
    return torch.tensor(found, dtype=torch.float64)


def whole(vector: Tree) -> Tensor:
    """All clients' numbers as one tensor."""
    return vector if isinstance(vector, Tensor) else torch.cat(list(vector.values()))
