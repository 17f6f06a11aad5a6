"""Checks of single values; each error says what was given, what is allowed and what to do.

Numpy numbers are accepted like Python's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from comfedl.utils.errors import ConfigError, nearest


def _require_number(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not is_allowed(number):
        raise ConfigError(f"{name} is {value!r}, but it must be {allowed}.")


def finite(name: str, value: Any) -> None:
    """Require a finite number."""
    _require_number(name, value, "a finite number", lambda x: True)


def positive(name: str, value: Any, advice: str = "") -> None:
    """Require a finite number above 0."""
    _require_number(name, value, f"a number above 0{advice and ': ' + advice}", lambda x: x > 0)


def not_below(name: str, value: Any, least: float) -> None:
    """Require a finite number of at least ``least``."""
    _require_number(name, value, f"a number of {least:g} or more", lambda x: x >= least)


def at_most(name: str, value: Any, most: float) -> None:
    """Require a finite number of at most ``most``."""
    _require_number(name, value, f"a number of {most:g} or less", lambda x: x <= most)


def between(name: str, value: Any, low: float, high: float) -> None:
    """Require a number in [``low``, ``high``)."""
    _require_number(name, value, f"a number of {low:g} or more and below {high:g}", lambda x: low <= x < high)


def inside(name: str, value: Any, low: float, high: float) -> None:
    """Require a number between ``low`` and ``high``, without these two."""
    _require_number(name, value, f"a number above {low:g} and below {high:g}", lambda x: low < x < high)


def not_zero(name: str, value: Any, advice: str) -> None:
    """Require a finite number other than 0."""
    _require_number(name, value, f"a number other than 0: {advice}", lambda x: x != 0)


def at_least(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Require an integer of at least ``least`` and, if given, at most ``most``."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < least or (most is not None and int(value) > most):
        limit = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{name} is {value!r}, but it must be an integer of {least} or more{limit}.")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Require one of the allowed names."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} is {value!r}, which is unknown; {nearest(str(value), allowed)}.")
