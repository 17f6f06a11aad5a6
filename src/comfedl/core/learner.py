"""A model as pure functions: parameters and buffers are handed in, losses and derivatives come back.

Buffers (the running statistics of BatchNorm) travel beside the parameters. A local step updates them once, in the
forward pass of the inner map; the server averages them with the weights of the parameters, and takes the maximum of
counters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from comfedl.core.client_statistics import undefinable
from comfedl.models.functional import Stateless
from comfedl.models.losses import LossFunction
from comfedl.models.metrics import WHOLE, MetricFunction, WholeMetric
from comfedl.utils import tree
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
    batch, like the loss, ``metric(output, y)``, or those of ``metrics.WHOLE``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        loss: LossFunction | None = None,
        metrics: Mapping[str, MetricFunction] | None = None,
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

    def to_layout(self, tensors: Tree) -> Tree:
        """Tensors in the memory layout that this learner computes in."""
        return tensors

    def from_layout(self, tensors: Tree) -> Tree:
        """Tensors in torch's usual layout, in which they travel and are saved."""
        return tensors

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

    def means(self, model: Model, data: Batch, functions: Mapping[str, MetricFunction]) -> dict[str, Tensor]:
        """Functions (output, y) over whole data, taken chunk by chunk and without a graph.

        They are means over the samples, but for those of ``metrics.WHOLE``, which get all outputs.
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


def apart(functions: Mapping[str, MetricFunction]) -> tuple[dict[str, LossFunction], dict[str, WholeMetric]]:
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
