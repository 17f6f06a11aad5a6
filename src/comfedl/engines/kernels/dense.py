"""Dense models of many clients: each linear layer is one batched matrix product."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.learner import Batch, Learner, Model, Params, Pullback
from comfedl.core.optim import ClientOptimizer
from comfedl.engines.batching import BatchBuffer, LazyBatches
from comfedl.engines.kernels.dense_grads import (
    SLOPES,
    cross_entropy_and_vjp,
    cross_entropy_grad_and_hvp,
    descend_cross_entropy,
    named,
)
from comfedl.engines.stacked import Stacked, unpack
from comfedl.models.losses import per_sample_form
from comfedl.models.metrics import is_whole
from comfedl.utils import tree
from comfedl.utils.tree import Tree

# Elementwise layers without parameters.
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh)
LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Flatten, nn.Identity, *ACTIVATIONS)
# With noise as well.
CHAINED = (*LAYERS, nn.Dropout)


class Dense(Stacked):
    """A chain of linear layers, activations, LayerNorm, Embedding, Flatten and Dropout; see ``obstacle``.

    Dropout draws each client's noise from a separate generator, as if that client ran alone.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        assert self.module is not None
        self.layers = [(name, _own(layer)) for name, layer in chain(self.module)]
        self._drops = drops(self.module)
        self._noise: list[torch.Generator] = []
        self._buffer = BatchBuffer()
        # With dropout a client's noise depends on its number of samples, so there is no padding.
        functions = (self.loss_function, *self.metrics.values())
        one_by_one = all(per_sample_form(function) is not None or is_whole(function) for function in functions)
        self.ragged = one_by_one and not self._drops
        self._flattens = type(self.layers[0][1]) is nn.Flatten
        plain = self.layers[1:] if self._flattens else self.layers
        known = all(type(layer) in (nn.Linear, *SLOPES) for _, layer in plain)
        known = known and self.loss_function is functional.cross_entropy
        self._closed_form = named(plain) if known else None

    def seed(self, noise: Callable[[int], int], clients: Sequence[int]) -> None:
        if self._drops:
            self._noise = [torch.Generator().manual_seed(noise(client)) for client in clients]

    @contextmanager
    def _rewind_noise(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self._noise]
        try:
            yield
        finally:
            for generator, state in zip(self._noise, states, strict=True):
                generator.set_state(state)

    def repeat_noise(self, like: Tree) -> AbstractContextManager[None]:
        return self._rewind_noise()

    def copy(self) -> Self:
        self._noise, self._buffer = [], BatchBuffer()  # leftovers of the previous step
        return super().copy()

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Tensor, Params]:
        for name, layer in self.layers:
            if isinstance(layer, nn.Dropout):
                x = self._dropout(layer.p, x) if train else x
            else:
                x = _apply(layer, partial(_part, name, layer, params, len(x)), x)
        return x, buffers

    def _dropout(self, p: float, x: Tensor) -> Tensor:
        """Dropout as in torch, with one generator per client."""
        if p in (0, 1) or x.numel() == 0:  # nothing is drawn
            return x * (1 - p)
        kept = [
            torch.empty_like(own).bernoulli_(1 - p, generator=noise) for own, noise in zip(x, self._noise, strict=True)
        ]
        return x * torch.stack(kept).div_(1 - p)

    def loss_and_vjp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        if self._closed_form is not None:
            x, y, mask = self._flat(batch)
            if x.ndim == 3:
                return *cross_entropy_and_vjp(self._closed_form, params, x, y, mask), buffers
        return super().loss_and_vjp(params, buffers, batch)

    def grad_and_hvp(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        if self._closed_form is not None:
            x, y, mask = self._flat(batch)
            if x.ndim == 3:
                return *cross_entropy_grad_and_hvp(self._closed_form, params, x, y, mask), buffers
        return super().grad_and_hvp(params, buffers, batch)

    def descend(
        self, model: Model, batches: Sequence[Batch], rate: float, optimizer: ClientOptimizer, memory: Tree
    ) -> tuple[Params, Tensor, Tree] | None:
        layers = self._closed_form
        if layers is None or not len(batches) or abs(rate) > tree.MAX_RATE:
            return None
        each = batches.iterate(self._buffer) if isinstance(batches, LazyBatches) else batches
        return descend_cross_entropy(layers, model["params"], map(self._flat, each), float(rate), optimizer, memory)

    def _flat(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (closed-form gradients need [clients, samples, features]), y, and the mask of samples that count."""
        x, y, mask = unpack(batch)
        return x.flatten(2) if self._flattens else x, y, mask


def _apply(layer: nn.Module, part: partial[Tensor | None], x: Tensor) -> Tensor:
    """One layer for all clients; x is [clients, samples, ...]."""
    if isinstance(layer, nn.Linear):
        weight, bias = part("weight"), part("bias")
        assert weight is not None
        flat, turned = x.reshape(len(x), -1, x.shape[-1]), weight.transpose(1, 2)
        out = torch.bmm(flat, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, turned)
        return out.view(*x.shape[:-1], out.shape[-1])
    if isinstance(layer, nn.LayerNorm):
        out = functional.layer_norm(x, list(layer.normalized_shape), eps=layer.eps)
        weight, bias = part("weight"), part("bias")
        front = (len(x), *(1,) * (x.ndim - 1 - len(layer.normalized_shape)))
        out = out if weight is None else out * weight.reshape(*front, *weight.shape[1:])
        return out if bias is None else out + bias.reshape(*front, *bias.shape[1:])
    if isinstance(layer, nn.Embedding):
        weight = part("weight")
        assert weight is not None
        first = torch.arange(len(x), device=x.device) * layer.num_embeddings
        return functional.embedding(x + first.reshape(-1, *(1,) * (x.ndim - 1)), weight.flatten(0, 1))
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    result: Tensor = layer(x)
    return result


def _part(name: str, layer: nn.Module, params: Params, clients: int, part: str) -> Tensor | None:
    """A layer's parameter for all clients; a frozen one comes from the module."""
    own: Tensor | None = getattr(layer, part)
    if own is None:
        return None
    found = params.get(f"{name}.{part}" if name else part)
    return own.detach().expand(clients, *own.shape) if found is None else found


def chain(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested ``nn.Sequential``s in order, each with the prefix of its parameters' names."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, layer in module._modules.items():
        assert layer is not None
        yield from chain(layer, f"{name}.{key}" if name else key)


def _own(layer: nn.Module) -> nn.Module:
    """A layer that does not work in place, since its input may be the data."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        setattr(layer, "inplace", False)  # noqa: B010 - only some layers have it
    return layer


def drops(module: nn.Module) -> bool:
    """Whether a module has dropout."""
    return any(type(layer) is nn.Dropout for layer in module.modules())


def obstacle(module: nn.Module) -> str | None:
    """Why a module is not a chain of dense layers; None if it is one."""
    for layer in module.modules():
        kind = type(layer)
        if kind is not nn.Sequential and kind not in CHAINED:
            return f"{kind.__name__} is not one of the dense layers ({', '.join(known.__name__ for known in CHAINED)})"
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks):
            return f"{kind.__name__} has hooks"
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            return "Flatten has non-default dimensions"
        if isinstance(layer, nn.Embedding) and (layer.padding_idx, layer.max_norm) != (None, None):
            return "Embedding has a padding_idx or a max_norm"
        if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
            return "Embedding has sparse or scaled gradients"
        if "forward" in vars(layer):
            return f"{kind.__name__} has an overridden forward function"
    if len(list(module.parameters())) != len(list(module.named_parameters(remove_duplicate=False))):
        return "two layers share a parameter"
    if any(True for _ in module.buffers()):
        return "it has buffers"
    return None
