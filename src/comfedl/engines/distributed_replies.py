"""Replies that stay in the process that has them: what all need of them is added up or gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.protocol import Replies, Scores
from comfedl.engines.process_group import Group
from comfedl.utils import tree
from comfedl.utils.tree import Tree


class ReducedReplies(Replies):
    """The replies of clients that live in several processes; every one of these makes the same calls.

    Args:
        clients: all clients that were asked, in order.
        local: the replies of those among them that live here.
        owner: in which process each client lives.
        nbytes: how many bytes all replies hold; None is not known yet.
    """

    def __init__(
        self, clients: Sequence[int], local: Replies, owner: NDArray[np.int64], group: Group, nbytes: int | None = None
    ) -> None:
        self.clients, self._local, self._owner, self._group, self._nbytes = clients, local, owner, group, nbytes
        owners = owner[np.asarray(clients, dtype=np.int64)]
        self._places = torch.from_numpy(np.flatnonzero(owners == group.rank))
        self._first = int(owners[0]) if len(owners) else 0
        self._everywhere = len(np.unique(owners)) == group.size

    def numbers(self, name: str) -> Tensor:
        return self._spread(self._local.numbers(name) if len(self._places) else None)

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        return self._spread(self._local.squared_distances(path, origin) if len(self._places) else None)

    def _spread(self, own: Tensor | None) -> Tensor:
        """One number a client from those that live here; to add nothing to a number changes no bit of it."""
        whole = torch.zeros(len(self.clients), dtype=torch.float64)
        if own is not None:
            whole[self._places] = own
        return self._group.sum(whole)

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        own = self._local.weighted_sum(name, weights[self._places]) if len(self._places) else None
        if not self._everywhere:  # who has no reply does not know what one is like
            own = self._like(own)
        kinds: dict[torch.dtype, list[int]] = {}
        leaves = list(tree.leaves(own))
        for k, leaf in enumerate(leaves):
            kinds.setdefault(leaf.dtype, []).append(k)
        for ks in kinds.values():
            for k, whole in zip(ks, self._total([leaves[k] for k in ks]), strict=True):
                leaves[k] = whole
        found = iter(leaves)
        return tree.map(lambda _: next(found), own)

    def _total(self, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
        """Everybody's tensors of one type added up, all at once; whole numbers take their maximum."""
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        real = flat.is_floating_point()
        whole = self._group.sum(flat) if real else self._group.largest(flat.long()).to(flat.dtype)
        for part, leaf in zip(torch.split(whole, [leaf.numel() for leaf in leaves]), leaves, strict=True):
            yield part.view(leaf.shape).clone()

    def _like(self, own: Tree) -> Tree:
        """What is to be added where there is no reply: nothing, in the form of one."""
        form = None
        if self._group.rank == self._first:
            leaves = list(tree.leaves(own))
            form = tree.map(lambda _: None, own), [(leaf.shape, leaf.dtype, leaf.is_cuda) for leaf in leaves]
        shape, kinds = self._group.told(form, self._first)
        if own is not None:
            return own
        filled = iter([_nothing(*kind) for kind in kinds])
        return tree.map(lambda _: next(filled), shape)

    def each(self, name: str) -> Iterator[Tree]:
        return iter(self._in_order(list(self._local.each(name))))

    def _in_order(self, own: Sequence[Tree]) -> list[Tree]:
        """Everybody's trees, one a client."""
        device = next((leaf.device for part in own for leaf in tree.leaves(part)), torch.device("cpu"))
        found: list[Tree] = [None] * len(self.clients)
        for places, parts in self._group.gathered((self._places.tolist(), [packed(part) for part in own])):
            for place, part in zip(places, parts, strict=True):
                found[place] = tree.map(lambda leaf: leaf.to(device), part)
        return found

    def scores(self, name: str) -> list[Scores]:
        local = self._local.scores(name) if len(self._places) else []
        own = [(names, self._places.numpy()[places], values) for names, places, values in local]
        groups: dict[tuple[str, ...], list[Scores]] = {}
        for names, places, values in (scores for everybody in self._group.gathered(own) for scores in everybody):
            groups.setdefault(names, []).append(Scores(names, places, values))
        found = []
        for names, scores in groups.items():
            places = np.concatenate([part.places for part in scores])
            order = np.argsort(places)
            found.append(Scores(names, places[order], np.concatenate([part.values for part in scores])[order]))
        return found

    def faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        own = self._local.faults(fault)
        if not any(count for (count,) in self._group.rows([len(own)])):
            return {}
        found = {client: reason for part in self._group.gathered(own) for client, reason in part.items()}
        return {client: found[client] for client in dict.fromkeys(self.clients) if client in found}

    def without(self, clients: Collection[int]) -> ReducedReplies:
        left = [client for client in self.clients if client not in clients]
        return ReducedReplies(left, self._local.without(clients), self._owner, self._group)

    def nbytes(self) -> int:
        if self._nbytes is None:
            self._nbytes = sum(count for (count,) in self._group.rows([self._local.nbytes()]))
        return self._nbytes


def packed(part: Tree) -> Tree:
    """A tree as it travels: on the CPU, and without what its tensors are views of."""
    return tree.map(lambda leaf: leaf.detach().cpu().clone(), part)


def _nothing(shape: torch.Size, dtype: torch.dtype, cuda: bool) -> Tensor:
    device = "cuda" if cuda else "cpu"
    if dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    least = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    return torch.full(shape, least, dtype=dtype, device=device)
