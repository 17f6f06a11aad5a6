"""Simulated bad and absent clients, to see what a method and its defences stand; the public module ``cf.faults``.

``fit(..., faults=[cf.faults.SignFlip(["a", "b"], scale=10)])``. Faults change what reaches the server from a client in
training, never what is evaluated. Draws are keyed by (seed, fault, round, client), so a run with faults is as
repeatable as any.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBER, NUMBERS, PARAMS, Engine, Replies, Step
from comfedl.data.client_names import find
from comfedl.data.federated import FederatedData, Split
from comfedl.engines.replies import LocalReplies
from comfedl.engines.wrapped import Wrapped
from comfedl.utils import checks, rng, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

__all__ = [
    *("BadBuffers", "Dropout", "Fault", "LabelFlip", "LeaveEarly", "LossLie", "NoUpdate", "Noise", "NotANumber"),
    *("Scale", "SignFlip", "Straggler"),
]


class Fault(ABC):
    """What is wrong with some clients."""

    clients: Sequence[str] | None
    """Their names; None is all."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        given = self.clients
        listed = isinstance(given, list | tuple) and bool(given) and all(isinstance(client, str) for client in given)
        if given is not None and not listed:
            raise ConfigError(
                f'clients of {self.name} is {given!r}, but it must be a list of names, such as ["a", "b"].'
            )
        if given is not None:
            object.__setattr__(self, "clients", tuple(given))

    def absent(self, draw: float) -> bool:
        """Whether a client takes no part in a round; ``draw`` is uniform between 0 and 1."""
        return False

    def late(self, draw: float) -> bool:
        """Whether a client trains in a round, but its replies are lost."""
        return False

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        """What arrives of a part of a reply; ``origin`` is what it would be without any training."""
        return part

    def relabel(self, y: Tensor, classes: int) -> Tensor:
        """A client's labels."""
        return y


def _params(change: Callable[[Tensor, Tensor], Tensor], part: Tree, kind: str, origin: Tree) -> Tree:
    """A reply's part with its parameters changed, given those and the ones without training."""
    if kind == MODEL:
        return Model(params=tree.map(change, part["params"], origin["params"]), buffers=part["buffers"])
    return tree.map(change, part, origin) if kind == PARAMS else part


@dataclass(frozen=True)
class Scale(Fault):
    """The update times a factor."""

    clients: Sequence[str]
    factor: float

    name: ClassVar[str] = "scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite("factor", self.factor)

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        return _params(lambda end, start: start + self.factor * (end - start), part, kind, origin)


@dataclass(frozen=True)
class SignFlip(Fault):
    """The update times minus a scale."""

    clients: Sequence[str]
    scale: float = 1.0

    name: ClassVar[str] = "sign-flip"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("scale", self.scale)

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        return _params(lambda end, start: start - self.scale * (end - start), part, kind, origin)


@dataclass(frozen=True)
class NoUpdate(Fault):
    """The model comes back as it was sent."""

    clients: Sequence[str]

    name: ClassVar[str] = "no-update"

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        return origin if kind in (MODEL, PARAMS) else part


@dataclass(frozen=True)
class Noise(Fault):
    """Normal noise of a standard deviation on every parameter."""

    clients: Sequence[str]
    std: float

    name: ClassVar[str] = "noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("std", self.std)

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        generator = torch.Generator().manual_seed(seed)

        def noisy(end: Tensor, start: Tensor) -> Tensor:
            return end + self.std * torch.randn(end.shape, generator=generator, dtype=torch.float64).to(end)

        return _params(noisy, part, kind, origin)


@dataclass(frozen=True)
class NotANumber(Fault):
    """Every parameter is NaN, so that the reply is refused."""

    clients: Sequence[str]

    name: ClassVar[str] = "not-a-number"

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        return _params(lambda end, start: torch.full_like(end, torch.nan), part, kind, origin)


@dataclass(frozen=True)
class BadBuffers(Fault):
    """Every buffer (BatchNorm's statistics and counters) has this value; the parameters are honest."""

    clients: Sequence[str]
    value: float = 1000.0

    name: ClassVar[str] = "bad-buffers"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite("value", self.value)

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        if kind != MODEL:
            return part
        buffers = tree.map(lambda leaf: torch.full_like(leaf, self.value), part["buffers"])
        return Model(params=part["params"], buffers=buffers)


@dataclass(frozen=True)
class LossLie(Fault):
    """Every loss that is reported in training is this one."""

    clients: Sequence[str]
    value: float = 1e6

    name: ClassVar[str] = "loss-lie"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite("value", self.value)

    def spoil(self, part: Tree, kind: str, origin: Tree, seed: int) -> Tree:
        return torch.full_like(part, self.value) if kind == NUMBER else part


@dataclass(frozen=True)
class LabelFlip(Fault):
    """Training on wrong labels: class k of n as n - 1 - k; numbers other than 0 and 1 with the other sign."""

    clients: Sequence[str]

    name: ClassVar[str] = "label-flip"

    def relabel(self, y: Tensor, classes: int) -> Tensor:
        return classes - 1 - y if classes else -y


@dataclass(frozen=True)
class Dropout(Fault):
    """Absent for a round, with a probability; it counts against the quorum."""

    probability: float
    clients: Sequence[str] | None = None

    name: ClassVar[str] = "dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability(self.probability)

    def absent(self, draw: float) -> bool:
        return draw < self.probability


@dataclass(frozen=True)
class Straggler(Fault):
    """Trains, but replies too late, with a probability; it counts against the quorum."""

    clients: Sequence[str]
    probability: float = 1.0

    name: ClassVar[str] = "straggler"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability(self.probability)

    def late(self, draw: float) -> bool:
        return draw < self.probability


@dataclass(frozen=True)
class LeaveEarly(Fault):
    """Sends its masked numbers, but is gone before the masks are removed, with a probability.

    Only under secure aggregation, which must then do without its help; its numbers are in the sum.
    """

    probability: float
    clients: Sequence[str] | None = None

    name: ClassVar[str] = "leave-early"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability(self.probability)

    def leaves(self, draw: float) -> bool:
        """Whether a client leaves before the end of a sum."""
        return draw < self.probability


def _check_probability(probability: float) -> None:
    checks.not_below("probability", probability, 0)
    checks.at_most("probability", probability, 1)


FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        *(SignFlip, Noise, Scale, LabelFlip, LossLie, BadBuffers, NotANumber, NoUpdate, Dropout, Straggler, LeaveEarly),
    )
}


class Faulty(Wrapped):
    """An engine whose clients have faults; without any at a client, its replies pass as they are."""

    def __init__(self, engine: Engine, faults: Sequence[Fault], steps: Mapping[str, Step], seed: int) -> None:
        super().__init__(engine)
        self.simulates_faults = True
        self._faults, self._seed = list(enumerate(faults)), seed
        self._sends = {name: step.sends for name, step in steps.items()}
        self._who = [clients_of(fault, engine.names) for fault in faults]
        self._model: Tree = None  # as it was sent last

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        sends = self._sends[step]
        if not sends or NUMBERS in sends.values():  # evaluation, and personal models
            return self._engine.run(step, clients, message, round)
        self._model = message.get("model", self._model)
        asked = set(clients)
        absent = {client for client in asked if any(fault.absent(draw) for fault, draw in self._draws(client, round))}
        present = [client for client in clients if client not in absent]
        if not present:
            return LocalReplies([], [])
        replies = self._engine.run(step, present, message, round)
        late = {client for client in asked if any(fault.late(draw) for fault, draw in self._draws(client, round))}
        replies = replies.without(late) if late & {*present} else replies
        spoilt = {client for client in replies.clients if any(self._has(k, client) for k, _ in self._faults)}
        change = self._change(step, sends, round)
        return replies.altered(change, spoilt) if spoilt else replies

    def _change(
        self, step: str, sends: Mapping[str, str], round: int
    ) -> Callable[[int, dict[str, Tree]], dict[str, Tree]]:
        def change(client: int, reply: dict[str, Tree]) -> dict[str, Tree]:
            for k, fault in self._faults:
                if self._has(k, client):
                    for part, kind in sends.items():
                        key = rng.key(self._seed, f"fault/{k}/{fault.name}/{step}/{part}", round, self.names[client])
                        origin = self._model if kind == MODEL else tree.map(torch.zeros_like, reply[part])
                        reply = {**reply, part: fault.spoil(reply[part], kind, origin, key >> 1)}
            return reply

        return change

    def _has(self, k: int, client: int) -> bool:
        who = self._who[k]
        return who is None or client in who

    def leaves_early(self, client: int, round: int) -> bool:
        """Whether a client leaves before the end of a sum."""
        return any(isinstance(fault, LeaveEarly) and fault.leaves(draw) for fault, draw in self._draws(client, round))

    def _draws(self, client: int, round: int) -> list[tuple[Fault, float]]:
        """The faults of a client and their draws, the same for all steps of a round."""
        return [
            (fault, rng.generator(self._seed, f"fault/{k}/{fault.name}", round, self.names[client]).random())
            for k, fault in self._faults
            if isinstance(fault, Dropout | Straggler | LeaveEarly) and self._has(k, client)
        ]


def check_faults(faults: object) -> tuple[Fault, ...]:
    """The faults as a tuple, if that is what they are."""
    if not isinstance(faults, list | tuple) or not all(isinstance(fault, Fault) for fault in faults):
        raise ConfigError(f'faults is {faults!r}, but it must be a list such as [cf.faults.SignFlip(["a", "b"])].')
    return tuple(faults)


def clients_of(fault: Fault, names: Sequence[str]) -> Collection[int] | None:
    """The positions of a fault's clients; None is all."""
    if fault.clients is None:
        return None
    found = {name: find(names, name) for name in fault.clients}
    for name, place in found.items():
        if place is None:
            known = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
            raise ConfigError(f"The fault {fault.name} names the client {name!r}, but the clients are {known}.")
    return {place for place in found.values() if place is not None}


def poisoned(data: FederatedData, faults: Sequence[Fault]) -> FederatedData:
    """The data that clients train on; what they are evaluated on beside it stays."""
    flips = [fault for fault in faults if isinstance(fault, LabelFlip)]
    if not flips:
        return data
    splits = {
        name: split for name in ("train", "validation", "test", "outer") if (split := data.split(name)) is not None
    }
    classes = tree.map(_classes, data.train.all_y())
    for name in ("train", "outer"):
        for fault in flips if name in splits else ():
            splits[name] = _relabelled(splits[name], fault, clients_of(fault, data.names), classes)
    made = FederatedData.from_splits(splits)
    made.encoding = data.encoding
    return made


def _classes(y: Tensor) -> int:
    """The number of classes; 0 if these are no labels."""
    return int(y.max()) + 1 if not y.is_floating_point() else 2 * bool(((y == 0) | (y == 1)).all())


def _relabelled(split: Split, fault: Fault, clients: Collection[int] | None, classes: Tree) -> Split:
    def flipped(own: Tensor, classes: int) -> Tensor:
        changed = fault.relabel(own, classes)
        return torch.where(own < 0, own, changed) if classes else changed  # a target below 0 does not count

    return split.relabelled(range(len(split.names)) if clients is None else clients, flipped, classes)
