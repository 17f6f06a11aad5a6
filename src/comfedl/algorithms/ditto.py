"""Ditto: a personal model beside the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from comfedl.algorithms.base import descend
from comfedl.algorithms.fedavg import FedAvg
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import LocalLoss
from comfedl.core.protocol import Batches, Data, Outcome
from comfedl.utils import checks
from comfedl.utils.errors import Diverged
from comfedl.utils.tree import Tree

OWN_OPTIMIZER = "personal optimizer"  # its state, for the personal model


@dataclass(frozen=True)
class Ditto(FedAvg):
    """The global model is FedAvg's; each client also trains and keeps a personal model close to it.

    Args:
        lam: the strength of the proximal term; 0 is purely local training. Stability needs lr * lam < 2.
    """

    lam: float = 0.1

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    goal: ClassVar[str] = "for each client min_v f_k(v) + (lam/2) ||v - w||^2, w from FedAvg"
    sends: ClassVar[str] = "down d; up d; the personal model never leaves its client"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("lam", self.lam, 0)

    def client_state(self, model: Model) -> Tree:
        kept = {OWN_OPTIMIZER: self.local_optimizer.init(model["params"])} if self.local_optimizer.keep_state else {}
        return {**model, **kept}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        received, inner = message["model"], batches[Data.INNER]
        trained = self.descend(learner, received, batches, state=state)
        # On the same batches; the anchor is the received model, not the one that has just been trained.
        anchor = (self.lam, received["params"])
        own = descend(
            LocalLoss(learner),
            self.personal(learner, received, state, batches),
            inner,
            inner,
            self.lr,
            anchor=anchor,
            clip=self.clipping(learner),
            optimizer=self.local_optimizer,
            memory=state.get(OWN_OPTIMIZER),
        )
        after = {**own.model, OWN_OPTIMIZER: own.memory} if self.local_optimizer.keep_state else {**own.model}
        watched = {**trained.watched, "personal loss": own.watched["loss"]}
        return Outcome({"model": trained.model}, self.kept(trained, after), watched)

    def explain(self, error: Diverged) -> str:
        product = self.lr * self.lam
        return f"Use a smaller lr or lam: personal models are stable only if lr * lam, now {product:g}, is below 2."

    def personal(self, learner: Learner, model: Model, state: Tree, batches: Batches) -> Model:
        return Model(params=state["params"], buffers=state["buffers"])
