"""The models of the paper, by the names that a config uses. Anything else is the reader's own nn.Module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Softmax regression on the flattened input, starting at zero: every class is as likely at first."""
    linear = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (80, 60)) -> nn.Module:
    """A multilayer perceptron with ReLU."""
    for width in hidden:
        checks.at_least("model.hidden", width, 1)
    widths = [math.prod(shape), *hidden]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


NORMS = ("batch", "running", "group", "none")


def cnn4(shape: Sequence[int], classes: int, filters: int = 32, norm: str = "batch") -> nn.Module:
    """The four-layer CNN of MAML: four blocks of 3x3 convolution, norm, ReLU and 2x2 max-pooling, then linear.

    ``norm`` is "batch" (statistics of the batch at hand, also when evaluated, as in MAML), "running" (BatchNorm with
    running statistics), "group" (GroupNorm, which does not depend on the batch) or "none". Convolutions start from
    Xavier's initialisation with zero bias.
    """
    checks.at_least("model.filters", filters, 1)
    checks.one_of("model.norm", norm, NORMS)
    if len(shape) != 3 or min(shape[1:]) < 1:
        raise ConfigError(f"The model cnn4 needs images [channels, height, width], but samples are {tuple(shape)}.")
    channels, height, width = shape
    blocks: list[nn.Module] = []
    for _ in range(4):
        convolution = nn.Conv2d(channels, filters, 3, padding=1)
        nn.init.xavier_uniform_(convolution.weight)
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers: list[nn.Module] = [convolution, *_norm(norm, filters), nn.ReLU()]
        if min(height, width) >= 2:  # an 8x8 digit is a single pixel after three blocks
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        blocks.append(nn.Sequential(*layers))
        channels = filters
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(filters * height * width, classes))


def _norm(norm: str, filters: int) -> list[nn.Module]:
    if norm == "group":
        return [nn.GroupNorm(math.gcd(8, filters), filters)]
    if norm == "none":
        return []
    return [nn.BatchNorm2d(filters, eps=1e-3, track_running_stats=norm == "running")]


MODELS: dict[str, Callable[..., nn.Module]] = {"logistic": logistic, "mlp": mlp, "cnn4": cnn4}


def build(
    model: str | Callable[..., nn.Module], shape: Sequence[int], classes: int, seed: int, **options: object
) -> nn.Module:
    """Make a model, by its name or by a function that is called as ``function(shape, classes, **options)``.

    Its initial parameters depend on ``seed`` alone.
    """
    if isinstance(model, str):
        checks.one_of("model", model, MODELS)
        model = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(shape, classes, **options)
