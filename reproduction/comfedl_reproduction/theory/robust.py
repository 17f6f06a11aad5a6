"""The robust objective on the synthetic problem: the safe step's descent, and the rate of several estimates of losses.

The clients' losses F_i are those of ``Synthetic``, with known gradients and the known constant L. What is minimised is
eq. (5), ``F(w) = gamma log(mean_i exp(F_i(w) / gamma))``; its gradient is ``sum_i r_i grad F_i``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comfedl.algorithms.comfedl import ComFedL
from comfedl.core.learner import Batch, Params
from comfedl.core.objectives import Composition
from comfedl.core.outer_functions import KL
from comfedl.training.fit import fit
from comfedl_reproduction.theory.measure import TAU, Row, Trace
from comfedl_reproduction.theory.problem import F64, LEAST_BATCH, Synthetic

STARTS = ((-1.0, -1.0), (2.0, 0.0), (0.0, -2.0))
DESCENT_ROUNDS = 40


class RobustProblem:
    """Eq. (5) of the synthetic problem's losses, exactly: values, weights and gradients at models [..., d]."""

    def __init__(self, gamma: float) -> None:
        self.gamma, self.synthetic = gamma, Synthetic()
        self.L = self.synthetic.constants().L  # of each F_i

    def losses(self, w: Tensor) -> Tensor:
        """F_i(w), of shape [..., clients]."""
        return self.synthetic.client_objectives(w)

    def value(self, w: Tensor) -> Tensor:
        values = self.losses(w)
        return self.gamma * (torch.logsumexp(values / self.gamma, dim=-1) - math.log(values.shape[-1]))

    def weights(self, w: Tensor) -> Tensor:
        return torch.softmax(self.losses(w) / self.gamma, dim=-1)

    def gradient(self, w: Tensor) -> Tensor:
        return (self.weights(w)[..., None] * self.synthetic.client_gradients(w)).sum(dim=-2)

    def guaranteed(self, w: Tensor, eta: float) -> Tensor:
        """How much the safe step is sure to lower F from each model, with one local step of eta = 1 / L.

        With G = grad F, V the variance of the clients' gradients under r, and s = 1 / (1 + eta V / gamma), it is
        ``s eta |G|^2 (1 - a / 2 - phi(c) b)`` for a = s eta L and b = s eta V / gamma, which add up to 1. Here c is the
        largest ``<G - g_i, s eta G> / gamma``, by which the softmax can turn to a client within the step, and
        phi(c) = (e^c - 1 - c) / c^2, which is 1/2 for small steps: then half of s eta |G|^2 is sure.
        """
        r, each, mean = self.weights(w), self.synthetic.client_gradients(w), self.gradient(w)
        apart = each - mean[..., None, :]
        variance = (r * apart.square().sum(dim=-1)).sum(dim=-1)
        s = 1 / (1 + eta * variance / self.gamma)
        turn = (-s[..., None] * eta * (apart * mean[..., None, :]).sum(dim=-1) / self.gamma).amax(dim=-1)
        a, b = s * eta * self.L, s * eta * variance / self.gamma
        return s * eta * mean.square().sum(dim=-1) * (1 - a / 2 - bennett(turn) * b)


def bennett(c: Tensor) -> Tensor:
    """(e^c - 1 - c) / c^2, which is 1/2 at 0; it grows with c."""
    small = c.abs() < 1e-3
    safe = torch.where(small, torch.ones_like(c), c)
    return torch.where(small, 0.5 + c / 6 + c**2 / 24, (torch.expm1(safe) - safe) / safe**2)


@dataclass(frozen=True)
class Descent:
    """Whether eq. (5) falls in each round of the plain and of the safe step, from whole batches.

    With one local step, the bound of ``guaranteed`` is checked in every round. With more, the clients' updates are no
    longer gradients at the model that was sent, and it need not hold.
    """

    gamma: float
    tau: int
    step: str

    @property
    def cost(self) -> float:
        return len(STARTS) * DESCENT_ROUNDS * self.tau * 4

    def rows(self) -> list[Row]:
        problem = RobustProblem(self.gamma)
        reach = 1 / problem.L
        changes, sure = [], []
        for start in STARTS:
            trace = Trace(torch.tensor(start, dtype=F64))
            algorithm = ComFedL(
                problem=problem.synthetic.composition(),
                outer=KL(self.gamma),
                step=self.step,
                lr=reach / self.tau,
                local_steps=self.tau,
                batch_size=None,
                outer_batch_size="all",
            )
            data = problem.synthetic.data(range(problem.synthetic.clients))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The weights jump")  # which is what is measured
                fit(
                    {"w": trace.ws[0]},
                    data,
                    algorithm,
                    rounds=DESCENT_ROUNDS,
                    eval_every=DESCENT_ROUNDS,
                    callbacks=[trace],
                )
            ws = torch.stack(trace.ws)
            values = problem.value(ws)
            # Near the optimum changes are rounding errors.
            moving = problem.gradient(ws[:-1]).norm(dim=-1) > 1e-5
            changes.append(values.diff()[moving])
            sure.append(problem.guaranteed(ws[:-1], reach)[moving])
        change, promised = torch.cat(changes), torch.cat(sure)
        guaranteed = promised > 0
        common: Row = {"part": "descent", "series": f"{self.step}, gamma {self.gamma:g}", "tau": self.tau, "seed": 0}
        common["eta"] = reach / self.tau
        found: dict[str, tuple[float, float | None]] = {}
        found["share of rounds that rise"] = float((change > 0).double().mean()), None
        if self.step == "safe":
            ratio = (promised / -change)[guaranteed]
            found["share of rounds with a guarantee"] = (float(guaranteed.double().mean()), None)
            bound = 1.0 if self.tau == 1 else None
            found["guaranteed over measured descent, at most"] = (float(ratio.max()), bound)
            # Also where nothing is guaranteed, F may rise by no more than the bound says.
            found["change less its bound, at most"] = (float((change + promised).max()), 0.0 if bound else None)
        return [{**common, "quantity": name, "value": value, "bound": limit} for name, (value, limit) in found.items()]


# The rate.

GAMMA, NOISE = 0.25, 0.5
ESTIMATES: dict[str, tuple[Callable[[int], int], Callable[[int], float | None] | None]] = {
    # The batch size as a function of T, and KL's memory as one of the number of rounds; no memory is eq. (6) itself.
    "eq. (6), b = T": (lambda T: T, None),
    f"eq. (6), b = {LEAST_BATCH}": (lambda T: LEAST_BATCH, None),
    "eq. (5), losses of all data": (lambda T: LEAST_BATCH, lambda rounds: None),
    "eq. (5), losses of one batch": (lambda T: LEAST_BATCH, lambda rounds: 0.0),
    "eq. (5), memory 0.98": (lambda T: LEAST_BATCH, lambda rounds: 0.98),
    "eq. (5), memory 1 - 1 / sqrt(S)": (lambda T: LEAST_BATCH, lambda rounds: 1 - rounds**-0.5),
}


ROBUST_SETTINGS = repr((STARTS, DESCENT_ROUNDS, GAMMA, NOISE))


@dataclass(frozen=True)
class Estimate:
    """The mean squared gradient of eq. (5) over T steps with eta = 1 / sqrt(T), by how the losses are estimated.

    A sample's loss is ``F_i(w) + NOISE (xi_1 v^T w + xi_2)``: unbiased in value and gradient, but the exponential of a
    batch's mean is not, and its bias falls with the batch alone. A moving average falls below it.
    """

    estimate: str
    T: int
    seed: int

    @property
    def cost(self) -> float:
        return self.T * 4 * (1 + ESTIMATES[self.estimate][0](self.T) / 10_000)

    def rows(self) -> list[Row]:
        problem, (size, memory) = RobustProblem(GAMMA), ESTIMATES[self.estimate]
        T, b, rounds, start = self.T, size(self.T), self.T // TAU, problem.synthetic.start
        eta, outer = T**-0.5, None if memory is None else KL(GAMMA, memory=memory(rounds))
        if memory is None:
            # Eq. (6) has the gradient of eq. (5) times exp(F / gamma) / gamma; at the start both steps are alike.
            eta *= GAMMA * math.exp(-float(problem.value(start)) / GAMMA)
        algorithm = ComFedL(
            problem=noisy(problem, literal=memory is None),
            outer=outer,
            lr=eta,
            local_steps=TAU,
            batch_size=b,
            outer_batch_size="all",
        )
        trace = Trace(start)
        data = problem.synthetic.data(range(problem.synthetic.clients))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The weights jump")
            fit({"w": start}, data, algorithm, rounds=rounds, seed=self.seed, eval_every=rounds, callbacks=[trace])
        squares = problem.gradient(torch.stack(trace.ws[:-1])).square().sum(dim=-1)
        common: Row = {"part": "estimate", "series": self.estimate, "T": T, "tau": TAU, "eta": T**-0.5, "b": b}
        common |= {"seed": self.seed, "bound": None}
        return [
            {**common, "quantity": "all rounds", "value": float(squares.mean())},
            {**common, "quantity": "last quarter", "value": float(squares[3 * len(squares) // 4 :].mean())},
        ]


def noisy(problem: RobustProblem, literal: bool) -> Composition:
    """The clients' noisy losses as the inner function, below exp(y / gamma), or y itself for a KL outside of it."""
    synthetic = problem.synthetic

    def inner(params: Params, batch: Batch) -> Tensor:
        i, w = int(batch[1][0]), params["w"]
        noise: Tensor = batch[0].mean(dim=0)
        return problem.losses(w)[i][None] + NOISE * (noise[0] * (synthetic.v @ w) + noise[1])

    def outer(y: Tensor, batch: Batch) -> Tensor:
        return (y[0] / GAMMA).exp() if literal else y[0]

    return Composition(inner, outer)
