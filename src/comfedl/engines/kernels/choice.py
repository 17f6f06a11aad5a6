"""Which learners run the clients' steps: many clients at once where that is faster, else one after another.

The choice depends on the model, the loss, the method and the data, never on timing. One detail depends on the machine:
``products.py`` is for processors with AVX-512, much as torch's own libraries choose their kernels by processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.learner import Learner
from comfedl.core.protocol import Step
from comfedl.data.federated import FederatedData
from comfedl.engines.kernels import dense
from comfedl.engines.kernels.allocator import keep_freed_memory
from comfedl.engines.kernels.channels_last import ChannelsLast, convolves
from comfedl.engines.kernels.products import FastProducts, gains
from comfedl.engines.stacked import Stacked, Vmapped
from comfedl.models.losses import MAPPED, Loss, LossFunction, per_sample_form
from comfedl.models.metrics import METRICS, MetricFunction, is_whole
from comfedl.utils import checks, samples
from comfedl.utils.errors import ConfigError

logger = logging.getLogger("comfedl")

SPLITS = ("train", "validation", "test", "outer")
VECTORIZE = ("auto", "stack", "vmap", "serial")
# Layers without random numbers or hidden state.
NOISELESS = {
    *dense.LAYERS,
    nn.Sequential,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
}


class Accelerated(NamedTuple):
    """The learner for one client, the learner for many at once if there is one, and the reason.

    ``thread_safe``: they do not use torch's global generator, so clients may run on several threads. If that is
    "unknown", it is to be seen from a run of each step (``purity.py``).
    """

    one: Learner
    many: Stacked | None
    reason: str
    thread_safe: bool | Literal["unknown"]


def accelerate(
    learner: Learner, data: FederatedData, steps: Mapping[str, Step], vectorize: str = "auto", keep_bytes: int = 0
) -> Accelerated:
    """The fastest learners for these data and steps; a ``vectorize`` other than "auto" must be possible.

    With ``keep_bytes`` the process also keeps that much freed memory for the next round (``allocator.py``).
    """
    checks.one_of("vectorize", vectorize, VECTORIZE)
    if keep_bytes:
        keep_freed_memory(keep_bytes)
    module = learner.module
    one = _one(learner)
    known = all(map(_is_known, (learner.loss_function, *learner.metrics.values())))
    safe: bool | Literal["unknown"] = False
    if module is not None and known and all(step.elementwise for step in steps.values()):
        safe = all(type(layer) in NOISELESS for layer in module.modules())
        if not safe and data.train.device.type == "cpu" and _noise(module) is None:
            safe = "unknown"
    if vectorize == "serial":
        return Accelerated(one, None, "serial, as requested", safe)
    against = _obstacle(learner, data, steps.values())
    if against is None and vectorize == "auto" and not known:
        against = "the loss is user-defined, and may depend on values"
    if against is None and module is not None:
        if vectorize == "vmap":
            against = _noise(module)
            if against is None:
                return Accelerated(one, Vmapped(learner), "vmap, as requested", safe)
        else:
            against = _not_stacked(module, data)
            if against is None:
                return Accelerated(one, dense.Dense(learner), "stacked dense layers", safe)
    if vectorize != "auto":
        raise ConfigError(f'vectorize is {vectorize!r}, but {against}; use "auto" or "serial".')
    if module is not None and len(data) > 1 and _not_stacked(module, data) is None:
        logger.warning("Clients run one after another, although this model could run many at once: %s.", against)
    return Accelerated(one, None, f"serial: {against}", safe)


def _one(learner: Learner) -> Learner:
    """The learner for one client."""
    if learner.module is None:
        return learner
    if convolves(learner.module):
        return ChannelsLast(learner)
    return FastProducts(learner) if gains(learner.module) else learner


def _is_known(function: MetricFunction | None) -> bool:
    """Whether a loss or metric is known not to branch on values."""
    return per_sample_form(function) is not None or is_whole(function) or function in MAPPED


def _not_stacked(module: nn.Module, data: FederatedData) -> str | None:
    """Why a module's layers cannot be stacked."""
    if data.train.device.type != "cpu" and dense.drops(module):
        return "on a GPU the noise of Dropout would differ from that of one client after another"
    return dense.obstacle(module)


def _obstacle(learner: Learner, data: FederatedData, steps: Iterable[Step]) -> str | None:
    """Why clients cannot run at once, whatever the model."""
    if learner.module is None:
        return "a Composition runs one client after another"
    if not all(step.elementwise for step in steps):
        return "the method does not declare its client steps elementwise (see docs/adding-a-method.md)"
    if not all(split.is_plain for name in SPLITS if (split := data.split(name)) is not None):
        return "x or y is a tuple or dict of tensors"
    classifies = METRICS["accuracy"].function in learner.metrics.values()  # as with a user's loss on sequences
    if samples.first(data.train.head(1)[1]).ndim > 1 and (classifies or _like_cross_entropy(learner.loss_function)):
        return "the targets are sequences, of which some may not count"
    of_torch = isinstance(learner.loss_function, nn.CrossEntropyLoss)
    if of_torch and not data.train.at_hand:
        return "the samples are on disk, and their labels may be negative, which cross_entropy ignores in its mean"
    if (of_torch or learner.loss_function is functional.cross_entropy) and any(_negative(data, k) for k in SPLITS):
        return "there are negative labels, which cross_entropy ignores in its mean"
    return None


def _noise(module: nn.Module) -> str | None:
    """Why a model's noise rules out vmap."""
    if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in module.modules()):
        return "dropout draws the noise of each client from a separate generator"
    return None


def _like_cross_entropy(loss: LossFunction | None) -> bool:
    return loss is functional.cross_entropy or (isinstance(loss, Loss) and loss.like == "cross_entropy")


def _negative(data: FederatedData, name: str) -> bool:
    split = data.split(name)
    if split is None or not split.at_hand:  # labels on disk are refused when they are read, see ``check_fit``
        return False
    labels: Tensor = split.y
    return labels.numel() > 0 and bool(labels.min() < 0)
