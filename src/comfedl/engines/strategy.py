"""Which clients' steps run at once, and how: by rule, or as the reader says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.objectives import Learner
from comfedl.core.protocol import Step
from comfedl.data.federated import FederatedData
from comfedl.engines.kernels import channels_last, dense
from comfedl.engines.kernels.stacked import Stacked, Vmapped
from comfedl.engines.kernels.trial import vmap_is_faster
from comfedl.models.losses import MAPPED, PER_SAMPLE, WHOLE
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError

KNOWN = {*PER_SAMPLE, *MAPPED, *WHOLE}
WAYS = ("auto", "stack", "vmap", "serial")
# Layers that draw no noise and keep nothing to themselves.
QUIET = {
    *dense.LAYERS,
    nn.Sequential,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
}


class Choice(NamedTuple):
    """The learner of one client, that of many at once where there is one, and why.

    ``quiet`` says that they draw nothing from torch's own generator, so that clients may run in several threads.
    """

    one: Learner
    many: Stacked | None
    why: str
    quiet: bool


def choose(way: str, learner: Learner, data: FederatedData, steps: Mapping[str, Step]) -> Choice:
    """How to run client steps: ``way`` is one of ``WAYS``; what it asks for and cannot have is an error."""
    checks.one_of("vectorize", way, WAYS)
    module = learner.module
    one = channels_last.ChannelsLast(learner) if module is not None and channels_last.convolves(module) else learner
    known = {learner.loss_function, *learner.metrics.values()} <= KNOWN
    quiet = module is not None and known and all(type(layer) in QUIET for layer in module.modules())
    quiet = quiet and all(step.elementwise for step in steps.values())
    if way == "serial":
        return Choice(one, None, "serial, as asked for", quiet)
    against = _obstacle(learner, data, steps.values())
    if against is None and way == "auto" and not known:
        against = "the loss is a function of one's own, which may look at values"
    if against is None and module is not None:
        if way == "vmap":
            against = _noise(module)
            if against is None:
                return Choice(one, Vmapped(learner), "vmap, as asked for", quiet)
        else:
            against = _not_stacked(module, data)
            if against is None:
                return Choice(one, dense.Dense(learner), "stacked dense layers", quiet)
            if way == "auto" and one is learner and _noise(module) is None:
                faster, found = vmap_is_faster(learner, data, _batch_size(steps))
                if faster:
                    return Choice(one, Vmapped(learner), f"by vmap: {against}, and {found}", quiet)
                against = f"{against}, and {found}"
    if way != "auto":
        raise ConfigError(f'vectorize is {way!r}, but {against}; use "auto" or "serial".')
    return Choice(one, None, f"serial: {against}", quiet)


def _batch_size(steps: Mapping[str, Step]) -> int | None:
    """How many samples a training batch has; None is all of them."""
    sizes = [draw.size for draw in steps["train"].draws.values()] if "train" in steps else []
    return sizes[0] if sizes else None


def _not_stacked(module: nn.Module, data: FederatedData) -> str | None:
    """Why a module's layers cannot be stacked."""
    if data.train.x.device.type != "cpu" and dense.drops(module):
        return "Dropout's noise differs on an accelerator from that of one client after another"
    return dense.obstacle(module)


def _obstacle(learner: Learner, data: FederatedData, steps: Iterable[Step]) -> str | None:
    """Why clients cannot run at once whatever the model."""
    if learner.module is None:
        return "a problem of one's own runs one client after another"
    if not all(step.elementwise for step in steps):
        return "the method does not say that its client steps are elementwise (see docs/adding-a-method.md)"
    if learner.loss_function is functional.cross_entropy and any(_negative(data, name) for name in ("train", "outer")):
        return "there are labels below 0, which cross_entropy leaves out of its mean"
    return None


def _noise(module: nn.Module) -> str | None:
    """Why a model's noise keeps vmap from it."""
    if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in module.modules()):
        return "dropout draws each client's noise from a generator of its own"
    return None


def _negative(data: FederatedData, name: str) -> bool:
    split = data.split(name)
    labels: Tensor | None = None if split is None else split.y
    return labels is not None and labels.numel() > 0 and bool(labels.min() < 0)
