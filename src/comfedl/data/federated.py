"""FederatedData: the data of all clients, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from comfedl.data.checked import (
    by_client,
    check_clients,
    check_finite,
    check_flat,
    check_offsets,
    check_parts,
    check_same,
    flatten,
)
from comfedl.data.client_cache import ClientCache, cache_if_lazy
from comfedl.data.client_names import checked_names
from comfedl.data.lazy_split import LazySplit
from comfedl.data.sources import ArraySource, stored_pair
from comfedl.data.split import Batch, Split
from comfedl.utils import tree
from comfedl.utils.errors import DataError
from comfedl.utils.fingerprint import fingerprint

if TYPE_CHECKING:
    from comfedl.data.tabular import Encoding

__all__ = ["Batch", "FederatedData", "Split"]

NAMES_PER_CHUNK = 65_536


class FederatedData:
    """The data of all clients: a train split and, optionally, validation, test and outer splits.

    Args:
        train: client name -> ``(x, y)``, arrays or tensors with samples along the first axis; x alone if the problem
            has no y. For a model with several inputs, x is a tuple of arrays, passed as ``model(*x)``, or a dict,
            passed as ``model(**x)``; y may be a tuple or dict as well, for a loss of your own. A list of pairs gives
            numbered clients.
        validation, test: the same, for any of the clients.
        outer: the data of the outer function in a two-level problem, for every client; the train data by default.
        lazy: leave memory-mapped arrays (``numpy.load(file, mmap_mode="r")``) in their files, and read a client's
            samples when they are needed. Other arrays stay in memory.
        memory_mb: with ``lazy``, how much of the clients' data may be in memory at a time; 500 by default.

    Clients are sorted by name, so the order in which they are given does not matter. ``encoding`` says how table rows
    were turned into numbers and what the labels are called, if known.
    """

    encoding: Encoding | None = None

    def __init__(
        self,
        train: Mapping[str, Any] | Sequence[Any],
        validation: Mapping[str, Any] | Sequence[Any] | None = None,
        test: Mapping[str, Any] | Sequence[Any] | None = None,
        outer: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        lazy: bool = False,
        memory_mb: float | None = None,
    ) -> None:
        cache = cache_if_lazy(lazy, memory_mb)
        given = {"train": train, "validation": validation, "test": test, "outer": outer}
        splits = {split: by_client(split, clients) for split, clients in given.items() if clients is not None}
        if not splits.get("train"):
            raise DataError("train has no clients; give at least one, as {name: (x, y)}.")
        for name in splits["train"]:
            if not isinstance(name, str) or not name:
                raise DataError(f"A client's name is {name!r}, but it must be a non-empty string.")
        names = tuple(sorted(splits["train"]))
        if cache is None:
            self._splits = {split: flatten(split, names, clients) for split, clients in splits.items()}
        else:
            self._splits = {split: _left(split, names, clients, cache) for split, clients in splits.items()}
            check_memory(self._splits)
        self._check_shapes()

    @classmethod
    def from_splits(cls, splits: Mapping[str, Split]) -> FederatedData:
        """Make data from flat splits (see ``Split``) without copying anything."""
        self = cls.__new__(cls)
        self._splits = dict(splits)
        checked_names(self.names, len(self.train.sizes))
        for i in np.flatnonzero(self.train.sizes == 0):
            raise DataError(f"Client {self.names[int(i)]!r} has no samples in train; give it some, or leave it out.")
        for i in [] if self.outer is None else np.flatnonzero(self.outer.sizes == 0):
            raise DataError(
                f"Client {self.names[int(i)]!r} has no outer data; give outer data for every client, or for none."
            )
        for split, flat in self._splits.items():
            if flat.at_hand:
                check_finite(split, flat)
        check_memory(self._splits)
        self._check_shapes()
        return self

    @classmethod
    def from_flat(
        cls,
        train: tuple[Any, Any, Any],
        validation: tuple[Any, Any, Any] | None = None,
        test: tuple[Any, Any, Any] | None = None,
        outer: tuple[Any, Any, Any] | None = None,
        names: Sequence[str] | None = None,
        *,
        lazy: bool = False,
        memory_mb: float | None = None,
    ) -> FederatedData:
        """Make data from the concatenated samples of all clients: fast for a million clients, and without a copy.

        Args:
            train: ``(x, y, offsets)``. Client i has the samples ``offsets[i]`` to ``offsets[i + 1] - 1`` of the arrays
                or tensors x and y, so there is one more offset than there are clients; y may be None, and x and y may
                be tuples or dicts of arrays.
            validation, test, outer: the same, for the same clients; in validation and test, clients may be empty.
            names: the clients' names, sorted; by default they are numbered "000000", "000001" and so on.
            lazy, memory_mb: as in ``FederatedData(...)``, for data that do not fit into memory.

        Do not change the arrays afterwards: they are not copied, except for read-only arrays and non-int64 labels.

        >>> FederatedData.from_flat((torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1]), [0, 3, 5])).train["1"][1]
        tensor([1, 1])
        """
        given = {"train": train, "validation": validation, "test": test, "outer": outer}
        splits: dict[str, Split] = {}
        cache = cache_if_lazy(lazy, memory_mb)
        for split, parts in given.items():
            if parts is not None:
                count = len(splits["train"].names) if splits else None
                if cache is None:
                    x, y, offsets = check_flat(split, parts, count)
                    checked = splits["train"].names if splits else checked_names(names, len(offsets) - 1)
                    splits[split] = Split(x, y, checked, offsets)
                    continue
                check_parts(split, parts)
                pair = stored_pair(split, None, tuple(parts[:2]))
                offsets = check_offsets(split, parts[2], len(tree.leaves(pair[0])[0]), count)
                checked = splits["train"].names if splits else checked_names(names, len(offsets) - 1)
                source = ArraySource([pair], offsets[:-1], np.diff(offsets))
                splits[split] = LazySplit(split, source, checked, cache, None)
        return cls.from_splits(splits)

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        client: str,
        target: str,
        *,
        validation: float = 0.2,
        test: float = 0.2,
        seed: int = 0,
        split: str | None = None,
        drop: Sequence[str] = (),
        task: str | None = None,
        scale: bool = True,
        scale_target: bool = False,
        missing: str = "error",
        impute: str | Mapping[str, Any] | None = None,
        na_values: Sequence[str | float] | Mapping[str, Any] | None = None,
        dates: Sequence[str] | Mapping[str, str] | None = None,
    ) -> FederatedData:
        """Make data from a table with a column that names the client of each row, such as ``client="hospital"``.

        Args:
            df: a pandas or polars data frame, or a dict of columns. Numbers and booleans are used as they are; strings
                are one-hot encoded, and new rows are encoded in the same way. A value that one client alone has goes
                to an input for others, and a column that does not differ among the train rows is left out.
            client: the column with the clients' names.
            target: the column to predict.
            validation, test: the share of each client's rows to hold out, drawn with ``seed`` and stratified by label.
                A client's draw does not depend on the other clients.
            split: a column that says "train", "validation" or "test" for each row, instead of the shares.
            drop: columns to leave out.
            task: "classification" or "regression"; None means classification if y is strings, booleans or at most 20
                distinct integers.
            scale: standardise number columns to mean 0 and standard deviation 1 over the train rows of all clients.
                This takes only the count, the sum and the sum of squares from each client.
            scale_target: the same for y in a regression; errors are then in units of its standard deviation.
            missing: "error" rejects missing values, "drop" drops their rows.
            impute: fills missing values in instead: "median" or "mean" (for strings and booleans the most frequent
                value), "most-frequent", or by column one of these or a constant. They are learnt from the train rows of
                all clients, and an input says where a value was missing.
            na_values: further values that mean a missing one, or such lists by column.
            dates: columns to be read as dates, or their strptime formats by column: as days since 1970-01-01.
        """
        from comfedl.data.from_tables import Shares, from_table

        shares = Shares(validation, test, seed)
        scales = (scale, scale_target)
        return from_table(df, client, target, shares, split, drop, task, *scales, missing, impute, na_values, dates)

    @classmethod
    def from_csv(
        cls,
        path: Any,
        client: str,
        target: str,
        *,
        validation: float = 0.2,
        test: float = 0.2,
        seed: int = 0,
        **options: Any,
    ) -> FederatedData:
        """Make data from a CSV, Parquet or Arrow file with a column that names the client of each row.

        Args:
            path: the file; its suffix says what it is.
            client, target, validation, test, seed: as in ``from_dataframe``.
            options: the others of ``from_dataframe``, and how cells are written: ``decimal``, ``thousands``, ``header``
                (the names of the columns of a file without a header line, or False) and ``encoding``. With
                ``lazy=True`` the row groups of a Parquet file are read when a client needs them, and at most
                ``memory_mb`` (500 by default) of the clients' data are in memory at a time.
        """
        from comfedl.data.from_tables import Shares, from_file

        return from_file(path, client, target, Shares(validation, test, seed), **options)

    @classmethod
    def from_datasets(
        cls,
        train: Any,
        validation: Any = 0.2,
        test: Any = 0.2,
        seed: int = 0,
        *,
        lazy: bool = False,
        memory_mb: float | None = None,
    ) -> FederatedData:
        """Make data from map-style torch Datasets, one per client, whose samples are pairs (x, y).

        x and y are tensors, or tuples or dicts of tensors. Every sample is read once, so random augmentation in a
        Dataset would be frozen: it is warned of, and belongs in ``fit(transform=...)``.

        Args:
            train: client name -> Dataset, or a list of Datasets; then clients are numbered.
            validation, test: the same, for any of the clients; or the share of each client's train samples to hold out,
                drawn with ``seed``; or None.
            lazy: read a sample whenever it is needed, instead of all of them once. With shares, every sample is still
                read once at the start, for its label.
            memory_mb: with ``lazy``, how much of the clients' data may be in memory at a time; 500 by default.
        """
        from comfedl.data.from_datasets import from_datasets

        return from_datasets(train, validation, test, seed, lazy, memory_mb)

    @classmethod
    def from_folder(
        cls, path: Any, *, validation: float = 0.2, test: float = 0.2, seed: int = 0, **options: Any
    ) -> FederatedData:
        """Make data from a folder with one file or subfolder per client, named after the client.

        Files are CSV, Parquet or Arrow (``target`` is the column to predict; the other options are those of
        ``from_dataframe`` and, for the cells of CSV, ``decimal``, ``thousands``, ``header`` and ``encoding``), or .npz
        or .safetensors with arrays x and y. For images (PNG or JPEG, read with Pillow; ``size`` resizes them), each
        client's folder has one subfolder per class. A client's folder may hold files named train, validation and test
        instead of the shares. With ``lazy=True`` arrays, images and Parquet files are read when a client needs them,
        and at most ``memory_mb`` (500 by default) of the clients' data are in memory at a time.
        """
        from comfedl.data.from_folders import from_folder
        from comfedl.data.from_tables import Shares

        return from_folder(path, Shares(validation, test, seed), **options)

    @classmethod
    def from_huggingface(
        cls,
        data: Any,
        y: str = "label",
        x: str | Sequence[str] | None = None,
        client: str | None = None,
        *,
        validation: float = 0.2,
        test: float = 0.2,
        seed: int = 0,
        **options: Any,
    ) -> FederatedData:
        """Make data from Hugging Face ``datasets``, or from a ``FederatedDataset`` of flwr-datasets.

        Args:
            data: a Dataset with a column ``client``; a dict of Datasets by client name; a dict of "train", "validation"
                and "test" Datasets with a column ``client``; or a FederatedDataset, whose partitions are the clients.
            y: the column to predict.
            x: the input: one column of arrays or images; several columns of arrays, such as ["input_ids",
                "attention_mask"], which become a dict of inputs; or columns of scalars, which are encoded as in
                ``from_dataframe`` (and take its options). By default all other columns.
            client: the column with the clients' names.
            validation, test, seed: as in ``from_dataframe``.
        """
        from comfedl.data.from_huggingface import from_huggingface
        from comfedl.data.from_tables import Shares

        return from_huggingface(data, y, x, client, Shares(validation, test, seed), **options)

    @property
    def names(self) -> Sequence[str]:
        """The clients' names, sorted."""
        return self._splits["train"].names

    @property
    def train(self) -> Split:
        """Each client's ``(x, y)`` for training."""
        return self._splits["train"]

    @property
    def validation(self) -> Split | None:
        """Each client's ``(x, y)`` for tuning and model selection."""
        return self._splits.get("validation")

    @property
    def test(self) -> Split | None:
        """Each client's ``(x, y)`` for the final evaluation."""
        return self._splits.get("test")

    @property
    def outer(self) -> Split | None:
        """Each client's ``(x, y)`` for the outer function of a two-level problem."""
        return self._splits.get("outer")

    def split(self, name: str, instead: str = "train") -> Split | None:
        """A split by name; for missing outer data, the split named by ``instead``."""
        return self._splits.get(instead if name == "outer" and name not in self._splits else name)

    def to(self, dtype: torch.dtype, device: torch.device) -> FederatedData:
        """A copy on this device, with floating-point tensors in this dtype."""
        moved = FederatedData.__new__(FederatedData)
        moved._splits = {name: split.to(dtype, device) for name, split in self._splits.items()}
        moved.encoding = self.encoding
        return moved

    @property
    def on_disk(self) -> bool:
        """Whether samples are read when they are needed."""
        return not all(split.at_hand for split in self._splits.values())

    def contents(self, times: bool = True) -> Iterator[Any]:
        """Everything that identifies these data, for a fingerprint; a tensor shared by several splits comes once.

        ``times``: files on disk count as others if they were changed at another time.
        """
        seen: dict[int, Tensor] = {}  # held, since a new tensor may get the address of one that is gone
        for name, split in self._splits.items():
            for start in range(0, len(split.names), NAMES_PER_CHUNK):  # a million names at once would take much memory
                stop = start + NAMES_PER_CHUNK
                yield name, tuple(split.names[start:stop]), split.offsets[start : stop + 1].tobytes()
            for part in split.identity(times):
                if not isinstance(part, Tensor):
                    yield part
                elif part.data_ptr() not in seen:
                    seen[part.data_ptr()] = part
                    yield part

    def digest(self) -> str:
        """The SHA-256 digest of all samples, by split and client."""
        return fingerprint(*self.contents())

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {int(split.sizes.sum())}" for name, split in self._splits.items())
        return f"FederatedData({len(self)} clients; samples: {parts})"

    def _check_shapes(self) -> None:
        train = self.train
        for name in ("validation", "test"):
            split = self._splits.get(name)
            if split is not None:
                for what, ours, theirs in zip("xy", train.head(1), split.head(1), strict=True):
                    check_same(what, ours, theirs, "in train", f"in {name}")


def _left(split: str, names: Sequence[str], clients: Mapping[str, Any], cache: ClientCache) -> Split:
    """A split of the clients' arrays, which stay where they are."""
    check_clients(split, names, clients)
    none = (torch.zeros(0), torch.zeros(0))
    pairs = [stored_pair(split, name, clients[name]) if name in clients else none for name in names]
    sizes = np.array([len(tree.leaves(x)[0]) for x, _ in pairs])
    return LazySplit(split, ArraySource(pairs, np.zeros_like(sizes), sizes), names, cache, None)


def check_memory(splits: Mapping[str, Split]) -> None:
    """Refuse a client that is too large for the memory that data on disk may take."""
    lazy = [split for split in splits.values() if isinstance(split, LazySplit)]
    if not lazy:
        return
    cache = lazy[0].cache
    total = sum((split.sizes * split.row_bytes for split in lazy), np.zeros(len(lazy[0].names), dtype=np.int64))
    largest = int(np.argmax(total))
    if total[largest] > cache.bound:
        need = math.ceil(2 * int(total[largest]) / 1e6)
        raise DataError(
            f"Client {lazy[0].names[largest]!r} has {total[largest] / 1e6:.4g} MB of samples, but memory_mb is "
            f"{cache.memory_mb:g}, which has to hold two clients: the one that trains and the next one; give "
            f"memory_mb = {need} or more, or divide its data among several clients."
        )
