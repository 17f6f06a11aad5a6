"""A round as an algorithm sees it: the clients, random draws, a way to ask clients for a step, and the traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core import dual_weights
from comfedl.core.protocol import Engine, Replies, Step
from comfedl.core.reply_validation import Screen
from comfedl.utils import rng, tree
from comfedl.utils.tree import Tree


class Participation(NamedTuple):
    """Who took part in a round, with which weight in the new model, and every client's dual weight if it is learnt."""

    clients: Sequence[int]
    weights: Tensor
    duals: Tensor | None = None


@dataclass
class Traffic:
    """Bytes sent, counted from the messages and the replies themselves."""

    up_bytes: int = 0
    down_bytes: int = 0

    def so_far(self) -> dict[str, int]:
        return {"up_bytes": self.up_bytes, "down_bytes": self.down_bytes}

    def count(self, message: Tree, asked: Sequence[int], replies: Replies) -> None:
        self.down_bytes += tree.nbytes(message) * len(asked)
        self.up_bytes += replies.nbytes()


@dataclass(frozen=True)
class RoundContext:
    """One round, as an algorithm sees it."""

    number: int
    seed: int
    participants: int
    engine: Engine
    traffic: Traffic = field(default_factory=Traffic)
    screen: Screen | None = None
    steps: Mapping[str, Step] = field(default_factory=dict)
    recorded: bool = True
    """Whether the round is evaluated; if not, what only the records need is not computed."""

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.engine.names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of training samples of each client."""
        return self.engine.sizes

    def rng(self, purpose: str) -> np.random.Generator:
        """The generator of this round for one purpose."""
        return rng.generator(self.seed, purpose, self.number)

    def sample(self, purpose: str = "clients") -> list[int]:
        """Draw the round's clients uniformly without replacement, leaving out those in quarantine."""
        barred = self._barred()
        allowed = self.clients - len(barred)
        if self.screen is not None:
            self.screen.enough(self.number, allowed, self.participants)
        if self.participants >= allowed:
            return _skipping(range(allowed), barred)
        # Floyd's algorithm, which does not look at all clients.
        chosen = self.rng(purpose).choice(allowed, size=self.participants, replace=False, shuffle=False)
        return _skipping(sorted(chosen.tolist()), barred)

    def sample_by(self, weights: NDArray[Any], replace: bool = False) -> list[int]:
        """Draw the round's clients in proportion to weights; with ``replace`` one may be drawn twice."""
        probabilities = weights.astype(np.float64)
        probabilities[self._barred()] = 0.0
        if not probabilities.any():  # all the weight is on clients in quarantine
            probabilities[:] = 1.0
            probabilities[self._barred()] = 0.0
        size = self.participants if replace else min(self.participants, int(np.count_nonzero(probabilities)))
        probabilities /= probabilities.sum()
        return sorted(self.rng("clients").choice(self.clients, size=size, replace=replace, p=probabilities).tolist())

    def sample_by_duals(self, weights: Tree) -> list[int]:
        """Draw the round's clients by learnt weights (``core.dual_weights``), with replacement."""
        if isinstance(weights, Tensor):
            return self.sample_by(weights.numpy(), replace=True)
        return dual_weights.drawn(weights, self.rng("clients").random(self.participants), self._barred())

    def _barred(self) -> list[int]:
        """The clients in quarantine, in order."""
        return [] if self.screen is None else sorted(filter(self.screen.barred, self.screen.offences))

    def ask(self, step: str, clients: Sequence[int], message: dict[str, Tree]) -> Replies:
        """Ask these clients for a named step with this message; ``replies.clients`` says whose replies are usable."""
        replies = self.engine.run(step, clients, message, self.number)
        self.traffic.count(message, clients, replies)
        if self.screen is None:
            return replies
        return self.screen.passed(self.number, clients, replies, self.steps[step].sends if step in self.steps else {})


def _skipping(places: Iterable[int], barred: list[int]) -> list[int]:
    """Places, in order, among the clients that are not barred as places among all.

    >>> _skipping([0, 1, 2, 5], [1, 2])
    [0, 3, 4, 7]
    """
    found, skipped = [], 0
    for place in places:
        while skipped < len(barred) and barred[skipped] <= place + skipped:
            skipped += 1
        found.append(place + skipped)
    return found
