"""Early stopping: end a run that no longer improves, and return its best model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.core.learner import Model
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError, nearest
from comfedl.utils.tree import Tree

BEST = "best"  # the place of ``Best`` in a run's state


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a measure has not improved for a number of rounds.

    Args:
        metric: any number that is recorded for a round, such as "validation.accuracy.worst", "validation.auc.mean",
            "train.loss.worst" or "objective". Losses, errors, the spread ("std") and the objective are made small,
            everything else large.
        patience: how many rounds without an improvement to go on after the best one. It is looked at after each
            evaluation, so that the last model has one.
        restore_best: return and save the model of the best round; the last one is saved beside it. With False the last
            model is returned.
    """

    metric: str
    patience: int = 20
    restore_best: bool = True

    name: ClassVar[str] = "early-stopping"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(
                f"stop.metric is {self.metric!r}, but it must be a name such as validation.accuracy.worst."
            )
        checks.at_least("stop.patience", self.patience, 1)
        if not isinstance(self.restore_best, bool):
            raise ConfigError(f"stop.restore_best is {self.restore_best!r}, but it must be true or false.")

    @property
    def minimise(self) -> bool:
        """Whether smaller is better."""
        metric, _, statistic = self.metric.rpartition(".")
        return self.metric == "objective" or statistic == "std" or smaller_is_better(metric)

    def value(self, row: Row) -> float:
        """The measure of a round."""
        known = [name for name, value in row.items() if name != "round" and isinstance(value, int | float)]
        value = row.get(self.metric)
        if self.metric not in known or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"stop.metric is {self.metric!r}, which no client has in round {row['round']}; "
                f"{nearest(self.metric, known)}."
            )
        return float(value)

    def initial(self, model: Model) -> dict[str, Tree]:
        """The best round before the first: none."""
        return {"model": model, "round": torch.tensor(0), "value": torch.tensor(math.nan, dtype=torch.float64)}

    def improved(self, best: Mapping[str, Tree], row: Row, model: Model) -> dict[str, Tree]:
        """The best round so far, after another one."""
        value, before = self.value(row), float(best["value"])
        if not math.isnan(before) and not (value < before if self.minimise else value > before):
            return dict(best)
        kept = tree.map(torch.clone, model)
        return {"model": kept, "round": torch.tensor(row["round"]), "value": torch.tensor(value, dtype=torch.float64)}

    def reason(self, best: Mapping[str, Tree], number: int) -> str | None:
        """Why to stop after this round, in a sentence; None to go on."""
        at = int(best["round"])
        if not at or number - at < self.patience:
            return None
        return (
            f"Stopped after round {number}: {self.metric} has not improved for {number - at} rounds since round {at}, "
            f"where it was {float(best['value']):.4g}."
        )
