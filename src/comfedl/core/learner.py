"""A model as pure functions of its parameters and buffers: losses, gradients and Hessian-vector products.

Buffers (BatchNorm's running statistics) travel with the parameters. A local step updates them once, in the forward
pass of the inner map; the server averages them with the parameters' weights, and takes the maximum of counters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from comfedl.core.client_statistics import undefinable
from comfedl.models.functional import Stateless, may_attend
from comfedl.models.losses import LossFunction
from comfedl.models.metrics import MetricFunction, WholeMetric, is_whole
from comfedl.models.outputs import fits, joined, mean_of, of_samples, read, share
from comfedl.utils import samples, tree
from comfedl.utils.samples import Samples
from comfedl.utils.tree import Tree

if TYPE_CHECKING:
    from comfedl.core.optim import ClientOptimizer

Params = dict[str, Tensor]
Batch = tuple[Samples, Samples]
"""x and y, each a tensor, or a tuple or dict of tensors with one row per sample."""
Pullback = Callable[[Tree], Params]
"""A VJP: from the cotangent of a function's value to that of its parameters."""
Slope = Callable[[Tensor], Tensor]
"""The derivative of a scalar function applied on top of an objective, as a function of the objective's value."""

# Samples per forward pass in evaluation. Fixed, and in the data's order: with batch statistics, scores depend on both.
CHUNK = 500


class Model(TypedDict):
    """What travels: trained parameters, and buffers."""

    params: Params
    buffers: Params


class Learner:
    """A model's functions without its state: parameters and buffers are always arguments.

    ``module`` is None if a ``Composition`` trains a plain dict of tensors. ``metrics`` are functions (output, y): means
    over a batch, like the loss, or those of ``metrics.WHOLE``.
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
        self.attends = module is not None and may_attend(module)
        self.switched_kernels = False  # whether torch's kernels for attention were switched, for the whole process

    def copy(self) -> Self:
        """A deep copy, for another thread."""
        return copy.deepcopy(self)

    def descend(
        self, model: Model, batches: Sequence[Batch], rate: float, optimizer: ClientOptimizer, memory: Tree
    ) -> tuple[Params, Tensor, Tree] | None:
        """A fused loop of gradient steps, one per batch: the final parameters, each step's loss, and the memory.

        ``memory`` is the optimiser's state, which is overwritten. None if this learner has no fused loop for the model;
        a model with one has no buffers.
        """
        return None

    def clip(self, gradient: Params, most: float) -> Params:
        """The gradient, scaled down if its norm is above ``most``, as ``torch.nn.utils.clip_grad_norm_`` does."""
        norm = torch.stack([leaf.square().sum() for leaf in gradient.values()]).sum().sqrt()
        scale = (most / (norm + 1e-6)).clamp(max=1)
        return {name: leaf * scale for name, leaf in gradient.items()}

    def to_layout(self, tensors: Tree) -> Tree:
        """Tensors in the memory layout this learner computes in."""
        return tensors

    def from_layout(self, tensors: Tree) -> Tree:
        """Tensors in torch's default layout, in which they travel and are saved."""
        return tensors

    def repeat_noise(self, like: Tree) -> AbstractContextManager[None]:
        """Rewind the random generators on exit, so that the code after the block sees the same noise."""
        devices = {leaf.device for leaf in tree.leaves(like) if leaf.device.type == "cuda"}
        return torch.random.fork_rng(devices=sorted(devices, key=str))

    @property
    def module(self) -> nn.Module | None:
        """The model; only its structure is used."""
        return None if self.call is None else self.call.module

    def output(self, params: Params, buffers: Params, x: Samples, train: bool) -> tuple[Any, Params]:
        """The model's output on ``x``, and the updated buffers (unchanged unless ``train``)."""
        assert self.call is not None
        # The module updates its buffers in place; it gets copies, so that this function stays pure.
        after = {name: buffer.clone() for name, buffer in buffers.items()} if train else buffers
        return self.call(x, train, params, after), after

    def loss(self, params: Params, buffers: Params, batch: Batch, train: bool = True) -> tuple[Tensor, Params]:
        """The mean loss on a batch, and the updated buffers."""
        assert self.loss_function is not None
        x, y = double_single_sample(batch)
        output, after = self.output(params, buffers, x, train)
        return mean_of(self.loss_function, output, y), after

    def loss_and_vjp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        """The mean loss on a batch, its VJP (call it once), and the updated buffers."""
        return value_and_vjp(lambda params: self.loss(params, buffers, batch), params)

    def grad_and_hvp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        """The gradient of the mean loss, its Hessian-vector product (call it once), and the updated buffers."""

        def loss_gradient(params: Params) -> tuple[Params, Params]:
            loss, updated = self.loss(params, buffers, batch)
            return _vjp(loss, params, torch.ones_like(loss), create_graph=True), updated

        # The Hessian is symmetric, so the gradient's VJP is the Hessian-vector product. Of torch's kernels for
        # attention only the plain one has a second derivative.
        self.switched_kernels = self.attends
        with sdpa_kernel(SDPBackend.MATH) if self.attends else nullcontext():
            return value_and_vjp(loss_gradient, params)

    def mean_loss(self, model: Model, data: Batch) -> Tensor:
        """A model's mean loss on a whole dataset."""
        assert self.loss_function is not None
        return self.means(model, data, {"loss": self.loss_function})["loss"]

    def scores(self, model: Model, data: Batch) -> dict[str, Tensor]:
        """A model's loss and metrics on a whole dataset; metrics undefined on it are left out."""
        assert self.loss_function is not None
        found = self.means(model, data, {"loss": self.loss_function, **self.metrics})
        return {name: score for name, score in found.items() if not (undefinable(name) and not bool(score.isfinite()))}

    def means(self, model: Model, data: Batch, functions: Mapping[str, MetricFunction]) -> dict[str, Tensor]:
        """Functions (output, y) on a whole dataset, chunk by chunk and without a graph.

        They are means over samples, except those of ``metrics.WHOLE``, which need all outputs at once. Metrics of the
        library that cannot be told from such outputs are left out.
        """
        plain, whole = split_by_kind(functions)
        outputs: list[Any] = []
        sizes: list[int] = []
        parts: dict[str, list[tuple[float, Tensor]]] = {name: [] for name in plain}
        with torch.no_grad():
            for part in chunks(data):
                x, y = double_single_sample(part)
                output, _ = self.output(model["params"], model["buffers"], x, train=False)
                if whole:
                    sizes.append(samples.count(part[0]))
                    outputs.append(of_samples(output, samples.count(x), sizes[-1]))
                for name, function in plain.items():
                    seen = read(function, output, y)
                    if name != "loss" and not fits(function, *seen):
                        continue
                    # Of a sequence, every target that counts has the same share; there may be none in this chunk.
                    weight = share(function, seen[1])
                    parts[name].append((weight, function(*seen) if weight else seen[0].new_full((), math.nan)))
            means = {name: _weighted_mean(found) for name, found in parts.items() if found}
            if not whole:
                return means
            probe = self._probe(model, data, sizes[0]) if _needs_probe(outputs, sizes) else None
            entire = joined(outputs, sizes, probe)
            for name, metric in whole.items():
                output, y = read(metric, entire, data[1])
                if not fits(metric, output, y):
                    continue
                size = torch.tensor([samples.count(y)], device=samples.first(y).device)
                means[name] = metric(output, y, size)[0]
            return means

    def _probe(self, model: Model, data: Batch, chunk: int) -> tuple[Any, int]:
        """The output on a few samples, not as many as in a chunk, and their number."""
        size = 3 if chunk == 2 else 2
        with self.repeat_noise(model["params"]):
            x = samples.between(data[0], 0, size)
            return self.output(model["params"], model["buffers"], x, train=False)[0], size


def value_and_vjp(function: Callable[[Tree], tuple[Tree, Any]], at: Tree) -> tuple[Any, Callable[[Tree], Any], Any]:
    """The value of a function ``at -> (value, auxiliary)``, its VJP (call it once), and the auxiliary output."""
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), at)
    with torch.enable_grad():
        value, auxiliary = function(leaves)
    return tree.map(Tensor.detach, value), partial(_vjp, value, leaves), tree.map(Tensor.detach, auxiliary)


def _vjp(value: Tree, at: Tree, cotangent: Tree, create_graph: bool = False) -> Tree:
    """The vector-Jacobian product of a value with its inputs ``at``."""
    pairs = [(v, c) for v, c in zip(tree.leaves(value), tree.leaves(cotangent), strict=True) if v.requires_grad]
    if not pairs:  # a constant
        return tree.map(torch.zeros_like, at)
    # Gradients of scalars: passing cotangents to autograd.grad makes torch import sympy, which takes half a second.
    with torch.enable_grad():
        numbers = [(v * c).sum() if v.ndim else v * c for v, c in pairs]
    sources = list(tree.leaves(at))
    found = iter(torch.autograd.grad(numbers, sources, create_graph=create_graph, materialize_grads=True))
    return tree.map(lambda _: next(found), at)


def split_by_kind(functions: Mapping[str, MetricFunction]) -> tuple[dict[str, LossFunction], dict[str, WholeMetric]]:
    """Split functions into means over samples and metrics of a whole dataset."""
    plain = {name: cast(LossFunction, function) for name, function in functions.items() if not is_whole(function)}
    whole = {name: cast(WholeMetric, function) for name, function in functions.items() if is_whole(function)}
    return plain, whole


def double_single_sample(batch: Batch) -> Batch:
    """Repeat a single sample: means do not change, and batch statistics become defined."""
    x = batch[0]
    if (len(x) if isinstance(x, Tensor) else samples.count(x)) > 1:
        return batch
    return samples.cat([batch[0]] * 2), samples.cat([batch[1]] * 2)


def chunks(data: Batch) -> Iterator[Batch]:
    """Cut a dataset into parts of at most ``CHUNK`` samples, in order."""
    parts = math.ceil(samples.count(data[0]) / CHUNK)
    # Of nearly equal size, so that batch statistics never see a single leftover sample.
    sizes = [len(part) for part in samples.first(data[0]).tensor_split(parts)]
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        yield samples.between(data[0], stop - size, stop), samples.between(data[1], stop - size, stop)


def _needs_probe(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether chunks of one size leave open which tensors of their outputs have a row per sample."""
    return len(outputs) > 1 and len(set(sizes)) == 1 and not isinstance(outputs[0], Tensor)


def _weighted_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The mean of means over parts of these sizes; NaN if all are empty."""
    total = sum(size for size, _ in parts)
    if not total:
        return parts[0][1]
    return torch.stack([(size / total) * mean for size, mean in parts if size]).sum(dim=0)
