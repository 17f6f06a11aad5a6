"""Metrics and what is known about each of them, by name.

A metric is a mean over samples, ``metric(output, y)``, or a function of all of a client's outputs. The latter (RMSE,
R2, AUC), ``metric(output, y, sizes)``, takes the concatenated outputs of several clients and the number of samples of
each, and returns one number per client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BatchMetric = Callable[[Any, Tensor], Tensor]
WholeMetric = Callable[[Tensor, Tensor, Tensor], Tensor]
MetricFunction = BatchMetric | WholeMetric


def match_shapes(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the last dimension of an output of shape [N, 1], as nn.Linear gives it, if y is [N]; cast y to its dtype."""
    if output.ndim == y.ndim + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    return output, y.to(output.dtype)


def mean_per_sample(values: Tensor) -> Tensor:
    """Average over all dimensions but the first."""
    return values.flatten(1).mean(dim=1) if values.ndim > 1 else values


def squared_errors(output: Tensor, y: Tensor) -> Tensor:
    """The squared error of each sample."""
    output, y = match_shapes(output, y)
    return mean_per_sample((output - y).square())


def _absolute_errors(output: Tensor, y: Tensor) -> Tensor:
    output, y = match_shapes(output, y)
    return mean_per_sample((output - y).abs())


def _hits(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=1) == y).to(output.dtype)


def _binary_hits(output: Tensor, y: Tensor) -> Tensor:
    output, y = match_shapes(output, y)
    return ((output > 0) == (y > 0.5)).to(output.dtype)


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose largest output is at their label."""
    return _hits(output, y).mean()


def binary_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose logit has the sign of their label: positive for 1, negative for 0."""
    return _binary_hits(output, y).mean()


def mae(output: Tensor, y: Tensor) -> Tensor:
    """The mean absolute error."""
    return _absolute_errors(output, y).mean()


def rmse(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The root mean squared error of each client."""
    return (_sum_per_client(squared_errors(output, y), sizes) / sizes).sqrt().to(output.dtype)


def r2(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The coefficient of determination of each client; NaN if all its y are equal.

    With several outputs the sums of squares are added up over them. Predicting the client's own mean gives 0.
    """
    dtype = output.dtype
    output, y = (
        part.double().flatten(1) if part.ndim > 1 else part.double()[:, None] for part in match_shapes(output, y)
    )
    client, first = torch.repeat_interleave(sizes), sizes.cumsum(0) - sizes
    shifted = y - y[first][client]  # exactly 0 if all y are equal, whatever the rounding of their mean
    means = torch.stack([_sum_per_client(column, sizes) / sizes for column in shifted.unbind(dim=1)], dim=1)
    total = _sum_per_client((shifted - means[client]).square().sum(dim=1), sizes)
    residual = _sum_per_client((output - y).square().sum(dim=1), sizes)
    return torch.where(total > 0, 1 - residual / total, torch.nan).to(dtype)


def auc(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The area under the ROC curve of each client; NaN if it has one label only.

    It is the Mann-Whitney U statistic over the number of pairs, computed from mean ranks, so a tie counts half.
    """
    output, labels = match_shapes(output, y)
    dtype, output, positive = output.dtype, output.double(), labels > 0.5
    client = torch.repeat_interleave(sizes)
    order = output.argsort(stable=True)
    order = order[client[order].argsort(stable=True)]  # by client, then by output
    ranked, client, positive = output[order], client[order], positive[order]
    starts_tie = torch.ones_like(positive)
    starts_tie[1:] = (ranked[1:] != ranked[:-1]) | (client[1:] != client[:-1])
    tie = starts_tie.cumsum(0) - 1
    place = torch.arange(1, len(ranked) + 1, device=output.device, dtype=torch.float64)
    tie_sizes = torch.bincount(tie)
    rank = (torch.zeros_like(tie_sizes, dtype=torch.float64).index_add_(0, tie, place) / tie_sizes)[tie]
    rank = rank - (sizes.cumsum(0) - sizes)[client]
    positives = _sum_per_client(positive, sizes)
    pairs = positives * (sizes - positives)
    u = _sum_per_client(rank * positive, sizes) - positives * (positives + 1) / 2
    return torch.where(pairs > 0, u / pairs, torch.nan).to(dtype)


def _sum_per_client(values: Tensor, sizes: Tensor) -> Tensor:
    """Sum one number per sample over each client, in float64: a client may have many samples."""
    client = torch.repeat_interleave(sizes)
    return torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add_(0, client, values.double())


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: its name in the registry.
        function: ``metric(output, y)``, a mean over samples, or ``metric(output, y, sizes)`` if ``whole``.
        per_sample: the function that returns one number per sample; None if ``whole``.
        whole: whether it is a function of all of a client's outputs.
        smaller_is_better: whether the worst client is the one with the largest value.
        may_be_undefined: whether it is NaN for some data: AUC with one label only, R2 if all y are equal. Such a client
            has no value in the records, and summaries are over the others.
    """

    name: str
    function: MetricFunction
    per_sample: BatchMetric | None = None
    whole: bool = False
    smaller_is_better: bool = False
    may_be_undefined: bool = False


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, _hits),
        Metric("binary_accuracy", binary_accuracy, _binary_hits),
        Metric("mae", mae, _absolute_errors, smaller_is_better=True),
        Metric("rmse", rmse, whole=True, smaller_is_better=True),
        Metric("r2", r2, whole=True, may_be_undefined=True),
        Metric("auc", auc, whole=True, may_be_undefined=True),
    )
}

WHOLE: frozenset[MetricFunction] = frozenset(metric.function for metric in METRICS.values() if metric.whole)
"""The functions of the metrics that take all of a client's outputs."""
