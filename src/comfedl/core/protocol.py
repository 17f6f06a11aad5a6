"""The contract between an algorithm and an engine: named client steps, and the replies they send.

A client step is a pure function (learner, message, client state, batches) -> (reply, client state), the same on every
engine. It declares the data it draws, so that an engine may prepare the batches of many clients at once. Only the
message and the reply travel, so the traffic of a method is counted from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
    """Data that a step wants: ``count`` batches of ``size`` samples of a split; None is all the client has.

    A client with fewer samples than ``size`` draws with replacement, or with ``bounded`` gives all it has once. Steps
    that name the same ``purpose`` draw the same samples in a round; by default it is the step's and draw's own.
    ``instead`` is the split that serves for "outer" where there are no outer data.
    """

    split: str = "train"
    size: int | None = None
    count: int = 1
    bounded: bool = False
    purpose: str | None = None
    instead: str = "train"


class Data(StrEnum):
    """The names of the draws that all methods have. Random draws are keyed by them: a name must never change."""

    INNER = "inner"
    OUTER = "outer"
    HESSIAN = "hessian"
    PERSONAL = "personal"
    VALUE_TRAIN = "value train"
    """What the objective's inner value is measured on."""
    VALUE_OUTER = "value outer"
    """What its outer value is measured on."""
    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    OUTER_OF_VALIDATION = "outer of validation"
    """The outer data, or the validation data where there are none."""
    OUTER_OF_TEST = "outer of test"


# The batches of each draw by its name; a split that a client lacks gives an empty sequence.
Batches = Mapping[str, Sequence[Batch]]


class Outcome(NamedTuple):
    """The result of a client step: the reply travels, everything else stays with the client.

    A state of None leaves it unchanged. ``watched`` holds one number per local step (``loss`` and ``weight``); if one is
    not finite, training has diverged. ``scratch`` is what the client's next step in the same round gets in place of its
    state.
    """

    reply: dict[str, Tree]
    state: Tree = None
    watched: Mapping[str, Tensor] = {}
    scratch: Tree = None


MODEL, NUMBER, NUMBERS = "model", "number", "numbers"


@dataclass(frozen=True)
class Step:
    """A client step and the data it draws. Steps of the same ``noise`` see the same dropout in a round.

    ``sends`` says what a reply must consist of, ``MODEL``, ``NUMBER`` or a dict of ``NUMBERS``, by the part's name.
    """

    run: Callable[[Learner, dict[str, Tree], Tree, Batches], Outcome]
    draws: Mapping[str, Draw] = field(default_factory=dict)
    noise: str | None = None
    sends: Mapping[str, str] = field(default_factory=dict)

    @property
    def elementwise(self) -> bool:
        """Whether its method says that an engine may run it for many clients at once (``Algorithm.elementwise``)."""
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
    """Numbers by name, of replies (by their place) that name the same ones: one row a reply."""

    names: tuple[str, ...]
    places: NDArray[np.int64]
    values: NDArray[np.float64]


class Replies(ABC):
    """The replies of the clients that were asked, in the order of ``clients`` (positions in the client list)."""

    clients: Sequence[int]

    @abstractmethod
    def numbers(self, name: str) -> Tensor:
        """One number a client, as a float64 vector."""

    @abstractmethod
    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        """The sum over clients of ``weights[i]`` times that part of the reply; integers take their maximum."""

    @abstractmethod
    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        """``||x_i - origin||^2`` of the part of every reply at this path, as a float64 vector."""

    @abstractmethod
    def each(self, name: str) -> Iterator[Tree]:
        """That part of every reply, one by one."""

    def scores(self, name: str) -> list[Scores]:
        """That part of every reply where it is a dict of numbers; replies that name the same ones are together."""
        groups: dict[tuple[str, ...], tuple[list[int], list[list[float]]]] = {}
        for place, reply in enumerate(self.each(name)):
            places, values = groups.setdefault(tuple(reply), ([], []))
            places.append(place)
            values.append([float(score) for score in reply.values()])
        return [Scores(names, np.array(places), np.array(values)) for names, (places, values) in groups.items()]

    @abstractmethod
    def faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        """The clients whose reply this function finds fault with, and what it says."""

    @abstractmethod
    def without(self, clients: Collection[int]) -> Replies:
        """The same replies but for those of these clients."""

    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes the replies hold in all."""


class Engine(ABC):
    """Where the clients are: runs a named step on a set of them and returns their replies.

    Replies may be fewer than were asked: whoever does not answer in time is left out, and the screen decides whether
    those that came are enough. A client whose training diverges raises ``Diverged``, the first in the order of the
    clients where there are several, and an engine with many processes raises it in all of them.
    """

    names: Sequence[str]
    sizes: NDArray[np.int64]
    leads: bool = True
    """Whether this process is the one that writes: all others run the same loop and write nothing."""
    lags: bool = False
    """Whether the answers to ``later`` come with those of the next step, so that a round is one message and not two."""

    @abstractmethod
    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        """Ask these clients (positions in ``names``) to do a step with this message.

        A client that is named twice does the step once, and its reply counts twice.
        """

    def later(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Callable[[], Replies]:
        """Ask as ``run`` does, for replies that are wanted later; the step must not change what clients keep."""
        replies = self.run(step, clients, message, round)
        return lambda: replies

    @abstractmethod
    def states(self) -> dict[int, Tree]:
        """What each client keeps after the last round that was settled, for those that have changed it.

        A round that is under way, or has failed, does not show in it.
        """

    @abstractmethod
    def settle(self) -> None:
        """The round has ended well: what clients keep now is what ``states`` gives from here on."""

    def kept(self) -> Callable[[], dict[int, Tree]]:
        """A function that gives the ``states`` of now; of an engine that lags, after the next round as well."""
        return self.states

    @abstractmethod
    def restore(self, states: Mapping[int, Tree]) -> None:
        """Put back what ``states`` gave."""

    def share(self, make: Callable[[], T]) -> T:
        """What the process that writes makes of this, in all of them."""
        return make()

    def end(self, error: BaseException | None) -> None:  # noqa: B027 - one process has nobody to tell
        """The run has ended, well or with this error: the other processes hear of it."""
