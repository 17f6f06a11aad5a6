"""Tables with named columns, and their encoding as numbers, the same for training and for new rows.

An encoding holds the sorted categories of string columns, the labels and, with ``scale``, the mean and standard
deviation of number columns over the train rows of all clients. In a real federation only this leaves a site before
training: the count, sum and sum of squares of each number column, and the categories and labels; never a row.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comfedl.utils.errors import DataError, nearest

Rows = NDArray[np.int64]
NUMBER, FLAG, TEXT = "number", "flag", "text"
MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"})
"""The cells of a CSV file that mean a missing value."""
MAX_CATEGORIES = 1000
FEW_NUMBERS = 20  # so many distinct numbers may be categories, as grades are
MAX_INPUTS = 1 << 26  # numbers in one sample


class Cells(NamedTuple):
    """The values of a column (float64, bool or str), and which of them are missing."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]


@dataclass(frozen=True)
class Table:
    """Columns by name. In an ``untyped`` table, such as a CSV file, all cells are strings and types are inferred."""

    columns: Mapping[str, NDArray[Any]]
    source: str
    untyped: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise DataError(f"{self.source} has no column {name!r}; {nearest(name, self.columns)}.")
        return self.columns[name]

    def cells(self, name: str) -> Cells:
        """A column as numbers, booleans or strings."""
        values = self.column(name)
        if self.untyped:
            return _infer_type(values)
        kind = values.dtype.kind
        if kind in "iuf":
            return Cells(NUMBER, values.astype(np.float64), np.isnan(values.astype(np.float64)))
        if kind == "b":
            return Cells(FLAG, values, np.zeros(len(values), dtype=bool))
        if kind in "OUS":
            return _from_objects(f"Column {name!r} of {self.source}", values)
        raise DataError(
            f"Column {name!r} of {self.source} has the type {values.dtype}; give numbers, booleans or strings (a date "
            "as a number of days, for example), or leave the column out."
        )

    def strings(self, name: str) -> list[str]:
        """A column as strings, integers without a decimal point; raises DataError for missing values."""
        values, missing = self.column(name), self.cells(name).missing
        if missing.any():
            raise self.missing_error(name, missing)
        return [str(value) if self.untyped else _to_string(value) for value in values.tolist()]

    def missing_error(self, name: str, missing: NDArray[np.bool_]) -> DataError:
        """The error about missing values."""
        return DataError(
            f"Column {name!r} of {self.source} has {int(missing.sum())} missing value{'s' if missing.sum() > 1 else ''}"
            f' (the first in row {int(missing.argmax()) + 1}); fill them in, or drop these rows with missing="drop".'
        )

    def at(self, rows: Rows | NDArray[np.bool_]) -> Table:
        """A table of these rows only."""
        return replace(self, columns={name: values[rows] for name, values in self.columns.items()})

    def drop_missing(self, names: Sequence[str]) -> Table:
        """Drop the rows that miss a value in any of these columns."""
        missing = np.zeros(len(self), dtype=bool)
        for name in names:
            missing |= self.cells(name).missing
        if missing.all():
            raise DataError(f"{self.source} has no row in which all of {', '.join(names)} have a value.")
        return self.at(~missing)


def _infer_type(texts: NDArray[Any]) -> Cells:
    """Numbers if all strings are numbers, booleans if all are true or false, strings otherwise."""
    missing = np.array([text in MISSING for text in texts.tolist()], dtype=bool)
    present = [text for text, gap in zip(texts.tolist(), missing, strict=True) if not gap]
    try:
        numbers = np.array([float(text) for text in present])
    except ValueError:
        flags = [text.casefold() for text in present]
        if {*flags} <= {"true", "false"}:
            return Cells(FLAG, _fill_missing(np.array([flag == "true" for flag in flags]), missing), missing)
        return Cells(TEXT, texts.astype(object), missing)
    return Cells(NUMBER, _fill_missing(numbers, missing), missing)


def _from_objects(where: str, values: NDArray[Any]) -> Cells:
    """The values of a column of Python objects; None, NaN and the NA of pandas are missing."""
    each = values.tolist()
    missing = np.array([_is_missing(value) for value in each], dtype=bool)
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
    texts = np.array(["" if gap else _to_string(value) for value, gap in zip(each, missing, strict=True)], dtype=object)
    return Cells(TEXT, texts, missing)


def _is_missing(value: Any) -> bool:
    is_none = value is None or type(value).__name__ in ("NAType", "NaTType")
    return is_none or (isinstance(value, float) and value != value)


def _fill_missing(present: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    values = np.zeros(len(missing), dtype=present.dtype)
    values[~missing] = present
    return values


def _to_string(value: Any) -> str:
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


def read_csv(path: Path) -> Table:
    """Read a CSV file with a header line; the delimiter is a comma, a semicolon or a tab."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            lines = [(reader.line_num, row) for reader in [csv.reader(file, delimiter=delimiter)] for row in reader]
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; check the name.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); give a text file in UTF-8.") from None
    lines = [(number, [cell.strip() for cell in row]) for number, row in lines if row]
    if len(lines) < 2:
        raise DataError(f"{path} has no rows; give a header line with the column names, and one line per sample.")
    names = lines[0][1]
    for i, name in enumerate(names):
        if not name or name in names[:i]:
            fault = f"occurs twice ({name!r})" if name else f"of column {i + 1} is empty"
            raise DataError(f"In the header of {path} a name {fault}; give each column a distinct name.")
    for number, row in lines[1:]:
        if len(row) != len(names):
            raise DataError(f"Line {number} of {path} has {len(row)} cells, but the header has {len(names)}.")
    cells = np.array([row for _, row in lines[1:]], dtype=object)
    return Table({name: cells[:, i] for i, name in enumerate(names)}, path.name, untyped=True)


@dataclass(frozen=True)
class Column:
    """The encoding of a column: ``(value - mean) / scale``, or one-hot for strings."""

    name: str
    kind: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the encoded columns."""
        return [f"{self.name}={category}" for category in self.categories] if self.kind == TEXT else [self.name]

    def encode(self, table: Table) -> NDArray[np.float64]:
        """The encoded values, [rows, len(names)]."""
        kind, values, missing = table.cells(self.name)
        if missing.any():
            raise table.missing_error(self.name, missing)
        if self.kind == TEXT:
            texts = table.strings(self.name)
            known = {category: i for i, category in enumerate(self.categories)}
            unknown = next((text for text in texts if text not in known), None)
            if unknown is not None:
                raise DataError(
                    f"Column {self.name!r} of {table.source} has the value {unknown!r}, which did not occur in "
                    f"training; {nearest(unknown, self.categories)}."
                )
            return np.eye(len(known))[[known[text] for text in texts]]
        if kind == TEXT:
            raise DataError(
                f"Column {self.name!r} of {table.source} has strings such as {values[0]!r}, but it had numbers in "
                "training; give numbers."
            )
        return ((values.astype(np.float64) - self.mean) / self.scale)[:, None]


def sort_labels(texts: Sequence[str]) -> tuple[str, ...]:
    """The distinct strings, sorted by value if all are numbers, alphabetically otherwise."""
    found = sorted({*texts})
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)


@dataclass(frozen=True)
class Encoding:
    """How rows become model inputs, and outputs become labels or numbers; saved with a run to encode new rows.

    Attributes:
        columns: the inputs, in order; empty if the data are no table.
        target: the column of y.
        client: the column with the clients' names, if any.
        classes: the labels, in the order of the model's outputs; empty in a regression.
        mean, scale: y is ``(value - mean) / scale`` in a regression.
        shape: the shape of a sample.
        image: for images, the mode ("L" or "RGB"), height and width to read them with.
    """

    columns: tuple[Column, ...] = ()
    target: str = ""
    client: str | None = None
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0
    shape: tuple[int, ...] = ()
    image: tuple[str, int, int] | None = None

    def x(self, table: Table) -> NDArray[np.float32]:
        """The inputs of a table's rows; columns that were not used in training are ignored."""
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise DataError(
                f"{table.source} has no column {absent[0]!r}"
                + (f" (nor {', '.join(map(repr, absent[1:]))})" if absent[1:] else "")
                + f", which the model was trained on; it needs {', '.join(column.name for column in self.columns)}."
            )
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
            return np.concatenate([column.encode(table) for column in self.columns], axis=1).astype(np.float32)

    def y(self, table: Table) -> NDArray[Any]:
        """The labels as class indices, or the scaled targets of a regression."""
        kind, values, missing = table.cells(self.target)
        if missing.any():
            raise table.missing_error(self.target, missing)
        if self.classes:
            return self.labels(table.strings(self.target), f"Column {self.target!r} of {table.source}")
        if kind == TEXT:
            raise DataError(f"Column {self.target!r} of {table.source} has strings, but a regression needs numbers.")
        return ((values.astype(np.float64) - self.mean) / self.scale).astype(np.float32)

    def labels(self, texts: Sequence[str], where: str) -> Rows:
        """The class indices of labels; "1.0" is the label "1"."""
        known = {label: i for i, label in enumerate(self.classes)}
        known |= {re.sub(r"\.0+$", "", label): i for label, i in known.items()}
        found = [known.get(text, known.get(re.sub(r"\.0+$", "", text))) for text in texts]
        if None in found:
            unknown = texts[found.index(None)]
            raise DataError(f"{where} has the label {unknown!r}, which is unknown; {nearest(unknown, self.classes)}.")
        return np.array(found, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """The encoding as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """The inverse of ``to_dict``; raises a ValueError for values that it cannot have written."""
        if values.get("version", 1) != 1:
            raise ValueError(f"it has the version {values['version']!r}, but this one reads 1")
        described, image = _given(values, "columns", list), values.get("image")
        columns = tuple(_read_column(column) for column in described)
        target, client = _given(values, "target", str), values.get("client")
        shape = tuple(_given(values, "shape", list))
        if not isinstance(client, str | None):
            raise ValueError("its client is no name")
        if not all(_is_size(size) for size in shape) or math.prod(shape) > MAX_INPUTS:
            raise ValueError(f"its shape must be whole numbers from 1, and {MAX_INPUTS:,} together at most")
        if columns and shape != (sum(len(column.names) for column in columns),):
            raise ValueError("its shape is not that of its columns")
        if image is not None:
            mode, *size = image if isinstance(image, list) and len(image) == 3 else [None]
            if mode not in ("L", "RGB") or not all(map(_is_size, size)) or math.prod(size) > MAX_INPUTS:
                raise ValueError('its image must be "L" or "RGB", and a height and a width')
            image = (mode, *size)
        mean, scale = _read_scaling(values)
        return cls(columns, target, client, _read_texts(values, "classes"), mean, scale, shape, image)


def _given(values: Any, key: str, kind: type) -> Any:
    if not isinstance(values, Mapping) or not isinstance(values.get(key), kind):
        raise ValueError(f"its {key} must be a {kind.__name__}")
    return values[key]


def _read_texts(values: Any, key: str) -> tuple[str, ...]:
    texts = _given(values, key, list)
    if not all(isinstance(text, str) for text in texts) or len({*texts}) < len(texts):
        raise ValueError(f"its {key} must be different texts")
    return tuple(texts)


def _read_scaling(values: Mapping[str, Any]) -> tuple[float, float]:
    """The mean and the scale, by which values are divided."""
    pair = [values.get(key) for key in ("mean", "scale")]
    for number in pair:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError("its mean and scale must be numbers")
    mean, scale = (float(number) for number in pair if number is not None)
    if scale <= 0:
        raise ValueError("its scale must be above 0")
    return mean, scale


def _read_column(values: Any) -> Column:
    name, kind = _given(values, "name", str), _given(values, "kind", str)
    if kind not in (NUMBER, FLAG, TEXT):
        raise ValueError(f"its column {name[:60]!r} must be one of {NUMBER}, {FLAG}, {TEXT}")
    return Column(name, kind, *_read_scaling(values), _read_texts(values, "categories"))


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MAX_INPUTS


def fit_encoding(
    table: Table,
    train: NDArray[np.bool_],
    target: str,
    client: str | None,
    leave_out: Sequence[str],
    task: str | None,
    scale: bool,
    scale_target: bool,
) -> Encoding:
    """Fit the encoding of a table; means and scales are those of the ``train`` rows."""
    inputs = [name for name in table.columns if name not in {target, client, *leave_out}]
    if not inputs:
        raise DataError(f"{table.source} has no input column besides {target!r}; drop fewer columns.")
    columns = tuple(_fit_column(table, name, train, scale) for name in inputs)
    kind, values, missing = table.cells(target)
    if missing.any():
        raise table.missing_error(target, missing)
    few_integers = kind == NUMBER and bool((values == np.round(values)).all()) and len(np.unique(values)) <= 20
    if task == "classification" and kind == NUMBER and bool((values != np.round(values)).any()):
        raise DataError(
            f"Column {target!r} of {table.source} has numbers such as {values[values != np.round(values)][0]:g}, not "
            'labels; predict them with loss = "mse", "mae" or "huber" (task="regression").'
        )
    if task == "classification" or (task is None and (kind != NUMBER or few_integers)):
        classes = sort_labels(table.strings(target))
        if len(classes) < 2:
            raise DataError(
                f"Column {target!r} of {table.source} has only one label ({classes[0]!r}); give two or more."
            )
        if len(classes) > MAX_CATEGORIES:
            raise DataError(
                f"Column {target!r} of {table.source} has {len(classes)} distinct labels; for numbers use the loss "
                '"mse" (task="regression").'
            )
        encoding = Encoding(columns, target, client, classes)
    else:
        if kind == TEXT:
            raise DataError(f"Column {target!r} of {table.source} has strings, but a regression needs numbers.")
        mean, std = _mean_and_std(values.astype(np.float64)[train]) if scale_target else (0.0, 1.0)
        encoding = Encoding(columns, target, client, (), mean, std)
    return replace(encoding, shape=(sum(len(column.names) for column in columns),))


def _fit_column(table: Table, name: str, train: NDArray[np.bool_], scale: bool) -> Column:
    kind, values, missing = table.cells(name)
    if missing.any():
        raise table.missing_error(name, missing)
    if kind == TEXT:
        categories = sort_labels(table.strings(name))
        _refuse_mostly_numbers(table, name)
        if len(categories) > MAX_CATEGORIES:
            raise DataError(
                f"Column {name!r} of {table.source} has {len(categories)} distinct strings; leave it out (drop), or "
                f"group them into {MAX_CATEGORIES} or fewer."
            )
        return Column(name, TEXT, categories=categories)
    if kind == NUMBER and not np.isfinite(values).all():
        raise DataError(f"Column {name!r} of {table.source} has infinite values; replace them.")
    return Column(name, kind, *(_mean_and_std(values[train]) if scale and kind == NUMBER else ()))


def _refuse_mostly_numbers(table: Table, name: str) -> None:
    """Refuse a column of numbers with a few texts, or with decimal commas: each number would become a category."""
    texts = table.strings(name)
    odd = [row for row, text in enumerate(texts) if not _is_number(text)]
    distinct = {text for text in texts if _is_number(text)}
    if len(odd) < len(texts) / 2 and len(distinct) > FEW_NUMBERS:
        raise DataError(
            f"Column {name!r} of {table.source} has numbers in {len(texts) - len(odd)} of {len(texts)} rows, but "
            f'{texts[odd[0]]!r} in row {odd[0] + 1}; leave such cells empty and use missing="drop", or drop the column.'
        )
    commas = {text for text in texts if re.fullmatch(r"[+-]?\d+,\d+", text)}
    if len(commas) > FEW_NUMBERS and sum(text in commas for text in texts) > len(texts) / 2:
        raise DataError(
            f"Column {name!r} of {table.source} has decimal commas such as {min(commas)!r}; write numbers with a point."
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _mean_and_std(values: NDArray[np.float64]) -> tuple[float, float]:
    """The mean and standard deviation; 1 for a constant column."""
    std = float(values.std())
    return float(values.mean()), std if std > 0 else 1.0
