"""Rounds of sums: a site weighs its own update, and the server learns sums over the sites alone.

A weight may depend on what the site knows (its loss, its number of samples) and on one public number, the reference.
The mean update is then ``sum_i u_i (w_i - w) / sum_i u_i``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Never

from torch import Tensor

from comfedl.core.protocol import Replies
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

REFERENCE = "reference"  # the message's part with the public number
WHOLE = "whole"  # the part of a message that says that no site may be missing from the sum
WIDEST = 2.0**16  # the largest weight where the method has no limit: the reference of the round before keeps it near 1


class SiteWeight(ABC):
    """The weight u of a site, which the site computes itself."""

    bound: float = 1.0
    """The largest weight."""
    follows_losses: ClassVar[bool] = False
    """Whether the reference is a normaliser of exponentials, which follows the losses."""

    @abstractmethod
    def of(self, loss: float, samples: int, reference: float) -> float:
        """The weight of a site with this loss and number of samples."""

    def part(self, value: float, samples: int, reference: float) -> float:
        """What a site adds to the sum that gives the objective."""
        return value

    def objective(self, part: float, weight: float, reference: float, sites: int) -> float | None:
        """The objective, from the mean part and weight of these sites; None if it cannot be told from them."""
        return part


@dataclass(frozen=True)
class Uniform(SiteWeight):
    """Every site counts the same."""

    def of(self, loss: float, samples: int, reference: float) -> float:
        return 1.0


@dataclass(frozen=True)
class BySamples(SiteWeight):
    """In proportion to the number of samples; the reference is the largest number, so that no weight is above 1."""

    def of(self, loss: float, samples: int, reference: float) -> float:
        return min(samples / reference, 1.0)

    def part(self, value: float, samples: int, reference: float) -> float:
        return self.of(value, samples, reference) * value

    def objective(self, part: float, weight: float, reference: float, sites: int) -> float:
        return part / weight


@dataclass(frozen=True)
class Exponential(SiteWeight):
    """``min(exp(loss / gamma - c), cap)``, in proportion to KL's weights whatever c is, unless the cap holds.

    The reference c is ``log mean_i exp(loss_i / gamma)`` of the round before, so that the mean weight is about 1 and
    ``cap`` is, as elsewhere, a multiple of uniform. Where c is not known yet (NaN), the weight is 1.
    """

    gamma: float
    cap: float | None = None

    follows_losses: ClassVar[bool] = True

    @property
    def bound(self) -> float:  # type: ignore[override]
        return WIDEST if self.cap is None else self.cap

    def of(self, loss: float, samples: int, reference: float) -> float:
        return 1.0 if math.isnan(reference) else self._exponential(loss, reference, self.bound)

    def part(self, value: float, samples: int, reference: float) -> float:
        return value if math.isnan(reference) else self._exponential(value, reference, WIDEST)

    def objective(self, part: float, weight: float, reference: float, sites: int) -> float | None:
        """KL's, without the cap."""
        if math.isnan(reference):
            return part
        # With a larger mean, some site's part may have been cut.
        return self.gamma * (reference + math.log(part)) if 0 < part < WIDEST / sites else None

    def _exponential(self, loss: float, reference: float, bound: float) -> float:
        exponent = loss / self.gamma - reference
        return bound if exponent >= math.log(bound) else math.exp(exponent)


@dataclass(frozen=True, kw_only=True)
class SummedReplies(Replies):
    """What is known of the replies of a step: how many there are, and sums over them.

    Attributes:
        clients: the sites whose replies are in the sums.
        weight: the sum of the weights.
        bounded: how many weights were at their bound.
        clipped: how many numbers of updates were cut to the clip.
        finest: the smallest mean weight that rounding leaves exact enough.
        model: the message's model plus the weighted mean of the updates; None if no weight is left, or none was sent.
        value: the mean of the sites' values.
        objective: the objective's value; None if it is out of the range of the numbers.
        scores: of every score, how many sites have it, and the sum of theirs.
        sent: the bytes that the sites sent.
    """

    clients: Sequence[int]
    weight: float
    bounded: int = 0
    clipped: int = 0
    finest: float = 0.0
    model: Tree = None
    value: float = 0.0
    objective: float | None = None
    scores_by_name: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    sent: int = 0

    @property
    def mean_weight(self) -> float:
        return self.weight / len(self.clients)

    def columns(self) -> dict[str, float | int | str | None]:
        """The means of all scores, keyed like ``"validation.accuracy.mean"``, and how many sites have one if not all.

        The worst site, the spread and each site's weight are not known.
        """
        found: dict[str, float | int | str | None] = {}
        for name, (count, total) in self.scores_by_name.items():
            found[f"{name}.mean"] = total / count
        for name, (count, _) in self.scores_by_name.items():
            whole = self.scores_by_name.get(f"{name.rpartition('.')[0]}.loss", (count, 0.0))[0]
            if count < whole:
                found[f"{name}.clients"] = count
        return found

    def nbytes(self) -> int:
        return self.sent

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        return {}  # nobody sees a reply; sites send nothing that is not finite, and nothing beyond the bounds

    def numbers(self, name: str) -> Tensor:
        self._refuse()

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        self._refuse()

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        self._refuse()

    def each(self, name: str) -> Iterator[Tree]:
        self._refuse()

    def altered(self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Collection[int]) -> Replies:
        self._refuse()

    def without(self, clients: Collection[int]) -> Replies:
        self._refuse()

    def _refuse(self) -> Never:
        raise ConfigError(
            "This needs the reply of each site, but under secure aggregation the server has sums alone; use a method "
            "that needs no more (docs/secure-aggregation.md), or leave secure aggregation out."
        )
