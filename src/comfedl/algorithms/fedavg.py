"""Federated averaging.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. Local training is measured in mini-batch steps, as in the ComFedL paper, not in epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.algorithms.private_release import check_sums
from comfedl.core.learner import Model
from comfedl.core.privacy import Sums
from comfedl.core.simplex import limited_weights
from comfedl.core.sums import BySamples, SiteWeight, Uniform
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

WEIGHTINGS = ("samples", "uniform")


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging.

    Args:
        weighting: weight participants by their number of "samples", or "uniform".
        max_weight: the largest weight of a participant, as a multiple of uniform; None is no limit.
    """

    weighting: str = field(default="samples", kw_only=True)
    max_weight: float | None = field(default=None, kw_only=True)

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    goal: ClassVar[str] = "min_w sum_i (n_i / n) f_i(w)"
    sends: ClassVar[str] = "down d, up d"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("weighting", self.weighting, WEIGHTINGS)
        if self.max_weight is not None:
            checks.not_below("max_weight", self.max_weight, 1)

    @property
    def weight_cap(self) -> float | None:
        return super().weight_cap if self.max_weight is None else self.max_weight

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        if context.release is not None:
            weights = context.release.equal_weights(len(replies.clients))
        else:
            weights = self._weights(torch.from_numpy(context.sizes[replies.clients]))
        return self.advance(state, replies, weights), Participation(replies.clients, weights)

    def check_privacy(self, model: Model, sampled: bool) -> Sums:
        if self.weighting != "uniform":
            raise ConfigError(
                'privacy is given, but weighting is "samples": a client\'s number of samples is private as well, and '
                'one client could have any share of the sum; use weighting = "uniform".'
            )
        check_sums(self, model, sampled)
        return Sums()

    def site_weight(self) -> SiteWeight:
        if self.max_weight is not None:
            raise self.needs_each("max_weight depends on the weights of all participants")
        return BySamples() if self.weighting == "samples" else Uniform()

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return (self._weights(sizes) * values).sum()

    def _weights(self, sizes: Tensor) -> Tensor:
        counts = sizes.double() if self.weighting == "samples" else torch.ones(len(sizes), dtype=torch.float64)
        weights = counts / counts.sum()
        return weights if self.weight_cap is None else limited_weights(weights, self.weight_cap)
