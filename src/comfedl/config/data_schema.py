"""The [data] table of a config: a registered data set with a partition, or the user's data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from comfedl.config import build
from comfedl.data.federated import FederatedData
from comfedl.data.from_folders import from_folder
from comfedl.data.from_tables import FORMAT_KEYS, Shares, from_file
from comfedl.data.loading import check_classes, check_grouping, load
from comfedl.data.partition import IID, PARTITIONS, Natural, Partition
from comfedl.data.registry import SOURCES
from comfedl.data.site_columns import EXAMPLE, MIN_COUNT, TableSpec
from comfedl.data.tabular import Encoding
from comfedl.models.losses import REGRESSIONS
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.samples import first
from comfedl.utils.toml import describe


class NamedTable(BaseModel):
    """A table with a name; its other keys are the arguments of the object with that name."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class SampleSpec(NamedTuple):
    """The shape and dtype of one input, each a tuple or dict of several inputs, and how many outputs a model needs."""

    shape: Any
    outputs: int
    dtype: Any


def csv(
    shares: Shares,
    task: str,
    saved: Encoding | None,
    path: str,
    client: str,
    target: str,
    split: str | None = None,
    drop: Sequence[str] = (),
    scale: bool = True,
    scale_target: bool = False,
    missing: str = "error",
    impute: str | Mapping[str, Any] | None = None,
    na_values: Sequence[str | float] | Mapping[str, Any] | None = None,
    decimal: str | None = None,
    thousands: str | None = None,
    dates: Sequence[str] | Mapping[str, str] | None = None,
    header: bool | Sequence[str] | None = None,
    encoding: str | None = None,
    lazy: bool | None = None,
    memory_mb: float | None = None,
) -> FederatedData:
    """A CSV, Parquet or Arrow file with a column of client names; see ``FederatedData.from_dataframe``."""
    options: dict[str, Any] = {"split": split, "drop": drop, "scale": scale, "scale_target": scale_target}
    options |= {"missing": missing, "impute": impute, "na_values": na_values, "decimal": decimal}
    options |= {"thousands": thousands, "dates": dates, "header": header, "encoding": encoding}
    options |= {"lazy": False if lazy is None else lazy, "memory_mb": memory_mb}
    return from_file(path, client, target, shares, task=task, saved=saved, **options)


def folder(
    shares: Shares,
    task: str,
    saved: Encoding | None,
    path: str,
    target: str | None = None,
    size: int | Sequence[int] | None = None,
    drop: Sequence[str] | None = None,
    scale: bool | None = None,
    scale_target: bool | None = None,
    missing: str | None = None,
    impute: str | Mapping[str, Any] | None = None,
    na_values: Sequence[str | float] | Mapping[str, Any] | None = None,
    decimal: str | None = None,
    thousands: str | None = None,
    dates: Sequence[str] | Mapping[str, str] | None = None,
    header: bool | Sequence[str] | None = None,
    encoding: str | None = None,
    lazy: bool | None = None,
    memory_mb: float | None = None,
) -> FederatedData:
    """A folder with one file or folder per client; see ``FederatedData.from_folder``."""
    given: dict[str, Any] = {"drop": drop, "scale": scale, "scale_target": scale_target, "missing": missing}
    given |= {"impute": impute, "na_values": na_values, "decimal": decimal, "thousands": thousands}
    given |= {"dates": dates, "header": header, "encoding": encoding}
    options = {key: value for key, value in given.items() if value is not None}
    options |= {} if target is None else {"task": task, "saved": saved}
    return from_folder(path, shares, target, size, False if lazy is None else lazy, memory_mb, **options)


READERS: dict[str, Callable[..., FederatedData]] = {"csv": csv, "parquet": csv, "arrow": csv, "folder": folder}
"""Readers of the user's files, by their names in a config; ``"module:function"`` names the user's code."""


class DataTable(NamedTable):
    """[data]: the data set, and its partition with the partition's arguments, or the arguments of the user's data.

    A list of labels as ``classes`` keeps only these of a data set; a partition's number of classes per client, which is
    also called ``classes``, is then ``classes_per_client``.
    """

    partition: str | None = None
    validation: float = 0.2
    test: float = 0.2
    held_out: int | None = None
    seed: int | None = None

    def check(self) -> None:
        """Check all keys without loading the data."""
        if self.seed is not None:
            checks.at_least("data.seed", self.seed, 0)
        if not self._is_user_data:
            self.make_partition()
            if self._kept_classes is not None:
                check_classes(self.name, self._kept_classes, SOURCES[self.name].classes)
            return
        function, skip = self._loader()
        given = {key: getattr(self, key) for key in ("partition", "held_out") if getattr(self, key) is not None}
        build.check_options("data", function, {**self._options(), **given}, skip)

    @property
    def _is_user_data(self) -> bool:
        return self.name in READERS or ":" in self.name

    @property
    def _kept_classes(self) -> list[int] | None:
        """The labels of a registered data set to keep, if not all."""
        classes = self.arguments.get("classes")
        return classes if isinstance(classes, list) and not self._is_user_data else None

    @property
    def _class_count(self) -> int:
        return SOURCES[self.name].classes if self._kept_classes is None else len(self._kept_classes)

    def _partition_arguments(self, kind: Any) -> dict[str, Any]:
        """The arguments of the partition, without the labels to keep."""
        arguments = self.arguments
        if self._kept_classes is None:
            return arguments
        del arguments["classes"]
        field = next((field for field in dataclasses.fields(kind) if field.name == "classes"), None)
        if field is None:
            return arguments
        if "classes_per_client" in arguments:
            arguments["classes"] = arguments.pop("classes_per_client")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(
                "data.classes_per_client is missing: data.classes lists the labels to keep, so say how many of them "
                "each client has."
            )
        return arguments

    def _loader(self) -> tuple[Callable[..., Any], int]:
        """The function that loads the user's data, and how many arguments it takes before the options."""
        if self.name in READERS:
            return READERS[self.name], 3
        found = build.import_object("data.name", self.name)
        if not callable(found):
            raise ConfigError(f"data.name is {self.name!r}, which is not a function (seed) -> FederatedData.")
        return found, 1

    def _options(self) -> dict[str, Any]:
        """The loader's options; a function of the user also gets validation and test if they are set."""
        shares = () if self.name in READERS else ("validation", "test")
        return {**self.arguments, **{key: getattr(self, key) for key in shares if key in self.model_fields_set}}

    @property
    def number_of_clients_is_free(self) -> bool:
        """Whether the partition draws as many clients as its key ``clients`` says."""
        return not self._is_user_data and "clients" in describe(self.make_partition())

    def make_partition(self) -> Partition:
        """The partition; the default is the data set's natural groups, or else ten i.i.d. clients."""
        source = build.lookup("data.name", self.name, {**SOURCES, **READERS})
        if self.partition is None:
            for key in self.arguments:
                if key == "classes" and self._kept_classes is not None:
                    continue
                error = build.unknown_key("data", key, DataTable.model_fields)
                raise ConfigError(f"{error} Or name a partition that has it.")
            return Natural() if source.groupings else IID(clients=10)
        found = build.lookup("data.partition", self.partition, PARTITIONS)
        arguments = self._partition_arguments(found)
        partition: Partition = build.from_table(found, arguments, "data", other_keys=DataTable.model_fields)
        if isinstance(partition, Natural):
            check_grouping(self.name, source.groupings, partition.by)
        return partition

    def make_data(
        self, seed: int, progress: bool = False, loss: str = "cross_entropy", encoding: Encoding | None = None
    ) -> FederatedData:
        """Load the clients' data; ``seed`` is used unless the table has one.

        The loss decides whether y is read as class labels or as numbers; ``encoding`` is that of an earlier run.
        """
        seed = seed if self.seed is None else self.seed
        if not self._is_user_data:
            shares, kept = (self.validation, self.test), self._kept_classes
            return load(self.name, self.make_partition(), seed, *shares, progress, self.held_out, kept)
        function, _ = self._loader()
        if self.name in READERS:
            task = table_task(loss)
            saved = encoding if encoding is not None and encoding.columns else None
            return READERS[self.name](Shares(self.validation, self.test, seed), task, saved, **self.arguments)
        fed = build.call_user_code("data.name", self.name, function, seed, **self._options())
        if not isinstance(fed, FederatedData):
            raise ConfigError(f"data.name is {self.name!r}, which returned {type(fed).__name__}, not a FederatedData.")
        return fed

    def sample_spec(self, seed: int, loss: str, encoding: Encoding | None) -> SampleSpec:
        """What a model needs to know of the data, which are loaded only if nothing else tells."""
        if not self._is_user_data and loss == "cross_entropy":
            source = SOURCES[self.name]
            return SampleSpec(source.shape, self._class_count, getattr(torch, source.dtype))
        if encoding is not None and encoding.columns:
            outputs = len(encoding.classes) if loss == "cross_entropy" else 1
            return SampleSpec(encoding.shape, outputs, torch.float32)
        fed = self.make_data(seed, loss=loss)
        return SampleSpec(
            fed.train.shape, self.outputs(fed, loss), tree.map(lambda part: part.dtype, fed.train.head(1)[0])
        )

    def outputs(self, fed: FederatedData, loss: str) -> int:
        """The number of outputs that a model needs: one per class, or one per number in y."""
        if loss in REGRESSIONS:
            return math.prod(first(fed.train.head(1)[1]).shape[1:])
        if loss == "bce":
            return 1
        if not self._is_user_data:
            return self._class_count
        if fed.encoding is not None and fed.encoding.classes:
            return len(fed.encoding.classes)
        splits = [split for name in ("train", "validation", "test") if (split := fed.split(name)) is not None]
        return max(1 + int(first(split.all_y()).max()) for split in splits)

    def outputs_without_data(self, loss: str) -> int:
        """The same on a server that does not have the data."""
        if loss != "cross_entropy":
            return 1
        if self._is_user_data:
            raise ConfigError("The data are at the sites; set flower.outputs to the number of classes.")
        return self._class_count

    def resolved(self) -> dict[str, Any]:
        """All values, including defaults."""
        fields = self.model_dump(include=set(DataTable.model_fields), exclude_none=True)
        if self._is_user_data:
            function, skip = self._loader()
            kept = {key: value for key, value in fields.items() if self.name in READERS or key in self.model_fields_set}
            return {**kept, **build.default_options(function, skip), **self._options()}
        partition = self.make_partition()
        name = next(name for name, kind in PARTITIONS.items() if kind is type(partition))
        arguments = {key: value for key, value in describe(partition).items() if key != "name"}
        if self._kept_classes is not None:
            if "classes" in arguments:
                arguments["classes_per_client"] = arguments["classes"]
            arguments["classes"] = self._kept_classes
        return fields | {"partition": name} | arguments


SITES = "sites"
TABLE_KEYS = (
    *("columns", "target", "classes", "client", "split", "validation", "test", "scale", "scale_target"),
    *("missing", "impute", *FORMAT_KEYS, "min_count"),
)
AT_SITES_DEFAULTS = {"scale": True, "scale_target": False, "missing": "error", "min_count": MIN_COUNT}


class SitesTable(DataTable):
    """[data] with name = "sites": the data stay at the sites.

    If each site has a table, ``columns`` says what its columns are (see ``TableSpec``). Otherwise the sites have
    functions that load their data, and only the number of classes is given.
    """

    classes: int | list[str] | None = None
    columns: dict[str, Any] | None = None

    @property
    def has_tables(self) -> bool:
        """Whether each site has a table."""
        return self.columns is not None

    def check(self) -> None:
        if self.seed is not None:
            checks.at_least("data.seed", self.seed, 0)
        given = (self.model_fields_set - {"name", "seed"}) | self.arguments.keys()
        if not self.has_tables:
            for key in (given | self.model_fields_set & {"seed"}) - {"classes"}:
                if key in TABLE_KEYS:
                    raise ConfigError(
                        f"data.{key} is of tables at sites, but data.columns is missing; write {EXAMPLE}."
                    )
                raise build.unknown_key("data", key, ["name", "classes", "columns"], "data at sites")
            if self.classes is not None:
                checks.at_least("data.classes", self.classes, 1)
            return
        for key in given - {*TABLE_KEYS}:
            raise build.unknown_key("data", key, ["name", "seed", *TABLE_KEYS], "tables at sites")

    def table_options(self) -> dict[str, Any]:
        """What is asked of the sites' tables, as plain values."""
        shares = {"validation": self.validation, "test": self.test}
        given = {key: value for key, value in self.arguments.items() if value is not None}
        classes = {} if self.classes is None else {"classes": self.classes}
        return {**AT_SITES_DEFAULTS, **shares, **given, **classes, "columns": dict(self.columns or {})}

    def table_spec(self, seed: int, loss: str) -> TableSpec:
        """What is asked of the sites' tables."""
        return TableSpec.of(self.table_options(), seed if self.seed is None else self.seed, table_task(loss))

    def outputs_without_data(self, loss: str) -> int:
        if loss == "cross_entropy" and self.classes is None:
            raise ConfigError("data.classes is missing: the data are at the sites, so give the number of classes.")
        if loss != "cross_entropy" or self.classes is None:
            return 1
        return len(self.classes) if isinstance(self.classes, list) else self.classes

    def outputs(self, fed: FederatedData, loss: str) -> int:
        return self.outputs_without_data(loss)

    def make_data(
        self, seed: int, progress: bool = False, loss: str = "cross_entropy", encoding: Encoding | None = None
    ) -> FederatedData:
        raise ConfigError(
            'data.name is "sites": the data are at the sites; start this run with flwr run (docs/flower.md).'
        )

    def sample_spec(self, seed: int, loss: str, encoding: Encoding | None) -> SampleSpec:
        if encoding is not None and encoding.columns:
            return SampleSpec(encoding.shape, self.outputs_without_data(loss), torch.float32)
        raise ConfigError("The data of this run are at its sites, so its model cannot be built from its config alone.")

    def resolved(self) -> dict[str, Any]:
        seed = {} if self.seed is None else {"seed": self.seed}
        if self.has_tables:
            return {"name": self.name, **seed, **self.table_options()}
        return {"name": self.name, **({} if self.classes is None else {"classes": self.classes})}


def table_task(loss: str) -> str:
    """What y of a table is, by the loss."""
    return "regression" if loss in REGRESSIONS else "classification"
