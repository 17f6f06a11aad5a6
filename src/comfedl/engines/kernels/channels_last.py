"""Convolutions on a CPU: one client after another, with the channels last in memory.

That is faster by half than the channels first, and than all clients at once by twice as much.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from comfedl.core import batchnorm_hvp
from comfedl.core.objectives import Batch, Learner, Params, Pullback, paired
from comfedl.engines.kernels.conv_chain import Chain
from comfedl.engines.kernels.layouts import last
from comfedl.utils import tree
from comfedl.utils.tree import Tree


class ChannelsLast(Learner):
    """A model of images whose data and weights lie with the channels last; the numbers are the same."""

    def __init__(self, learner: Learner) -> None:
        assert learner.module is not None
        super().__init__(learner.module, learner.loss_function, learner.metrics)
        assert self.module is not None
        pooled_first(self.module)
        self._chain = Chain.of(self.module) if self.loss_function is functional.cross_entropy else None
        batchnorm_hvp.made_curved(self.module)

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Any, Params]:
        return super().output(params, buffers, laid_out(x), train)

    def pull_loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        if self._chain is None or not self._chain.takes(params, batch):
            return super().pull_loss(params, buffers, batch)
        return self._chain.pull(params, buffers, laid_out(paired(batch)))

    def pull_curved(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        if self._chain is None or not self._chain.takes(params, batch):
            return super().pull_curved(params, buffers, batch)
        return self._chain.curve(params, buffers, laid_out(paired(batch)))


def convolves(module: nn.Module) -> bool:
    """Whether a model has layers that channels_last is for."""
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def pooled_first(module: nn.Module) -> nn.Module:
    """The module with each ReLU behind the max-pooling that follows it: the same numbers from fewer of them.

    The largest of what ReLU lets through is what it lets through of the largest, for the gradient too. It is changed in
    place; parameters keep their names.
    """
    for container in module.modules():
        if type(container) is nn.Sequential:
            layers = list(container._modules.items())
            for place, ((_, first), (_, second)) in enumerate(pairwise(layers)):
                if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not _watched(first, second):
                    layers[place], layers[place + 1] = layers[place + 1], layers[place]
            container._modules = dict(layers)
    return module


def _watched(*layers: nn.Module) -> bool:
    return any(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in layers)


def laid_out(images: Tree) -> Tree:
    """The tree with every tensor of four dimensions in channels_last."""
    return None if images is None else tree.map(last, images)


def plain(images: Tree) -> Tree:
    """The tree in torch's usual layout, in which tensors travel and are saved."""
    return None if images is None else tree.map(Tensor.contiguous, images)
