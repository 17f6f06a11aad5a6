"""Changes of training batches, such as random crops; the public module ``cf.transform``.

``fit(transform=f)`` calls ``f(x, generator)`` on every batch that clients train on. All random numbers come from the
generator, which is keyed by (seed, draw, round, client): so a run is the same on every engine, and when it was stopped
and resumed. What clients are evaluated on, and whole data that losses are measured on, stay as they are.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from comfedl.utils import checks, samples, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.samples import Samples
from comfedl.utils.toml import describe, plain_number

__all__ = ["Crop", "Cutout", "Flip", "Mask", "Noise", "Transform"]

TransformFunction = Callable[[Samples, torch.Generator], Samples]
IMAGES, NUMBERS = "images [samples, channels, height, width]", "floating-point numbers"


class Transform(ABC):
    """A random change of x; of a tuple or dict, it changes every tensor that it is for."""

    name: ClassVar[str]
    takes: ClassVar[str]

    def __call__(self, x: Samples, generator: torch.Generator) -> Samples:
        parts = [part for _, part in samples.named(x)]
        if not any(map(self._takes, parts)):
            raise ConfigError(f"{self.name} is for {self.takes}, but x has samples of shape {samples.described(x)}.")
        return tree.map(lambda part: self.change(part, generator) if self._takes(part) else part, x)

    def _takes(self, part: Tensor) -> bool:
        return part.ndim == 4 if self.takes == IMAGES else part.is_floating_point()

    @abstractmethod
    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A batch with each of its samples changed on its own."""


@dataclass(frozen=True)
class Crop(Transform):
    """Pad images with zeros on all sides, and cut out the old size at a random place."""

    padding: int

    name: ClassVar[str] = "crop"
    takes: ClassVar[str] = IMAGES

    def __post_init__(self) -> None:
        checks.at_least("padding", self.padding, 1)

    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        size, channels, height, width = x.shape
        padded = functional.pad(x, [self.padding] * 4)
        top, left = torch.randint(2 * self.padding + 1, (2, size, 1), generator=generator, device=x.device)
        rows = top + torch.arange(height, device=x.device)
        columns = left + torch.arange(width, device=x.device)
        image, channel = (torch.arange(count, device=x.device) for count in (size, channels))
        return padded[
            image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]


@dataclass(frozen=True)
class Flip(Transform):
    """Mirror images, left to right, with a probability."""

    probability: float = 0.5

    name: ClassVar[str] = "flip"
    takes: ClassVar[str] = IMAGES

    def __post_init__(self) -> None:
        _check_probability(self.probability)

    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        chosen = torch.rand(len(x), generator=generator, device=x.device) < self.probability
        return torch.where(chosen[:, None, None, None], x.flip(3), x)


@dataclass(frozen=True)
class Cutout(Transform):
    """Set a square of this size to zero, with its centre anywhere in the image (DeVries and Taylor, 2017)."""

    size: int

    name: ClassVar[str] = "cutout"
    takes: ClassVar[str] = IMAGES

    def __post_init__(self) -> None:
        checks.at_least("size", self.size, 1)

    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        inside = []
        for extent in x.shape[2:]:
            centre = torch.randint(extent, (len(x), 1), generator=generator, device=x.device)
            from_start = torch.arange(extent, device=x.device) - (centre - self.size // 2)
            inside.append((from_start >= 0) & (from_start < self.size))
        rows, columns = inside
        return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


@dataclass(frozen=True)
class Noise(Transform):
    """Add normal noise of this standard deviation to every number."""

    std: float

    name: ClassVar[str] = "noise"
    takes: ClassVar[str] = NUMBERS

    def __post_init__(self) -> None:
        checks.positive("std", self.std)

    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x + self.std * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class Mask(Transform):
    """Replace each number by ``value`` with a probability; 0 is the mean of a column that was standardised."""

    probability: float
    value: float = 0.0

    name: ClassVar[str] = "mask"
    takes: ClassVar[str] = NUMBERS

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        checks.finite("value", self.value)

    def change(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator, device=x.device) < self.probability, self.value)


def _check_probability(probability: float) -> None:
    checks.not_below("probability", probability, 0)
    checks.at_most("probability", probability, 1)


TRANSFORMS: dict[str, type[Transform]] = {each.name: each for each in (Crop, Cutout, Flip, Mask, Noise)}
"""The transforms by the name used in a config."""


def check_transform(transform: Any) -> tuple[TransformFunction, ...]:
    """What ``fit(transform=...)`` was given, as the functions to call one after another."""
    given = () if transform is None else transform if isinstance(transform, list | tuple) else (transform,)
    for each in given:
        if not callable(each) or isinstance(each, type):
            raise ConfigError(
                f"transform is {each!r}, but it must be a function f(x, generator) -> x, one such as "
                "cf.transform.Crop(padding=4), or a list of them."
            )
    return tuple(given)


def describe_transform(transform: Any) -> Any:
    """A transform as a run's config records it: one of ours as a table, a function as "module:name".

    A ``functools.partial`` is recorded with its arguments, and another object with its public attributes that are plain
    values: so a run is not resumed with others.
    """
    if isinstance(transform, list | tuple):
        return [describe_transform(each) for each in transform] or None
    if isinstance(transform, functools.partial):
        given = {"args": _recorded(transform.args), "keywords": _recorded(transform.keywords)}
        return {"name": "functools:partial", "func": describe_transform(transform.func), **given}
    if transform is None or isinstance(transform, Transform) or hasattr(transform, "__qualname__"):
        return describe(transform)
    name = f"{type(transform).__module__}:{type(transform).__qualname__}"  # its repr may differ between processes
    attributes = getattr(transform, "__dict__", {}).items()
    plain = {key: _recorded(value) for key, value in attributes if not key.startswith("_") and _is_plain(value)}
    return {"name": name, "vars": plain} if plain else name


def _is_plain(value: Any) -> bool:
    """Whether a value is written to a config as it is."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(plain_number(value), bool | int | float | str)


def _recorded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_recorded(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _recorded(each) for key, each in value.items()}
    return plain_number(value) if _is_plain(value) else describe_transform(value)


_ONE_AT_A_TIME = threading.Lock()  # clients may run on several threads, and torch's own generator is shared


def apply(transforms: Sequence[TransformFunction], x: Samples, seed: int) -> Samples:
    """x, which may be overwritten, after all transforms; the same for the same seed.

    Functions that draw from torch's own generator, as those of torchvision do, find it seeded as well.
    """
    generator = torch.Generator(samples.first(x).device).manual_seed(seed)
    with torch.no_grad():
        if all(isinstance(each, Transform) for each in transforms):
            return _chained(transforms, x, generator)
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return _chained(transforms, x, generator)


def _chained(transforms: Sequence[TransformFunction], x: Samples, generator: torch.Generator) -> Samples:
    for each in transforms:
        x = each(x, generator)
    return x
