"""What a method says about secure aggregation, where its server learns sums alone (``algorithms.summed``)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

from comfedl.core.optim import ClientOptimizer
from comfedl.core.sums import SiteWeight
from comfedl.utils.errors import ConfigError

SUMMABLE = ("fedavg", "fedprox", "ditto", "fedmaml", "term", "robust", "comfedl-damaml", "comfedl with KL(gamma)")


class Summable:
    """The part of an algorithm that says how it runs when only sums are known."""

    name: ClassVar[str]
    aggregate: str
    defence: str | None

    @property
    @abstractmethod
    def local_optimizer(self) -> ClientOptimizer:
        """The optimiser of local training."""

    def site_weight(self) -> SiteWeight:
        """The weight that a site gives itself.

        Raises:
            ConfigError: the method's server needs each client's reply.
        """
        raise self.needs_each("its server needs each client's own loss or update")

    def for_sums(self) -> Self:
        """The method as it runs then."""
        return self

    def needs_each(self, why: str) -> ConfigError:
        """The error for a setting that needs each client's reply."""
        return ConfigError(
            f"{self.name} cannot run like this under secure aggregation, which gives the server sums alone: {why}; "
            f"change that, use one of {', '.join(SUMMABLE)}, or leave secure aggregation out."
        )

    def check_sums(self) -> None:
        """Raise unless sums are enough for the method's server."""
        if self.defence is not None:
            raise self.needs_each(f'defence = "{self.defence}" compares the clients\' updates')
        if self.aggregate != "mean":
            raise self.needs_each(f'aggregate = "{self.aggregate}" compares the clients\' updates')
        weight, kinds = self.site_weight(), type(self).__mro__
        server = ("round", "advance", "averaged")
        for kind in kinds[: next(k for k, kind in enumerate(kinds) if "site_weight" in kind.__dict__)]:
            if own := [name for name in server if name in kind.__dict__]:
                raise self.needs_each(f"{kind.__name__}.{own[0]} is the method's own, and may need each client's reply")
        if weight.follows_losses and self.local_optimizer.keep_state:
            raise self.needs_each("keep_state is true, but a round may train twice until the weights can be summed")
