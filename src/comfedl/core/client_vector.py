"""One number a client, as a value of which a round changes a few: that costs as many, not as there are clients.

For few clients it is a plain tensor. For many it is a tensor that is shared with the vectors before it, and a list of
what has changed since, which is written into a new one when it has become long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comfedl.utils.tree import Tree

FEW = 16_384  # up to so many clients a copy of all is as quick, and up to so many changes a copy of these


def full(clients: int, value: float) -> Tree:
    """The vector with this number for every client, in float64."""
    numbers = torch.full((clients,), value, dtype=torch.float64)
    return numbers if clients <= FEW else _settled(numbers)


def put(vector: Tree, clients: Sequence[int], values: Tensor) -> Tree:
    """The vector with these clients' numbers changed; the one given stays as it is."""
    who = torch.tensor(clients, dtype=torch.int64)
    if isinstance(vector, Tensor):
        return vector.index_put((who,), values)
    changed = {
        "all": vector["all"],
        "clients": torch.cat([vector["clients"], who]),
        "numbers": torch.cat([vector["numbers"], values]),
    }
    return changed if len(changed["clients"]) <= FEW else _settled(whole(changed))


def whole(vector: Tree) -> Tensor:
    """All clients' numbers as one tensor."""
    if isinstance(vector, Tensor):
        return vector
    numbers: Tensor = vector["all"].clone()
    numbers.numpy()[vector["clients"].numpy()] = vector["numbers"].numpy()  # of several of one client the last stays
    return numbers


def _settled(numbers: Tensor) -> Tree:
    """The vector with these numbers, and nothing that has changed since."""
    return {"all": numbers, "clients": torch.empty(0, dtype=torch.int64), "numbers": numbers.new_empty(0)}
