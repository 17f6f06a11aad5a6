"""FederatedData from Parquet files that do not fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.cell_format import CellFormat
from comfedl.data.client_cache import ClientCache
from comfedl.data.federated import FederatedData
from comfedl.data.from_tables import SPLITS, Shares, from_table, rows_by_name
from comfedl.data.lazy_data import Rows, lazy_data
from comfedl.data.parquet import ParquetColumns, TableSource, streamed_table
from comfedl.data.sources import Source
from comfedl.data.table import Table
from comfedl.data.tabular import Encoding
from comfedl.utils import torchrun

logger = logging.getLogger("comfedl")

MANY_PASSES = 4


def from_parquet(
    files: Sequence[Path],
    source: str,
    client: str,
    target: str,
    shares: Shares,
    format: CellFormat,
    cache: ClientCache,
    owners: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> FederatedData:
    """FederatedData from the rows of Parquet files; ``owners`` are columns to be added, with a value for each file."""
    table = streamed_table(files, source, format)
    columns = table.columns
    assert isinstance(columns, ParquetColumns)
    for name, values in (owners or {}).items():
        columns.added[name] = np.repeat(np.array(values, dtype=object), columns.rows_of_file)
    table = replace(table, added=frozenset(columns.added))

    def make(used: Table, encoding: Encoding, y: Tensor, names: NDArray[Any], splits: NDArray[Any]) -> FederatedData:
        by_name = rows_by_name(names)
        rows = TableSource(used, encoding, [*by_name.values()], y.numpy())
        if rows.passes > MANY_PASSES and torchrun.rank() == 0:
            logger.warning(
                "%s: clients share row groups, so that reading every client once reads the file %.3g times; sort the "
                "rows by client, and write row groups of about one client each.", source, rows.passes,
            )  # fmt: skip
        found: dict[str, tuple[Source, Rows | None]] = {}
        for split in SPLITS:
            own = {i: np.flatnonzero(splits[mine] == split) for i, mine in enumerate(by_name.values())}
            found[split] = rows, own
        return lazy_data(tuple(by_name), found, cache, encoding)

    return from_table(table, client, target, shares, make=make, **options)
