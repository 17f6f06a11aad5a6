"""Hyper-parameters as dicts of plain values, and such dicts as TOML."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

LATER = {"later": True}
"""Metadata of a field that version 0.1 did not have: its default is not recorded, so that older runs can be resumed."""


def describe(value: Any) -> Any:
    """A dataclass, such as an algorithm or an outer function, as a dict with its name; None values are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", type(value).__name__.lower())
        later = {
            f.name for f in dataclasses.fields(value) if f.metadata == LATER and getattr(value, f.name) == f.default
        }
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in later}
        # A None that is not the default, as in batch_size, stands for all the data.
        fields |= {
            f.name: "all" for f in dataclasses.fields(value) if fields.get(f.name, 0) is None and f.default is not None
        }
        return {"name": name} | {key: part for key, part in fields.items() if part is not None}
    if isinstance(value, tuple):
        return [describe(part) for part in value]
    value = plain_number(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"  # unlike repr, the same in every process
    return value if isinstance(value, int | float | str | list | dict) or value is None else repr(value)


def plain_number(value: Any) -> Any:
    """Convert a numpy scalar to a Python number; return anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``.

    >>> flat({"rounds": 3, "algorithm": {"outer": {"gamma": 0.2}}})
    {'rounds': 3, 'algorithm.outer.gamma': 0.2}
    """
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML: plain values first, then one table per dict; deeper dicts are inline tables.

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
        lines += ["", f"[{toml_key(name)}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{toml_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def toml_key(key: str) -> str:
    """A key as TOML writes it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    """A TOML string. Unlike JSON, TOML has no surrogate pairs and must escape DEL."""
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
    return _string(str(value))
