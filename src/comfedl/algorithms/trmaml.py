"""TR-MAML: task-robust meta-learning, federated.

Collins, Mokhtari, Shakkottai: Task-Robust Model-Agnostic Meta-Learning, NeurIPS 2020. The original is not federated.
In this version clients take local MAML steps, the server weights their updates by p, and p ascends on the losses after
adapting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from comfedl.algorithms.base import Algorithm, State, adapt_draws
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core import dual_weights
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import Adapt, Adapted, Objective
from comfedl.core.protocol import NUMBER, Batches, Draw, Outcome
from comfedl.utils import checks
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class TRMAML(Algorithm):
    """Meta-learning with weights p on the clients that grow with their loss after adapting, eq. (8).

    Args:
        adapt_lr: the inner step size, alpha.
        dual_lr: the step size of p.
        order, adapt_steps, delta, hessian_batch: see ``Adapt``.
    """

    adapt_lr: float = 0.05
    dual_lr: float = 0.08
    order: str = "exact"
    adapt_steps: int = 1
    delta: float = 1e-3
    hessian_batch: str = "auto"

    name: ClassVar[str] = "tr-maml"
    paper: ClassVar[str] = "Collins et al., NeurIPS 2020"
    goal: ClassVar[str] = "min_w max_p sum_i p_i f_i(w - a grad f_i(w)), p on the simplex, eq. (8)"
    sends: ClassVar[str] = "down d; up d + 1 loss after adapting"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("dual_lr", self.dual_lr, 0)
        self.adapt  # noqa: B018 - runs its checks

    @property
    def adapt(self) -> Adapt:
        return Adapt(self.adapt_lr, self.adapt_steps, self.order, self.delta, self.hessian_batch)

    def init(self, model: Model, clients: int) -> State:
        return {"model": model, "duals": dual_weights.uniform(clients)}

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        p = state["duals"]
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        chosen = replies.clients
        scale = context.clients / len(chosen)
        weights = self.limited(scale * dual_weights.take(p, chosen), chosen)
        moved = dual_weights.ascend(p, chosen, self.dual_lr * (scale * replies.numbers("loss")))
        state = {**self.advance(state, replies, weights), "duals": moved}
        return state, Participation(chosen, weights, dual_weights.to_tensor(p) if context.recorded else None)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return values.max()

    def objective(self, learner: Learner) -> Objective:
        return Adapted(learner, self.adapt)

    @property
    def adaptation(self) -> tuple[float, int]:
        return self.adapt_lr, self.adapt_steps if self.personal_steps is None else self.personal_steps

    def draws(self) -> dict[str, Draw]:
        return super().draws() | adapt_draws(self.adapt, self.batch_size, self.batch_size, self.local_steps)

    def reply(self) -> dict[str, str]:
        return {**super().reply(), "loss": NUMBER}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        trained = self.descend(learner, message["model"], batches, state=state)
        # The first step's value is at the received model: the loss after adapting.
        return Outcome(
            {"model": trained.model, "loss": trained.watched["loss"][0]}, self.kept(trained), trained.watched
        )
