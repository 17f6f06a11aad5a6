"""FederatedData whose samples stay where they are until they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from comfedl.data.client_cache import ClientCache
from comfedl.data.federated import FederatedData
from comfedl.data.from_tables import SPLITS, Shares
from comfedl.data.lazy_split import LazySplit
from comfedl.data.sources import IntArray, Source
from comfedl.data.split import Split
from comfedl.data.tabular import Encoding

Rows = Mapping[int, IntArray]


def lazy_data(
    names: Sequence[str],
    sources: Mapping[str, tuple[Source, Rows | None]],
    cache: ClientCache,
    encoding: Encoding | None = None,
) -> FederatedData:
    """The splits by name: where the samples are, and each client's rows there (None: all of them)."""
    splits: dict[str, Split] = {}
    for name, (source, rows) in sources.items():
        split = LazySplit(name, source, names, cache, rows)
        if name == "train" or len(split):
            splits[name] = split
    fed = FederatedData.from_splits(splits)
    fed.encoding = encoding
    return fed


def drawn_rows(names: Sequence[str], source: Source, shares: Shares) -> dict[str, tuple[Source, Rows | None]]:
    """Each client's samples split by the shares, as they are in memory; for that the labels are read."""
    shares.check()
    if not shares.validation and not shares.test:
        return {"train": (source, None)}
    found: dict[str, dict[int, IntArray]] = {split: {} for split in SPLITS}
    for i, name in enumerate(names):
        labels = np.zeros(source.sizes[i], dtype=np.int64)
        if source.sizes[i]:
            y: Any = source.read_y(i, f"Client {name!r} in train")
            if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
                labels = y.long().numpy()
        rows = shares.split_rows(name, labels)
        for split in SPLITS:
            found[split][i] = np.asarray(rows.get(split, []), dtype=np.int64)
    return {split: (source, rows) for split, rows in found.items()}
