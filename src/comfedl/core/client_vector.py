"""An immutable vector with one number per client; updating k entries is O(k), not O(clients).

With few clients it is a plain tensor. With many it is a base tensor, shared with earlier versions, plus a log of
updates, which is merged into a new base once it grows long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comfedl.utils.tree import Tree

FEW = 16_384  # up to this many clients, or logged updates, a full copy is just as fast


def full(clients: int, value: float) -> Tree:
    """A float64 vector with the same number for every client."""
    numbers = torch.full((clients,), value, dtype=torch.float64)
    return numbers if clients <= FEW else _merged(numbers)


def put(vector: Tree, clients: Sequence[int], values: Tensor) -> Tree:
    """A new vector with these clients' numbers replaced."""
    if isinstance(vector, Tensor) and len(clients) == len(vector) and list(clients) == list(range(len(vector))):
        return values
    indices = torch.tensor(clients, dtype=torch.int64)
    if isinstance(vector, Tensor):
        return vector.index_put((indices,), values)
    updated = {
        "all": vector["all"],
        "clients": torch.cat([vector["clients"], indices]),
        "numbers": torch.cat([vector["numbers"], values]),
    }
    return updated if len(updated["clients"]) <= FEW else _merged(to_tensor(updated))


def to_tensor(vector: Tree) -> Tensor:
    """All clients' numbers as one tensor."""
    if isinstance(vector, Tensor):
        return vector
    numbers: Tensor = vector["all"].clone()
    numbers.numpy()[vector["clients"].numpy()] = vector["numbers"].numpy()  # of repeated clients, the last one wins
    return numbers


def _merged(numbers: Tensor) -> Tree:
    """A vector with these numbers and an empty log of updates."""
    return {"all": numbers, "clients": torch.empty(0, dtype=torch.int64), "numbers": numbers.new_empty(0)}
