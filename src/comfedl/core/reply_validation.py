"""Replies are looked at before they are used: a bad one is refused, and the round goes on with the others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBER, NUMBERS, Replies
from comfedl.utils import tree
from comfedl.utils.errors import BadReply, QuorumError
from comfedl.utils.tree import Tree

QUARANTINE = 3  # a client whose replies were refused this often is not asked again


class Screen:
    """What a reply may be: models like the server's own, and single finite numbers."""

    def __init__(self, model: Model, names: Sequence[str], quorum: float = 0.5) -> None:
        self._like = _signature(model)
        self._names, self._quorum = names, quorum
        self.offences: dict[int, int] = {}

    def barred(self, client: int) -> bool:
        """Whether a client is in quarantine."""
        return self.offences.get(client, 0) >= QUARANTINE

    def passed(self, round: int, asked: Sequence[int], replies: Replies, sends: Mapping[str, str]) -> Replies:
        """The replies that can be used, of those who were asked; ``sends`` says what each must consist of.

        Raises:
            QuorumError: they are fewer than the quorum.
        """
        faults = replies.faults(partial(self.fault, sends=sends))
        for client, reason in faults.items():
            self.offences[client] = self.offences.get(client, 0) + 1
            barred = f"; it is not asked again after {QUARANTINE} such replies" if self.barred(client) else ""
            name = self._names[client]
            warnings.warn(f"Round {round}: the reply of client {name!r} is refused: {reason}{barred}.", BadReply, 2)
        good = len(replies.clients) - sum(client in faults for client in replies.clients)
        first = next(iter(faults.items()), None)
        self.enough(
            round, good, len(asked), "" if first is None else f" (client {self._names[first[0]]!r}: {first[1]})"
        )
        return replies.without(faults) if faults else replies

    def enough(self, round: int, good: int, wanted: int, example: str = "") -> None:
        """Stop the run where too few clients are left."""
        if good < max(1, self._quorum * wanted):
            raise QuorumError(
                f"Round {round}: only {good} of {wanted} clients can be used{example}, and the quorum is "
                f"{self._quorum:g} of them; see to these clients and resume, or lower quorum."
            )

    def fault(self, reply: dict[str, Tree], sends: Mapping[str, str]) -> str | None:
        """What is wrong with a reply, if anything."""
        if sends and reply.keys() != sends.keys():
            return f"it consists of {', '.join(sorted(reply)) or 'nothing'} and not of {', '.join(sorted(sends))}"
        for part, value in reply.items():
            if sends.get(part, MODEL if isinstance(value, dict) else NUMBER) == MODEL:
                found = _signature(value) if isinstance(value, dict) else {}
                if found.keys() != self._like.keys():
                    odd = sorted(found.keys() ^ self._like.keys())[0]
                    return f"its {part} has other tensors than the model ({odd})"
                for name, like in self._like.items():
                    if found[name] != like:
                        return f"{name} of its {part} is {_written(found[name])} and not {_written(like)}"
            elif (sends.get(part) == NUMBERS) != isinstance(value, dict) or any(
                leaf.ndim for leaf in tree.leaves(value)
            ):
                return f"its {part} is not a {'dict of numbers' if sends.get(part) == NUMBERS else 'number'}"
            if not tree.finite(value):
                return f"its {part} is not finite"
        return None


Kind = tuple[torch.Size, torch.dtype]


def _signature(model: Tree) -> dict[str, Kind]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in tree.named_leaves(model)}


def _written(kind: Kind) -> str:
    return f"{tuple(kind[0])} {kind[1]}"
