"""Validates replies before they are used: bad ones are refused, and the round continues with the others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBER, NUMBERS, PARAMS, Replies
from comfedl.utils import tree
from comfedl.utils.errors import BadReply, QuorumError
from comfedl.utils.files import SAFETENSORS_DTYPES
from comfedl.utils.tree import Tree

QUARANTINE = 3  # refused replies after which a client is not asked again


class ReplyValidator:
    """Accepts models shaped like the server's, and finite scalars."""

    def __init__(self, model: Model, names: Sequence[str], quorum: float = 0.5) -> None:
        self._expected = {MODEL: _signature(model), PARAMS: _signature(model["params"])}
        self._names, self._quorum = names, quorum
        self.offences: dict[int, int] = {}

    def is_excluded(self, client: int) -> bool:
        """Whether too many of a client's replies were refused."""
        return self.offences.get(client, 0) >= QUARANTINE

    def validate(
        self, round: int, asked: Sequence[int], replies: Replies, sends: Mapping[str, str], others: int = 0
    ) -> Replies:
        """The usable replies; ``sends`` maps each part of a reply to its type.

        ``others`` are further clients, who need not be asked and are usable.

        Raises:
            QuorumError: if they are fewer than the quorum of the clients asked.
        """
        faults = replies.find_faults(partial(self.find_fault, sends=sends))
        for client, reason in faults.items():
            self.offences[client] = self.offences.get(client, 0) + 1
            excluded = f"; it is not asked again after {QUARANTINE} refused replies" if self.is_excluded(client) else ""
            name = self._names[client]
            warnings.warn(f"Round {round}: refused the reply of client {name!r}: {reason}{excluded}.", BadReply, 2)
        usable = len(replies.clients) - sum(client in faults for client in replies.clients)
        example = "".join(f" (client {self._names[client]!r}: {reason})" for client, reason in [*faults.items()][:1])
        self.check_quorum(round, usable + others, len(asked) + others, example)
        return replies.without(faults) if faults else replies

    def check_quorum(self, round: int, usable: int, wanted: int, example: str = "") -> None:
        """Stop the run if too few clients are usable."""
        if usable < max(1, self._quorum * wanted):
            raise QuorumError(
                f"Round {round}: only {usable} of {wanted} clients can be used{example}, but the quorum is "
                f"{self._quorum:g} of them; fix these clients and resume, or lower quorum."
            )

    def find_fault(self, reply: dict[str, Tree], sends: Mapping[str, str]) -> str | None:
        """What is wrong with a reply, if anything."""
        if sends and reply.keys() != sends.keys():
            return f"it consists of {', '.join(sorted(reply)) or 'nothing'} and not of {', '.join(sorted(sends))}"
        for part, value in reply.items():
            wanted = self._expected.get(sends.get(part, MODEL if isinstance(value, dict) else NUMBER))
            if wanted is not None:
                found = _signature(value) if isinstance(value, dict) else {}
                if found.keys() != wanted.keys():
                    odd = "/".join(sorted(found.keys() ^ wanted.keys())[0])
                    return f"its {part} has other tensors than the model ({odd[:100]})"
                for name, expected in wanted.items():
                    if found[name] != expected:
                        given = _format(found[name])
                        return f"{'/'.join(name)} of its {part} is {given} and not {_format(expected)}"
            elif (sends.get(part) == NUMBERS) != isinstance(value, dict) or not all(
                map(_is_number, value.values() if isinstance(value, dict) else [value])
            ):
                return f"its {part} is not a {'dict of numbers' if sends.get(part) == NUMBERS else 'number'}"
            if not tree.finite(value):
                return f"its {part} is not finite"
        return None


ShapeAndType = tuple[torch.Size, torch.dtype]


def _signature(model: Tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], ShapeAndType | None]:
    """The shape and type of each tensor by its path, and None for each dict: an empty one counts as well."""
    if isinstance(model, Tensor):
        return {path: (model.shape, model.dtype)}
    found: dict[tuple[str, ...], ShapeAndType | None] = {path: None} if path else {}
    for name, part in model.items():
        found |= _signature(part, (*path, str(name)))
    return found


def _is_number(value: Tree) -> bool:
    """Whether it is a single real number of a type that torch can compute with."""
    return isinstance(value, Tensor) and not value.ndim and value.dtype in SAFETENSORS_DTYPES


def _format(tensor: ShapeAndType | None) -> str:
    return "a dict" if tensor is None else f"{tuple(tensor[0])} {tensor[1]}"
