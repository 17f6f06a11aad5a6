"""DRFA, the paper's DRFL: distributionally robust federated averaging.

Deng, Kamani, Mahdavi: Distributionally Robust Federated Averaging, NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core import dual_weights
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import LocalLoss
from comfedl.core.protocol import MODEL, NUMBER, Batches, Data, Draw, Outcome, Step
from comfedl.utils import checks
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class DRFA(Algorithm):
    """Clients are drawn in proportion to dual weights lambda; a second, uniform sample reports losses to update lambda.

    A client drawn twice trains once and counts twice, in the mean and in the traffic, as in the analysis.

    Args:
        dual_lr: the step size of lambda; a round's step is local_steps times that.
        whole_loss: measure the second sample's losses on all data (or ``loss_samples``) instead of one batch.
        floor: the least lambda, before rescaling to sum 1, as in public code; 0 in the paper.
        baseline: first subtract the mean of the reported losses, which reduces noise if few clients participate.
    """

    dual_lr: float = 0.08
    whole_loss: bool = False
    floor: float = 0.0
    baseline: bool = False

    name: ClassVar[str] = "drfa"
    paper: ClassVar[str] = "Deng et al., NeurIPS 2020"
    goal: ClassVar[str] = "min_w max_lambda sum_i lambda_i f_i(w), lambda on the simplex"
    sends: ClassVar[str] = "down d + 1 int; up 2 d; and for the second sample down d, up 1 loss"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("dual_lr", self.dual_lr, 0)
        checks.between("floor", self.floor, 0, 1)

    def init(self, model: Model, clients: int) -> State:
        return {"model": model, "duals": dual_weights.uniform(clients)}

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        model, lambdas, n = state["model"], state["duals"], context.clients
        # With replacement, so that the plain mean is an unbiased estimate of the lambda-weighted sum.
        drawn = context.sample_by_duals(lambdas)
        snapshot = torch.tensor(int(context.rng("snapshot").integers(1, self.local_steps + 1)), dtype=torch.int32)
        replies = context.ask("train", drawn, {"model": model, "snapshot": snapshot})
        mean = torch.full((len(replies.clients),), 1 / len(replies.clients), dtype=torch.float64)
        mean = self.limited(mean, replies.clients)
        at_snapshot = self.averaged(model, replies, mean, "snapshot")

        second = context.ask("loss", context.sample("losses"), {"model": at_snapshot})
        losses, seen = second.numbers("loss"), second.clients
        slope = (n / len(seen)) * (losses - losses.mean() if self.baseline else losses)  # 0 for all other clients
        moved = dual_weights.ascend(lambdas, seen, self.local_steps * self.dual_lr * slope)
        state = {**self.advance(state, replies, mean), "duals": dual_weights.apply_floor(moved, self.floor)}
        duals = dual_weights.to_tensor(lambdas) if context.recorded else None
        return state, Participation(replies.clients, mean, duals)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return values.max()

    def steps(self) -> dict[str, Step]:
        batch = Draw("train", self.loss_samples, bounded=True) if self.whole_loss else Draw("train", self.batch_size)
        return {**super().steps(), "loss": Step(self.loss, {"batch": batch}, sends={"loss": NUMBER})}

    def reply(self) -> dict[str, str]:
        return {**super().reply(), "snapshot": MODEL}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        t, inner = int(message["snapshot"]), batches[Data.INNER]
        first = self.descend(learner, message["model"], {Data.INNER: inner[:t]}, state=state)
        if t == self.local_steps:
            return Outcome({"model": first.model, "snapshot": first.model}, self.kept(first), first.watched)
        rest = self.descend(learner, first.model, {Data.INNER: inner[t:]}, memory=first.memory)
        watched = {name: torch.cat([first.watched[name], rest.watched[name]]) for name in first.watched}
        return Outcome({"model": rest.model, "snapshot": first.model}, self.kept(rest), watched)

    def loss(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """The loss of a model, measured without training."""
        batch = batches["batch"][0]
        return Outcome({"loss": LocalLoss(learner).value(message["model"], batch, batch)})
