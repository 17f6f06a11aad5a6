"""ComFedL: compositional federated learning, Algorithm 1 of the paper.

Huang, Li: Compositional federated learning: Applications in distributionally robust averaging and meta learning.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.aggregation import STRONG_CAP, clip_factors
from comfedl.algorithms.base import Algorithm, State, adapt_draws
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.algorithms.private_release import check_sums, private_weights
from comfedl.core import client_vector
from comfedl.core.learner import Learner, Model, Params
from comfedl.core.objectives import Adapt, Adapted, Composition, CompositionObjective, LocalLoss, Objective
from comfedl.core.offset import Excess, Generalisation, Shrinkage
from comfedl.core.outer_functions import KL, Coupled, Identity, Outer, Separable, Tilt
from comfedl.core.privacy import Sums
from comfedl.core.protocol import NUMBER, Batches, Data, Draw, Outcome, Replies, Step
from comfedl.core.sums import Exponential, SiteWeight, Uniform
from comfedl.models.losses import Squared
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.toml import LATER
from comfedl.utils.tree import Tree

STEPS = ("plain", "safe")
PARAMS = ("model", "params")  # where a reply has the trained parameters
SQUARE = "square"  # in a reply, the mean of the squares of the samples' losses
BASELINES = "baselines"  # where the server's state has the clients' estimates of their best losses


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

    @property
    def safe(self) -> bool:
        """Whether the server's step is shortened to what the outer function's curvature allows."""
        return False

    @property
    def weighs_on_outer(self) -> bool:
        return isinstance(self.g, KL) and self.g.on == "outer"

    @property
    def remembered(self) -> float | None:
        """How much of a client's estimated loss stays from round to round; None measures it in every round.

        Losses on outer data are always measured: training does not see these data.
        """
        measures = self.weighs_on_outer or self.shrinks is not None
        return self.g.memory if isinstance(self.g, KL) and not measures else None

    @property
    def estimates(self) -> Excess | None:
        """The offset that clients estimate, if there is one."""
        offset = self.g.offset if isinstance(self.g, KL) else None
        return offset if isinstance(offset, Excess) and offset.estimated else None

    @property
    def shrinks(self) -> Shrinkage | None:
        """The offset that draws losses towards their mean, if it is that one."""
        offset = self.g.offset if isinstance(self.g, KL) else None
        return offset if isinstance(offset, Shrinkage) else None

    @property
    def needs_sample_losses(self) -> bool:
        return self.shrinks is not None

    @property
    def looks_back(self) -> bool:
        """Whether the server keeps the previous model, to predict how losses change."""
        return self.remembered is not None

    @property
    def reach(self) -> float:
        """The r of "a client moves by -r times its gradient": the learning rate times the number of steps for SGD."""
        return self.lr * (self.local_optimizer.reach(self.local_steps) or math.nan)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adapt, self.g  # noqa: B018 - runs their checks
        if self.safe and self.g.curvature is None:
            raise ConfigError(
                f'step is "safe", but {self.g} has no curvature that the server can know; use KL(gamma) (the '
                'normalised form of Exp), Tilt(t) or Identity(), or step = "plain". For Power, QFedAvg estimates it.'
            )
        if (self.safe or self.looks_back) and self.local_optimizer.reach(1) is None:
            what = "the safe step" if self.safe else "memory" if self.name != "robust" else self.name
            raise ConfigError(
                f"client_optimizer is {self.local_optimizer.name!r}, but {what} takes clients' updates for gradients; "
                'use "sgd" at the clients (momentum and weight decay are fine), and adaptive steps in server_optimizer.'
            )

        if self.shrinks is not None and (self.weighs_on_outer or self.adapt or self.composition is not None):
            raise ConfigError(
                "The offset Shrinkage is for losses on train data, whose variance each client knows; leave out "
                'on = "outer", inner and problem, or use another offset.'
            )

    def init(self, model: Model, clients: int) -> State:
        state: State = {"model": model}
        if isinstance(self.g, Coupled):
            # Each client's last known loss; NaN until it participates.
            state["losses"] = client_vector.full(clients, torch.nan)
        if self.looks_back:
            state["previous"] = model["params"]
        if self.estimates is not None:
            state[BASELINES] = client_vector.full(clients, torch.nan)
        return state

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        model, everybody = state["model"], context.participants == context.clients
        remembers = self.remembered is not None and everybody
        step = "measured" if self.remembered is not None and not everybody else "train"
        participants = context.sample()
        if self.estimates is not None:
            state, participants = self.estimate(state, context, participants)
        replies = context.ask(step, participants, {"model": model})
        chosen = list(replies.clients)
        if not isinstance(self.g, Coupled):
            if context.release is not None:
                weights = context.release.equal_weights(len(chosen))
            else:
                weights = torch.full((len(chosen),), 1 / len(chosen), dtype=torch.float64)
            return self.advance(state, replies, weights), Participation(chosen, weights)
        losses, table = replies.numbers("loss"), state["losses"]
        updates = self.measured_updates(replies, model["params"], state["previous"]) if "previous" in state else None
        if remembers:
            assert updates is not None and self.remembered is not None
            expected = client_vector.to_tensor(table)[chosen] + updates.change
            share = max(1 - self.remembered, 1 / context.number)  # of the new loss; at first a plain mean
            losses = torch.where(expected.isnan(), losses, expected + share * (losses - expected))
            table = client_vector.full(context.clients, torch.nan)  # who is absent now starts anew when back
        table = client_vector.put(table, chosen, losses)
        # Weights among the participants alone; a cap or a quantile applies to these. Weights among all n clients,
        # scaled by n / m, would be unbiased but stall training: stale losses of clients not seen again stay high
        # while the model improves, and leave the participants almost no weight.
        if self.shrinks is not None:
            measured_on = np.minimum(context.sizes[chosen], self.loss_samples or np.iinfo(np.int64).max)
            offsets: Tensor | None = self.shrinks.towards_mean(losses, replies.numbers(SQUARE), measured_on)
        else:
            offsets = self.offsets(state, chosen, context.engine.names, context.sizes)
        shifted, shrink, bound, duals = losses if offsets is None else losses + offsets, None, None, None
        if context.release is not None:
            assert isinstance(self.g, KL)
            state, weights, bound = private_weights(self.g, state, self.foreseen(shifted, updates), context.release)
        else:
            weights, shrink = self.weigh(model, replies, shifted, updates)
            weights = self.limited(weights, chosen)
        if context.recorded and self.shrinks is None:  # else what is known of absent clients' losses is too little
            everyone = self.offsets(state, range(context.clients), context.engine.names, context.sizes)
            duals = known_weights(self.g, table if everyone is None else client_vector.to_tensor(table) + everyone)
        state = {**state, "losses": table}
        if updates is not None:
            state["previous"] = model["params"]
        return self.advance(state, replies, weights, shrink, bound), Participation(chosen, weights, duals)

    def check_privacy(self, model: Model, sampled: bool) -> Sums:
        check_sums(self, model, sampled)
        if not isinstance(self.g, Coupled):
            return Sums()
        if not isinstance(self.g, KL) or self.g.cap is None or self.g.gamma is None:
            raise ConfigError(
                f"privacy is given, but with {self.g} one client could have any weight; use KL with gamma and cap, "
                "such as cap = 4, the largest weight of a client as a multiple of uniform."
            )
        if self.g.offset is not None and type(self.g.offset) not in (Generalisation, Excess):
            raise ConfigError(
                f"privacy is given, but the offset {type(self.g.offset).__name__} may be from other clients' losses or "
                "sizes, which are not private; use Generalisation, Excess with a baseline for every client, or none."
            )
        if self.safe or self.estimates is not None:
            what = 'step = "safe" uses lengths of updates' if self.safe else "Excess without baseline asks for losses"
            raise ConfigError(
                f"privacy is given, but {what} that are not private; use "
                + ('step = "plain".' if self.safe else "a baseline for every client, or another offset.")
            )
        return Sums(sides=1, most=self.g.cap)  # and the sum of the weights

    def foreseen(self, losses: Tensor, updates: Updates | None) -> Tensor:
        """The losses that weights under privacy follow; of each client by its own reply alone."""
        return losses

    def measured_updates(self, replies: Replies, params: Params, previous: Params) -> Updates:
        """What the server can tell of the clients' losses, from updates that are clipped like those it averages."""
        return measure(replies, params, previous, self.reach, self.clip_update_norm if self.clips else math.inf)

    def weigh(
        self, model: Model, replies: Replies, losses: Tensor, updates: Updates | None
    ) -> tuple[Tensor, Callable[[Params], float] | None]:
        """The clients' weights, and the function for the length of the step (see ``advance``)."""
        assert isinstance(self.g, Coupled)
        weights = self.g.weights(losses)
        return weights, safe_step(self, model, replies, weights) if self.safe else None

    def estimate(self, state: State, context: RoundContext, participants: list[int]) -> tuple[State, list[int]]:
        """Ask those participants for their baseline whose baseline is not known; who does not answer is left out."""
        unknown = client_vector.to_tensor(state[BASELINES])[participants].isnan().tolist()
        new = [client for client, is_new in zip(participants, unknown, strict=True) if is_new]
        if not new:
            return state, participants
        replies = context.ask("baseline", new, {"model": state["model"]}, others=len(participants) - len(new))
        answered = list(replies.clients)
        if answered:
            found = client_vector.put(state[BASELINES], answered, replies.numbers("baseline"))
            state = {**state, BASELINES: found}
        silent = {*new} - {*answered}
        return state, [client for client in participants if client not in silent]

    def offsets(
        self, state: State, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]
    ) -> Tensor | None:
        """What is added to these clients' losses, NaN where it is not known yet; None if there is no offset."""
        if self.estimates is not None:
            return -client_vector.to_tensor(state[BASELINES])[torch.as_tensor(clients, dtype=torch.int64)]
        offset = self.g.offset if isinstance(self.g, KL) and self.shrinks is None else None
        return None if offset is None else offset.of(clients, names, sizes)

    def shift(
        self, state: State, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]
    ) -> Tensor | None:
        found = self.offsets(state, clients, names, sizes)
        if found is None or not bool(found.isnan().any()):
            return found
        # Of clients that have not taken part yet, the best guess is the mean of those that have.
        return torch.where(found.isnan(), -client_vector.to_tensor(state[BASELINES]).nanmean(), found)

    def site_weight(self) -> SiteWeight:
        if self.safe:
            raise self.needs_each('step = "safe" compares the clients\' updates')
        if not isinstance(self.g, Coupled):
            return Uniform()
        if isinstance(self.g, Tilt):
            return Exponential(1 / self.g.t)
        if not isinstance(self.g, KL):
            raise self.needs_each(f"the weights of {type(self.g).__name__} depend on all losses")
        if self.g.gamma is None:
            raise self.needs_each("effective_clients depends on all losses")
        if self.g.offset is not None:
            raise self.needs_each("the server adds an offset to each client's loss")
        return Exponential(self.g.gamma, self.g.cap)

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

    def check_names(self, names: Sequence[str]) -> None:
        if isinstance(self.g, KL) and self.g.offset is not None:
            self.g.offset.check_names(names)

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

    def capped(self, outer: Outer) -> Outer:
        """The outer function with the strong defence's cap, unless it has one of its own."""
        if self.defence is None or not isinstance(outer, KL) or outer.cap is not None or outer.gamma is None:
            return outer
        return replace(outer, cap=STRONG_CAP)

    @property
    def weight_cap(self) -> float | None:
        own = self.g.cap if isinstance(self.g, KL) else None
        return super().weight_cap if own is None or self.defence is None else own

    def check_aggregate(self, participants: int) -> None:
        super().check_aggregate(participants)
        follows = (isinstance(self.g, KL) and self.g.cap is None) or (isinstance(self.g, Tilt) and self.g.t > 0)
        if self.rule != "mean" and self.weight_cap is None and follows:
            fix = "give it a cap" if isinstance(self.g, KL) and self.g.gamma is not None else "bound the weights"
            warnings.warn(
                f'aggregate = "{self.rule}" uses the weights of {type(self.g).__name__}, so a client that reports a '
                f'false loss gets nearly all the weight and defeats the rule; {fix}, or use defence = "strong".',
                stacklevel=3,
            )

    @property
    def adaptation(self) -> tuple[float, int]:
        if self.adapt is None:
            return super().adaptation
        return self.adapt.lr, self.adapt.steps if self.personal_steps is None else self.personal_steps

    def training_draws(self) -> dict[str, Draw]:
        """The batches of local training alone."""
        draws = super().draws()
        if self.adapt is not None:
            draws |= adapt_draws(self.adapt, self.batch_size, self.outer_size, self.local_steps)
        elif self.composition is not None:
            draws[Data.OUTER] = Draw("outer", self.outer_size, self.local_steps, transformed=True)
        return draws

    def draws(self) -> dict[str, Draw]:
        measures = isinstance(self.g, Coupled) and self.remembered is None
        return self.training_draws() | (self.value_draws() if measures else {})

    def value_draws(self) -> dict[str, Draw]:
        draws = super().value_draws()
        if self.weighs_on_outer and self.adapt is None and self.composition is None:
            draws[Data.VALUE_TRAIN] = draws[Data.VALUE_OUTER]  # the local loss has no outer map to judge it there
        return draws

    def steps(self) -> dict[str, Step]:
        steps = super().steps()
        if self.remembered is not None:
            draws = self.draws() | self.value_draws()
            same = {name: replace(draw, purpose=draw.purpose or f"train/{name}") for name, draw in draws.items()}
            steps["measured"] = Step(self.measured, same, noise="train", sends=self.reply())
        if self.estimates is not None:
            more = {name: replace(draw, count=self.estimates.steps) for name, draw in self.training_draws().items()}
            draws = more | self.value_draws()
            steps["baseline"] = Step(self.baseline, draws, sends={"baseline": NUMBER}, scheduled=False)
        return steps

    def reply(self) -> dict[str, str]:
        measured = {"loss": NUMBER} if isinstance(self.g, Coupled) else {}
        return super().reply() | measured | ({SQUARE: NUMBER} if self.shrinks is not None else {})

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        # Only a separable outer scales the client's gradients; the slope of the identity is 1.
        slope = self.g.slope if isinstance(self.g, Separable) and not isinstance(self.g, Identity) else None
        trained = self.descend(learner, message["model"], batches, slope, state=state)
        reply: dict[str, Tree] = {"model": trained.model}
        if Data.VALUE_TRAIN in batches:
            reply["loss"] = self.value(learner, message["model"], batches)
            if self.shrinks is not None:
                assert learner.loss_function is not None
                square = {SQUARE: Squared(learner.loss_function)}
                reply |= learner.means(message["model"], batches[Data.VALUE_TRAIN][0], square)
        elif isinstance(self.g, Coupled):  # with memory: the first batch's, at the received model
            reply["loss"] = trained.watched["loss"][0]
        return Outcome(reply, self.kept(trained), trained.watched)

    def measured(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Local training with a measured loss, for those methods with memory whose participants change."""
        return self.train(learner, message, state, batches)

    def baseline(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """About the best loss that the client can have: the received model's, after training on the client's data."""
        assert self.estimates is not None
        alone = copy.copy(self)
        object.__setattr__(alone, "lr", self.lr if self.estimates.lr is None else self.estimates.lr)
        trained = alone.descend(learner, message["model"], batches, state=state)
        return Outcome({"baseline": self.value(learner, trained.model, batches)}, watched=trained.watched)

    def value(self, learner: Learner, model: Model, batches: Batches) -> Tensor:
        """The client's loss, on the data that the weights are measured on."""
        return self.objective(learner).value(model, batches[Data.VALUE_TRAIN][0], batches[Data.VALUE_OUTER][0])


@dataclass(frozen=True)
class ComFedL(Compositional):
    """Minimise mean_i g(F_i(w)), where F_i is a client's loss, its loss after adapting, or your own composition.

    Args:
        inner: None for the local loss, ``Adapt(lr)`` for the loss after adapting to the client (meta-learning).
        outer: the outer function g: ``Identity()`` (the default), ``KL(gamma)``, ``Exp(gamma)``, ...
        problem: your own two-level problem, ``Composition(inner, outer)``, in place of ``inner``.
        outer_batch_size: b1, samples per step for the outer function of ``Adapt`` or ``problem``: a number, "same" as
            batch_size, or "all" of the client's outer data.
        step: how far the server moves: "plain" is Algorithm 1's averaging, "safe" shortens the step by what g's
            curvature allows, so that the weights do not jump from client to client (KL and Tilt).
    """

    inner: Adapt | None = None
    outer: Outer | None = None
    problem: Composition | None = None
    outer_batch_size: int | str = "same"
    step: str = field(default="plain", metadata=LATER)

    name: ClassVar[str] = "comfedl"
    paper: ClassVar[str] = "Huang and Li, Algorithm 1"
    goal: ClassVar[str] = "min_w (1/n) sum_i g_i(f_i(w)), eq. (1)"
    sends: ClassVar[str] = "down d; up d (+ 1 loss with a coupled outer such as KL)"

    def __post_init__(self) -> None:
        checks.one_of("step", self.step, STEPS)
        super().__post_init__()
        for name, kind, example in (
            ("inner", Adapt, "Adapt(lr=0.05)"),
            ("outer", Outer, "KL(gamma=0.2)"),
            ("problem", Composition, "Composition(inner, outer)"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}, but it must be None or like {example}.")
        if self.inner is not None and self.problem is not None:
            raise ConfigError("inner and problem are both given, but problem has its own inner map; give one of them.")
        if isinstance(self.outer_batch_size, str):
            checks.one_of("outer_batch_size", self.outer_batch_size, ("same", "all"))
        else:
            checks.at_least("outer_batch_size", self.outer_batch_size, 1)

    @property
    def safe(self) -> bool:
        return self.step == "safe"

    @property
    def adapt(self) -> Adapt | None:
        return self.inner

    @cached_property
    def g(self) -> Outer:
        return self.capped(self.outer or Identity())

    @property
    def composition(self) -> Composition | None:
        return self.problem

    def for_sums(self) -> Self:
        """Without memory, which is of each client's loss: all losses are measured in every round."""
        return replace(self, outer=replace(self.outer, memory=None)) if isinstance(self.outer, KL) else self

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


def safe_step(method: Compositional, model: Model, replies: Replies, weights: Tensor) -> Callable[[Params], float]:
    """A function from the aggregated update to the factor ``1 / (1 + c V / reach)`` that is safe for it.

    The objective's curvature is the clients' own, which the learning rate accounts for, plus c times the variance V of
    their gradients under the weights. Updates are gradients times the reach, so the server knows V. With a robust
    aggregate V is a weighted median, which a few bad clients cannot move far either.
    """
    curvature, origin = method.g.curvature, model["params"]
    assert curvature is not None

    def factor(update: Params) -> float:
        if method.rule == "mean":
            scale = method.shortening(replies, PARAMS, origin)
            squares = torch.where(scale > 0, replies.squared_distances(PARAMS, origin) * scale**2, 0.0)
            variance = float((weights * squares).sum()) - squared_norm(update)
        else:
            squares, order = replies.squared_distances(PARAMS, tree.map(torch.add, origin, update)).sort()
            variance = float(squares[int(torch.searchsorted(weights[order].cumsum(0), weights.sum() / 2))])
        return 1 / (1 + curvature * max(0.0, variance) / method.reach)

    return factor


class Updates(NamedTuple):
    """What the server can tell of the clients' losses from their updates, which are -reach times their gradients."""

    change: Tensor
    """How much each client's loss has changed with the server's last move, to first order.

    Without it moving averages lag behind, and with momentum at the server they swing. It is the correction of SCSC
    (Chen et al., 2021), but costs no second pass over data.
    """
    gram: Tensor | None
    """The clipped updates' inner products over the reach; None for more than ``FEW`` clients."""
    scale: Tensor
    """The factors that clip them."""


FEW = 64
TRUSTED = 10  # of a client's own loss an update tells up to this many times the median length


def measure(replies: Replies, params: Params, previous: Params, reach: float, clip: float | None = math.inf) -> Updates:
    """Compare the clients' updates with each other and with the server's last move.

    They are clipped to the length ``clip``, or their median for None. What one tells of its own client's loss moves no
    other's weight, so that only its size is bounded, lest the memory of that loss be lost.
    """
    moved = tree.map(torch.sub, params, previous)
    scale, bounded = None, torch.ones(len(replies.clients), dtype=torch.float64)
    if clip != math.inf:
        lengths = replies.squared_distances(PARAMS, params).sqrt()
        scale, bounded = clip_factors(lengths, clip), clip_factors(lengths, None, TRUSTED)
    if len(replies.clients) <= FEW:
        gram, along = replies.gram(PARAMS, params, moved, scale)
        if scale is None:
            return Updates(-along / reach, gram / reach, bounded)
        bounded = torch.where(scale > 0, bounded / scale, 0.0)
        return Updates(-along * bounded / reach, gram / reach, scale)
    products = scaled(replies.products(PARAMS, params, moved), bounded)
    return Updates(-products / reach, None, bounded if scale is None else scale)


def scaled(numbers: Tensor, factors: Tensor) -> Tensor:
    """The numbers, which may be infinite where the factor is 0, times the factors."""
    return torch.where(factors > 0, numbers * factors, 0.0)


def squared_norm(params: Params) -> float:
    """The squared norm of all parameters together."""
    return sum(float(part.double().square().sum()) for part in tree.leaves(params))
