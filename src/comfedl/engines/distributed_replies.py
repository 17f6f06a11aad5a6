"""Replies that stay on their rank; what all ranks need of them is reduced or gathered."""

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
    """The replies of clients on several ranks; all ranks must make the same calls.

    Args:
        clients: all clients asked, in order.
        local: the replies of those on this rank.
        owner: the rank of each client.
        nbytes: the total size of all replies in bytes; None if not yet known.
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
        return self._gather_numbers(self._local.numbers(name) if len(self._places) else None)

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        return self._gather_numbers(self._local.squared_distances(path, origin) if len(self._places) else None)

    def weighted_updates(self, path: Sequence[str], origin: Tree, weights: Tensor) -> Tree:
        if len(self._places):
            own = self._local.weighted_updates(path, origin, weights[self._places])
        else:
            own = tree.map(lambda start: torch.zeros_like(start, dtype=torch.float64), origin)
        found = self._reduce(list(tree.leaves(own)))
        return tree.map(lambda _: next(found), own)

    def products(self, path: Sequence[str], origin: Tree, direction: Tree) -> Tensor:
        return self._gather_numbers(self._local.products(path, origin, direction) if len(self._places) else None)

    def _gather_numbers(self, own: Tensor | None) -> Tensor:
        """One number per client, from those on this rank; a sum with zeros is exact."""
        numbers = torch.zeros(len(self.clients), dtype=torch.float64)
        if own is not None:
            numbers[self._places] = own
        return self._group.sum(numbers)

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        own = self._local.weighted_sum(name, weights[self._places]) if len(self._places) else None
        if not self._everywhere:  # a rank without replies does not know their structure
            own = self._with_structure(own)
        by_dtype: dict[torch.dtype, list[int]] = {}
        leaves = list(tree.leaves(own))
        for k, leaf in enumerate(leaves):
            by_dtype.setdefault(leaf.dtype, []).append(k)
        for ks in by_dtype.values():
            for k, total in zip(ks, self._reduce([leaves[k] for k in ks]), strict=True):
                leaves[k] = total
        found = iter(leaves)
        return tree.map(lambda _: next(found), own)

    def _reduce(self, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
        """Sums over ranks of tensors of one dtype, in a single all-reduce; integers take their maximum."""
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        real = flat.is_floating_point()
        total = self._group.sum(flat) if real else self._group.max(flat.long()).to(flat.dtype)
        for part, leaf in zip(torch.split(total, [leaf.numel() for leaf in leaves]), leaves, strict=True):
            yield part.view(leaf.shape).clone()

    def _with_structure(self, own: Tree) -> Tree:
        """This rank's sum, or a neutral element with the structure of the others'."""
        structure = None
        if self._group.rank == self._first:
            leaves = list(tree.leaves(own))
            structure = tree.map(lambda _: None, own), [(leaf.shape, leaf.dtype, leaf.is_cuda) for leaf in leaves]
        skeleton, specs = self._group.broadcast_object(structure, self._first)
        if own is not None:
            return own
        filled = iter([_neutral(*spec) for spec in specs])
        return tree.map(lambda _: next(filled), skeleton)

    def each(self, name: str) -> Iterator[Tree]:
        return iter(self._gather_in_order(list(self._local.each(name))))

    def _gather_in_order(self, own: Sequence[Tree]) -> list[Tree]:
        """All ranks' trees, one per client."""
        device = next((leaf.device for part in own for leaf in tree.leaves(part)), torch.device("cpu"))
        found: list[Tree] = [None] * len(self.clients)
        for places, parts in self._group.all_gather_objects((self._places.tolist(), [cpu_copy(part) for part in own])):
            for place, part in zip(places, parts, strict=True):
                found[place] = tree.map(lambda leaf: leaf.to(device), part)
        return found

    def scores(self, name: str) -> list[Scores]:
        local = self._local.scores(name) if len(self._places) else []
        own = [(names, self._places.numpy()[places], values) for names, places, values in local]
        groups: dict[tuple[str, ...], list[Scores]] = {}
        for names, places, values in (scores for local in self._group.all_gather_objects(own) for scores in local):
            groups.setdefault(names, []).append(Scores(names, places, values))
        found = []
        for names, scores in groups.items():
            places = np.concatenate([part.places for part in scores])
            order = np.argsort(places)
            found.append(Scores(names, places[order], np.concatenate([part.values for part in scores])[order]))
        return found

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        own = self._local.find_faults(fault)
        if not any(count for (count,) in self._group.all_gather_ints([len(own)])):
            return {}
        found = {client: reason for part in self._group.all_gather_objects(own) for client, reason in part.items()}
        return {client: found[client] for client in dict.fromkeys(self.clients) if client in found}

    def altered(
        self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Collection[int]
    ) -> ReducedReplies:
        return ReducedReplies(
            self.clients, self._local.altered(change, clients), self._owner, self._group, self._nbytes
        )

    def without(self, clients: Collection[int]) -> ReducedReplies:
        left = [client for client in self.clients if client not in clients]
        return ReducedReplies(left, self._local.without(clients), self._owner, self._group)

    def nbytes(self) -> int:
        if self._nbytes is None:
            self._nbytes = sum(count for (count,) in self._group.all_gather_ints([self._local.nbytes()]))
        return self._nbytes


def cpu_copy(part: Tree) -> Tree:
    """A tree to send: on the CPU, and copied, so that views do not carry their base tensor along."""
    return tree.map(lambda leaf: leaf.detach().cpu().clone(), part)


def _neutral(shape: torch.Size, dtype: torch.dtype, cuda: bool) -> Tensor:
    """The neutral element of a sum, or of a maximum of integers."""
    device = "cuda" if cuda else "cpu"
    if dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    least = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    return torch.full(shape, least, dtype=dtype, device=device)
