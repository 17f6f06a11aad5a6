"""Differential privacy of clients: what is asked for, and the noise of each release that it takes.

The unit is a client: two federations are neighbours if one of them has nothing in the place of a client of the other,
so that it adds zero to every sum ("zero-out"). The number of clients is public. docs/privacy.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

SAMPLINGS = ("fixed", "poisson")
ACCOUNTANTS = ("pld", "rdp")
NOT_COVERED = (
    "the records (metrics, losses, sample counts, who took part), checkpoints, personal models, how the data were "
    "prepared, and the choice of hyper-parameters"
)
"""What no epsilon of a run is about; said beside each."""
ABOUT_EPSILON = (
    f"Epsilon is of one run's global models, per client; several runs on the same clients add up. Not covered: "
    f"{NOT_COVERED}."
)


def spent_text(row: Mapping[str, object]) -> str:
    """The epsilon of a row of the records, with its delta.

    >>> spent_text({"epsilon": 3.14159, "delta": 1e-5})
    '3.14 (delta 1e-05)'
    """
    return f"{row['epsilon']:.3g} (delta {row['delta']:g})"


class Sums(NamedTuple):
    """What a method's round releases: the sum of the updates, and ``sides`` further sums of numbers."""

    sides: int = 0
    most: float = 1.0
    """The largest weight of a client, as a multiple of uniform."""


@dataclass(frozen=True)
class DP:
    """Client-level differential privacy of the global model, after every round.

    Each participant's update is clipped to the norm ``clip``. The sum is divided by a fixed number (that of the
    participants who are asked for), whoever answers, and gets Gaussian noise of standard deviation
    ``noise_multiplier`` times the most that one client can add.

    Args:
        clip: the largest norm of a client's update; with ``quantile`` the one to start from.
        noise_multiplier: the noise of a round, in units of one client's largest contribution. Epsilon depends on this,
            the share of clients per round and the number of rounds; ``comfedl privacy`` computes it from an epsilon.
        delta: the probability with which epsilon need not hold; well below 1 over the number of clients.
        sampling: "fixed" draws ``clients_per_round`` clients without replacement. "poisson" takes part of every client
            with probability clients_per_round / clients, so that their number varies. Its epsilon is much smaller.
        accountant: "pld", the tightest that is known: exact for all clients in every round, the privacy loss
            distribution for Poisson sampling (Renyi differential privacy where there is none: for a fixed number); or
            "rdp", Renyi differential privacy for all.
        quantile: adapt the clip to this quantile of the updates' norms, such as 0.5 (Andrew et al., 2021).
        clip_lr: how fast it adapts.
        side_share: the part of a round's privacy for each further release that a round needs: the count for
            ``quantile``, and the sum of the weights of robust methods. The update's noise grows to make room for it, so
            that epsilon does not depend on it.
        noise_seed: makes the noise repeatable for a test. Whoever knows it can remove the noise.
    """

    clip: float | None
    noise_multiplier: float
    delta: float
    sampling: str = "fixed"
    accountant: str = "pld"
    quantile: float | None = None
    clip_lr: float = 0.2
    side_share: float = 0.0625
    noise_seed: int | None = None

    name: ClassVar[str] = "dp"

    def __post_init__(self) -> None:
        checks.not_below("noise_multiplier", self.noise_multiplier, 0)
        checks.inside("delta", self.delta, 0, 1)
        checks.one_of("sampling", self.sampling, SAMPLINGS)
        checks.one_of("accountant", self.accountant, ACCOUNTANTS)
        checks.positive("clip_lr", self.clip_lr)
        checks.inside("side_share", self.side_share, 0, 0.5)
        if self.noise_seed is not None:
            checks.at_least("noise_seed", self.noise_seed, 0)
        if self.quantile is not None:
            checks.inside("quantile", self.quantile, 0, 1)
        if self.clip is not None:
            checks.positive("clip", self.clip)
        elif self.noise_multiplier > 0 or self.quantile is not None:
            raise ConfigError(
                "privacy has no clip, but noise hides only what is bounded; give clip, the largest norm of a client's "
                "update, or noise_multiplier = 0 for a run without privacy."
            )

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing: no clip, no noise, and the usual sampling."""
        return self.clip is None and self.sampling == "fixed"

    def update_multiplier(self, sides: int) -> float:
        """The noise multiplier of the update, with this many side releases in the same round.

        Gaussian releases with multipliers z_k are together worth one with ``z^-2 = sum_k z_k^-2``.
        """
        return self.noise_multiplier / math.sqrt(1 - sides * self.side_share)

    @property
    def side_multiplier(self) -> float:
        """The noise multiplier of each side release."""
        return self.noise_multiplier / math.sqrt(self.side_share)


@dataclass(frozen=True)
class Spent:
    """The privacy that a run has used: (epsilon, delta) of the global model after ``rounds`` rounds.

    ``epsilon`` is None without noise: there is no guarantee.
    """

    epsilon: float | None
    delta: float
    rounds: int
    known_noise: bool = False
    chosen: bool = False
    """Whether early stopping chose the round, by metrics that are not private."""

    @property
    def not_covered(self) -> str:
        return NOT_COVERED + (", and the choice of the round by early stopping" if self.chosen else "")

    def __str__(self) -> str:
        if self.epsilon is None:
            return "No differential privacy: noise_multiplier is 0."
        known = "The noise follows from noise_seed, so this holds only for those who do not know it."
        return (
            f"Epsilon {self.epsilon:.3g} at delta {self.delta:g} per client, for the global models of "
            f"{self.rounds} rounds. Not covered: {self.not_covered}." + (f" {known}" if self.known_noise else "")
        )

    def summary(self) -> dict[str, float | int | str | None]:
        """For summary.json."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "rounds": self.rounds,
            "not_covered": self.not_covered,
        }
