"""A run as a TOML file: checked whole before anything starts, then built into data, model and algorithm."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.config.build import call, check_options, complaint, defaults, imported, lookup, make, unknown
from comfedl.config.data_schema import SITES, DataTable, NamedTable, SitesTable
from comfedl.data.federated import FederatedData
from comfedl.engines.process_group import BACKENDS
from comfedl.engines.strategy import WAYS
from comfedl.models import zoo
from comfedl.models.losses import LOSSES
from comfedl.training.callbacks import Callback
from comfedl.training.fit import fit
from comfedl.training.result import Result
from comfedl.training.validation import check_loop
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import describe

LOOP = (
    "rounds",
    "seed",
    "clients_per_round",
    "eval_every",
    "eval_clients",
    "checkpoint_every",
    "quorum",
    "save_personal",
    "engine",
)


class FlowerTable(BaseModel):
    """[flower]: how sites are reached; see ``comfedl.flower``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sites: int | list[str] | None = None
    outputs: int | None = None
    deadline: float = 600
    patience: float = 600

    def check(self) -> None:
        """Refuse what cannot be."""
        checks.positive("flower.deadline", self.deadline)
        checks.positive("flower.patience", self.patience)
        if self.outputs is not None:
            checks.at_least("flower.outputs", self.outputs, 1)
        if isinstance(self.sites, int):
            checks.at_least("flower.sites", self.sites, 1)
        elif self.sites is not None and len({*self.sites, ""}) <= len(self.sites):
            raise ConfigError(f"flower.sites is {self.sites!r}, but it must be a number, or names that all differ.")


class EmbeddedTable(BaseModel):
    """[embedded]: how the embedded engine runs clients; see ``Embedded``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    vectorize: str = "auto"
    memory_mb: float = 512
    workers: int | str = "auto"


class DistributedTable(EmbeddedTable):
    """[distributed]: how the processes speak, and how each runs its clients; see ``Distributed``."""

    backend: str = "auto"
    timeout_s: float = 300


ENGINE_TABLES = {"embedded": EmbeddedTable, "distributed": DistributedTable}


class Config(BaseModel):
    """A whole run. ``data.seed`` is the split's own seed; it follows ``seed`` where it is not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rounds: int = 200
    seed: int = 0
    clients_per_round: int | None = None
    eval_every: int = 1
    eval_clients: int | None = None
    checkpoint_every: int | None = None
    quorum: float = 0.5
    save_personal: bool = True
    engine: str = "embedded"
    loss: str = "cross_entropy"
    embedded: EmbeddedTable | None = None
    distributed: DistributedTable | None = None
    flower: FlowerTable | None = None
    data: DataTable
    model: NamedTable = NamedTable(name="logistic")
    algorithm: NamedTable
    tune: dict[str, Any] | None = None
    """What ``comfedl tune`` searches; a run does not use it."""

    def make_algorithm(self) -> Algorithm:
        """The method with its hyper-parameters."""
        name = self.algorithm.name
        found = imported("algorithm.name", name) if ":" in name else lookup("algorithm.name", name, ALGORITHMS)
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise ConfigError(f"algorithm.name is {name!r}, which is not a subclass of comfedl's Algorithm.")
        method: Algorithm = make(found, self.algorithm.arguments, "algorithm")
        return method

    def make_data(self, progress: bool = False) -> FederatedData:
        """The clients' data."""
        return self.data.make_data(self.seed, progress, self.loss)

    def make_model(self, fed: FederatedData) -> nn.Module:
        """The model, with initial parameters that depend on the seed alone."""
        return self.build_model(tuple(fed.train.x.shape[1:]), self.data.outputs(fed, self.loss))

    def make_model_for(self, shape: Sequence[int]) -> nn.Module:
        """The same for samples of this shape that are at sites, where no data are here to count classes in."""
        told = None if self.flower is None else self.flower.outputs
        return self.build_model(shape, self.data.outputs_unseen(self.loss) if told is None else told)

    def build_model(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The model for samples of this shape, with so many outputs."""
        name, function, options = self.model.name, self._model_function(), self.model.arguments
        model = call("model.name", name, zoo.build, function, shape, outputs, self.seed, **options)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name is {name!r}, which gave {type(model).__name__}, not an nn.Module.")
        return model

    def _model_function(self) -> Callable[..., nn.Module]:
        """What makes the model, as ``function(shape, classes, **options)``."""
        name = self.model.name
        found = imported("model.name", name) if ":" in name else lookup("model.name", name, zoo.MODELS)
        if not callable(found):
            raise ConfigError(f"model.name is {name!r}, which is not a function (shape, classes) -> nn.Module.")
        function: Callable[..., nn.Module] = found
        return function

    def check(self) -> None:
        """Build what needs no data, so that a mistake is found before anything is fetched."""
        self.make_algorithm()
        self.data.check()
        if self.flower is not None:
            self.flower.check()
        checks.one_of("loss", self.loss, LOSSES)
        for name, table in self._engine_tables().items():
            checks.one_of(f"{name}.vectorize", table.vectorize, WAYS)
            checks.positive(f"{name}.memory_mb", table.memory_mb)
            if table.workers != "auto":
                checks.at_least(f"{name}.workers", table.workers, 1)
            if isinstance(table, DistributedTable):
                checks.one_of(f"{name}.backend", table.backend, BACKENDS)
                checks.positive(f"{name}.timeout_s", table.timeout_s)
            if self.engine != name:
                raise ConfigError(f"There is a table [{name}], but engine is {self.engine!r}; leave one of them out.")
        check_loop(**{name: getattr(self, name) for name in LOOP})
        try:
            check_options("model", self._model_function(), self.model.arguments, given=2)
        except ConfigError as error:
            raise ConfigError(f"The model {self.model.name!r}: {error}") from None

    def _engine_tables(self) -> dict[str, EmbeddedTable]:
        """The tables that are for an engine, by its name; a config has one at most."""
        return {name: table for name in ENGINE_TABLES if (table := getattr(self, name)) is not None}

    @property
    def engine_options(self) -> dict[str, Any] | None:
        """The engine's own arguments."""
        table = self._engine_tables().get(self.engine)
        return None if table is None else table.model_dump()

    def resolved(self) -> dict[str, Any]:
        """All values, defaults included, as a config that gives this run again."""
        algorithm = {key: value for key, value in describe(self.make_algorithm()).items() if key != "name"}
        # What names the reader's own code stays as it was written.
        written = {key: value for key, value in self.algorithm.arguments.items() if isinstance(value, str)}
        return {
            **self.model_dump(include={*LOOP} - ({"save_personal"} if self.save_personal else set())),
            **({} if self.loss == "cross_entropy" else {"loss": self.loss}),
            "data": self.data.resolved(),
            "model": {"name": self.model.name, **defaults(self._model_function(), given=2), **self.model.arguments},
            "algorithm": {"name": self.algorithm.name, **algorithm, **written},
            **{name: table.model_dump() for name, table in self._engine_tables().items()},
            **({} if self.flower is None else {"flower": self.flower.model_dump(exclude_none=True)}),
        }


class SitesConfig(Config):
    """A run whose data are at sites."""

    data: SitesTable


def read_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply changes such as ``algorithm.lr=0.5``."""
    return parse_config(read_settings(path), changes)


def read_data(path: Path, changes: Sequence[str] = (), progress: bool = False) -> FederatedData:
    """The clients' data by a TOML file's [data] table alone."""
    settings = with_changes(read_settings(path), changes)
    if "data" not in settings:
        raise ConfigError('data is missing; write [data] with name = "digits".')
    try:
        table = DataTable.model_validate(settings["data"])
    except ValidationError as error:
        raise _readable(error, "data") from None
    for key in settings:
        if key not in Config.model_fields:
            raise unknown("", key, Config.model_fields)
    checks.at_least("seed", settings.get("seed", 0), 0)
    table.check()
    checks.one_of("loss", loss := settings.get("loss", "cross_entropy"), LOSSES)
    return table.make_data(settings.get("seed", 0), progress, loss)


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a TOML file, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no config file {path}; check the name.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a TOML file.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None


def parse_config(settings: Mapping[str, Any], changes: Sequence[str] = ()) -> Config:
    """Check settings and turn them into a ``Config``."""
    try:
        changed = with_changes(settings, changes)
        data = changed.get("data")
        there = isinstance(data, dict) and data.get("name") == SITES
        config = (SitesConfig if there else Config).model_validate(changed)
    except ValidationError as error:
        raise _readable(error) from None
    config.check()
    return config


def run_config(
    config: Config,
    out: Path | None = None,
    force: bool = False,
    resume: bool = False,
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
        **{name: getattr(config, name) for name in LOOP},
        out=out,
        force=force,
        resume=resume,
        progress=progress,
        callbacks=callbacks,
        loss=config.loss,
        settings=config.resolved(),
        engine_options=config.engine_options,
    )


EXAMPLES = {"data": "digits", "model": "logistic", "algorithm": "comfedl"}


def _readable(error: ValidationError, table: str = "") -> ConfigError:
    """Pydantic's first complaint as one sentence."""
    first = error.errors()[0]
    path = [table, *map(str, first["loc"])] if table else [str(part) for part in first["loc"]]
    where = ".".join(path)
    tables: dict[str, type[BaseModel]] = {**ENGINE_TABLES, "flower": FlowerTable}
    if first["type"] == "extra_forbidden" and path[0] in tables:
        return unknown(path[0], path[1], tables[path[0]].model_fields)
    if first["type"] == "extra_forbidden":
        return unknown("", where, Config.model_fields)
    if first["type"] == "missing" or (len(path) == 1 and path[0] in EXAMPLES):
        name = path[0]
        given = "is missing" if first["type"] == "missing" else f"is {first['input']!r}, but it must be a table"
        example = EXAMPLES.get(name)
        return ConfigError(f"{where} {given}; write [{name}]" + (f' with name = "{example}".' if example else "."))
    return ConfigError(f"{where} is {first['input']!r}, but {complaint(error)}.")


def with_changes(settings: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
    """Settings with changes such as ``algorithm.lr=0.5``."""
    for change in changes:
        settings = _changed(settings, change)
    return settings


def _changed(settings: Mapping[str, Any], change: str) -> dict[str, Any]:
    """Settings with one value changed, as ``a.b=v``; v is TOML, or a text where it is not."""
    path, equals, text = change.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {change!r} cannot be read; give it as a.b=value, such as algorithm.lr=0.5.")
    return with_value(settings, ".".join(keys), _parsed(text.strip()), f"--set {change!r}")


def with_value(settings: Mapping[str, Any], path: str, value: Any, told: str) -> dict[str, Any]:
    """A copy of settings with the value at a path such as ``algorithm.lr``; ``told`` is what an error begins with."""
    *above, last = path.split(".")
    changed = {**settings}
    table = changed
    for key in above:
        below = table.get(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{told} goes into {key!r}, which is {below!r} and not a table.")
        table[key] = {**below}
        table = table[key]
    table[last] = value
    return changed


def _parsed(text: str) -> Any:
    """A value as TOML has it; ``.5`` and ``5.`` are numbers too, and what is nothing else is a text."""
    for read in (lambda text: tomllib.loads(f"value = {text}")["value"], float):
        try:
            return read(text)
        except (tomllib.TOMLDecodeError, ValueError, RecursionError):
            continue
    return text
