"""Calling a module with other parameters: torch.func.functional_call, but the tensors are looked up only once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfedl.utils.samples import Samples


class Stateless:
    """Calls a module with other parameters and buffers, and restores its own afterwards.

    Tied tensors, which the module holds in several places under one name, are replaced in all of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    slots.setdefault(id(tensor), []).append((table, key))
        named = [*module.named_parameters(), *module.named_buffers()]
        self._slots = {name: slots[id(tensor)] for name, tensor in named}

    def __call__(self, x: Samples, train: bool, *tensors: Mapping[str, Tensor]) -> Any:
        """The output on ``x`` with these tensors, by name, in train or eval mode."""
        if self.module.training is not train:
            self.module.train(train)
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for part in tensors:
                for name, tensor in part.items():
                    for table, key in self._slots[name]:
                        replaced.append((table, key, table[key]))
                        table[key] = tensor
            return called(self.module, x)
        finally:
            for table, key, tensor in replaced:
                table[key] = tensor


def called(module: nn.Module, x: Samples) -> Any:
    """The module's output; a tuple gives its positional arguments, and a dict its keywords."""
    if isinstance(x, Tensor):
        return module(x)
    return module(**x) if isinstance(x, dict) else module(*x)


def may_attend(module: nn.Module) -> bool:
    """Whether a module may call torch's attention: torch's own module does, and any of the user's might."""
    return any(
        isinstance(part, nn.MultiheadAttention) or not type(part).__module__.startswith("torch.nn.modules")
        for part in module.modules()
    )


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with these parameters and buffers, in eval mode."""
    filled = copy.deepcopy(module).eval()
    own = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    with torch.no_grad():
        for name, part in tensors.items():
            own[name].copy_(part)
    return filled
