"""What an algorithm is: hyper-parameters, client steps, and a server round that drives them.

An algorithm knows nothing of where clients live. Its server state is a tree of tensors, handed in and returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from comfedl.algorithms.context import Round, Used
from comfedl.core.objectives import Adapt, Batch, Learner, LocalLoss, Model, Objective, Params, Slope, gradient
from comfedl.core.protocol import MODEL, NUMBER, NUMBERS, Batches, Diverged, Draw, Outcome, Replies, Step
from comfedl.core.robust_aggregation import RULES, robust_mean
from comfedl.utils import checks, tree
from comfedl.utils.tree import Tree

State = dict[str, Tree]
SPLITS = ("train", "validation", "test")


class Descent(NamedTuple):
    """Where local training ended, and the losses and weights it saw on the way."""

    model: Model
    watched: dict[str, Tensor]


def descend(
    objective: Objective,
    model: Model,
    batches: Sequence[Batch],
    outer_batches: Sequence[Batch],
    lr: float,
    slope: Slope = torch.ones_like,
    hessian_batches: Sequence[Batch | None] | None = None,
    anchor: tuple[float, Params] | None = None,
) -> Descent:
    """Local training, one gradient step a batch: lines 7 to 14 of Algorithm 1. Every method's local loop.

    ``anchor`` is a pair (lam, w) that adds ``lam / 2 * ||params - w||^2`` to the objective.
    """
    if isinstance(objective, LocalLoss) and slope is torch.ones_like and anchor is None:
        short = objective.learner.descend(model, batches, lr)
        if short is not None:
            params, seen = short
            return Descent(Model(params=params, buffers=model["buffers"]), {"loss": seen, "weight": slope(seen)})
    losses, weights = [], []
    for t in range(len(batches)):  # no batch is held on to, so that the next one may take its place in memory
        hessian_batch = hessian_batches[t] if hessian_batches else None
        found = gradient(objective, model, batches[t], outer_batches[t], slope, hessian_batch)
        direction = found.direction
        if anchor is not None:
            lam, near = anchor
            direction = tree.map(lambda u, v, w, lam=lam: u + lam * (v - w), direction, model["params"], near)
        # From the second step on the parameters are nobody else's, and are moved where they are.
        step = tree.step if t == 0 else tree.step_in_place
        model = Model(params=step(model["params"], lr, direction), buffers=found.buffers)
        losses.append(found.value)
        weights.append(found.weight)
    return Descent(model, {"loss": torch.stack(losses), "weight": torch.stack(weights)})


def blend(model: Model, replies: Replies, weights: Tensor, name: str = "model") -> Model:
    """``w + sum_i r_i (w_i - w)``; buffers take the parameters' weights, counters their maximum.

    Buffers are always a mean: where the weights add up to more than 1 they are scaled back for them, since a variance
    beyond those that were seen may be negative.
    """
    mixed: Model = replies.weighted_sum(name, weights)
    total = float(weights.sum())
    if abs(1 - total) < 1e-12:
        return mixed

    def kept(new: Tensor, old: Tensor) -> Tensor:
        return new + (1 - total) * old if new.is_floating_point() else new

    def mean(new: Tensor, old: Tensor) -> Tensor:
        return kept(new, old) if total < 1 or not new.is_floating_point() else new / total

    return Model(
        params=tree.map(kept, mixed["params"], model["params"]),
        buffers=tree.map(mean, mixed["buffers"], model["buffers"]),
    )


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The contract of all methods; each says what is special to it.

    Args:
        lr: the step size of local training.
        local_steps: local steps a round, the paper's synchronisation gap tau.
        batch_size: samples a local step; None takes all of the client's data.
        loss_samples: how many of a client's train samples at most its loss or objective is measured on, where the
            method or the records need it; None takes all.
        clip_update_norm: how far at most one client's model may be from the one it received; None is no bound.
        aggregate: how the server averages: "mean", or "median", "trimmed-mean" and "geometric-median", which a few bad
            clients cannot move far. They keep to the method's weights.
        trim: the share of the weight that "trimmed-mean" leaves out at either end.
        personal_steps: local steps from the global model to the one that a client would use; None is 1, or as many as a
            meta-learning method trains for. They are taken when a client is evaluated and never sent.
    """

    lr: float = 0.1
    local_steps: int = 5
    batch_size: int | None = 32
    loss_samples: int | None = None
    personal_steps: int | None = None
    clip_update_norm: float | None = None
    aggregate: str = "mean"
    trim: float = 0.1

    name: ClassVar[str]
    """The method's name in a config."""
    paper: ClassVar[str]
    """Where it comes from."""
    goal: ClassVar[str]
    """Its objective, in one line."""
    sends: ClassVar[str]
    """What travels each way in a round, per participant; d is the number of parameters."""
    elementwise: ClassVar[bool] = True
    """Whether its client steps are elementwise in parameters and losses, but for what the learner does.

    Then an engine may hand them tensors with many clients in front. A class of the reader's own says so itself.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Not inherited from here: a step that takes the norm of all parameters would take that of all clients.
        if "elementwise" not in cls.__dict__:
            cls.elementwise = cls.__module__.partition(".")[0] == __name__.partition(".")[0]

    def __post_init__(self) -> None:
        checks.positive("lr", self.lr)
        checks.at_least("local_steps", self.local_steps, 1)
        for name, least in (("batch_size", 1), ("loss_samples", 1), ("personal_steps", 0)):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), least)
        if self.clip_update_norm is not None:
            checks.positive("clip_update_norm", self.clip_update_norm)
        checks.one_of("aggregate", self.aggregate, RULES)
        checks.between("trim", self.trim, 0, 0.5)

    # What the server does.

    def check(self, clients: int, participants: int) -> None:  # noqa: B027 - most methods take any number
        """Refuse, or warn of, a number of participants that the method cannot use."""

    def blend(self, model: Model, replies: Replies, weights: Tensor, name: str = "model") -> Model:
        """The new model, ``w + sum_i r_i (w_i - w)``, with the bounds on what one client can move."""
        if self.aggregate == "mean" and self.clip_update_norm is None:
            return blend(model, replies, weights, name)
        scale = torch.ones_like(weights)
        if self.clip_update_norm is not None:
            distances = replies.squared_distances((name, "params"), model["params"]).sqrt()
            scale = (self.clip_update_norm / distances).clamp(max=1).nan_to_num(1.0)
        mixed = blend(model, replies, weights * scale, name)
        if self.aggregate == "mean":
            return mixed
        near = model["params"]
        clipped = [
            tree.map(lambda part, start, s=s: start + s * (part - start), reply["params"], near)
            for reply, s in zip(replies.each(name), scale.tolist(), strict=True)
        ]
        total = float(weights.sum())
        if total <= 0:  # nobody present has any weight
            return mixed
        stacked = tree.map(lambda *parts: torch.stack(parts), *clipped)
        centre = robust_mean(self.aggregate, stacked, weights / total, self.trim)
        return Model(
            params=tree.map(lambda start, end: start + total * (end - start), near, centre), buffers=mixed["buffers"]
        )

    def init(self, model: Model, clients: int) -> State:
        """The server's state before the first round; it always has the ``model``."""
        return {"model": model}

    @abstractmethod
    def round(self, state: State, here: Round) -> tuple[State, Used]:
        """One round: sample clients, ask them, combine their replies."""

    def reported(self, state: State) -> Model:
        """The model that is evaluated and given back."""
        model: Model = state["model"]
        return model

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        """The objective's value from every client's value; ``sizes`` are their train samples."""
        return values.mean()

    def explain(self, error: Diverged) -> str:
        """What to do when training has left the finite numbers."""
        return "Use a smaller lr, or fewer local_steps."

    # What a client does.

    def objective(self, learner: Learner) -> Objective:
        """What a client minimises."""
        return LocalLoss(learner)

    @property
    def own_problem(self) -> bool:
        """Whether a client's objective is the reader's own, which needs neither a module nor a loss function."""
        return False

    @property
    def adaptation(self) -> tuple[float, int]:
        """The step size and the number of steps to a client's personal model."""
        return self.lr, 1 if self.personal_steps is None else self.personal_steps

    def client_state(self, model: Model) -> Tree:
        """What a client keeps before it first takes part."""
        return None

    def steps(self) -> dict[str, Step]:
        """The client steps by name."""
        personal = Draw("train", self.batch_size, self.adaptation[1], purpose="personal")
        value = {f"value {split}": Draw(split, self.loss_samples, bounded=True) for split in ("train", "outer")}
        splits = {"train": value["value train"], **{split: Draw(split) for split in SPLITS[1:]}}
        outer = {f"outer of {split}": Draw("outer", instead=split) for split in SPLITS[1:]}
        return {
            "train": Step(self.train, self.draws(), sends=self.reply()),
            "evaluate": Step(
                self.evaluate,
                {**splits, **outer, **value, "personal": personal},
                noise="personal",
                sends={"scores": NUMBERS, "value": NUMBER},
            ),
            "personal": Step(self.give_personal, {"personal": personal}, noise="personal"),
        }

    def draws(self) -> dict[str, Draw]:
        """The batches of local training."""
        return {"inner": Draw("train", self.batch_size, self.local_steps)}

    def reply(self) -> dict[str, str]:
        """What a client sends after local training."""
        return {"model": MODEL}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Local training from the model received; sends back the model it ends at."""
        trained = self.descend(learner, message["model"], batches)
        return Outcome({"model": trained.model}, watched=trained.watched)

    def descend(
        self,
        learner: Learner,
        model: Model,
        batches: Batches,
        slope: Slope = torch.ones_like,
        anchor: tuple[float, Params] | None = None,
    ) -> Descent:
        """Local training on the method's objective with the batches of ``draws``."""
        inner = batches["inner"]
        outer, hessian = batches.get("outer", inner), batches.get("hessian")
        return descend(self.objective(learner), model, inner, outer, self.lr, slope, hessian, anchor)

    def personal(self, learner: Learner, model: Model, state: Tree, batches: Batches) -> Model:
        """The model that this client would use: by default the global one after a step on its own train data."""
        rate, steps = self.adaptation
        if learner.loss_function is None or steps == 0:
            return model
        own = batches["personal"]
        return descend(LocalLoss(learner), model, own, own, rate).model

    def give_personal(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """The personal model itself: asked for after training, by whoever runs the simulation."""
        return Outcome({"model": self.personal(learner, message["model"], state, batches)})

    def evaluate(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Loss and metrics of the global and the personal model on each split, and the objective's value."""
        objective, model = self.objective(learner), message["model"]
        if learner.loss_function is None:  # the reader's own problem: its value is all there is to measure
            value = objective.value(model, batches["value train"][0], batches["value outer"][0])
            losses = {
                f"{split}.loss": objective.value(model, data, batches[f"outer of {split}"][0])
                for split in SPLITS[1:]
                for data in batches[split]
            }
            return Outcome({"scores": {"train.loss": value, **losses}, "value": value})
        personal = self.personal(learner, model, state, batches)  # first, so that it sees the noise of its own step
        scores: dict[str, Tensor] = {}
        for split in SPLITS:
            for data in batches[split]:
                scores |= {f"{split}.{name}": score for name, score in learner.scores(model, data).items()}
                if personal is not model:
                    own = learner.scores(personal, data)
                    scores |= {f"{split}.personal_{name}": score for name, score in own.items()}
        if isinstance(objective, LocalLoss) and self.loss_samples is None:
            return Outcome({"scores": scores, "value": scores["train.loss"]})  # measured already
        value = objective.value(model, batches["value train"][0], batches["value outer"][0])
        return Outcome({"scores": scores, "value": value})


class Renamed(Algorithm):
    """A method that is another one under a name and arguments of its own."""

    @property
    @abstractmethod
    def method(self) -> Algorithm:
        """The method that this one is."""

    def common(self) -> dict[str, Any]:
        """The arguments that all methods share."""
        return {field.name: getattr(self, field.name) for field in fields(Algorithm)}

    def __post_init__(self) -> None:
        self.method  # noqa: B018 - its own checks are the checks

    def init(self, model: Model, clients: int) -> State:
        return self.method.init(model, clients)

    def round(self, state: State, here: Round) -> tuple[State, Used]:
        return self.method.round(state, here)

    def reported(self, state: State) -> Model:
        return self.method.reported(state)

    def combined(self, values: Tensor, sizes: Tensor) -> Tensor:
        return self.method.combined(values, sizes)

    def explain(self, error: Diverged) -> str:
        return self.method.explain(error)

    def objective(self, learner: Learner) -> Objective:
        return self.method.objective(learner)

    @property
    def adaptation(self) -> tuple[float, int]:
        return self.method.adaptation

    def client_state(self, model: Model) -> Tree:
        return self.method.client_state(model)

    def check(self, clients: int, participants: int) -> None:
        self.method.check(clients, participants)

    def draws(self) -> dict[str, Draw]:
        return self.method.draws()

    def reply(self) -> dict[str, str]:
        return self.method.reply()

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        return self.method.train(learner, message, state, batches)


def adapt_draws(adapt: Adapt, batch_size: int | None, outer_size: int | None, count: int) -> dict[str, Draw]:
    """The further batches of a local step through ``Adapt``: D' for the loss there, and D'' where it has its own."""
    draws = {"outer": Draw("outer", outer_size, count)}
    return draws | ({"hessian": Draw("train", batch_size, count)} if adapt.draws_hessian_batch else {})
