"""What became of a table: its columns, and the rows that were left out. Shown by ``comfedl data describe``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnReport:
    """A column of the user's table: its type, its values, how many are missing, and what became of it."""

    name: str
    kind: str
    values: str
    missing: int
    fate: str


@dataclass(frozen=True)
class TableReport:
    """A user's table.

    Attributes:
        source: the file.
        rows: the number of its rows.
        columns: its columns, as they are in the file.
        dropped: by client, the number of rows that were left out because a value is missing.
        notes: what a user should know without asking, one sentence each.
    """

    source: str
    rows: int
    columns: tuple[ColumnReport, ...]
    dropped: dict[str, int]
    notes: tuple[str, ...]
