"""What an algorithm is: hyper-parameters, client steps, and a server round that drives them.

An algorithm knows nothing of where clients live. Its server state is a tree of tensors, handed in and returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl import checks, rng, tree
from comfedl.problem import Batch, Learner, LocalLoss, Model, Objective, gradient
from comfedl.step import Batches, Diverged, Draw, Engine, Outcome, Replies, Step
from comfedl.tree import Tree

State = dict[str, Tree]


class Used(NamedTuple):
    """Who took part in a round and with which weight in the new model."""

    clients: Sequence[int]
    weights: Tensor


@dataclass
class Traffic:
    """Bytes that have travelled, counted from the messages and the replies themselves."""

    up_bytes: int = 0
    down_bytes: int = 0

    def count(self, message: Tree, replies: Replies) -> None:
        self.down_bytes += tree.nbytes(message) * len(replies.clients)
        self.up_bytes += replies.nbytes()


@dataclass(frozen=True)
class Round:
    """One round, as an algorithm sees it: who there is, random draws, and a way to ask clients."""

    number: int
    seed: int
    participants: int
    engine: Engine
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def clients(self) -> int:
        """How many clients there are in all."""
        return len(self.engine.names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many train samples each client has."""
        return self.engine.sizes

    def rng(self, purpose: str) -> np.random.Generator:
        """The generator of this round for one purpose."""
        return rng.generator(self.seed, purpose, self.number)

    def sample(self, purpose: str = "clients") -> list[int]:
        """Choose the round's clients uniformly without replacement."""
        if self.participants == self.clients:
            return list(range(self.clients))
        chosen = self.rng(purpose).choice(self.clients, size=self.participants, replace=False, shuffle=False)
        return sorted(chosen.tolist())

    def ask(self, step: str, clients: Sequence[int], message: dict[str, Tree]) -> Replies:
        """Ask these clients to do a named step with this message."""
        replies = self.engine.run(step, clients, message, self.number)
        self.traffic.count(message, replies)
        return replies


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
    slope: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Descent:
    """Local training, one gradient step a batch: lines 7 to 14 of Algorithm 1. Every method's local loop."""
    losses, weights = [], []
    for batch, outer_batch in zip(batches, outer_batches, strict=True):
        found = gradient(objective, model, batch, outer_batch, slope)
        model = Model(params=tree.step(model["params"], lr, found.direction), buffers=found.buffers)
        losses.append(found.value)
        weights.append(found.weight)
    return Descent(model, {"loss": torch.stack(losses), "weight": torch.stack(weights)})


def blend(model: Model, replies: Replies, weights: Tensor, name: str = "model") -> Model:
    """``w + sum_i r_i (w_i - w)``; buffers take the parameters' weights, counters their maximum."""
    mixed = replies.weighted_sum(name, weights)
    rest = 1 - float(weights.sum())
    if abs(rest) < 1e-12:
        moved: Model = mixed
        return moved
    kept: Model = tree.map(lambda new, old: new + rest * old if new.is_floating_point() else new, mixed, model)
    return kept


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """The contract of all methods; each says what is special to it.

    Args:
        lr: the step size of local training.
        local_steps: local steps a round, the paper's synchronisation gap tau.
        batch_size: samples a local step; None takes all of the client's data.
    """

    lr: float = 0.1
    local_steps: int = 5
    batch_size: int | None = 32

    name: ClassVar[str]
    """The method's name in a config."""
    paper: ClassVar[str]
    """Where it comes from."""
    goal: ClassVar[str]
    """Its objective, in one line."""
    sends: ClassVar[str]
    """What travels each way in a round; d is the number of parameters."""

    def __post_init__(self) -> None:
        checks.positive("lr", self.lr)
        checks.at_least("local_steps", self.local_steps, 1)
        if self.batch_size is not None:
            checks.at_least("batch_size", self.batch_size, 1)

    # What the server does.

    def init(self, model: Model, clients: int) -> State:
        """The server's state before the first round."""
        return {"model": model}

    @abstractmethod
    def round(self, state: State, here: Round) -> tuple[State, Used]:
        """One round: sample clients, ask them, combine their replies."""

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

    def steps(self) -> dict[str, Step]:
        """The client steps by name."""
        inner = Draw("train", self.batch_size, self.local_steps)
        splits = {split: Draw(split) for split in ("train", "validation", "test", "outer")}
        return {"train": Step(self.train, {"inner": inner}), "evaluate": Step(self.evaluate, splits)}

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Local training from the model received; sends back the model it ends at."""
        inner = batches["inner"]
        trained = descend(self.objective(learner), message["model"], inner, batches.get("outer", inner), self.lr)
        return Outcome({"model": trained.model}, watched=trained.watched)

    def evaluate(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        """Loss and metrics of the model received on each split the client has, and its objective's value."""
        objective, model = self.objective(learner), message["model"]
        scores: dict[str, Tensor] = {}
        for split in ("train", "validation", "test"):
            for data in batches[split]:
                outer = batches["outer"][0] if split == "train" else data
                found = (
                    {"loss": objective.value(model, data, outer)}
                    if learner.loss_function is None
                    else learner.scores(model, data)
                )
                scores |= {f"{split}.{name}": value for name, value in found.items()}
        value = (
            scores["train.loss"]
            if learner.loss_function is None or isinstance(objective, LocalLoss)
            else objective.value(model, batches["train"][0], batches["outer"][0])
        )
        return Outcome({"scores": scores, "value": value})
