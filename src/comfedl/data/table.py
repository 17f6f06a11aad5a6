"""Tables with named columns, whose cells are read as numbers, booleans or strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comfedl.data.cell_format import MISSING, PLAIN, CellFormat
from comfedl.utils.errors import DataError, nearest
from comfedl.utils.toml import toml_key

Rows = NDArray[np.int64]
NUMBER, FLAG, TEXT = "number", "flag", "text"
FLAGS = {"true": 1.0, "false": 0.0}
DIGITS = re.compile(r"[+-]?\d[\d.,' \u00a0\u202f]*")  # a number, in whichever notation
SHOWN_ROWS = 3  # so many rows are named in a message


class Cells(NamedTuple):
    """The values of a column (float64, bool or str), and which of them are missing."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]


@dataclass(frozen=True)
class Table:
    """Columns by name. In an ``untyped`` table, such as a CSV file, all cells are strings and types are inferred.

    ``format`` says how cells are written, ``places`` from which row each row was taken, for messages, ``notes`` what a
    user should know about how the file was read, and ``added`` which columns no file has, and so no marks of missing
    values, such as the names of the files.
    """

    columns: Mapping[str, NDArray[Any]]
    source: str
    untyped: bool = False
    format: CellFormat = PLAIN
    places: Rows | None = None
    notes: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()
    _read: dict[str, Cells] = field(default_factory=dict, init=False, compare=False, repr=False)
    _gaps: dict[str, NDArray[np.bool_]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def using(self, format: CellFormat) -> Table:
        """The same columns, read in another way."""
        return self if format == self.format else replace(self, format=format)

    def column(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise DataError(f"{self.source} has no column {name!r}; {nearest(name, self.columns)}.")
        return self.columns[name]

    def place(self, row: int) -> int:
        """The number of a row in the file, from 1."""
        return row + 1 if self.places is None else int(self.places[row])

    def rows_text(self, odd: NDArray[np.bool_]) -> str:
        """The numbers of the rows that are marked: "row 3", "rows 3, 7, 9 and 4 more"."""
        rows = np.flatnonzero(odd).tolist()
        shown = ", ".join(str(self.place(row)) for row in rows[:SHOWN_ROWS])
        more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
        return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"

    def cells(self, name: str) -> Cells:
        """A column as numbers, booleans or strings; dates are numbers of days."""
        if name not in self._read:
            self._read[name] = self._infer(name)
        return self._read[name]

    def _infer(self, name: str) -> Cells:
        values, where = self.column(name), f"Column {name!r} of {self.source}"
        if name in self.format.dates:
            days, missing = self.numbers(name)
            return Cells(NUMBER, days, missing)
        if self.untyped:
            return _infer_type(values, self.missing(name), self.format, name)
        kind = values.dtype.kind
        if kind in "iuf":
            missing = self.missing(name)
            return Cells(NUMBER, np.where(missing, 0.0, values.astype(np.float64)), missing)
        if kind == "b":
            return Cells(FLAG, values, self.missing(name))
        if kind in "OUS":
            return _from_objects(where, values, self.missing(name))
        advice = f'as days since 1970 with dates = ["{name}"]' if kind == "M" else "as numbers"
        raise DataError(
            f"{where} has the type {values.dtype}; give numbers, booleans or strings, read it {advice}, or leave the "
            "column out (drop)."
        )

    def missing(self, name: str) -> NDArray[np.bool_]:
        """Which cells of a column are missing."""
        if name not in self._gaps:
            self._gaps[name] = self._find_missing(name)
        return self._gaps[name]

    def _find_missing(self, name: str) -> NDArray[np.bool_]:
        values = self.column(name)
        if name in self.added:
            return np.zeros(len(values), dtype=bool)
        marks, numbers = self.format.marks(name), self.format.missing_numbers(name)
        if self.untyped:
            marks |= MISSING
            found = [
                text in marks or (bool(numbers) and self.format.number(text) in numbers) for text in values.tolist()
            ]
        elif values.dtype.kind in "OUS":
            found = [
                _is_missing(value)
                or (isinstance(value, str) and value in marks)
                or (isinstance(value, int | float) and value in numbers)
                for value in values.tolist()
            ]
        elif values.dtype.kind == "M":
            found = np.isnat(values).tolist()
        elif values.dtype.kind in "iuf":
            found = (np.isnan(values.astype(np.float64)) | np.isin(values, [*numbers])).tolist()
        else:
            found = [False] * len(values)
        return np.array(found, dtype=bool)

    def numbers(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """A column that must hold numbers, dates or booleans, as numbers; and which of them are missing, which are 0.

        Each cell is read by itself, so that a row means the same in any table.
        """
        raw, is_date = self.column(name), name in self.format.dates
        if not is_date and raw.dtype.kind in "iufb":
            _, values, missing = self.cells(name)
            return values.astype(np.float64), missing
        missing = self.missing(name)
        read: Callable[[Any], float | None] = (lambda cell: self.format.days(name, cell)) if is_date else self._number
        known: dict[Any, float | None] = {}
        found = np.zeros(len(raw))
        odd = np.zeros(len(raw), dtype=bool)
        cells = raw.astype("datetime64[us]").tolist() if raw.dtype.kind == "M" else raw.tolist()
        for row, cell in enumerate(cells):
            if not missing[row]:
                if cell not in known:
                    known[cell] = read(cell)
                value = known[cell]
                found[row], odd[row] = (0.0, True) if value is None else (value, False)
        if odd.any():
            first = str(cells[int(odd.argmax())])
            if is_date:
                written = self.format.dates[name]
                need = f"it is read as dates, {'such as 2024-12-31' if written == 'iso' else written}"
            else:
                written = "" if self.format.thousands == "" else f' and thousands = "{self.format.thousands}"'
                how = f' written with decimal = "{self.format.decimal}"{written}' if DIGITS.fullmatch(first) else ""
                need = f"it must have numbers{how}"
            if DIGITS.fullmatch(first):
                raise DataError(
                    f"Column {name!r} of {self.source} has {first!r} in {self.rows_text(odd)}, but {need}; write these "
                    "cells alike."
                )
            raise DataError(
                f"Column {name!r} of {self.source} has {first!r} in {self.rows_text(odd)}, but {need}; correct it, or "
                f'leave the cell empty if the value is missing (when training, na_values = ["{first}"] says so).'
            )
        return found, missing

    def _number(self, cell: Any) -> float | None:
        if isinstance(cell, str):
            number = self.format.number(cell) if self.untyped else None
            return FLAGS.get(cell.casefold()) if number is None and self.untyped else number
        return float(cell) if isinstance(cell, bool | int | float) else None

    def strings(self, name: str) -> list[str]:
        """A column as strings, integers without a decimal point; raises DataError for missing values."""
        missing = self.cells(name).missing
        if missing.any():
            raise self.missing_error(name, missing)
        return self.texts(name)

    def texts(self, name: str) -> list[str]:
        """The same, with "" for missing values."""
        values, missing = self.column(name), self.missing(name)
        return [
            "" if gap else str(value) if self.untyped else to_string(value)
            for value, gap in zip(values.tolist(), missing, strict=True)
        ]

    def written(self, name: str) -> list[str]:
        """A column's cells as they are written, to be carried over into another file."""
        values = self.column(name)
        if self.untyped:
            return [str(value) for value in values.tolist()]
        return ["" if _is_missing(value) else to_string(value) for value in values.tolist()]

    def missing_error(self, name: str, missing: NDArray[np.bool_], advice: str = "") -> DataError:
        """The error about missing values."""
        advice = advice or (
            f'fill them in (impute = "median", or impute = {{ {toml_key(name)} = "most-frequent" }} for this column '
            'alone), or drop these rows with missing="drop"'
        )
        return DataError(
            f"Column {name!r} of {self.source} has {int(missing.sum())} missing value{'s' if missing.sum() > 1 else ''}"
            f" (the first in row {self.place(int(missing.argmax()))}); {advice}."
        )

    def at(self, rows: Rows | NDArray[np.bool_]) -> Table:
        """A table of these rows only."""
        places = (np.arange(1, len(self) + 1) if self.places is None else self.places)[rows]
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, places=places)

    def any_missing(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Which rows miss a value in any of these columns; an error if all do."""
        missing = np.zeros(len(self), dtype=bool)
        for name in names:
            missing |= self.missing(name)
        if missing.all():
            worst = max(names, key=lambda name: int(self.missing(name).sum()))
            raise DataError(
                f"{self.source} has no row in which all of {', '.join(names)} have a value; {worst!r} is missing most "
                f"often, in {int(self.missing(worst).sum())} of {len(self)} rows: leave such columns out (drop), or "
                "fill them in (impute)."
            )
        return missing


def _infer_type(texts: NDArray[Any], missing: NDArray[np.bool_], format: CellFormat, name: str) -> Cells:
    """Numbers if all strings are numbers, booleans if all are true or false, strings otherwise."""
    present = texts[~missing].tolist()
    numbers: list[float] = []
    for text in present:
        number = format.number(text)
        if number is None:
            break
        numbers.append(number)
    if len(numbers) == len(present):
        return Cells(NUMBER, _fill_missing(np.array(numbers), missing), missing)
    flags = [text.casefold() for text in present]
    if {*flags} <= FLAGS.keys():
        return Cells(FLAG, _fill_missing(np.array([flag == "true" for flag in flags]), missing), missing)
    return Cells(TEXT, texts.astype(object), missing)


def _from_objects(where: str, values: NDArray[Any], missing: NDArray[np.bool_]) -> Cells:
    """The values of a column of Python objects; None, NaN and the NA of pandas are missing."""
    each = values.tolist()
    present = [value for value, gap in zip(each, missing, strict=True) if not gap]
    if present and all(isinstance(value, bool) for value in present):
        return Cells(FLAG, _fill_missing(np.array(present, dtype=bool), missing), missing)
    if all(isinstance(value, int | float) for value in present):
        return Cells(NUMBER, _fill_missing(np.array(present, dtype=np.float64), missing), missing)
    unusable = next((value for value in present if not isinstance(value, str | int | float)), None)
    if unusable is not None:
        raise DataError(
            f"{where} has a {type(unusable).__name__}; give numbers, booleans or strings, or leave the column out."
        )
    texts = np.array(["" if gap else to_string(value) for value, gap in zip(each, missing, strict=True)], dtype=object)
    return Cells(TEXT, texts, missing)


def _is_missing(value: Any) -> bool:
    is_none = value is None or type(value).__name__ in ("NAType", "NaTType")
    return is_none or (isinstance(value, float) and value != value)


def _fill_missing(present: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    values = np.zeros(len(missing), dtype=present.dtype)
    values[~missing] = present
    return values


def to_string(value: Any) -> str:
    """A value as a string, a whole number without a decimal point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def as_table(frame: Any) -> Table:
    """A table from a pandas or polars data frame, or from a dict of columns."""
    if isinstance(frame, Table):
        return frame
    if isinstance(frame, Mapping):
        masked = next((name for name, values in frame.items() if np.ma.is_masked(values)), None)
        if masked is not None:
            raise DataError(
                f"Column {masked!r} is a masked array with masked values; fill them in, or give NaN for them."
            )
        columns = {name: np.asarray(values) for name, values in frame.items()}
    elif hasattr(frame, "columns") and hasattr(frame, "__getitem__"):
        names = list(frame.columns)
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise DataError(f"The data frame has two columns {duplicate!r}; rename one.")
        columns = {name: frame[name].to_numpy() for name in names}
    else:
        raise DataError(f"The table is a {type(frame).__name__}; give a data frame, or a dict of columns.")
    odd = next((name for name in columns if not isinstance(name, str)), None)
    if odd is not None:
        raise DataError(f"A column's name is {odd!r}, but it must be a string; rename it.")
    lengths = {len(values) if values.ndim == 1 else -1 for values in columns.values()}
    if len(lengths) != 1 or not max(lengths) > 0:
        raise DataError("The table must have columns of equal length, with one value per row, and at least one row.")
    return Table(columns, "the table")
