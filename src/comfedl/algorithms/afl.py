"""AFL: agnostic federated learning.

Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019. All clients participate in every round, and the reported
model is the average of the iterates, as in the theory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Learner, Model
from comfedl.core.protocol import NUMBER, Batches, Outcome
from comfedl.core.simplex import project
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class AFL(Algorithm):
    """Gradient descent in w and ascent in the clients' weights lambda, both at the same point.

    Args:
        dual_lr: the step size of lambda.
        average: report the average of the iterates instead of the last one.
        local_steps: 1 as in the paper; with more, lambda weights the clients' whole updates.
    """

    dual_lr: float = 0.08
    average: bool = True
    local_steps: int = field(default=1, kw_only=True)

    name: ClassVar[str] = "afl"
    paper: ClassVar[str] = "Mohri et al., ICML 2019"
    goal: ClassVar[str] = "min_w max_lambda sum_i lambda_i f_i(w), lambda on the simplex"
    sends: ClassVar[str] = "down d; up d + 1 loss; all clients every round"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("dual_lr", self.dual_lr, 0)
        if self.average and self.server_average is not None:
            raise ConfigError(
                "average and server_average are both given, but AFL reports one average; use average = false for a "
                "moving one."
            )

    def init(self, model: Model, clients: int) -> State:
        duals = torch.full((clients,), 1 / clients, dtype=torch.float64)
        return {"model": model, "duals": duals, "average": model, "rounds": torch.tensor(0)}

    def check(self, clients: int, participants: int) -> None:
        if participants != clients:
            raise ConfigError(
                f"AFL needs all {clients} clients in every round, but clients_per_round is {participants}; leave it "
                "out, or use DRFA(local_steps=1), the counterpart for sampled clients."
            )

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        duals = state["duals"]
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        weights, ascent = self.limited(duals[replies.clients], replies.clients), torch.zeros_like(duals)
        ascent[replies.clients] = replies.numbers("loss")
        state = self.advance(state, replies, weights)
        rounds = state["rounds"] + 1
        average = tree.map(
            lambda old, new: old + (new - old) / int(rounds) if new.is_floating_point() else new,
            state["average"],
            state["model"],
        )
        moved = project(duals + self.dual_lr * ascent)
        state = {**state, "duals": moved, "average": average, "rounds": rounds}
        return state, Participation(replies.clients, weights, duals)

    def reported(self, state: State) -> Model:
        model: Model = state["average"] if self.average else super().reported(state)
        return model

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return values.max()

    def reply(self) -> dict[str, str]:
        return {**super().reply(), "loss": NUMBER}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        trained = self.descend(learner, message["model"], batches, state=state)
        # The first step's loss is at the received model: w and lambda move from the same point, on the same batch.
        return Outcome(
            {"model": trained.model, "loss": trained.watched["loss"][0]}, self.kept(trained), trained.watched
        )
