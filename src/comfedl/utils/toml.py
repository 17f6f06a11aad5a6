"""Settings as plain values: hyper-parameters as dicts, dicts as TOML."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np


def describe(value: Any) -> Any:
    """A dataclass such as an algorithm or an outer function as a dict with its name; None values are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", type(value).__name__.lower())
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        # A None that is not the default, as for batch_size, is all of the data.
        fields |= {f.name: "all" for f in dataclasses.fields(value) if fields[f.name] is None and f.default is not None}
        return {"name": name} | {key: part for key, part in fields.items() if part is not None}
    if isinstance(value, tuple):
        return [describe(part) for part in value]
    value = plain_number(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"  # the same in every process, unlike its address
    return value if isinstance(value, int | float | str | list | dict) or value is None else repr(value)


def plain_number(value: Any) -> Any:
    """A numpy number as Python's own; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``.

    >>> flat({"rounds": 3, "algorithm": {"outer": {"gamma": 0.2}}})
    {'rounds': 3, 'algorithm.outer.gamma': 0.2}
    """
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return out


def to_toml(settings: Mapping[str, Any]) -> str:
    """Write settings as TOML: plain values first, then one table for each dict; deeper dicts stand inline.

    >>> print(to_toml({"rounds": 3, "algorithm": {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}}}))
    rounds = 3
    <BLANKLINE>
    [algorithm]
    name = "comfedl"
    outer = { name = "kl", gamma = 0.2 }
    <BLANKLINE>
    """
    plain = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = _lines(plain)
    for name, table in tables.items():
        lines += ["", f"[{_key(name)}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    """A TOML string: as JSON's, but a character beyond the basic plane stands for itself, not for a pair."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04X}" if c == "\x7f" or 0xD800 <= ord(c) < 0xE000 else c for c in written)


def _value(value: Any) -> str:
    value = plain_number(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_lines(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return _text(str(value))
