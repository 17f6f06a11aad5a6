"""Delta-FL: federated averaging over the clients with the largest losses (superquantile, or CVaR).

Pillutla, Laguel, Malick, Harchaoui: Federated Learning with Superquantile Aggregation for Heterogeneous Data, Machine
Learning 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import LocalLoss
from comfedl.core.protocol import NUMBER, Batches, Draw, Outcome, Step
from comfedl.utils import checks
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class DeltaFL(Algorithm):
    """The sampled clients report their losses; those at or above the quantile train, and are averaged by samples.

    Args:
        level: the quantile's level; 0 is FedAvg, 0.9 trains on the worst tenth (weighted by samples).
    """

    level: float = 0.5

    name: ClassVar[str] = "delta-fl"
    paper: ClassVar[str] = "Pillutla et al., Machine Learning 2023"
    goal: ClassVar[str] = "min_w CVaR_level of f_i(w), clients weighted by n_i"
    sends: ClassVar[str] = "down d; up 1 loss; then up d from clients above the quantile"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("level", self.level, 0, 1)

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        first = context.ask("loss", context.sample(), {"model": state["model"]})
        chosen, losses = first.clients, first.numbers("loss").numpy()
        sizes = context.sizes[chosen]
        tail = losses >= _quantile(losses, sizes, self.level)
        kept = [client for client, inside in zip(chosen, tail, strict=True) if inside]
        replies = context.ask("train", kept, {})  # these clients have the model already
        counts = torch.from_numpy(context.sizes[replies.clients]).double()
        weights = self.limited(counts / counts.sum(), replies.clients)
        return self.advance(state, replies, weights), Participation(replies.clients, weights)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        # The exact superquantile: the client at the boundary counts with its fraction in the tail.
        ordered, order = values.sort(descending=True)
        shares = sizes[order].double() / sizes.sum()
        inside = torch.minimum(shares, (1 - self.level - (shares.cumsum(0) - shares)).clamp(min=0))
        return (inside * ordered).sum() / inside.sum()

    def steps(self) -> dict[str, Step]:
        whole = {"value": Draw("train", self.loss_samples, bounded=True)}
        return {**super().steps(), "loss": Step(self.loss, whole, sends={"loss": NUMBER})}

    def loss(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """The loss of the received model, which the client keeps for this round in case it has to train."""
        whole = batches["value"][0]
        loss = LocalLoss(learner).value(message["model"], whole, whole)
        return Outcome({"loss": loss}, scratch={**message["model"], **(state or {})})

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        return super().train(
            learner, {"model": Model(params=state["params"], buffers=state["buffers"])}, state, batches
        )


def _quantile(losses: NDArray[np.float64], sizes: NDArray[np.int64], level: float) -> float:
    """The smallest loss such that at least a fraction ``level`` of all samples is at or below it."""
    order = np.argsort(losses, kind="stable")
    share = np.cumsum(sizes[order]) / sizes.sum()
    return float(losses[order][np.searchsorted(share, level - 1e-12)])
