"""A counterexample to the theorem as printed, which lacks a plus sign that its proof has.

Two clients have f_i(w) = (R log cosh(w / R), +-sin w) and g(y) = e y_1 + y_2, without noise. Their sines cancel in
F(w) = e R log cosh(w / R), which is almost a straight line, but not over several local steps: these have a fixed point
where F is still steep. The theorem allows for this in a term that the missing plus sign turns into a multiple of sigma.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comfedl.algorithms.comfedl import ComFedL
from comfedl.core.learner import Batch, Params
from comfedl.core.objectives import Composition
from comfedl.data.federated import FederatedData
from comfedl.training.fit import fit
from comfedl_reproduction.theory.measure import Row, Trace
from comfedl_reproduction.theory.problem import F64, Constants, log_cosh

SIGMA = 1e-12  # no noise, but the assumptions require a number above 0


@dataclass(frozen=True)
class Plus:
    """The mean squared gradient of this problem, next to the theorem's bound with and without the plus sign."""

    T: int
    tau: int = 4
    eta: float = 0.5
    R: float = 200.0
    e: float = 0.4

    @property
    def cost(self) -> float:
        return 2 * self.T

    def constants(self) -> Constants:
        """The Jacobian of f_i is (tanh(w / R), +-cos w), and g is linear."""
        return Constants(
            G_f=math.sqrt(2),
            G_g=math.sqrt(1 + self.e**2),
            L_f=math.sqrt(1 + self.R**-2),
            L_g=0.0,
            L=self.e / self.R,
            sigma1=SIGMA,
            sigma2=SIGMA,
            sigma3=SIGMA,
        )

    def composition(self) -> Composition:
        def inner(params: Params, batch: Batch) -> Tensor:
            w = params["w"]
            return torch.stack([self.R * log_cosh(w / self.R), batch[0][0] * torch.sin(w)])

        def outer(y: Tensor, batch: Batch) -> Tensor:
            return self.e * y[0] + y[1]

        return Composition(inner, outer)

    def rows(self) -> list[Row]:
        start, signs = torch.tensor(self.R, dtype=F64), {"a": 1.0, "b": -1.0}
        fed = FederatedData({name: torch.tensor([sign], dtype=F64) for name, sign in signs.items()})
        algorithm = ComFedL(problem=self.composition(), lr=self.eta, local_steps=self.tau, batch_size=None)
        trace, rounds = Trace(start), self.T // self.tau
        fit({"w": start}, fed, algorithm, rounds=rounds, eval_every=rounds, callbacks=[trace])
        slopes = self.e * torch.tanh(torch.stack(trace.ws[:-1]) / self.R)
        gap = self.e * self.R * float(log_cosh(start / self.R))  # the minimum of F is 0
        bounds = {"all rounds": self.constants().theorem, "all rounds (as printed)": self.constants().printed}
        common = {"part": "plus sign", "series": "", "T": self.T, "tau": self.tau, "eta": self.eta, "b": 1, "seed": 0}
        return [
            {
                **common,
                "quantity": name,
                "value": float(slopes.square().mean()),
                "bound": bound(gap, self.T, self.tau, self.eta, 1),
            }
            for name, bound in bounds.items()
        ]
