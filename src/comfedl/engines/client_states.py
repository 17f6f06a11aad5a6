"""Client states, packed into rows of a few large tensors; a client that never changed its state takes no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comfedl.utils import tree
from comfedl.utils.tree import Tree

BLOCK = 2**22  # approximate size of a block in bytes


class ClientStates:
    """The clients' states, by position.

    A changed state is written to a new row, and the old row is reused only once the round is committed: so the states
    before a failed round are still there, without copying all of them every round.
    """

    def __init__(self) -> None:
        self._stores: dict[str, _RowStore] = {}
        self._slots: dict[int, _Slot] = {}
        self._committed: dict[int, _Slot | None] = {}  # of clients that changed since the last commit
        self._replaced: list[_Slot] = []

    def __contains__(self, client: int) -> bool:
        return client in self._slots

    def view(self, client: int) -> Tree:
        """A view of a client's current state; read it at once, since later rounds may overwrite it."""
        store, row = self._slots[client]
        return store.read(row)

    def put(self, clients: Sequence[int], state: Tree) -> None:
        """Store a copy of one client's state, or of several stacked along the first dimension."""
        if len(clients) == 1:
            state = tree.map(lambda leaf: leaf.unsqueeze(0), state)
        kind = repr(tree.map(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype, leaf.device), state))
        if kind not in self._stores:
            self._stores[kind] = _RowStore(state)
        store = self._stores[kind]
        for client, row in zip(clients, store.write(state, len(clients)), strict=True):
            old = self._slots.get(client)
            self._committed.setdefault(client, old)
            if old is not None:
                self._replaced.append(old)
            self._slots[client] = _Slot(store, row)

    def commit_round(self) -> None:
        """The round succeeded: free the rows of the states before it."""
        for store, row in self._replaced:
            store.free.append(row)
        self._committed, self._replaced = {}, []

    def committed(self) -> dict[int, Tree]:
        """Views of the clients' states at the last commit; read them at once, as with ``view``."""
        slots = {client: self._committed.get(client, slot) for client, slot in self._slots.items()}
        return {client: slot.store.read(slot.row) for client, slot in slots.items() if slot is not None}

    def restore(self, states: Mapping[int, Tree]) -> None:
        """Replace all states by these."""
        self.__init__()  # type: ignore[misc]
        for client, state in states.items():
            self.put([client], state)
        self.commit_round()


class _Slot(NamedTuple):
    store: _RowStore
    row: int


class _RowStore:
    """Rows for states of one shape, in blocks; a block has one tensor per leaf of a state."""

    def __init__(self, states: Tree) -> None:
        self._like = tree.map(lambda leaf: leaf.new_empty((0, *leaf.shape[1:])), states)
        size = sum(leaf[0].numel() * leaf.element_size() for leaf in tree.leaves(states))
        self._rows = max(1, BLOCK // max(1, size))
        self._blocks: list[list[Tensor]] = []
        self._used = 0
        self.free: list[int] = []

    def write(self, states: Tree, count: int) -> list[int]:
        """Write states to free rows, and return these."""
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
        """The state in a row, as a view."""
        parts = iter([kept[row % self._rows] for kept in self._blocks[row // self._rows]])
        return tree.map(lambda _: next(parts), self._like)

    def _next(self) -> int:
        """A row that was never used. A block is allocated with its first row, and paged in as rows are written."""
        if self._used == len(self._blocks) * self._rows:
            like = tree.leaves(self._like)
            self._blocks.append([leaf.new_empty((self._rows, *leaf.shape[1:])) for leaf in like])
        self._used += 1
        return self._used - 1
