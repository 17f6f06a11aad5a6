"""FederatedData from Hugging Face ``datasets`` and from flwr-datasets, without importing either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comfedl.data.client_names import NumberedNames
from comfedl.data.federated import FederatedData
from comfedl.data.from_tables import SPLITS, Shares, by_split, from_batches, from_table, rows_by_name, split_clients
from comfedl.data.table import Table
from comfedl.data.tabular import Encoding, sort_labels
from comfedl.utils import samples
from comfedl.utils.errors import ConfigError, DataError
from comfedl.utils.samples import Samples

CLIENT, SPLIT = " client", " split"  # added columns; the space avoids a clash with those of the data


class DatasetPart(NamedTuple):
    """A dataset of one client, or of several if ``client`` is None; of one split, or still to be split."""

    client: str | None
    split: str | None
    dataset: Any


def from_huggingface(
    data: Any, y: str, x: str | Sequence[str] | None, client: str | None, shares: Shares, **options: Any
) -> FederatedData:
    """See ``FederatedData.from_huggingface``."""
    parts = _parts(data, client)
    if not parts:
        raise DataError("There is no dataset; give one with a column of clients, or a dict of Datasets by client name.")
    features = list(parts[0].dataset.column_names)
    for part in parts:
        for name in (y, *([] if client is None else [client]), *([x] if isinstance(x, str) else x or ())):
            if name not in part.dataset.column_names:
                raise DataError(f"The dataset has no column {name!r}; it has {', '.join(features)}.")
    chosen = [x] if isinstance(x, str) else list(x or (name for name in features if name not in (y, client)))
    names = [name for part in parts for name in _names(part, client)]
    splits = None if parts[0].split is None else [str(part.split) for part in parts for _ in range(len(part.dataset))]
    labels = _labels(parts, y)
    if all(isinstance(value, str | bool | int | float | None) for value in _first_sample(parts, chosen)):
        table = Table(
            {
                **{name: _object_array(_column(parts, name)) for name in chosen},
                y: _object_array(labels),
                CLIENT: _object_array(names),
                **({} if splits is None else {SPLIT: _object_array(splits)}),
            },
            "the dataset",
            added=frozenset({SPLIT} if parts[0].client is None else {CLIENT, SPLIT}),
        )
        fed = from_table(table, CLIENT, y, shares, split=None if splits is None else SPLIT, **options)
        assert fed.encoding is not None
        fed.encoding = replace(fed.encoding, client=client)
        return fed
    for option in options:
        raise ConfigError(f"{option} is for tables, but the column {chosen[0]!r} holds arrays; leave it out.")
    columns = {name: _stack(name, _column(parts, name)) for name in chosen}
    return _from_arrays(columns if len(columns) > 1 else columns[chosen[0]], labels, names, splits, shares)


def _parts(data: Any, client: str | None) -> list[DatasetPart]:
    if hasattr(data, "load_partition"):  # flwr_datasets.FederatedDataset
        found: list[DatasetPart] = []
        for split, partitioner in data.partitioners.items():
            first = data.load_partition(0, split)  # only now does the partitioner have its dataset
            names = NumberedNames(int(partitioner.num_partitions))
            name = None if len(data.partitioners) == 1 else split
            found += [
                DatasetPart(names[i], name, first if i == 0 else data.load_partition(i, split))
                for i in range(len(names))
            ]
        return found
    if isinstance(data, Mapping):
        if client is not None and {*data} <= {*SPLITS}:
            return [DatasetPart(None, split, part) for split, part in data.items()]
        return [DatasetPart(str(name), None, part) for name, part in data.items()]
    if client is None:
        raise DataError('client is missing; name a column, such as client="hospital", or give a dict of datasets.')
    return [DatasetPart(None, None, data)]


def _names(part: DatasetPart, client: str | None) -> list[str]:
    if part.client is not None:
        return [part.client] * len(part.dataset)
    return [str(name) for name in part.dataset[client]]


def _column(parts: Sequence[DatasetPart], name: str) -> list[Any]:
    return [value for part in parts for value in part.dataset[name]]


def _first_sample(parts: Sequence[DatasetPart], names: Sequence[str]) -> list[Any]:
    sample = parts[0].dataset[0]
    return [sample[name] for name in names]


def _object_array(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _labels(parts: Sequence[DatasetPart], y: str) -> list[Any]:
    """The values of y; those of a ClassLabel as names."""
    names = getattr(parts[0].dataset.features.get(y), "names", None)
    return _column(parts, y) if names is None else [names[value] for value in _column(parts, y)]


def _from_arrays(
    x: Samples, labels: Sequence[Any], names: Sequence[str], splits: Sequence[str] | None, shares: Shares
) -> FederatedData:
    """Data from one tensor, or a dict of them by column, and the column of labels: classes, numbers or sequences."""
    classes: tuple[str, ...] = ()
    if all(isinstance(label, float) for label in labels):
        y = torch.tensor(labels, dtype=torch.float32)
    elif isinstance(labels[0], list | np.ndarray):  # the targets of a sequence
        y = _stack("the labels", labels)
    else:
        classes = sort_labels([str(label) for label in labels])
        index = {label: k for k, label in enumerate(classes)}
        y = torch.tensor([index[str(label)] for label in labels])
    encoding = Encoding(classes=classes, shape=tuple(x.shape[1:]) if isinstance(x, Tensor) else ())
    clients = np.array(names, dtype=object)
    if splits is None:
        batches = {
            name: (samples.select(x, torch.from_numpy(rows)), y[rows]) for name, rows in rows_by_name(clients).items()
        }
        return split_clients(batches, shares, encoding)
    return from_batches(by_split(x, y, clients, np.array(splits, dtype=object)), encoding)


def _stack(name: str, values: Sequence[Any]) -> Tensor:
    """Stack arrays into one tensor; images (bytes) are scaled to [0, 1] with channels first.

    Whole numbers stay whole, as tokens must, but arrays of two dimensions and more become floating-point numbers.
    """
    try:
        stack = np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise DataError(
            f"The samples of {name!r} cannot be stacked ({error}); give all the same shape, sequences padded to one "
            "length."
        ) from None
    if stack.dtype.kind not in "biuf":
        raise DataError(f"The samples of {name!r} have the type {stack.dtype}; give numbers, or choose columns with x.")
    if stack.dtype != np.uint8 and stack.dtype.kind in "biu" and stack.ndim <= 2:
        return torch.from_numpy(stack if stack.dtype.kind == "b" else stack.astype(np.int64))
    if stack.dtype != np.uint8:
        return torch.from_numpy(stack.astype(np.float32))
    images = stack[:, None] if stack.ndim == 3 else np.moveaxis(stack, -1, 1) if stack.ndim == 4 else stack
    return torch.from_numpy(images.astype(np.float32) / np.float32(255))
