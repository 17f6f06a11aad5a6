"""A run as a TOML file: checked whole before anything starts, then built into data, model and algorithm."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import nn

from comfedl import models
from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.callbacks import Callback
from comfedl.data.federated import FederatedData
from comfedl.data.loading import load
from comfedl.data.partition import PARTITIONS, Partition
from comfedl.data.sources import SOURCES
from comfedl.errors import ConfigError, nearest
from comfedl.outer import OUTERS, Outer
from comfedl.problem import Adapt, Composition
from comfedl.result import Result
from comfedl.run import fit
from comfedl.settings import describe

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
    "dataset": "data",
    "method": "algorithm",
    "participants": "clients_per_round",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Named(BaseModel):
    """A table whose other keys are the arguments of what it names."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataTable(_Named):
    """[data]: the data set, and its partition with the partition's arguments."""

    partition: str | None = None
    validation: float = 0.2
    test: float = 0.2
    seed: int | None = None


class ModelTable(_Named):
    """[model]: the model's name and its options."""


class AlgorithmTable(_Named):
    """[algorithm]: the method's name and its hyper-parameters."""


class Config(_Table):
    """A whole run. ``data.seed`` is the split's own seed; it follows ``seed`` where it is not given."""

    rounds: int = 200
    seed: int = 0
    clients_per_round: int | None = None
    eval_every: int = 1
    engine: str = "embedded"
    data: DataTable
    model: ModelTable = ModelTable(name="logistic")
    algorithm: AlgorithmTable

    # What the tables stand for.

    def make_algorithm(self) -> Algorithm:
        """The method with its hyper-parameters."""
        name = self.algorithm.name
        found = _imported("algorithm.name", name) if ":" in name else _lookup("algorithm.name", name, ALGORITHMS)
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise ConfigError(f"algorithm.name is {name!r}, which is not a subclass of comfedl's Algorithm.")
        method: Algorithm = make(found, self.algorithm.arguments, "algorithm")
        return method

    def make_partition(self) -> Partition | None:
        """The partition, or None for the data set's default."""
        table = self.data
        if table.partition is None:
            own = set(DataTable.model_fields)
            for key in table.arguments:
                raise _unknown(f"data.{key}", key, own, "name a partition to give its arguments")
            return None
        found = _lookup("data.partition", table.partition, PARTITIONS)
        partition: Partition = make(found, table.arguments, "data", extra=DataTable.model_fields)
        return partition

    def make_data(self, progress: bool = False) -> FederatedData:
        """The clients' data."""
        table = self.data
        _lookup("data.name", table.name, SOURCES)
        seed = self.seed if table.seed is None else table.seed
        return load(table.name, self.make_partition(), seed, table.validation, table.test, progress)

    def make_model(self, fed: FederatedData) -> nn.Module:
        """The model, with initial parameters that depend on the seed alone."""
        shape, classes = tuple(fed.train.x.shape[1:]), SOURCES[self.data.name].classes
        found = self._model_function()
        try:
            model = models.build(found, shape, classes, self.seed, **self.model.arguments)
        except TypeError as error:
            raise ConfigError(
                f"The model {self.model.name!r} cannot be made with {self.model.arguments} ({error}); "
                f"it is {_signature(found)}."
            ) from None
        if not isinstance(model, nn.Module):
            raise ConfigError(f"The model {self.model.name!r} gave a {type(model).__name__}, not an nn.Module.")
        return model

    def _model_function(self) -> Callable[..., nn.Module]:
        name = self.model.name
        found = _imported("model.name", name) if ":" in name else _lookup("model.name", name, models.MODELS)
        if not callable(found):
            raise ConfigError(f"model.name is {name!r}, which is not a function (shape, classes) -> nn.Module.")
        made: Callable[..., nn.Module] = found
        return made

    def check(self) -> None:
        """Build what needs no data, so that a mistake is found before anything is fetched."""
        self.make_algorithm()
        self.make_partition()
        self._model_function()
        _lookup("data.name", self.data.name, SOURCES)

    def resolved(self) -> dict[str, Any]:
        """All values, defaults included, as a config that gives this run again."""
        partition = self.make_partition()
        data = {
            **self.data.model_dump(include=set(DataTable.model_fields), exclude_none=True),
            **({} if partition is None else {k: v for k, v in describe(partition).items() if k != "name"}),
        }
        return {
            **self.model_dump(include={"rounds", "seed", "clients_per_round", "eval_every", "engine"}),
            "data": data,
            "model": {"name": self.model.name, **self.model.arguments},
            "algorithm": {"name": self.algorithm.name, **_written(self.algorithm.arguments, self.make_algorithm())},
        }


def _written(given: Mapping[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """The hyper-parameters as a config writes them: those that name the reader's own code stay as given."""
    full = {key: value for key, value in describe(algorithm).items() if key != "name"}
    return full | {key: value for key, value in given.items() if isinstance(value, str)}


def read_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply changes such as ``algorithm.lr=0.5``."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no config file {path}; check the name.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    return parse_config(settings, changes)


def parse_config(settings: Mapping[str, Any], changes: Sequence[str] = ()) -> Config:
    """Check settings and turn them into a ``Config``."""
    for change in changes:
        settings = _changed(settings, change)
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise _readable(error) from None
    config.check()
    return config


def run_config(
    config: Config,
    out: Path | None = None,
    force: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    fed: FederatedData | None = None,
) -> Result:
    """Run a config."""
    fed = config.make_data(progress) if fed is None else fed
    return fit(
        config.make_model(fed),
        fed,
        config.make_algorithm(),
        rounds=config.rounds,
        seed=config.seed,
        clients_per_round=config.clients_per_round,
        eval_every=config.eval_every,
        engine=config.engine,
        out=out,
        force=force,
        progress=progress,
        callbacks=callbacks,
        settings=config.resolved(),
    )


def make(cls: type, arguments: Mapping[str, Any], where: str, extra: typing.Iterable[str] = ()) -> Any:
    """Build a dataclass (a method, an outer function, a partition) from a table of its arguments."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in arguments:
        if key not in fields:
            raise _unknown(f"{where}.{key}", key, [*fields, *extra])
    values = {key: _argument(hints[key], value, f"{where}.{key}") for key, value in arguments.items()}
    required = [name for name, field in fields.items() if _required(field) and name not in values]
    if required:
        raise ConfigError(f"{where}.{required[0]} is missing; {_signature(cls)} needs it.")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"In [{where}]: {error}") from None


def _argument(kind: Any, value: Any, where: str) -> Any:
    kinds = typing.get_args(kind) or (kind,)
    if Outer in kinds:
        return _nested(value, where, OUTERS, "kl")
    if Adapt in kinds:
        return _nested(
            {"name": "adapt", **value} if isinstance(value, dict) else value, where, {"adapt": Adapt}, "adapt"
        )
    if Composition in kinds:
        return _own(value, where)
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        wanted = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where} is {value!r}, but it must be of type {wanted}: {_first(error)}.") from None


def _nested(value: Any, where: str, names: Mapping[str, type], example: str) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f'{where} is {value!r}, but it must be a table like {{ name = "{example}", ... }}.')
    found = _lookup(f"{where}.name", value["name"], names)
    return make(found, {key: part for key, part in value.items() if key != "name"}, where)


def _own(value: Any, where: str) -> Any:
    found = _imported(where, value) if isinstance(value, str) and ":" in value else None
    if not isinstance(found, Composition):
        raise ConfigError(f'{where} is {value!r}, but it must be "module:name" of a Composition.')
    return found


def _imported(where: str, name: str) -> Any:
    """What ``"module:name"`` stands for; modules beside the working folder are found too."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where} is {name!r}, which cannot be imported ({error}); check the name.") from None


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _signature(of: Any) -> str:
    import inspect

    return f"{of.__name__}{inspect.signature(of)}".replace(" -> None", "")


def _lookup(where: str, name: str, names: Mapping[str, Any]) -> Any:
    if name not in names:
        raise ConfigError(f"{where} is {name!r}, which is unknown; {nearest(name, names)}.")
    return names[name]


def _unknown(where: str, key: str, allowed: typing.Iterable[str], advice: str = "") -> ConfigError:
    allowed = list(allowed)
    meant = SYNONYMS.get(key)
    hint = (
        f"did you mean {meant!r}? Allowed: {', '.join(sorted(allowed))}" if meant in allowed else nearest(key, allowed)
    )
    return ConfigError(f"{where} is not a key that is known; {hint}{advice and '; ' + advice}.")


def _readable(error: ValidationError) -> ConfigError:
    """Pydantic's first complaint as one sentence."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(where, str(first["loc"][-1]), Config.model_fields)
    if first["type"] == "missing":
        tables = {
            "data": '[data] with a name, such as "digits"',
            "algorithm": '[algorithm] with a name, such as "comfedl"',
        }
        return ConfigError(f"{where} is missing; give {tables.get(where, 'it')}.")
    return ConfigError(f"{where} is {first['input']!r}: {_first(error)}.")


def _first(error: ValidationError) -> str:
    text = error.errors()[0]["msg"]
    return text[0].lower() + text[1:]


def _changed(settings: Mapping[str, Any], change: str) -> dict[str, Any]:
    """Settings with one value changed, as ``a.b=v``; v is TOML, or a text where it is not."""
    path, equals, text = change.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {change!r} cannot be read; give it as a.b=value, such as algorithm.lr=0.5.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    changed = {**settings}
    table = changed
    for key in keys[:-1]:
        below = table.get(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {change!r} goes into {key!r}, which is {below!r} and not a table.")
        table[key] = {**below}
        table = table[key]
    table[keys[-1]] = value
    return changed
