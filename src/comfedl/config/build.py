"""From a table of a config to the thing it names: methods, outer functions, partitions, models.

Every mistake is one sentence that says which key it is about, what may stand there, and the nearest right name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from comfedl.core.objectives import Adapt, Composition
from comfedl.core.outer_functions import OUTERS, Outer
from comfedl.utils.errors import ConfigError, nearest
from comfedl.utils.toml import describe

# What people call things elsewhere.
SYNONYMS = {
    "learning_rate": "lr",
    "eta": "lr",
    "step_size": "lr",
    "tau": "local_steps",
    "epochs": "local_steps",
    "local_epochs": "local_steps",
    "batch": "batch_size",
    "bs": "batch_size",
    "lambda": "lam",
    "dataset": "name",
    "method": "algorithm",
    "participants": "clients_per_round",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
}


def make(cls: type, arguments: Mapping[str, Any], where: str, extra: Iterable[str] = ()) -> Any:
    """Build a dataclass (a method, an outer function, a partition) from a table of its arguments.

    ``extra`` are keys that the table may have besides: they are only listed where a key is unknown.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in arguments:
        if key not in fields:
            raise unknown(where, key, [*fields, *extra], getattr(cls, "name", cls.__name__))
    values = {key: _argument(hints[key], value, f"{where}.{key}") for key, value in arguments.items()}
    missing = [name for name, field in fields.items() if _required(field) and name not in values]
    if missing:
        raise ConfigError(f"{where}.{missing[0]} is missing; {signature(cls)} needs it.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"In [{where}]: {error}") from None


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _argument(kind: Any, value: Any, where: str) -> Any:
    kinds = typing.get_args(kind) or (kind,)
    if Outer in kinds:
        return _nested(value, where, OUTERS, 'name = "kl", gamma = 0.2')
    if Adapt in kinds:
        named = {"name": "adapt", **value} if isinstance(value, dict) else value
        return _nested(named, where, {"adapt": Adapt}, 'name = "adapt", lr = 0.05')
    if Composition in kinds:
        found = imported(where, value) if isinstance(value, str) and ":" in value else None
        if not isinstance(found, Composition):
            raise ConfigError(f'{where} is {value!r}, but it must be "module:name" of a Composition.')
        return found
    if value == "all" and types.NoneType in kinds and str not in kinds:
        return None  # TOML has no None: all of the data
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where} is {value!r}, but {complaint(error)}; it is of type {_spelt(kind)}.") from None


def _nested(value: Any, where: str, names: Mapping[str, type], example: str) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{where} is {value!r}, but it must be a table like {{ {example} }}, with its name.")
    found = lookup(f"{where}.name", value["name"], names)
    return make(found, {key: part for key, part in value.items() if key != "name"}, where)


def lookup(where: str, name: str, names: Mapping[str, Any]) -> Any:
    """What a name stands for."""
    if name not in names:
        raise ConfigError(f"{where} is {name!r}, which is unknown; {nearest(name, names)}.")
    return names[name]


def imported(where: str, name: str) -> Any:
    """What ``"module:name"`` stands for; modules beside the working folder are found too."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the reader's module may raise anything
        raise ConfigError(f"{where} is {name!r}, which cannot be imported ({_said(error)}); check it.") from error


def call(where: str, name: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function of the reader's own, which may raise anything."""
    try:
        return function(*given, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} is {name!r}, and calling it raised an error ({_said(error)}).") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def check_options(where: str, function: Callable[..., Any], options: Mapping[str, Any], given: int) -> None:
    """See that a function takes these options, after so many arguments that it gets anyway."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    for key in options:
        if key not in names:
            raise unknown(where, key, [*names, "name"], signature(function))
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in options and parameter.name in names:
            raise ConfigError(f"{where}.{parameter.name} is missing; {signature(function)} needs it.")


def defaults(function: Callable[..., Any], given: int) -> dict[str, Any]:
    """The default options of a function, after so many arguments that it gets anyway."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return {p.name: describe(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def signature(of: Any) -> str:
    """A class or function as it is called: ``Exp(gamma: float)``."""
    name = getattr(of, "name", None) or getattr(of, "__name__", None) or str(of)
    return f"{name}{inspect.signature(of)}".replace("'", "").partition(" ->")[0]


def _spelt(kind: Any) -> str:
    return str(kind.__name__) if isinstance(kind, type) else str(kind)


def unknown(where: str, key: str, allowed: Iterable[str], owner: str = "") -> ConfigError:
    """The error for a key that is not known, with the nearest that is."""
    allowed = list(allowed)
    hints = [f"did you mean {SYNONYMS[key]!r}?"] if SYNONYMS.get(key) in allowed else []
    for path, names in PLACES.items():
        if key in names and path != where and not hints and key not in allowed:
            hints = [f"did you mean '{path}.{key}'?"]
    said = f"{' '.join(hints)} Allowed: {', '.join(sorted(allowed))}" if hints else nearest(key, allowed)
    place = f"{where}.{key}" if where else key
    return ConfigError(f"{place} is not a key that {owner or 'a config'} has; {said}.")


# Keys that are often put one table too high, by where they belong.
PLACES = {
    "algorithm": {"lr", "local_steps", "batch_size", "outer", "inner"},
    "algorithm.outer": {"gamma", "cap", "effective_clients", "level", "rho", "q"},
    "data": {"partition", "clients", "alpha", "rho", "path", "client", "target"},
}


def complaint(error: ValidationError) -> str:
    """Pydantic's first complaint, as a part of a sentence."""
    text = error.errors()[0]["msg"]
    return text[0].lower() + text[1:]
