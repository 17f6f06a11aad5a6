"""Replies in this process: one by one, or stacked, as computed for many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from comfedl.core.client_statistics import undefinable
from comfedl.core.protocol import Replies, Scores, flat
from comfedl.utils import tree
from comfedl.utils.tree import Tree


class LocalReplies(Replies):
    """One reply per client."""

    def __init__(self, clients: Sequence[int], replies: Sequence[dict[str, Tree]]) -> None:
        self.clients, self._replies = clients, replies

    def numbers(self, name: str) -> Tensor:
        return torch.tensor([float(reply[name]) for reply in self._replies], dtype=torch.float64)

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        shares = weights.tolist()

        def total(*leaves: Tensor) -> Tensor:
            if not leaves[0].is_floating_point():
                return torch.stack(leaves).amax(dim=0)
            out = torch.zeros_like(leaves[0])
            for share, leaf in zip(shares, leaves, strict=True):
                out.add_(leaf, alpha=share)
            return out

        return tree.map(total, *self.each(name))

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        def squares(reply: Tree) -> float:
            parts = zip(tree.leaves(reduce(getitem, path, reply)), tree.leaves(origin), strict=True)
            return sum(float((part.double() - start.double()).square().sum()) for part, start in parts)

        return torch.tensor([squares(reply) for reply in self._replies], dtype=torch.float64)

    def each(self, name: str) -> Iterator[Tree]:
        return (reply[name] for reply in self._replies)

    def whole(self) -> Sequence[dict[str, Tree]]:
        """All replies, with all their parts."""
        return self._replies

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        found = {client: fault(reply) for client, reply in zip(self.clients, self._replies, strict=True)}
        return {client: reason for client, reason in found.items() if reason is not None}

    def altered(
        self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Collection[int]
    ) -> LocalReplies:
        pairs = zip(self.clients, self._replies, strict=True)
        return LocalReplies(self.clients, [change(i, reply) if i in clients else reply for i, reply in pairs])

    def without(self, clients: Collection[int]) -> LocalReplies:
        kept = [(i, reply) for i, reply in zip(self.clients, self._replies, strict=True) if i not in clients]
        return LocalReplies([i for i, _ in kept], [reply for _, reply in kept])

    def nbytes(self) -> int:
        return sum(tree.nbytes(reply) for reply in self._replies)


class ReplyPart(NamedTuple):
    """Stacked replies, with the clients as first dimension; ``finite`` if all values are known to be finite."""

    clients: Sequence[int]
    reply: dict[str, Tree]
    finite: bool = False


def required_parts(reply: dict[str, Tree]) -> dict[str, Tree]:
    """A reply without the scores that may be undefined: what must be finite."""
    if "scores" not in reply:
        return reply
    return {**reply, "scores": {name: score for name, score in reply["scores"].items() if not undefinable(name)}}


def drop_undefined_scores(part: ReplyPart) -> list[ReplyPart]:
    """The replies without undefined (NaN or infinite) scores, in one part per set of scores."""
    scores = part.reply.get("scores", {})
    gaps = {name: ~score.isfinite() for name, score in scores.items() if undefinable(name) and score.ndim}
    if not any(bool(gap.any()) for gap in gaps.values()):
        return [part]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for k, row in enumerate(zip(*(gap.tolist() for gap in gaps.values()), strict=True)):
        groups.setdefault(row, []).append(k)
    found = []
    for row, places in groups.items():
        missing = {name for name, gap in zip(gaps, row, strict=True) if gap}
        reply = {**part.reply, "scores": {name: score for name, score in scores.items() if name not in missing}}
        rows = places if len(places) > 1 else places[0]
        own = tree.map(lambda leaf, rows=rows: leaf[rows], reply)
        found.append(ReplyPart([part.clients[k] for k in places], own, part.finite))
    return found


class StackedReplies(Replies):
    """Replies in stacked parts; each client is in exactly one, even if its reply counts several times."""

    def __init__(self, clients: Sequence[int], parts: Sequence[ReplyPart]) -> None:
        self.clients, self._parts = clients, parts
        self._lengths = [len(part.clients) for part in parts]
        stored = [client for part in parts for client in part.clients]
        self._in_order = stored == list(clients)  # then row k is reply k
        row = {} if self._in_order else {client: k for k, client in enumerate(stored)}
        self._rows = torch.arange(len(stored)) if self._in_order else torch.tensor([row[client] for client in clients])

    def numbers(self, name: str) -> Tensor:
        stored = torch.cat([part.reply[name].double().cpu() for part in self._parts])
        return stored if self._in_order else stored[self._rows]

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        shares = self._by_row(weights)

        def total(*leaves: Tensor) -> Tensor:
            if not leaves[0].is_floating_point():
                return torch.stack([leaf.amax(dim=0) for leaf in leaves]).amax(dim=0)
            rows = zip(shares, leaves, strict=True)
            sums = [share.to(leaf).unsqueeze(0).mm(leaf.reshape(len(leaf), -1)) for share, leaf in rows]
            return reduce(Tensor.add_, sums).view(leaves[0].shape[1:])

        return tree.map(total, *(part.reply[name] for part in self._parts))

    def _by_row(self, weights: Tensor) -> Sequence[Tensor]:
        """Each stored client's total weight, part by part."""
        total = weights.double()
        if not self._in_order:
            total = torch.zeros(sum(self._lengths), dtype=torch.float64).index_add_(0, self._rows, total)
        return torch.split(total, self._lengths) if len(self._lengths) > 1 else [total]

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        def squares(reply: Tree) -> Tensor:
            pairs = zip(tree.leaves(reduce(getitem, path, reply)), tree.leaves(origin), strict=True)
            return torch.stack([_squares(leaf, start) for leaf, start in pairs]).sum(dim=0)

        return torch.cat([squares(part.reply).cpu() for part in self._parts])[self._rows]

    def products(self, path: Sequence[str], origin: Tree, direction: Tree) -> Tensor:
        # A product with the whole model less one with the origin: no copy of all clients' updates is made.
        along = [leaf.reshape(-1) for leaf in tree.leaves(direction)]
        start = float(flat(origin).double() @ flat(direction).double())
        found = [
            torch.stack(
                [leaf.reshape(len(leaf), -1) @ part for leaf, part in zip(_at(stack, path), along, strict=True)]
            )
            for stack in self._parts
        ]
        return torch.cat([each.sum(dim=0).double().cpu() for each in found])[self._rows] - start

    def gram(
        self, path: Sequence[str], origin: Tree, other: Tree, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        count = sum(self._lengths)
        inner, along = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        stacks = zip(*(_at(part, path) for part in self._parts), strict=True)
        for leaves, start, mate in zip(stacks, tree.leaves(origin), tree.leaves(other), strict=True):
            pairs = zip(leaves, self._lengths, strict=True)
            rows = [leaf.reshape(length, -1) - start.reshape(1, -1) for leaf, length in pairs]
            updates = torch.cat(rows) if len(rows) > 1 else rows[0]
            if scale is not None:
                updates *= scale.new_zeros(count).index_copy_(0, self._rows, scale)[:, None].to(updates)
            inner += (updates @ updates.T).cpu()
            along += (updates @ mate.reshape(-1)).cpu()
        return (inner, along) if self._in_order else (inner[self._rows][:, self._rows], along[self._rows])

    def each(self, name: str) -> Iterator[Tree]:
        rows = [row for part in self._parts for row in unstack_tree(part.reply[name], len(part.clients))]
        return (rows[row] for row in self._rows.tolist())

    def scores(self, name: str) -> list[Scores]:
        ends = np.cumsum(self._lengths)
        kinds: dict[tuple[str, ...], list[int]] = {}
        for k, part in enumerate(self._parts):
            kinds.setdefault(tuple(part.reply[name]), []).append(k)
        found = []
        for names, parts in kinds.items():
            numbers = [torch.stack([self._parts[k].reply[name][key].double().cpu() for key in names], 1) for k in parts]
            # The row of each reply in this table; a reply that counts twice has its row twice.
            row_in_table = np.full(ends[-1], -1)
            rows = np.concatenate([np.arange(ends[k] - self._lengths[k], ends[k]) for k in parts])
            row_in_table[rows] = np.arange(len(rows))
            chosen = row_in_table[self._rows.numpy()]
            found.append(Scores(names, np.flatnonzero(chosen >= 0), torch.cat(numbers).numpy()[chosen[chosen >= 0]]))
        return [scores for scores in found if len(scores.places)]

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        found: dict[int, str] = {}
        for part in self._parts:
            # All rows have the same shapes: if the first is valid and all are finite, all are valid.
            first = tree.map(lambda leaf: leaf.select(0, 0), part.reply)
            if fault(first) is None and (part.finite or tree.finite(part.reply)):
                continue
            rows = zip(part.clients, unstack_tree(part.reply, len(part.clients)), strict=True)
            found |= {client: reason for client, row in rows if (reason := fault(row)) is not None}
        return found

    def altered(
        self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Collection[int]
    ) -> LocalReplies:
        rows = [row for part in self._parts for row in unstack_tree(part.reply, len(part.clients))]
        return LocalReplies(self.clients, [rows[row] for row in self._rows.tolist()]).altered(change, clients)

    def without(self, clients: Collection[int]) -> StackedReplies:
        return StackedReplies([client for client in self.clients if client not in clients], self._parts)

    def nbytes(self) -> int:
        if self._in_order or len(self.clients) == len(set(self.clients)) == sum(self._lengths):  # each was asked once
            return sum(tree.nbytes(part.reply) for part in self._parts)
        each = [tree.nbytes(part.reply) // len(part.clients) for part in self._parts for _ in part.clients]
        return sum(each[row] for row in self._rows.tolist())


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Stack trees along a new first dimension; a tensor that all of them share is expanded, not copied."""

    def stack(*leaves: Tensor) -> Tensor:
        first = leaves[0]
        if all(leaf.data_ptr() == first.data_ptr() and leaf.stride() == first.stride() for leaf in leaves):
            return first.expand(len(leaves), *first.shape)
        return torch.stack(leaves)

    return tree.map(stack, *trees)


def expand_tree(one: Tree, count: int) -> Tree:
    """A stack of ``count`` times the same tree, without a copy."""
    return tree.map(lambda leaf: leaf.expand(count, *leaf.shape), one)


def unstack_tree(stack: Tree, count: int) -> list[Tree]:
    """The trees of a stack, as views."""
    columns = [leaf.unbind() for leaf in tree.leaves(stack)]
    rows = []
    for k in range(count):
        values = iter([column[k] for column in columns])
        rows.append(tree.map(lambda _, values=values: next(values), stack))
    return rows


def _at(part: ReplyPart, path: Sequence[str]) -> list[Tensor]:
    return list(tree.leaves(reduce(getitem, path, part.reply)))


def _squares(leaf: Tensor, start: Tensor) -> Tensor:
    """Each row's squared distance from ``start``, in portions of rows that stay in the processor's cache."""
    rows = max(1, 100_000 // max(1, start.numel()))
    found = []
    for part in torch.split(leaf, rows):
        away = (part - start).reshape(len(part), -1)
        found.append(torch.einsum("ij,ij->i", away, away))
    return torch.cat(found).double()
