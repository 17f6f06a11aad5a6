"""q-FedAvg: fair resource allocation.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Learner
from comfedl.core.objectives import LocalLoss
from comfedl.core.protocol import NUMBER, Batches, Draw, Outcome
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.tree import Tree

SAMPLINGS = ("uniform", "samples")


@dataclass(frozen=True)
class QFedAvg(Algorithm):
    """Clients with a larger loss get more weight, with a step size from an estimate of the Lipschitz constant.

    Args:
        q: 0 is the plain average; a larger q is fairer and slower.
        sampling: draw participants "uniform" or, as in the public code, in proportion to their "samples".
    """

    q: float = 0.2
    sampling: str = "uniform"

    name: ClassVar[str] = "q-fedavg"
    paper: ClassVar[str] = "Li et al., ICLR 2020"
    goal: ClassVar[str] = "min_w (1/n) sum_i f_i(w)^(q+1) / (q+1)"
    sends: ClassVar[str] = "down d; up d + 1 loss"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("q", self.q, 0)
        checks.one_of("sampling", self.sampling, SAMPLINGS)

    def check(self, clients: int, participants: int) -> None:
        if self.local_optimizer.plain_decay is None:
            warnings.warn(
                f"q-FedAvg's step size assumes plain gradient steps at the clients, but client_optimizer is "
                f"{self.local_optimizer.name} with a memory, so the step size is approximate; to follow the paper, "
                "use server_optimizer instead.",
                stacklevel=3,
            )

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        chosen = context.sample() if self.sampling == "uniform" else context.sample_by(context.sizes)
        model = state["model"]
        replies = context.ask("train", chosen, {"model": model})
        L = 1 / self.lr
        losses = replies.numbers("loss")
        if self.q and bool((losses < 0).any()):
            raise ConfigError(f"q-FedAvg needs a loss that is never negative, but one is {float(losses.min()):.4g}.")
        log_f = torch.log(losses.clamp(min=0) + 1e-10)
        squares = replies.squared_distances(("model", "params"), model["params"])
        if self.clips:
            scale = self.shortening(replies, ("model", "params"), model["params"])
            squares = torch.where(scale > 0, squares * scale**2, 0.0)
        log_g = torch.log(squares) + 2 * math.log(L)
        log_q = math.log(self.q) if self.q else -math.inf
        # h_k = q F_k^(q-1) ||g_k||^2 + L F_k^q, in the log domain, since F_k^(q-1) overflows as F_k goes to 0.
        log_h = torch.logaddexp(log_q + (self.q - 1) * log_f + log_g, math.log(L) + self.q * log_f)
        # w - sum_k Delta_k / sum_k h_k with Delta_k = F_k^q L (w - w_k)
        weights = torch.exp(self.q * log_f + math.log(L) - torch.logsumexp(log_h, dim=0))
        weights = self.limited(weights, replies.clients)
        return self.advance(state, replies, weights), Participation(replies.clients, weights)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return (values ** (self.q + 1)).mean() / (self.q + 1)

    def explain(self, error: Diverged) -> str:
        return "Use a smaller lr, fewer local_steps or a smaller q."

    def draws(self) -> dict[str, Draw]:
        return {**super().draws(), "value": Draw("train", self.loss_samples, bounded=True)}

    def reply(self) -> dict[str, str]:
        return {**super().reply(), "loss": NUMBER}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        trained = self.descend(learner, message["model"], batches, state=state)
        whole = batches["value"][0]
        loss = LocalLoss(learner).value(message["model"], whole, whole)
        return Outcome({"model": trained.model, "loss": loss}, self.kept(trained), trained.watched)
