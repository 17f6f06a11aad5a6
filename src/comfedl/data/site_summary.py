"""What a site says of its table, and the one encoding that follows from what all sites say.

Counts, means and variances add up: from those of the sites follow those of the joined table, and so, with the rules of
``fit_column``, the encoding that the joined table would have. Means and variances stand for sums and sums of squares,
which say the same but lose digits. The server trusts none of it: ``read_summary`` checks every number, and
``find_absurd`` compares the sites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.fit_column import Filling, Fitted, most_frequent, number_column, text_column
from comfedl.data.fit_table import RULES
from comfedl.data.site_columns import SiteColumn, TableSpec
from comfedl.data.table import FLAG, FLAGS, NUMBER, to_string
from comfedl.data.tabular import Encoding
from comfedl.utils.errors import DataError, MalformedMessage
from comfedl.utils.read_back import is_whole

LONGEST_TEXT = 200  # characters of a category
MOST_NAMED = 1000  # categories of a column that a site may name
MOST_ROWS = 10**9
LARGEST = 1e150  # a mean; its square is still a number
ABSURD = 1000.0  # times what is usual among the sites
TARGET = "y"


@dataclass(frozen=True)
class Numbers:
    """A column of numbers in a site's train rows: how many there are, their mean and variance.

    ``constant`` is their common value, None if they differ; ``missing`` is the number of rows without a value.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    constant: float | None = None
    missing: int = 0

    @classmethod
    def of(cls, values: NDArray[np.float64], missing: int = 0) -> Numbers:
        if not len(values):
            return cls(missing=missing)
        same = bool(values.min() == values.max())
        with np.errstate(over="ignore", invalid="ignore"):
            mean, variance = float(values.mean()), float(values.var())
        return cls(len(values), mean, 0.0 if same else variance, float(values[0]) if same else None, missing)


@dataclass(frozen=True)
class Categories:
    """A column of texts or flags in a site's train rows: how often each category that the site names occurs.

    ``others`` says whether rows have categories that it does not name.
    """

    counts: Mapping[str, int]
    others: bool = False
    missing: int = 0


@dataclass(frozen=True)
class Summary:
    """What a site says of its train rows, by column; ``target`` are the numbers of a regression that are scaled."""

    rows: int
    columns: Mapping[str, Numbers | Categories]
    target: Numbers | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {name: asdict(column) for name, column in self.columns.items()}
        return {"rows": self.rows, "columns": found, TARGET: None if self.target is None else asdict(self.target)}


def read_summary(given: object, spec: TableSpec, samples: int) -> Summary:
    """A site's summary from JSON.

    Args:
        given: what the site sent, which may be anything.
        spec: what was asked for.
        samples: the most train rows that the site can have.

    Raises:
        MalformedMessage: what is wrong with it.
    """
    if not isinstance(given, dict) or not isinstance(given.get("columns"), dict):
        raise MalformedMessage("its summary is no object with columns")
    rows, columns = given.get("rows"), given["columns"]
    if not is_whole(rows, 1, min(samples, MOST_ROWS)):
        raise MalformedMessage(f"its summary must be of 1 to {samples} rows")
    if columns.keys() != {column.name for column in spec.columns}:
        raise MalformedMessage("its summary has other columns than were asked for")
    assert isinstance(rows, int)
    found: dict[str, Numbers | Categories] = {}
    for column in spec.columns:
        where, said = f"its summary of column {column.name!r}", columns[column.name]
        found[column.name] = (
            _read_numbers(where, said, rows, column)
            if column.kind == NUMBER
            else _read_categories(where, said, rows, column)
        )
    target = _read_numbers("its summary of y", given.get(TARGET), rows, None) if spec.scales_target else None
    return Summary(rows, found, target)


def _read_numbers(where: str, said: object, rows: int, column: SiteColumn | None) -> Numbers:
    if not isinstance(said, dict) or said.keys() != asdict(Numbers()).keys():
        raise MalformedMessage(f"{where} is not count, mean, variance, constant and missing")
    count, missing, constant = said["count"], said["missing"], said["constant"]
    if not is_whole(count, 0, rows) or not is_whole(missing, 0, rows) or count + missing > rows:
        raise MalformedMessage(f"{where} has more values than rows, or fewer than none")
    mean, variance = _finite(where, said["mean"]), _finite(where, said["variance"])
    if abs(mean) > LARGEST or not 0 <= variance <= LARGEST**2:
        raise MalformedMessage(f"{where} has numbers that are too large, or a variance below 0")
    if constant is not None:
        constant = _finite(where, constant)
        if not math.isclose(constant, mean, rel_tol=1e-9, abs_tol=1e-300) or variance:
            raise MalformedMessage(f"{where} says that all its values are the same, and then that they are not")
    low, high = (None, None) if column is None or column.bounds is None else column.bounds
    if count and low is not None and high is not None:
        slack = 1e-9 * max(abs(low), abs(high), high - low)
        widest = max(0.0, (mean - low) * (high - mean))  # Bhatia and Davis: the most that such a mean leaves
        if not low - slack <= mean <= high + slack or variance > widest + slack * (high - low):
            raise MalformedMessage(f"{where} is not of values from {low:g} to {high:g}")
    return Numbers(count, mean, variance, constant, missing)


def _read_categories(where: str, said: object, rows: int, column: SiteColumn) -> Categories:
    if not isinstance(said, dict) or said.keys() != {"counts", "others", "missing"}:
        raise MalformedMessage(f"{where} is not counts, others and missing")
    counts, others, missing = said["counts"], said["others"], said["missing"]
    if not isinstance(counts, dict) or len(counts) > MOST_NAMED or not isinstance(others, bool):
        raise MalformedMessage(f"{where} names more than {MOST_NAMED} categories, or nothing of the kind")
    for text, count in counts.items():
        if not 0 < len(text) <= LONGEST_TEXT or not text.isprintable() or not is_whole(count, 1, rows):
            raise MalformedMessage(f"{where} has the category {text[:60]!r}, or a count of it, that cannot be")
        if not column.may_name(text):
            raise MalformedMessage(f"{where} names {text[:60]!r}, which was not asked for")
    if not is_whole(missing, 0, rows) or sum(counts.values()) + missing > rows:
        raise MalformedMessage(f"{where} has more values than rows")
    return Categories(counts, others, missing)


def _finite(where: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise MalformedMessage(f"{where} has something else than finite numbers")
    return float(given)


def find_absurd(summaries: Mapping[str, Summary]) -> dict[str, str]:
    """Sites whose numbers are a thousand times as far away, or as wide, as is usual: by name, why. Of two, none is."""
    found: dict[str, str] = {}
    names = [*next(iter(summaries.values())).columns] if summaries else []
    for column in [*names, None]:
        parts = {
            site: numbers
            for site, summary in summaries.items()
            if isinstance(numbers := summary.target if column is None else summary.columns[column], Numbers)
            and numbers.count
        }
        if len(parts) < 3:
            continue
        centre = median(part.mean for part in parts.values())
        width = median(abs(part.mean - centre) for part in parts.values())
        width += median(math.sqrt(part.variance) for part in parts.values())
        width = width or max(abs(centre), 1.0)  # they are all the same
        for site, part in parts.items():
            if max(abs(part.mean - centre), math.sqrt(part.variance)) > ABSURD * width:
                what = "y" if column is None else f"column {column!r}"
                found.setdefault(site, f"its {what} has the mean {part.mean:.6g} and the standard deviation "
                                 f"{math.sqrt(part.variance):.6g}, a thousand times what other sites have")  # fmt: skip
    return found


def weighted(summary: Summary, share: float) -> Summary:
    """The summary of a site that counts for less than the rows that it says it has: its numbers weigh as much less."""
    if share >= 1:
        return summary

    def fewer(count: int) -> int:
        return max(1, round(share * count)) if count else 0

    def lighter(part: Numbers) -> Numbers:
        return replace(part, count=fewer(part.count), missing=fewer(part.missing))

    columns = {
        name: lighter(part)
        if isinstance(part, Numbers)
        else replace(
            part, counts={text: fewer(count) for text, count in part.counts.items()}, missing=fewer(part.missing)
        )
        for name, part in summary.columns.items()
    }
    return Summary(fewer(summary.rows), columns, None if summary.target is None else lighter(summary.target))


def encoding_from(summaries: Sequence[Summary], spec: TableSpec) -> tuple[Encoding, dict[str, Fitted]]:
    """The encoding of the joined table, from the summaries of its sites; also what became of each input column.

    >>> asked = {"columns": {"age": "number"}, "target": "ill", "classes": ["no", "yes"]}
    >>> spec = TableSpec.of(asked, 0, "classification")
    >>> sites = [Numbers.of(np.array(ages)) for ages in ([20.0, 30.0], [40.0])]
    >>> encoding, _ = encoding_from([Summary(part.count, {"age": part}) for part in sites], spec)
    >>> encoding.columns[0].mean
    30.0
    """
    fitted: dict[str, Fitted] = {}
    for column in spec.columns:
        parts = [summary.columns[column.name] for summary in summaries]
        if column.kind == NUMBER:
            fitted[column.name] = _fit_numbers(column, [part for part in parts if isinstance(part, Numbers)], spec)
        else:
            fitted[column.name] = _fit_categories(
                column, [part for part in parts if isinstance(part, Categories)], spec
            )
    columns = tuple(found.column for found in fitted.values() if found.column is not None)
    if not columns:
        reasons = "; ".join(f"{name}: {found.fate}" for name, found in list(fitted.items())[:5])
        raise DataError(f"The sites' tables have no input column that differs among their train rows ({reasons}).")
    mean, std = 0.0, 1.0
    if spec.scales_target:
        _, mean, std, _ = merged([summary.target for summary in summaries if summary.target is not None])
    shape = (sum(len(column.names) for column in columns),)
    encoding = Encoding(columns, spec.target, spec.client, spec.classes, mean, std or 1.0, shape)
    return replace(encoding, format=spec.format, missing=spec.missing), fitted


def merged(parts: Sequence[Numbers]) -> tuple[int, float, float, float | None]:
    """The count, mean, standard deviation and common value of the values of all parts together."""
    parts = [part for part in parts if part.count]
    if not parts:
        return 0, 0.0, 1.0, None
    if len(parts) == 1:
        part = parts[0]
        return part.count, part.mean, math.sqrt(part.variance), part.constant
    count = sum(part.count for part in parts)
    mean = math.fsum(part.count * part.mean for part in parts) / count
    variance = math.fsum(part.count * (part.variance + (part.mean - mean) ** 2) for part in parts) / count
    values = {part.constant for part in parts}
    return count, mean, math.sqrt(variance), values.pop() if len(values) == 1 else None


def _fit_numbers(column: SiteColumn, parts: Sequence[Numbers], spec: TableSpec) -> Fitted:
    count, mean, _, _ = merged(parts)
    missing, rule = sum(part.missing for part in parts), spec.rules.get(column.name)
    fill = None if rule is None else (mean if count else None) if isinstance(rule, str) else float(rule)
    gaps = Numbers(missing, fill or 0.0, 0.0, fill) if missing and fill is not None else Numbers()
    total, mean, std, constant = merged([*parts, gaps])
    if not total or (fill is None and missing):
        constant = math.nan
    scaling = (mean, std if std > 0 else 1.0) if spec.scale else None
    return number_column(column.name, NUMBER, constant, scaling, Filling(fill, missing, bool(missing and count)))


def _fit_categories(column: SiteColumn, parts: Sequence[Categories], spec: TableSpec) -> Fitted:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.counts)
    missing, others, rule = (
        sum(part.missing for part in parts),
        any(part.others for part in parts),
        spec.rules.get(column.name),
    )
    fill = None if rule is None else most_frequent(counts) if rule in RULES else to_string(rule)
    indicator = bool(missing and (counts or others))
    if column.kind == FLAG:
        values = {FLAGS[text] for text in counts} | ({FLAGS[fill]} if fill is not None and missing else set())
        constant = None if len(values) > 1 else next(iter(values), math.nan)
        number = None if fill is None else FLAGS[fill]
        return number_column(column.name, FLAG, constant, None, Filling(number, missing, indicator))
    owners: Counter[str] = Counter()
    for part in parts:
        owners.update({*part.counts, *([fill] if fill is not None and part.missing else [])})
    return text_column(
        column.name, "the sites' tables", owners, len(parts) > 1, Filling(fill, missing, indicator), others
    )
