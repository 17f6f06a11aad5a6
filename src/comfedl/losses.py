"""Losses and metrics: means over a batch, and for those known here the number of each single sample.

An engine that evaluates many clients in one pass takes each client's mean from the numbers of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

LossFunction = Callable[[Any, Tensor], Tensor]


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose largest output is their label."""
    return _hits(output, y).mean()


def _hits(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=1) == y).to(output.dtype)


def _cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


LOSSES: dict[str, tuple[LossFunction, dict[str, LossFunction]]] = {
    "cross_entropy": (functional.cross_entropy, {"accuracy": accuracy}),
}
"""The losses by the names that a config uses, with the metrics that go with each."""

PER_SAMPLE: Mapping[LossFunction, LossFunction] = {
    functional.cross_entropy: _cross_entropies,
    accuracy: _hits,
}
"""For a mean over a batch, the function that gives one number a sample."""

MAPPED: frozenset[LossFunction] = frozenset(
    {
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
    }
)
"""Means over a batch that are known to go through torch.func.vmap: they look at no value on the way."""
