"""Where clients' samples are until they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.checked import as_pair
from comfedl.data.split import Batch
from comfedl.data.stored_array import StoredArray, of_memmap
from comfedl.utils import tree
from comfedl.utils.samples import Samples

IntArray = NDArray[np.int64]


class Source(ABC):
    """The samples of all clients of a split, or of several that are drawn from them.

    Attributes:
        sizes: how many samples each client has.
        by_sample: whether a few samples of a client are read faster than all of them.
        runs_code: whether samples are read by code of the user's, which may draw random numbers.
    """

    sizes: IntArray
    by_sample = True
    runs_code = False

    def reading_draws(self, i: int, who: str) -> bool:
        """Whether reading the i-th client's samples draws from the global random generators; tried out once."""
        return False

    @abstractmethod
    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        """The i-th client's samples in these rows; errors begin with ``who``. Several threads may call it."""

    def read_y(self, i: int, who: str) -> Samples:
        """The i-th client's y, of all rows."""
        return self.read(i, np.arange(self.sizes[i]), who)[1]

    @abstractmethod
    def identity(self, times: bool) -> Iterator[Any]:
        """What identifies the samples without reading them: states of files, shapes, and what is in memory.

        ``times``: of files, also when they were changed.
        """


Leaf = StoredArray | Tensor


class ArraySource(Source):
    """Arrays in files or in memory: a pair (x, y) for each client, or one pair that has all of them.

    ``starts`` has the row in which each client begins.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]], starts: IntArray, sizes: IntArray) -> None:
        self._pairs, self._starts, self.sizes = pairs, starts, sizes

    def _pair(self, i: int) -> tuple[Any, Any]:
        return self._pairs[i if len(self._pairs) > 1 else 0]

    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        x, y = self._pair(i)
        return self._of(x, i, rows, who), self._of(y, i, rows, who)

    def read_y(self, i: int, who: str) -> Samples:
        return self._of(self._pair(i)[1], i, np.arange(self.sizes[i]), who)

    def _of(self, part: Any, i: int, rows: IntArray, who: str) -> Samples:
        start = int(self._starts[i])

        def get(leaf: Leaf) -> Tensor:
            if isinstance(leaf, Tensor):
                return leaf.index_select(0, torch.from_numpy(rows + start))
            return leaf.read(start, rows, who)

        return tree.map(get, part)

    def identity(self, times: bool) -> Iterator[Any]:
        for pair in self._pairs:
            for part in pair:
                yield from part if isinstance(part, dict) else ()
                for leaf in tree.leaves(part):
                    yield leaf if isinstance(leaf, Tensor) else _described(leaf, times)


def _described(array: StoredArray, times: bool) -> tuple[Any, ...]:
    return *array.file.identity(times), array.offset, str(array.dtype), array.shape


def stored_pair(split: str, client: str | None, value: Any) -> tuple[Any, Any]:
    """x and y, checked as they are for data in memory; memory-mapped arrays are left in their files."""
    stored: dict[int, StoredArray] = {}
    where = split if client is None else f"Client {client!r} in {split}"

    def shown(part: Any) -> Any:
        """The same with empty tensors for what stays in a file."""
        if isinstance(part, tuple) or (isinstance(part, list) and any(isinstance(one, np.ndarray) for one in part)):
            return type(part)(map(shown, part))
        if isinstance(part, dict):
            return {key: shown(inner) for key, inner in part.items()}
        found = of_memmap(where, part) if isinstance(part, np.ndarray) else None
        if found is None:
            return part
        stored[id(part)] = found
        return torch.empty(found.shape, dtype=found.dtype, device="meta")

    def put_back(checked: Any, given: Any) -> Any:
        if isinstance(checked, dict | tuple):
            named = checked.items() if isinstance(checked, dict) else enumerate(checked)
            found = {key: put_back(part, given[key]) for key, part in named}
            return found if isinstance(checked, dict) else tuple(found.values())
        leaf = stored.get(id(given), checked)
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    x, y = as_pair(split, client, shown(value))
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    return put_back(x, pair[0]), put_back(y, pair[1])
