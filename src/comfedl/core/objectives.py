"""The composition ``outer(inner(w))`` that every method minimises, and its stochastic gradient.

A client's objective is ``F_i(w) = E_zeta[g_i(E_xi[f_i(w; xi)]; zeta)]``, eq. (1) of the paper. Its stochastic gradient
is a vector-Jacobian product (VJP): the value and the VJP of the inner map on batch B, the gradient of the outer
function on batch B~, pulled back through the inner map. ``gradient`` computes it for all methods; the Jacobian is never
formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from comfedl.core.learner import Batch, Learner, Model, Params, Pullback, Slope, value_and_vjp
from comfedl.utils import checks, tree
from comfedl.utils.tree import Tree


class Objective(Protocol):
    """A client's objective, as ``gradient`` uses it. Users write theirs as a ``Composition``."""

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tree, Pullback, Params]:
        """The inner value on a batch, its VJP, and the updated buffers.

        ``hessian_batch`` is for a map that is differentiated on another batch (``Adapt``).
        """

    def outer(self, y: Tree, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tree]]:
        """The outer function of the inner value on a batch, and its VJP."""

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        """The objective on a whole dataset, without noise; the server computes its weights from it."""


class Gradient(NamedTuple):
    """A stochastic gradient of a client's objective, with its value, weight and updated buffers."""

    direction: Params
    value: Tensor
    weight: Tensor
    buffers: Params


def gradient(
    objective: Objective,
    model: Model,
    batch: Batch,
    outer_batch: Batch,
    slope: Slope = torch.ones_like,
    hessian_batch: Batch | None = None,
) -> Gradient:
    """The stochastic gradient ``u = J_f(w; B)^T grad g(f(w; B); B~)``, lines 8 to 12 of Algorithm 1.

    ``slope`` is the derivative of a scalar function on top of the value (``Exp`` of a loss): by the chain rule, it
    scales the gradient.
    """
    y, pullback, buffers = objective.inner(model, batch, hessian_batch)
    value, outer_pullback = objective.outer(y, buffers, outer_batch)
    weight = slope(value)
    return Gradient(pullback(outer_pullback(weight)), value, weight, buffers)


@dataclass(frozen=True)
class LocalLoss:
    """Inner: the local loss. Outer: the identity. The objective of plain training."""

    learner: Learner

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tensor, Pullback, Params]:
        return self.learner.loss_and_vjp(model["params"], model["buffers"], batch)

    def outer(self, y: Tensor, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return y, lambda cotangent: cotangent

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        return self.learner.mean_loss(model, data)


@dataclass(frozen=True)
class Composition:
    """Your own two-level problem, min over w of mean_i g(E f(w; xi); zeta).

    Args:
        inner: ``inner(params, batch) -> y``; y is a scalar, a vector or a tree of tensors, a mean over the batch.
        outer: ``outer(y, batch) -> scalar``; its batch comes from ``FederatedData(outer=...)``, by default from the
            train data.

    A batch is the pair ``(x, y)``. A mean-variance portfolio, for example, has the inner value (mean return, mean
    squared return) and the outer function ``-mean + risk * (square - mean ** 2)``.
    """

    inner: Callable[[Params, Batch], Tree]
    outer: Callable[[Tree, Batch], Tensor]


@dataclass(frozen=True)
class CompositionObjective:
    """The objective of a ``Composition``."""

    composition: Composition

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tree, Pullback, Params]:
        return value_and_vjp(lambda params: (self.composition.inner(params, batch), model["buffers"]), model["params"])

    def outer(self, y: Tree, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tree]]:
        value, pullback, _ = value_and_vjp(lambda y: (self.composition.outer(y, batch), ()), y)
        return value, pullback

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        # Both maps are the user's: no chunks, since only the user knows if they are means over samples, and no
        # no_grad, since they may differentiate inside.
        y = self.composition.inner(model["params"], data)
        return self.composition.outer(y, outer_data).detach()


ORDERS = ("exact", "first", "hessian-free")
HESSIAN_BATCHES = ("auto", "same", "own")


@dataclass(frozen=True)
class Adapt:
    """The inner map of meta-learning, eq. (7): ``steps`` gradient steps of size ``lr`` on the client's data.

    ``order`` is how to differentiate it: "exact" through the steps (second order), "first" with the Hessian dropped,
    "hessian-free" with the Hessian-vector product as a central difference of gradients, ``delta`` apart.
    ``hessian_batch`` is the batch for that: "same" as the step's (the paper's Algorithm 1) or its "own" (Per-FedAvg's
    D''); "auto" is "own" for hessian-free and "same" for exact.
    """

    lr: float
    steps: int = 1
    order: str = "exact"
    delta: float = 1e-3
    hessian_batch: str = "auto"

    def __post_init__(self) -> None:
        checks.not_below("Adapt's lr", self.lr, 0)
        checks.at_least("Adapt's steps", self.steps, 1)
        checks.one_of("Adapt's order", self.order, ORDERS)
        checks.positive("Adapt's delta", self.delta)
        checks.one_of("Adapt's hessian_batch", self.hessian_batch, HESSIAN_BATCHES)

    @property
    def draws_hessian_batch(self) -> bool:
        """Whether the Hessian-vector product uses a separate batch."""
        own = self.order == "hessian-free" if self.hessian_batch == "auto" else self.hessian_batch == "own"
        return own and self.order != "first"


@dataclass(frozen=True)
class Adapted:
    """Inner: the adapted parameters ``w - lr * grad f(w; B)``. Outer: the loss there on another batch."""

    learner: Learner
    adapt: Adapt

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Params, Pullback, Params]:
        buffers, rate, order = model["buffers"], self.adapt.lr, self.adapt.order

        def loss_gradient(params: Params, on: Batch) -> tuple[Params, Params]:
            found = gradient(LocalLoss(self.learner), Model(params=params, buffers=buffers), on, on)
            return found.direction, found.buffers

        path, updated = [model["params"]], buffers
        hvps: list[Pullback] = []  # the Hessian-vector product at each point of the path
        for step in range(self.adapt.steps):
            at, on = path[-1], batch if hessian_batch is None else hessian_batch
            if order == "exact":
                direction, hvp, moved = self.learner.grad_and_hvp(at, buffers, on)
                hvps.append(hvp)
            elif order == "hessian-free":
                hvps.append(partial(self._hvp_by_difference, partial(loss_gradient, on=on), at))
            if order != "exact" or on is not batch:
                direction, moved = loss_gradient(at, batch)
            updated = moved if step == 0 else updated  # buffers move once per local step, in the pass at w
            path.append(tree.step(at, rate, direction))

        def pullback(v: Params) -> Params:
            while hvps:  # popping frees the graph of each product as soon as it is used
                v = tree.step(v, rate, hvps.pop()(v))
            return v

        return path[-1], pullback, updated

    def _hvp_by_difference(self, gradient: Callable[[Params], tuple[Params, Params]], at: Params, v: Params) -> Params:
        """The Hessian-vector product at ``at`` by a central difference, with the same dropout on both sides."""
        delta = self.adapt.delta
        with self.learner.repeat_noise(v):
            ahead, _ = gradient(tree.step(at, -delta, v))
        behind, _ = gradient(tree.step(at, delta, v))
        product: Params = tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)
        return product

    def outer(self, y: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Params]]:
        # The pass at w has updated the buffers; this one does not.
        value, pullback, _ = self.learner.loss_and_vjp(y, buffers, batch)
        return value, pullback

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        value_only = replace(self, adapt=replace(self.adapt, order="first"))  # no second derivative is needed
        adapted = Model(params=value_only.inner(model, data)[0], buffers=model["buffers"])
        return LocalLoss(self.learner).value(adapted, outer_data, outer_data)
