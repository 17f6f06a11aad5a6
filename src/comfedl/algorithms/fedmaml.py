"""FedMAML, also called Per-FedAvg: federated meta-learning.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020. It is ComFedL
with the inner map ``Adapt`` and no outer function: eq. (7) of the ComFedL paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from comfedl.algorithms.comfedl import Compositional
from comfedl.core.objectives import Adapt


@dataclass(frozen=True)
class FedMAML(Compositional):
    """Train an initialisation that suits each client after ``adapt_steps`` steps of size ``adapt_lr`` on its data.

    Args:
        adapt_lr: the inner step size, alpha.
        order: "exact" second order, "first" order, or "hessian-free".
        adapt_steps: the number of inner steps.
        delta: the step of the finite difference in "hessian-free".
        hessian_batch: see ``Adapt``.
    """

    adapt_lr: float = 0.05
    order: str = "exact"
    adapt_steps: int = 1
    delta: float = 1e-3
    hessian_batch: str = "auto"

    name: ClassVar[str] = "fedmaml"
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020 (Per-FedAvg)"
    goal: ClassVar[str] = "min_w (1/n) sum_i f_i(w - a grad f_i(w)), eq. (7)"
    sends: ClassVar[str] = "down d; up d"

    @cached_property
    def adapt(self) -> Adapt:
        return Adapt(self.adapt_lr, self.adapt_steps, self.order, self.delta, self.hessian_batch)
