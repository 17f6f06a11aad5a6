"""The contract between an algorithm and an engine: named client steps, and the replies they send.

A client step is a pure function (learner, message, client state, batches) -> (reply, client state), the same on every
engine. It declares the data it draws, so that an engine can prepare batches for many clients at once. Only messages and
replies travel, so a method's traffic is measured from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from operator import getitem
from types import MethodType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.learner import Batch, Learner
from comfedl.utils import tree
from comfedl.utils.errors import Diverged
from comfedl.utils.tree import Tree

T = TypeVar("T")


@dataclass(frozen=True)
class Draw:
    """The data a step needs: ``count`` batches of ``size`` samples of a split; a size of None is all samples.

    A client with fewer than ``size`` samples draws with replacement, or with ``bounded`` uses each of them once. Steps
    with the same ``purpose`` draw the same samples in a round; by default it is "step/draw". ``fallback`` is the split
    that replaces missing "outer" data. ``transformed`` batches are those of training, which the user's transform
    changes.
    """

    split: str = "train"
    size: int | None = None
    count: int = 1
    bounded: bool = False
    purpose: str | None = None
    fallback: str = "train"
    transformed: bool = False


class Data(StrEnum):
    """The draws common to all methods. Their values key the random generators, so they must never change."""

    INNER = "inner"
    OUTER = "outer"
    HESSIAN = "hessian"
    PERSONAL = "personal"
    VALUE_TRAIN = "value train"
    """For the inner value of the objective."""
    VALUE_OUTER = "value outer"
    """For its outer value."""
    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    OUTER_OF_VALIDATION = "outer of validation"
    """The outer data, or the validation data if there are none."""
    OUTER_OF_TEST = "outer of test"


# Batches by the name of the draw; empty if the client lacks the split.
Batches = Mapping[str, Sequence[Batch]]


class Outcome(NamedTuple):
    """The result of a client step: the reply travels, everything else stays with the client.

    A state of None means unchanged. ``watched`` holds one number per local step (``loss`` and ``weight``); one that is
    not finite means that training diverged. ``scratch`` replaces the state in the client's next step of this round.
    """

    reply: dict[str, Tree]
    state: Tree = None
    watched: Mapping[str, Tensor] = {}
    scratch: Tree = None


MODEL, PARAMS, NUMBER, NUMBERS = "model", "params", "number", "numbers"


@dataclass(frozen=True)
class Step:
    """A client step and the data it draws. Steps with the same ``noise`` see the same dropout in a round.

    ``sends`` maps each part of the reply to its type: ``MODEL``, ``PARAMS`` (tensors like the model's parameters),
    ``NUMBER`` or a dict of ``NUMBERS``. A step that is not ``scheduled`` uses the method's base learning rate.
    """

    run: Callable[[Learner, dict[str, Tree], Tree, Batches], Outcome]
    draws: Mapping[str, Draw] = field(default_factory=dict)
    noise: str | None = None
    sends: Mapping[str, str] = field(default_factory=dict)
    scheduled: bool = True

    def at_round(self, number: int) -> Step:
        """The step with the learning rate of a round, if it is a method of an algorithm with a schedule."""
        owner = getattr(self.run, "__self__", None)
        if not self.scheduled or owner is None or not hasattr(owner, "at_round"):
            return self
        scheduled = owner.at_round(number)
        return self if scheduled is owner else replace(self, run=MethodType(self.run.__func__, scheduled))  # type: ignore[attr-defined]

    @property
    def elementwise(self) -> bool:
        """Whether an engine may run it for many clients at once, as declared by ``Algorithm.elementwise``."""
        return bool(getattr(getattr(self.run, "__self__", None), "elementwise", False))


def check_finite(round: int, client: str, outcome: Outcome) -> None:
    """Raise ``Diverged`` if a client's step produced NaN or infinity."""
    if tree.finite(dict(outcome.watched)) and tree.finite(outcome.reply):
        return
    watched = {name: values.reshape(-1) for name, values in outcome.watched.items()}
    bad = {name: torch.nonzero(~torch.isfinite(values)).flatten() for name, values in watched.items()}
    steps = [int(places[0]) for places in bad.values() if len(places)]
    if not steps:
        raise Diverged(round, client, None, float("nan"), 1.0)
    step = min(steps)
    # A method may watch several losses (Ditto's personal model): report the one that diverged.
    losses = [name for name in watched if name.endswith("loss")]
    name = next((name for name in losses if step in bad[name]), "loss")
    weight = float(watched["weight"][step]) if "weight" in watched else 1.0
    raise Diverged(round, client, step + 1, float(watched[name][step]) if name in watched else float("nan"), weight)


class Scores(NamedTuple):
    """A table of scores: one row per reply at ``places``, one column per name. All its replies have these names."""

    names: tuple[str, ...]
    places: NDArray[np.int64]
    values: NDArray[np.float64]


class Replies(ABC):
    """The replies to one step, in the order of ``clients`` (positions in the client list)."""

    clients: Sequence[int]

    @abstractmethod
    def numbers(self, name: str) -> Tensor:
        """One number per client, as a float64 vector."""

    @abstractmethod
    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        """The sum over clients of ``weights[i]`` times this part of the reply; integers take their maximum."""

    @abstractmethod
    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        """``||x_i - origin||^2`` for the part at this path of every reply, as a float64 vector."""

    @abstractmethod
    def each(self, name: str) -> Iterator[Tree]:
        """This part of every reply, one by one."""

    def weighted_updates(self, path: Sequence[str], origin: Tree, weights: Tensor) -> Tree:
        """The sum of ``weights[i] * (x_i - origin)`` for the part at this path of every reply, in double precision."""
        found = tree.map(lambda start: torch.zeros_like(start, dtype=torch.float64), origin)
        for weight, reply in zip(weights.tolist(), self.each(path[0]), strict=True):
            part = reduce(getitem, path[1:], reply)
            found = tree.map(
                lambda so_far, end, start, w=weight: so_far.add_(end.double() - start.double(), alpha=w),
                *(found, part, origin),
            )
        return found

    def products(self, path: Sequence[str], origin: Tree, direction: Tree) -> Tensor:
        """``<x_i - origin, direction>`` for the part at this path of every reply, as a float64 vector."""
        along = flat(direction)
        rows = [flat(reduce(getitem, path[1:], reply)) for reply in self.each(path[0])]
        start = flat(origin)
        return torch.tensor([float((row - start) @ along) for row in rows], dtype=torch.float64)

    def gram(
        self, path: Sequence[str], origin: Tree, other: Tree, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The inner products of ``x_i - origin``, for the part at this path of every reply, and those with ``other``.

        ``scale[i]`` first multiplies ``x_i - origin``, so that not even one of 1e30 times the size makes infinities.
        A float64 matrix and vector on the CPU.
        """
        start = flat(origin)
        updates = torch.stack([flat(reduce(getitem, path[1:], reply)) - start for reply in self.each(path[0])])
        if scale is not None:
            updates *= scale[:, None].to(updates)
        return (updates @ updates.T).double().cpu(), (updates @ flat(other)).double().cpu()

    def scores(self, name: str) -> list[Scores]:
        """This part of every reply, a dict of numbers, as one table per set of names."""
        groups: dict[tuple[str, ...], tuple[list[int], list[list[float]]]] = {}
        for place, reply in enumerate(self.each(name)):
            places, values = groups.setdefault(tuple(reply), ([], []))
            places.append(place)
            values.append([float(score) for score in reply.values()])
        return [Scores(names, np.array(places), np.array(values)) for names, (places, values) in groups.items()]

    @abstractmethod
    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        """The reason for every client whose reply ``fault`` objects to."""

    @abstractmethod
    def altered(self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Collection[int]) -> Replies:
        """The replies with those of these clients changed, to simulate faults."""

    @abstractmethod
    def without(self, clients: Collection[int]) -> Replies:
        """The replies without those of these clients."""

    @abstractmethod
    def nbytes(self) -> int:
        """The total size of the replies in bytes."""


class Engine(ABC):
    """Holds the clients, runs a named step on some of them and returns their replies.

    Clients that do not answer in time are left out; the ``ReplyValidator`` checks that enough did. If training diverges
    at a client, ``Diverged`` is raised for the first such client in order, and in every process of the engine.
    """

    names: Sequence[str]
    sizes: NDArray[np.int64]
    held_out: NDArray[np.int64] | None = None
    """Each client's number of validation and test samples; None if the engine does not know it."""
    is_leader: bool = True
    """Whether this process writes the results; the others run the same loop and write nothing."""
    defers_replies: bool = False
    """Whether replies to ``run_deferred`` arrive with those of the next step, to save one message per round."""
    simulates_faults: bool = False
    """Whether its clients may have faults that are simulated."""

    @abstractmethod
    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        """Run a step with this message at these clients (positions in ``names``).

        A client listed twice runs the step once, and its reply counts twice.
        """

    def run_deferred(
        self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int
    ) -> Callable[[], Replies]:
        """Like ``run``, but the replies are fetched later; the step must not change the clients' states."""
        replies = self.run(step, clients, message, round)
        return lambda: replies

    @abstractmethod
    def states(self) -> dict[int, Tree]:
        """The clients' states after the last committed round; clients that never changed theirs are left out."""

    @abstractmethod
    def commit_round(self) -> None:
        """The round succeeded: ``states`` now returns the clients' current states."""

    def capture_states(self) -> Callable[[], dict[int, Tree]]:
        """A function that returns the current ``states``; with ``defers_replies`` also after the next round."""
        return self.states

    @abstractmethod
    def restore(self, states: Mapping[int, Tree]) -> None:
        """Restore what ``states`` returned."""

    def can_save(self, error: BaseException) -> bool:
        """Whether ``states`` can be called after a run has failed with this error."""
        return True

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call ``make`` in the leader only, and return its value in all processes."""
        return make()

    def finish(self, error: BaseException | None) -> None:  # noqa: B027 - a single process has nothing to do
        """Tell the other processes that the run has ended, successfully or with this error."""


def flat(params: Tree) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(params)])
