"""Cells that are probably not what they were taken for: numbers or dates read as text, marks of missing values, ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.table import NUMBER, Table
from comfedl.utils.errors import DataError
from comfedl.utils.toml import toml_key

FEW_NUMBERS = 20  # so many distinct numbers may be categories, as grades are
FEW_ROWS = 8
FEW_GROUPED = 3  # so many distinct numbers with three digits behind the mark
FEWEST_IDS, DIFFERENT = 30, 0.95  # an identifier: whole numbers in so many rows, this share of them different
MARKS = (
    *("?", "-", "--", ".", "n/a", "n.a.", "N.A.", "NIL", "missing", "(null)", "k.A.", "k. A.", "kA"),
    *("#N/A", "#NV", "#VALUE!", "#WERT!", "#REF!", "#BEZUG!", "#DIV/0!", "#NAME?"),  # of spreadsheets
)
COMMA = re.compile(r"[+-]?(?:\d{1,3}(?:[.' \u00a0\u202f]\d{3})+|\d+),\d+")
GROUPED = re.compile(r"[+-]?\d{1,3}(?:([,.' \u00a0\u202f])\d{3})+(?:[.,]\d+)?")
DATES = {
    r"\d{4}-\d\d?-\d\d?([T ]\d\d?:\d\d.*)?": "iso",
    r"\d\d?\.\d\d?\.\d{4}": "%d.%m.%Y",
    r"\d\d?/\d\d?/\d{4}": "%d/%m/%Y",
    r"\d\d?\.\d\d?\.\d\d": "%d.%m.%y",
}


def note_marks(table: Table, name: str, taken_for: str) -> Iterator[str]:
    """Note cells that other programs write for a missing value."""
    values = table.column(name)
    for mark in MARKS:
        count = int((values == mark).sum())
        if count and mark not in table.format.marks(name):
            yield (
                f"{table.source}: {mark!r} is taken for {taken_for}, in {count} of {len(table)} rows; if it means a "
                f'missing value, set na_values = ["{mark}"].'
            )


def note_spellings(table: Table, name: str, what: str) -> Iterator[str]:
    """Note texts that are the same but for capitals, spaces or a final full stop."""
    spellings: dict[str, list[str]] = {}
    counts = _count(table, name)
    for text in sorted(counts):
        spellings.setdefault(" ".join(text.casefold().rstrip(".").split()), []).append(text)
    alike = [found for found in spellings.values() if len(found) > 1 and table.format.number(found[0]) is None]
    if alike:
        shown = " and ".join(f"{text!r} ({counts[text]} rows)" for text in alike[0])
        more = f", and {len(alike) - 1} more such group{'s' if len(alike) > 2 else ''}" if len(alike) > 1 else ""
        yield (
            f"Column {name!r} of {table.source} has {shown}{more}, each of which is a {what} of its own; if they mean "
            "the same, write them alike."
        )


def note_grouped(table: Table, name: str) -> Iterator[str]:
    """Note numbers whose decimal mark may be meant to separate thousands: it has three digits behind it everywhere."""
    mark, grouped = table.format.decimal, set[str]()
    if not table.untyped or name in table.format.dates:
        return
    pattern = re.compile(rf"[+-]?(?:[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})|\d{{1,3}})")
    for text, gap in zip(table.column(name).tolist(), table.missing(name), strict=True):
        found = None if gap else pattern.fullmatch(text)
        if found is None and not gap:
            return
        if found is not None and found.group(1):
            grouped.add(text)
    if len(grouped) >= FEW_GROUPED:
        other = "," if mark == "." else "."
        yield (
            f"Column {name!r} of {table.source}: {mark!r} is read as the decimal mark, {min(grouped)!r} as "
            f"{table.format.number(min(grouped)):g}, but three digits follow it in every cell that has it; if it "
            f'separates thousands, set thousands = "{mark}" and decimal = "{other}".'
        )


def note_identifier(table: Table, name: str, clients: NDArray[Any]) -> Iterator[str]:
    """Note whole numbers that look like an identifier: nearly all different, or counted up within each client."""
    kind, values, missing = table.cells(name)
    present, owners = values[~missing], clients[~missing]
    rows = len(present)
    if kind != NUMBER or name in table.format.dates or rows < FEWEST_IDS or bool((present != np.round(present)).any()):
        return
    mark = table.format.thousands
    if table.untyped and mark and any(mark in cell for cell in table.column(name).tolist()):
        return  # nobody groups the digits of an identifier
    distinct = len(np.unique(present))
    if distinct >= DIFFERENT * rows:
        what = f"{'all' if distinct == rows else f'{distinct} of'} {rows} values are different whole numbers"
    elif _counts_up(present, owners):
        what = "it counts the rows of each client"
    else:
        return
    yield (
        f"Column {name!r}: {what}, as of an identifier, but it is an input of the model; if it only names rows, leave "
        f'it out with drop = ["{name}"].'
    )


def _counts_up(values: NDArray[Any], owners: NDArray[Any]) -> bool:
    """Whether each client's values are consecutive whole numbers, in any order; clients have 5 rows on average."""
    places: dict[Any, int] = {}
    codes = np.array([places.setdefault(owner, len(places)) for owner in owners.tolist()])
    counts = np.bincount(codes)
    if len(values) < 5 * len(counts):
        return False
    low, high = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(low, codes, values)
    np.maximum.at(high, codes, values)
    pairs = np.unique(np.stack([codes, values]), axis=1).shape[1] if (high - low == counts - 1).all() else 0
    return pairs == len(values)


def at_clients(odd: NDArray[np.bool_], clients: NDArray[Any]) -> str:
    """The clients of the rows that are marked: "(north)", "(east, north, south and 4 more)"."""
    names = sorted({*clients[odd].tolist()})
    return f"({', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"


def refuse_mostly_numbers(table: Table, name: str, clients: NDArray[Any]) -> None:
    """Refuse a column of numbers with a few texts, or with decimal commas: each number would become a category."""
    counts, where = _count(table, name), f"Column {name!r} of {table.source}"
    numbers = {text for text in counts if table.format.number(text) is not None}
    commas = {text for text in counts.keys() - numbers if COMMA.fullmatch(text) or GROUPED.fullmatch(text)}
    present, like_numbers = counts.total(), sum(counts[text] for text in numbers | commas)
    if commas and 2 * like_numbers > present and _many(numbers | commas, like_numbers):
        raise DataError(f"{where} has {_comma_advice(commas, table)}")
    numeric = sum(counts[text] for text in numbers)
    if 0 < 2 * (present - numeric) < present and _many(numbers, numeric):
        texts, missing = np.array(table.texts(name), dtype=object), table.missing(name)
        odd = ~missing & np.array([text not in numbers for text in texts.tolist()], dtype=bool)
        first, rows = str(texts[odd][0]), f"{table.rows_text(odd)} {at_clients(odd, clients)}"
        shown = first if len(first) <= 60 else f"{first[:60]}..."
        raise DataError(
            f"{where} has numbers in {numeric} of {len(table)} rows, but {shown!r} in {rows}; if "
            f'it means a missing value, set na_values = ["{shown}"], with missing = "drop" or impute = "median"; else '
            "correct these cells, or leave the column out (drop)."
        )


def _count(table: Table, name: str) -> Counter[str]:
    """How often each text occurs in a column."""
    counts = Counter(table.texts(name))
    del counts[""]  # missing
    return counts


def _many(distinct: set[str], count: int) -> bool:
    """Whether numbers are too many to be categories."""
    return len(distinct) > FEW_NUMBERS or (count >= FEW_ROWS and 2 * len(distinct) > count)


def _comma_advice(commas: set[str], table: Table) -> str:
    decimal = [text for text in commas if COMMA.fullmatch(text)]
    groups = {found.group(1) for text in commas if (found := GROUPED.fullmatch(text))}
    if not decimal:
        mark = min(groups)
        return (
            f'thousands separators such as in {min(commas)!r}; set thousands = "{" " if mark.isspace() else mark}"'
            + (' and decimal = ","' if mark == "." else "")
            + ", or write plain numbers."
        )
    grouped = sorted({*groups} - {","})
    more = f' and thousands = "{" " if grouped[0].isspace() else grouped[0]}"' if grouped else ""
    if table.format.decimal == ",":
        return f"numbers such as {min(decimal)!r} that cannot be read; set{more.removeprefix(' and')}."
    either = (
        ' (or thousands = ",", if the comma groups thousands)'
        if all(GROUPED.fullmatch(text) for text in decimal)
        else ""
    )
    return f'decimal commas such as {min(decimal)!r}; set decimal = ","{more}{either}, or write numbers with a point.'


def refuse_dates(table: Table, name: str) -> None:
    """Refuse a column of dates: each would become a category."""
    counts = _count(table, name)
    for pattern, written in DATES.items():
        dates = [text for text in counts if re.fullmatch(pattern, text)]
        rows = sum(counts[text] for text in dates)
        if 2 * rows > counts.total() and _many({*dates}, rows):
            key, either = toml_key(name), ""
            if "/" in written:
                written, either = _month_or_day_first(dates)
            how = f'dates = ["{name}"]' if written == "iso" else f'dates = {{ {key} = "{written}" }}'
            raise DataError(
                f"Column {name!r} of {table.source} has dates such as {dates[0]!r}; read them as numbers of days "
                f"with {how}{either}, or leave the column out (drop)."
            )


def _month_or_day_first(dates: Sequence[str]) -> tuple[str, str]:
    """The format of dates such as 12/31/2024; and a remark where all of them can be read in two ways."""
    if any(int(date.split("/")[1]) > 12 for date in dates):
        return "%m/%d/%Y", ""
    unsure = all(int(date.split("/")[0]) <= 12 for date in dates)
    return "%d/%m/%Y", ' (or "%m/%d/%Y", if the month comes first)' if unsure else ""
