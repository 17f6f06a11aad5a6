"""Fit the encoding of a table to its train rows, and report what became of each column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.cell_format import EPOCH, CellFormat
from comfedl.data.fit_column import (
    MAX_CATEGORIES,
    Filling,
    Fitted,
    constant_column,
    most_frequent,
    number_column,
    text_column,
)
from comfedl.data.suspect_cells import (
    at_clients,
    note_grouped,
    note_identifier,
    note_marks,
    note_spellings,
    refuse_dates,
    refuse_mostly_numbers,
)
from comfedl.data.table import FLAG, FLAGS, NUMBER, TEXT, Table, to_string
from comfedl.data.table_report import ColumnReport
from comfedl.data.tabular import Encoding, sort_labels
from comfedl.utils.errors import ConfigError, DataError, nearest

MEDIAN, MEAN, MOST_FREQUENT = "median", "mean", "most-frequent"
RULES = (MEDIAN, MEAN, MOST_FREQUENT)
Rule = float | str
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class TableRows:
    """A table whose rows belong to clients and splits."""

    table: Table
    clients: NDArray[Any]
    splits: NDArray[Any]

    @cached_property
    def train(self) -> Flags:
        """Which rows are for training."""
        return np.asarray(self.splits == "train", dtype=bool)


@dataclass(frozen=True)
class TaskOptions:
    """What is to be learnt from a table, and how its numbers are scaled."""

    target: str
    client: str | None
    task: str | None = None
    scale: bool = True
    scale_target: bool = False
    missing: str = "error"


def check_impute(impute: Any, table: Table, inputs: Sequence[str]) -> dict[str, Rule]:
    """By column, what its missing values are filled in with: the name of a rule, or a constant."""
    if impute is None:
        return {}
    if impute in RULES if isinstance(impute, str) else False:
        return dict.fromkeys(inputs, impute)
    if not isinstance(impute, Mapping):
        raise ConfigError(
            f'impute is {impute!r}, but it must be "median", "mean" or "most-frequent", or a table by column: '
            '{ age = "median", ward = "unknown", dose = 0 }.'
        )
    for name, rule in impute.items():
        if name not in inputs:
            what = "is no input column" if name in table.columns else f"is no column of {table.source}"
            raise ConfigError(f"impute.{name} {what}; {nearest(str(name), inputs)}.")
        if not isinstance(rule, str | bool | int | float):
            raise ConfigError(
                f'impute.{name} is {rule!r}, but it must be "median", "mean", "most-frequent" or a constant.'
            )
    return dict(impute)


def fit_encoding(
    rows: TableRows, inputs: Sequence[str], options: TaskOptions, rules: Mapping[str, Rule]
) -> tuple[Encoding, dict[str, Fitted]]:
    """Fit the encoding of a table; also return what became of each input column."""
    table, target = rows.table, options.target
    if not inputs:
        raise DataError(f"{table.source} has no input column besides {target!r}; drop fewer columns.")
    if not rows.train.any():
        raise DataError(f"{table.source} has no row for training; mark some with train, or hold out fewer.")
    fitted = {name: _fit_column(rows, name, options.scale, rules.get(name)) for name in inputs}
    columns = tuple(found.column for found in fitted.values() if found.column is not None)
    if not columns:
        reasons = "; ".join(f"{name}: {found.fate}" for name, found in list(fitted.items())[:5])
        raise DataError(f"{table.source} has no input column that differs among the train rows ({reasons}).")
    classes, mean, std = _fit_target(rows, options)
    shape = (sum(len(column.names) for column in columns),)
    # In a table without gaps only new rows have any: a run that drops them says so then.
    encoding = Encoding(columns, target, options.client, classes, mean, std, shape)
    return replace(encoding, format=kept_format(table.format), missing=options.missing), fitted


def kept_format(format: CellFormat) -> CellFormat:
    """The format without what only says that this file is as usual."""
    return replace(format, header=None) if format.header is True else format


def _fit_target(rows: TableRows, options: TaskOptions) -> tuple[tuple[str, ...], float, float]:
    """The labels of a classification; the mean and scale of the numbers of a regression."""
    table, target, task = rows.table, options.target, options.task
    where = f"Column {target!r} of {table.source}"
    kind, values, missing = table.cells(target)
    if missing.any():
        raise table.missing_error(target, missing, 'drop these rows with missing = "drop": y is never filled in')
    few_integers = kind == NUMBER and bool((values == np.round(values)).all()) and len(np.unique(values)) <= 20
    if task == "classification" and kind == NUMBER and bool((values != np.round(values)).any()):
        raise DataError(
            f"{where} has numbers such as {values[values != np.round(values)][0]:g}, not "
            'labels; predict them with loss = "mse", "mae" or "huber" (task="regression").'
        )
    if task == "classification" or (task is None and (kind != NUMBER or few_integers)):
        classes = sort_labels(table.strings(target))
        if len(classes) < 2:
            raise DataError(f"{where} has only one label ({classes[0]!r}); give two or more.")
        if len(classes) > MAX_CATEGORIES:
            raise DataError(
                f'{where} has {len(classes)} distinct labels; for numbers use the loss "mse" (task="regression").'
            )
        return classes, 0.0, 1.0
    if kind == TEXT:
        raise DataError(f"{where} has strings such as {values[0]!r}, but a regression needs numbers.")
    if not options.scale_target:
        return (), 0.0, 1.0
    return (), *_mean_and_std(where, values.astype(np.float64)[rows.train])


def _fit_column(rows: TableRows, name: str, scale: bool, rule: Rule | None) -> Fitted:
    kind, _, missing = rows.table.cells(name)
    if missing.any() and rule is None:
        raise rows.table.missing_error(name, missing)
    if kind == TEXT:
        _refuse_other_types(rows, name, missing)
    return _fit_text(rows, name, rule) if kind == TEXT else _fit_numbers(rows, name, kind, scale, rule)


def _refuse_other_types(rows: TableRows, name: str, missing: Flags) -> None:
    """Refuse texts outside of train alone: rows that are held out must not decide what type a column has."""
    table, train = rows.table, rows.train & ~missing
    kind = replace(table, columns={name: table.column(name)[train]}).cells(name).kind if train.any() else TEXT
    if kind == TEXT:
        return
    refuse_mostly_numbers(table, name, rows.clients)
    cells, number = table.column(name).tolist(), table.format.number
    if table.untyped:
        fits = [cell.casefold() in FLAGS if kind == FLAG else number(cell) is not None for cell in cells]
    else:
        fits = [isinstance(cell, bool if kind == FLAG else int | float) for cell in cells]
    odd: Flags = ~missing & ~np.array(fits, dtype=np.bool_)
    first, splits = str(cells[int(odd.argmax())]), " and ".join(sorted({*rows.splits[odd].tolist()}))
    raise DataError(
        f"Column {name!r} of {table.source} has {'true or false' if kind == FLAG else 'numbers'} in all train rows, "
        f"but {first!r} in {table.rows_text(odd)} ({splits}) {at_clients(odd, rows.clients)}; correct it, or if it "
        "means a missing value, set "
        f'na_values = ["{first}"], with missing = "drop" or impute; else leave the column out (drop).'
    )


def _fit_numbers(rows: TableRows, name: str, kind: str, scale: bool, rule: Rule | None) -> Fitted:
    table, where = rows.table, f"Column {name!r} of {rows.table.source}"
    _, raw, missing = table.cells(name)
    values = raw.astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{where} has infinite values; replace them, or name them as missing with na_values.")
    present = values[rows.train & ~missing]
    fill = None if rule is None else _fill_number(table, name, kind, rule, present)
    gaps = missing[rows.train]
    has_gaps = bool(gaps.any() and not gaps.all())
    filled = values if fill is None else np.where(missing, fill, values)
    seen = filled[rows.train]
    constant = bool((fill is None and missing.any()) or seen.min() == seen.max())
    value = None if not constant else float(seen[0]) if len(present) else np.nan
    scaling = _mean_and_std(where, seen) if scale and kind == NUMBER and not constant else None
    filling = Filling(fill, int(missing.sum()), has_gaps)
    fitted = number_column(name, kind, value, scaling, filling, partial(table.format.shown, name))
    if constant or kind != NUMBER:
        return fitted
    return replace(fitted, notes=(*note_identifier(table, name, rows.clients), *note_grouped(table, name)))


def _fill_number(table: Table, name: str, kind: str, rule: Rule, present: NDArray[np.float64]) -> float | None:
    """What stands in for missing numbers; None if there is no number to learn it from."""
    if isinstance(rule, str) and rule in RULES:
        if not len(present):
            return None
        if kind == NUMBER and rule == MEDIAN:
            return float(np.median(present))
        if kind == NUMBER and rule == MEAN:
            return float(present.mean())
        numbers, counts = np.unique(present, return_counts=True)
        return float(numbers[counts.argmax()])
    is_date = name in table.format.dates
    given: float | None = rule if not isinstance(rule, str) else None
    if isinstance(rule, str):
        given = table.format.days(name, rule) if is_date else table.format.number(rule)
        if kind == FLAG:
            given = FLAGS.get(rule.casefold(), given)
    if given is None or not np.isfinite(given):
        what = "dates" if is_date else "true or false" if kind == FLAG else "numbers"
        raise ConfigError(
            f'impute.{name} is {rule!r}, but the column has {what}; give "median", "mean", "most-frequent" or one of '
            "these."
        )
    return float(given)


def _fit_text(rows: TableRows, name: str, rule: Rule | None) -> Fitted:
    table, train = rows.table, rows.train
    missing = table.missing(name)
    refuse_mostly_numbers(table, name, rows.clients)
    refuse_dates(table, name)
    texts = np.array(table.texts(name), dtype=object)
    fill = None if rule is None else _fill_text(rule, texts[train & ~missing].tolist())
    gaps = missing[train]
    has_gaps = bool(gaps.any() and not gaps.all())
    if fill is None and missing.any():  # no value in train
        return constant_column(name, "nothing", False)
    texts = texts if fill is None else np.where(missing, fill, texts)
    owners: dict[str, set[str]] = {}
    clients = rows.clients[train].tolist()
    for text, client in zip(texts[train].tolist(), clients, strict=True):
        owners.setdefault(text, set()).add(client)
    filling = Filling(fill, int(missing.sum()), has_gaps)
    counts = {text: len(having) for text, having in owners.items()}
    fitted = text_column(name, table.source, counts, len({*clients}) > 1, filling)
    marks = () if fitted.column is None else tuple(note_marks(table, name, f"a value of the column {name!r}"))
    spelled = tuple(note_spellings(table, name, "value")) if len(counts) > 1 else ()
    return replace(fitted, notes=(*marks, *spelled, *fitted.notes))


def _fill_text(rule: Rule, present: Sequence[str]) -> str | None:
    return most_frequent(Counter(present)) if isinstance(rule, str) and rule in RULES else to_string(rule)


def _mean_and_std(where: str, values: NDArray[np.float64]) -> tuple[float, float]:
    """The mean and standard deviation; 1 for a constant column."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(values.mean()), float(values.std())
    if not np.isfinite([mean, std]).all():
        raise DataError(
            f"{where} has numbers as large as {np.abs(values).max():g}, too large to be scaled; replace them."
        )
    return mean, std if std > 0 else 1.0


def describe_column(table: Table, name: str, fate: str) -> ColumnReport:
    """A column's type and values, for the report."""
    try:
        kind, values, missing = table.cells(name)
    except DataError:  # a column that is left out may hold anything
        return ColumnReport(name, str(table.column(name).dtype), "", 0, fate)
    present = values[~missing]
    if not len(present):
        shown = ""
    elif kind == NUMBER and name in table.format.dates:
        kind, ends = "date", [EPOCH + timedelta(days=float(end)) for end in (present.min(), present.max())]
        shown = " to ".join(f"{end:%Y-%m-%d}" for end in ends)
    elif kind == NUMBER:
        shown = f"{present.min():.6g} to {present.max():.6g}"
    elif kind == FLAG:
        shown = f"true in {present.mean():.0%}"
    else:
        found = sort_labels([str(text) for text in present.tolist()])
        shown = f"{len(found)}: " + ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    return ColumnReport(name, kind, shown, int(missing.sum()), fate)
