"""How the cells of a table are written: missing values, decimal and thousands separators, dates, the header.

It is part of a run's encoding, so that new rows are read as those of training were.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any

from comfedl.utils.errors import ConfigError

MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"})
"""The cells of a text file that mean a missing value."""
ISO = "iso"
EPOCH = datetime(1970, 1, 1)
EVERY = ""  # the key of what holds for every column, which no column has as its name
MOST_NAMES, LONGEST_FORMAT = 100_000, 60
THOUSANDS = {".": r"\.", ",": ",", "'": "['\u2019]", " ": "[ \u00a0\u202f]", "_": "_"}


@dataclass(frozen=True)
class CellFormat:
    """How cells are read.

    Attributes:
        na_values: by column, or under "" for every column, the cells that mean a missing value beside the usual ones.
        decimal, thousands: the separators within a number; an empty ``thousands`` means none.
        dates: by column, the format of its dates as ``strptime`` takes it, or "iso". They become days since 1970.
        header: whether the first line holds the column names; or the names of a file without them; None decides.
        encoding: the text encoding of a file without a byte order mark.
    """

    na_values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decimal: str = "."
    thousands: str = ""
    dates: Mapping[str, str] = field(default_factory=dict)
    header: bool | tuple[str, ...] | None = None
    encoding: str = "utf-8"

    def marks(self, column: str) -> frozenset[str]:
        """The cells of a column that are named as missing."""
        return frozenset((*self.na_values.get(EVERY, ()), *self.na_values.get(column, ())))

    def missing_numbers(self, column: str) -> frozenset[float]:
        """The numbers among them: -999 also means the cell -999.0."""
        return frozenset(number for mark in self.marks(column) if (number := _plain_number(mark)) is not None)

    def number(self, text: str) -> float | None:
        """A cell as a number; None if it is none."""
        if self.decimal == "." and not self.thousands:
            return _plain_number(text)
        if not self._pattern.fullmatch(text):
            return None
        kept = re.sub(THOUSANDS[self.thousands], "", text) if self.thousands else text
        return _plain_number(kept.replace(self.decimal, "."))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        grouped = rf"\d{{1,3}}(?:{THOUSANDS[self.thousands]}\d{{3}})+|" if self.thousands else ""
        return re.compile(rf"[+-]?(?:{grouped}\d*)(?:{re.escape(self.decimal)}\d*)?(?:[eE][+-]?\d+)?")

    def days(self, column: str, value: Any) -> float | None:
        """A date as days since 1970-01-01, in UTC if it has a zone; None if it is none."""
        written = self.dates[column]
        try:
            if not isinstance(value, datetime):
                value = _parse_date(str(value), ISO if isinstance(value, date) else written)
            when: datetime = value
            when = when if when.tzinfo is None else when.astimezone(UTC).replace(tzinfo=None)
            return (when - EPOCH) / timedelta(days=1)
        except (ValueError, OverflowError):
            return None

    def shown(self, column: str, number: float) -> str:
        """A number as a message shows it: in a column of dates as a date."""
        if column not in self.dates:
            return f"{number:.6g}"
        try:
            return f"{EPOCH + timedelta(days=number):%Y-%m-%d}"
        except OverflowError:
            return f"{number:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """The values that are not the default, for JSON."""
        values = {
            "na_values": {name: list(marks) for name, marks in self.na_values.items()},
            "decimal": self.decimal,
            "thousands": self.thousands,
            "dates": dict(self.dates),
            "header": list(self.header) if isinstance(self.header, tuple) else self.header,
            "encoding": self.encoding,
        }
        default: dict[str, Any] = {"decimal": ".", "encoding": "utf-8"}
        return {key: value for key, value in values.items() if value not in (default.get(key), None, {}, "")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellFormat:
        """The inverse of ``to_dict``; raises a ValueError for values that it cannot have written."""
        if not values.keys() <= {"na_values", "decimal", "thousands", "dates", "header", "encoding"}:
            raise ValueError("its format has an unknown key")
        try:
            return make_format(**values)
        except ConfigError as error:
            raise ValueError(f"its format is wrong: {error}") from None


PLAIN = CellFormat()


def make_format(
    na_values: Any = None,
    decimal: Any = None,
    thousands: Any = None,
    dates: Any = None,
    header: Any = None,
    encoding: Any = None,
) -> CellFormat:
    """Check what a user gives and turn it into a ``CellFormat``; None stands for the default."""
    decimal = "." if decimal is None else decimal
    if decimal not in (".", ","):
        raise ConfigError(f'decimal is {decimal!r}, but it must be "." or ",".')
    thousands = "" if thousands is None else thousands
    if not isinstance(thousands, str) or (thousands and thousands not in THOUSANDS) or thousands == decimal:
        allowed = ", ".join(f'"{mark}"' for mark in THOUSANDS if mark != decimal)
        raise ConfigError(f'thousands is {thousands!r}, but with decimal = "{decimal}" it must be one of {allowed}.')
    return CellFormat(
        _check_na_values(na_values),
        decimal,
        thousands,
        _check_dates(dates),
        _check_header(header),
        _check_encoding(encoding),
    )


def _check_na_values(given: Any) -> dict[str, tuple[str, ...]]:
    by_column = given if isinstance(given, Mapping) else {} if given is None else {EVERY: given}
    found = {}
    for name, marks in by_column.items():
        marks = [marks] if isinstance(marks, str | int | float) else marks
        plain = isinstance(marks, list | tuple | set | frozenset) and len(marks) <= MOST_NAMES
        if not plain or any(isinstance(mark, bool) or not isinstance(mark, str | int | float) for mark in marks):
            raise ConfigError(
                f"na_values is {given!r}, but it must be a list of the cells that mean a missing value, such as "
                '["?", "-", -999], or a table of such lists by column.'
            )
        found[_column_name("na_values", name)] = tuple(dict.fromkeys(_mark(mark) for mark in marks))
    return {name: marks for name, marks in found.items() if marks}


def _check_dates(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    by_column = given if isinstance(given, Mapping) else dict.fromkeys(_names("dates", given), ISO)
    for name, written in by_column.items():
        _column_name("dates", name)
        if not isinstance(written, str) or len(written) > LONGEST_FORMAT or not _is_date_format(written):
            raise ConfigError(
                f'dates.{name} is {written!r}, but it must be "iso" (2024-12-31), or a format of strptime with day, '
                'month and year such as "%d.%m.%Y".'
            )
    return dict(by_column)


def _check_header(given: Any) -> bool | tuple[str, ...] | None:
    if given is None or isinstance(given, bool):
        return given
    names = tuple(_names("header", given))
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if not names or twice is not None or "" in names:
        raise ConfigError(f"header is {given!r}, but its names must be distinct and not empty.")
    return names


def _check_encoding(given: Any) -> str:
    if given is None:
        return "utf-8"
    try:
        if not isinstance(given, str) or "\0" in given or not given.isascii() or not "a".encode(given).decode(given):
            raise LookupError
        return codecs.lookup(given).name
    except (LookupError, UnicodeError, ValueError, TypeError):
        raise ConfigError(
            f'encoding is {given!r}, but it must be the name of a text encoding, such as "utf-8", "latin-1", "cp1252".'
        ) from None


def _names(what: str, given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Iterable) or isinstance(given, Mapping):
        more = ", true or false" if what == "header" else ""
        raise ConfigError(f"{what} is {given!r}, but it must be a list of column names{more}.")
    names = list(given)
    if len(names) > MOST_NAMES:
        raise ConfigError(f"{what} has {len(names):,} names, more than {MOST_NAMES:,}.")
    return [_column_name(what, name) for name in names]


def _column_name(what: str, name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{what} has {name!r}, but it must be the name of a column.")
    return name


def _mark(value: str | float) -> str:
    return value if isinstance(value, str) else repr(value)


def _plain_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _parse_date(text: str, written: str) -> datetime:
    return datetime.fromisoformat(text) if written == ISO else datetime.strptime(text, written)


def _is_date_format(written: str) -> bool:
    """Whether a date survives being written and read; the day, the month and the year must be in it."""
    if written == ISO:
        return True
    when = datetime(2021, 12, 27, tzinfo=UTC)
    try:
        return datetime.strptime(when.strftime(written), written).date() == when.date()
    except Exception:  # strptime makes a regular expression of it, which may be none
        return False
