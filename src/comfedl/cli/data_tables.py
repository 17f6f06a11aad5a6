"""Tables of ``comfedl data describe`` on the columns and rows of a user's table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from comfedl.data.federated import FederatedData
from comfedl.data.table_report import TableReport

FEW_ROWS = 20
MOST_NAMED = 20


def columns(report: TableReport) -> Table:
    """Each column of a table: its type, its values, the share that is missing, and what became of it."""
    title = f"Columns of {report.source}, {report.rows} rows"
    table = _table(title, "column", "type", "values", "missing", "becomes")
    for column in report.columns:
        if not column.name.startswith(" "):  # added by the library, with the client's name from the file
            missing = f"{column.missing / report.rows:.1%}" if column.missing else "-"
            table.add_row(*map(escape, (column.name, column.kind, column.values, missing, column.fate)))
    return table


def dropped_rows(report: TableReport) -> Table:
    """The rows that each client loses because a value is missing."""
    table = _table("Rows left out because a value is missing", "client", "rows")
    for name, count in sorted(report.dropped.items(), key=lambda pair: (-pair[1], pair[0])):
        table.add_row(escape(name) or "(no client)", str(count))
    table.add_row("all", str(sum(report.dropped.values())))
    return table


def small_clients(fed: FederatedData) -> Iterator[str]:
    """A line for each reason why clients cannot be trained or judged well."""
    names, sizes = list(fed.names), fed.train.sizes.tolist()
    few = [f"{name} {size}" for name, size in zip(names, sizes, strict=True) if size < FEW_ROWS]
    yield from _line(f"Fewer than {FEW_ROWS} train rows", few)
    y = fed.train.head(1)[1]
    if isinstance(y, Tensor) and not y.is_floating_point() and y.ndim == 1:
        labels = [len(np.unique(fed.train.y_of(i).numpy())) for i in range(len(names))]
        yield from _line("One label only in train", [name for name, n in zip(names, labels, strict=True) if n == 1])
    for split in ("validation", "test"):
        part = fed.split(split)
        if part is not None:
            empty = [name for name, size in zip(names, part.sizes.tolist(), strict=True) if not size]
            yield from _line(f"No {split} rows, so not in its mean or worst client", empty)


def _line(what: str, found: Sequence[str]) -> Iterator[str]:
    if found:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        yield f"{what}: {', '.join(found[:MOST_NAMED])}{more}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
