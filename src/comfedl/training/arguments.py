"""Checks the arguments of ``fit`` before anything starts, and splits a model into functions and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfedl.algorithms.base import Algorithm
from comfedl.core.learner import Learner, Model, Params
from comfedl.data.federated import FederatedData
from comfedl.models.losses import LOSSES, TASKS, Loss, LossFunction, name_of_torch_object, per_sample_form
from comfedl.models.metrics import (
    BINARY,
    CLASSIFICATION,
    REGRESSION,
    Metric,
    MetricFunction,
    match_shapes,
    requested_metrics,
)
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, DataError

RequestedMetrics = Mapping[str, Metric | Callable[[Tensor, Tensor], Any]] | Sequence[str] | None
"""What ``fit(metrics=...)`` takes."""


def check_kinds(algorithm: Algorithm, fed: FederatedData) -> None:
    """Check the types of these arguments of ``fit``."""
    if not isinstance(fed, FederatedData):
        raise ConfigError(f"fed is a {type(fed).__name__}, but it must be a FederatedData(train={{name: (x, y)}}).")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm is {algorithm!r}, but it must be a method such as ComFedL(outer=KL(0.2)).")


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
    scores: dict[str, MetricFunction]
    if isinstance(loss, str):
        checks.one_of("loss", loss, LOSSES)
        function, scores = LOSSES[loss]
        scores = {**scores, **requested_metrics(metrics, TASKS[loss])}
    elif isinstance(loss, Loss) or (callable(loss) and task is not None):
        like = loss.like if isinstance(loss, Loss) else next(name for name, of in TASKS.items() if of == task)
        function, scores = loss, {**LOSSES[like][1], **requested_metrics(metrics, TASKS[like])}
    elif isinstance(loss, type) or getattr(loss, "reduction", "mean") != "mean":
        given = f"the class {loss.__name__}" if isinstance(loss, type) else f"{loss!r}, which returns no mean"
        raise ConfigError(
            f"loss is {given}, but it must return the mean loss of a batch; give an object such as "
            "nn.CrossEntropyLoss()."
        )
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
    x, y = data.train.x[:2], data.train.y[:2]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output, _ = learner.output(model["params"], model["buffers"], x, train=False)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # check_fit says what is wrong
    task = _task(output, y, data)
    name = name_of_torch_object(learner.loss_function)
    if name is not None and _takes(name, task, data):
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
        task != CLASSIFICATION or all(split is None or bool((split.y >= 0).all()) for split in splits)
    )


def _task(output: object, y: Tensor, data: FederatedData) -> str | None:
    """The task that outputs and labels belong to; None if it is none of the known ones."""
    if not isinstance(output, Tensor):
        return None
    if output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point():
        return CLASSIFICATION
    if match_shapes(output, y)[0].shape != y.shape:
        return None
    whole = data.train.y
    return BINARY if bool(((whole == 0) | (whole == 1)).all()) else REGRESSION


def check_fit(learner: Learner, model: Model, data: FederatedData) -> None:
    """Check that the model accepts the data, and that its outputs and y fit the loss."""
    if learner.module is None:
        return
    x, y = data.train.x[:2], data.train.y[:2]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output, _ = learner.output(model["params"], model["buffers"], x, train=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"The model cannot be applied to samples of shape {tuple(x.shape[1:])} and dtype {x.dtype}: {error}"
        ) from error
    like = _like(learner.loss_function)
    if like == "cross_entropy":
        _check_labels(output, y, data)
        assert isinstance(output, Tensor)
    elif like is not None:
        _check_numbers(like == "bce", output, y, data)
    if isinstance(learner.loss_function, Loss):
        outputs = output.shape[-1] if isinstance(output, Tensor) else 0
        learner.loss_function = learner.loss_function.resolved(data.train.y, outputs)


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
        wrong = None if split is None else torch.nonzero((split.y != 0) & (split.y != 1))
        if split is not None and wrong is not None and len(wrong):
            raise DataError(
                f"bce needs labels that are 0 or 1, but {name} has {split.y[tuple(wrong[0])].item():g}; recode the "
                "labels, or use cross_entropy for more than two classes."
            )


def _check_labels(output: object, y: Tensor, data: FederatedData) -> None:
    """Check that there is an output for each label."""
    if not isinstance(output, Tensor) or output.ndim != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise DataError(f"cross_entropy needs a model that returns [samples, classes], but this one returns {shape}.")
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(
            f"cross_entropy needs one integer label per sample, but y has the dtype {y.dtype} and samples of shape "
            f"{tuple(y.shape[1:])}; convert y, or use another loss."
        )
    classes = output.shape[1]
    for name in ("train", "validation", "test"):
        split = data.split(name)
        if split is None or (int(split.y.min()) >= 0 and int(split.y.max()) < classes):
            continue
        for i, client in enumerate(split.names):
            labels = split.samples_of(i)[1]
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise DataError(
                    f"Client {client!r} has the label {int(wrong[0])} in {name}, but the model has {classes} outputs, "
                    f"so labels must be from 0 to {classes - 1}; fix the labels or give the model more outputs."
                )
