"""FederatedData from tables, each client's samples split into train, validation and test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.cell_format import make_format
from comfedl.data.client_cache import cache_if_lazy
from comfedl.data.federated import Batch, FederatedData
from comfedl.data.fit_table import TableRows, TaskOptions, check_impute, describe_column, fit_encoding
from comfedl.data.partition import stratified
from comfedl.data.suspect_cells import note_marks, note_spellings
from comfedl.data.table import Rows, Table, as_table
from comfedl.data.table_files import read_table
from comfedl.data.table_report import TableReport
from comfedl.data.tabular import Encoding
from comfedl.utils import checks, rng, samples, torchrun
from comfedl.utils.errors import ConfigError, DataError, nearest
from comfedl.utils.samples import Samples

logger = logging.getLogger("comfedl")

SPLITS = ("train", "validation", "test")
TASKS = ("classification", "regression")
FORMAT_KEYS = ("na_values", "decimal", "thousands", "dates", "header", "encoding")
MOST_CLIENTS = 10  # so many are named in a note


class Shares(NamedTuple):
    """The shares of each client's samples to hold out, and the seed to draw them with."""

    validation: float = 0.2
    test: float = 0.2
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError unless these are shares that leave samples for training."""
        for name, share in (("validation", self.validation), ("test", self.test)):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
                raise ConfigError(f"{name} is {share!r}, but it must be a share of the samples: 0 or more and below 1.")
        if self.validation + self.test >= 1:
            held = self.validation + self.test
            raise ConfigError(f"validation and test hold out {held:g} of the samples; keep some for training.")
        checks.at_least("seed", self.seed, 0)

    def split_rows(self, client: str, labels: NDArray[np.int64]) -> dict[str, Rows]:
        """A client's rows by split, stratified by label; independent of the other clients."""
        train, taken, rows = np.arange(len(labels)), 0.0, {}
        for split, share in (("validation", self.validation), ("test", self.test)):
            if share > 0:
                generator = rng.generator(self.seed, f"data/own {split}", client=client)
                kept, held = stratified(labels[train], share / (1 - taken), generator)
                train, rows[split], taken = train[kept], train[held], taken + share
        return {"train": train, **rows}


def from_table(
    frame: Any,
    client: str,
    target: str,
    shares: Shares,
    split: str | None = None,
    drop: Sequence[str] = (),
    task: str | None = None,
    scale: bool = True,
    scale_target: bool = False,
    missing: str = "error",
    impute: Any = None,
    na_values: Any = None,
    dates: Any = None,
    saved: Encoding | None = None,
    make: Maker | None = None,
) -> FederatedData:
    """See ``FederatedData.from_dataframe``; ``saved`` is the encoding of an earlier run, to be used once more.

    A table that was read from a file has its own ``na_values`` and dates. ``make`` makes the data of an encoded table
    that is not in memory.
    """
    shares.check()
    table = as_table(frame)
    if na_values is not None or dates is not None:
        table = table.using(make_format(na_values, dates=dates))
    options = TaskOptions(target, client, task, scale, scale_target, missing)
    _check_options(table, options, split, drop)
    leave_out = {target, client, *drop, *([] if split is None else [split])}
    inputs = [name for name in table.columns if name not in leave_out]
    rules = check_impute(impute, table, inputs)
    used, dropped = with_values(table, options, split, [name for name in inputs if name not in rules])
    names = np.array(used.strings(client), dtype=object)
    splits = split_of_rows(used, names, target, shares, split, task)
    make = make or _in_memory
    if saved is not None:
        return make(used, saved, torch.from_numpy(saved.y(used)), names, splits)
    encoding, fitted = fit_encoding(TableRows(used, names, splits), inputs, options, rules)
    fates = {name: found.fate for name, found in fitted.items()}
    fates |= dict.fromkeys(drop, "left out: dropped by the config")
    fates |= {target: "y", client: "the client"} | ({} if split is None else {split: "the split"})
    notes = [
        *table.notes,
        *_note_dropped(table, dropped, dropped.keys() - {"", *names.tolist()}),
        *note_marks(used, client, "a client's name"),
        *note_spellings(used, client, "client"),
        *(note_spellings(used, target, "label") if encoding.classes else ()),
        *(note for found in fitted.values() for note in found.notes),
    ]
    y = torch.from_numpy(encoding.y(used))
    notes += _note_untrained(encoding, y, splits)
    columns = tuple(describe_column(table, name, fates[name]) for name in table.columns)
    report = TableReport(table.source, len(table), columns, dropped, tuple(notes))
    if torchrun.rank() == 0:
        for note in notes:
            logger.warning("%s", note)
    return make(used, replace(encoding, report=report), y, names, splits)


Maker = Callable[[Table, Encoding, Tensor, NDArray[Any], NDArray[Any]], FederatedData]
"""Makes FederatedData of a table, its encoding, the y of its rows, and the client and the split of each row."""


def _in_memory(table: Table, encoding: Encoding, y: Tensor, names: NDArray[Any], splits: NDArray[Any]) -> FederatedData:
    return from_batches(by_split(torch.from_numpy(encoding.x(table)), y, names, splits), encoding)


def encoded(encoding: Encoding, table: Table) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(encoding.x(table)), torch.from_numpy(encoding.y(table))


def _check_options(table: Table, options: TaskOptions, split: str | None, drop: Sequence[str]) -> None:
    """Check the values of ``from_table``'s arguments, and that its columns exist and have one role each."""
    if options.task is not None:
        checks.one_of("task", options.task, TASKS)
    checks.one_of("missing", options.missing, ("error", "drop"))
    for what, value in (("scale", options.scale), ("scale_target", options.scale_target)):
        if not isinstance(value, bool):
            raise ConfigError(f"{what} is {value!r}, but it must be true or false.")
    if not isinstance(drop, Iterable) or isinstance(drop, str) or not all(isinstance(name, str) for name in drop):
        raise ConfigError(f"drop is {drop!r}, but it must be a list of column names.")
    roles = [("client", options.client), ("target", options.target), *(("drop", name) for name in drop)]
    roles += [] if split is None else [("split", split)]
    for i, (role, name) in enumerate(roles):
        if not isinstance(name, str):
            raise ConfigError(f"{role} is {name!r}, but it must be the name of a column.")
        table.column(name)
        for other, same in roles[:i]:
            if same == name:
                raise ConfigError(f"Column {name!r} is both {other} and {role}; use different columns.")
    for what, by_column in (("dates", table.format.dates), ("na_values", table.format.na_values)):
        unknown = next((name for name in by_column if name and name not in table.columns), None)
        if unknown is not None:
            raise ConfigError(
                f"{what} names the column {unknown!r}, which {table.source} does not have; "
                f"{nearest(unknown, table.columns)}."
            )


def with_values(
    table: Table, options: TaskOptions, split: str | None, inputs: Sequence[str]
) -> tuple[Table, dict[str, int]]:
    """The rows in which these inputs, y, the client and the split have a value; and how many others each client has."""
    assert options.client is not None
    needed = [options.client, options.target, *([] if split is None else [split])]
    if options.missing == "error":
        for name in needed:
            if (missing := table.missing(name)).any():
                advice = 'drop these rows with missing = "drop": clients, splits and y are never filled in'
                raise table.missing_error(name, missing, advice)
        return table, {}
    gaps = table.any_missing([*needed, *inputs])
    if not gaps.any():
        return table, {}
    clients = np.array(table.texts(options.client), dtype=object)
    counts = {name: int(gaps[rows].sum()) for name, rows in rows_by_name(clients).items()}
    return table.at(~gaps), {name: count for name, count in counts.items() if count}


def _note_dropped(table: Table, dropped: Mapping[str, int], gone: Set[str]) -> list[str]:
    """Rows that were left out, by client; and clients of which no row remains."""
    if not dropped:
        return []
    most = sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name or 'without a client'} {count}" for name, count in most[:MOST_CLIENTS])
    more = f" and {len(most) - MOST_CLIENTS} more clients" if len(most) > MOST_CLIENTS else ""
    count = f"{sum(dropped.values())} of {len(table)} rows"
    notes = [f"{table.source}: {count} are left out, since they miss a value ({shown}{more})."]
    if gone:
        named = ", ".join(repr(name) for name in sorted(gone)[:MOST_CLIENTS]) + (
            ", ..." if len(gone) > MOST_CLIENTS else ""
        )
        notes.append(f"{table.source}: no row remains of {len(gone)} client{'s' if len(gone) > 1 else ''} ({named}).")
    return notes


def _note_untrained(encoding: Encoding, y: Tensor, splits: NDArray[Any]) -> list[str]:
    """Labels that only rows held out have."""
    trained = {*y[torch.from_numpy(splits == "train")].tolist()}
    return [
        f"Column {encoding.target!r}: the label {label!r} occurs in no train row; the model has an output for it, but "
        "cannot learn it."
        for i, label in enumerate(encoding.classes)
        if i not in trained
    ]


def rows_by_name(names: NDArray[Any]) -> dict[str, Rows]:
    """The rows of each name, sorted."""
    found, codes = np.unique(names, return_inverse=True)
    rows = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    return {str(name): own for name, own in zip(found, rows, strict=True)}


def by_split(x: Samples, y: Tensor, names: NDArray[Any], splits: NDArray[Any]) -> dict[str, dict[str, Batch]]:
    """The samples of each split and client, given the client's name and the split of each row."""
    found: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
    for name, own in rows_by_name(names).items():
        for split in SPLITS:
            rows = torch.from_numpy(own[splits[own] == split])
            if len(rows):
                found[split][name] = (samples.select(x, rows), y[rows])
    return found


def split_of_rows(
    table: Table, names: NDArray[Any], target: str, shares: Shares, split: str | None, task: str | None
) -> NDArray[Any]:
    """The split of each row: from a column, or drawn within each client."""
    if split is not None:
        splits = np.array(table.strings(split), dtype=object)
        unknown = next((value for value in splits if value not in SPLITS), None)
        if unknown is not None:
            raise DataError(
                f"Column {split!r} of {table.source} has the value {unknown!r}, but it must be one of "
                f"{', '.join(SPLITS)}."
            )
        return splits
    _, values, missing = table.cells(target)
    # The draw is stratified if the target looks like labels; fit_encoding reports invalid targets later.
    labels = np.zeros(len(values), dtype=np.int64)
    if task != "regression" and not missing.any():
        distinct, codes = np.unique(values.astype(str), return_inverse=True)
        labels = codes if task is not None or len(distinct) <= 20 else labels
    splits = np.full(len(table), "train", dtype=object)
    for name, own in rows_by_name(names).items():
        for part, rows in shares.split_rows(name, labels[own]).items():
            splits[own[rows]] = part
    return splits


def from_batches(splits: Mapping[str, Mapping[str, Batch]], encoding: Encoding | None = None) -> FederatedData:
    """FederatedData from each client's samples by split; empty splits are left out."""
    fed = FederatedData(splits["train"], splits.get("validation") or None, splits.get("test") or None)
    fed.encoding = encoding
    return fed


def from_file(path: Any, client: str, target: str, shares: Shares, **options: Any) -> FederatedData:
    """FederatedData from a CSV, Parquet or Arrow file with a column of client names."""
    format = make_format(**{key: options.pop(key, None) for key in FORMAT_KEYS})
    cache = cache_if_lazy(options.pop("lazy", False), options.pop("memory_mb", None))
    if cache is not None:
        from comfedl.data.lazy_tables import from_parquet

        file = user_path(path)
        return from_parquet([file], file.name, client, target, shares, format, cache, **options)
    table = read_table(user_path(path), format)
    if format.header is False:  # columns may be given by their number
        client, target, split = (_numbered(name) for name in (client, target, options.pop("split", None)))
        drop = options.pop("drop", ())
        options |= {"split": split, "drop": [*map(_numbered, drop)] if isinstance(drop, list | tuple) else drop}
    return from_table(table, client, target, shares, **options)


def _numbered(name: Any) -> Any:
    return str(name) if isinstance(name, int) and not isinstance(name, bool) else name


def user_path(path: Any) -> Path:
    """A path given by the user, with ~ expanded; relative to the working directory."""
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"path is {path!r}, but it must be the path of a file or folder.")
    return Path(path).expanduser()


def split_clients(clients: Mapping[str, Batch], shares: Shares, encoding: Encoding | None = None) -> FederatedData:
    """Split each client's samples by the shares."""
    shares.check()
    found: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
    for name, (x, y) in clients.items():
        is_label = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
        labels = y.numpy() if is_label else np.zeros(samples.count(y), dtype=np.int64)
        for split, rows in shares.split_rows(name, labels).items():
            if len(rows):
                picked = torch.from_numpy(rows)
                found[split][name] = (samples.select(x, picked), samples.select(y, picked))
    return from_batches(found, encoding)
