"""The measurements on the synthetic problem; each point runs ``fit`` with the library's ComFedL.

A callback records the model after each round; the problem's functions record each local step in a ``StepLog``. The
engine runs the problem like any user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfedl.algorithms.comfedl import ComFedL
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.fit import fit
from comfedl_reproduction.theory.problem import (
    ANGLES,
    F64,
    LEAST_BATCH,
    OFFSETS,
    START,
    TARGETS,
    LocalStep,
    StepLog,
    Synthetic,
)

Row = dict[str, Any]

TAU = 4
# The batch size as a function of T, and the number of participants. The theorem's rate requires b = T.
LAWS: dict[str, tuple[Callable[[int], int], int]] = {
    "b = T": (lambda T: T, 4),
    "b = T (2 of 4 clients)": (lambda T: T, 2),
    "b = sqrt(T)": (math.isqrt, 4),
    f"b = {LEAST_BATCH}": (lambda T: LEAST_BATCH, 4),
}
# Laws that differ only in long runs: the theorem's, and one with a constant bias.
LONG = ("b = T", f"b = {LEAST_BATCH}")
DRIFT_BATCH, DRIFT_ROUNDS = 64, 10
# The number of copies of each client that measure the bias at once.
COPIES = 64
# The bias is measured near the minimiser, where it limits how small the gradient can get.
NEAR = (0.5, 0.4)


@dataclass(frozen=True)
class Rate:
    """The mean squared gradient over T steps with eta = 1 / sqrt(T)."""

    law: str
    T: int
    seed: int

    @property
    def cost(self) -> float:
        """An estimate in local steps; steps with large batches count more."""
        size, clients = LAWS[self.law]
        return self.T * clients * (1 + size(self.T) / 10_000)

    def rows(self) -> list[Row]:
        problem, (size, participants) = Synthetic(), LAWS[self.law]
        T, eta, b = self.T, self.T**-0.5, size(self.T)
        trace = Trace(problem.start)
        run(problem, trace, eta, TAU, b, T // TAU, self.seed, participants)
        squares = problem.gradient(torch.stack(trace.ws[:-1])).square().sum(dim=-1)
        gap = float(problem.objective(problem.start)) - problem.lower_bound()
        known = problem.constants()
        common = {"part": "rate", "series": self.law, "T": T, "tau": TAU, "eta": eta, "b": b, "seed": self.seed}
        mean, late = float(squares.mean()), float(squares[len(squares) // 2 :].mean())
        return [
            {**common, "quantity": "all rounds", "value": mean, "bound": known.theorem(gap, T, TAU, eta, b)},
            {
                **common,
                "quantity": "all rounds (as printed)",
                "value": mean,
                "bound": known.printed(gap, T, TAU, eta, b),
            },
            {**common, "quantity": "second half of the rounds", "value": late, "bound": None},
        ]


@dataclass(frozen=True)
class Drift:
    """How far models and directions move away from the start of a round: Lemmas 2 and 3, and the descent inequality.

    Each value is a mean over rounds, at the local step where it is largest.
    """

    tau: int
    eta: float
    seed: int

    @property
    def cost(self) -> float:
        return DRIFT_ROUNDS * self.tau * 4

    def rows(self) -> list[Row]:
        problem, log = Synthetic(), StepLog()
        tau, eta, b = self.tau, self.eta, DRIFT_BATCH
        trace = Trace(problem.start, log)
        run(problem, trace, eta, tau, b, DRIFT_ROUNDS, self.seed, problem.clients)
        began, ended = torch.stack(trace.ws[:-1]), torch.stack(trace.ws[1:])
        # Local models [rounds, tau, clients, d] and their averages [rounds, tau + 1, d], which end with the server's.
        own = torch.stack([stack_steps(steps, problem.clients, tau).w for steps in trace.steps]).transpose(1, 2)
        average = torch.cat([own.mean(dim=2), ended[:, None]], dim=1)
        direction = (average[:, :-1] - average[:, 1:]) / eta
        at_start, values = problem.gradient(began)[:, None], problem.objective(average)
        known = problem.constants()
        descent = values.diff(dim=1) + eta * squared(at_start)
        found = {
            "drift of the average": (squared(average - began[:, None]), known.drift(tau, eta)),
            "drift of the clients": (squared(own - began[:, None, None]).mean(dim=2), known.drift(tau, eta)),
            "spread of the clients": (squared(own - average[:, :-1, None]).mean(dim=2), known.drift(tau, eta)),
            "error of the direction": (squared(direction - at_start), known.error(tau, eta, b)),
            "descent": (descent, known.descent(tau, eta, b)),
        }
        common = {"part": "drift", "series": "", "tau": tau, "eta": eta, "b": b, "seed": self.seed}
        return [
            {**common, "quantity": name, "value": float(value.mean(dim=0).max()), "bound": bound}
            for name, (value, bound) in found.items()
        ]


@dataclass(frozen=True)
class Bias:
    """The error of a direction against the gradient at one model, as rms error and as bias, for batch size b.

    For the bias, the part of each direction that is linear in the noise is subtracted first, as a control variate: its
    mean is 0, and the rest is of the order of the bias itself, while the whole is of the order of its square root.
    """

    b: int
    repeats: int
    seed: int

    @property
    def cost(self) -> float:
        return self.repeats * COPIES * 8 * (1 + self.b / 10_000)

    def rows(self) -> list[Row]:
        problem, b = Synthetic(), self.b
        w, known = torch.tensor(NEAR, dtype=F64), problem.constants()
        who = [i for i in range(problem.clients) for _ in range(COPIES)]
        exact, inner = problem.client_gradients(w)[who], problem.inner_mean(w)[who]
        sums, missed, inner_missed = [], [], []
        for repeat in range(self.repeats):
            log = StepLog()
            trace = Trace(w, log)
            # Two local steps: the difference of the models at which they start is the direction of the first.
            run(problem, trace, 1.0, 2, b, 1, self.seed * self.repeats + repeat, len(who), who)
            first = stack_steps(trace.steps[0], len(who), 2)
            outer_noise = torch.stack(trace.outer_noise[0][: 2 * len(who)]).view(len(who), 2, 1)[:, 0]
            direction = first.w[:, 0] - first.w[:, 1]
            linear = [problem.linear_part(w, i, first.noise[k, 0], outer_noise[k]) for k, i in enumerate(who)]
            sums.append((direction - exact - torch.stack(linear)).mean(dim=0))
            missed.append(squared(direction - exact).mean())
            inner_missed.append(squared(first.y[:, 0] - inner).mean())
        roots = {
            "inner value rms": (inner_missed, known.sigma2 / math.sqrt(b)),
            "direction rms": (missed, math.sqrt(known.error(0, 0.0, b))),
        }
        common = {"part": "bias", "series": "", "b": b, "seed": self.seed}
        rows = [
            {**common, "quantity": name, "value": math.sqrt(float(torch.stack(found).mean())), "bound": bound}
            for name, (found, bound) in roots.items()
        ]
        bias, limit = torch.stack(sums).mean(dim=0), problem.bias_limit(w) / b
        rows.append({**common, "quantity": "direction bias", "value": float(bias.norm()), "bound": None})
        rows.append({**common, "quantity": "direction bias (Taylor)", "value": float(limit.norm()), "bound": None})
        return rows


# Everything else that determines a point's numbers: points stored under other settings are not reused.
SETTINGS = repr(
    (Synthetic().constants(), ANGLES, OFFSETS, TARGETS, START, TAU, DRIFT_BATCH, DRIFT_ROUNDS, COPIES, NEAR)
)


class Trace(Callback):
    """Records the server's w at the start and after every round, and the local steps in between."""

    def __init__(self, start: Tensor, log: StepLog | None = None) -> None:
        self.ws, self.log = [start], log
        self.steps: list[list[LocalStep]] = []
        self.outer_noise: list[list[Tensor]] = []

    def settled(self, snapshot: Snapshot) -> None:
        self.ws.append(snapshot.state["model"]["params"]["w"].clone())
        if self.log is not None:
            self.steps.append(self.log.steps)
            self.outer_noise.append(self.log.outer_noise)
            self.log.steps, self.log.outer_noise = [], []


def run(
    problem: Synthetic,
    trace: Trace,
    eta: float,
    tau: int,
    b: int,
    rounds: int,
    seed: int,
    participants: int,
    who: list[int] | None = None,
) -> None:
    """Run ComFedL from the start of the trace; ``who`` gives the functions of each client by index."""
    algorithm = ComFedL(problem=problem.composition(trace.log), lr=eta, local_steps=tau, batch_size=b)
    fit(
        {"w": trace.ws[0]},
        problem.data(range(problem.clients) if who is None else who),
        algorithm,
        rounds=rounds,
        seed=seed,
        clients_per_round=participants,
        eval_every=rounds,
        callbacks=[trace],
    )


def stack_steps(steps: list[LocalStep], participants: int, tau: int) -> LocalStep:
    """A round's local steps as tensors [participants, tau, ...], without those of an evaluation."""
    steps = steps[: participants * tau]
    who = [steps[k].client for k in range(0, len(steps), tau)]
    assert [step.client for step in steps] == [i for i in who for _ in range(tau)], "clients run one after another"

    def stack(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).view(participants, tau, -1)

    return LocalStep(-1, *(stack([getattr(step, name) for step in steps]) for name in ("w", "y", "noise")))


def squared(x: Tensor) -> Tensor:
    """The squared norm of each row."""
    return x.square().sum(dim=-1)
