"""The encoding of a table's rows as numbers, the same for training and for new rows.

It holds how cells are written, the categories of string columns, the labels, what missing values are filled in with
and, with ``scale``, the mean and standard deviation of number columns over the train rows of all clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.cell_format import PLAIN, CellFormat
from comfedl.data.suspect_cells import note_grouped
from comfedl.data.table import FLAG, NUMBER, TEXT, Rows, Table, as_table
from comfedl.data.table_files import read_csv as read_csv  # under the name that it had
from comfedl.data.table_report import TableReport
from comfedl.utils.errors import DataError, nearest

MAX_INPUTS = 1 << 26  # numbers in one sample
GAP = "missing"  # a column of which only whether it is missing varies in training
REFUSE, ZEROS, OTHER = "refuse", "zeros", "other"
UNSEEN = (REFUSE, ZEROS, OTHER)
"""What becomes of a category without an input: an error, as before version 2; zeros; or an input of its own."""


@dataclass(frozen=True)
class Column:
    """The encoding of a column: ``(value - mean) / scale``, or one-hot for strings.

    ``fill`` stands in for missing values, and ``indicator`` adds an input that says where it does.
    """

    name: str
    kind: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    unseen: str = REFUSE
    fill: float | str | None = None
    indicator: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the encoded columns."""
        if self.kind == GAP:
            return [f"{self.name} is missing"]
        other = "(other)"
        while other in self.categories:  # a category of this name keeps it
            other = f"({other})"
        one_hot = [*self.categories, *([other] if self.unseen == OTHER else [])]
        names = [f"{self.name}={category}" for category in one_hot] if self.kind == TEXT else [self.name]
        return [*names, *([f"{self.name} is missing"] if self.indicator else [])]

    def encode(self, table: Table) -> NDArray[np.float64]:
        """The encoded values, [rows, len(names)]."""
        if self.kind == GAP:
            return table.missing(self.name)[:, None].astype(np.float64)
        if self.kind == TEXT:
            codes, missing = self.codes(table)
            encoded = np.eye(len(self.categories) + 1)[codes]
            encoded = encoded if self.unseen == OTHER else encoded[:, :-1]
        else:
            values, missing = table.numbers(self.name)
            if missing.any():
                if self.fill is None:
                    raise self._missing_error(table, missing)
                values = np.where(missing, float(self.fill), values)
            encoded = ((values - self.mean) / self.scale)[:, None]
        return np.concatenate([encoded, missing[:, None]], axis=1) if self.indicator else encoded

    def written_fill(self, format: CellFormat) -> str:
        """What stands in for missing values, as a reader would write it."""
        if isinstance(self.fill, str) or self.fill is None:
            return repr(self.fill)
        if self.kind == FLAG:
            return "true" if self.fill else "false"
        return format.shown(self.name, self.fill)

    def codes(self, table: Table) -> tuple[Rows, NDArray[np.bool_]]:
        """The place of each row's category, the number of categories for any other; and which cells are missing."""
        texts, missing = table.texts(self.name), table.missing(self.name)
        if missing.any():
            if not isinstance(self.fill, str):
                raise self._missing_error(table, missing)
            texts = [self.fill if gap else text for text, gap in zip(texts, missing, strict=True)]
        known = {category: i for i, category in enumerate(self.categories)}
        codes = np.array([known.get(text, len(known)) for text in texts], dtype=np.int64)
        if self.unseen == REFUSE and len(known) in codes:
            unknown = texts[int((codes == len(known)).argmax())]
            raise DataError(
                f"Column {self.name!r} of {table.source} has the value {unknown!r}, which did not occur in "
                f"training; {nearest(unknown, self.categories)}."
            )
        return codes, missing

    def _missing_error(self, table: Table, missing: NDArray[np.bool_]) -> DataError:
        advice = "the model was trained without any there: fill them in, or train with impute"
        return table.missing_error(self.name, missing, advice)

    def to_dict(self) -> dict[str, Any]:
        """The values as version 1 has them, and those of later versions that are not the default."""
        base = {"name": self.name, "kind": self.kind, "mean": self.mean, "scale": self.scale}
        later = {"unseen": (self.unseen, REFUSE), "fill": (self.fill, None), "indicator": (self.indicator, False)}
        kept = {key: value for key, (value, default) in later.items() if value != default}
        return {**base, "categories": list(self.categories), **kept}


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
        format: how the table's cells are written.
        missing: what becomes of rows that miss a value which is not filled in: "error" or "drop".
        report: what became of the table that this was made from; not saved.
    """

    columns: tuple[Column, ...] = ()
    target: str = ""
    client: str | None = None
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0
    shape: tuple[int, ...] = ()
    image: tuple[str, int, int] | None = None
    format: CellFormat = PLAIN
    missing: str = "error"
    report: TableReport | None = field(default=None, compare=False, repr=False)

    def x(self, table: Any) -> NDArray[np.float32]:
        """The inputs of a table's rows; columns that were not used in training are ignored."""
        table = self._checked(table)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
            return np.concatenate([column.encode(table) for column in self.columns], axis=1).astype(np.float32)

    def _checked(self, given: Any) -> Table:
        """A table, or a data frame, with all columns that are needed, to be read as in training."""
        table = as_table(given).using(self.format)
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            raise DataError(
                f"{table.source} has no column {absent[0]!r}"
                + (f" (nor {', '.join(map(repr, absent[1:]))})" if absent[1:] else "")
                + f", which the model was trained on; it needs {', '.join(column.name for column in self.columns)}."
            )
        return table

    def usable(self, table: Any, labelled: bool = False) -> tuple[Table, list[str]]:
        """The rows that can be encoded, and what there is to say: rows left out, empty columns, unseen categories."""
        table, notes = self._checked(table), list(as_table(table).notes)
        if self.missing == "drop":
            needed = [column.name for column in self.columns if column.fill is None and column.kind != GAP]
            if labelled:
                needed += [name for name in (self.target, self.client or "") if name in table.columns]
            gaps = table.any_missing(needed)
            if gaps.any():
                notes.append(
                    f"{table.source}: {int(gaps.sum())} of {len(table)} rows are left out, since they miss a value "
                    f"({table.rows_text(gaps)})."
                )
                table = table.at(~gaps)
        for column in self.columns:
            if column.fill is not None and len(table) and table.missing(column.name).all():
                notes.append(
                    f"{table.source}: column {column.name!r} has no value in any of its {len(table)} rows; all are "
                    f"filled in with {column.written_fill(self.format)}, as missing values were in training."
                )
            if column.kind == NUMBER:
                notes += note_grouped(table, column.name)
            if column.kind == TEXT and column.unseen != REFUSE:
                codes, _ = column.codes(table)
                odd = codes == len(column.categories)
                if odd.any():
                    value = table.texts(column.name)[int(odd.argmax())] or column.fill
                    where = "its input for others" if column.unseen == OTHER else "zeros, as none of the known ones"
                    notes.append(
                        f"{table.source}: column {column.name!r} has values in {int(odd.sum())} of {len(table)} rows "
                        f"that have no input of their own ({value!r} in {table.rows_text(odd)}); they become {where}."
                    )
        return table, notes

    def y(self, given: Any) -> NDArray[Any]:
        """The labels of a table's rows as class indices, or the scaled targets of a regression."""
        table = as_table(given).using(self.format)
        missing = table.missing(self.target)
        if missing.any():
            advice = "there is nothing to compare the model with: fill them in, or leave these rows out"
            raise table.missing_error(self.target, missing, advice)
        if self.classes:
            return self.labels(table.strings(self.target), f"Column {self.target!r} of {table.source}")
        values, _ = table.numbers(self.target)
        scaled: NDArray[np.float32] = ((values - self.mean) / self.scale).astype(np.float32)
        return scaled

    def labels(self, texts: Sequence[str], where: str) -> Rows:
        """The class indices of labels; "1.0" and "1." are the label "1"."""
        known = {label: i for i, label in enumerate(self.classes)}
        known |= {re.sub(r"\.0*$", "", label): i for label, i in known.items()}
        found = [known.get(text, known.get(re.sub(r"\.0*$", "", text))) for text in texts]
        if None in found:
            unknown = texts[found.index(None)]
            raise DataError(f"{where} has the label {unknown!r}, which is unknown; {nearest(unknown, self.classes)}.")
        return np.array(found, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """The encoding as plain values, for JSON; of version 1 if that says all of it."""
        columns = [column.to_dict() for column in self.columns]
        values = {
            "columns": columns,
            "target": self.target,
            "client": self.client,
            "classes": list(self.classes),
            "mean": self.mean,
            "scale": self.scale,
            "shape": list(self.shape),
            "image": None if self.image is None else list(self.image),
        }
        later = {"unseen", "fill", "indicator"}
        plain = not any(later & column.keys() for column in columns) and all(c.kind != GAP for c in self.columns)
        if plain and self.format == PLAIN and self.missing == "error":
            return values
        return {"version": 2, **values, "format": self.format.to_dict(), "missing": self.missing}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """The inverse of ``to_dict``; raises a ValueError for values that it cannot have written."""
        version = values.get("version", 1)
        if version not in (1, 2):
            raise ValueError(f"it has the version {version!r}, but this one reads 1 and 2")
        described, image = _given(values, "columns", list), values.get("image")
        columns = tuple(_read_column(column, version) for column in described)
        format, missing = PLAIN, "error"
        if version == 2:
            format, missing = CellFormat.from_dict(_given(values, "format", Mapping)), _given(values, "missing", str)
            if missing not in ("error", "drop"):
                raise ValueError('its missing must be "error" or "drop"')
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
        classes = _read_texts(values, "classes")
        return cls(columns, target, client, classes, mean, scale, shape, image, format, missing)


def _given(values: Any, key: str, kind: Any) -> Any:
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


def _read_column(values: Any, version: int) -> Column:
    name, kind = _given(values, "name", str), _given(values, "kind", str)
    kinds = (NUMBER, FLAG, TEXT) if version == 1 else (NUMBER, FLAG, TEXT, GAP)
    if kind not in kinds:
        raise ValueError(f"its column {name[:60]!r} must be one of {', '.join(kinds)}")
    column = Column(name, kind, *_read_scaling(values), _read_texts(values, "categories"))
    if version == 1:
        return column
    unseen, fill, indicator = values.get("unseen", REFUSE), values.get("fill"), values.get("indicator", False)
    if unseen not in UNSEEN or not isinstance(indicator, bool):
        raise ValueError(f"its column {name[:60]!r} must treat unseen values as one of {', '.join(UNSEEN)}")
    is_number = isinstance(fill, int | float) and not isinstance(fill, bool) and math.isfinite(fill)
    if fill is not None and not (isinstance(fill, str) if kind == TEXT else is_number):
        raise ValueError(f"its column {name[:60]!r} must be filled with a {'text' if kind == TEXT else 'number'}")
    return replace(column, unseen=unseen, fill=fill, indicator=indicator)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MAX_INPUTS
