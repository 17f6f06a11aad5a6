"""ComFedL-DAMAML: distribution-agnostic, robust meta-learning, eq. (10) of the ComFedL paper."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from comfedl.algorithms.comfedl import Compositional
from comfedl.core.objectives import Adapt
from comfedl.core.outer_functions import KL, Exp, Outer
from comfedl.utils import checks


@dataclass(frozen=True)
class DAMAML(Compositional):
    """``ComFedL(inner=Adapt(adapt_lr), outer=KL(gamma))``: the worst client's loss after adapting counts most.

    Args:
        adapt_lr: the inner step size.
        gamma: the penalty on weights far from uniform; a small gamma follows the worst client.
        outer: "kl" (stable), eq. (5) on top of eq. (9); or "exp", eq. (10) to the letter.
        cap: with "kl", the largest weight of a client, in multiples of uniform.
        order, adapt_steps, delta, hessian_batch: see ``Adapt``.
    """

    adapt_lr: float = 0.05
    gamma: float = 0.5
    outer: str = "kl"
    cap: float | None = None
    order: str = "exact"
    adapt_steps: int = 1
    delta: float = 1e-3
    hessian_batch: str = "auto"

    name: ClassVar[str] = "comfedl-damaml"
    paper: ClassVar[str] = "Huang and Li, section 5.2"
    goal: ClassVar[str] = "min_w g log (1/n) sum_i exp(f_i(w - a grad f_i(w)) / g), eq. (10)"
    sends: ClassVar[str] = "down d; up d (+ 1 loss with the outer kl)"

    @cached_property
    def adapt(self) -> Adapt:
        return Adapt(self.adapt_lr, self.adapt_steps, self.order, self.delta, self.hessian_batch)

    @cached_property
    def g(self) -> Outer:
        checks.one_of("outer", self.outer, ("kl", "exp"))
        return self.capped(KL(self.gamma, self.cap) if self.outer == "kl" else Exp(self.gamma))
