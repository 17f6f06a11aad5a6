"""What clients keep, packed: rows of a few large tensors, and nothing for a client that has kept nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comfedl.utils import tree
from comfedl.utils.tree import Tree

BLOCK = 2**22  # bytes of a block, about


class States:
    """The states of clients by their position.

    A state that is changed goes to a new row, and the old one is free again once the round is settled: so what was kept
    before the round can still be had when the round fails.
    """

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._places: dict[int, _Place] = {}
        self._before: dict[int, _Place | None] = {}
        self._replaced: list[_Place] = []

    def __contains__(self, client: int) -> bool:
        return client in self._places

    def view(self, client: int) -> Tree:
        """What a client keeps now. It is to be read at once: later rounds may write in the same place."""
        shelf, row = self._places[client]
        return shelf.read(row)

    def put(self, clients: Sequence[int], state: Tree) -> None:
        """Keep a copy of the state of one client, or of several, which are then in front of every tensor."""
        if len(clients) == 1:
            state = tree.map(lambda leaf: leaf.unsqueeze(0), state)
        kind = repr(tree.map(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype, leaf.device), state))
        if kind not in self._shelves:
            self._shelves[kind] = _Shelf(state)
        shelf = self._shelves[kind]
        for client, row in zip(clients, shelf.write(state, len(clients)), strict=True):
            old = self._places.get(client)
            self._before.setdefault(client, old)
            if old is not None:
                self._replaced.append(old)
            self._places[client] = _Place(shelf, row)

    def settle(self) -> None:
        """The round has ended well: forget what was before it."""
        for shelf, row in self._replaced:
            shelf.free.append(row)
        self._before, self._replaced = {}, []

    def settled(self) -> dict[int, Tree]:
        """What each client kept when the last round was settled; to be read at once, as with ``view``."""
        places = {client: self._before.get(client, place) for client, place in self._places.items()}
        return {client: place.shelf.read(place.row) for client, place in places.items() if place is not None}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Keep just these."""
        self.__init__()  # type: ignore[misc]
        for client, state in states.items():
            self.put([client], state)
        self.settle()


class _Place(NamedTuple):
    shelf: _Shelf
    row: int


class _Shelf:
    """Rows for states of one shape: blocks of rows, each with one tensor for each of a state's."""

    def __init__(self, states: Tree) -> None:
        self._like = tree.map(lambda leaf: leaf.new_empty((0, *leaf.shape[1:])), states)
        size = sum(leaf[0].numel() * leaf.element_size() for leaf in tree.leaves(states))
        self._rows = max(1, BLOCK // max(1, size))
        self._blocks: list[list[Tensor]] = []
        self._used = 0
        self.free: list[int] = []

    def write(self, states: Tree, count: int) -> list[int]:
        """Put states in free rows, and say which."""
        rows = [self.free.pop() if self.free else self._next() for _ in range(count)]
        blocks: dict[int, list[int]] = {}
        for k, row in enumerate(rows):
            blocks.setdefault(row // self._rows, []).append(k)
        with torch.no_grad():
            for block, ks in blocks.items():
                places = torch.tensor([rows[k] % self._rows for k in ks])
                for kept, leaf in zip(self._blocks[block], tree.leaves(states), strict=True):
                    kept.index_copy_(0, places.to(kept.device), leaf if len(ks) == count else leaf[ks])
        return rows

    def read(self, row: int) -> Tree:
        """The state in a row, as views."""
        parts = iter([kept[row % self._rows] for kept in self._blocks[row // self._rows]])
        return tree.map(lambda _: next(parts), self._like)

    def _next(self) -> int:
        """A row that was never used; a block is made when its first row is, and takes room as its rows are."""
        if self._used == len(self._blocks) * self._rows:
            like = tree.leaves(self._like)
            self._blocks.append([leaf.new_empty((self._rows, *leaf.shape[1:])) for leaf in like])
        self._used += 1
        return self._used - 1
