"""95 % confidence intervals of a client's scores, from the finite number of samples that they were measured on.

They say how far a score may be from what the same model would have on endless data of this client. Accuracy has
Wilson's interval, other means over samples Student's, and everything else the percentiles of a bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comfedl.core.learner import Batch, Learner, Model
from comfedl.models.losses import per_sample_form
from comfedl.models.metrics import METRICS, MetricFunction, PerClient, is_whole, mean_per_sample
from comfedl.models.outputs import IGNORED, has_classes, is_of_library, is_sequence, logits
from comfedl.utils.samples import Samples

Z = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution
WILSON, STUDENT, BOOTSTRAP = "Wilson", "Student's t", "bootstrap"
HITS = frozenset({METRICS["accuracy"].function, METRICS["binary_accuracy"].function})

MOST_DRAWS, FEWEST_DRAWS = 1000, 200
DRAWN = 400_000  # samples that a bootstrap draws in all, unless that is fewer than FEWEST_DRAWS times all samples
AT_ONCE = 1_000_000  # numbers of the model's outputs that are drawn at a time


class Interval(NamedTuple):
    """The bounds of a 95 % confidence interval, and how they were found."""

    low: float
    high: float
    method: str


def wilson(hits: float, samples: int) -> Interval:
    """Wilson's score interval for a share: the rates p with ``|hits/n - p| <= z sqrt(p (1 - p) / n)``.

    >>> low, high, _ = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    if samples < 1 or not 0 <= hits <= samples:
        raise ValueError(f"{hits} hits of {samples} samples are no share")
    share, z2 = hits / samples, Z * Z
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z / (1 + z2 / samples) * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == samples else min(1.0, centre + half)
    return Interval(low, high, WILSON)


def wilson_of(metric: str, value: float, samples: int) -> Interval | None:
    """The interval of a recorded accuracy; None for any other metric, and if no number of hits gives this accuracy."""
    hits = value * samples
    if metric != "accuracy" or samples < 1 or not (math.isfinite(hits) and 0 <= round(hits) <= samples):
        return None
    # Recorded in float32. An accuracy over tokens or several outputs per sample is no share of the samples.
    return wilson(round(hits), samples) if abs(hits - round(hits)) <= min(1e-3 + 1e-6 * samples, 0.25) else None


def counts_samples(metrics: Mapping[str, MetricFunction], y: Samples) -> bool:
    """Whether an accuracy, if it is among the metrics, is a share of the samples: the library's, one label for each."""
    if "accuracy" not in metrics:
        return True
    if not any(metrics["accuracy"] is function for function in HITS) or not isinstance(y, Tensor):
        return False
    return y.numel() == len(y) and not bool((y == IGNORED).any())


def student(values: Tensor) -> Interval | None:
    """Student's interval for the mean; None for a single value, and if all are the same."""
    numbers = values.detach().double().cpu().numpy()
    n = len(numbers)
    if n < 2:
        return None
    mean, error = float(numbers.mean()), float(numbers.std(ddof=1)) / math.sqrt(n)
    if not error > 1e-12 * abs(mean):  # rounding alone, or NaN
        return None
    half = t_quantile(n - 1) * error
    low = mean - half if numbers.min() < 0 else max(0.0, mean - half)
    return Interval(low, mean + half, STUDENT) if math.isfinite(half) else None


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution.

    >>> round(t_quantile(1), 3), round(t_quantile(10), 3)
    (12.706, 2.228)
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    # The expansion by Fisher and Cornish (Abramowitz and Stegun, 26.7.5); 0.1 % off for three degrees of freedom.
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / float(freedom) ** (k + 1) for k, term in enumerate(terms))


def draws_of(samples: int) -> int:
    """How often a bootstrap of the library's metrics draws so many samples.

    >>> draws_of(100), draws_of(1000), draws_of(10**6)
    (1000, 400, 200)
    """
    return max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN // samples))


def bootstrap(
    function: MetricFunction, output: Tensor, y: Tensor, generator: np.random.Generator, draws: int | None = None
) -> Interval | None:
    """The 2.5 % and 97.5 % quantiles of a metric over samples drawn with replacement.

    None if the metric is undefined for half of the draws or more, or the same for all.
    """
    n = len(y)
    if draws is None:
        draws = draws_of(n)
        if not is_whole(function) or isinstance(function, PerClient):
            draws = FEWEST_DRAWS  # it is called once for each
    found: list[float] = []
    width = max(1, output.numel() // n)
    while len(found) < draws:
        count = max(1, min(draws - len(found), AT_ONCE // (n * width)))
        rows = torch.from_numpy(generator.integers(0, n, size=(count, n))).to(y.device)
        found += _metric_of_each(function, output, y, rows)
    values = np.array(found)
    defined = values[np.isfinite(values)]
    if 2 * len(defined) <= draws or defined.min() == defined.max():
        return None
    low, high = np.quantile(defined, [0.025, 0.975])
    return Interval(float(low), float(high), f"{BOOTSTRAP} ({draws} draws)")


def _metric_of_each(function: Any, output: Tensor, y: Tensor, rows: Tensor) -> list[float]:
    """The metric of each row of samples, [draws, samples]."""
    with torch.no_grad():
        if not is_whole(function):
            return [float(function(output[own], y[own])) for own in rows]
        flat, sizes = rows.reshape(-1), torch.full((len(rows),), rows.shape[1], device=y.device)
        values: list[float] = function(output[flat], y[flat], sizes).double().tolist()
        return values


def score_intervals(
    learner: Learner,
    model: Model,
    data: Batch,
    make_generator: Callable[[], np.random.Generator],
    with_own: bool = True,
    with_bootstrap: bool = True,
) -> dict[str, Interval]:
    """The intervals of a model's loss and metrics on a client's data, as far as there are any.

    Args:
        make_generator: a fresh generator for each bootstrap, so that all of them draw the same samples.
        with_own: whether to bootstrap the user's own functions too, which takes a few hundred calls of each.
        with_bootstrap: whether to bootstrap anything; see ``bootstrap_work``.
    """
    if learner.loss_function is None or learner.module is None:
        return {}
    outputs = _outputs(learner, model, data)
    if outputs is None:
        return {}
    functions = {"loss": learner.loss_function, **learner.metrics}
    if not with_bootstrap:
        functions = {name: function for name, function in functions.items() if not is_whole(function)}
        with_own = False
    output, y = outputs
    if not isinstance(output, Tensor):  # a dict or dataclass, of which the library's functions see the logits
        functions = {name: function for name, function in functions.items() if is_of_library(function)}
        output = logits(output)
    # The targets of a sequence are not independent, so they have no interval.
    if not isinstance(output, Tensor) or not isinstance(y, Tensor) or is_sequence(output, y):
        return {}
    if has_classes(output, y) and not bool((counted := y != IGNORED).all()):
        functions = {name: function for name, function in functions.items() if is_of_library(function)}
        output, y = output[counted], y[counted]
    return dict(_intervals(functions, output, y, make_generator, with_own))


def bootstrap_work(learner: Learner, model: Model, data: Batch, clients: Iterable[int]) -> int:
    """How many numbers the bootstraps of the library's metrics draw in all, for clients with so many samples.

    Args:
        data: a few samples of any client, which show how many outputs each has.
    """
    metrics = [one for one in learner.metrics.values() if is_whole(one) and not isinstance(one, PerClient)]
    outputs = _outputs(learner, model, data) if metrics and learner.module is not None else None
    if outputs is None:
        return 0
    output = logits(outputs[0])
    width = output.numel() // len(output) if isinstance(output, Tensor) and output.ndim else 1
    return len(metrics) * width * sum(draws_of(samples) * samples for samples in clients if samples)


def _intervals(
    functions: Mapping[str, MetricFunction],
    output: Tensor,
    y: Tensor,
    make_generator: Callable[[], np.random.Generator],
    with_own: bool,
) -> Iterator[tuple[str, Interval]]:
    for name, function in functions.items():
        per_sample = None if is_whole(function) else per_sample_form(function)
        found = None
        if per_sample is not None:
            values = mean_per_sample(per_sample(output, y))
            hits = values.double().sum().item()
            shares = function in HITS and bool(((values == 0) | (values == 1)).all())
            found = wilson(hits, len(values)) if shares else student(values)
            if found is not None and function in HITS:  # of tokens, say: no share of the samples
                found = found._replace(high=min(1.0, found.high))
        elif with_own or (is_whole(function) and not isinstance(function, PerClient)):
            try:
                found = bootstrap(function, output, y, make_generator())
            except Exception:  # a user's function, which may raise anything on samples such as of one label
                found = None
        if found is not None:
            yield name, found


def _outputs(learner: Learner, model: Model, data: Batch) -> tuple[Any, Samples] | None:
    """The model's outputs on all samples, as a metric gets them, and y; None if they cannot be concatenated."""
    kept: list[tuple[Any, Samples]] = []

    def keep(output: Any, y: Samples) -> float:
        kept.append((output, y))
        return 0.0

    try:
        learner.means(model, data, {"outputs": PerClient("outputs", keep)})
    except TypeError:
        return None
    return kept[0]
