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

from comfedl.core.learner import Batch, Learner, Model, Params, Pullback, Slope, pull
from comfedl.utils import checks, tree
from comfedl.utils.tree import Tree


class Objective(Protocol):
    """A client's objective as ``gradient`` needs it. ``Composition`` is the public way to write one's own."""

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tree, Pullback, Params]:
        """The inner value on a batch, its pullback, and the buffers afterwards.

        ``hessian_batch`` is for a map that takes its own derivative on another batch (``Adapt``).
        """

    def outer(self, y: Tree, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tree]]:
        """The outer function of the inner value on a batch, and its pullback."""

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        """The objective on whole data, without noise: what the server's weights are computed from."""


class Gradient(NamedTuple):
    """A stochastic gradient of a client's objective and what was seen on the way."""

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

    ``slope`` is the slope of a further scalar function of the value (``Exp`` on top of a loss): by the chain rule it
    scales the gradient.
    """
    y, pullback, buffers = objective.inner(model, batch, hessian_batch)
    value, outer_pullback = objective.outer(y, buffers, outer_batch)
    weight = slope(value)
    return Gradient(pullback(outer_pullback(weight)), value, weight, buffers)


@dataclass(frozen=True)
class LocalLoss:
    """Inner: the local loss. Outer: nothing. The objective of plain training."""

    learner: Learner

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tensor, Pullback, Params]:
        return self.learner.pull_loss(model["params"], model["buffers"], batch)

    def outer(self, y: Tensor, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        return y, lambda cotangent: cotangent

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        return self.learner.mean_loss(model, data)


@dataclass(frozen=True)
class Composition:
    """A two-level problem of your own, min over w of mean_i g(E f(w; xi); zeta).

    Args:
        inner: ``inner(params, batch) -> y``; y is a scalar, a vector or a tree of tensors, a mean over the batch.
        outer: ``outer(y, batch) -> scalar``; its batch comes from ``FederatedData(outer=...)``, or from the train
            data where there is none.

    A batch is the pair ``(x, y)``. The most risk-averse mean-variance portfolio, for example, has the inner value
    (mean return, mean squared return) and the outer ``-mean + risk * (square - mean ** 2)``.
    """

    inner: Callable[[Params, Batch], Tree]
    outer: Callable[[Tree, Batch], Tensor]


@dataclass(frozen=True)
class CompositionObjective:
    """The objective of a ``Composition``."""

    composition: Composition

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tree, Pullback, Params]:
        return pull(lambda params: (self.composition.inner(params, batch), model["buffers"]), model["params"])

    def outer(self, y: Tree, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tree]]:
        value, pullback, _ = pull(lambda y: (self.composition.outer(y, batch), ()), y)
        return value, pullback

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        # Both maps are the user's: they get their data whole, since only they know whether they are means, and no
        # no_grad, since they may differentiate inside.
        y = self.composition.inner(model["params"], data)
        return self.composition.outer(y, outer_data).detach()


ORDERS = ("exact", "first", "hessian-free")
HESSIAN_BATCHES = ("auto", "same", "own")


@dataclass(frozen=True)
class Adapt:
    """The inner map of meta-learning, eq. (7): ``steps`` gradient steps of size ``lr`` on the client's own data.

    ``order`` says how it is differentiated: "exact" through the steps (second order), "first" as if the step did not
    depend on w, "hessian-free" with the Hessian-vector product as a central difference of gradients, ``delta`` apart.
    ``hessian_batch`` says on which batch: "same" as the step's (the paper's Algorithm 1) or its "own" (Per-FedAvg's
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
        """Whether the derivative is taken on a batch of its own."""
        own = self.order == "hessian-free" if self.hessian_batch == "auto" else self.hessian_batch == "own"
        return own and self.order != "first"


@dataclass(frozen=True)
class Adapted:
    """Inner: the adapted parameters ``w - lr * grad f(w; B)``. Outer: the loss there on another batch."""

    learner: Learner
    adapt: Adapt

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Params, Pullback, Params]:
        buffers, rate, order = model["buffers"], self.adapt.lr, self.adapt.order

        def slope(params: Params, on: Batch) -> tuple[Params, Params]:
            found = gradient(LocalLoss(self.learner), Model(params=params, buffers=buffers), on, on)
            return found.direction, found.buffers

        path, after = [model["params"]], buffers
        products: list[Pullback] = []  # the Hessian-vector product at each point of the path
        for step in range(self.adapt.steps):
            at, on = path[-1], batch if hessian_batch is None else hessian_batch
            if order == "exact":
                direction, product, seen = self.learner.pull_curved(at, buffers, on)
                products.append(product)
            elif order == "hessian-free":
                products.append(partial(self._difference, partial(slope, on=on), at))
            if order != "exact" or on is not batch:
                direction, seen = slope(at, batch)
            after = seen if step == 0 else after  # the buffers move once a step, in the pass at w
            path.append(tree.step(at, rate, direction))

        def pullback(v: Params) -> Params:
            while products:  # what a product has kept is free as soon as it is done
                v = tree.step(v, rate, products.pop()(v))
            return v

        return path[-1], pullback, after

    def _difference(self, slope: Callable[[Params], tuple[Params, Params]], at: Params, v: Params) -> Params:
        """The Hessian-vector product at ``at`` by a central difference, under one and the same dropout."""
        delta = self.adapt.delta
        with self.learner.same_noise(v):
            ahead, _ = slope(tree.step(at, -delta, v))
        behind, _ = slope(tree.step(at, delta, v))
        product: Params = tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)
        return product

    def outer(self, y: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Params]]:
        # The buffers have moved in the pass at w; this one leaves them as they are.
        value, pullback, _ = self.learner.pull_loss(y, buffers, batch)
        return value, pullback

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        value_only = replace(self, adapt=replace(self.adapt, order="first"))  # no second derivative is needed
        adapted = Model(params=value_only.inner(model, data)[0], buffers=model["buffers"])
        return LocalLoss(self.learner).value(adapted, outer_data, outer_data)
