"""The grids of section 5.3 of the ComFedL paper, by method."""

from __future__ import annotations

from comfedl.config.schema import Config
from comfedl.tuning.space import Choices, Space
from comfedl.utils.errors import ConfigError

LR = Choices((0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0))
"""Learning rates: of local training, and of adapting "if two types of learning rates are needed"."""
GAMMA = Choices((0.1, 0.5, 1.0, 5.0))
DUAL_LR = Choices((8e-3, 8e-2, 8e-1))
"""Learning rates of the clients' weights, in DRFL (DRFA in this library) and TR-MAML."""
Q = Choices((0.1, 0.2, 0.5, 1.0, 2.0))
LAM = Choices((0.05, 0.1, 0.5, 1.0, 5.0))

GRIDS: dict[str, dict[str, Choices]] = {
    "fedavg": {"lr": LR},
    "comfedl": {"lr": LR},
    "drfa": {"lr": LR, "dual_lr": DUAL_LR},
    "q-fedavg": {"lr": LR, "q": Q},
    "comfedl-damaml": {"lr": LR, "adapt_lr": LR, "gamma": GAMMA},
    "fedmaml": {"lr": LR, "adapt_lr": LR},
    "tr-maml": {"lr": LR, "adapt_lr": LR, "dual_lr": DUAL_LR},
    "ditto": {"lr": LR, "lam": LAM},
}


def paper_grid(config: Config) -> Space:
    """The paper's grid for a config's method; that of ComFedL depends on its inner map and outer function."""
    name = config.algorithm.name
    if name not in GRIDS:
        raise ConfigError(
            f"The paper has no grid for the algorithm {name!r}, only for {', '.join(GRIDS)}; give --grid FILE."
        )
    grid = dict(GRIDS[name])
    if name == "comfedl":
        outer = config.algorithm.arguments.get("outer", {}).get("name", "identity")
        if outer in ("kl", "exp"):
            grid["outer.gamma"] = GAMMA
        elif outer != "identity":
            raise ConfigError(
                f"The paper has no grid for the outer function {outer!r}, only for kl and exp; give --grid FILE."
            )
        if "inner" in config.algorithm.arguments:
            grid["inner.lr"] = LR
        if "problem" in config.algorithm.arguments:
            raise ConfigError("The paper has no grid for a custom problem; give --grid FILE.")
    return {f"algorithm.{key}": choices for key, choices in grid.items()}
