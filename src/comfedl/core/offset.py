"""What is added to a client's loss before the robust weights are computed; the public module ``cf.offset``.

The weights and the objective are then those of ``f_i + o_i`` in place of ``f_i``; training itself does not change. An
offset differs from client to client: what all have in common leaves the weights as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError


class Offset(ABC):
    """An offset o_i of each client, from what the server knows."""

    name: ClassVar[str] = "own"
    """Its name in a config."""

    @abstractmethod
    def of(self, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]) -> Tensor:
        """The offsets of these clients, as a float64 vector.

        Args:
            clients: positions in ``names``.
            names: all clients' names.
            sizes: all clients' numbers of train samples.
        """

    def check_names(self, names: Sequence[str]) -> None:  # noqa: B027 - most offsets do not depend on names
        """Raise ConfigError if the offset is not for these clients."""


@dataclass(frozen=True)
class Generalisation(Offset):
    """C / sqrt(n_i), n_i the client's number of train samples: small clients get more weight.

    It is group DRO's generalisation adjustment (Sagawa et al., ICLR 2020). A model fits a small client's train data
    better than that client's other data, by an amount of this order, so its train loss understates what it needs.
    c is in units of the loss times the square root of a number of samples; c = 0 is no offset.

    >>> Generalisation(2.0).of([0, 1], ["a", "b"], np.array([4, 100]))
    tensor([1.0000, 0.2000], dtype=torch.float64)
    """

    name: ClassVar[str] = "generalisation"

    c: float

    def __post_init__(self) -> None:
        checks.not_below("c", self.c, 0)

    def of(self, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]) -> Tensor:
        return float(self.c) / torch.from_numpy(sizes[np.asarray(clients, dtype=np.int64)]).double().sqrt()


@dataclass(frozen=True)
class Excess(Offset):
    """-b_i, so that the weights follow the excess loss f_i - b_i, the client's regret.

    With b_i about the best loss that the client can have, a client whose task is simply hard does not take the weight.

    ``baseline`` gives every client's b_i by its name. Without it each client estimates its own when it first takes
    part: it trains the model that it received on its own data for ``steps`` further steps, with the method's batch size
    and learning rate (or ``lr``), measures the loss as the method does for its weights, and sends this number, once.
    The model goes down to it once more for that. The estimates stay on the server, and in its checkpoints. With too few
    steps b_i is too high for clients that could still learn, and one with a hard task keeps more weight than it should.
    """

    name: ClassVar[str] = "excess"

    baseline: Mapping[str, float] | None = field(default=None, hash=False)
    steps: int = 50
    lr: float | None = None

    def __post_init__(self) -> None:
        checks.at_least("steps", self.steps, 1)
        if self.lr is not None:
            checks.positive("Excess's lr", self.lr)
        if self.baseline is None:
            return
        if not isinstance(self.baseline, Mapping) or not self.baseline:
            raise ConfigError(
                f"baseline is {self.baseline!r}, but it must be a loss for every client, such as "
                '{"a": 0.3, "b": 0.1}, or None to estimate them.'
            )
        for client, value in self.baseline.items():
            checks.finite(f"The baseline of client {client!r}", value)
        object.__setattr__(self, "baseline", {client: float(value) for client, value in self.baseline.items()})

    @property
    def estimated(self) -> bool:
        """Whether the clients estimate their baselines."""
        return self.baseline is None

    def of(self, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]) -> Tensor:
        assert self.baseline is not None
        return torch.tensor([-self.baseline[names[i]] for i in clients], dtype=torch.float64)

    def check_names(self, names: Sequence[str]) -> None:
        if self.baseline is None:
            return
        known = set(names)
        for client in self.baseline:
            if client not in known:
                raise ConfigError(
                    f"The baseline of Excess names {client!r}, which is not one of the {len(names)} clients; "
                    "correct the name, or leave it out."
                )
        missing = [name for name in names if name not in self.baseline]
        if missing:
            raise ConfigError(
                f"The baseline of Excess lacks client {missing[0]!r}; give a number for every client, or leave "
                "baseline out to have them estimated."
            )


@dataclass(frozen=True)
class Shrinkage(Offset):
    """For tiny clients: each loss is drawn towards the mean by the share of its variance that is sampling noise.

    The loss of a client with n_i samples is a mean of n_i numbers, so it differs from that of the client's whole
    distribution by noise of variance s^2 / n_i. Where clients are tiny, weights that follow it follow noise. In a
    one-way random-effects model the best estimate of the client's expected loss is ``m + B_i (f_i - m)``, with
    ``B_i = t^2 / (t^2 + s^2 / n_i)`` and t^2 the variance between clients (empirical Bayes, James-Stein). s^2 is the
    pooled variance of the losses of single samples within clients; t^2 is DerSimonian and Laird's estimate from the
    round's participants; m is the mean of the losses, each with the weight 1 / (t^2 + s^2 / n_i). For large clients B_i
    is 1, and nothing changes. If the losses differ by no more than their noise, all weights are equal.

    Each client sends one number more, the mean of its squared losses. Losses are measured in every round, so ``memory``
    does not apply. The objective is recorded without it.
    """

    name: ClassVar[str] = "shrinkage"

    def of(self, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]) -> Tensor:
        return torch.zeros(len(clients), dtype=torch.float64)

    def towards_mean(self, losses: Tensor, squares: Tensor, sizes: NDArray[np.int64]) -> Tensor:
        """What is added to these clients' losses, each a mean of so many samples' losses; also given, of the squares.

        >>> found = Shrinkage().towards_mean(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 10.0]), np.array([2, 2]))
        >>> found.tolist()  # samples' losses of 0 and 2, and of 2 and 4: half of the losses' variance is noise
        [0.5, -0.5]
        """
        y, n = losses.double(), torch.from_numpy(sizes).double()
        within = ((squares.double() - y.square()).clamp(min=0) * n).sum()
        freedom = (n - 1).sum()
        if len(y) < 2 or not freedom > 0 or not within > 0:
            return torch.zeros_like(y)
        noise = within / freedom / n
        precision = 1 / noise
        total = precision.sum()
        spread = (precision * (y - (precision * y).sum() / total).square()).sum()
        between = ((spread - (len(y) - 1)) / (total - precision.square().sum() / total)).clamp(min=0)
        share = between / (between + noise)
        weights = 1 / (between + noise)
        centre = (weights * y).sum() / weights.sum()
        return (1 - share) * (centre - y)


OFFSETS: dict[str, type[Offset]] = {kind.name: kind for kind in (Generalisation, Excess, Shrinkage)}
"""The offsets, by their names in a config."""
