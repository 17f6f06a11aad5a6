"""Closed-form gradients and Hessian-vector products of a chain of layers under cross-entropy.

Autograd's double backward differentiates the graph of the gradient and computes much that is not needed. Instead, the
gradient's passes keep their intermediate values, and a Hessian-vector product is one more forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.learner import Batch, Params, Pullback
from comfedl.engines.kernels.dense import chain
from comfedl.engines.kernels.layers import (
    ACTIVATIONS,
    Activation,
    Convolution,
    CrossEntropy,
    Fixed,
    Layer,
    Linear,
    MaxPool,
    Norm,
    Pass,
)
from comfedl.engines.kernels.layouts import Pool, channels_last, max_pool

# Makes a layer for one pass over one batch.
Make = Callable[[Pass], Layer]

aten = torch.ops.aten


class Chain:
    """A chain of known layers under cross-entropy."""

    def __init__(self, makes: Sequence[Make]) -> None:
        self._makes = makes

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        """The module as a chain of image layers followed by flat ones; None if it is not one."""
        if not _is_plain(module):
            return None
        makes = _makes([(name, layer) for name, layer in chain(module) if type(layer) is not nn.Identity])
        return None if makes is None else cls(makes)

    def takes(self, params: Params, batch: Batch) -> bool:
        """Whether a batch is supported: images on the CPU, with labels."""
        x, y = batch
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return False
        images = x.ndim == 4 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        return images and y.ndim == 1 and len(params) > 0

    def loss_and_vjp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        """The mean cross-entropy, its VJP (call it once), and the updated buffers."""
        value, layers, loss, after = _forward(self._makes, params, buffers, batch)
        return value.clone(), lambda d: _copies(params, _vjp(layers, loss, d)), _copies(after, after)

    def grad_and_hvp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        """The gradient, the Hessian-vector product (call it once), and the updated buffers."""
        _, layers, loss, after = _forward(self._makes, params, buffers, batch)
        found = _copies(params, _gradient(layers, loss))
        return found, lambda v: _copies(params, _hvp(layers, loss, v)), _copies(after, after)


def _copies(names: Iterable[str], found: Params) -> Params:
    """Copies made outside of torch's inference mode, in the layout that they are computed in.

    Inference mode lowers the overhead per operation, but its tensors cannot be used by autograd later.
    """
    return {
        name: found[name].clone(memory_format=torch.channels_last if found[name].ndim == 4 else torch.preserve_format)
        for name in names
    }


@torch.inference_mode()
def _forward(
    makes: Sequence[Make], params: Params, buffers: Params, batch: Batch
) -> tuple[Tensor, list[Layer], CrossEntropy, Params]:
    """The loss, the layers from the first trained one on, the loss layer, and the updated buffers."""
    after = {name: buffer.clone() for name, buffer in buffers.items()}
    within = Pass(params, after)
    x, labels = batch
    layers: list[Layer] = []
    for make in makes:
        layer = make(within)
        x = layer.forward(x)
        if not layers:
            layer.lowest = layer.trains()
        if layers or layer.lowest:
            layers.append(layer)
    loss = CrossEntropy(labels)
    return loss.forward(x), layers, loss, after


@torch.inference_mode()
def _vjp(layers: list[Layer], loss: CrossEntropy, cotangent: Tensor) -> Params:
    d: Tensor | None = loss.backward(cotangent)
    found: Params = {}
    while layers:  # popping frees a layer's intermediate values as soon as it is done
        assert d is not None
        d = layers.pop().backward(d, found)
    return found


@torch.inference_mode()
def _gradient(layers: Sequence[Layer], loss: CrossEntropy) -> Params:
    d: Tensor | None = loss.backward(torch.ones_like(loss.total))
    found: Params = {}
    for layer in reversed(layers):
        assert d is not None
        d = layer.backward(d, found)
    return found


@torch.inference_mode()
def _hvp(layers: list[Layer], loss: CrossEntropy, v: Params) -> Params:
    dx: Tensor | None = None
    for layer in layers:
        dx = layer.forward_along(dx, v)
    assert dx is not None
    dd: Tensor | None = loss.along(dx)
    found: Params = {}
    while layers:
        assert dd is not None
        dd = layers.pop().backward_along(dd, found)
    return found


def _makes(layers: Sequence[tuple[str, nn.Module]]) -> list[Make] | None:
    """Constructors of these layers; None if one is unknown, or if there is no Flatten."""
    makes: list[Make] = []
    flat = False
    while layers:
        made = _made(layers, flat)
        if made is None:
            return None
        make, taken = made
        flat = flat or type(layers[0][1]) is nn.Flatten
        makes.append(make)
        layers = layers[taken:]
    return makes if flat else None


def _made(layers: Sequence[tuple[str, nn.Module]], flat: bool) -> tuple[Make, int] | None:
    """The constructor of the first layer, and how many of these layers it covers; None if it is unknown."""
    (name, layer), kind = layers[0], type(layers[0][1])
    if kind in ACTIVATIONS:
        return lambda within: Activation(kind), 1
    if kind in ((nn.Linear, nn.BatchNorm1d) if flat else ()):
        if isinstance(layer, nn.Linear):
            return lambda within: Linear(name, layer, within), 1
        return lambda within: Norm(name, layer, within, None), 1
    if flat:
        return None
    if type(layer) is nn.Conv2d:
        padding = _padding(layer)
        normed = len(layers) > 1 and type(layers[1][1]) is nn.BatchNorm2d
        return None if padding is None else (lambda within: Convolution(name, layer, within, padding, normed), 1)
    if kind is nn.BatchNorm2d:
        pool = _pool(layers[1:])
        return lambda within: Norm(name, layer, within, pool), 1 if pool is None else 2
    if kind is nn.MaxPool2d:
        pool = _pool(layers)
        return None if pool is None else (lambda within: MaxPool(pool), 1)
    fixed = _fixed(layer)
    return None if fixed is None else (lambda within: Fixed(*fixed), 1)


def _padding(layer: nn.Conv2d) -> list[int] | None:
    """A convolution's zero padding per side; None if it is asymmetric or not zeros."""
    if layer.padding_mode != "zeros":
        return None
    if not isinstance(layer.padding, str):
        return [*layer.padding]
    both = [
        0 if layer.padding == "valid" else d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
    ]
    return None if any(n % 2 for n in both) else [n // 2 for n in both]


def _pool(layers: Sequence[tuple[str, nn.Module]]) -> Pool | None:
    """The first of these layers as a max-pooling with indices; None if it is another layer."""
    layer = layers[0][1] if layers else None
    if type(layer) is not nn.MaxPool2d or layer.return_indices:
        return None
    sizes = [_pair(n) for n in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
    return partial(max_pool, sizes=sizes, ceil=layer.ceil_mode)


def _fixed(layer: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] | None:
    """A layer that is a linear map without parameters, and its transpose as a function (d, x)."""
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda x: x.flatten(1), lambda d, x: d.view(x.shape)
    if type(layer) is nn.AvgPool2d:
        sizes = [_pair(n) for n in (layer.kernel_size, layer.stride, layer.padding)]
        shape = *sizes, layer.ceil_mode, layer.count_include_pad, layer.divisor_override
        return (
            lambda x: aten.avg_pool2d(channels_last(x), *shape),
            lambda d, x: aten.avg_pool2d_backward(channels_last(d), channels_last(x), *shape),
        )
    if type(layer) is nn.AdaptiveAvgPool2d:
        size = layer.output_size
        return (
            lambda x: functional.adaptive_avg_pool2d(channels_last(x), size),
            lambda d, x: aten._adaptive_avg_pool2d_backward(channels_last(d), channels_last(x)),
        )
    return None


def _pair(n: int | tuple[int, int]) -> list[int]:
    return [n, n] if isinstance(n, int) else [*n]


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks, no overridden forward, and no shared parameters or buffers."""
    for layer in module.modules():
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or "forward" in vars(layer):
            return False
    once = [*module.parameters(), *module.buffers()]
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return len(once) == len(every)
