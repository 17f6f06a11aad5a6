"""What a config's privacy will cost before it is run: the noise for an epsilon, and epsilon by round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from comfedl.config.schema import Config
from comfedl.core.accounting import Accountant, noise_for
from comfedl.core.privacy import DP, Sums
from comfedl.engines import AT_SITES
from comfedl.training.arguments import make_learner
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

MARKS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


@dataclass(frozen=True)
class PrivacyPlan:
    """Epsilon by round of a config, with its noise or with that for the wanted epsilon."""

    privacy: DP
    clients: int
    participants: int
    rounds: int
    by_round: Mapping[int, float]
    parameters: int | None
    """Of the model; None if it is not known without the sites."""
    noise_norm: float | None
    """The expected norm of the noise in a round's update."""

    @property
    def share(self) -> float:
        """The share of the clients in a round."""
        return self.participants / self.clients

    def sampling(self) -> str:
        """How clients are sampled, in words."""
        if self.participants >= self.clients:
            return f"all {self.clients:,} clients in every round"
        if self.privacy.sampling == "poisson":
            return f"every one of {self.clients:,} clients with probability {self.share:.4g} (Poisson)"
        return f"{self.participants:,} of {self.clients:,} clients per round, without replacement"


def make_plan(
    config: Config, epsilon: float | None = None, rounds: int | None = None, delta: float | None = None
) -> PrivacyPlan:
    """The plan of a config; with ``epsilon`` its noise is the least that keeps to it over all rounds."""
    rounds = config.rounds if rounds is None else rounds
    checks.at_least("--rounds", rounds, 1)
    privacy = _privacy(config, delta)
    clients, parameters, sums = _sizes(config)
    participants = min(config.clients_per_round or clients, clients)
    if epsilon is not None:
        checks.positive("--epsilon", epsilon)
        noise = noise_for(epsilon, privacy, clients, participants, rounds)
        privacy = replace(privacy, noise_multiplier=noise, clip=privacy.clip or 1.0)
    elif privacy.noise_multiplier == 0:
        raise ConfigError("The config has no noise_multiplier above 0 in [privacy]; give --epsilon to find one.")
    accountant = Accountant(privacy, clients, participants)
    by_round = {number: accountant.epsilon(number) or 0.0 for number in (*(m for m in MARKS if m < rounds), rounds)}
    norm = None
    if parameters is not None and sums is not None:
        sides = sums.sides + (privacy.quantile is not None)
        deviation = privacy.update_multiplier(sides) * (privacy.clip or 1.0) * sums.most / participants
        norm = deviation * math.sqrt(parameters)
    return PrivacyPlan(privacy, clients, participants, rounds, by_round, parameters, norm)


def _privacy(config: Config, delta: float | None) -> DP:
    given = config.make_privacy()
    if given is None and delta is None:
        raise ConfigError("The config has no [privacy], so delta is not known; give --delta, such as 1e-5.")
    if given is None:
        assert delta is not None
        return DP(None, 0.0, delta)
    return given if delta is None else replace(given, delta=delta)


def _sizes(config: Config) -> tuple[int, int | None, Sums | None]:
    """The number of clients and of parameters, and what the method releases."""
    if config.engine == AT_SITES:
        sites = None if config.flower is None else config.flower.sites
        if sites is None:
            raise ConfigError("The number of clients is not known before the sites connect; give flower.sites.")
        return sites if isinstance(sites, int) else len(sites), None, None
    fed = config.make_data()
    algorithm = config.make_algorithm()
    model, loss, metrics = config.make_model(fed), config.make_loss(), config.make_metrics()
    _, initial, _ = make_learner(model, loss, algorithm, metrics, config.task)
    parameters = sum(part.numel() for part in initial["params"].values())
    sampled = (config.clients_per_round or len(fed)) < len(fed)
    return len(fed), parameters, algorithm.releases(initial, sampled)
