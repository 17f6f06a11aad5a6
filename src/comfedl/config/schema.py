"""A run as a TOML file: everything is checked before the data are loaded, then data, model and algorithm are built."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.config import build
from comfedl.config.data_schema import SITES, DataTable, NamedTable, SitesTable
from comfedl.core.privacy import DP
from comfedl.data.federated import FederatedData
from comfedl.data.site_columns import TableSpec
from comfedl.data.tabular import Encoding
from comfedl.data.transform import TRANSFORMS, TransformFunction, check_transform, describe_transform
from comfedl.engines import AT_SITES, default_options as engine_options
from comfedl.engines.faults import FAULTS, Fault
from comfedl.engines.kernels import VECTORIZE
from comfedl.engines.process_group import BACKENDS
from comfedl.models import zoo
from comfedl.models.losses import LOSSES, MODEL_LOSS, OWN_LOSSES, TASKS, Loss, LossFunction
from comfedl.models.metrics import BINARY, CLASSIFICATION, REGRESSION, requested_metrics
from comfedl.secure.settings import SecureAggregation
from comfedl.training.callbacks import Callback
from comfedl.training.fit import fit
from comfedl.training.options import RECORDED, SAVES, RunOptions, described
from comfedl.training.result import Result
from comfedl.training.stopping import EarlyStopping
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import describe


class FlowerTable(BaseModel):
    """[flower]: which sites take part and how long the server waits for them; see ``comfedl.flower``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sites: int | list[str] | None = None
    outputs: int | None = None
    deadline: float = 600
    patience: float = 600
    max_share: float | None = None
    keys: str | None = None

    def check(self) -> None:
        """Check the values."""
        checks.positive("flower.deadline", self.deadline)
        checks.positive("flower.patience", self.patience)
        if self.outputs is not None:
            checks.at_least("flower.outputs", self.outputs, 1)
        if self.max_share is not None:
            checks.positive("flower.max_share", self.max_share)
            checks.at_most("flower.max_share", self.max_share, 1)
        if isinstance(self.sites, int):
            checks.at_least("flower.sites", self.sites, 1)
        elif self.sites is not None and len({*self.sites, ""}) <= len(self.sites):
            raise ConfigError(f"flower.sites is {self.sites!r}, but it must be a number, or a list of different names.")


# The plain loss of each task, for what depends on its labels and outputs alone.
LIKE = {CLASSIFICATION: "cross_entropy", BINARY: "bce", REGRESSION: "mse"}


class StopTable(BaseModel):
    """[stop]: when to end the run early; see ``EarlyStopping``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    metric: str
    patience: int = 20
    restore_best: bool = True


class SecureTable(BaseModel):
    """[secure_aggregation]: the server learns sums over the sites alone; see ``SecureAggregation``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    threshold: float = SecureAggregation.threshold
    bits: int = SecureAggregation.bits
    clip: float = SecureAggregation.clip
    masks: bool = SecureAggregation.masks


ENGINE_DEFAULTS = engine_options("distributed")


class EmbeddedTable(BaseModel):
    """[embedded]: how the embedded engine runs clients; see ``Embedded``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    vectorize: str = ENGINE_DEFAULTS["vectorize"]
    memory_mb: float = ENGINE_DEFAULTS["memory_mb"]
    workers: int | str = ENGINE_DEFAULTS["workers"]
    keep_memory: bool = ENGINE_DEFAULTS["keep_memory"]


class DistributedTable(EmbeddedTable):
    """[distributed]: how the processes communicate, and how each runs its clients; see ``Distributed``."""

    backend: str = ENGINE_DEFAULTS["backend"]
    timeout_s: float = ENGINE_DEFAULTS["timeout_s"]


ENGINE_TABLES = {"embedded": EmbeddedTable, "distributed": DistributedTable}


class Config(BaseModel):
    """The config of a run. ``data.seed`` is the seed of the split; it defaults to ``seed``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rounds: int = 200
    seed: int = 0
    clients_per_round: int | None = None
    eval_every: int | str = "auto"
    eval_clients: int | None = None
    checkpoint_every: int | None = None
    quorum: float = 0.5
    save_personal: bool = True
    save_frozen: bool = True
    outer_share: float = 0.2
    engine: str = "embedded"
    loss: str | dict[str, Any] = "cross_entropy"
    metrics: list[str] | None = None
    embedded: EmbeddedTable | None = None
    distributed: DistributedTable | None = None
    flower: FlowerTable | None = None
    data: DataTable
    model: NamedTable = NamedTable(name="logistic")
    algorithm: NamedTable
    stop: StopTable | None = None
    secure_aggregation: SecureTable | None = None
    faults: list[NamedTable] | None = None
    privacy: dict[str, Any] | None = None
    transform: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    tune: dict[str, Any] | None = None
    """The search space of ``comfedl tune``; ignored by a run."""

    def make_algorithm(self) -> Algorithm:
        """The algorithm with its hyper-parameters."""
        name = self.algorithm.name
        found = build.import_or_lookup("algorithm.name", name, ALGORITHMS)
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise ConfigError(f"algorithm.name is {name!r}, which is not a subclass of comfedl's Algorithm.")
        algorithm: Algorithm = build.from_table(found, self.algorithm.arguments, "algorithm")
        return algorithm

    def make_method(self) -> Algorithm:
        """The algorithm as the run has it: as rounds of sums, under secure aggregation."""
        return self.run_options().as_run(self.make_algorithm())

    def make_data(self, progress: bool = False, encoding: Encoding | None = None) -> FederatedData:
        """The clients' data; a table's rows are encoded as ``encoding`` says, if a run has one already."""
        return self.data.make_data(self.seed, progress, self.loss_name, encoding)

    def make_model(self, fed: FederatedData) -> nn.Module:
        """The model, with initial parameters that depend only on the seed."""
        return self.build_model(fed.train.shape, self.data.outputs(fed, self.loss_name))

    def make_model_for(self, shape: Any) -> nn.Module:
        """The model for samples of this shape, on a server that does not have the data."""
        outputs = None if self.flower is None else self.flower.outputs
        return self.build_model(shape, self.data.outputs_without_data(self.loss_name) if outputs is None else outputs)

    def build_model(self, shape: Any, outputs: int) -> nn.Module:
        """The model for samples of this shape (or tuple or dict of shapes), with this number of outputs."""
        name, function, options = self.model.name, self._model_function(), self.model.arguments
        model = build.call_user_code("model.name", name, zoo.build, function, shape, outputs, self.seed, **options)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name is {name!r}, which returned {type(model).__name__}, not an nn.Module.")
        return model

    def _model_function(self) -> Callable[..., nn.Module]:
        """The function ``(shape, classes, **options)`` that builds the model."""
        name = self.model.name
        found = build.import_or_lookup("model.name", name, zoo.MODELS)
        if not callable(found):
            raise ConfigError(f"model.name is {name!r}, which is not a function (shape, classes) -> nn.Module.")
        function: Callable[..., nn.Module] = found
        return function

    def check(self) -> None:
        """Check all that needs no data, so that mistakes are found before a download."""
        self.make_algorithm()
        self.data.check()
        if self.flower is not None:
            self.flower.check()
        self.make_loss()
        self.make_transform()
        requested_metrics(self.make_metrics(), self.task)
        for name, table in self._engine_tables().items():
            checks.one_of(f"{name}.vectorize", table.vectorize, VECTORIZE)
            checks.positive(f"{name}.memory_mb", table.memory_mb)
            if table.workers != "auto":
                checks.at_least(f"{name}.workers", table.workers, 1)
            if isinstance(table, DistributedTable):
                checks.one_of(f"{name}.backend", table.backend, BACKENDS)
                checks.positive(f"{name}.timeout_s", table.timeout_s)
            if self.engine != name:
                raise ConfigError(f"There is a table [{name}], but engine is {self.engine!r}; remove one of them.")
        self.make_method()
        if self.faults and self.engine == AT_SITES:
            raise ConfigError(
                'There are [[faults]], but engine is "flower", whose clients have only their own; remove one of them.'
            )
        try:
            build.check_options("model", self._model_function(), self.model.arguments, skip=2)
        except ConfigError as error:
            raise ConfigError(f"The model {self.model.name!r}: {error}") from None

    def _engine_tables(self) -> dict[str, EmbeddedTable]:
        """The engine tables of this config, by engine name; a valid config has at most one."""
        return {name: table for name in ENGINE_TABLES if (table := getattr(self, name)) is not None}

    @property
    def engine_options(self) -> dict[str, Any] | None:
        """The arguments of the engine; None for its defaults."""
        table = self._engine_tables().get(self.engine)
        return None if table is None else table.model_dump()

    def run_options(self, **more: Any) -> RunOptions:
        """The options of a run of this config; ``more`` replaces some or adds those that no config has."""
        return RunOptions(
            **{**{name: getattr(self, name) for name in RECORDED}, "stop": self.early_stopping, **self._asked(), **more}
        )

    def _asked(self) -> dict[str, Any]:
        asked = {"metrics": tuple(self.make_metrics() or ()), "faults": self.make_faults(), "secure": self.secure}
        return {**asked, "privacy": self.make_privacy()}

    def make_privacy(self) -> DP | None:
        """The differential privacy that is asked for."""
        return None if self.privacy is None else build.from_table(DP, self.privacy, "privacy")

    @property
    def secure(self) -> SecureAggregation | None:
        """Secure aggregation, if it is asked for."""
        return None if self.secure_aggregation is None else SecureAggregation(**self.secure_aggregation.model_dump())

    def make_faults(self) -> tuple[Fault, ...]:
        """The faults to simulate."""
        made = []
        for table in self.faults or ():
            found = build.lookup("faults.name", table.name, FAULTS)
            arguments = {key: tuple(own) if isinstance(own, list) else own for key, own in table.arguments.items()}
            made.append(build.from_table(found, arguments, "faults"))
        return tuple(made)

    def make_transform(self) -> list[TransformFunction]:
        """The functions that change training batches."""
        return [_transform(each) for each in self._transforms()]

    def _transforms(self) -> list[str | dict[str, Any]]:
        if self.transform is None:
            return []
        return self.transform if isinstance(self.transform, list) else [self.transform]

    def _described_transform(self) -> Any:
        found = [
            each if isinstance(each, str) and ":" in each else describe_transform(_transform(each))
            for each in self._transforms()
        ]
        return found if isinstance(self.transform, list) else found[0]

    def make_loss(self) -> str | LossFunction:
        """The loss: the name of a plain one, one with arguments, or the user's function."""
        table = dict(self.loss) if isinstance(self.loss, Mapping) else {"name": self.loss}
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise _no_loss(self.loss)
        if ":" in name:
            checks.one_of("loss.task", table.pop("task", CLASSIFICATION), LIKE)
            for key in table:
                raise build.unknown_key("loss", key, ["name", "task"], "a loss of your own")
            function = build.import_object("loss", name)
            if not callable(function):
                raise ConfigError(f"loss is {name!r}, which is not a function (output, y) that returns a mean loss.")
            return function  # type: ignore[no-any-return]
        if not table and name in (*LOSSES, MODEL_LOSS):
            return name
        checks.one_of("loss" if isinstance(self.loss, str) else "loss.name", name, [*LOSSES, MODEL_LOSS, "focal"])
        if name not in OWN_LOSSES:
            raise build.unknown_key("loss", next(iter(table)), ["name"], name)
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        loss: Loss = build.from_table(OWN_LOSSES[name], arguments, "loss")
        return loss

    @property
    def task(self) -> str:
        """What the model is to learn: classes, two classes or numbers."""
        name = self.loss if isinstance(self.loss, str) else self.loss.get("name")
        if isinstance(name, str) and ":" in name:
            return str(self.loss.get("task", CLASSIFICATION)) if isinstance(self.loss, dict) else CLASSIFICATION
        return TASKS.get(str(name), CLASSIFICATION)

    @property
    def loss_name(self) -> str:
        """The plain loss that has the same kind of labels and outputs."""
        name = self.loss if isinstance(self.loss, str) else self.loss.get("name")
        return str(name) if name in LOSSES else LIKE[self.task]

    def make_metrics(self) -> dict[str, Any] | None:
        """The metrics that are asked for, by their names in the records."""
        if self.metrics is None:
            return None
        found: dict[str, Any] = {}
        for text in self.metrics:
            metric = build.import_object("metrics", text) if ":" in text else text
            name = text.rpartition(":")[2]
            if name in found:
                raise ConfigError(f"metrics has {name!r} twice; remove one.")
            found[name] = metric
        return found

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """When to end the run early; None for the last round."""
        return None if self.stop is None else EarlyStopping(**self.stop.model_dump())

    def resolved(self) -> dict[str, Any]:
        """All values, including defaults, as a config that reproduces this run."""
        method = self.make_algorithm()
        algorithm = {key: value for key, value in describe(method).items() if key != "name"}
        model = build.default_options(self._model_function(), skip=2)
        left_out = {name for name in SAVES if getattr(self, name)}
        left_out |= set() if method.weighs_on_outer else {"outer_share"}
        # References to the user's code ("module:name") stay as they were written.
        references = {key: value for key, value in self.algorithm.arguments.items() if isinstance(value, str)}
        return {
            **self.model_dump(include={*RECORDED} - left_out),
            **({} if self.loss == "cross_entropy" else {"loss": self.loss}),
            **({} if self.metrics is None else {"metrics": self.metrics}),
            **({} if self.stop is None else {"stop": self.stop.model_dump()}),
            **({} if self.secure is None else {"secure_aggregation": dict(vars(self.secure))}),
            **({} if not self.faults else {"faults": [describe(fault) for fault in self.make_faults()]}),
            **({} if self.transform is None else {"transform": self._described_transform()}),
            **({} if self.privacy is None else {"privacy": described(self.make_privacy())}),
            "data": self.data.resolved(),
            "model": {"name": self.model.name, **model, **self.model.arguments},
            "algorithm": {"name": self.algorithm.name, **algorithm, **references},
            **{name: table.model_dump() for name, table in self._engine_tables().items()},
            **({} if self.flower is None else {"flower": self.flower.model_dump(exclude_none=True)}),
        }


class SitesConfig(Config):
    """The config of a run whose data stay at the sites."""

    data: SitesTable

    def check(self) -> None:
        super().check()
        if self.secure_aggregation is not None and self.data.has_tables:
            raise ConfigError(
                "secure_aggregation is asked for, but data.columns is as well, with which each site sends a summary of "
                "its own table; encode the tables beforehand, or leave one of the two out."
            )
        self.table_spec()

    def table_spec(self) -> TableSpec | None:
        """What is asked of the sites' tables; None if they have functions that load their data."""
        return self.data.table_spec(self.seed, self.loss_name) if self.data.has_tables else None


def read_config(path: Path, changes: Sequence[str] = ()) -> Config:
    """Read and check a config file; ``changes`` are such as ``algorithm.lr=0.5``."""
    return parse_config(read_settings(path), changes)


def read_data(path: Path, changes: Sequence[str] = (), progress: bool = False) -> FederatedData:
    """Load the data of a config file, which needs only a [data] table."""
    settings = with_changes(read_settings(path), changes)
    if "data" not in settings:
        raise ConfigError('data is missing; write [data] with name = "digits".')
    try:
        table = DataTable.model_validate(settings["data"])
    except ValidationError as error:
        raise _to_config_error(error, "data") from None
    for key in settings:
        if key not in Config.model_fields:
            raise build.unknown_key("", key, Config.model_fields)
    checks.at_least("seed", settings.get("seed", 0), 0)
    table.check()
    named = Config.model_construct(loss=settings.get("loss", "cross_entropy"))
    named.make_loss()
    return table.make_data(settings.get("seed", 0), progress, named.loss_name)


def read_settings(path: Path) -> dict[str, Any]:
    """The unchecked contents of a TOML file."""
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
        at_sites = isinstance(data, dict) and data.get("name") == SITES
        config = (SitesConfig if at_sites else Config).model_validate(changed)
    except ValidationError as error:
        raise _to_config_error(error) from None
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
    """Train as the config says; ``fed`` are its data, if they are loaded already."""
    fed = config.make_data(progress) if fed is None else fed
    return fit(
        config.make_model(fed),
        fed,
        config.make_algorithm(),
        **{name: getattr(config, name) for name in RECORDED},
        out=out,
        force=force,
        resume=resume,
        progress=progress,
        callbacks=callbacks,
        loss=config.make_loss(),
        settings=config.resolved(),
        engine_options=config.engine_options,
        stop=config.early_stopping,
        metrics=config.make_metrics(),
        faults=config.make_faults(),
        secure=config.secure,
        transform=config.make_transform(),
        privacy=config.make_privacy(),
    )


def _transform(given: str | dict[str, Any]) -> TransformFunction:
    """A transform from its name, its table or "module:function"."""
    if isinstance(given, str) and ":" in given:
        found = build.import_object("transform", given)
        check_transform(found)
        return found  # type: ignore[no-any-return]
    table = {"name": given} if isinstance(given, str) else given
    made: TransformFunction = build.build_named(table, "transform", TRANSFORMS, 'name = "crop", padding = 4')
    return made


EXAMPLES = {"data": "digits", "model": "logistic", "algorithm": "comfedl"}


def _no_loss(given: object) -> ConfigError:
    return ConfigError(f'loss is {given!r}, but it must be a name or a table such as {{ name = "focal" }}.')


def _to_config_error(error: ValidationError, table: str = "") -> ConfigError:
    """Pydantic's first complaint as one sentence."""
    first = error.errors()[0]
    path = [table, *map(str, first["loc"])] if table else [str(part) for part in first["loc"]]
    if path[0] == "loss":  # Pydantic names a type of the union as well
        return _no_loss(first["input"])
    where = ".".join(path)
    tables: dict[str, type[BaseModel]] = {**ENGINE_TABLES, "flower": FlowerTable, "stop": StopTable}
    tables["secure_aggregation"] = SecureTable
    if first["type"] == "extra_forbidden" and path[0] in tables:
        return build.unknown_key(path[0], path[1], tables[path[0]].model_fields)
    if first["type"] == "extra_forbidden":
        return build.unknown_key("", where, Config.model_fields)
    if first["type"] == "missing" or (len(path) == 1 and path[0] in EXAMPLES):
        name = path[0]
        fault = "is missing" if first["type"] == "missing" else f"is {first['input']!r}, but it must be a table"
        example = EXAMPLES.get(name)
        return ConfigError(f"{where} {fault}; write [{name}]" + (f' with name = "{example}".' if example else "."))
    return ConfigError(f"{where} is {first['input']!r}, but {build.first_complaint(error)}.")


def with_changes(settings: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
    """Settings with changes such as ``algorithm.lr=0.5``."""
    for change in changes:
        settings = _with_change(settings, change)
    return settings


def _with_change(settings: Mapping[str, Any], change: str) -> dict[str, Any]:
    """Settings with one change ``a.b=value``."""
    path, equals, text = change.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {change!r} cannot be read; give it as a.b=value, such as algorithm.lr=0.5.")
    return with_value(settings, ".".join(keys), _parse_value(text.strip()), f"--set {change!r}")


def with_value(settings: Mapping[str, Any], path: str, value: Any, source: str) -> dict[str, Any]:
    """A copy of settings with a value at a path such as ``algorithm.lr``; ``source`` begins the error message."""
    *tables, last = path.split(".")
    changed = {**settings}
    table = changed
    for key in tables:
        inner = table.get(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source} sets a key of {key!r}, which is {inner!r} and not a table.")
        table[key] = {**inner}
        table = table[key]
    table[last] = value
    return changed


def _parse_value(text: str) -> Any:
    """A TOML value; ``.5`` and ``5.`` are accepted as numbers, and anything else is a string."""
    for read in (lambda text: tomllib.loads(f"value = {text}")["value"], float):
        try:
            return read(text)
        except (tomllib.TOMLDecodeError, ValueError, RecursionError):
            continue
    return text
