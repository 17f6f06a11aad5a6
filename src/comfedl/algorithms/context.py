"""What an algorithm sees of a round: the clients, random draws, steps to run at clients, and the traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.private_release import NoReplies, PrivateRelease
from comfedl.core import dual_weights
from comfedl.core.protocol import Engine, Replies, Step
from comfedl.core.reply_validation import ReplyValidator
from comfedl.utils import rng, tree
from comfedl.utils.tree import Tree


class Participation(NamedTuple):
    """A round's participants, their weights in the new model, and all clients' dual weights if there are any."""

    clients: Sequence[int]
    weights: Tensor
    duals: Tensor | None = None


@dataclass
class Traffic:
    """Bytes sent, measured from messages and replies."""

    up_bytes: int = 0
    down_bytes: int = 0

    def so_far(self) -> dict[str, int]:
        return {"up_bytes": self.up_bytes, "down_bytes": self.down_bytes}

    def count(self, message: Tree, asked: Sequence[int], replies: Replies) -> None:
        self.down_bytes += tree.nbytes(message) * len(asked)
        self.up_bytes += replies.nbytes()


@dataclass(frozen=True)
class RoundContext:
    """One round, as seen by an algorithm."""

    number: int
    seed: int
    participants: int
    engine: Engine
    traffic: Traffic = field(default_factory=Traffic)
    validator: ReplyValidator | None = None
    steps: Mapping[str, Step] = field(default_factory=dict)
    recorded: bool = True
    """Whether the round is evaluated; if not, values for the records alone need not be computed."""
    release: PrivateRelease | None = None
    """Under differential privacy, what may leave the round."""

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.engine.names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of training samples of each client."""
        return self.engine.sizes

    def rng(self, purpose: str) -> np.random.Generator:
        """This round's random generator for a purpose."""
        return rng.generator(self.seed, purpose, self.number)

    def sample(self, purpose: str = "clients") -> list[int]:
        """Draw the round's clients uniformly without replacement, except excluded ones."""
        excluded = self._excluded()
        if self.release is not None and self.release.draws_sample():
            # Excluded clients are drawn and count as absent: the chance of the others must not depend on them.
            return [client for client in self.release.sample() if client not in excluded]
        allowed = self.clients - len(excluded)
        if self.validator is not None:
            self.validator.check_quorum(self.number, allowed, self.participants)
        if self.participants >= allowed:
            return _skip(range(allowed), excluded)
        # With shuffle=False, NumPy uses Floyd's algorithm: O(participants), not O(clients).
        chosen = self.rng(purpose).choice(allowed, size=self.participants, replace=False, shuffle=False)
        return _skip(sorted(chosen.tolist()), excluded)

    def sample_by(self, weights: NDArray[Any], replace: bool = False) -> list[int]:
        """Draw the round's clients in proportion to weights, with or without replacement."""
        probabilities = weights.astype(np.float64)
        probabilities[self._excluded()] = 0.0
        if not probabilities.any():  # all the weight is on excluded clients
            probabilities[:] = 1.0
            probabilities[self._excluded()] = 0.0
        size = self.participants if replace else min(self.participants, int(np.count_nonzero(probabilities)))
        probabilities /= probabilities.sum()
        return sorted(self.rng("clients").choice(self.clients, size=size, replace=replace, p=probabilities).tolist())

    def sample_by_duals(self, weights: Tree) -> list[int]:
        """Draw the round's clients in proportion to dual weights (``core.dual_weights``), with replacement."""
        if isinstance(weights, Tensor):
            return self.sample_by(weights.numpy(), replace=True)
        return dual_weights.sample(weights, self.rng("clients").random(self.participants), self._excluded())

    def _excluded(self) -> list[int]:
        """The clients with too many refused replies, in order."""
        return [] if self.validator is None else sorted(filter(self.validator.is_excluded, self.validator.offences))

    def ask(self, step: str, clients: Sequence[int], message: dict[str, Tree], others: int = 0) -> Replies:
        """Run a step with this message at these clients; ``replies.clients`` are those with a usable reply.

        ``others`` are participants who need not be asked: in the quorum they count as asked and usable.
        """
        if not clients and self.release is not None:
            return NoReplies()
        replies = self.engine.run(step, clients, message, self.number)
        self.traffic.count(message, clients, replies)
        if self.validator is None:
            return replies
        sends = self.steps[step].sends if step in self.steps else {}
        return self.validator.validate(self.number, clients, replies, sends, others)


def _skip(positions: Iterable[int], excluded: list[int]) -> list[int]:
    """Convert sorted positions among the clients that are not excluded to positions among all.

    >>> _skip([0, 1, 2, 5], [1, 2])
    [0, 3, 4, 7]
    """
    found, skipped = [], 0
    for position in positions:
        while skipped < len(excluded) and excluded[skipped] <= position + skipped:
            skipped += 1
        found.append(position + skipped)
    return found
