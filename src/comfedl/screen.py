"""Replies are looked at before they are used: a bad one is refused, and the round goes on with the others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from comfedl import tree
from comfedl.errors import ComfedlError
from comfedl.problem import Model
from comfedl.step import Replies
from comfedl.tree import Tree

QUARANTINE = 3  # a client whose replies were refused this often is not asked again


class BadReply(UserWarning):
    """A client's reply was refused."""


class QuorumError(ComfedlError, RuntimeError):
    """Too few replies of a round could be used."""


class Screen:
    """What a reply may be: models like the server's own, and single finite numbers."""

    def __init__(self, model: Model, names: Sequence[str], quorum: float = 0.5) -> None:
        self._like = _signature(model)
        self._names, self._quorum = names, quorum
        self.offences: dict[int, int] = {}

    def barred(self, client: int) -> bool:
        """Whether a client is in quarantine."""
        return self.offences.get(client, 0) >= QUARANTINE

    def passed(self, round: int, replies: Replies) -> Replies:
        """The replies that can be used.

        Raises:
            QuorumError: fewer than the quorum of those who were asked.
        """
        faults = replies.faults(self.fault)
        for client, reason in faults.items():
            self.offences[client] = self.offences.get(client, 0) + 1
            barred = f"; it is not asked again after {QUARANTINE} such replies" if self.barred(client) else ""
            name = self._names[client]
            warnings.warn(f"Round {round}: the reply of client {name!r} is refused: {reason}{barred}.", BadReply, 2)
        good = len(replies.clients) - sum(client in faults for client in replies.clients)
        if good < max(1, self._quorum * len(replies.clients)):
            first = next(iter(faults.items()), None)
            example = "" if first is None else f" (client {self._names[first[0]]!r}: {first[1]})"
            raise QuorumError(
                f"Round {round}: only {good} of {len(replies.clients)} replies can be used{example}, and the quorum is "
                f"{self._quorum:g} of them; see to these clients and resume, or lower quorum."
            )
        return replies.without(faults) if faults else replies

    def fault(self, reply: dict[str, Tree]) -> str | None:
        """What is wrong with a reply, if anything."""
        for part, value in reply.items():
            if isinstance(value, dict) and value.keys() == {"params", "buffers"}:
                found = _signature(value)
                if found.keys() != self._like.keys():
                    odd = sorted(found.keys() ^ self._like.keys())[0]
                    return f"its {part} has other tensors than the model ({odd})"
                for name, like in self._like.items():
                    if found[name] != like:
                        return f"{name} of its {part} is {found[name]} and not {like}"
            elif any(leaf.ndim for leaf in tree.leaves(value)):
                return f"its {part} is neither a model nor a number"
            if not tree.finite(value):
                return f"its {part} is not finite"
        return None


def _signature(model: Tree) -> dict[str, str]:
    return {name: f"{tuple(leaf.shape)} {leaf.dtype}" for name, leaf in tree.named_leaves(model)}
