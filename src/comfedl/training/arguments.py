"""Checks the arguments of ``fit`` before anything starts, and splits a model into functions and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comfedl.algorithms.base import Algorithm
from comfedl.core.learner import Learner, Model, Params
from comfedl.data.federated import FederatedData
from comfedl.models.losses import (
    LOSSES,
    MODEL_LOSS,
    TASKS,
    Loss,
    LossFunction,
    is_balanced,
    known_per_sample,
    name_of_torch_object,
    per_sample_form,
    usable_loss,
)
from comfedl.models.metrics import (
    BINARY,
    CLASSIFICATION,
    REGRESSION,
    Metric,
    MetricFunction,
    match_shapes,
    requested_metrics,
)
from comfedl.models.outputs import IGNORED, is_sequence, logits, mean_of, model_loss, share
from comfedl.utils import checks, samples
from comfedl.utils.errors import ConfigError, DataError
from comfedl.utils.samples import Samples

RequestedMetrics = Mapping[str, Metric | Callable[[Tensor, Tensor], Any]] | Sequence[str] | None
"""What ``fit(metrics=...)`` takes."""


def check_kinds(algorithm: Algorithm, fed: FederatedData) -> None:
    """Check the types of these arguments of ``fit``."""
    if not isinstance(fed, FederatedData):
        raise ConfigError(f"fed is a {type(fed).__name__}, but it must be a FederatedData(train={{name: (x, y)}}).")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm is {algorithm!r}, but it must be a method such as Robust(gamma=0.1).")


def make_learner(
    model: nn.Module | Mapping[str, Tensor],
    loss: str | LossFunction,
    algorithm: Algorithm,
    metrics: RequestedMetrics = None,
    task: str | None = None,
) -> tuple[Learner, Model, Params]:
    """The model's functions, its initial state, and the parameters that the user froze; all are copies.

    The metrics are those of the loss and the requested ones; with a user's loss, ``add_metrics`` adds them later.
    """
    frozen: Params = {}
    function: LossFunction
    scores: dict[str, MetricFunction]
    loss = usable_loss(loss)
    if loss == MODEL_LOSS:
        function, scores = model_loss, {}
    elif isinstance(loss, str):
        checks.one_of("loss", loss, [*LOSSES, MODEL_LOSS])
        function, scores = LOSSES[loss]
        scores = {**scores, **requested_metrics(metrics, TASKS[loss])}
    elif isinstance(loss, Loss) or (callable(loss) and task is not None):
        like = loss.like if isinstance(loss, Loss) else next(name for name, of in TASKS.items() if of == task)
        function, scores = loss, {**LOSSES[like][1], **requested_metrics(metrics, TASKS[like])}
    elif callable(loss):
        function, scores = loss, {}
    else:
        raise ConfigError(f"loss is {loss!r}, but it must be one of {', '.join(LOSSES)}, or a function (output, y).")
    custom = algorithm.has_custom_problem
    if isinstance(model, nn.Module):
        parameters = {name: (part.requires_grad, part.detach().clone()) for name, part in model.named_parameters()}
        frozen = {name: part for name, (trained, part) in parameters.items() if not trained}
        initial = Model(
            params={name: part for name, (trained, part) in parameters.items() if trained},
            buffers={name: part.detach().clone() for name, part in model.named_buffers()},
        )
        learner = Learner() if custom else Learner(model, function, scores)
    elif isinstance(model, Mapping):
        for name, part in model.items():
            if not isinstance(part, Tensor) or not part.is_floating_point():
                raise ConfigError(f"The model's {name!r} is {part!r}, but it must be a floating-point tensor.")
        if not custom:
            raise ConfigError(
                "The model is a dict of tensors, which has no forward function; use "
                "ComFedL(problem=Composition(inner, outer)), or give an nn.Module."
            )
        initial = Model(params={name: part.detach().clone() for name, part in model.items()}, buffers={})
        learner = Learner()
    else:
        raise ConfigError(f"model is a {type(model).__name__}, but it must be an nn.Module or a dict of tensors.")
    if not initial["params"]:
        raise ConfigError("The model has no parameters that require a gradient, so there is nothing to train.")
    return learner, initial, frozen


def add_metrics(learner: Learner, model: Model, data: FederatedData, metrics: RequestedMetrics) -> None:
    """With a user's loss: add the metrics of its task, which the labels and the model's outputs show, and others.

    An object of torch's such as ``nn.MSELoss()`` becomes the named loss that it is, if that takes these data.
    """
    if learner.module is None or per_sample_form(learner.loss_function) is not None:
        return
    x, y = data.train.head(2)
    try:
        output = logits(_output(learner, model, x))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return  # check_fit says what is wrong
    task = _task(output, y, data)
    name = name_of_torch_object(learner.loss_function)
    if name is not None and _takes(name, task, data) and not _is_torchs_own(output, y):
        learner.loss_function, scores = LOSSES[name]
        learner.metrics = {**scores, **requested_metrics(metrics, TASKS[name])}
        return
    if task is None:
        if metrics and any(
            isinstance(metric, str) for metric in (metrics.values() if isinstance(metrics, Mapping) else metrics)
        ):
            raise ConfigError(
                "metrics has names of built-in metrics, but the task of this loss cannot be seen from the model's "
                "outputs and y; give functions (output, y) instead."
            )
        learner.metrics = requested_metrics(metrics, CLASSIFICATION)
        return
    loss = next(name for name, its_task in TASKS.items() if its_task == task)
    learner.metrics = {**LOSSES[loss][1], **requested_metrics(metrics, task)}


def _takes(name: str, task: str | None, data: FederatedData) -> bool:
    """Whether a named loss takes such data; torch's cross-entropy also takes labels below 0, and may ignore them."""
    splits = (data.split(split) for split in ("train", "validation", "test", "outer"))
    return task == TASKS[name] and (
        task != CLASSIFICATION
        or data.train.head(1)[1].ndim > 1
        or all(split is None or bool((split.all_y() >= 0).all()) for split in splits)
    )


def _is_torchs_own(output: Tensor, y: Tensor) -> bool:
    """Whether outputs of sequences are as torch's cross-entropy takes them: with the classes in dimension 1."""
    return y.ndim > 1 and output.ndim == y.ndim + 1 and output.shape[2:] == y.shape[1:]


def _output(learner: Learner, model: Model, x: Samples) -> Any:
    """The model's output on some samples."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return learner.output(model["params"], model["buffers"], x, train=False)[0]


def _task(output: object, y: Samples, data: FederatedData) -> str | None:
    """The task that outputs and labels belong to; None if it is none of the known ones."""
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return None
    if output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point():
        return CLASSIFICATION
    if is_sequence(output, y):
        return CLASSIFICATION
    if match_shapes(output, y)[0].shape != y.shape:
        return None
    whole = data.train.all_y()
    return BINARY if bool(((whole == 0) | (whole == 1)).all()) else REGRESSION


def check_fit(learner: Learner, model: Model, data: FederatedData, sample_losses: bool = False) -> None:
    """Check that the model accepts the data, and that its outputs and y fit the loss.

    ``sample_losses``: the method needs the loss of each sample.
    """
    if learner.module is None:
        return
    x, y = data.train.head(2)
    try:
        whole = _output(learner, model, x)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"The model cannot be applied to samples of shape {_described(x)}: {_reason(error)}") from error
    output, like = logits(whole), _like(learner.loss_function)
    if sample_losses:
        _check_sample_losses(learner.loss_function, output, y)
    if like is not None and not isinstance(y, Tensor):
        raise DataError(
            f"The loss {like!r} needs y as a tensor, but it is {samples.structure(y)}; give a loss of your own, a "
            "function (output, y) that returns the mean loss of a batch."
        )
    if like == "cross_entropy":
        _check_labels(output, y, data)
    elif like is not None:
        _check_numbers(like == "bce", output, y, data)
    else:
        _check_classes_first(learner.loss_function, output, y)
        _check_own(learner, whole, y)
        _check_some_count(learner.loss_function, data)
    if isinstance(learner.loss_function, Loss):
        outputs = output.shape[-1] if isinstance(output, Tensor) else 0
        labels = data.train.all_y() if data.train.at_hand or is_balanced(learner.loss_function) else y
        learner.loss_function = learner.loss_function.resolved(labels, outputs)


def _check_sample_losses(loss: LossFunction | None, output: Any, y: Samples) -> None:
    """Check that the loss of each sample is known, for the offset Shrinkage."""
    known_per_sample(loss)
    if is_sequence(output, y):
        raise ConfigError(
            "The offset Shrinkage needs samples whose losses are independent, but y has several targets per sample, as "
            "of a sequence; use another offset, or none."
        )


def _described(x: Samples) -> str:
    if isinstance(x, Tensor):
        return f"{tuple(x.shape[1:])} and dtype {x.dtype}"
    call = "model(**x)" if isinstance(x, dict) else "model(*x)"
    return f"{samples.described(x)}, as {call}"


def _reason(error: Exception) -> str:
    return str(error) if str(error) and not isinstance(error, KeyError) else repr(error)


def _check_classes_first(loss: object, output: Any, y: Samples) -> None:
    """Check that outputs of sequences for torch's own cross-entropy have their classes in dimension 1."""
    if not isinstance(loss, nn.CrossEntropyLoss) or not is_sequence(output, y):
        return
    assert isinstance(y, Tensor)
    shapes = f"the model returns {tuple(output.shape)} for y of shape {tuple(y.shape)}"
    advice = (
        'with the classes last, use loss="cross_entropy" or cf.losses.CrossEntropy(...), and targets of '
        f"{IGNORED} where nothing is to be predicted"
    )
    if _is_torchs_own(output, y):
        raise ConfigError(
            f"The loss is {loss!r} and {shapes}, so the classes may be last or, as torch has them, in dimension 1; "
            f"{advice}."
        )
    raise ConfigError(f"{loss!r} needs the classes in dimension 1, as torch has them, but {shapes}; {advice}.")


def _check_own(learner: Learner, output: Any, y: Samples) -> None:
    """Check that a user's loss returns the mean of a batch."""
    assert learner.loss_function is not None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        loss = mean_of(learner.loss_function, output, y)
    if not isinstance(loss, Tensor) or loss.ndim:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"The loss returned {given}, but it must return the mean loss of a batch, a tensor with one "
            "number; end it with .mean()."
        )


def _check_some_count(loss: object, data: FederatedData) -> None:
    """Check that for torch's own cross-entropy some target of each client counts: the mean over none is NaN."""
    if not isinstance(loss, nn.CrossEntropyLoss) or not isinstance(data.train.head(1)[1], Tensor):
        return
    for name in ("train", "validation", "test", "outer"):
        split = data.split(name, instead="none")
        if split is None or (split.at_hand and _all_count(loss, split.y)):
            continue
        split.check_each(partial(_check_some_count_of, name, loss))


def _all_count(loss: nn.CrossEntropyLoss, targets: Tensor) -> bool:
    """Whether every target counts, so that no client has to be looked at."""
    if targets.is_floating_point():  # probabilities of the classes
        return True
    weighted = loss.weight is not None and bool((loss.weight <= 0).any())
    return not weighted and not bool((targets == loss.ignore_index).any())


def _check_some_count_of(split: str, loss: nn.CrossEntropyLoss, client: str, targets: Tensor, whole: bool) -> None:
    if whole and len(targets) and not share(loss, targets):
        raise DataError(
            f"No target of client {client!r} in {split} counts for {loss!r}: all are {loss.ignore_index} or of "
            "classes with a weight of 0, so there is nothing to predict; give it some, or leave it out."
        )


def _like(loss: object) -> str | None:
    """The named loss that a loss shares its labels and outputs with."""
    if isinstance(loss, Loss):
        return loss.like
    return next((name for name, (function, _) in LOSSES.items() if function is loss), None)


def _check_numbers(binary: bool, output: object, y: Tensor, data: FederatedData) -> None:
    """Check that there is one output per number in y and, for two classes, that y is 0 or 1."""
    given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or match_shapes(output, y)[0].shape != y.shape:
        raise DataError(
            f"{'bce' if binary else 'A regression'} needs one output per number in y, but the model returns {given} "
            f"for {len(y)} samples and y has the shape {tuple(y.shape)}; give a model with "
            f"{math.prod(y.shape[1:])} output{'s' if math.prod(y.shape[1:]) > 1 else ''}."
        )
    for name in ("train", "validation", "test") if binary else ():
        split = data.split(name)
        if split is not None and split.at_hand:
            _check_binary(name, split.y)
        elif split is not None:
            split.check_each(partial(_check_binary_of, name))


def _check_binary_of(split: str, client: str, y: Tensor, whole: bool) -> None:
    _check_binary(f"client {client!r} in {split}", y)


def _check_binary(where: str, y: Tensor) -> None:
    wrong = torch.nonzero((y != 0) & (y != 1))
    if len(wrong):
        raise DataError(
            f"bce needs labels that are 0 or 1, but {where} has {y[tuple(wrong[0])].item():g}; recode the "
            "labels, or use cross_entropy for more than two classes."
        )


def _check_targets(output: Tensor, y: Tensor, data: FederatedData) -> None:
    """Check the targets of sequences."""
    classes = output.shape[-1]
    if output.shape[:-1] != y.shape:
        raise DataError(
            f"cross_entropy needs a target for each output, but the model returns {tuple(output.shape)} for y of shape "
            f"{tuple(y.shape)}; give y {tuple(output.shape[1:-1])} targets per sample. For outputs with the classes in "
            "dimension 1, as in torch, use loss = nn.CrossEntropyLoss()."
        )
    for name in ("train", "validation", "test", "outer"):
        split = data.split(name, instead="none")
        if split is not None:
            split.check_each(partial(_check_targets_of, name, classes))


def _check_targets_of(split: str, classes: int, client: str, targets: Tensor, whole: bool) -> None:
    """Check a client's targets; ``whole``: these are all of them."""
    counted = targets[targets != IGNORED]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if len(wrong):
        raise DataError(
            f"Client {client!r} has the target {int(wrong[0])} in {split}, but the model has {classes} outputs, "
            f"so targets must be from 0 to {classes - 1}, or {IGNORED} where nothing is to be predicted."
        )
    if whole and len(targets) and not len(counted):
        raise DataError(
            f"All of client {client!r}'s targets in {split} are {IGNORED}, so there is nothing to predict; give "
            "it some, or leave it out."
        )


def _check_labels(output: object, y: Tensor, data: FederatedData) -> None:
    """Check that there is an output for each label, and of sequences that some target of each client counts."""
    if not isinstance(output, Tensor) or output.ndim < 2 or (y.ndim < 2 and output.ndim > 2):
        shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__} without logits"
        needed = "[samples, classes]" if y.ndim < 2 else "[samples, ..., classes], an output per class for each target"
        raise DataError(f"cross_entropy needs a model that returns {needed}, but this one returns {shape}.")
    if y.ndim > 1 and output.ndim == y.ndim + 1 and not y.is_floating_point():
        _check_targets(output, y, data)
        return
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(
            f"cross_entropy needs one integer label per sample, but y has the dtype {y.dtype} and samples of shape "
            f"{tuple(y.shape[1:])}; convert y, or use another loss."
        )
    classes = output.shape[1]
    for name in ("train", "validation", "test", "outer"):
        split = data.split(name, instead="none")
        if split is None or (split.at_hand and (name == "outer" or _are_labels(split.y, classes))):
            continue
        split.check_each(partial(_check_labels_of, name, classes))


def _are_labels(y: Tensor, classes: int) -> bool:
    return int(y.min()) >= 0 and int(y.max()) < classes


def _check_labels_of(split: str, classes: int, client: str, labels: Tensor, whole: bool) -> None:
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(
            f"Client {client!r} has the label {int(wrong[0])} in {split}, but the model has {classes} outputs, "
            f"so labels must be from 0 to {classes - 1}; fix the labels or give the model more outputs."
        )
