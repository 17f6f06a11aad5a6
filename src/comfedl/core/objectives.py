"""The composition ``outer(inner(w))`` that every method here minimises, and its stochastic gradient.

A client's objective is ``F_i(w) = E_zeta[g_i(E_xi[f_i(w; xi)]; zeta)]``, eq. (1) of the paper. Its stochastic
gradient is a vector-Jacobian product: the value and the pullback of the inner map on batch B, the gradient of the
outer function on batch B~, pulled back. ``gradient`` computes it and everything else calls that; the Jacobian is
never formed.

Buffers (the running statistics of BatchNorm) travel beside the parameters. A local step updates them once, in the
forward pass of the inner map; the server averages them with the weights that the parameters get, and counters
by their maximum.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from comfedl.core import batchnorm_hvp
from comfedl.core.client_statistics import undefinable
from comfedl.models.functional import Stateless
from comfedl.models.losses import WHOLE, Function, LossFunction, WholeMetric
from comfedl.utils import checks, tree
from comfedl.utils.tree import Tree

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
Pullback = Callable[[Tree], Params]
# The slope of a scalar function on top of an objective, from the objective's value.
Slope = Callable[[Tensor], Tensor]

# How many samples one forward pass takes when all of a client's data is evaluated. It is fixed, and the order is the
# data's own, because a model with batch statistics gives an answer that depends on both.
CHUNK = 500


class Model(TypedDict):
    """What travels: the parameters that are trained and the buffers that are not."""

    params: Params
    buffers: Params


class Learner:
    """A model's functions, without its state: parameters and buffers are always handed in.

    ``module`` is None where the reader's own problem trains a plain dict of tensors. ``metrics`` are means over a
    batch, like the loss, ``metric(output, y)``, or those of ``losses.WHOLE``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Function] | None = None,
    ) -> None:
        self.call = None if module is None else Stateless(copy.deepcopy(module))
        self.loss_function = loss
        self.metrics = metrics or {}

    def copy(self) -> Self:
        """The same learner with a module of its own, for another thread."""
        return copy.deepcopy(self)

    def descend(self, model: Model, batches: Sequence[Batch], rate: float) -> tuple[Params, Tensor] | None:
        """Where gradient steps on the loss end, one a batch, and each one's losses; None where it knows no short cut.

        A model for which it knows one has no buffers.
        """
        return None

    def same_noise(self, like: Tree) -> AbstractContextManager[None]:
        """What is drawn inside is drawn once more after it, on the devices of these tensors."""
        devices = {leaf.device for leaf in tree.leaves(like) if leaf.device.type == "cuda"}
        return torch.random.fork_rng(devices=sorted(devices, key=str))

    @property
    def module(self) -> nn.Module | None:
        """The model, for its structure alone."""
        return None if self.call is None else self.call.module

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Any, Params]:
        """The model's output on ``x``, and its buffers afterwards (unchanged where ``train`` is false)."""
        assert self.call is not None
        # The module writes to its buffers in place: it gets copies, so that this function stays pure.
        after = {name: buffer.clone() for name, buffer in buffers.items()} if train else buffers
        return self.call(x, train, params, after), after

    def loss(self, params: Params, buffers: Params, batch: Batch, train: bool = True) -> tuple[Tensor, Params]:
        """The mean loss on a batch, and the buffers afterwards."""
        assert self.loss_function is not None
        x, y = paired(batch)
        output, after = self.output(params, buffers, x, train)
        return self.loss_function(output, y), after

    def pull_loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        """The mean loss on a batch, its pullback to the parameters (to be called once), and the buffers afterwards."""
        return pull(lambda params: self.loss(params, buffers, batch), params)

    def pull_curved(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        """The gradient of the mean loss on a batch, its Hessian-vector product (to be called once), and the buffers."""

        def slope(params: Params) -> tuple[Params, Params]:
            with batchnorm_hvp.curved():
                loss, seen = self.loss(params, buffers, batch)
                return _pulled(loss, params, torch.ones_like(loss), create_graph=True), seen

        # The Hessian is symmetric: its product is its pullback.
        return pull(slope, params)

    def mean_loss(self, model: Model, data: Batch) -> Tensor:
        """The mean loss of a model on whole data."""
        assert self.loss_function is not None
        return self.means(model, data, {"loss": self.loss_function})["loss"]

    def scores(self, model: Model, data: Batch) -> dict[str, Tensor]:
        """The loss and the metrics of a model on whole data; one that these data do not define is left out."""
        assert self.loss_function is not None
        found = self.means(model, data, {"loss": self.loss_function, **self.metrics})
        return {name: score for name, score in found.items() if not (undefinable(name) and not bool(score.isfinite()))}

    def means(self, model: Model, data: Batch, functions: Mapping[str, Function]) -> dict[str, Tensor]:
        """Functions (output, y) over whole data, taken chunk by chunk and without a graph.

        They are means over the samples, but for those of ``losses.WHOLE``, which get all outputs.
        """
        plain, whole = apart(functions)
        outputs: list[Tensor] = []

        def of(part: Batch) -> dict[str, Tensor]:
            x, y = paired(part)
            output, _ = self.output(model["params"], model["buffers"], x, train=False)
            if whole:
                outputs.append(output[: len(part[0])])
            return {name: function(output, y) for name, function in plain.items()}

        means: dict[str, Tensor] = mean_over(data, of)
        if not whole:
            return means
        size = torch.tensor([len(data[1])], device=data[1].device)
        return means | {name: function(torch.cat(outputs), data[1], size)[0] for name, function in whole.items()}


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


def pull(function: Callable[[Tree], tuple[Tree, Any]], at: Tree) -> tuple[Any, Callable[[Tree], Any], Any]:
    """The value of a function, its pullback there (to be called once), and what else it gave."""
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), at)
    with torch.enable_grad():
        value, aside = function(leaves)
    return tree.map(Tensor.detach, value), partial(_pulled, value, leaves), tree.map(Tensor.detach, aside)


def _pulled(value: Tree, at: Tree, cotangent: Tree, create_graph: bool = False) -> Tree:
    """The vector-Jacobian product of a value with what it was computed from."""
    pairs = [(v, c) for v, c in zip(tree.leaves(value), tree.leaves(cotangent), strict=True) if v.requires_grad]
    if not pairs:  # a value that does not depend on anything
        return tree.map(torch.zeros_like, at)
    # As the gradients of single numbers: handing cotangents to autograd.grad makes torch load sympy, half a second.
    with torch.enable_grad():
        numbers = [(v * c).sum() if v.ndim else v * c for v, c in pairs]
    sources = list(tree.leaves(at))
    found = iter(torch.autograd.grad(numbers, sources, create_graph=create_graph, materialize_grads=True))
    return tree.map(lambda _: next(found), at)


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
    """The reader's own two-level problem, min over w of mean_i g(E f(w; xi); zeta).

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
class Own:
    """The objective of a reader's ``Composition``."""

    composition: Composition

    def inner(self, model: Model, batch: Batch, hessian_batch: Batch | None = None) -> tuple[Tree, Pullback, Params]:
        return pull(lambda params: (self.composition.inner(params, batch), model["buffers"]), model["params"])

    def outer(self, y: Tree, buffers: Params, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tree]]:
        value, pullback, _ = pull(lambda y: (self.composition.outer(y, batch), ()), y)
        return value, pullback

    def value(self, model: Model, data: Batch, outer_data: Batch) -> Tensor:
        # Both maps are the reader's: they get their data whole, since only they know whether they are means, and no
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


def apart(functions: Mapping[str, Function]) -> tuple[dict[str, LossFunction], dict[str, WholeMetric]]:
    """The functions that are means over samples, and those of whole data."""
    plain = {name: cast(LossFunction, function) for name, function in functions.items() if function not in WHOLE}
    whole = {name: cast(WholeMetric, function) for name, function in functions.items() if function in WHOLE}
    return plain, whole


def paired(batch: Batch) -> Batch:
    """A lone sample twice: its means are the same, and it has batch statistics."""
    return (torch.cat([batch[0]] * 2), torch.cat([batch[1]] * 2)) if len(batch[0]) == 1 else batch


def chunks(data: Batch) -> Iterator[Batch]:
    """Cut whole data into parts of at most ``CHUNK`` samples, in order."""
    parts = math.ceil(len(data[0]) / CHUNK)
    # Of nearly equal size, so that a model with batch statistics never gets a lone sample at the end.
    yield from zip(*(part.tensor_split(parts) for part in data), strict=True)


def mean_over(data: Batch, of: Callable[[Batch], Tree]) -> Tree:
    """The mean over all samples of means over a batch, taken chunk by chunk without a graph."""
    with torch.no_grad():
        parts = [(len(part[0]) / len(data[0]), of(part)) for part in chunks(data)]
        shares = [share for share, _ in parts]
        return tree.map(
            lambda *means: torch.stack([share * mean for share, mean in zip(shares, means, strict=True)]).sum(dim=0),
            *(means for _, means in parts),
        )
