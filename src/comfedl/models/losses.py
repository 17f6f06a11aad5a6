"""Losses, each a mean over a batch, with the metrics that go with it.

An engine that evaluates many clients in one pass needs the loss of each single sample: see ``PER_SAMPLE``.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl.models.metrics import (
    BINARY,
    CLASSIFICATION,
    METRICS,
    REGRESSION,
    MetricFunction,
    binary_accuracy,
    mae,
    match_shapes,
    mean_per_sample,
    squared_errors,
)
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, DataError

LossFunction = Callable[[Any, Any], Tensor]


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

TASKS = {"cross_entropy": CLASSIFICATION, "bce": BINARY, "mse": REGRESSION, "mae": REGRESSION, "huber": REGRESSION}
"""The task of each loss."""

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


TORCH_OBJECTS: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BCEWithLogitsLoss: "bce",
    nn.MSELoss: "mse",
    nn.L1Loss: "mae",
    nn.HuberLoss: "huber",
}
"""torch's loss objects that are a named loss if their arguments are the defaults."""


def name_of_torch_object(loss: object) -> str | None:
    """The name of the loss that one of torch's objects with default arguments is; None for anything else."""
    name = TORCH_OBJECTS.get(type(loss))  # type: ignore[arg-type]
    return name if name is not None and _settings(loss) == _settings(type(loss)()) else None


def _settings(loss: Any) -> dict[str, Any]:
    """Arguments, weights (None by default) and hooks; everything but whether the module is in training mode."""
    return {key: value for key, value in vars(loss).items() if key != "training"}


MODEL_LOSS = "model"
"""The name of the loss that the model itself computes; see ``outputs.model_loss``."""


def usable_loss(loss: Any) -> Any:
    """A loss as it was meant: an object for a class, and the mean for torch's ``reduction="none"``.

    Raises:
        ConfigError: if it is not clear what was meant.
    """
    if isinstance(loss, type):
        try:
            loss = loss()
        except Exception as error:
            raise ConfigError(
                f"loss is the class {loss.__name__}, which cannot be made without arguments ({error}); give an object "
                "such as nn.CrossEntropyLoss()."
            ) from None
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "mean":
        return loss
    if reduction == "none" and isinstance(loss, nn.Module) and getattr(loss, "weight", None) is None:
        loss = copy.copy(loss)
        loss.reduction = "mean"
        return loss
    weighted = " with weights, whose mean can be taken in two ways" if reduction == "none" else ", which is no mean"
    raise ConfigError(
        f"loss is {loss!r} with reduction={reduction!r}{weighted}; a loss must return the mean of a batch: give it "
        'reduction="mean".'
    )


class Loss(ABC):
    """A loss with arguments; what it has in common with the plain loss ``like``: labels, outputs and metrics."""

    name: ClassVar[str]
    like: ClassVar[str]

    @abstractmethod
    def per_sample(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample."""

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean over samples. Class weights are not normalised per batch, as torch does: that would give a sample
        another weight in each batch, and a client with rare classes alone the same loss as without weights."""
        return self.per_sample(output, y).mean()

    def resolved(self, labels: Tensor, outputs: int) -> Loss:
        """This loss with "balanced" weights turned into numbers, from all clients' train labels."""
        return self


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy with class weights and label smoothing; without either it is the loss "cross_entropy".

    Args:
        class_weights: one number per class that multiplies the loss of its samples; or "balanced", n / (classes * n_c)
            with the counts of all clients' train data, so that all classes count the same and the mean weight is 1.
        label_smoothing: the share of the label's probability that is spread over all classes, as in torch.
    """

    class_weights: str | tuple[float, ...] | None = None
    label_smoothing: float = 0.0

    name: ClassVar[str] = "cross_entropy"
    like: ClassVar[str] = "cross_entropy"

    def __post_init__(self) -> None:
        _check_weights(self)
        checks.between("label_smoothing", self.label_smoothing, 0, 1)

    def per_sample(self, output: Tensor, y: Tensor) -> Tensor:
        weight = _weight_tensor(self.class_weights, output)
        return functional.cross_entropy(
            output, y, weight=weight, label_smoothing=float(self.label_smoothing), reduction="none"
        )

    def resolved(self, labels: Tensor, outputs: int) -> CrossEntropy:
        return replace(self, class_weights=_balanced(self.class_weights, labels, outputs))


@dataclass(frozen=True)
class Focal(Loss):
    """The focal loss (Lin et al. 2017), ``(1 - p) ** gamma`` times the cross-entropy, p the probability of the label.

    Args:
        gamma: 0 is the cross-entropy; a larger one looks away from samples that are classified well.
        class_weights: as in ``CrossEntropy``.
    """

    gamma: float = 2.0
    class_weights: str | tuple[float, ...] | None = None

    name: ClassVar[str] = "focal"
    like: ClassVar[str] = "cross_entropy"

    def __post_init__(self) -> None:
        _check_weights(self)
        checks.not_below("gamma", self.gamma, 0)

    def per_sample(self, output: Tensor, y: Tensor) -> Tensor:
        plain = functional.cross_entropy(output, y, reduction="none")
        # 1 - p, never exactly 0: its power would have no finite slope there if gamma is below 1.
        missing = (-torch.expm1(-plain)).clamp(min=1e-12)
        weight = _weight_tensor(self.class_weights, output)
        focused = missing ** float(self.gamma) * plain
        return focused if weight is None else weight[y] * focused

    def resolved(self, labels: Tensor, outputs: int) -> Focal:
        return replace(self, class_weights=_balanced(self.class_weights, labels, outputs))


@dataclass(frozen=True)
class BCE(Loss):
    """Binary cross-entropy of one logit, with a weight for label 1; without it, it is the loss "bce".

    Args:
        positive_weight: multiplies the loss of samples with label 1; or "balanced", the ratio of the counts of label 0
            and label 1 in all clients' train data.
    """

    positive_weight: str | float | None = None

    name: ClassVar[str] = "bce"
    like: ClassVar[str] = "bce"

    def __post_init__(self) -> None:
        if isinstance(self.positive_weight, str):
            checks.one_of("positive_weight", self.positive_weight, ["balanced"])
        elif self.positive_weight is not None:
            checks.positive("positive_weight", self.positive_weight)

    def per_sample(self, output: Tensor, y: Tensor) -> Tensor:
        plain = _binary_cross_entropies(output, y)
        if self.positive_weight is None:
            return plain
        weights = torch.where(y > 0.5, float(self.positive_weight), 1.0).to(plain.dtype)
        return plain * mean_per_sample(weights)

    def resolved(self, labels: Tensor, outputs: int) -> BCE:
        if self.positive_weight != "balanced":
            return self
        positive = int((labels > 0.5).sum())
        if positive in (0, labels.numel()):
            raise DataError('positive_weight is "balanced", but all train labels are the same; give a number.')
        return replace(self, positive_weight=(labels.numel() - positive) / positive)


OWN_LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (CrossEntropy, Focal, BCE)}
"""Losses with arguments, by the name used in a config."""


@dataclass(frozen=True)
class Squared(Loss):
    """The square of another loss, sample by sample, from whose mean the loss's variance follows."""

    of: LossFunction

    name: ClassVar[str] = "squared"
    like: ClassVar[str] = "mse"

    def per_sample(self, output: Tensor, y: Tensor) -> Tensor:
        return known_per_sample(self.of)(output, y).square()


def is_balanced(loss: object) -> bool:
    """Whether a loss needs all clients' labels to be resolved."""
    return "balanced" in (getattr(loss, "class_weights", None), getattr(loss, "positive_weight", None))


def per_sample_form(function: object) -> LossFunction | None:
    """The function that returns one number per sample, for a mean over samples; None if there is none."""
    if isinstance(function, Loss):
        return function.per_sample
    try:
        return PER_SAMPLE.get(function)  # type: ignore[call-overload, no-any-return]
    except TypeError:  # not hashable
        return None


def known_per_sample(function: object) -> LossFunction:
    """The same, for the offset Shrinkage, which needs it."""
    found = per_sample_form(function)
    if found is None:
        raise ConfigError(
            f"The offset Shrinkage needs the loss of each sample, but of {function!r} only the mean is known; use a "
            "loss by its name, or a subclass of cf.Loss with per_sample."
        )
    return found


def _check_weights(loss: CrossEntropy | Focal) -> None:
    weights = loss.class_weights
    if isinstance(weights, str):
        checks.one_of("class_weights", weights, ["balanced"])
        return
    if weights is None:
        return
    try:
        numbers = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        numbers = (-1.0,)
    if not numbers or not all(math.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
        raise ConfigError(
            f'class_weights is {weights!r}, but it must be "balanced", or one number of 0 or more per class.'
        )
    object.__setattr__(loss, "class_weights", numbers)


@lru_cache(64)
def _as_tensor(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=dtype, device=device)


def _weight_tensor(weights: str | tuple[float, ...] | None, output: Tensor) -> Tensor | None:
    assert not isinstance(weights, str), "resolved before training"
    return None if weights is None else _as_tensor(weights, output.dtype, output.device)


def _balanced(weights: str | tuple[float, ...] | None, labels: Tensor, outputs: int) -> tuple[float, ...] | None:
    labels = labels[labels >= 0]  # some targets of a sequence do not count
    if isinstance(weights, str):
        counts = torch.bincount(labels.long().clamp(min=0), minlength=outputs).tolist()
        present = sum(count > 0 for count in counts)
        return tuple(len(labels) / (present * count) if count else 0.0 for count in counts)
    if weights is not None and len(weights) != outputs:
        raise ConfigError(
            f"class_weights has {len(weights)} numbers, but the model has {outputs} outputs; give one each."
        )
    return weights
