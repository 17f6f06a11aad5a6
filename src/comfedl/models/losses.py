"""Losses and metrics: means over a batch, with the number of each single sample, and metrics of a client's whole data.

An engine that evaluates many clients in one pass takes each client's mean from the numbers of its samples. What is no
mean over samples (RMSE, R2, AUC) is a function of all outputs of some clients, one client after another, and how many
each has: ``metric(output, y, sizes)`` gives one number a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LossFunction = Callable[[Any, Tensor], Tensor]
WholeMetric = Callable[[Tensor, Tensor, Tensor], Tensor]
Function = LossFunction | WholeMetric


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose largest output is their label."""
    return _hits(output, y).mean()


def _hits(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(dim=1) == y).to(output.dtype)


def _cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


# One output a sample may stand in a column of its own, as nn.Linear gives it.


def alike(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output and y in one shape and type: where y is one number a sample, so is an output of one column."""
    if output.ndim == y.ndim + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    return output, y.to(output.dtype)


def _per_sample(each: Tensor) -> Tensor:
    return each.flatten(1).mean(dim=1) if each.ndim > 1 else each


def _squares(output: Tensor, y: Tensor) -> Tensor:
    output, y = alike(output, y)
    return _per_sample((output - y).square())


def _distances(output: Tensor, y: Tensor) -> Tensor:
    output, y = alike(output, y)
    return _per_sample((output - y).abs())


def _hubers(output: Tensor, y: Tensor) -> Tensor:
    return _per_sample(functional.huber_loss(*alike(output, y), reduction="none"))


def _binary(output: Tensor, y: Tensor) -> Tensor:
    return _per_sample(functional.binary_cross_entropy_with_logits(*alike(output, y), reduction="none"))


def _binary_hits(output: Tensor, y: Tensor) -> Tensor:
    output, y = alike(output, y)
    return ((output > 0) == (y > 0.5)).to(output.dtype)


def mse(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    return _squares(output, y).mean()


def mae(output: Tensor, y: Tensor) -> Tensor:
    """The mean absolute error."""
    return _distances(output, y).mean()


def huber(output: Tensor, y: Tensor) -> Tensor:
    """Huber's loss: half the squared error where it is below 1, and growing like the absolute one beyond."""
    return _hubers(output, y).mean()


def bce(output: Tensor, y: Tensor) -> Tensor:
    """The binary cross-entropy of an output that is a logit: above 0 speaks for label 1."""
    return _binary(output, y).mean()


def binary_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose logit is on the side of their label."""
    return _binary_hits(output, y).mean()


def rmse(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """Each client's root mean squared error."""
    return (_sums(_squares(output, y), sizes) / sizes).sqrt().to(output.dtype)


def r2(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """Each client's share of its own variance of y that the output explains; NaN where all its y are equal.

    With several outputs the variances are added up over them. A client's own mean explains nothing, and gives 0.
    """
    kind = output.dtype
    output, y = (part.double().flatten(1) if part.ndim > 1 else part.double()[:, None] for part in alike(output, y))
    owner, first = torch.repeat_interleave(sizes), sizes.cumsum(0) - sizes
    beside = y - y[first][owner]  # equal values are all 0 then, to the bit
    means = torch.stack([_sums(column, sizes) / sizes for column in beside.unbind(dim=1)], dim=1)
    spread = _sums((beside - means[owner]).square().sum(dim=1), sizes)
    left = _sums((output - y).square().sum(dim=1), sizes)
    return torch.where(spread > 0, 1 - left / spread, torch.nan).to(kind)


def auc(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """Each client's area under the ROC curve: the chance that a sample of label 1 has the larger output of a pair.

    A tie counts half. It is the Mann-Whitney statistic from mean ranks; NaN where a client has one label only.
    """
    output, labels = alike(output, y)
    kind, output, positive = output.dtype, output.double(), labels > 0.5
    owner = torch.repeat_interleave(sizes)
    order = output.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    ranked, owner, positive = output[order], owner[order], positive[order]
    new = torch.ones_like(positive)
    new[1:] = (ranked[1:] != ranked[:-1]) | (owner[1:] != owner[:-1])
    tie = new.cumsum(0) - 1
    place = torch.arange(1, len(ranked) + 1, device=output.device, dtype=torch.float64)
    ties = torch.bincount(tie)
    rank = (torch.zeros_like(ties, dtype=torch.float64).index_add_(0, tie, place) / ties)[tie]
    rank = rank - (sizes.cumsum(0) - sizes)[owner]
    ones = _sums(positive, sizes)
    pairs = ones * (sizes - ones)
    above = _sums(rank * positive, sizes) - ones * (ones + 1) / 2
    return torch.where(pairs > 0, above / pairs, torch.nan).to(kind)


def _sums(each: Tensor, sizes: Tensor) -> Tensor:
    """Each client's sum of one number a sample, in double precision as one long sum needs it."""
    owner = torch.repeat_interleave(sizes)
    return torch.zeros(len(sizes), dtype=torch.float64, device=each.device).index_add_(0, owner, each.double())


LOSSES: dict[str, tuple[LossFunction, dict[str, Function]]] = {
    "cross_entropy": (functional.cross_entropy, {"accuracy": accuracy}),
    "bce": (bce, {"accuracy": binary_accuracy, "auc": auc}),
    "mse": (mse, {"rmse": rmse, "mae": mae, "r2": r2}),
    "mae": (mae, {"rmse": rmse, "r2": r2}),
    "huber": (huber, {"rmse": rmse, "mae": mae, "r2": r2}),
}
"""The losses by the names that a config uses, with the metrics that go with each."""

REGRESSIONS = ("mse", "mae", "huber")
"""Those whose y are numbers and not labels."""

PER_SAMPLE: Mapping[Function, LossFunction] = {
    functional.cross_entropy: _cross_entropies,
    accuracy: _hits,
    bce: _binary,
    binary_accuracy: _binary_hits,
    mse: _squares,
    mae: _distances,
    huber: _hubers,
}
"""For a mean over a batch, the function that gives one number a sample."""

WHOLE: frozenset[Function] = frozenset({rmse, r2, auc})
"""Metrics of a client's whole data, ``metric(output, y, sizes)``."""

MAPPED: frozenset[Function] = frozenset(
    {
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
    }
)
"""Means over a batch that are known to go through torch.func.vmap: they look at no value on the way."""
