"""What a loss or a metric sees of a model's output.

A model may return a tensor, a tuple, a dict, a dataclass or, as Hugging Face's, a dict with attributes. Losses and
metrics of the library, and torch's loss objects, see the ``logits`` of such an output. A function of the user's own
sees the output as it is.

Of a sequence, with outputs [samples, ..., classes] and integer targets [samples, ...], the library's classification
losses and metrics see each position as a sample; targets of ``IGNORED`` do not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl.models.losses import MAPPED, Loss, per_sample_form
from comfedl.models.metrics import CLASSIFICATION, METRICS, MetricFunction, PerClient, is_whole
from comfedl.utils import samples
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples

IGNORED = -100
"""The target that does not count, as in torch."""

_CLASSIFYING = frozenset(metric.function for metric in METRICS.values() if CLASSIFICATION in metric.tasks)


def logits(output: Any) -> Any:
    """The ``logits`` of an output that has some, else the output itself."""
    found = part_of(output, "logits")
    return output if found is None else found


def part_of(output: Any, name: str) -> Tensor | None:
    """A tensor of an output by name, which is a key of a dict or an attribute."""
    if isinstance(output, Tensor):
        return None
    found: object = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def model_loss(output: Any, y: Samples) -> Tensor:
    """The ``loss`` that the model itself computes: ``fit(loss="model")``."""
    found = part_of(output, "loss")
    if found is None or found.ndim:
        kind = "no loss" if found is None else f"a loss of shape {tuple(found.shape)}"
        raise DataError(
            f'loss is "model", but the model returned a {type(output).__name__} with {kind}; return a dict or a '
            'dataclass with the batch\'s mean as "loss" (Hugging Face\'s models do if x has "labels"), or give another '
            "loss."
        )
    return found


def is_sequence(output: Any, y: Samples) -> bool:
    """Whether there is an output per class for each of several targets of a sample."""
    return has_classes(output, y) and y.ndim > 1


def has_classes(output: Any, y: Samples) -> bool:
    """Whether there is an output per class for each target."""
    both = isinstance(output, Tensor) and isinstance(y, Tensor)
    return both and not y.is_floating_point() and output.shape[:-1] == y.shape


def read(function: MetricFunction, output: Any, y: Samples) -> tuple[Any, Samples]:
    """The output and y as this loss or metric takes them."""
    plain = isinstance(output, Tensor) and output.ndim < 3
    if plain and not (has_classes(output, y) and _classifies(function) and bool((y == IGNORED).any())):
        return output, y
    if not is_of_library(function):
        return output, y
    output = logits(output)
    if not has_classes(output, y) or not _classifies(function):
        return output, y
    flat, targets = output.flatten(0, -2), y.flatten().long()
    counted = targets != IGNORED
    if bool(counted.all()):
        return flat, targets
    rows = counted.nonzero().flatten()
    return flat.index_select(0, rows), targets.index_select(0, rows)


def fits(function: MetricFunction, output: Any, y: Samples) -> bool:
    """Whether a metric can take what it was to ``read``: those of the library are for tensors."""
    return (isinstance(output, Tensor) and isinstance(y, Tensor)) or not is_of_library(function)


def share(function: MetricFunction, y: Samples) -> float:
    """What a mean over this part of the data is weighted by: its samples, but for torch's cross-entropy its targets.

    Only targets that count do, each with its class weight, as in the mean that torch takes.
    """
    is_torchs = function is functional.cross_entropy or isinstance(function, nn.CrossEntropyLoss)
    if not is_torchs or not isinstance(y, Tensor) or y.is_floating_point():
        return samples.count(y)
    counted = y != getattr(function, "ignore_index", IGNORED)
    weight = getattr(function, "weight", None)
    return int(counted.sum()) if weight is None else float(weight[y[counted]].double().sum())


def mean_of(function: Callable[[Any, Any], Tensor], output: Any, y: Samples) -> Tensor:
    """The loss; 0 for a batch in which no target counts."""
    if not (isinstance(output, Tensor) and output.ndim < 3):  # the common case, made fast
        output, y = read(function, output, y)
    if isinstance(y, Tensor) and _none_counts(function, y):
        nothing: Tensor = (0 * output).sum()  # with a gradient of 0
        return nothing
    return function(output, y)


def _none_counts(function: Any, y: Tensor) -> bool:
    return len(y) == 0 or (isinstance(function, nn.CrossEntropyLoss) and not share(function, y))


def is_of_library(function: Any) -> bool:
    """Whether it takes tensors: a function of the library or of torch, and not of the user."""
    if isinstance(function, PerClient):
        return False
    if isinstance(function, nn.modules.loss._Loss) or per_sample_form(function) is not None:
        return True
    return is_whole(function) or _is_in(function, MAPPED)


def _classifies(function: Any) -> bool:
    if isinstance(function, Loss):
        return function.like == "cross_entropy"
    return function is functional.cross_entropy or _is_in(function, _CLASSIFYING)


def _is_in(function: Any, known: frozenset[MetricFunction]) -> bool:
    try:
        return function in known
    except TypeError:  # not hashable
        return False


def of_samples(output: Any, given: int, size: int) -> Any:
    """The outputs of the first ``size`` of the ``given`` samples."""

    def cut(parts: Sequence[Any]) -> Any:
        part = parts[0]
        return part[:size] if isinstance(part, Tensor) and part.ndim and len(part) == given else part

    return output if given == size else _map(cut, [output])


def joined(outputs: Sequence[Any], sizes: Sequence[int], probe: tuple[Any, int] | None = None) -> Any:
    """The outputs of several parts of the data, with these numbers of samples, as one.

    Tensors with a row per sample are concatenated, scalars averaged over samples; everything else is that of the first
    part. ``probe`` is another output, with its number of samples: where all parts have one size, it shows which tensors
    have a row per sample.
    """
    if len(outputs) == 1:
        return outputs[0]
    seen, counts = (outputs, sizes) if probe is None else ([*outputs, probe[0]], [*sizes, probe[1]])

    def join(parts: Sequence[Any]) -> Any:
        first, own = parts[0], parts[: len(sizes)]
        if isinstance(first, Tensor) and first.ndim:
            rows = all(len(part) == count for part, count in zip(parts, counts, strict=True))
            return torch.cat(list(own)) if rows else first
        if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
            return sum(part * (size / sum(sizes)) for part, size in zip(own, sizes, strict=True))
        return first

    return _map(join, seen)


def _map(change: Callable[[Sequence[Any]], Any], outputs: Sequence[Any]) -> Any:
    """Outputs of the same structure as one, with ``change`` of each of its parts."""
    first = outputs[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        parts = {name: _map(change, [getattr(each, name) for each in outputs]) for name in names}
        return dataclasses.replace(first, **parts)
    if isinstance(first, Mapping):
        return {key: _map(change, [each[key] for each in outputs]) for key in first}
    if isinstance(first, tuple | list):
        of_each = [_map(change, parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*of_each) if hasattr(first, "_fields") else type(first)(of_each)
    return change(outputs)
