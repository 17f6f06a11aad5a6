"""Convolutions on a CPU: one client after another, with the channels last in memory.

That is faster by half than the channels first, and than all clients at once by twice as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfedl import tree
from comfedl.problem import Learner, Params
from comfedl.tree import Tree


class ChannelsLast(Learner):
    """A model of images whose data and weights lie with the channels last; the numbers are the same."""

    def __init__(self, learner: Learner) -> None:
        self.call, self.loss_function, self.metrics = learner.call, learner.loss_function, learner.metrics

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Any, Params]:
        return super().output(params, buffers, laid_out(x), train)


def convolves(module: nn.Module) -> bool:
    """Whether a model has layers that channels_last is for."""
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def laid_out(images: Tree) -> Tree:
    """The tree with every tensor of four dimensions in channels_last."""
    if images is None:
        return None
    return tree.map(lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x, images)


def plain(images: Tree) -> Tree:
    """The tree in torch's usual layout, in which tensors travel and are saved."""
    return None if images is None else tree.map(Tensor.contiguous, images)
