"""FederatedData: the data of all clients, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.client_names import checked_names
from comfedl.data.split import Batch, Split
from comfedl.utils.errors import DataError

if TYPE_CHECKING:
    from comfedl.data.tabular import Encoding

__all__ = ["Batch", "FederatedData", "Split"]

NAMES_PER_CHUNK = 65_536


class FederatedData:
    """The data of all clients: a train split and, optionally, validation, test and outer splits.

    Args:
        train: client name -> ``(x, y)``, arrays or tensors with samples along the first axis; x alone if the problem
            has no y.
        validation, test: the same, for any of the clients.
        outer: the data of the outer function in a two-level problem, for every client; the train data by default.

    Clients are sorted by name, so the order in which they are given does not matter. ``encoding`` says how table rows
    were turned into numbers and what the labels are called, if known.
    """

    encoding: Encoding | None = None

    def __init__(
        self,
        train: Mapping[str, Any],
        validation: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
    ) -> None:
        if not train:
            raise DataError("train has no clients; give at least one, as {name: (x, y)}.")
        for name in train:
            if not isinstance(name, str) or not name:
                raise DataError(f"A client's name is {name!r}, but it must be a non-empty string.")
        names = tuple(sorted(train))
        splits = {"train": train, "validation": validation, "test": test, "outer": outer}
        self._splits = {
            split: _flatten(split, names, clients) for split, clients in splits.items() if clients is not None
        }
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
            _check_finite(split, flat)
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
    ) -> FederatedData:
        """Make data from the concatenated samples of all clients: fast for a million clients, and without a copy.

        Args:
            train: ``(x, y, offsets)``. Client i has the samples ``offsets[i]`` to ``offsets[i + 1] - 1`` of the arrays
                or tensors x and y, so there is one more offset than there are clients; y may be None.
            validation, test, outer: the same, for the same clients; in validation and test, clients may be empty.
            names: the clients' names, sorted; by default they are numbered "000000", "000001" and so on.

        Do not change the arrays afterwards: they are not copied, except for read-only arrays and non-int64 labels.
        ``numpy.load(file, mmap_mode="c")`` leaves them on disk until they are used.

        >>> FederatedData.from_flat((torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1]), [0, 3, 5])).train["1"][1]
        tensor([1, 1])
        """
        given = {"train": train, "validation": validation, "test": test, "outer": outer}
        splits: dict[str, Split] = {}
        for split, parts in given.items():
            if parts is not None:
                count = len(splits["train"].names) if splits else None
                x, y, offsets = _check_flat(split, parts, count)
                checked = splits["train"].names if splits else checked_names(names, len(offsets) - 1)
                splits[split] = Split(x, y, checked, offsets)
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
            impute: fills missing values in instead: "median" (for strings and booleans the most frequent value),
                "most-frequent", or by column one of these or a constant. They are learnt from the train rows of all
                clients, and an input says where a value was missing.
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
                (the names of the columns of a file without a header line, or False) and ``encoding``.
        """
        from comfedl.data.from_tables import Shares, from_file

        return from_file(path, client, target, Shares(validation, test, seed), **options)

    @classmethod
    def from_datasets(cls, train: Any, validation: Any = 0.2, test: Any = 0.2, seed: int = 0) -> FederatedData:
        """Make data from map-style torch Datasets, one per client, whose samples are pairs (x, y).

        Args:
            train: client name -> Dataset, or a list of Datasets; then clients are numbered.
            validation, test: the same, for any of the clients; or the share of each client's train samples to hold out,
                drawn with ``seed``; or None.
        """
        from comfedl.data.from_tables import from_datasets

        return from_datasets(train, validation, test, seed)

    @classmethod
    def from_folder(
        cls, path: Any, *, validation: float = 0.2, test: float = 0.2, seed: int = 0, **options: Any
    ) -> FederatedData:
        """Make data from a folder with one file or subfolder per client, named after the client.

        Files are CSV, Parquet or Arrow (``target`` is the column to predict; the other options are those of
        ``from_dataframe`` and, for the cells of CSV, ``decimal``, ``thousands``, ``header`` and ``encoding``), or .npz
        or .safetensors with arrays x and y. For images (PNG or JPEG, read with Pillow; ``size`` resizes them), each
        client's folder has one subfolder per class. A client's folder may hold files named train, validation and test
        instead of the shares.
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
            x: the input: one column of arrays or images, or several columns of scalars, which are encoded as in
                ``from_dataframe`` (and take its options); by default all other columns.
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

    def contents(self) -> Iterator[Any]:
        """Everything that identifies these data, for a fingerprint; a tensor shared by several splits comes once."""
        seen: set[int] = set()
        for name, split in self._splits.items():
            for start in range(0, len(split.names), NAMES_PER_CHUNK):  # a million names at once would take much memory
                stop = start + NAMES_PER_CHUNK
                yield name, tuple(split.names[start:stop]), split.offsets[start : stop + 1].tobytes()
            for part in (split.x, split.y, split.rows):
                if part is not None and part.data_ptr() not in seen:
                    seen.add(part.data_ptr())
                    yield part

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {int(split.sizes.sum())}" for name, split in self._splits.items())
        return f"FederatedData({len(self)} clients; samples: {parts})"

    def _check_shapes(self) -> None:
        train = self.train
        for name in ("validation", "test"):
            split = self._splits.get(name)
            if split is None:
                continue
            for part, ours, theirs in (("x", train.x, split.x), ("y", train.y, split.y)):
                if ours.shape[1:] != theirs.shape[1:]:
                    raise DataError(
                        f"{part} has samples of shape {tuple(ours.shape[1:])} in train but "
                        f"{tuple(theirs.shape[1:])} in {name}; give the same shape in both."
                    )


def _as_tensor(split: str, client: str | None, what: str, value: Any) -> Tensor:
    where = f"{what} in {split}" if client is None else f"{what} of client {client!r} in {split}"
    if np.ma.is_masked(value):
        raise DataError(
            f"{where} is a masked array with masked values, which would be used; fill them in, or drop them."
        )
    try:
        if isinstance(value, np.ndarray) and (not value.flags.writeable or any(step < 0 for step in value.strides)):
            value = value.copy()  # torch accepts neither
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} cannot be read as numbers ({error}); give an array or a tensor, samples first."
        ) from None
    if tensor.is_complex():
        raise DataError(f"{where} is complex; give real numbers.")
    if tensor.ndim == 0:
        raise DataError(f"{where} is a single number; give an array, samples first.")
    return tensor.detach()


def _as_pair(split: str, client: str, value: Any) -> Batch:
    is_pair = isinstance(value, tuple) or (isinstance(value, list) and any(hasattr(part, "shape") for part in value))
    if is_pair and len(value) != 2:
        raise DataError(f"Client {client!r} in {split} is a {type(value).__name__} of {len(value)}; give (x, y).")
    return _check_pair(split, client, *(value if is_pair else (value,)))


def _check_pair(split: str, client: str | None, *parts: Any) -> Batch:
    """x and y as tensors of equal length; a missing y becomes one of shape [N, 0]."""
    x, *rest = (_as_tensor(split, client, what, part) for what, part in zip("xy", parts, strict=False))
    y = rest[0] if rest else x.new_zeros((len(x), 0))
    who, where = (split, "") if client is None else (f"Client {client!r}", f" in {split}")
    if len(x) != len(y):
        raise DataError(f"{who} has {len(x)} samples in x but {len(y)} in y{where}; give one y for each x.")
    if len(x) == 0:
        raise DataError(f"{who} has no samples{where}; give it some, or leave it out.")
    if y.ndim == 1 and not y.is_floating_point():
        y = y.long()
    return x, y


def _flatten(split: str, names: Sequence[str], clients: Mapping[str, Any]) -> Split:
    unknown = sorted(set(clients) - set(names), key=str)
    if unknown:
        raise DataError(f"Client {unknown[0]!r} is in {split} but not in train; give it train data, or leave it out.")
    missing = [name for name in names if name not in clients]
    if split == "outer" and missing:
        raise DataError(f"Client {missing[0]!r} has no outer data; give outer data for every client, or for none.")
    if not clients:
        raise DataError(f"{split} has no clients; give some, or leave {split} out.")
    pairs = {name: _as_pair(split, name, clients[name]) for name in names if name in clients}
    first, (x0, y0) = next(iter(pairs.items()))
    for name, (x, y) in pairs.items():
        for what, ours, theirs in (("x", x0, x), ("y", y0, y)):
            if ours.shape[1:] != theirs.shape[1:]:
                raise DataError(
                    f"Client {name!r} has {what} samples of shape {tuple(theirs.shape[1:])} in {split} but client "
                    f"{first!r} has {tuple(ours.shape[1:])}; give all clients the same shape."
                )
            if ours.is_floating_point() != theirs.is_floating_point():
                raise DataError(
                    f"Client {name!r} has {what} of type {theirs.dtype} in {split} but client {first!r} has "
                    f"{ours.dtype}; give all clients the same type."
                )
    sizes = [len(pairs[name][0]) if name in pairs else 0 for name in names]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (torch.cat([pair[part] for pair in pairs.values()]) for part in (0, 1))
    flat = Split(x, y, names, offsets)
    _check_finite(split, flat)
    return flat


def _check_flat(split: str, parts: Any, clients: int | None) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """The checked x, y and offsets of a flat split; ``clients`` is the required number of clients."""
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        found = f"{type(parts).__name__} of {len(parts)}" if hasattr(parts, "__len__") else type(parts).__name__
        raise DataError(f"{split} is a {found}, but it must be (x, y, offsets).")
    x, y = _check_pair(split, None, *(parts[:1] if parts[1] is None else parts[:2]))
    try:
        offsets = np.asarray(parts[2])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The offsets of {split} cannot be read as numbers ({error}).") from None
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise DataError(
            f"The offsets of {split} are {offsets.dtype} of shape {offsets.shape}, but they must be a list of "
            "integers, one more than there are clients."
        )
    offsets = offsets.astype(np.int64)
    if clients is not None and len(offsets) != clients + 1:
        raise DataError(
            f"There are {len(offsets)} offsets in {split} but {clients + 1} in train; give one more than there are "
            "clients in both."
        )
    decreases = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0 or offsets[-1] != len(x) or len(decreases):
        fault = f"decrease at index {decreases[0] + 1}" if len(decreases) else f"go from {offsets[0]} to {offsets[-1]}"
        raise DataError(
            f"The offsets of {split} {fault}, but they must increase from 0 to {len(x)}, the number of samples."
        )
    return x, y, offsets


def _check_finite(split: str, flat: Split) -> None:
    """Refuse NaN and infinity; the client is looked up only if there are any."""
    for what, values in (("x", flat.x), ("y", flat.y)):
        # A finite sum has only finite terms and takes no memory; an infinite one may have overflowed.
        if not values.is_floating_point() or bool(values.sum().isfinite()):
            continue
        bad_per_row = (~torch.isfinite(values)).reshape(len(values), -1).sum(dim=1)
        bad = bad_per_row[: flat.offsets[-1]] if flat.rows is None else bad_per_row.index_select(0, flat.rows)
        positions = torch.nonzero(bad).flatten()
        if len(positions):
            i = int(np.searchsorted(flat.offsets, int(positions[0]), side="right")) - 1
            count = int(bad[flat.offsets[i] : flat.offsets[i + 1]].sum())
            raise DataError(
                f"Client {flat.names[i]!r} has {count} NaN or infinite value{'s' if count > 1 else ''} in {what} of "
                f"{split}; replace or drop those samples."
            )
