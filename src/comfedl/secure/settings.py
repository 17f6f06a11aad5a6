"""The settings of secure aggregation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

FEWEST = 3  # sites in a sum: of two, each could subtract its own part


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The server learns sums over the sites, and nothing else of a site's update, loss or scores.

    Args:
        threshold: the share of a round's sites that must stay until the end of the round, always more than half of
            them and three or more. With 2/3, a third may drop out, and a server needs more than a third of the sites on
            its side to see another site's update.
        bits: 64 or 32 bits for each number of an update. 32 halves the traffic, and leaves less room for ``clip``.
        clip: the largest magnitude of a parameter's change in a round; larger ones are cut at the site, and counted.
        masks: False sends the same numbers without masks, to see what the masks cost; nothing is protected then.
    """

    threshold: float = 2 / 3
    bits: int = 64
    clip: float = 16.0
    masks: bool = True

    def __post_init__(self) -> None:
        checks.not_below("threshold", self.threshold, 0.5)
        checks.at_most("threshold", self.threshold, 1)
        if self.bits not in (32, 64) or isinstance(self.bits, bool):
            raise ConfigError(f"bits is {self.bits!r}, but it must be 32 or 64.")
        checks.positive("clip", self.clip)
        if not isinstance(self.masks, bool):
            raise ConfigError(f"masks is {self.masks!r}, but it must be true or false.")

    def needed(self, sites: int) -> int:
        """How many of these sites must stay: always more than half, and ``FEWEST``.

        >>> [SecureAggregation().needed(sites) for sites in (3, 4, 5, 9)]
        [3, 3, 4, 6]
        """
        return min(sites, max(FEWEST, math.ceil(self.threshold * sites - 1e-9), sites // 2 + 1))

    def check_sites(self, sites: int) -> None:
        """Raise if these are too few sites for a sum to hide one of them."""
        if sites < FEWEST:
            raise ConfigError(
                f"Secure aggregation needs {FEWEST} sites or more in a round, since of fewer the sum gives away what "
                f"each sent, but there are {sites}; add sites, raise clients_per_round, or leave it out."
            )
