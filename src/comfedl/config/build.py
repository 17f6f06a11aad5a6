"""Build the object that a config table describes: an algorithm, an outer function, a partition, a model.

Every mistake is reported in one sentence with the key, what is allowed, and the closest valid name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from comfedl.core.objectives import Adapt, Composition
from comfedl.core.offset import OFFSETS, Offset
from comfedl.core.optim import OPTIMIZERS
from comfedl.core.outer_functions import OUTERS, Outer
from comfedl.core.schedule import SCHEDULES, Schedule
from comfedl.utils.errors import ConfigError, nearest
from comfedl.utils.toml import describe

# Names that other libraries and papers use.
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


def from_table(cls: type, arguments: Mapping[str, Any], where: str, other_keys: Iterable[str] = ()) -> Any:
    """Build a dataclass (an algorithm, an outer function, a partition) from the table ``where`` of its arguments.

    ``other_keys`` are further keys of that table, to be listed in the error for an unknown key.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in arguments:
        if key not in fields:
            raise unknown_key(where, key, [*fields, *other_keys], getattr(cls, "name", cls.__name__))
    values = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in arguments.items()}
    none = dataclasses.MISSING
    required = [name for name, field in fields.items() if field.default is none and field.default_factory is none]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where}.{missing[0]} is missing; {signature(cls)} needs it.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"In [{where}]: {error}") from None


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A value of a config as the type of an argument."""
    kinds = typing.get_args(kind) or (kind,)
    if Outer in kinds:
        return build_named(value, where, OUTERS, 'name = "kl", gamma = 0.2')
    if Adapt in kinds:
        table = {"name": "adapt", **value} if isinstance(value, dict) else value
        return build_named(table, where, {"adapt": Adapt}, 'name = "adapt", lr = 0.05')
    if Composition in kinds:
        found = import_object(where, value) if isinstance(value, str) and ":" in value else None
        if not isinstance(found, Composition):
            raise ConfigError(f'{where} is {value!r}, but it must be "module:name" of a Composition.')
        return found
    if Offset in kinds:
        return build_named(value, where, OFFSETS, 'name = "generalisation", c = 1.0')
    optimizers = {name: option for name, option in OPTIMIZERS.items() if option in kinds}
    if optimizers:
        return build_named(value, where, optimizers, 'name = "sgd", momentum = 0.9')
    if kind == Schedule | None or kind == Schedule:
        if isinstance(value, str) and ":" in value:
            return import_object(where, value)
        return build_named(value, where, SCHEDULES, 'name = "cosine", rounds = 200')
    if value == "all" and types.NoneType in kinds and str not in kinds:
        return None  # TOML has no None; "all" stands for it
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        name = kind.__name__ if isinstance(kind, type) else kind
        raise ConfigError(f"{where} is {value!r}, but {first_complaint(error)}; its type is {name}.") from None


def build_named(value: Any, where: str, names: Mapping[str, type], example: str) -> Any:
    """The object that a table with a name describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{where} is {value!r}, but it must be a table with a name, such as {{ {example} }}.")
    found = lookup(f"{where}.name", value["name"], names)
    return from_table(found, {key: part for key, part in value.items() if key != "name"}, where)


def lookup(where: str, name: str, names: Mapping[str, Any]) -> Any:
    """The object registered under a name."""
    if name not in names:
        raise ConfigError(f"{where} is {name!r}, which is unknown; {nearest(name, names)}.")
    return names[name]


def import_or_lookup(where: str, name: str, names: Mapping[str, Any]) -> Any:
    """The user's object ``"module:name"``, or the one registered under a name."""
    return import_object(where, name) if ":" in name else lookup(where, name, names)


_UNTRUSTED: ContextVar[Path | None] = ContextVar("untrusted", default=None)


SHIPPED = frozenset({"comfedl.data.demo_sites:demo_sites"})
"""The library's own functions that configs name and that do no harm, whoever's folder it is."""


@contextmanager
def without_imports(folder: Path) -> Iterator[None]:
    """Refuse to import what a config names, since it comes from this folder, which may be anybody's."""
    token = _UNTRUSTED.set(folder)
    try:
        yield
    finally:
        _UNTRUSTED.reset(token)


def import_object(where: str, name: str) -> Any:
    """Import ``"module:name"``, also from the working folder."""
    folder = _UNTRUSTED.get()
    if folder is not None and name not in SHIPPED:
        raise ConfigError(
            f"The config in {folder} has {where} = {name[:200]!r}, code that would be imported and run; if you know "
            "whose folder it is, allow it with --trust (in Python: trust=True)."
        )
    module, _, attribute = name.partition(":")
    if "" not in sys.path:  # the working folder, which is not on the path of an installed script
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"{where} is {name!r}, which cannot be imported ({_describe(error)}); check it.") from error


def call_user_code(where: str, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the user, which may raise anything."""
    try:
        return function(*arguments, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} is {name!r}, and calling it raised an error ({_describe(error)}).") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def check_options(where: str, function: Callable[..., Any], options: Mapping[str, Any], skip: int) -> None:
    """Check that a function accepts these options; its first ``skip`` arguments are passed by position."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    for key in options:
        if key not in names:
            raise unknown_key(where, key, [*names, "name"], signature(function))
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in options and parameter.name in names:
            raise ConfigError(f"{where}.{parameter.name} is missing; {signature(function)} needs it.")


def default_options(function: Callable[..., Any], skip: int) -> dict[str, Any]:
    """The default values of a function's arguments after the first ``skip``."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return {p.name: describe(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def signature(function: Any) -> str:
    """A class or function with its arguments: ``Exp(gamma: float)``."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None) or str(function)
    return f"{name}{inspect.signature(function)}".replace("'", "").partition(" ->")[0]


def unknown_key(where: str, key: str, allowed: Iterable[str], owner: str = "the config") -> ConfigError:
    """The error for an unknown key, with the closest valid one."""
    allowed = list(allowed)
    meant = SYNONYMS.get(key)
    if meant not in allowed:
        meant = next((f"{table}.{key}" for table, keys in TABLE_OF_KEY.items() if key in keys and table != where), None)
    hint = f"did you mean {meant!r}? Allowed: {', '.join(sorted(allowed))}" if meant else nearest(key, allowed)
    return ConfigError(f"{f'{where}.{key}' if where else key} is not a key of {owner}; {hint}.")


# Keys that are often written in the wrong table, by the table that they belong in.
TABLE_OF_KEY = {
    "algorithm": {
        *("lr", "local_steps", "batch_size", "outer", "inner"),
        *("client_optimizer", "server_optimizer", "lr_schedule", "clip_grad_norm", "clip_update_norm"),
    },
    "algorithm.client_optimizer": {"momentum", "nesterov", "weight_decay", "keep_state"},
    "algorithm.outer": {"gamma", "cap", "effective_clients", "on", "offset", "level", "rho", "q"},
    "privacy": {"clip", "noise_multiplier", "delta", "sampling"},
    "data": {"partition", "by", "clients", "alpha", "rho", "path", "client", "target"},
}


def first_complaint(error: ValidationError) -> str:
    """Pydantic's first complaint, to be used within a sentence."""
    text = error.errors()[0]["msg"]
    return text[0].lower() + text[1:]
