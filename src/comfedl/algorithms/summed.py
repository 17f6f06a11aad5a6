"""Any method whose weights a site can compute itself, as rounds of sums: what runs under secure aggregation.

The clients' steps are the method's own. The server learns ``sum_i u_i`` and ``sum_i u_i (w_i - w)``, and moves by their
ratio with the method's optimiser. For KL, u_i = exp(f_i / gamma - c), with c public from the round before; c cancels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Model
from comfedl.core.protocol import Step
from comfedl.core.sums import REFERENCE, WHOLE, BySamples, SiteWeight, SummedReplies
from comfedl.utils.errors import BadReply, ConfigError, Diverged
from comfedl.utils.tree import Tree

STEPS = ("train", "evaluate", "personal")
TRIES = 60  # to find a reference, first in growing strides
STRIDE = 5.0
NEAR = 2.0  # with a cap, the reference is near enough if the mean weight is within this factor of 1


@dataclass(frozen=True)
class Summed(Algorithm):
    """A method that learns sums of its clients' replies alone.

    Args:
        method: the method; its server must need no more (``Algorithm.site_weight``).
    """

    method: Algorithm = field(kw_only=False)

    name: ClassVar[str] = "summed"
    paper: ClassVar[str] = "Bonawitz et al., CCS 2017"
    goal: ClassVar[str] = "the method's"
    sends: ClassVar[str] = "down d; up d in fixed point"

    @classmethod
    def of(cls, method: Algorithm) -> Self:
        """The method as rounds of sums.

        Raises:
            ConfigError: its server needs each client's reply.
        """
        method.check_sums()
        return cls(method.for_sums())

    @property
    def weight(self) -> SiteWeight:
        """The weight that a site gives itself."""
        return self.method.site_weight()

    def init(self, model: Model, clients: int) -> State:
        return {"model": model, REFERENCE: torch.tensor(math.nan, dtype=torch.float64)}

    def initial_state(self, model: Model, clients: int) -> State:
        whole = self.method.initial_state(model, clients)
        own = self.method.init(model, clients).keys()  # what the method knows of each client is not known here
        return {**{name: part for name, part in whole.items() if name not in own}, **self.init(model, clients)}

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        participants: Sequence[int] = context.sample()
        weight, reference, whole = self.weight, self.reference(state, context), False
        if weight.follows_losses and math.isnan(reference):
            reference, participants = self.find_reference(state, context, participants, reference, whole)
            whole = self._capped  # else the sum was of the losses themselves, and not one that training repeats
        found = self._ask("train", state, context, participants, reference, whole)
        if weight.follows_losses and self._is_far(found):  # the losses have moved too far since the last round
            reference, participants = self.find_reference(state, context, found.clients, reference, whole=True)
            found = self._ask("train", state, context, participants, reference, whole=True)
        if found.model is None:
            raise self._lost(context)
        after = self.method.advance_to(state, found.model)
        if weight.follows_losses:
            reference += math.log(found.mean_weight)
        after = {**after, REFERENCE: torch.tensor(reference, dtype=torch.float64)}
        if found.clipped:
            warnings.warn(
                f"Round {context.number}: {found.clipped} numbers of the sites' updates were too large and were cut; "
                "use a larger clip in secure_aggregation, or a smaller lr.",
                BadReply,
                stacklevel=2,
            )
        count = len(found.clients)
        return after, Participation(found.clients, torch.full((count,), 1 / count, dtype=torch.float64))

    def reference(self, state: State, context: RoundContext) -> float:
        """The public number of this round's weights."""
        if isinstance(self.weight, BySamples):
            return float(context.sizes.max())
        return float(state[REFERENCE])  # NaN in the first round, and where weights are uniform

    def find_reference(
        self, state: State, context: RoundContext, participants: Sequence[int], reference: float, whole: bool
    ) -> tuple[float, Sequence[int]]:
        """A reference at which the mean weight is near 1, from sums of the losses' exponentials, and whose they were.

        All sums are over the sites of the first, or, with ``whole``, over exactly these participants.
        """
        low, high, stride = -math.inf, math.inf, STRIDE
        for _ in range(TRIES):
            found = self._ask("evaluate", state, context, participants, reference, whole)
            participants, whole = found.clients, True
            if math.isnan(reference):
                reference = found.value / self._gamma
                if not self._capped:  # c cancels, and the round sees whether it is near enough
                    return reference, participants
            elif not self._is_far(found):
                reference += math.log(found.mean_weight)
                if 1 / NEAR <= found.mean_weight <= NEAR or not found.bounded:
                    return reference, participants
            else:  # bisection, once it is between two known bounds
                low, high = (reference, high) if found.bounded else (low, reference)
                stride *= 2
                if math.isinf(high - low):
                    reference += stride if found.bounded else -stride
                else:
                    reference = (low + high) / 2
        raise self._lost(context)

    def _lost(self, context: RoundContext) -> ConfigError:
        if not self.weight.follows_losses:
            return ConfigError(
                f"Round {context.number}: the sites' weights do not add up to a number above 0, so some site was "
                "told or sent something else than the others; resume, and find out which site differs."
            )
        return ConfigError(
            f"Round {context.number}: the sites' losses differ by so many times gamma = {self._gamma:g} that their "
            "weights cannot be summed in fixed point; use a larger gamma, or leave secure aggregation out."
        )

    @property
    def _gamma(self) -> float:
        return float(self.weight.gamma)  # type: ignore[attr-defined]

    def _is_far(self, found: SummedReplies) -> bool:
        """Whether the weights are too small for their sum to be exact, or cut without a cap."""
        return found.mean_weight < found.finest or (found.bounded > 0 and not self._capped)

    @property
    def _capped(self) -> bool:
        return getattr(self.weight, "cap", None) is not None

    def _ask(
        self,
        step: str,
        state: State,
        context: RoundContext,
        participants: Sequence[int],
        reference: float,
        whole: bool,
    ) -> SummedReplies:
        """The sums of a step; ``whole`` is whether they are of no use unless all of these participants are in them."""
        message = {"model": state["model"], REFERENCE: torch.tensor(reference, dtype=torch.float64)}
        if whole:
            message[WHOLE] = torch.tensor(1)
        found = context.ask(step, participants, message)
        assert isinstance(found, SummedReplies)
        return found

    # The rest is the method's.

    def check(self, clients: int, participants: int) -> None:
        self.method.check(clients, participants)

    def check_names(self, names: Sequence[str]) -> None:
        self.method.check_names(names)

    def check_state(self, before: State, after: State) -> None:
        self.method.check_state(before, after)

    def check_rounds(self, rounds: int) -> None:
        self.method.check_rounds(rounds)

    def at_round(self, number: int) -> Self:
        scheduled = self.method.at_round(number)
        return self if scheduled is self.method else replace(self, method=scheduled)

    def reported(self, state: State) -> Model:
        return self.method.reported(state)

    def evaluation(self, state: State) -> dict[str, Tree]:
        return {**self.method.evaluation(state), REFERENCE: state[REFERENCE]}

    def explain(self, error: Diverged) -> str:
        return self.method.explain(error)

    def initial_client_state(self, model: Model) -> Tree:
        return self.method.initial_client_state(model)

    def steps(self) -> dict[str, Step]:
        return {name: step for name, step in self.method.steps().items() if name in STEPS}

    @property
    def weighs_on_outer(self) -> bool:
        return self.method.weighs_on_outer

    @property
    def needs_sample_losses(self) -> bool:
        return self.method.needs_sample_losses

    @property
    def has_custom_problem(self) -> bool:
        return self.method.has_custom_problem
