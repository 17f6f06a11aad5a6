"""The embedded engine: all clients live in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem

import torch
from torch import Tensor

from comfedl import rng, tree
from comfedl.data.federated import FederatedData
from comfedl.problem import Batch, Learner
from comfedl.step import Draw, Engine, Replies, Step, check_finite
from comfedl.tree import Tree


class Embedded(Engine):
    """Runs client steps one after another; a client's state is kept here, made when it is first needed."""

    def __init__(
        self, data: FederatedData, learner: Learner, steps: Mapping[str, Step], seed: int, state: Tree = None
    ) -> None:
        """``state`` is what a client starts with; the engine shares it between clients until they change it."""
        self.names, self.sizes = data.names, data.train.sizes
        self._data, self._learner, self._steps, self._seed = data, learner, steps, seed
        self._initial = state
        self._states: dict[int, Tree] = {}
        self._scratch: dict[int, Tree] = {}
        self._round, self._bytes = 0, 0

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._bytes = max(self._bytes, tree.nbytes(message))
        if round != self._round:
            self._round, self._scratch = round, {}
        with _threads_for(self._bytes):
            return self._run(step, clients, message, round)

    def states(self) -> dict[int, Tree]:
        return dict(self._states)

    def restore(self, states: Mapping[int, Tree]) -> None:
        self._states = dict(states)

    def _run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        named = self._steps[step]
        replies: dict[int, dict[str, Tree]] = {}
        for i in dict.fromkeys(clients):
            # Dropout and the like draw from torch's own generator: it is keyed too, and given back as it was.
            with torch.random.fork_rng(devices=self._devices()):
                torch.manual_seed(rng.key(self._seed, f"{named.noise or step}/torch", round, self.names[i]) >> 1)
                state = self._scratch.get(i, self._states.get(i, self._initial))
                outcome = named.run(self._learner, message, state, self._batches(step, named, i, round))
            check_finite(round, self.names[i], outcome)
            if outcome.state is not None:
                self._states[i] = outcome.state
            if outcome.scratch is not None:
                self._scratch[i] = outcome.scratch
            replies[i] = outcome.reply
        return LocalReplies(clients, [replies[i] for i in clients])

    def _devices(self) -> list[torch.device]:
        """The accelerator that the clients are on, if any: its generator is kept apart as well."""
        device = self._data.train.x.device
        return [device] if device.type == "cuda" else []

    def _batches(self, step: str, named: Step, client: int, round: int) -> dict[str, Sequence[Batch]]:
        return {
            name: self._draw(draw.purpose or f"{step}/{name}", draw, client, round)
            for name, draw in named.draws.items()
        }

    def _draw(self, purpose: str, draw: Draw, client: int, round: int) -> Sequence[Batch]:
        split = self._data.split(draw.split, draw.instead)
        if split is None or not split.sizes[client]:
            return ()
        have = int(split.sizes[client])
        if draw.size is None or (draw.bounded and have <= draw.size):
            return [split.whole(client)] * draw.count
        keys = [rng.key(self._seed, purpose, round, self.names[client])]
        x, y = split.take(client, rng.subsets(keys, [have], draw.count, draw.size)[0])
        return [(x[t], y[t]) for t in range(draw.count)]


# Below this many bytes a model's operations are too short to share: a second thread only waits for the first.
SMALL = 400_000


@contextmanager
def _threads_for(size: int) -> Iterator[None]:
    """One thread for a small model, torch's own choice for a large one."""
    threads = torch.get_num_threads()
    if threads == 1 or size > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class LocalReplies(Replies):
    """Replies that are all in this process."""

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

    def faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        found = {client: fault(reply) for client, reply in zip(self.clients, self._replies, strict=True)}
        return {client: reason for client, reason in found.items() if reason is not None}

    def without(self, clients: Collection[int]) -> LocalReplies:
        kept = [(i, reply) for i, reply in zip(self.clients, self._replies, strict=True) if i not in clients]
        return LocalReplies([i for i, _ in kept], [reply for _, reply in kept])

    def nbytes(self) -> int:
        return sum(tree.nbytes(reply) for reply in self._replies)
