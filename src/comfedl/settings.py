"""Settings as plain values: hyper-parameters as dicts, dicts as TOML."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any


def describe(value: Any) -> Any:
    """A dataclass such as an algorithm or an outer function as a dict with its name; None values are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", type(value).__name__.lower())
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"name": name} | {key: part for key, part in fields.items() if part is not None}
    if isinstance(value, tuple):
        return [describe(part) for part in value]
    return value if isinstance(value, int | float | str | list | dict) or value is None else repr(value)


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
    lines = [f"{key} = {_value(value)}" for key, value in plain.items() if value is not None]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(part)}" for key, part in value.items() if part is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value))
