"""The options of a run: everything but its model, data and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.summed import Summed
from comfedl.core.privacy import DP
from comfedl.engines import AT_SITES, ENGINES
from comfedl.engines.faults import Fault
from comfedl.secure.settings import SecureAggregation
from comfedl.training.callbacks import Callback
from comfedl.training.secure_run import check_secure
from comfedl.training.stopping import EarlyStopping
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import describe

AUTO = "auto"
SAVES = ("save_personal", "save_frozen")
"""The options that say what a run's folder holds; recorded if they are false."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run; see ``fit``.

    Those in ``RECORDED`` define the run and are written to its config; the others say where and how to report it.
    """

    rounds: int = 200
    seed: int = 0
    clients_per_round: int | None = None
    eval_every: int | str = "auto"
    eval_clients: int | None = None
    checkpoint_every: int | None = None
    quorum: float = 0.5
    save_personal: bool = True
    save_frozen: bool = True
    outer_share: float = 0.2
    engine: str = "embedded"
    out: str | Path | None = None
    resume: bool = False
    force: bool = False
    progress: bool = False
    callbacks: Sequence[Callback] = ()
    stop: EarlyStopping | None = None
    metrics: Sequence[str] = ()  # the names of those that were asked for
    faults: tuple[Fault, ...] = ()
    privacy: DP | None = None
    secure: SecureAggregation | None = None
    gap: int = 1  # the rounds between evaluations if eval_every is "auto"; see ``evaluation_gap``

    def __post_init__(self) -> None:
        checks.at_least("rounds", self.rounds, 1)
        checks.at_least("seed", self.seed, 0, 2**63 - 1)
        if self.eval_every != AUTO:
            if isinstance(self.eval_every, str):
                raise ConfigError(f'eval_every is {self.eval_every!r}, but it must be a number of rounds or "auto".')
            checks.at_least("eval_every", self.eval_every, 1)
            object.__setattr__(self, "eval_every", int(self.eval_every))  # a NumPy integer
        checks.not_below("quorum", self.quorum, 0)
        checks.at_most("quorum", self.quorum, 1)
        checks.inside("outer_share", self.outer_share, 0, 1)
        checks.one_of("engine", self.engine, [*ENGINES, AT_SITES])
        for name in ("clients_per_round", "eval_clients", "checkpoint_every"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1)
        for name in SAVES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but it must be true or false.")
        if self.stop is not None and not isinstance(self.stop, EarlyStopping):
            raise ConfigError(
                f"stop is {self.stop!r}, but it must be None or an EarlyStopping, such as "
                'EarlyStopping("validation.accuracy.worst", patience=20).'
            )
        if self.privacy is not None and not isinstance(self.privacy, DP):
            raise ConfigError(
                f"privacy is {self.privacy!r}, but it must be None or like "
                "DP(clip=1.0, noise_multiplier=1.0, delta=1e-5)."
            )
        check_secure(self)
        for name in ("rounds", "seed"):  # convert NumPy integers
            object.__setattr__(self, name, int(getattr(self, name)))

    def is_scheduled(self, number: int) -> bool:
        """Whether a round is evaluated, however long the run is.

        With "auto" these are the multiples of ``gap`` and, before the first of them, the powers of two.
        """
        if isinstance(self.eval_every, int):
            return number % self.eval_every == 0
        return number % self.gap == 0 or (number < self.gap and number & (number - 1) == 0)

    def is_evaluated(self, number: int) -> bool:
        """Whether a round is evaluated: the last one always is."""
        return number == self.rounds or self.is_scheduled(number)

    def check_clients(self, clients: int) -> None:
        """Check that there are enough clients for the options."""
        for name in ("clients_per_round", "eval_clients"):
            value = getattr(self, name)
            if value is not None and value > clients:
                raise ConfigError(
                    f"{name} is {value}, but there are only {clients} clients; give a number from 1 to {clients}, or "
                    "leave it out for all of them."
                )

    def as_run(self, algorithm: Algorithm) -> Algorithm:
        """The method as this run has it: as rounds of sums, under secure aggregation."""
        if self.secure is None:
            return algorithm
        return Summed.of(algorithm)

    def recorded(self, algorithm: Algorithm) -> dict[str, Any]:
        """The options that define a run of this method, as its config records them."""
        found = {name: getattr(self, name) for name in RECORDED}
        stop = None if self.stop is None else dict(vars(self.stop))
        found |= {"stop": stop} | {name: None if getattr(self, name) else False for name in SAVES}
        found |= {"faults": [describe(fault) for fault in self.faults] or None, "privacy": described(self.privacy)}
        found |= {"secure_aggregation": None if self.secure is None else dict(vars(self.secure))}
        return found | ({} if algorithm.weighs_on_outer else {"outer_share": None})


def described(privacy: DP | None) -> dict[str, Any] | None:
    """The table [privacy] of a config."""
    return None if privacy is None else {key: value for key, value in describe(privacy).items() if key != "name"}


NOT_RECORDED = (
    *("out", "resume", "force", "progress", "callbacks", "stop", "metrics", "faults", "privacy", "secure", "gap"),
)
RECORDED = tuple(field.name for field in fields(RunOptions) if field.name not in NOT_RECORDED)
"""The options that a config may set."""
