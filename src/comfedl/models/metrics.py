"""Metrics and what is known about each of them, by name.

A metric is a mean over samples, ``metric(output, y)``, or a function of all of a client's outputs. The latter (RMSE,
R2, AUC), ``metric(output, y, sizes)``, takes the concatenated outputs of several clients and the number of samples of
each, and returns one number per client.

Metrics of classes take an output per class, [N, C], or one logit per sample. With two classes, F1, precision,
sensitivity and specificity are those of class 1; with more, they are means over the classes that the client's labels or
predictions contain, as in scikit-learn ("macro"). Whether a client has a value depends on its labels alone.

With several yes-or-no labels per sample, each has a logit. The accuracy is then the share of labels that are right, and
every other metric the mean over the labels for which it is defined.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfedl.utils.errors import ConfigError, MetricFailed, nearest
from comfedl.utils.samples import Samples

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
    return mean_per_sample(((output > 0) == (y > 0.5)).to(output.dtype))


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of samples that are classified correctly: the largest output is the label's."""
    return _hits(output, y).mean()


def binary_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """The share of labels whose logit has their sign: positive for 1, negative for 0."""
    return _binary_hits(output, y).mean()


def mae(output: Tensor, y: Tensor) -> Tensor:
    """The mean absolute error."""
    return _absolute_errors(output, y).mean()


def _of_each_label(metric: WholeMetric) -> WholeMetric:
    """With several labels per sample, the mean over those for which the metric is defined."""

    @functools.wraps(metric)
    def of_all(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        if y.ndim == 1:
            return metric(output, y, sizes)
        logits, labels = (part.flatten(1).unbind(dim=1) for part in match_shapes(output, y))
        return torch.stack([metric(*pair, sizes) for pair in zip(logits, labels, strict=True)]).nanmean(dim=0)

    return of_all


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


@_of_each_label
def auc(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The area under the ROC curve of each client; NaN if it has one label only.

    With more than two classes it is the mean over the classes that the client has, each against the rest.
    """
    return _over_classes(_auc, output, y, sizes)


@_of_each_label
def auprc(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The average precision (area under the precision-recall curve) of each client; NaN if it has no sample of class 1.

    With more than two classes it is the mean over the classes that the client has, each against the rest.
    """
    return _over_classes(_average_precision, output, y, sizes)


def _over_classes(metric: WholeMetric, output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """A metric of scores and 0/1 labels: of class 1, or the mean over each class against the rest where defined."""
    if _is_one_logit(output):
        return metric(output.reshape(len(output)).double(), y > 0.5, sizes).to(output.dtype)
    if output.shape[1] == 2:
        return metric(output[:, 1].double() - output[:, 0].double(), y == 1, sizes).to(output.dtype)
    p = _probabilities(output)
    each = torch.stack([metric(p[:, k], y == k, sizes) for k in range(p.shape[1])])
    return each.nanmean(dim=0).to(output.dtype)


def _auc(score: Tensor, positive: Tensor, sizes: Tensor) -> Tensor:
    """The Mann-Whitney U statistic over the number of pairs, computed from mean ranks, so a tie counts half."""
    ranked, client, positive, starts_tie = _ranked(score, positive, sizes)
    tie = starts_tie.cumsum(0) - 1
    place = torch.arange(1, len(ranked) + 1, device=score.device, dtype=torch.float64)
    tie_sizes = torch.bincount(tie)
    rank = (torch.zeros_like(tie_sizes, dtype=torch.float64).index_add_(0, tie, place) / tie_sizes)[tie]
    rank = rank - (sizes.cumsum(0) - sizes)[client]
    positives = _sum_per_client(positive, sizes)
    pairs = positives * (sizes - positives)
    u = _sum_per_client(rank * positive, sizes) - positives * (positives + 1) / 2
    return torch.where(pairs > 0, u / pairs, torch.nan)


def _average_precision(score: Tensor, positive: Tensor, sizes: Tensor) -> Tensor:
    """The sum over thresholds of the precision times the gain in recall; tied scores share a threshold."""
    _, client, positive, starts_tie = _ranked(-score, positive, sizes)
    tie = starts_tie.cumsum(0) - 1
    gained = torch.zeros(int(tie[-1]) + 1, dtype=torch.float64, device=score.device)
    gained = gained.index_add_(0, tie, positive.double())
    owner, positives = client[starts_tie], _sum_per_client(positive, sizes)
    found = gained.cumsum(0) - (positives.cumsum(0) - positives)[owner]
    seen = torch.bincount(tie).cumsum(0) - (sizes.cumsum(0) - sizes)[owner]
    area = torch.zeros_like(positives).index_add_(0, owner, gained * found / seen)
    return torch.where(positives > 0, area / positives, torch.nan)


def _ranked(score: Tensor, positive: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, clients and labels by client and then by score, and where another score than before begins."""
    client = torch.repeat_interleave(sizes)
    order = score.argsort(stable=True)
    order = order[client[order].argsort(stable=True)]
    ranked, client, positive = score[order], client[order], positive[order]
    starts_tie = torch.ones_like(positive)
    starts_tie[1:] = (ranked[1:] != ranked[:-1]) | (client[1:] != client[:-1])
    return ranked, client, positive, starts_tie


def _is_one_logit(output: Tensor) -> bool:
    return output.ndim == 1 or output.shape[1] == 1


def _probabilities(output: Tensor) -> Tensor:
    """The probability of each class, in float64; one logit gives two classes."""
    if not _is_one_logit(output):
        return output.double().softmax(dim=1)
    positive = output.reshape(len(output)).double().sigmoid()
    return torch.stack([1 - positive, positive], dim=1)


def _predicted(output: Tensor) -> Tensor:
    return (output.reshape(len(output)) > 0).long() if _is_one_logit(output) else output.argmax(dim=1)


@dataclass(frozen=True)
class _Counts:
    """For each client and class: samples of that class, predictions of it, and those that are right."""

    actual: Tensor
    predicted: Tensor
    hits: Tensor

    @classmethod
    def of(cls, output: Tensor, y: Tensor, sizes: Tensor) -> _Counts:
        classes = 2 if _is_one_logit(output) else output.shape[1]
        first = torch.repeat_interleave(sizes) * classes
        truth, guess = y.long(), _predicted(output)

        def count(cells: Tensor) -> Tensor:
            return torch.bincount(cells, minlength=len(sizes) * classes).view(len(sizes), classes).double()

        return cls(count(first + truth), count(first + guess), count((first + truth)[truth == guess]))

    def summarise(self, ratio: Tensor, defined: Tensor) -> Tensor:
        """Of two classes, that of class 1; of more, the mean over those seen in labels or predictions.

        ``defined``: where the ratio has a meaning; elsewhere it is left out, and a ratio of 0 / 0 counts as 0.
        """
        ratio = torch.where(defined, torch.nan_to_num(ratio), torch.nan)
        if ratio.shape[1] == 2:
            return ratio[:, 1]
        return torch.where(self.actual + self.predicted > 0, ratio, torch.nan).nanmean(dim=1)

    @property
    def has_class(self) -> Tensor:
        """With two classes, whether the client has samples of the class; with more, every class counts."""
        return self.actual > 0 if self.actual.shape[1] == 2 else torch.ones_like(self.actual, dtype=torch.bool)


@_of_each_label
def f1(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The F1 score of each client: of class 1 (NaN without samples of it), or the mean over classes."""
    n = _Counts.of(output, y, sizes)
    return n.summarise(2 * n.hits / (n.actual + n.predicted), n.has_class).to(output.dtype)


@_of_each_label
def precision(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The share of predictions of a class that are correct, 0 if it is never predicted; averaged as ``f1``."""
    n = _Counts.of(output, y, sizes)
    return n.summarise(n.hits / n.predicted, n.has_class).to(output.dtype)


@_of_each_label
def sensitivity(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The share of a class's samples that are recognised (recall); averaged as ``f1``."""
    n = _Counts.of(output, y, sizes)
    return n.summarise(n.hits / n.actual, n.has_class).to(output.dtype)


@_of_each_label
def specificity(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The share of the other classes' samples that are not predicted as the class; NaN without such samples."""
    n = _Counts.of(output, y, sizes)
    others = sizes[:, None] - n.actual
    return n.summarise(1 - (n.predicted - n.hits) / others, others > 0).to(output.dtype)


@_of_each_label
def balanced_accuracy(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The mean sensitivity over the classes that a client has."""
    n = _Counts.of(output, y, sizes)
    return torch.where(n.actual > 0, n.hits / n.actual, torch.nan).nanmean(dim=1).to(output.dtype)


def _brier_scores(output: Tensor, y: Tensor) -> Tensor:
    if y.ndim > 1:
        return squared_errors(output.sigmoid(), y)
    p = _probabilities(output)
    wrong = (p - torch.nn.functional.one_hot(y.long(), p.shape[1])).square().sum(dim=1)
    return (wrong / 2 if p.shape[1] == 2 else wrong).to(output.dtype)


def brier(output: Tensor, y: Tensor) -> Tensor:
    """The Brier score: the squared error of the probability of class 1, or summed over more than two classes."""
    return _brier_scores(output, y).mean()


ECE_BINS = 15


@_of_each_label
def ece(output: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """The expected calibration error of each client: |confidence - accuracy| in 15 bins of equal width.

    The confidence is the largest probability, and bins are weighted by their samples.
    """
    confidence = _probabilities(output).amax(dim=1)
    cell = torch.repeat_interleave(sizes) * ECE_BINS + ((confidence * ECE_BINS).ceil().long() - 1).clamp(min=0)
    gap = torch.zeros(len(sizes) * ECE_BINS, dtype=torch.float64, device=output.device)
    gap.index_add_(0, cell, confidence - (_predicted(output) == y.long()).double())
    return (gap.view(len(sizes), ECE_BINS).abs().sum(dim=1) / sizes).to(output.dtype)


def _sum_per_client(values: Tensor, sizes: Tensor) -> Tensor:
    """Sum one number per sample over each client, in float64: a client may have many samples."""
    client = torch.repeat_interleave(sizes)
    return torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add_(0, client, values.double())


@dataclass(frozen=True)
class Metric:
    """A metric of one's own, for ``fit(metrics={"cost": Metric(cost, smaller_is_better=True)})``.

    Attributes:
        function: (output, y) -> a number, of all samples of a client; NaN if it is undefined for that client.
        smaller_is_better: whether the worst client is the one with the largest value.
    """

    function: Callable[[Tensor, Tensor], Any]
    smaller_is_better: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise ConfigError(f"A metric's function is {self.function!r}, but it must be a function (output, y).")
        if not isinstance(self.smaller_is_better, bool):
            raise ConfigError(f"smaller_is_better is {self.smaller_is_better!r}, but it must be true or false.")


_ONE_AT_A_TIME = threading.Lock()  # clients may run on several threads, and a user's function may hold state


def _copied(part: Any) -> Any:
    """A copy; of a tensor only its own rows, which may be a view of all clients'."""
    return part.clone() if isinstance(part, Tensor) else copy.deepcopy(part)


@dataclass(frozen=True, eq=False)
class PerClient:
    """A user's function (output, y) as a metric of several clients, called once for each."""

    name: str
    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, output: Any, y: Samples, sizes: Tensor) -> Tensor:
        """The metric of each client; the function gets copies, so it may work in place."""
        parts: Iterable[tuple[Any, Any]] = [(output, y)]
        if len(sizes) > 1:
            parts = zip(torch.split(output, sizes.tolist()), torch.split(y, sizes.tolist()), strict=True)
        with _ONE_AT_A_TIME:
            values = [
                self._of_one(k, _copied(own), _copied(labels), size)
                for k, ((own, labels), size) in enumerate(zip(parts, sizes.tolist(), strict=True))
            ]
        return torch.tensor(values, dtype=torch.float64, device=sizes.device)

    def _of_one(self, place: int, output: Any, y: Any, size: int) -> float:
        try:
            value = self.function(output, y)
        except Exception as error:  # the user's function may raise anything
            reason = f"raised {type(error).__name__}" + (f" ({error})" if str(error) else "")
            raise MetricFailed(self.name, place, size, reason) from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            reason = f"returned {kind}, but it must return one number"
            raise MetricFailed(self.name, place, size, reason) from None


CLASSIFICATION, BINARY, REGRESSION = "classification", "binary", "regression"
"""The tasks: one output per class, one logit for two classes, and numbers."""


@dataclass(frozen=True)
class RegisteredMetric:
    """A metric of the registry.

    Attributes:
        name: its name in the registry.
        function: ``metric(output, y)``, a mean over samples, or ``metric(output, y, sizes)`` if ``whole``.
        per_sample: the function that returns one number per sample; None if ``whole``.
        whole: whether it is a function of all of a client's outputs.
        smaller_is_better: whether the worst client is the one with the largest value.
        may_be_undefined: whether it is NaN for some data: AUC with one label only, R2 if all y are equal. Such a client
            has no value in the records, and summaries are over the others.
        tasks: the tasks that it is for.
    """

    name: str
    function: MetricFunction
    per_sample: BatchMetric | None = None
    whole: bool = False
    smaller_is_better: bool = False
    may_be_undefined: bool = False
    tasks: tuple[str, ...] = (CLASSIFICATION, BINARY)


METRICS: dict[str, RegisteredMetric] = {
    metric.name: metric
    for metric in (
        RegisteredMetric("accuracy", accuracy, _hits, tasks=(CLASSIFICATION,)),
        RegisteredMetric("binary_accuracy", binary_accuracy, _binary_hits, tasks=(BINARY,)),
        RegisteredMetric("balanced_accuracy", balanced_accuracy, whole=True),
        RegisteredMetric("f1", f1, whole=True, may_be_undefined=True),
        RegisteredMetric("precision", precision, whole=True, may_be_undefined=True),
        RegisteredMetric("sensitivity", sensitivity, whole=True, may_be_undefined=True),
        RegisteredMetric("recall", sensitivity, whole=True, may_be_undefined=True),
        RegisteredMetric("specificity", specificity, whole=True, may_be_undefined=True),
        RegisteredMetric("auc", auc, whole=True, may_be_undefined=True),
        RegisteredMetric("auprc", auprc, whole=True, may_be_undefined=True),
        RegisteredMetric("brier", brier, _brier_scores, smaller_is_better=True),
        RegisteredMetric("ece", ece, whole=True, smaller_is_better=True),
        RegisteredMetric("mae", mae, _absolute_errors, smaller_is_better=True, tasks=(REGRESSION,)),
        RegisteredMetric("rmse", rmse, whole=True, smaller_is_better=True, tasks=(REGRESSION,)),
        RegisteredMetric("r2", r2, whole=True, may_be_undefined=True, tasks=(REGRESSION,)),
    )
}

WHOLE: frozenset[MetricFunction] = frozenset(metric.function for metric in METRICS.values() if metric.whole)
"""The functions of the metrics that take all of a client's outputs; so does every ``PerClient``."""


def is_whole(function: object) -> bool:
    """Whether a function is ``metric(output, y, sizes)``, of all of a client's outputs."""
    if isinstance(function, PerClient):
        return True
    try:
        return function in WHOLE
    except TypeError:  # not hashable
        return False


def names_for(task: str) -> list[str]:
    """The names of the registry's metrics for a task."""
    found = [name for name, metric in METRICS.items() if task in metric.tasks and name != "binary_accuracy"]
    return ["accuracy", *found] if task == BINARY else found


def function_for(name: str, task: str) -> MetricFunction:
    """The metric of this name for a task."""
    if name not in names_for(task):
        kind = {CLASSIFICATION: "classes", BINARY: "two classes", REGRESSION: "numbers"}[task]
        raise ConfigError(
            f"The metric {name!r} does not apply to a loss for {kind}; use {', '.join(names_for(task))}, or a function "
            "of your own."
        )
    return METRICS["binary_accuracy" if name == "accuracy" and task == BINARY else name].function


# Columns of the table by client, beside the measures and their bounds.
COLUMNS = ("client", "round", "weight", "samples", "train_samples", "validation_samples", "test_samples")
OwnMetrics = Mapping[str, "MetricFunction | Metric"]
_DIRECTIONS: dict[str, bool] = {}  # whether smaller is better, of users' metrics; a name of METRICS keeps its own


def smaller_is_better(name: str) -> bool:
    """Whether the worst client is the one with the largest value of this metric."""
    if name in METRICS:
        return METRICS[name].smaller_is_better
    return name == "loss" or _DIRECTIONS.get(name, False)


def set_direction(name: str, smaller: bool) -> None:
    """Say of a user's metric, by its name in the records, whether smaller is better."""
    _DIRECTIONS[name] = smaller


def requested_metrics(metrics: Mapping[str, Any] | Sequence[str] | None, task: str) -> dict[str, MetricFunction]:
    """The metrics that ``fit`` is asked for: names of the registry, functions (output, y), or ``Metric`` objects."""
    if metrics is None:
        return {}
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        raise ConfigError(
            f'metrics is {metrics!r}, but it must be a list of names such as ["f1"], or a dict such as {{"f1": f}} '
            "with functions (output, y)."
        )
    named = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics}
    _check_free(named)
    return {name: _requested(name, metric, task) for name, metric in named.items()}


def _check_free(names: Collection[Any]) -> None:
    """Refuse names that the table by client needs for something else."""
    measures = {"loss", *METRICS, *names}
    for name in names:
        bound = isinstance(name, str) and name.endswith(("_low", "_high")) and name.rpartition("_")[0] in measures
        if name in COLUMNS or bound:
            raise ConfigError(
                f"A metric is named {name!r}, but the table by client has another column of this name; rename it."
            )


def _requested(name: Any, metric: Any, task: str) -> MetricFunction:
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name) or name == "loss" or name.startswith("personal_"):
        raise ConfigError(
            f"A metric is named {name!r}, but its name must be letters, digits and _, and neither loss nor "
            "personal_...; rename it."
        )
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ConfigError(f"The metric {metric!r} is unknown; {nearest(metric, METRICS)}.")
        set_direction(name, METRICS[metric].smaller_is_better)
        return function_for(metric, task)
    own = metric if isinstance(metric, Metric) else Metric(metric)
    set_direction(name, own.smaller_is_better)
    return PerClient(name, own.function)


def describe_metrics(metrics: Mapping[str, Any] | Sequence[str] | None) -> list[Any] | None:
    """The metrics that ``fit`` was asked for, as a run's config records them."""
    if metrics is None or not isinstance(metrics, Mapping):
        return None if metrics is None else list(metrics)
    found: list[Any] = []
    for name, metric in metrics.items():
        own = metric if isinstance(metric, Metric) else None
        function = metric.function if own is not None else metric
        text = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        found.append({"name": name, "function": text, "smaller_is_better": smaller_is_better(name)})
    return found
