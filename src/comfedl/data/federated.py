"""FederatedData: what each client holds, checked once on the way in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data import client_names as naming
from comfedl.data.split import Batch, Split
from comfedl.utils.errors import DataError

if TYPE_CHECKING:
    from comfedl.data.tabular import Encoding

__all__ = ["Batch", "FederatedData", "Split"]

SPLITS = ("train", "validation", "test", "outer")
MANY = 65_536


class FederatedData:
    """The data of all clients: train, and optionally validation, test and the outer function's own.

    Args:
        train: client name -> ``(x, y)``, arrays or tensors with the samples first. Where a problem has no y, give x
            alone.
        validation, test: the same, for the clients that have them.
        outer: the second distribution of a two-level problem, for every client; by default the train data serve.

    Clients are kept in the order of their names, so the order in which they are given does not matter. ``encoding``
    says how a table's rows became numbers, or names the labels, where the data were made so.
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
            raise DataError("train holds no client; give at least one, as {name: (x, y)}.")
        for name in train:
            if not isinstance(name, str) or not name:
                raise DataError(f"A client's name is {name!r}, but it must be a text that is not empty.")
        names = tuple(sorted(train))
        splits = {"train": train, "validation": validation, "test": test, "outer": outer}
        self._splits = {
            split: _flatten(split, names, clients) for split, clients in splits.items() if clients is not None
        }
        self._check_shapes()

    @classmethod
    def from_splits(cls, splits: Mapping[str, Split]) -> FederatedData:
        """Take splits that are already flat (see ``Split``): nothing is copied."""
        self = cls.__new__(cls)
        self._splits = dict(splits)
        naming.checked(self.names, len(self.train.sizes))
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
        """Take the samples of all clients in one piece: for very many clients, in seconds and without a copy.

        Args:
            train: ``(x, y, offsets)``. Client i holds the samples from ``offsets[i]`` to before ``offsets[i + 1]`` of
                the arrays or tensors x and y, so there is one offset more than there are clients; y may be None.
            validation, test, outer: the same, for the same clients; in validation and test some may hold nothing.
            names: the clients' names, in order; by default they are numbered, "000000" and so on.

        The arrays must not be changed afterwards, since they are not copied (but for labels that are not int64 and
        arrays that are read-only). ``numpy.load(file, mmap_mode="c")`` leaves them on the disk until they are needed.

        >>> FederatedData.from_flat((torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1]), [0, 3, 5])).train["1"][1]
        tensor([1, 1])
        """
        given = {"train": train, "validation": validation, "test": test, "outer": outer}
        splits: dict[str, Split] = {}
        for split, parts in given.items():
            if parts is not None:
                count = len(splits["train"].names) if splits else None
                x, y, offsets = _flat(split, parts, count)
                known = splits["train"].names if splits else naming.checked(names, len(offsets) - 1)
                splits[split] = Split(x, y, known, offsets)
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
    ) -> FederatedData:
        """Take a table with a column that names each row's client, such as ``client="hospital"``.

        Args:
            df: a data frame of pandas or polars, or a dict of columns. Numbers and booleans are taken as they are,
                texts become one number for each category, in an order that is kept for new rows.
            client: the column of the clients' names.
            target: the column to predict.
            validation, test: the share of each client's rows that is held out, drawn by ``seed`` in the proportions of
                its labels. A client's draw does not depend on the other clients.
            split: a column that says "train", "validation" or "test" of each row, in place of the shares.
            drop: columns to leave out.
            task: "classification" or "regression"; None is classification where y is texts, booleans or up to 20
                different whole numbers.
            scale: number columns get mean 0 and standard deviation 1 over the train rows of all clients together. Of
                each client only counts, sums and sums of squares are needed for that.
            scale_target: the same for y in a regression; errors are then in units of its standard deviation.
            missing: "error" refuses missing values, "drop" leaves those rows out.
        """
        from comfedl.data.from_tables import Shares, from_table

        shares = Shares(validation, test, seed)
        return from_table(df, client, target, shares, split, drop, task, scale, scale_target, missing)

    @classmethod
    def from_datasets(cls, train: Any, validation: Any = 0.2, test: Any = 0.2, seed: int = 0) -> FederatedData:
        """Take torch's map-style Datasets, one a client, whose samples are pairs (x, y).

        Args:
            train: client name -> Dataset, or a list of Datasets, whose clients are numbered.
            validation, test: the same for the clients that have them, or the share of each client's train samples that
                is held out, drawn by ``seed``; None is none.
        """
        from comfedl.data.from_tables import from_datasets

        return from_datasets(train, validation, test, seed)

    @classmethod
    def from_folder(
        cls, path: Any, *, validation: float = 0.2, test: float = 0.2, seed: int = 0, **options: Any
    ) -> FederatedData:
        """Take a folder with a file or a folder for each client, whose name is the client's.

        It holds CSV files (``target`` is the column to predict; the other options are ``from_dataframe``'s), .npz or
        .safetensors files with arrays x and y, or in each client's folder a folder of images for each class (PNG or
        JPEG, by Pillow; ``size`` resizes them). A client's folder may hold train, validation and test files in place
        of the shares.
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
        """Take datasets of Hugging Face's ``datasets``, or a ``FederatedDataset`` of flwr-datasets.

        Args:
            data: a Dataset with a column ``client``; a dict (client's name: Dataset); a dict of "train", "validation"
                and "test" Datasets with such a column; or a FederatedDataset, whose partitions are the clients.
            y: the column to predict.
            x: what to learn from: one column of arrays or images, or several of single values, which are encoded as in
                ``from_dataframe`` (and take its options); by default all others.
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
        """Each client's ``(x, y)`` to train on."""
        return self._splits["train"]

    @property
    def validation(self) -> Split | None:
        """Each client's ``(x, y)`` to choose by."""
        return self._splits.get("validation")

    @property
    def test(self) -> Split | None:
        """Each client's ``(x, y)`` to judge by."""
        return self._splits.get("test")

    @property
    def outer(self) -> Split | None:
        """Each client's ``(x, y)`` of the second distribution."""
        return self._splits.get("outer")

    def split(self, name: str, instead: str = "train") -> Split | None:
        """A split by name; ``instead`` serves for the outer data where none were given."""
        return self._splits.get(instead if name == "outer" and name not in self._splits else name)

    def to(self, dtype: torch.dtype, device: torch.device) -> FederatedData:
        """The same data with floating-point numbers in this dtype, on this device."""
        moved = FederatedData.__new__(FederatedData)
        moved._splits = {name: split.to(dtype, device) for name, split in self._splits.items()}
        moved.encoding = self.encoding
        return moved

    def contents(self) -> Iterator[Any]:
        """All that makes these data what they are; a tensor that several splits share is given once."""
        seen: set[int] = set()
        for name, split in self._splits.items():
            for start in range(0, len(split.names), MANY):  # a million names at once would be a heavy text
                stop = start + MANY
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


def _tensor(split: str, client: str | None, what: str, value: Any) -> Tensor:
    where = f"{what} in {split}" if client is None else f"{what} of client {client!r} in {split}"
    try:
        if isinstance(value, np.ndarray) and (not value.flags.writeable or any(step < 0 for step in value.strides)):
            value = value.copy()  # torch takes neither as it is
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} cannot be read as numbers ({error}); give an array or a tensor with the samples first."
        ) from None
    if tensor.is_complex():
        raise DataError(f"{where} is complex; give real numbers.")
    if tensor.ndim == 0:
        raise DataError(f"{where} is a single number; give an array, samples first.")
    return tensor.detach()


def _pair(split: str, client: str, value: Any) -> Batch:
    pair = isinstance(value, tuple) or (isinstance(value, list) and any(hasattr(part, "shape") for part in value))
    if pair and len(value) != 2:
        raise DataError(f"Client {client!r} in {split} is a {type(value).__name__} of {len(value)}; give (x, y).")
    return _matched(split, client, *(value if pair else (value,)))


def _matched(split: str, client: str | None, *parts: Any) -> Batch:
    """x and y as tensors of one length; where there is x alone, y holds no numbers."""
    x, *rest = (_tensor(split, client, what, part) for what, part in zip("xy", parts, strict=False))
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
    strangers = sorted(set(clients) - set(names), key=str)
    if strangers:
        raise DataError(f"Client {strangers[0]!r} is in {split} but not in train; give it train data, or leave it out.")
    missing = [name for name in names if name not in clients]
    if split == "outer" and missing:
        raise DataError(f"Client {missing[0]!r} has no outer data; give outer data for every client, or for none.")
    if not clients:
        raise DataError(f"{split} holds no client; give some, or leave {split} out.")
    pairs = {name: _pair(split, name, clients[name]) for name in names if name in clients}
    first, (x0, y0) = next(iter(pairs.items()))
    for name, (x, y) in pairs.items():
        for what, ours, theirs in (("x", x0, x), ("y", y0, y)):
            if ours.shape[1:] != theirs.shape[1:]:
                raise DataError(
                    f"Client {name!r} has {what} samples of shape {tuple(theirs.shape[1:])} in {split} but client "
                    f"{first!r} has {tuple(ours.shape[1:])}; all clients must share one shape."
                )
            if ours.is_floating_point() != theirs.is_floating_point():
                raise DataError(
                    f"Client {name!r} has {what} of type {theirs.dtype} in {split} but client {first!r} has "
                    f"{ours.dtype}; give all clients one type."
                )
    sizes = [len(pairs[name][0]) if name in pairs else 0 for name in names]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (torch.cat([pair[part] for pair in pairs.values()]) for part in (0, 1))
    flat = Split(x, y, names, offsets)
    _check_finite(split, flat)
    return flat


def _flat(split: str, parts: Any, clients: int | None) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """The checked parts of a flat split; ``clients`` is how many there must be."""
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        found = f"{type(parts).__name__} of {len(parts)}" if hasattr(parts, "__len__") else type(parts).__name__
        raise DataError(f"{split} is a {found}, but it must be (x, y, offsets).")
    x, y = _matched(split, None, *(parts[:1] if parts[1] is None else parts[:2]))
    try:
        offsets = np.asarray(parts[2])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The offsets of {split} cannot be read as numbers ({error}).") from None
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise DataError(
            f"The offsets of {split} are {offsets.dtype} of shape {offsets.shape}, but they must be whole numbers in a "
            "row, one more than there are clients."
        )
    offsets = offsets.astype(np.int64)
    if clients is not None and len(offsets) != clients + 1:
        raise DataError(
            f"There are {len(offsets)} offsets in {split} but {clients + 1} in train; give one more than there are "
            "clients in both."
        )
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0 or offsets[-1] != len(x) or len(falls):
        fault = f"fall at place {falls[0] + 1}" if len(falls) else f"go from {offsets[0]} to {offsets[-1]}"
        raise DataError(
            f"The offsets of {split} {fault}, but they must rise from 0 to {len(x)}, the number of samples."
        )
    return x, y, offsets


def _check_finite(split: str, flat: Split) -> None:
    """Refuse NaN and infinity: the flat tensors are looked at once, and only a fault is traced to its client."""
    for what, values in (("x", flat.x), ("y", flat.y)):
        # A sum that is finite had only finite terms, and needs no memory; one that is not may have overflowed.
        if not values.is_floating_point() or bool(values.sum().isfinite()):
            continue
        faults = (~torch.isfinite(values)).reshape(len(values), -1).sum(dim=1)
        places = faults[: flat.offsets[-1]] if flat.rows is None else faults.index_select(0, flat.rows)
        bad_places = torch.nonzero(places).flatten()
        if len(bad_places):
            i = int(np.searchsorted(flat.offsets, int(bad_places[0]), side="right")) - 1
            bad = int(places[flat.offsets[i] : flat.offsets[i + 1]].sum())
            raise DataError(
                f"Client {flat.names[i]!r} has {bad} value{'s' if bad > 1 else ''} in {what} of {split} that are NaN "
                "or infinite; replace or drop those samples."
            )
