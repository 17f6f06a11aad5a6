"""A module applied to tensors that are not its own: as torch.func.functional_call, with the search done once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Stateless:
    """Calls a module with other parameters and buffers in the place of its own, which it gets back.

    A tensor that a module holds in two places is one, and is put in both.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        homes: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    homes.setdefault(id(tensor), []).append((table, key))
        named = [*module.named_parameters(), *module.named_buffers()]
        self._homes = {name: homes[id(tensor)] for name, tensor in named}

    def __call__(self, x: Tensor, train: bool, *tensors: Mapping[str, Tensor]) -> Any:
        """The module's output on ``x`` with these tensors by name, in the mode of training or of evaluation."""
        if self.module.training is not train:
            self.module.train(train)
        own: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for part in tensors:
                for name, tensor in part.items():
                    for table, key in self._homes[name]:
                        own.append((table, key, table[key]))
                        table[key] = tensor
            return self.module(x)
        finally:
            for table, key, tensor in own:
                table[key] = tensor


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module that holds these parameters and buffers, in the mode of evaluation."""
    filled = copy.deepcopy(module).eval()
    own = {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
    with torch.no_grad():
        for name, part in tensors.items():
            own[name].copy_(part)
    return filled
