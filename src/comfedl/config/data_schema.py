"""The table [data] of a config: a data set with its partition, or the reader's own data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from comfedl.config.build import call, check_options, defaults, imported, lookup, make, unknown
from comfedl.data.federated import FederatedData
from comfedl.data.from_folders import from_folder
from comfedl.data.from_tables import Shares, from_csv
from comfedl.data.loading import load
from comfedl.data.partition import IID, PARTITIONS, Natural, Partition
from comfedl.data.registry import SOURCES
from comfedl.data.tabular import Encoding
from comfedl.models.losses import REGRESSIONS
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import describe


class NamedTable(BaseModel):
    """A table whose other keys are the arguments of what it names."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def csv(
    shares: Shares,
    task: str,
    path: str,
    client: str,
    target: str,
    split: str | None = None,
    drop: Sequence[str] = (),
    scale: bool = True,
    scale_target: bool = False,
    missing: str = "error",
) -> FederatedData:
    """A CSV file with a column that names each row's client; see ``FederatedData.from_dataframe``."""
    named = {"split": split, "drop": drop, "scale": scale, "scale_target": scale_target, "missing": missing}
    return from_csv(path, client, target, shares, task=task, **named)


def folder(
    shares: Shares,
    task: str,
    path: str,
    target: str | None = None,
    size: int | Sequence[int] | None = None,
    drop: Sequence[str] | None = None,
    scale: bool | None = None,
    scale_target: bool | None = None,
    missing: str | None = None,
) -> FederatedData:
    """A folder with a file or a folder for each client; see ``FederatedData.from_folder``."""
    named = {"drop": drop, "scale": scale, "scale_target": scale_target, "missing": missing}
    options = {key: value for key, value in named.items() if value is not None}
    return from_folder(path, shares, target, size, **options, **({} if target is None else {"task": task}))


OWN: dict[str, Callable[..., FederatedData]] = {"csv": csv, "folder": folder}
"""The reader's own data by the names that a config uses; ``"module:function"`` names a function (seed)."""


class DataTable(NamedTable):
    """[data]: the data set, and its partition with the partition's arguments."""

    partition: str | None = None
    validation: float = 0.2
    test: float = 0.2
    held_out: int | None = None
    seed: int | None = None

    def check(self) -> None:
        """See that the keys are those that the data have."""
        if self.seed is not None:
            checks.at_least("data.seed", self.seed, 0)
        if not self._own:
            self.make_partition()
            return
        function, given = self._function()
        told = {key: getattr(self, key) for key in ("partition", "held_out") if getattr(self, key) is not None}
        check_options("data", function, {**self._options(), **told}, given)

    @property
    def _own(self) -> bool:
        return self.name in OWN or ":" in self.name

    def _function(self) -> tuple[Callable[..., Any], int]:
        """What makes the reader's own data, and how many arguments it gets besides the options."""
        if self.name in OWN:
            return OWN[self.name], 2
        found = imported("data.name", self.name)
        if not callable(found):
            raise ConfigError(f"data.name is {self.name!r}, which is not a function (seed) -> FederatedData.")
        return found, 1

    def _options(self) -> dict[str, Any]:
        """The options of the reader's own data; a function gets the shares too, where they are given."""
        shares = () if self.name in OWN else ("validation", "test")
        return {**self.arguments, **{key: getattr(self, key) for key in shares if key in self.model_fields_set}}

    def make_partition(self) -> Partition:
        """The partition; by default the data's own groups, or ten equal clients."""
        source = lookup("data.name", self.name, {**SOURCES, **OWN})
        if self.partition is None:
            for key in self.arguments:
                raise ConfigError(f"{unknown('data', key, DataTable.model_fields)} Or name a partition that has it.")
            return Natural() if source.grouped else IID(clients=10)
        found = lookup("data.partition", self.partition, PARTITIONS)
        partition: Partition = make(found, self.arguments, "data", extra=DataTable.model_fields)
        return partition

    def make_data(self, seed: int, progress: bool = False, loss: str = "cross_entropy") -> FederatedData:
        """The clients' data; ``seed`` is the run's, for where the table has none of its own.

        The loss says whether the y of a table are labels or numbers.
        """
        seed = seed if self.seed is None else self.seed
        if not self._own:
            return load(self.name, self.make_partition(), seed, self.validation, self.test, progress, self.held_out)
        function, _ = self._function()
        if self.name in OWN:
            task = "regression" if loss in REGRESSIONS else "classification"
            return OWN[self.name](Shares(self.validation, self.test, seed), task, **self.arguments)
        fed = call("data.name", self.name, function, seed, **self._options())
        if not isinstance(fed, FederatedData):
            raise ConfigError(f"data.name is {self.name!r}, which gave {type(fed).__name__}, not a FederatedData.")
        return fed

    def form(self, seed: int, loss: str, encoding: Encoding | None) -> tuple[tuple[int, ...], int]:
        """One sample's shape and how many outputs a model needs; the data are only made where nothing else says it."""
        if not self._own and loss == "cross_entropy":
            return SOURCES[self.name].shape, SOURCES[self.name].classes
        if encoding is not None and encoding.columns:
            return encoding.shape, len(encoding.classes) if loss == "cross_entropy" else 1
        fed = self.make_data(seed, loss=loss)
        return tuple(fed.train.x.shape[1:]), self.outputs(fed, loss)

    def outputs(self, fed: FederatedData, loss: str) -> int:
        """How many outputs a model needs: one for each class, or for each number of y."""
        if loss in REGRESSIONS:
            return math.prod(fed.train.y.shape[1:])
        if loss == "bce":
            return 1
        if not self._own:
            return SOURCES[self.name].classes
        if fed.encoding is not None and fed.encoding.classes:
            return len(fed.encoding.classes)
        splits = [split for name in ("train", "validation", "test") if (split := fed.split(name)) is not None]
        return max(1 + int(split.y.max()) for split in splits)

    def outputs_unseen(self, loss: str) -> int:
        """The same where there are no data to look at."""
        if loss != "cross_entropy":
            return 1
        if self._own:
            raise ConfigError("The data are at sites; say with flower.outputs how many classes they have.")
        return SOURCES[self.name].classes

    def resolved(self) -> dict[str, Any]:
        """All values, defaults included."""
        own = self.model_dump(include=set(DataTable.model_fields), exclude_none=True)
        if self._own:
            function, given = self._function()
            kept = {key: value for key, value in own.items() if self.name in OWN or key in self.model_fields_set}
            return {**kept, **defaults(function, given), **self._options()}
        partition = self.make_partition()
        name = next(name for name, kind in PARTITIONS.items() if kind is type(partition))
        return own | {"partition": name} | {k: v for k, v in describe(partition).items() if k != "name"}


SITES = "sites"


class SitesTable(DataTable):
    """[data] with the name "sites": each site has its own, and here stands only what the model must know of them."""

    classes: int | None = None

    def check(self) -> None:
        if self.classes is not None:
            checks.at_least("data.classes", self.classes, 1)
        for key in self.model_fields_set - {"name", "classes"} | self.arguments.keys():
            raise unknown("data", key, ["name", "classes"], "data that are at sites")

    def outputs_unseen(self, loss: str) -> int:
        if loss == "cross_entropy" and self.classes is None:
            raise ConfigError("data.classes is missing: the data are at sites, so say how many classes they have.")
        return 1 if loss != "cross_entropy" or self.classes is None else self.classes

    def outputs(self, fed: FederatedData, loss: str) -> int:
        return self.outputs_unseen(loss)

    def make_data(self, seed: int, progress: bool = False, loss: str = "cross_entropy") -> FederatedData:
        raise ConfigError(
            'data.name is "sites": the data are at sites and not here; start the run with flwr run (docs/flower.md).'
        )

    def form(self, seed: int, loss: str, encoding: Encoding | None) -> tuple[tuple[int, ...], int]:
        raise ConfigError("The data of this run are at its sites: its model cannot be built from its config alone.")

    def resolved(self) -> dict[str, Any]:
        return {"name": self.name, **({} if self.classes is None else {"classes": self.classes})}
