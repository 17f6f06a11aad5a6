"""The search space: a list of choices or a range for each config key."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfedl.config.schema import parse_config, with_value
from comfedl.utils.errors import ConfigError

EXAMPLE = '"algorithm.lr" = [0.01, 0.1] or { low = 0.001, high = 1.0, log = true }'
Scalar = str | float | int | bool


@dataclass(frozen=True)
class Choices:
    """A list of values to choose from."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> dict[Scalar, Any]:
        """The values by their label in the study: the value itself, or the JSON of a table or list."""
        return {v if isinstance(v, Scalar) else json.dumps(v, default=str): v for v in self.values}

    def to_plain(self) -> list[Any]:
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``: integers if both ends are integers."""

    low: float
    high: float
    log: bool = False

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def values(self) -> tuple[float, float]:
        """The two ends."""
        return self.low, self.high

    def to_plain(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "log": self.log}


Space = Mapping[str, Choices | Range]


def read_space(table: Mapping[str, Any], where: str) -> Space:
    """Read and check a table of lists and ranges; keys are paths, quoted ("algorithm.lr") or as nested tables."""
    space: dict[str, Choices | Range] = {}
    for path, value in _flatten(table):
        if path in space:
            raise ConfigError(f"{where}: {path} is given twice; remove one.")
        try:
            space[path] = _range(path, value) if isinstance(value, Mapping) else _choices(path, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not space:
        raise ConfigError(f"{where} names nothing to search; add for instance {EXAMPLE}.")
    return space


def check_space(space: Space, settings: Mapping[str, Any], where: str) -> None:
    """Check that the config accepts each of these values on its own."""
    for path, part in space.items():
        if not path.startswith(("algorithm.", "model.")) and path != "clients_per_round":
            raise ConfigError(
                f"{where}: {path} cannot be searched, since trials are comparable only on the same data and budget; "
                "search keys of algorithm or model, or clients_per_round."
            )
        for value in part.values:
            try:
                parse_config(with_value(settings, path, value, where))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None


def grid_size(space: Space) -> int | None:
    """The number of points in a grid over this space; None if any part is a range."""
    sizes = [len(part.values) for part in space.values() if isinstance(part, Choices)]
    return math.prod(sizes) if len(sizes) == len(space) else None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _choices(path: str, value: Any) -> Choices:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{path} is {value!r}, but it must be a list of choices or a range, such as {EXAMPLE}.")
    if not value:
        raise ConfigError(f"{path} is an empty list; give it at least one value.")
    for one, other in itertools.combinations(value, 2):
        if one == other:
            raise ConfigError(f"{path} has {other!r} twice; remove one.")
    return Choices(tuple(value))


def _range(path: str, value: Mapping[str, Any]) -> Range:
    for key in value:
        if key not in ("low", "high", "log"):
            raise ConfigError(f"{path} has the key {key!r}, but a range has low, high and log.")
    for key in ("low", "high"):
        number = value.get(key)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            given = f"is {number!r}" if key in value else "is missing"
            raise ConfigError(f"{path}.{key} {given}, but it must be a number.")
    low, high, log = value["low"], value["high"], value.get("log", False)
    if not isinstance(log, bool):
        raise ConfigError(f"{path}.log is {log!r}, but it must be true or false.")
    if low >= high:
        raise ConfigError(f"{path} has low = {low!r} and high = {high!r}, but low must be below high.")
    if log and low <= 0:
        raise ConfigError(f"{path} has log = true and low = {low!r}, but a logarithmic range must start above 0.")
    return Range(low, high, log)
