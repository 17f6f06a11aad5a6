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
from comfedl.engines.kernels.dense_grads import (
    SLOPES,
    curve_cross_entropy,
    descend_cross_entropy,
    named,
    pull_cross_entropy,
)
from comfedl.engines.sampling import Gathered, Room
from comfedl.engines.stacked import Stacked, unpacked
from comfedl.models.losses import PER_SAMPLE
from comfedl.models.metrics import WHOLE
from comfedl.utils import tree
from comfedl.utils.tree import Tree

# Layers that act on each number alone and have no parameters.
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh)
LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Flatten, nn.Identity, *ACTIVATIONS)
# Without noise, and with it.
CHAINED = (*LAYERS, nn.Dropout)


class Dense(Stacked):
    """A chain of linear layers, activations, LayerNorm, Embedding, Flatten and Dropout; ``obstacle`` says what is not.

    Dropout draws each client's noise from a generator of its own, as if that client ran alone.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        assert self.module is not None
        self.layers = [(name, _own(layer)) for name, layer in chain(self.module)]
        self._drops = drops(self.module)
        self._noise: list[torch.Generator] = []
        self._room = Room()
        # With dropout a client's noise depends on how many samples it has, so there is no padding.
        one_by_one = {self.loss_function, *self.metrics.values()} <= {*PER_SAMPLE, *WHOLE}
        self.ragged = one_by_one and not self._drops
        self._flattens = type(self.layers[0][1]) is nn.Flatten
        plain = self.layers[1:] if self._flattens else self.layers
        known = all(type(layer) in (nn.Linear, *SLOPES) for _, layer in plain)
        known = known and self.loss_function is functional.cross_entropy
        self._by_hand = named(plain) if known else None

    def seed(self, noise: Callable[[int], int], clients: Sequence[int]) -> None:
        if self._drops:
            self._noise = [torch.Generator().manual_seed(noise(client)) for client in clients]

    @contextmanager
    def _drawn_again(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self._noise]
        try:
            yield
        finally:
            for generator, state in zip(self._noise, states, strict=True):
                generator.set_state(state)

    def same_noise(self, like: Tree) -> AbstractContextManager[None]:
        return self._drawn_again()

    def copy(self) -> Self:
        self._noise, self._room = [], Room()  # of the step before
        return super().copy()

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Tensor, Params]:
        for name, layer in self.layers:
            if isinstance(layer, nn.Dropout):
                x = self._dropped(layer.p, x) if train else x
            else:
                x = _apply(layer, partial(_part, name, layer, params, len(x)), x)
        return x, buffers

    def _dropped(self, p: float, x: Tensor) -> Tensor:
        """Dropout as torch does it, each client with its own generator."""
        if p in (0, 1) or x.numel() == 0:  # nothing is drawn
            return x * (1 - p)
        kept = [
            torch.empty_like(own).bernoulli_(1 - p, generator=noise) for own, noise in zip(x, self._noise, strict=True)
        ]
        return x * torch.stack(kept).div_(1 - p)

    def pull_loss(self, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Pullback, Params]:
        if self._by_hand is not None:
            x, y, inside = self._flat(batch)
            if x.ndim == 3:
                return *pull_cross_entropy(self._by_hand, params, x, y, inside), buffers
        return super().pull_loss(params, buffers, batch)

    def pull_curved(self, params: Params, buffers: Params, batch: Batch) -> tuple[Params, Pullback, Params]:
        if self._by_hand is not None:
            x, y, inside = self._flat(batch)
            if x.ndim == 3:
                return *curve_cross_entropy(self._by_hand, params, x, y, inside), buffers
        return super().pull_curved(params, buffers, batch)

    def descend(self, model: Model, batches: Sequence[Batch], rate: float) -> tuple[Params, Tensor] | None:
        layers = self._by_hand
        if layers is None or not len(batches) or abs(rate) > tree.MAX_RATE:
            return None
        each = batches.in_turn(self._room) if isinstance(batches, Gathered) else batches
        return descend_cross_entropy(layers, model["params"], map(self._flat, each), float(rate))

    def _flat(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, which must be [clients, samples, features] for gradients that are written out, y, and which count."""
        x, y, inside = unpacked(batch)
        return x.flatten(2) if self._flattens else x, y, inside


def _apply(layer: nn.Module, part: partial[Tensor | None], x: Tensor) -> Tensor:
    """One layer of all clients: x is [clients, samples, ...]."""
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
    """A layer's parameter for all clients; one that is frozen is the module's own."""
    own: Tensor | None = getattr(layer, part)
    if own is None:
        return None
    found = params.get(f"{name}.{part}" if name else part)
    return own.detach().expand(clients, *own.shape) if found is None else found


def chain(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested ``nn.Sequential``s in order, each by the prefix of its parameters' names."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, layer in module._modules.items():
        assert layer is not None
        yield from chain(layer, f"{name}.{key}" if name else key)


def _own(layer: nn.Module) -> nn.Module:
    """A layer that does not write on its input, which may be the data."""
    if getattr(layer, "inplace", False):
        layer = copy.copy(layer)
        setattr(layer, "inplace", False)  # noqa: B010 - only some layers have it
    return layer


def drops(module: nn.Module) -> bool:
    """Whether a module has dropout."""
    return any(type(layer) is nn.Dropout for layer in module.modules())


def obstacle(module: nn.Module) -> str | None:
    """Why a module is no chain of dense layers; None where it is one."""
    for layer in module.modules():
        kind = type(layer)
        if kind is not nn.Sequential and kind not in CHAINED:
            return f"{kind.__name__} is not one of the dense layers ({', '.join(known.__name__ for known in CHAINED)})"
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks):
            return f"{kind.__name__} has hooks"
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            return "Flatten has dimensions of its own"
        if isinstance(layer, nn.Embedding) and (layer.padding_idx, layer.max_norm) != (None, None):
            return "Embedding has a padding_idx or a max_norm"
        if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
            return "Embedding has sparse or scaled gradients"
        if "forward" in vars(layer):
            return f"{kind.__name__} has a forward function of its own"
    if len(list(module.parameters())) != len(list(module.named_parameters(remove_duplicate=False))):
        return "two layers share a parameter"
    if any(True for _ in module.buffers()):
        return "it has buffers"
    return None
