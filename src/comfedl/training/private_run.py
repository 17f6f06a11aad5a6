"""Differential privacy of a run: what is checked before it starts, the mechanism of its rounds, and its account."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.private_release import PrivateRelease
from comfedl.core.accounting import Accountant, dp_accounting
from comfedl.core.learner import Model
from comfedl.core.privacy import DP, Spent
from comfedl.core.protocol import Engine
from comfedl.core.secret_noise import SecretNoise, key_of_seed, new_key
from comfedl.training.run_folder import RunFolder


def make_release(
    privacy: DP, algorithm: Algorithm, model: Model, engine: Engine, participants: int, folder: RunFolder | None
) -> tuple[PrivateRelease, Accountant]:
    """The mechanism of a run and its account; the key of the noise is the leader's, and kept in its folder.

    Raises:
        ConfigError: if the epsilon of the method is not known, or cannot be computed.
    """
    clients = len(engine.names)
    sides = algorithm.releases(model, participants < clients).sides + (privacy.quantile is not None)
    accountant = Accountant(privacy, clients, participants)
    if privacy.noise_multiplier > 0:
        dp_accounting()
        if privacy.delta >= 1 / clients:
            warnings.warn(
                f"delta is {privacy.delta:g}, but there are {clients} clients: releasing a client outright would be "
                f"within it; use a delta well below {1 / clients:.2g}.",
                stacklevel=3,
            )
    key = engine.broadcast(_key_maker(privacy, folder))
    return PrivateRelease(privacy, clients, participants, SecretNoise(key), sides), accountant


def _key_maker(privacy: DP, folder: RunFolder | None) -> Callable[[], bytes]:
    def make() -> bytes:
        if privacy.noise_seed is not None:
            return key_of_seed(privacy.noise_seed)
        kept = None if folder is None else folder.read_noise_key()
        key = new_key() if kept is None else kept
        if folder is not None:
            folder.noise_key = key
        return key

    return make


def spent(accountant: Accountant, rounds: int, chosen: bool) -> Spent:
    """What a run of this many rounds has used; ``chosen`` is whether early stopping chose the model."""
    privacy = accountant.privacy
    return Spent(accountant.epsilon(rounds), privacy.delta, rounds, privacy.noise_seed is not None, chosen)
