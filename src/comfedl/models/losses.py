"""Losses, each a mean over a batch, with the metrics that go with it.

An engine that evaluates many clients in one pass needs the loss of each single sample: see ``PER_SAMPLE``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from comfedl.models.metrics import (
    METRICS,
    MetricFunction,
    binary_accuracy,
    mae,
    match_shapes,
    mean_per_sample,
    squared_errors,
)

LossFunction = Callable[[Any, Tensor], Tensor]


def _cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def _huber_losses(output: Tensor, y: Tensor) -> Tensor:
    return mean_per_sample(functional.huber_loss(*match_shapes(output, y), reduction="none"))


def _binary_cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    return mean_per_sample(functional.binary_cross_entropy_with_logits(*match_shapes(output, y), reduction="none"))


def mse(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    return squared_errors(output, y).mean()


def huber(output: Tensor, y: Tensor) -> Tensor:
    """The Huber loss: quadratic for errors below 1, linear above."""
    return _huber_losses(output, y).mean()


def bce(output: Tensor, y: Tensor) -> Tensor:
    """The binary cross-entropy; the output is a logit, positive for label 1."""
    return _binary_cross_entropies(output, y).mean()


def _metrics(*names: str) -> dict[str, MetricFunction]:
    return {name: METRICS[name].function for name in names}


LOSSES: dict[str, tuple[LossFunction, dict[str, MetricFunction]]] = {
    "cross_entropy": (functional.cross_entropy, _metrics("accuracy")),
    "bce": (bce, {"accuracy": binary_accuracy, **_metrics("auc")}),
    "mse": (mse, _metrics("rmse", "mae", "r2")),
    "mae": (mae, _metrics("rmse", "r2")),
    "huber": (huber, _metrics("rmse", "mae", "r2")),
}
"""Losses by the name used in a config, each with the metrics that are reported with it."""

REGRESSIONS = ("mse", "mae", "huber")
"""The losses whose y are real numbers instead of labels."""

PER_SAMPLE: Mapping[MetricFunction, LossFunction] = {
    **{metric.function: metric.per_sample for metric in METRICS.values() if metric.per_sample is not None},
    functional.cross_entropy: _cross_entropies,
    bce: _binary_cross_entropies,
    mse: squared_errors,
    huber: _huber_losses,
}
"""For each mean over a batch, loss or metric, the function that returns one number per sample."""

MAPPED: frozenset[MetricFunction] = frozenset(
    {
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
    }
)
"""Torch losses that are safe under torch.func.vmap: none branches on a value."""
