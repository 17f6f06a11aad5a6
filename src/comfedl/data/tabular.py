"""Tables with named columns, and how their rows become numbers: the same for training and for new rows.

What is learnt from the rows is little and is kept: the categories of text columns in their order, the labels, and
with ``scale`` the mean and the standard deviation of number columns over the train rows of all clients. In a real
federation these are what leaves a site before training: of each number column the count, the sum and the sum of
squares, and the categories that occur; never a row.
"""

from __future__ import annotations

import csv
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
"""What stands for no value in a CSV file."""
MOST_CATEGORIES = 1000


class Cells(NamedTuple):
    """A column's values (float64, bool or texts), and which of them are missing."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]


@dataclass(frozen=True)
class Table:
    """Columns by name. ``written`` says that all cells are texts, as in a CSV file, whose types are to be found out."""

    columns: Mapping[str, NDArray[Any]]
    source: str
    written: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise DataError(f"{self.source} has no column {name!r}; {nearest(name, self.columns)}.")
        return self.columns[name]

    def cells(self, name: str) -> Cells:
        """A column as numbers, flags or texts."""
        values = self.column(name)
        if self.written:
            return _typed(values)
        kind = values.dtype.kind
        if kind in "iuf":
            return Cells(NUMBER, values.astype(np.float64), np.isnan(values.astype(np.float64)))
        if kind == "b":
            return Cells(FLAG, values, np.zeros(len(values), dtype=bool))
        if kind in "OUS":
            return _told(f"Column {name!r} of {self.source}", values)
        raise DataError(
            f"Column {name!r} of {self.source} has the type {values.dtype}; give numbers, booleans or texts (a date as "
            "the number of days since some other, for example), or leave the column out."
        )

    def texts(self, name: str) -> list[str]:
        """A column as texts, whole numbers without a point; missing values are refused."""
        values, missing = self.column(name), self.cells(name).missing
        if missing.any():
            raise self.absent(name, missing)
        return [str(value) if self.written else _text(value) for value in values.tolist()]

    def absent(self, name: str, missing: NDArray[np.bool_]) -> DataError:
        """The error for missing values."""
        return DataError(
            f"Column {name!r} of {self.source} has {int(missing.sum())} missing value{'s' if missing.sum() > 1 else ''}"
            f' (the first in row {int(missing.argmax()) + 1}); fill them in, or drop these rows with missing="drop".'
        )

    def at(self, rows: Rows | NDArray[np.bool_]) -> Table:
        """Some of the rows."""
        return replace(self, columns={name: values[rows] for name, values in self.columns.items()})

    def complete(self, names: Sequence[str]) -> Table:
        """The rows that have a value in all of these columns."""
        gaps = np.zeros(len(self), dtype=bool)
        for name in names:
            gaps |= self.cells(name).missing
        if gaps.all():
            raise DataError(f"{self.source} has no row in which all of {', '.join(names)} have a value.")
        return self.at(~gaps)


def _typed(texts: NDArray[Any]) -> Cells:
    """The values of written cells: numbers where all are, flags where all are true or false, texts otherwise."""
    missing = np.array([text in MISSING for text in texts.tolist()], dtype=bool)
    there = [text for text, gap in zip(texts.tolist(), missing, strict=True) if not gap]
    try:
        numbers = np.array([float(text) for text in there])
    except ValueError:
        flags = [text.casefold() for text in there]
        if {*flags} <= {"true", "false"}:
            return Cells(FLAG, _spread(np.array([flag == "true" for flag in flags]), missing), missing)
        return Cells(TEXT, texts.astype(object), missing)
    return Cells(NUMBER, _spread(numbers, missing), missing)


def _told(where: str, values: NDArray[Any]) -> Cells:
    """The values of Python objects; None, NaN and pandas' NA are missing."""
    each = values.tolist()
    missing = np.array([_is_missing(value) for value in each], dtype=bool)
    there = [value for value, gap in zip(each, missing, strict=True) if not gap]
    if there and all(isinstance(value, bool) for value in there):
        return Cells(FLAG, _spread(np.array(there, dtype=bool), missing), missing)
    if all(isinstance(value, int | float) for value in there):
        return Cells(NUMBER, _spread(np.array(there, dtype=np.float64), missing), missing)
    strange = next((value for value in there if not isinstance(value, str | int | float)), None)
    if strange is not None:
        raise DataError(
            f"{where} holds a {type(strange).__name__}; give numbers, booleans or texts, or leave the column out."
        )
    texts = np.array(["" if gap else _text(value) for value, gap in zip(each, missing, strict=True)], dtype=object)
    return Cells(TEXT, texts, missing)


def _is_missing(value: Any) -> bool:
    nothing = value is None or type(value).__name__ in ("NAType", "NaTType")
    return nothing or (isinstance(value, float) and value != value)


def _spread(there: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    values = np.zeros(len(missing), dtype=there.dtype)
    values[~missing] = there
    return values


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def as_table(frame: Any) -> Table:
    """A data frame of pandas or polars, or a dict of columns, as a table."""
    if isinstance(frame, Table):
        return frame
    if isinstance(frame, Mapping):
        columns = {name: np.asarray(values) for name, values in frame.items()}
    elif hasattr(frame, "columns") and hasattr(frame, "__getitem__"):
        names = list(frame.columns)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"The data frame has two columns {twice!r}; rename one.")
        columns = {name: frame[name].to_numpy() for name in names}
    else:
        raise DataError(f"The table is a {type(frame).__name__}; give a data frame, or a dict of columns.")
    odd = next((name for name in columns if not isinstance(name, str)), None)
    if odd is not None:
        raise DataError(f"A column's name is {odd!r}, but it must be a text; rename it.")
    lengths = {len(values) if values.ndim == 1 else -1 for values in columns.values()}
    if len(lengths) != 1 or not max(lengths) > 0:
        raise DataError("The table must have columns of one length, with one value a row, and at least one row.")
    return Table(columns, "the table")


def read_csv(path: Path) -> Table:
    """A CSV file with a line of names at its head; commas, semicolons or tabs may part the cells."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            delimiter = max(",;\t", key=head.count)
            file.seek(0)
            lines = [(reader.line_num, row) for reader in [csv.reader(file, delimiter=delimiter)] for row in reader]
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; check the name.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); give a text file in UTF-8.") from None
    lines = [(number, [cell.strip() for cell in row]) for number, row in lines if row]
    if len(lines) < 2:
        raise DataError(f"{path} holds no rows; give a line with the columns' names, and a line for each sample.")
    names = lines[0][1]
    for place, name in enumerate(names):
        if not name or name in names[:place]:
            fault = f"stands twice ({name!r})" if name else f"of column {place + 1} is empty"
            raise DataError(f"In the first line of {path} a name {fault}; give each column a name of its own.")
    for number, row in lines[1:]:
        if len(row) != len(names):
            raise DataError(f"Line {number} of {path} has {len(row)} cells, but the first line has {len(names)}.")
    cells = np.array([row for _, row in lines[1:]], dtype=object)
    return Table({name: cells[:, place] for place, name in enumerate(names)}, path.name, written=True)


@dataclass(frozen=True)
class Column:
    """How a column becomes numbers: ``(value - mean) / scale``, or one number for each category."""

    name: str
    kind: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the numbers it gives."""
        return [f"{self.name}={category}" for category in self.categories] if self.kind == TEXT else [self.name]

    def encode(self, table: Table) -> NDArray[np.float64]:
        """Its numbers, [rows, one or one for each category]."""
        kind, values, missing = table.cells(self.name)
        if missing.any():
            raise table.absent(self.name, missing)
        if self.kind == TEXT:
            texts = np.array(table.texts(self.name), dtype=object)
            known = {category: place for place, category in enumerate(self.categories)}
            strange = next((text for text in texts if text not in known), None)
            if strange is not None:
                raise DataError(
                    f"Column {self.name!r} of {table.source} has the value {strange!r}, which was not there in "
                    f"training; {nearest(strange, self.categories)}."
                )
            return np.eye(len(known))[[known[text] for text in texts]]
        if kind == TEXT:
            raise DataError(
                f"Column {self.name!r} of {table.source} holds texts such as {values[0]!r}, but in training it held "
                "numbers; give numbers."
            )
        return ((values.astype(np.float64) - self.mean) / self.scale)[:, None]


def ordered(texts: Sequence[str]) -> tuple[str, ...]:
    """Different texts in order: by value where all are numbers, and by letters otherwise."""
    found = sorted({*texts})
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)


@dataclass(frozen=True)
class Encoding:
    """How rows become a model's input, and its output labels or numbers again; kept with a run, for new rows.

    Attributes:
        columns: the inputs, in order; empty where they are not a table's.
        target: the column of y.
        client: the column that names the client, if there was one.
        classes: the labels, in the order of the model's outputs; empty in a regression.
        mean, scale: y is ``(value - mean) / scale`` in a regression.
        shape: one sample's shape.
        image: for images, how they are read: the mode ("L" or "RGB"), height and width.
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
        """The inputs of a table's rows; other columns than those of training are not looked at."""
        lacking = [column.name for column in self.columns if column.name not in table.columns]
        if lacking:
            raise DataError(
                f"{table.source} has no column {lacking[0]!r}"
                + (f" (nor {', '.join(map(repr, lacking[1:]))})" if lacking[1:] else "")
                + f", which the model was trained with; it needs {', '.join(column.name for column in self.columns)}."
            )
        return np.concatenate([column.encode(table) for column in self.columns], axis=1).astype(np.float32)

    def y(self, table: Table) -> NDArray[Any]:
        """The labels as whole numbers, or the scaled numbers of a regression."""
        kind, values, missing = table.cells(self.target)
        if missing.any():
            raise table.absent(self.target, missing)
        if self.classes:
            return self.labels(table.texts(self.target), f"Column {self.target!r} of {table.source}")
        if kind == TEXT:
            raise DataError(f"Column {self.target!r} of {table.source} holds texts, but a regression needs numbers.")
        return ((values.astype(np.float64) - self.mean) / self.scale).astype(np.float32)

    def labels(self, texts: Sequence[str], where: str) -> Rows:
        """The numbers of labels; 1.0 is the label 1."""
        known = {label: place for place, label in enumerate(self.classes)}
        known |= {re.sub(r"\.0+$", "", label): place for label, place in known.items()}
        found = [known.get(text, known.get(re.sub(r"\.0+$", "", text))) for text in texts]
        if None in found:
            strange = texts[found.index(None)]
            raise DataError(f"{where} has the label {strange!r}, which is unknown; {nearest(strange, self.classes)}.")
        return np.array(found, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """Back from plain values."""
        columns = tuple(Column(**{**column, "categories": tuple(column["categories"])}) for column in values["columns"])
        image = values["image"] and (str(values["image"][0]), int(values["image"][1]), int(values["image"][2]))
        lists = {"columns": columns, "classes": tuple(values["classes"]), "shape": tuple(values["shape"])}
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, **lists, "image": image})


def learn(
    table: Table,
    train: NDArray[np.bool_],
    target: str,
    client: str | None,
    leave_out: Sequence[str],
    task: str | None,
    scale: bool,
    scale_target: bool,
) -> Encoding:
    """The encoding of a table; ``train`` says which rows the scales are taken from."""
    inputs = [name for name in table.columns if name not in {target, client, *leave_out}]
    if not inputs:
        raise DataError(f"{table.source} has no column left to learn from beside {target!r}; check what is left out.")
    columns = tuple(_learnt(table, name, train, scale) for name in inputs)
    kind, values, missing = table.cells(target)
    if missing.any():
        raise table.absent(target, missing)
    whole = kind == NUMBER and bool((values == np.round(values)).all()) and len(np.unique(values)) <= 20
    if task == "classification" and kind == NUMBER and bool((values != np.round(values)).any()):
        raise DataError(
            f"Column {target!r} of {table.source} holds numbers such as {values[values != np.round(values)][0]:g}, not "
            'labels; predict them with loss = "mse", "mae" or "huber" (task="regression").'
        )
    if task == "classification" or (task is None and (kind != NUMBER or whole)):
        classes = ordered(table.texts(target))
        if len(classes) < 2:
            raise DataError(
                f"Column {target!r} of {table.source} has one label only ({classes[0]!r}); give two or more."
            )
        if len(classes) > MOST_CATEGORIES:
            raise DataError(
                f"Column {target!r} of {table.source} has {len(classes)} different labels; for numbers use the loss "
                '"mse" (task="regression").'
            )
        encoding = Encoding(columns, target, client, classes)
    else:
        if kind == TEXT:
            raise DataError(f"Column {target!r} of {table.source} holds texts, but a regression needs numbers.")
        mean, spread = _scales(values.astype(np.float64)[train]) if scale_target else (0.0, 1.0)
        encoding = Encoding(columns, target, client, (), mean, spread)
    return replace(encoding, shape=(sum(len(column.names) for column in columns),))


def _learnt(table: Table, name: str, train: NDArray[np.bool_], scale: bool) -> Column:
    kind, values, missing = table.cells(name)
    if missing.any():
        raise table.absent(name, missing)
    if kind == TEXT:
        categories = ordered(table.texts(name))
        if len(categories) > MOST_CATEGORIES:
            raise DataError(
                f"Column {name!r} of {table.source} has {len(categories)} different texts; leave it out (drop), or "
                f"group them into {MOST_CATEGORIES} or fewer."
            )
        return Column(name, TEXT, categories=categories)
    if kind == NUMBER and not np.isfinite(values).all():
        raise DataError(f"Column {name!r} of {table.source} has values that are infinite; replace them.")
    return Column(name, kind, *(_scales(values[train]) if scale and kind == NUMBER else ()))


def _scales(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation; a column that never changes is only shifted."""
    spread = float(values.std())
    return float(values.mean()), spread if spread > 0 else 1.0
