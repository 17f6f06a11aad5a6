"""The base class of all methods: hyperparameters, client steps, and a server round that runs them.

An algorithm does not depend on the engine. Its server state is a tree of tensors, passed in and returned.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.aggregation import DEFENCES, Aggregation
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.algorithms.private_release import PrivateRelease
from comfedl.algorithms.summable import Summable
from comfedl.core import optim, schedule
from comfedl.core.learner import Batch, Learner, Model, Params, Slope
from comfedl.core.objectives import Adapt, LocalLoss, Objective, gradient
from comfedl.core.optim import SGD, Adagrad, Adam, AdamW, ClientOptimizer, Yogi
from comfedl.core.privacy import Sums
from comfedl.core.protocol import MODEL, NUMBER, NUMBERS, Batches, Data, Draw, Outcome, Replies, Step
from comfedl.core.robust_aggregation import RULES
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.tree import Tree

State = dict[str, Tree]
# The held-out splits, and the outer data for each.
HELD_OUT = {Data.VALIDATION: Data.OUTER_OF_VALIDATION, Data.TEST: Data.OUTER_OF_TEST}
PLAIN = SGD()
# The optimisers' places in the server's and in a client's state.
SERVER_OPTIMIZER, OPTIMIZER = "server optimizer", "optimizer"
AVERAGE = "server average"  # the place of the average of the server's models


class Descent(NamedTuple):
    """The result of local training: the model, the loss and weight of every step, and the optimiser's state."""

    model: Model
    watched: dict[str, Tensor]
    memory: Tree


def descend(
    objective: Objective,
    model: Model,
    batches: Sequence[Batch],
    outer_batches: Sequence[Batch],
    lr: float,
    slope: Slope | None = None,
    hessian_batches: Sequence[Batch | None] | None = None,
    anchor: tuple[float, Params] | None = None,
    *,
    correction: Params | None = None,
    clip: Callable[[Params], Params] | None = None,
    optimizer: ClientOptimizer = PLAIN,
    memory: Tree = None,
) -> Descent:
    """Local training, one gradient step per batch: lines 7 to 14 of Algorithm 1, the local loop of every method.

    Args:
        anchor: a pair (lam, w) that adds ``lam / 2 * ||params - w||^2`` to the objective.
        correction: a direction that is added to every gradient (SCAFFOLD).
        clip: a function that shortens a gradient, with all of the above in it.
        memory: the optimiser's state to start from; None is a fresh one.
    """
    # A state that is passed in may be stored elsewhere, and optimisers overwrite theirs.
    memory = None if memory is None else tree.map(torch.clone, memory)
    if isinstance(objective, LocalLoss) and slope is None and anchor is None and correction is None and clip is None:
        fused = objective.learner.descend(model, batches, lr, optimizer, memory)
        if fused is not None:
            params, each_loss, memory = fused
            watched = {"loss": each_loss, "weight": torch.ones_like(each_loss)}
            return Descent(Model(params=params, buffers=model["buffers"]), watched, memory)
    losses, weights = [], []
    for t in range(len(batches)):  # by index: a loop variable would keep the batch's memory from being reused
        hessian_batch = hessian_batches[t] if hessian_batches else None
        found = gradient(objective, model, batches[t], outer_batches[t], slope or torch.ones_like, hessian_batch)
        direction = found.direction
        if anchor is not None:
            lam, centre = anchor
            direction = tree.map(lambda u, v, w, lam=lam: u + lam * (v - w), direction, model["params"], centre)
        if correction is not None:
            direction = tree.map(torch.add, direction, correction)
        if clip is not None:
            direction = clip(direction)
        # After the first step the parameters are this loop's own, and may be overwritten.
        params, memory = optimizer.step(model["params"], direction, memory, lr, in_place=t > 0)
        model = Model(params=params, buffers=found.buffers)
        losses.append(found.value)
        weights.append(found.weight)
    return Descent(model, {"loss": torch.stack(losses), "weight": torch.stack(weights)}, memory)


# The methods that run at a client.
CLIENT_SIDE = ("objective", "steps", "train", "descend", "personal", "give_personal", "evaluate", "loss")
# Those of the server, on which depends what a round releases.
SERVER_SIDE = (
    *("round", "advance", "advance_to", "averaged", "init", "initial_state", "with_release", "at_round", "reported"),
    *("evaluation", "measured_updates", "foreseen", "weigh", "estimate", "offsets"),
)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Aggregation, Summable, ABC):
    """The base class of all methods.

    Args:
        lr: the learning rate of local training.
        local_steps: local steps per round, the paper's synchronisation gap tau.
        batch_size: samples per local step; None takes all of the client's data.
        loss_samples: the most training samples of a client to measure its loss or objective on; None takes all.
        clip_update_norm: the largest norm of a client's update; longer ones are scaled down. None is no limit.
        aggregate: how the server averages: "mean", or one of "median", "trimmed-mean", "geometric-median", "krum" and
            "multi-krum", which a few bad clients cannot move far. All use the method's weights, but Krum takes one
            client's model. With one of them or a clip, buffers (BatchNorm's statistics) take their median.
        trim: the fraction of the weight that "trimmed-mean" drops at either end; for Krum the fraction of bad clients
            to withstand, at most.
        defence: "strong" is the combination that holds against a few bad clients whatever they send: no weight above
            1.25 times uniform, updates clipped to their median norm, and the geometric median. A ``cap``,
            ``clip_update_norm`` or ``aggregate`` that is given as well replaces its part. None is no more than these.
        personal_steps: local steps from the global model to a client's personal one; None is 1, or the number of
            adaptation steps of a meta-learning method. They are taken in evaluation, and never sent.
        client_optimizer: the optimiser of local training, such as ``optim.SGD(momentum=0.9)`` or ``optim.Adam()``; None
            is plain SGD. Its step size is ``lr`` times the schedule.
        server_optimizer: the optimiser that applies the aggregated update, such as ``optim.SGD(momentum=0.9)``
            (FedAvgM) or ``optim.Yogi(lr=0.01)``; None adds it to the model.
        server_average: report a moving average of the server's models, of which this share stays from round to round,
            such as 0.9 (1 is the plain mean); training goes on from the last model itself. None reports the last one.
        lr_schedule: a factor of ``lr`` by round, such as ``schedule.Cosine(rounds=200)``, or any function of the round.
        clip_grad_norm: the largest norm of a local gradient; longer ones are scaled down. None is no limit.
    """

    lr: float = 0.1
    local_steps: int = 5
    batch_size: int | None = 32
    loss_samples: int | None = None
    personal_steps: int | None = None
    clip_update_norm: float | None = None
    aggregate: str = "mean"
    trim: float = 0.1
    client_optimizer: SGD | Adam | AdamW | None = None
    defence: str | None = None
    server_optimizer: SGD | Adam | Yogi | Adagrad | None = None
    server_average: float | None = None
    lr_schedule: schedule.Schedule | None = None
    clip_grad_norm: float | None = None

    name: ClassVar[str]
    """The method's name in a config."""
    paper: ClassVar[str]
    """The paper it comes from."""
    goal: ClassVar[str]
    """Its objective, in one line."""
    sends: ClassVar[str]
    """What travels each way in a round, per participant; d is the number of parameters."""
    release: ClassVar[PrivateRelease | None] = None
    """Under differential privacy, the mechanism of the round; ``with_release`` gives a method one."""
    elementwise: ClassVar[bool] = True
    """Whether its client steps, apart from calls to the learner, are elementwise in parameters and losses.

    An engine may then run them on tensors stacked over clients. A subclass that overrides a client step must declare it
    again: a norm, for example, would be taken over all clients at once.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:  # the default is the class's name, not its base's
            cls.name = cls.__name__.lower()
        if "elementwise" not in cls.__dict__ and any(step in cls.__dict__ for step in CLIENT_SIDE):
            cls.elementwise = False
        if cls.__doc__ and Algorithm.__doc__:  # for help(): all arguments, not only its own
            common = inspect.cleandoc(Algorithm.__doc__).partition("Args:\n")[2]
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nArguments of all methods:\n{common}"

    def __post_init__(self) -> None:
        checks.positive("lr", self.lr)
        checks.at_least("local_steps", self.local_steps, 1)
        for name, least in (("batch_size", 1), ("loss_samples", 1), ("personal_steps", 0)):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), least)
        for name in ("clip_update_norm", "clip_grad_norm"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        if self.client_optimizer is not None:
            optim.check_client(self.client_optimizer)
        if self.server_optimizer is not None:
            optim.check_server(self.server_optimizer)
        if self.server_average is not None:
            checks.not_below("server_average", self.server_average, 0)
            checks.at_most("server_average", self.server_average, 1)
        if self.lr_schedule is not None:
            schedule.check_schedule("lr_schedule", self.lr_schedule)
        checks.one_of("aggregate", self.aggregate, RULES)
        if self.defence is not None:
            checks.one_of("defence", self.defence, DEFENCES)
        checks.between("trim", self.trim, 0, 0.5)

    # On the server.

    def check(self, clients: int, participants: int) -> None:
        """Raise or warn if the method cannot use this number of participants."""

    def check_names(self, names: Sequence[str]) -> None:
        """Raise if the method is not for clients of these names."""

    def check_rounds(self, rounds: int) -> None:
        """Check the learning rate of every round before the first."""
        if self.lr_schedule is not None:
            for number in range(1, rounds + 1):
                schedule.factor(self.lr_schedule, number)

    def check_state(self, before: State, after: State) -> None:
        """Check after a round that it has used the server's optimiser and average."""
        for place, given in ((SERVER_OPTIMIZER, "server_optimizer"), (AVERAGE, "server_average")):
            if place in before and after.get(place) is before[place]:
                raise ConfigError(
                    f"{given} is given, but {self.name}'s round does not use it; apply the update with "
                    f"self.advance(state, replies, weights), or leave {given} out."
                )

    def at_round(self, number: int) -> Self:
        """This method with the learning rate of a round."""
        if self.lr_schedule is None:
            return self
        method = copy.copy(self)
        object.__setattr__(method, "lr", self.lr * schedule.factor(self.lr_schedule, number))
        return method

    def releases(self, model: Model, sampled: bool) -> Sums:
        """What ``check_privacy`` says, if it is the word of the class that has the server's part.

        Raises:
            ConfigError: a subclass changes that part and does not say anew what it releases.
        """
        found, kinds = self.check_privacy(model, sampled), type(self).__mro__
        for kind in kinds[: next(k for k, kind in enumerate(kinds) if "check_privacy" in kind.__dict__)]:
            if own := [name for name in SERVER_SIDE if name in kind.__dict__]:
                raise ConfigError(
                    f"privacy is given, but {kind.__name__}.{own[0]} is the method's own, and what a round releases "
                    f"with it is not known; say it in {kind.__name__}.check_privacy, or leave privacy out."
                )
        return found

    def check_privacy(self, model: Model, sampled: bool) -> Sums:
        """What a round releases; raises if the epsilon of this method is not known.

        ``sampled`` is whether only some of the clients take part in a round. A subclass that changes what the server
        does (``SERVER_SIDE``) must say it anew.
        """
        raise ConfigError(
            f"privacy is given, but {self.name} sends or computes more than a weighted sum of updates, and its epsilon "
            'is not known; use fedavg or fedprox (weighting = "uniform"), fedmaml, or comfedl, robust or '
            "comfedl-damaml with a cap."
        )

    def with_release(self, release: PrivateRelease | None) -> Self:
        """This method with the mechanism of a round."""
        if release is None:
            return self
        method = copy.copy(self)
        object.__setattr__(method, "release", release)
        return method

    def advance(
        self,
        state: State,
        replies: Replies,
        weights: Tensor,
        shrink: Callable[[Params], float] | None = None,
        bound: float | None = None,
    ) -> State:
        """The state with the aggregated update applied to its model by the server's optimiser.

        ``shrink`` gives the factor to scale the aggregated update by, from that update. ``bound`` is for differential
        privacy: the largest weight that a client could have had (see ``PrivateRelease.averaged``).
        """
        if self.release is None:
            averaged = self.averaged(state["model"], replies, weights)
        else:
            state, averaged = self.release.averaged(state, replies, weights, bound)
        return self.advance_to(state, averaged, shrink)

    def advance_to(self, state: State, averaged: Model, shrink: Callable[[Params], float] | None = None) -> State:
        """The same, where the clients' models are aggregated already."""
        state = self._moved(state, averaged, shrink)
        return state if self.server_average is None else {**state, AVERAGE: self._followed(state)}

    def _followed(self, state: State) -> Tree:
        """The average of the server's models with the new one in it: at first a plain mean, then a moving average."""
        assert self.server_average is not None
        rounds = state[AVERAGE]["rounds"] + 1
        share = max(1 - self.server_average, 1 / int(rounds))
        average = tree.map(
            lambda old, new: torch.lerp(old, new, share) if new.is_floating_point() else new,
            state[AVERAGE]["model"],
            state["model"],
        )
        return {"model": average, "rounds": rounds}

    def _moved(self, state: State, averaged: Model, shrink: Callable[[Params], float] | None) -> State:
        before = state["model"]
        if self.server_optimizer is None and shrink is None:
            return {**state, "model": averaged}
        update = tree.map(torch.sub, averaged["params"], before["params"])
        if shrink is not None:
            scale = shrink(update)
            update = tree.map(lambda part: scale * part, update)
        if self.server_optimizer is None:
            moved = tree.map(torch.add, before["params"], update)
            return {**state, "model": Model(params=moved, buffers=averaged["buffers"])}
        params, memory = self.server_optimizer.update(before["params"], update, state[SERVER_OPTIMIZER])
        # Buffers are statistics, not trained: they stay means.
        return {**state, "model": Model(params=params, buffers=averaged["buffers"]), SERVER_OPTIMIZER: memory}

    def init(self, model: Model, clients: int) -> State:
        """The server's state before the first round; it always contains the ``model``."""
        return {"model": model}

    def initial_state(self, model: Model, clients: int) -> State:
        """The server's whole state before the first round: the method's, and its optimiser's."""
        state = self.init(model, clients)
        if self.server_optimizer is not None:
            state = {**state, SERVER_OPTIMIZER: self.server_optimizer.init_server(model["params"])}
        if self.server_average is not None:
            state = {**state, AVERAGE: {"model": model, "rounds": torch.tensor(0)}}
        return state

    @abstractmethod
    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        """One round: sample clients, ask them for a step, aggregate their replies."""

    def reported(self, state: State) -> Model:
        """The model to evaluate and return."""
        model: Model = (state.get(AVERAGE) or state)["model"]
        return model

    def evaluation(self, state: State) -> dict[str, Tree]:
        """The message with which clients are asked for their scores."""
        return {"model": self.reported(state)}

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        """The objective's value, from the clients' values and numbers of train samples."""
        return values.mean()

    def shift(
        self, state: State, clients: Sequence[int], names: Sequence[str], sizes: NDArray[np.int64]
    ) -> Tensor | None:
        """What is added to the values of these clients before they are combined; None is nothing.

        ``names`` and ``sizes`` are those of all clients, and ``clients`` are positions in them.
        """
        return None

    def explain(self, error: Diverged) -> str:
        """Advice for a run that diverged (NaN or infinity)."""
        return "Use a smaller lr, or fewer local_steps."

    # At the clients.

    def objective(self, learner: Learner) -> Objective:
        """What a client minimises."""
        return LocalLoss(learner)

    @property
    def has_custom_problem(self) -> bool:
        """Whether the objective is a ``Composition``, which needs no module and no loss function."""
        return False

    @property
    def weighs_on_outer(self) -> bool:
        """Whether the clients' weights follow losses on outer data, so that each client needs some."""
        return False

    @property
    def needs_sample_losses(self) -> bool:
        """Whether clients send more of their losses than the mean, so that the loss of each sample has to be known."""
        return False

    @property
    def adapt(self) -> Adapt | None:
        """The inner map of meta-learning; None for the local loss."""
        return None

    @property
    def adaptation(self) -> tuple[float, int]:
        """The step size and the number of steps to a client's personal model."""
        return self.lr, 1 if self.personal_steps is None else self.personal_steps

    @property
    def local_optimizer(self) -> ClientOptimizer:
        """The optimiser of local training."""
        return self.client_optimizer or PLAIN

    def clipping(self, learner: Learner) -> Callable[[Params], Params] | None:
        """The function that clips local gradients; None without a limit."""
        return None if self.clip_grad_norm is None else partial(learner.clip, most=self.clip_grad_norm)

    def client_state(self, model: Model) -> Tree:
        """The method's own part of a client's initial state, a dict; None if clients keep nothing."""
        return None

    def initial_client_state(self, model: Model) -> Tree:
        """A client's whole initial state: the method's part, and the state of an optimiser that is kept."""
        state = self.client_state(model)
        if not self.local_optimizer.keep_state:
            return state
        return {**(state or {}), OPTIMIZER: self.local_optimizer.init(model["params"])}

    def kept(self, trained: Descent, state: Tree = None) -> Tree:
        """A client's state after training: the method's part, and the optimiser's if it is kept; None if nothing is."""
        return {**(state or {}), OPTIMIZER: trained.memory} if self.local_optimizer.keep_state else state

    def steps(self) -> dict[str, Step]:
        """The client steps by name."""
        personal = Draw("train", self.batch_size, self.adaptation[1], purpose="personal")
        return {
            "train": Step(self.train, self.draws(), sends=self.reply()),
            "evaluate": Step(
                self.evaluate,
                {
                    Data.TRAIN: Draw("train", self.loss_samples, bounded=True),
                    **{split: Draw(split) for split in HELD_OUT},
                    **{outer: Draw("outer", fallback=split) for split, outer in HELD_OUT.items()},
                    **self.value_draws(),
                    Data.PERSONAL: personal,
                },
                noise="personal",
                scheduled=False,
                sends={"scores": NUMBERS, "value": NUMBER},
            ),
            "personal": Step(self.give_personal, {Data.PERSONAL: personal}, noise="personal", scheduled=False),
        }

    def value_draws(self) -> dict[str, Draw]:
        """The data to measure the objective's value on."""
        return {
            Data.VALUE_TRAIN: Draw("train", self.loss_samples, bounded=True),
            Data.VALUE_OUTER: Draw("outer", self.loss_samples, bounded=True),
        }

    def draws(self) -> dict[str, Draw]:
        """The batches of local training."""
        return {Data.INNER: Draw("train", self.batch_size, self.local_steps, transformed=True)}

    def reply(self) -> dict[str, str]:
        """The parts of a client's reply after local training, and their types."""
        return {"model": MODEL}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Local training from the received model; replies with the trained model."""
        trained = self.descend(learner, message["model"], batches, state=state)
        return Outcome({"model": trained.model}, self.kept(trained), trained.watched)

    def descend(
        self,
        learner: Learner,
        model: Model,
        batches: Batches,
        slope: Slope | None = None,
        anchor: tuple[float, Params] | None = None,
        *,
        state: Tree = None,
        memory: Tree = None,
        correction: Params | None = None,
    ) -> Descent:
        """Local training on the method's objective with the batches of ``draws``, by the client's optimiser.

        ``state`` is the client's, for an optimiser whose state is kept (``kept`` returns it); ``memory`` is the
        optimiser's state to go on from if local training is in two parts.
        """
        if self.local_optimizer.keep_state and memory is None:
            if state is None:
                raise ConfigError(
                    f"client_optimizer has keep_state = true, but {self.name}'s local training does not pass on the "
                    "client's state; pass state= to descend and return self.kept(...), or leave keep_state out."
                )
            memory = state[OPTIMIZER]
        inner = batches[Data.INNER]
        return descend(
            self.objective(learner),
            model,
            inner,
            batches.get(Data.OUTER, inner),
            self.lr,
            slope,
            batches.get(Data.HESSIAN),
            anchor,
            correction=correction,
            clip=self.clipping(learner),
            optimizer=self.local_optimizer,
            memory=memory,
        )

    def personal(self, learner: Learner, model: Model, state: Tree, batches: Batches) -> Model:
        """The client's personal model: by default the global one, after a step on the client's training data."""
        rate, steps = self.adaptation
        if learner.loss_function is None or steps == 0:
            return model
        own = batches[Data.PERSONAL]
        if self.adapt is not None:  # the inner map: plain gradient steps
            return descend(LocalLoss(learner), model, own, own, rate).model
        clip, optimizer = self.clipping(learner), self.local_optimizer
        return descend(LocalLoss(learner), model, own, own, rate, clip=clip, optimizer=optimizer).model

    def give_personal(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """The personal model, requested after training."""
        return Outcome({"model": self.personal(learner, message["model"], state, batches)})

    def evaluate(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Loss and metrics of the global and the personal model on each split, and the objective's value."""
        objective, model = self.objective(learner), message["model"]
        value_data = batches[Data.VALUE_TRAIN], batches[Data.VALUE_OUTER]
        if learner.loss_function is None:  # a Composition has no other metrics than its value
            value = objective.value(model, *(data[0] for data in value_data))
            losses = {
                f"{split}.loss": objective.value(model, data, batches[outer][0])
                for split, outer in HELD_OUT.items()
                for data in batches[split]
            }
            return Outcome({"scores": {"train.loss": value, **losses}, "value": value})
        personal = self.personal(learner, model, state, batches)  # first: same noise as in the step "personal"
        scores: dict[str, Tensor] = {}
        for split in (Data.TRAIN, *HELD_OUT):
            for data in batches[split]:
                scores |= {f"{split}.{name}": score for name, score in learner.scores(model, data).items()}
                if personal is not model:
                    own = learner.scores(personal, data)
                    scores |= {f"{split}.personal_{name}": score for name, score in own.items()}
        if isinstance(objective, LocalLoss) and self.loss_samples is None and not self.weighs_on_outer:
            return Outcome({"scores": scores, "value": scores["train.loss"]})  # the same number
        return Outcome({"scores": scores, "value": objective.value(model, *(data[0] for data in value_data))})


def adapt_draws(adapt: Adapt, batch_size: int | None, outer_size: int | None, count: int) -> dict[str, Draw]:
    """The extra batches of a local step with ``Adapt``: D' for the adapted loss, and D'' if the Hessian has its own."""
    found: dict[str, Draw] = {Data.OUTER: Draw("outer", outer_size, count, transformed=True)}
    if adapt.draws_hessian_batch:
        found[Data.HESSIAN] = Draw("train", batch_size, count, transformed=True)
    return found
