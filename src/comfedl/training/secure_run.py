"""What a run under secure aggregation may ask for, and the engine that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.summed import Summed
from comfedl.core.protocol import Engine
from comfedl.engines.faults import LeaveEarly
from comfedl.engines.sums import Codec
from comfedl.secure.settings import FEWEST, SecureAggregation
from comfedl.utils.errors import ConfigError

if TYPE_CHECKING:
    from comfedl.training.options import RunOptions

UNKNOWN = ("worst", "worst10", "std")  # statistics over clients that sums do not give


def check_secure(options: RunOptions) -> None:
    """Check the options of a run that depend on secure aggregation."""
    secure, stop = options.secure, options.stop
    if secure is None:
        if any(isinstance(fault, LeaveEarly) for fault in options.faults):
            raise ConfigError(
                f'The fault "{LeaveEarly.name}" is of clients that leave before masks are removed, and there are none '
                'without secure aggregation; add it, or use "dropout" or "straggler".'
            )
        return
    if not isinstance(secure, SecureAggregation):
        raise ConfigError(f"secure is {secure!r}, but it must be None or like cf.SecureAggregation(threshold=0.7).")
    if options.engine == "distributed":
        raise ConfigError(
            'engine is "distributed", whose processes show each other every update, but secure aggregation is asked '
            'for; use engine = "embedded" or sites over Flower, or leave it out.'
        )
    if options.privacy is not None:
        raise ConfigError(
            "Secure aggregation and differential privacy are both asked for, but the noise of one has not been fitted "
            "to the sums of the other; leave one of them out."
        )
    if options.eval_clients is not None:
        secure.check_sites(options.eval_clients)
    if stop is not None and stop.metric.rpartition(".")[2] in UNKNOWN:
        raise ConfigError(
            f"stop.metric is {stop.metric!r}, but under secure aggregation only means over the clients are known; use "
            f'"{stop.metric.rpartition(".")[0]}.mean" or "objective".'
        )


def check_left_out(options: RunOptions, method: Algorithm, sites: int) -> None:
    """Raise if a round leaves out so few sites that its sums and those over all sites give away their losses."""
    assert isinstance(method, Summed)
    for name in ("clients_per_round", "eval_clients"):
        value = getattr(options, name)
        if method.weight.follows_losses and value is not None and 0 < sites - value < FEWEST:
            raise ConfigError(
                f"{name} is {value} of {sites} sites, but the weights follow losses, so that sums at the same model "
                f"over all sites and over all but {sites - value} give away the losses of those left out; give {sites} "
                f"or at most {sites - FEWEST}."
            )


def secured(
    engine: Engine,
    secure: SecureAggregation,
    method: Algorithm,
    metrics: Sequence[str],
    participants: int | None,
) -> Engine:
    """The engine with sums for replies."""
    from comfedl.engines.secured import Secured  # needs the package cryptography

    secure.check_sites(participants or len(engine.names))
    return Secured(engine, codec_of(secure, method, metrics, len(engine.names)))


def codec_of(secure: SecureAggregation, method: Algorithm, metrics: Sequence[str], sites: int) -> Codec:
    """How the sites of a run write what is summed."""
    assert isinstance(method, Summed)
    return Codec(secure, method.weight, method.steps(), metrics, method.method.clip_update_norm, sites)


def check_at_sites(secure: SecureAggregation, participants: int) -> None:
    """Check what only matters where the sites are real ones."""
    secure.check_sites(participants)
    if not secure.masks:
        raise ConfigError(
            "secure_aggregation.masks is false, which is for comparisons in a simulation, but the sites are real; "
            "leave it out."
        )
