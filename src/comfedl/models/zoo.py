"""The models of the paper, by the name used in a config; any other nn.Module works as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from comfedl.utils import checks
from comfedl.utils.errors import ConfigError


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Softmax regression on the flattened input, with all parameters 0 at the start: every class is equally likely."""
    linear = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (80, 60)) -> nn.Module:
    """A multilayer perceptron with ReLU activations."""
    for width in hidden:
        checks.at_least("model.hidden", width, 1)
    widths = [math.prod(shape), *hidden]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


NORMS = ("batch", "running", "group", "none")


def cnn4(shape: Sequence[int], classes: int, filters: int = 32, norm: str = "batch") -> nn.Module:
    """The CNN of MAML: four blocks of 3x3 convolution, norm, ReLU and 2x2 max-pooling, then a linear layer.

    ``norm`` is "batch" (statistics of the current batch, also in eval mode, as in MAML), "running" (BatchNorm with
    running statistics), "group" (GroupNorm, which does not depend on the batch) or "none". Convolutions have Xavier
    initialisation and zero bias.
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
        layers: list[nn.Module] = [convolution, *_norm_layer(norm, filters), nn.ReLU()]
        if min(height, width) >= 2:  # three blocks turn an 8x8 digit into a single pixel
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        blocks.append(nn.Sequential(*layers))
        channels = filters
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(filters * height * width, classes))


def _norm_layer(norm: str, filters: int) -> list[nn.Module]:
    if norm == "group":
        return [nn.GroupNorm(math.gcd(8, filters), filters)]
    if norm == "none":
        return []
    return [nn.BatchNorm2d(filters, eps=1e-3, track_running_stats=norm == "running")]


MODELS: dict[str, Callable[..., nn.Module]] = {"logistic": logistic, "mlp": mlp, "cnn4": cnn4}


def build(
    model: str | Callable[..., nn.Module], shape: Sequence[int], classes: int, seed: int, **options: object
) -> nn.Module:
    """Build a model by name, or by a function called as ``function(shape, classes, **options)``.

    Its initial parameters depend only on ``seed``.
    """
    if isinstance(model, str):
        checks.one_of("model", model, MODELS)
        model = MODELS[model]
    if model in MODELS.values() and not all(isinstance(size, int) for size in shape):
        raise ConfigError(
            f"The model {model.__name__} takes one tensor, but samples are {shape}; give a model of your own, as "
            '"module:function".'
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(shape, classes, **options)
