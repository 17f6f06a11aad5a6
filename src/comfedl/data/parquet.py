"""Tables in Parquet files: read column by column to fit an encoding, and then by row groups, client by client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.data.cell_format import CellFormat
from comfedl.data.sources import IntArray, Source
from comfedl.data.split import Batch
from comfedl.data.stored_array import FileState
from comfedl.data.table import Cells, Rows, Table
from comfedl.data.table_files import PARQUET, check_columns, opened_parquet, to_numpy
from comfedl.data.tabular import Encoding
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples


class ParquetColumns(Mapping[str, NDArray[Any]]):
    """The columns of Parquet files, one file's rows after another's; a column is read when it is asked for.

    ``added`` are columns that no file has, ``chosen`` the rows that count; None is all of them.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [FileState.of(file) for file in files]
        self.added: dict[str, NDArray[Any]] = {}
        self._chosen: Rows | None = None
        self.rows_of_file: list[int] = []
        starts, self._groups = [0], list[tuple[int, int]]()
        for k, file in enumerate(files):
            with opened_parquet(file) as parquet:
                names = list(parquet.schema_arrow.names)
                check_columns(file, names, parquet.metadata.num_rows)
                if k == 0:
                    self.names = names
                elif {*names} != {*self.names}:
                    odd = sorted({*names} ^ {*self.names})[0]
                    raise DataError(f"{file} and {files[0]} differ in the column {odd!r}; give all the same columns.")
                self.rows_of_file.append(parquet.metadata.num_rows)
                for group in range(parquet.metadata.num_row_groups):
                    self._groups.append((k, group))
                    starts.append(starts[-1] + parquet.metadata.row_group(group).num_rows)
        self._starts = np.array(starts, dtype=np.int64)
        self._latest: tuple[str, NDArray[Any]] | None = None

    @property
    def rows(self) -> int:
        return int(self._starts[-1]) if self._chosen is None else len(self._chosen)

    def identity(self, times: bool) -> list[tuple[str | int, ...]]:
        return [file.identity(times) for file in self._files]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.names, *self.added])

    def __len__(self) -> int:
        return len(self.names) + len(self.added)

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.added

    def __getitem__(self, name: str) -> NDArray[Any]:
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # one column at a time is in memory
            whole = self.added[name] if name in self.added else self._column(name)
            self._latest = name, whole if self._chosen is None else whole[self._chosen]
        return self._latest[1]

    def _column(self, name: str) -> NDArray[Any]:
        parts = []
        for file in self._files:
            with opened_parquet(file.path) as parquet:
                parts.append(to_numpy(parquet.read(columns=[name]).column(0)))
        if len({part.dtype.kind == "M" for part in parts}) > 1:
            raise DataError(f"Column {name!r} has dates in some files only; give all the same type.")
        return np.concatenate(parts)

    def at(self, rows: Rows | NDArray[np.bool_]) -> ParquetColumns:
        """The same columns of these rows only."""
        made = ParquetColumns.__new__(ParquetColumns)
        made.__dict__.update(self.__dict__)
        made._chosen = (np.arange(self.rows) if self._chosen is None else self._chosen)[rows]
        made._latest = None
        return made

    def groups_of(self, rows: Rows) -> NDArray[np.int64]:
        """The row group of each of these rows."""
        places = rows if self._chosen is None else self._chosen[rows]
        found: NDArray[np.int64] = np.searchsorted(self._starts, places, side="right") - 1
        return found

    def group_sizes(self) -> IntArray:
        """The number of rows in each row group."""
        return np.diff(self._starts)

    def read(self, rows: Rows, names: Sequence[str], who: str) -> dict[str, NDArray[Any]]:
        """These rows of some columns, from their row groups."""
        places, groups = rows if self._chosen is None else self._chosen[rows], self.groups_of(rows)
        found: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        order = []
        for group in np.unique(groups).tolist():
            k, number = self._groups[group]
            self._files[k].check(who)
            with opened_parquet(self._files[k].path) as parquet:
                table = parquet.read_row_groups([number], columns=[n for n in names if n not in self.added])
            own = np.flatnonzero(groups == group)
            order.append(own)
            inside = places[own] - self._starts[group]
            for name in names:
                values = self.added[name][places[own]] if name in self.added else to_numpy(table.column(name))[inside]
                found[name].append(values)
        back = np.argsort(np.concatenate(order), kind="stable")
        return {name: np.concatenate(parts)[back] for name, parts in found.items()}


class StreamedTable(Table):
    """A table of which one column at a time is in memory."""

    def __len__(self) -> int:
        return self.columns.rows if isinstance(self.columns, ParquetColumns) else super().__len__()

    def cells(self, name: str) -> Cells:
        if name not in self._read:
            self._read.clear()
        return super().cells(name)

    def missing(self, name: str) -> NDArray[np.bool_]:
        if name not in self._gaps:
            self._gaps.clear()
        return super().missing(name)

    def at(self, rows: Rows | NDArray[np.bool_]) -> Table:
        if not isinstance(self.columns, ParquetColumns):
            return super().at(rows)
        places = (np.arange(1, len(self) + 1) if self.places is None else self.places)[rows]
        return replace(self, columns=self.columns.at(rows), places=places)


def streamed_table(files: Sequence[Path], source: str, format: CellFormat) -> StreamedTable:
    """A table of Parquet files."""
    odd = next((file for file in files if file.suffix.lower() not in PARQUET), None)
    if odd is not None:
        raise DataError(
            f"{odd} is read whole, since only Parquet files have parts that can be read on their own; write the table "
            "as Parquet, one row group or more for each client, or leave lazy out."
        )
    return StreamedTable(ParquetColumns(files), source, format=format)


class TableSource(Source):
    """Rows of Parquet files, encoded when they are read; y is in memory."""

    by_sample = False

    def __init__(self, table: Table, encoding: Encoding, rows: Sequence[Rows], y: NDArray[Any]) -> None:
        self._table, self._encoding, self._rows, self._y = table, encoding, rows, y
        self.sizes = np.array([len(own) for own in rows], dtype=np.int64)

    @cached_property
    def _columns(self) -> ParquetColumns:
        assert isinstance(self._table.columns, ParquetColumns)
        return self._table.columns

    @property
    def passes(self) -> float:
        """How many times the whole file is read to read every client once."""
        sizes = self._columns.group_sizes()
        read = sum(int(sizes[np.unique(self._columns.groups_of(own))].sum()) for own in self._rows)
        return read / max(1, int(sizes.sum()))

    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        mine = self._rows[i][rows]
        try:
            found = self._columns.read(mine, [column.name for column in self._encoding.columns], who)
            places = mine + 1 if self._table.places is None else self._table.places[mine]
            x = self._encoding.x(Table(found, self._table.source, format=self._table.format, places=places))
        except DataError as error:
            text = str(error)
            raise DataError(text if text.startswith(who) else f"{who} cannot be read: {text}") from None
        return torch.from_numpy(x), torch.from_numpy(self._y[mine])

    def read_y(self, i: int, who: str) -> Samples:
        return torch.from_numpy(self._y[self._rows[i]])

    def identity(self, times: bool) -> Iterator[Any]:
        yield self._columns.identity(times)
        # Without the client's column, which a run's folder does not keep for a folder of tables.
        yield replace(self._encoding, client=None).to_dict()
        yield torch.from_numpy(self._y)
        yield torch.from_numpy(np.concatenate(self._rows))
