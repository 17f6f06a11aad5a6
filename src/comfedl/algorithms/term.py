"""TERM: tilted empirical risk minimisation over clients.

Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021. With t > 0 it is
``ComFedL(outer=KL(1 / t))``; with t < 0 it downweights clients with large losses, such as those with noisy labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from comfedl.algorithms.comfedl import Compositional
from comfedl.core.outer_functions import Outer, Tilt


@dataclass(frozen=True)
class TERM(Compositional):
    """The tilted mean of the clients' losses.

    Args:
        t: the tilt; above 0 favours the worst client, below 0 downweights it.
    """

    t: float = 1.0

    name: ClassVar[str] = "term"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    goal: ClassVar[str] = "min_w (1/t) log (1/n) sum_i exp(t f_i(w))"
    sends: ClassVar[str] = "down d; up d + 1 loss"

    @cached_property
    def g(self) -> Outer:
        return Tilt(self.t)
