"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020. This is its option II.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.aggregation import clip_factors
from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Learner, Model, Params
from comfedl.core.optim import SGD
from comfedl.core.protocol import PARAMS, Batches, Outcome, Replies
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Every local gradient is corrected by ``c - c_i``: how the mean client's gradient differs from this client's.

    A client keeps its control variate c_i; one that was never seen has none. The server's step size is that of
    ``server_optimizer=optim.SGD(lr)``, 1 by default.
    """

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    goal: ClassVar[str] = "min_w (1/n) sum_i f_i(w), without drift towards the clients' own optima"
    sends: ClassVar[str] = "down d + d of controls, up d + d of controls"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.client_optimizer
        if own is not None and not (isinstance(own, SGD) and own.momentum == 0):
            raise ConfigError(
                f"client_optimizer is {own.name}{' with momentum' if isinstance(own, SGD) else ''}, but SCAFFOLD "
                "computes its control variates from the clients' updates, which must be sums of gradients; leave it "
                "out, or give the momentum to server_optimizer."
            )
        if self.clip_grad_norm is not None:
            raise ConfigError(
                "clip_grad_norm is given, but SCAFFOLD computes its control variates from the clients' updates, which "
                "must be sums of gradients; use clip_update_norm, or leave it out."
            )

    def init(self, model: Model, clients: int) -> State:
        return {"model": model, "control": tree.map(torch.zeros_like, model["params"])}

    def client_state(self, model: Model) -> Tree:
        return {"control": tree.map(torch.zeros_like, model["params"])}

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        message = {"model": state["model"], "control": state["control"]}
        replies = context.ask("train", context.sample(), message)
        m, n = len(replies.clients), context.clients
        weights = torch.full((m,), 1 / m, dtype=torch.float64)
        # c + (m / n) mean_i (c_i' - c_i)
        change = self.control_change(replies, weights * (m / n))
        state = {**self.advance(state, replies, weights), "control": tree.map(torch.add, state["control"], change)}
        return state, Participation(replies.clients, weights)

    def control_change(self, replies: Replies, weights: Tensor) -> Params:
        """The sum of the clients' changes of control, as robust as that of their updates and clipped to the median."""
        if not self.defended:
            found: Params = replies.weighted_sum("control", weights)
            return found
        changes = list(replies.each("control"))
        origin = tree.map(torch.zeros_like, changes[0])
        lengths = replies.squared_distances(("control",), origin).sqrt()
        scale = clip_factors(lengths, None) if self.clips else torch.ones_like(lengths)
        return self.pooled(changes, origin, weights, scale)

    def reply(self) -> dict[str, str]:
        return {**super().reply(), "control": PARAMS}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        received, c, c_i = message["model"], message["control"], state["control"]
        trained = self.descend(learner, received, batches, correction=tree.map(torch.sub, c, c_i), state=state)
        # c_i' = c_i - c + (w - w_i) / (tau * lr)
        moved = tree.map(torch.sub, received["params"], trained.model["params"])
        change = tree.map(lambda w, c: w / (self.local_steps * self.lr) - c, moved, c)
        after = {"control": tree.map(torch.add, c_i, change)}
        return Outcome({"model": trained.model, "control": change}, self.kept(trained, after), trained.watched)
