"""A table at a site: what it says of itself, and how it becomes the data of the site's one client.

The site has the last word on what it says: its own ``min_count`` may be above the server's, and ``categories`` may be
"listed" (only those that the server's config lists) or "none".
"""

from __future__ import annotations

import logging
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.cell_format import ISO, make_format
from comfedl.data.federated import FederatedData
from comfedl.data.fit_table import TaskOptions
from comfedl.data.from_tables import (
    FORMAT_KEYS,
    by_split,
    encoded,
    from_batches,
    split_of_rows,
    user_path,
    with_values,
)
from comfedl.data.site_columns import SiteColumn, TableSpec
from comfedl.data.site_summary import LONGEST_TEXT, MOST_NAMED, Categories, Numbers, Summary
from comfedl.data.table import FLAG, NUMBER, Table
from comfedl.data.table_files import read_table
from comfedl.data.tabular import Encoding
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, DataError, nearest

logger = logging.getLogger("comfedl")

ALL, LISTED, NONE = "all", "listed", "none"
NAMING = (ALL, LISTED, NONE)
OWN = ""  # the column of the client's name, which no file has
KEYS = (*FORMAT_KEYS, "min_count", "categories", "rename")


@dataclass(frozen=True)
class SiteTable:
    """A site's file, and how the site wants it to be read and spoken of.

    Args:
        name: the site's name.
        path: its CSV, Parquet or Arrow file.
        options: ``na_values``, ``decimal``, ``thousands``, ``dates``, ``header`` and ``encoding`` of this file, each
            instead of the server's; ``rename``, from the file's column names to the server's; ``min_count`` and
            ``categories``.
    """

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> SiteTable:
        """A site's table from its ``--node-config``: ``site``, ``table`` and, if need be, ``settings`` or its keys."""
        for key in ("site", "table"):
            if not isinstance(node.get(key), str) or not node[key]:
                raise ConfigError(
                    f"The node config lacks {key}; start the SuperNode with --node-config '{key}=\"...\"'."
                )
        options: dict[str, Any] = {}
        if "settings" in node:
            path = user_path(node["settings"])
            try:
                options = tomllib.loads(path.read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise DataError(f"The site's settings {path} cannot be read ({error}); give a TOML file.") from None
            for key in options.keys() - {*KEYS}:
                raise ConfigError(f"{key} is no key of a site's settings; {nearest(key, KEYS)}.")
        options |= {key: node[key] for key in KEYS if key in node}
        if isinstance(options.get("na_values"), str):  # a node config has no lists
            options["na_values"] = options["na_values"].split()
        checks.one_of("categories", options.get("categories", ALL), NAMING)
        checks.at_least("min_count", options.get("min_count", 1), 1)
        rename = options.get("rename", {})
        if not isinstance(rename, Mapping) or not all(isinstance(name, str) for name in rename.values()):
            raise ConfigError(f'rename is {rename!r}, but it must be a table such as {{ alter = "age" }}.')
        return cls(node["site"], user_path(node["table"]), options)

    def rows(self, spec: TableSpec) -> SiteRows:
        """The rows that can be used, read as this site writes them."""
        written = {key: self.options[key] for key in FORMAT_KEYS if key in self.options}
        own_dates = written.pop("dates", {})
        own_dates = own_dates if isinstance(own_dates, Mapping) else dict.fromkeys(own_dates, ISO)
        own = make_format(**written, dates={**spec.format.dates, **own_dates})
        format = replace(spec.format, dates=own.dates, **{key: getattr(own, key) for key in written})
        table = read_table(self.path, format)
        rename = self.options.get("rename", {})
        unknown = next((name for name in rename if name not in table.columns), None)
        if unknown is not None:
            raise DataError(
                f"rename names {unknown!r}, which {table.source} does not have; {nearest(unknown, table.columns)}."
            )
        columns = {rename.get(name, name): values for name, values in table.columns.items()}
        if len(columns) < len(table.columns):
            raise DataError(f"rename gives two columns of {table.source} one name; correct it.")
        needed = [column.name for column in spec.columns] + [spec.target] + ([spec.split] if spec.split else [])
        for name in needed:
            if name not in columns:
                raise DataError(f"{table.source} has no column {name!r}; {nearest(name, columns)}.")
        kept: dict[str, NDArray[Any]] = {name: columns[name] for name in needed}
        kept[OWN] = np.full(len(table), self.name, dtype=object)
        table = replace(table, columns=kept, added=table.added | {OWN})
        options = TaskOptions(spec.target, OWN, spec.task, missing=spec.missing)
        required = [column.name for column in spec.columns if column.name not in spec.rules]
        used, _ = with_values(table, options, spec.split, required)
        names = np.full(len(used), self.name, dtype=object)
        splits = split_of_rows(used, names, spec.target, spec.shares, spec.split, spec.task)
        return SiteRows(self, spec, used, names, splits)


@dataclass(frozen=True)
class SiteRows:
    """The usable rows of a site's table, and the split of each."""

    site: SiteTable
    spec: TableSpec
    table: Table
    names: NDArray[Any]
    splits: NDArray[Any]

    @cached_property
    def train(self) -> NDArray[np.bool_]:
        return np.asarray(self.splits == "train", dtype=bool)

    @property
    def samples(self) -> int:
        """The number of train rows."""
        return int(self.train.sum())

    def federated(self, encoding: Encoding) -> FederatedData:
        """The site's data, encoded as those of all sites."""
        same = replace(encoding, format=self.table.format)
        return from_batches(by_split(*encoded(same, self.table), self.names, self.splits), encoding)

    def summary(self) -> Summary:
        """What the site says of its train rows: nothing of fewer than ``min_count``."""
        if not self.samples:
            raise DataError(f"{self.table.source} has no row for training; give more rows, or hold out fewer.")
        self._check_target()
        columns = {
            column.name: self._numbers(column) if column.kind == NUMBER else self._categories(column)
            for column in self.spec.columns
        }
        target = None
        if self.spec.scales_target:
            values, _ = self.table.numbers(self.spec.target)
            target = self._said(values[self.train], 0)
        return Summary(self.samples, columns, target)

    @property
    def least(self) -> int:
        """The fewest rows that the site speaks of."""
        return max(self.spec.min_count, int(self.site.options.get("min_count", 1)))

    def _check_target(self) -> None:
        """Refuse labels that the server does not know, and texts where y must be a number, before training."""
        asked = Encoding(target=self.spec.target, classes=self.spec.classes, format=self.table.format)
        asked.y(self.table)

    def _enough(self, count: int) -> int:
        return count if count >= self.least else 0

    def _said(self, values: NDArray[np.float64], missing: int) -> Numbers:
        return Numbers.of(values if len(values) >= self.least else values[:0], self._enough(missing))

    def _gaps(self, name: str) -> NDArray[np.bool_]:
        missing = self.table.missing(name)
        if missing.any() and name not in self.spec.rules:
            raise self.table.missing_error(
                name, missing, "the server's config fills in (impute) or drops (missing) them"
            )
        return missing

    def _numbers(self, column: SiteColumn) -> Numbers:
        missing = self._gaps(column.name)
        values, _ = self.table.numbers(column.name)
        where = f"Column {column.name!r} of {self.table.source}"
        if not np.isfinite(values).all():
            raise DataError(f"{where} has infinite values; replace them, or name them as missing with na_values.")
        if column.bounds is not None:
            low, high = column.bounds
            odd = ~missing & ((values < low) | (values > high))
            if odd.any():
                raise DataError(
                    f"{where} has {values[odd][0]:g} in {self.table.rows_text(odd)}, but the server's config says that "
                    f"it is from {low:g} to {high:g}; correct these rows, or the bounds."
                )
        return self._said(values[self.train & ~missing], int(missing[self.train].sum()))

    def _categories(self, column: SiteColumn) -> Categories:
        missing = self._gaps(column.name)
        gaps = self._enough(int(missing[self.train].sum()))
        rows = self.train & ~missing
        if column.kind == FLAG:
            values, _ = self.table.numbers(column.name)
            odd = ~missing & (values != 0) & (values != 1)
            if odd.any():
                raise DataError(
                    f"Column {column.name!r} of {self.table.source} has {values[odd][0]:g} in "
                    f"{self.table.rows_text(odd)}, but the server's config says that it has true or false."
                )
            found = Counter("true" if value else "false" for value in values[rows].tolist())
        else:
            texts = np.array(self.table.texts(column.name), dtype=object)
            found = Counter(texts[rows].tolist())
        naming = self.site.options.get("categories", ALL)
        named = {
            text: count
            for text, count in sorted(found.items())
            if count >= self.least
            and column.may_name(text)
            and (column.kind == FLAG or naming == ALL or (naming == LISTED and column.categories is not None))
            and len(text) <= LONGEST_TEXT
            and text.isprintable()
        }
        if len(named) > MOST_NAMED:
            raise DataError(
                f"Column {column.name!r} of {self.table.source} has {len(named)} categories of {self.least} rows or "
                f"more, above {MOST_NAMED}; list those that matter in the server's config, or take the column out."
            )
        return Categories(named, len(named) < len(found), gaps)


def told(summary: Summary) -> str:
    """A summary in words, for the site's log."""
    parts = []
    for name, part in summary.columns.items():
        if isinstance(part, Numbers):
            shown = f"count {part.count}, mean {part.mean:.6g}, variance {part.variance:.6g}"
        else:
            shown = ", ".join(f"{text!r} {count}" for text, count in part.counts.items()) or "no category"
            shown += ", others" if part.others else ""
        parts.append(f"{name}: {shown}" + (f", {part.missing} missing" if part.missing else ""))
    if summary.target is not None:
        parts.append(f"y: mean {summary.target.mean:.6g}, variance {summary.target.variance:.6g}")
    return f"{summary.rows} rows; {'; '.join(parts)}"
