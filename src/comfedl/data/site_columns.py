"""What a run asks of the tables at its sites: their columns, what y is, and how rare a category may be.

The server's config says it, in [data] with name = "sites"; sites get it with the question for their summaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comfedl.data.cell_format import ISO, PLAIN, CellFormat, make_format
from comfedl.data.fit_table import MEAN, MEDIAN, MOST_FREQUENT, Rule
from comfedl.data.from_tables import FORMAT_KEYS, TASKS, Shares
from comfedl.data.table import FLAG, FLAGS, NUMBER, TEXT
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, nearest

CATEGORY, DATE = "category", "date"
KINDS = {"number": NUMBER, "flag": FLAG, CATEGORY: TEXT, DATE: NUMBER}
MOST_COLUMNS = 10_000
MIN_COUNT = 5
EXAMPLE = '[data.columns] with age = "number", ward = "category", blood = ["A", "B", "AB", "0"]'


@dataclass(frozen=True)
class SiteColumn:
    """An input column: its kind, the categories that sites may name (None: all), or the bounds of its numbers."""

    name: str
    kind: str
    categories: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    is_date: bool = False

    def may_name(self, text: str) -> bool:
        """Whether a site may name this category."""
        return text in FLAGS if self.kind == FLAG else self.categories is None or text in self.categories

    @classmethod
    def of(cls, name: str, given: Any) -> SiteColumn:
        """A column from its value in the config."""
        if isinstance(given, str):
            checks.one_of(f"data.columns.{name}", given, KINDS)
            return cls(name, KINDS[given], is_date=given == DATE)
        if isinstance(given, list) and given and all(isinstance(text, str) and text for text in given):
            if len({*given}) < len(given):
                raise ConfigError(f"data.columns.{name} names a category twice: {given!r}; remove one.")
            return cls(name, TEXT, categories=tuple(given))
        if (
            isinstance(given, list)
            and len(given) == 2
            and all(_is_number(end) for end in given)
            and given[0] < given[1]
        ):
            return cls(name, NUMBER, bounds=(float(given[0]), float(given[1])))
        raise ConfigError(
            f'data.columns.{name} is {given!r}, but it must be "number", "flag", "category", "date", a list of '
            "categories, or the least and the largest number, such as [0, 120]."
        )


@dataclass(frozen=True)
class TableSpec:
    """What is asked of every site's table; see ``of``."""

    columns: tuple[SiteColumn, ...]
    target: str
    task: str
    shares: Shares
    classes: tuple[str, ...] = ()
    client: str | None = None
    split: str | None = None
    scale: bool = True
    scale_target: bool = False
    missing: str = "error"
    rules: Mapping[str, Rule] = field(default_factory=dict)
    format: CellFormat = PLAIN
    min_count: int = MIN_COUNT

    @property
    def scales_target(self) -> bool:
        """Whether sites send the mean and variance of y."""
        return self.scale_target and not self.classes

    @classmethod
    def of(cls, options: Mapping[str, Any], seed: int, task: str) -> TableSpec:
        """Check the options of a table at sites, which are the keys of [data]."""
        given = {key: value for key, value in options.items() if value is not None}
        checks.one_of("task", task, TASKS)
        columns = given.get("columns")
        if not isinstance(columns, Mapping) or not 0 < len(columns) <= MOST_COLUMNS:
            raise ConfigError(f"data.columns is {columns!r}, but it must be a table of the input columns: {EXAMPLE}.")
        inputs = tuple(SiteColumn.of(str(name), value) for name, value in columns.items())
        target = given.get("target")
        if not isinstance(target, str) or not target:
            raise ConfigError('data.target is missing: name the column to predict, such as target = "ill".')
        shares = Shares(given.get("validation", 0.2), given.get("test", 0.2), seed)
        shares.check()
        for what in ("client", "split"):
            if not isinstance(given.get(what), str | None):
                raise ConfigError(f"data.{what} is {given[what]!r}, but it must be the name of a column.")
        roles = [("target", target), *((what, given[what]) for what in ("client", "split") if what in given)]
        for role, name in roles:
            if name in columns or [other for _, other in roles].count(name) > 1:
                raise ConfigError(f"Column {name!r} is {role} and has another role too; use different columns.")
        for what in ("scale", "scale_target"):
            if not isinstance(given.get(what, True), bool):
                raise ConfigError(f"data.{what} is {given[what]!r}, but it must be true or false.")
        missing = given.get("missing", "error")
        checks.one_of("data.missing", missing, ("error", "drop"))
        checks.at_least("data.min_count", given.get("min_count", MIN_COUNT), 1)
        dates = {column.name for column in inputs if column.is_date}
        written = given.get("dates") or {}
        written = written if isinstance(written, Mapping) else dict.fromkeys(written, ISO)
        odd = next((name for name in written if name not in dates), None)
        if odd is not None:
            raise ConfigError(f'data.dates names {odd!r}, which data.columns does not; add {odd} = "date" there.')
        format = make_format(
            **{key: given.get(key) for key in FORMAT_KEYS if key != "dates"},
            dates=dict.fromkeys(dates, ISO) | dict(written),
        )
        return cls(
            inputs,
            target,
            task,
            shares,
            _classes(given.get("classes"), task),
            given.get("client"),
            given.get("split"),
            given.get("scale", True),
            given.get("scale_target", False),
            missing,
            _rules(given.get("impute"), inputs, format),
            format,
            given.get("min_count", MIN_COUNT),
        )


def _classes(given: Any, task: str) -> tuple[str, ...]:
    """The labels in the order of the model's outputs."""
    if task == "regression":
        if given is not None:
            raise ConfigError(f"data.classes is {given!r}, but the loss is one of numbers; remove it.")
        return ()
    texts = given if isinstance(given, list) else []
    if len(texts) < 2 or len({*texts}) < len(texts) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"data.classes is {given!r}, but for tables at sites it must be the list of the labels as they are written "
            'there, such as ["no", "yes"].'
        )
    return tuple(texts)


def _rules(impute: Any, columns: tuple[SiteColumn, ...], format: CellFormat) -> dict[str, Rule]:
    """By column, the rule or constant that fills in missing values: numbers, or texts of categories."""
    if impute is None:
        return {}
    by_name = {column.name: column for column in columns}
    given = impute if isinstance(impute, Mapping) else dict.fromkeys(by_name, impute)
    found: dict[str, Rule] = {}
    for name, rule in given.items():
        if name not in by_name:
            raise ConfigError(f"data.impute.{name} is no input column; {nearest(str(name), by_name)}.")
        column, where = by_name[name], f"data.impute.{name} is {rule!r}"
        if not isinstance(rule, str | bool | int | float):
            raise ConfigError(f'{where}, but it must be "mean", "most-frequent" or a constant.')
        if column.kind == NUMBER and rule in (MEDIAN, MOST_FREQUENT):
            raise ConfigError(
                f"{where}, but it does not follow from the counts, means and variances that sites send of numbers; "
                'give "mean" or a constant.'
            )
        if column.kind == FLAG and rule not in (MEDIAN, MEAN, MOST_FREQUENT):
            rule = str(rule).casefold()
            if rule not in FLAGS:
                raise ConfigError(f'{where}, but the column has true or false; give "most-frequent" or one of these.')
        elif column.kind == NUMBER and rule != MEAN:
            number = rule
            if isinstance(rule, str):
                number = format.days(name, rule) if column.is_date else format.number(rule)  # type: ignore[assignment]
            if isinstance(number, bool) or not _is_number(number):
                raise ConfigError(f'{where}, but the column has numbers or dates; give "mean" or one of these.')
            rule = float(number)
        found[name] = rule
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
