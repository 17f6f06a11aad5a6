"""FedProx: federated averaging with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from comfedl.algorithms.fedavg import FedAvg
from comfedl.core.learner import Learner
from comfedl.core.protocol import Batches, Outcome
from comfedl.utils import checks
from comfedl.utils.errors import Diverged
from comfedl.utils.tree import Tree


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients stay close to the received model w: each minimises ``f_i(v) + (mu / 2) ||v - w||^2``.

    Args:
        mu: the strength of the proximal term; 0 is FedAvg. Stability needs lr * mu < 2.
    """

    mu: float = 0.01

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    goal: ClassVar[str] = "min_w sum_i (n_i / n) f_i(w); clients take steps on f_i(v) + (mu/2) ||v - w||^2"
    sends: ClassVar[str] = "down d, up d"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.not_below("mu", self.mu, 0)

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        received = message["model"]
        anchor = (self.mu, received["params"]) if self.mu else None
        trained = self.descend(learner, received, batches, anchor=anchor, state=state)
        return Outcome({"model": trained.model}, self.kept(trained), trained.watched)

    def explain(self, error: Diverged) -> str:
        return f"Use a smaller lr or mu: local steps are stable only if lr * mu, now {self.lr * self.mu:g}, is below 2."
