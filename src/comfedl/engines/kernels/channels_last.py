"""Convolutions on a CPU: one client after another, in channels-last memory layout.

That is 1.5 times as fast as channels-first, and twice as fast as all clients at once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.learner import Batch, Learner, Params, Pullback, double_single_sample
from comfedl.engines.kernels.conv_chain import Chain
from comfedl.engines.kernels.layouts import channels_last
from comfedl.engines.kernels.products import gains, quicken
from comfedl.utils import tree
from comfedl.utils.samples import Samples
from comfedl.utils.tree import Tree


class ChannelsLast(Learner):
    """An image model with data and weights in channels-last layout; the results are the same."""

    def __init__(self, learner: Learner) -> None:
        assert learner.module is not None
        super().__init__(learner.module, learner.loss_function, learner.metrics)
        assert self.module is not None
        pool_before_relu(self.module)
        self._chain = Chain.of(self.module) if self.loss_function is functional.cross_entropy else None
        if gains(self.module):
            quicken(self.module)

    def to_layout(self, images: Tree) -> Tree:
        return None if images is None else tree.map(channels_last, images)

    def from_layout(self, images: Tree) -> Tree:
        return None if images is None else tree.map(Tensor.contiguous, images)

    def output(self, params: Params, buffers: Params, x: Samples, train: bool) -> tuple[Any, Params]:
        return super().output(params, buffers, self.to_layout(x), train)

    def loss_and_vjp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        if self._chain is None or not self._chain.takes(params, batch):
            return super().loss_and_vjp(params, buffers, batch)
        return self._chain.loss_and_vjp(params, buffers, self.to_layout(double_single_sample(batch)))

    def grad_and_hvp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        if self._chain is None or not self._chain.takes(params, batch):
            return super().grad_and_hvp(params, buffers, batch)
        return self._chain.grad_and_hvp(params, buffers, self.to_layout(double_single_sample(batch)))


def convolves(module: nn.Module) -> bool:
    """Whether a model has layers that gain from channels-last layout."""
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def pool_before_relu(module: nn.Module) -> nn.Module:
    """Swap each ReLU with a max-pooling right after it, so that it has fewer inputs.

    ReLU is monotone, so it commutes with the maximum, and so do their gradients. The module is changed in place;
    parameters keep their names.
    """
    for container in module.modules():
        if type(container) is nn.Sequential:
            layers = list(container._modules.items())
            for place, ((_, first), (_, second)) in enumerate(pairwise(layers)):
                if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not _hooked(first, second):
                    layers[place], layers[place + 1] = layers[place + 1], layers[place]
            container._modules = dict(layers)
    return module


def _hooked(*layers: nn.Module) -> bool:
    return any(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in layers)
