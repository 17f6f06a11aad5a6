"""Schedules of the learning rate by round; the public module ``cf.schedule``.

A schedule is a function of the round, counted from 1, that returns a factor of the method's ``lr``. It depends on
nothing else, so a resumed run goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    name: ClassVar[str] = "constant"

    def __call__(self, round: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Step:
    """Multiply the learning rate by ``factor`` after each ``every`` rounds.

    >>> [Step(every=2, factor=0.5)(round) for round in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int
    factor: float = 0.1

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        checks.at_least("every", self.every, 1)
        checks.positive("factor", self.factor)

    def __call__(self, round: int) -> float:
        return float(self.factor ** ((round - 1) // self.every))


@dataclass(frozen=True)
class Cosine:
    """From 1 in the first round along half a cosine to ``end``, which it reaches after ``rounds`` rounds and keeps.

    >>> [round(Cosine(rounds=4, end=0.2)(number), 3) for number in (1, 3, 5, 6)]
    [1.0, 0.6, 0.2, 0.2]
    """

    rounds: int
    end: float = 0.0

    name: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        checks.at_least("rounds", self.rounds, 1)
        checks.not_below("end", self.end, 0)

    def __call__(self, round: int) -> float:
        share = min(round - 1, self.rounds) / self.rounds
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Warmup:
    """Rise linearly to 1 in the first ``rounds`` rounds, then follow ``then``, which counts its rounds from there.

    >>> [Warmup(rounds=4, then=Step(every=1, factor=0.5))(round) for round in (1, 2, 4, 5, 6)]
    [0.25, 0.5, 1.0, 1.0, 0.5]
    """

    rounds: int
    then: Schedule | None = None

    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        checks.at_least("rounds", self.rounds, 1)
        if self.then is not None:
            check_schedule("then", self.then)

    def __call__(self, round: int) -> float:
        if round <= self.rounds:
            return round / self.rounds
        return 1.0 if self.then is None else self.then(round - self.rounds)


SCHEDULES: dict[str, type] = {kind.name: kind for kind in (Constant, Step, Cosine, Warmup)}


def check_schedule(key: str, schedule: object) -> None:
    """Check that this is a schedule."""
    if isinstance(schedule, type) or not callable(schedule):
        raise ConfigError(
            f"{key} is {schedule!r}, but it must be None, a schedule such as cf.schedule.Cosine(rounds=200), or a "
            "function of the round that returns a factor of lr."
        )


def factor(schedule: Schedule, round: int) -> float:
    """The factor of the learning rate in a round."""
    try:
        value = float(schedule(round))
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"lr_schedule raised an error at round {round} ({type(error).__name__}: {error}).") from error
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"lr_schedule is {value:g} at round {round}, but the learning rate must be a finite number above 0 in "
            "every round; train for fewer rounds, or end the schedule above 0."
        )
    return value
