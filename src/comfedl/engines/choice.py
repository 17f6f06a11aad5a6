"""Which clients' steps run at once, and how: by rule, or as the reader says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from comfedl import checks
from comfedl.data.federated import FederatedData
from comfedl.engines import convolution, dense
from comfedl.engines.stacked import Stacked, Vmapped
from comfedl.errors import ConfigError
from comfedl.losses import MAPPED, PER_SAMPLE
from comfedl.problem import Learner
from comfedl.step import Step

KNOWN = {*PER_SAMPLE, *MAPPED}
WAYS = ("auto", "stack", "vmap", "serial")


class Choice(NamedTuple):
    """The learner of one client, that of many at once where there is one, and why."""

    one: Learner
    many: Stacked | None
    why: str


def choose(way: str, learner: Learner, data: FederatedData, steps: Iterable[Step]) -> Choice:
    """How to run client steps: ``way`` is one of ``WAYS``; what it asks for and cannot have is an error."""
    checks.one_of("vectorize", way, WAYS)
    module = learner.module
    one = convolution.ChannelsLast(learner) if module is not None and convolution.convolves(module) else learner
    if way == "serial":
        return Choice(one, None, "serial, as asked for")
    against = _obstacle(learner, data, steps)
    if module is not None and against is None and way != "vmap":
        against = dense.obstacle(module)
    if against is None and way == "auto" and not {learner.loss_function, *learner.metrics.values()} <= KNOWN:
        against = "the loss is a function of one's own, which may look at values"
    if against is None:
        many = Vmapped(learner) if way == "vmap" else dense.Dense(learner)
        return Choice(one, many, "vmap, as asked for" if way == "vmap" else "stacked dense layers")
    if way != "auto":
        raise ConfigError(f'vectorize is {way!r}, but {against}; use "auto" or "serial".')
    return Choice(one, None, f"serial: {against}")


def _obstacle(learner: Learner, data: FederatedData, steps: Iterable[Step]) -> str | None:
    """Why clients cannot run at once whatever the model."""
    if learner.module is None:
        return "a problem of one's own runs one client after another"
    if any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in learner.module.modules()):
        return "dropout draws each client's noise from a generator of its own"
    if not all(step.elementwise for step in steps):
        return "the method does not say that its client steps are elementwise (see docs/adding-a-method.md)"
    if learner.loss_function is functional.cross_entropy and any(_negative(data, name) for name in ("train", "outer")):
        return "there are labels below 0, which cross_entropy leaves out of its mean"
    return None


def _negative(data: FederatedData, name: str) -> bool:
    split = data.split(name)
    labels: Tensor | None = None if split is None else split.y
    return labels is not None and labels.numel() > 0 and bool(labels.min() < 0)
