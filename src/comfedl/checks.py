"""Checks of single values, each with a message that says what was given, what is allowed and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from comfedl.errors import ConfigError, nearest


def _number(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}, but it must be {allowed}.")
    return float(value)


def positive(name: str, value: Any, advice: str = "") -> None:
    """Require a finite number above 0."""
    if not 0 < _number(name, value, "a number above 0") < math.inf:
        raise ConfigError(f"{name} is {value!r}, but it must be a number above 0{advice and ': ' + advice}.")


def not_below(name: str, value: Any, least: float) -> None:
    """Require a finite number that is ``least`` or more."""
    if not least <= _number(name, value, f"a number that is {least:g} or more") < math.inf:
        raise ConfigError(f"{name} is {value!r}, but it must be a number that is {least:g} or more.")


def between(name: str, value: Any, low: float, high: float) -> None:
    """Require a number from ``low`` to below ``high``."""
    if not low <= _number(name, value, f"a number from {low:g} to below {high:g}") < high:
        raise ConfigError(f"{name} is {value!r}, but it must be a number from {low:g} to below {high:g}.")


def at_least(name: str, value: Any, least: int) -> None:
    """Require a whole number that is ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number that is {least} or more.")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Require one of a few names."""
    allowed = list(allowed)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, which is unknown; {nearest(str(value), allowed)}.")
