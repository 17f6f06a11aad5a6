"""Epsilon of a number of rounds, by Google's dp-accounting.

Every round is one Gaussian mechanism (see ``privacy.py``). How often a client takes part decides the rest:

- All clients in every round: T rounds are exactly one Gaussian mechanism with multiplier z / sqrt(T).
- Poisson sampling: the privacy loss distribution of the Poisson-subsampled Gaussian, which is exactly what a round is
  between neighbours by zero-out.
- A fixed number without replacement: Theorem 27 of Wang, Balle and Kasiviswanathan (2019), which holds for replacing a
  client. That moves a sum by up to twice the clip, so it is used with z / 2. A replacement by nothing is one by a
  client that adds zero, so the bound holds for zero-out as well. So does the bound of all clients in every round, since
  the sample does not depend on the data; the smaller of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from comfedl.core.privacy import DP
from comfedl.utils.errors import ConfigError

GRID = 1e-3  # of the privacy losses; each is rounded so that epsilon is not understated
ORDERS = (*range(2, 65), *range(72, 129, 8), 160, 192, 256)  # of Renyi differential privacy
LEAST_FOR_PLD = 0.3  # below this noise multiplier the distribution is too wide for memory, and epsilon useless
MOST_NOISE = 1e6


def dp_accounting() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import dp_accounting as found
    except ImportError:
        raise ConfigError(
            "privacy is given, but epsilon needs the package dp-accounting; install it with "
            "pip install 'comfedl[privacy]'."
        ) from None
    return found


class Accountant:
    """Epsilon by the number of rounds, for ``participants`` of ``clients`` per round."""

    def __init__(self, privacy: DP, clients: int, participants: int) -> None:
        self.privacy, self.clients, self.participants = privacy, clients, min(participants, clients)
        self._found: dict[int, float] = {0: 0.0}

    @property
    def share(self) -> float:
        """The share of the clients that take part in a round."""
        return self.participants / self.clients

    def epsilon(self, rounds: int) -> float | None:
        """Epsilon after this many rounds; None without noise."""
        if self.privacy.noise_multiplier == 0:
            return None
        if rounds not in self._found:
            self._found[rounds] = self._epsilon(rounds)
        return self._found[rounds]

    def _epsilon(self, rounds: int) -> float:
        noise, delta = self.privacy.noise_multiplier, self.privacy.delta
        if self.participants == self.clients:
            return self._of_all(rounds)
        if self.privacy.sampling == "fixed":
            return min(self._by_orders(self._fixed_orders, rounds), self._of_all(rounds))
        by_orders = self._by_orders(self._poisson_orders, rounds)
        if self.privacy.accountant == "rdp" or noise < LEAST_FOR_PLD:
            return by_orders
        return min(by_orders, float(self._distribution.self_compose(rounds).get_epsilon_for_delta(delta)))

    def _of_all(self, rounds: int) -> float:
        noise, delta = self.privacy.noise_multiplier / math.sqrt(rounds), self.privacy.delta
        if self.privacy.accountant == "rdp":
            return self._by_orders([order / 2 / self.privacy.noise_multiplier**2 for order in ORDERS], rounds)
        return float(dp_accounting().get_epsilon_gaussian(noise, delta))

    def _by_orders(self, each: Any, rounds: int) -> float:
        from dp_accounting.rdp import compute_epsilon

        return float(compute_epsilon(ORDERS, [rounds * value for value in each], self.privacy.delta)[0])

    @cached_property
    def _poisson_orders(self) -> Any:
        """The Renyi divergence of one round, by order."""
        package = dp_accounting()
        event = package.PoissonSampledDpEvent(self.share, package.GaussianDpEvent(self.privacy.noise_multiplier))
        return _orders(event, package.NeighboringRelation.ADD_OR_REMOVE_ONE)

    @cached_property
    def _fixed_orders(self) -> Any:
        package = dp_accounting()
        inner = package.GaussianDpEvent(self.privacy.noise_multiplier / 2)
        event = package.SampledWithoutReplacementDpEvent(self.clients, self.participants, inner)
        return _orders(event, package.NeighboringRelation.REPLACE_ONE)

    @cached_property
    def _distribution(self) -> Any:
        """The privacy loss distribution of one round, for both directions: a client more and a client less."""
        dp_accounting()
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_gaussian_mechanism(
            self.privacy.noise_multiplier, value_discretization_interval=GRID, sampling_prob=self.share
        )


def _orders(event: Any, relation: Any) -> list[float]:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS, relation)
    accountant.compose(event)
    return [float(value) for value in accountant._rdp]


def noise_for(epsilon: float, privacy: DP, clients: int, participants: int, rounds: int) -> float:
    """The smallest noise multiplier, to a relative 1e-3 and rounded up, with at most this epsilon."""

    @lru_cache
    def spent(noise: float) -> float:
        trial = replace(privacy, noise_multiplier=noise, clip=privacy.clip or 1.0)
        return Accountant(trial, clients, participants).epsilon(rounds) or math.inf

    low, high = 0.0, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ConfigError(
                f"epsilon is {epsilon:g}, but even a noise multiplier of {MOST_NOISE:g} gives {spent(low):.3g} at "
                f"delta {privacy.delta:g}; give a larger epsilon or delta."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    digits = 10.0 ** (math.floor(math.log10(high)) - 3)
    return round(math.ceil(high / digits) * digits, 9)
