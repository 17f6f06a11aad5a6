"""ComFedL: compositional federated learning, Algorithm 1 of the paper.

Huang, Li: Compositional federated learning: Applications in distributionally robust averaging and meta learning.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State, adapt_draws
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core import client_vector
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import Adapt, Adapted, Composition, CompositionObjective, LocalLoss, Objective
from comfedl.core.outer_functions import KL, Coupled, Identity, Outer, Separable
from comfedl.core.protocol import NUMBER, Batches, Data, Draw, Outcome
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.tree import Tree


class Compositional(Algorithm):
    """Algorithm 1 for any inner map and outer function, which subclasses define."""

    elementwise: ClassVar[bool] = True

    @property
    def g(self) -> Outer:
        """The outer function."""
        return Identity()

    @property
    def composition(self) -> Composition | None:
        """A user-defined two-level problem, in place of the inner map."""
        return None

    @property
    def outer_size(self) -> int | None:
        """Samples per step for the outer function of ``Adapt`` or of a composition; None is all."""
        return self.batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adapt, self.g  # noqa: B018 - runs their checks

    def init(self, model: Model, clients: int) -> State:
        state: State = {"model": model}
        if isinstance(self.g, Coupled):
            # Each client's last known loss; NaN until it participates.
            state["losses"] = client_vector.full(clients, torch.nan)
        return state

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        chosen = list(replies.clients)
        if isinstance(self.g, Coupled):
            # Weights among the participants alone; a cap or a quantile applies to these. Weights among all n clients,
            # scaled by n / m, would be unbiased but stall training: stale losses of clients not seen again stay high
            # while the model improves, and leave the participants almost no weight.
            seen = replies.numbers("loss")
            losses = client_vector.put(state["losses"], chosen, seen)
            weights, duals = self.g.weights(seen), known_weights(self.g, losses) if context.recorded else None
            state = {**state, "losses": losses}
        else:
            weights, duals = torch.full((len(chosen),), 1 / len(chosen), dtype=torch.float64), None
        return self.advance(state, replies, weights), Participation(chosen, weights, duals)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return self.g.objective(values)

    def explain(self, error: Diverged) -> str:
        return self.g.explain(error.loss, error.weight)

    def objective(self, learner: Learner) -> Objective:
        if self.composition is not None:
            return CompositionObjective(self.composition)
        return LocalLoss(learner) if self.adapt is None else Adapted(learner, self.adapt)

    @property
    def has_custom_problem(self) -> bool:
        return self.composition is not None

    def check(self, clients: int, participants: int) -> None:
        if isinstance(self.g, Coupled) and participants == 1 < clients:
            warnings.warn(
                f"With one client per round its weight is always 1, so {self.g} has no effect; set clients_per_round "
                "to 2 or more.",
                stacklevel=3,
            )
        wanted = self.g.effective_clients if isinstance(self.g, KL) else None
        if wanted is not None and wanted >= participants > 1:
            warnings.warn(
                f"effective_clients is {wanted:g} and {participants} clients take part in a round, so all get the same "
                "weight; use fewer effective_clients than participants for robust weights.",
                stacklevel=3,
            )

    @property
    def adaptation(self) -> tuple[float, int]:
        if self.adapt is None:
            return super().adaptation
        return self.adapt.lr, self.adapt.steps if self.personal_steps is None else self.personal_steps

    def draws(self) -> dict[str, Draw]:
        draws = super().draws()
        if self.adapt is not None:
            draws |= adapt_draws(self.adapt, self.batch_size, self.outer_size, self.local_steps)
        elif self.composition is not None:
            draws[Data.OUTER] = Draw("outer", self.outer_size, self.local_steps)
        return draws | (self.value_draws() if isinstance(self.g, Coupled) else {})

    def reply(self) -> dict[str, str]:
        return super().reply() | ({"loss": NUMBER} if isinstance(self.g, Coupled) else {})

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        # Only a separable outer scales the client's gradients; the slope of the identity is 1.
        slope = self.g.slope if isinstance(self.g, Separable) and not isinstance(self.g, Identity) else None
        trained = self.descend(learner, message["model"], batches, slope, state=state)
        reply: dict[str, Tree] = {"model": trained.model}
        if isinstance(self.g, Coupled):
            data, outer_data = batches[Data.VALUE_TRAIN][0], batches[Data.VALUE_OUTER][0]
            reply["loss"] = self.objective(learner).value(message["model"], data, outer_data)
        return Outcome(reply, self.kept(trained), trained.watched)


@dataclass(frozen=True)
class ComFedL(Compositional):
    """Minimise mean_i g(F_i(w)), where F_i is a client's loss, its loss after adapting, or your own composition.

    Args:
        inner: None for the local loss, ``Adapt(lr)`` for the loss after adapting to the client (meta-learning).
        outer: the outer function g: ``Identity()`` (the default), ``KL(gamma)``, ``Exp(gamma)``, ...
        problem: your own two-level problem, ``Composition(inner, outer)``, in place of ``inner``.
        outer_batch_size: b1, samples per step for the outer function of ``Adapt`` or ``problem``: a number, "same" as
            batch_size, or "all" of the client's outer data.
    """

    inner: Adapt | None = None
    outer: Outer | None = None
    problem: Composition | None = None
    outer_batch_size: int | str = "same"

    name: ClassVar[str] = "comfedl"
    paper: ClassVar[str] = "Huang and Li, Algorithm 1"
    goal: ClassVar[str] = "min_w (1/n) sum_i g_i(f_i(w)), eq. (1)"
    sends: ClassVar[str] = "down d; up d (+ 1 loss with a coupled outer such as KL)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, kind, example in (
            ("inner", Adapt, "Adapt(lr=0.05)"),
            ("outer", Outer, "KL(gamma=0.2)"),
            ("problem", Composition, "Composition(inner, outer)"),
        ):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{field} is {value!r}, but it must be None or like {example}.")
        if self.inner is not None and self.problem is not None:
            raise ConfigError("inner and problem are both given, but problem has its own inner map; give one of them.")
        if isinstance(self.outer_batch_size, str):
            checks.one_of("outer_batch_size", self.outer_batch_size, ("same", "all"))
        else:
            checks.at_least("outer_batch_size", self.outer_batch_size, 1)

    @property
    def adapt(self) -> Adapt | None:
        return self.inner

    @property
    def g(self) -> Outer:
        return self.outer or Identity()

    @property
    def composition(self) -> Composition | None:
        return self.problem

    @property
    def outer_size(self) -> int | None:
        if isinstance(self.outer_batch_size, str):
            return self.batch_size if self.outer_batch_size == "same" else None
        return self.outer_batch_size


def known_weights(outer: Coupled, losses: Tree) -> Tensor:
    """The weights of all clients whose loss is known, and 0 for the others."""
    values = client_vector.to_tensor(losses)
    known = ~values.isnan()
    weights = torch.zeros_like(values)
    weights[known] = outer.weights(values[known])
    return weights
