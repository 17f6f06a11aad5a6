"""FederatedData from torch Datasets, one per client."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from comfedl.data.client_names import NumberedNames
from comfedl.data.federated import Batch, FederatedData
from comfedl.data.from_tables import SPLITS, Shares, from_batches, split_clients
from comfedl.utils import samples, tree
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples


def from_datasets(train: Any, validation: Any, test: Any, seed: int) -> FederatedData:
    """See ``FederatedData.from_datasets``."""
    share = {name: part for name, part in (("validation", validation), ("test", test)) if _is_share(part)}
    shares = Shares(**{"validation": 0.0, "test": 0.0, **share}, seed=seed)
    fed = split_clients(_read_all("train", train), shares)
    given = {name: part for name, part in (("validation", validation), ("test", test)) if not _is_share(part)}
    parts = {name: found for name in SPLITS if (found := fed.split(name)) is not None}
    read = {name: _read_all(name, part) for name, part in given.items() if part is not None}
    return from_batches({**parts, **read}) if read else fed


def _is_share(part: Any) -> bool:
    return isinstance(part, int | float)


def _read_all(split: str, given: Any) -> dict[str, Batch]:
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, list | tuple):
        named = dict(zip(NumberedNames(len(given)), given, strict=True))
    else:
        raise DataError(
            f"{split} is a {type(given).__name__}, but it must be a dict of Datasets by client name, or a list."
        )
    return {name: _read(f"Client {name!r} in {split}", dataset) for name, dataset in named.items()}


def _read(who: str, dataset: Any) -> Batch:
    """Stack all samples of a map-style Dataset."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{who} is a {type(dataset).__name__}; give a map-style Dataset, with __getitem__ and __len__.")
    if len(dataset) == 0:
        raise DataError(f"{who} has no samples; give it some, or leave it out.")
    xs, ys = zip(*(_sample(who, dataset[i]) for i in range(len(dataset))), strict=True)
    _warn_of_randomness(who, dataset, xs)
    return _stacked(who, xs), _stacked(who, ys)


def _stacked(who: str, rows: Sequence[Samples]) -> Samples:
    """The samples of a dataset as one tensor, or a tuple or dict of tensors."""
    first = rows[0]
    for row in rows:
        if samples.structure(row) != samples.structure(first):
            raise DataError(
                f"{who} has samples that are {samples.structure(first)} and {samples.structure(row)}; give all the "
                "same."
            )
        for (key, one), (_, other) in zip(samples.named(first), samples.named(row), strict=True):
            if one.shape != other.shape:
                where = f" at {key}" if key else ""
                raise DataError(
                    f"{who} has samples of shape {tuple(one.shape)} and {tuple(other.shape)}{where}; give all the same "
                    "shape."
                )
    return tree.map(lambda *parts: torch.stack(parts), *rows)


LOOKS = 3  # the samples of a dataset that are read twice


def _warn_of_randomness(who: str, dataset: Any, xs: Sequence[Samples]) -> None:
    """Warn if a sample that is read twice is not the same: it is read once for the whole run."""
    for i in sorted({0, len(xs) // 2, len(xs) - 1})[:LOOKS]:
        again = _sample(who, dataset[i])[0]
        pairs = zip(tree.leaves(xs[i]), tree.leaves(again), strict=False)
        if not all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs):
            warnings.warn(
                f"{who} has random samples: sample {i} was not the same when it was read again. It is read once, so "
                "each sample keeps what it got for the whole run; leave the randomness out of the Dataset, and give "
                "it to fit(transform=...), which changes every batch.",
                stacklevel=6,
            )
            return


def _sample(who: str, sample: Any) -> Batch:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        kind = f"{type(sample).__name__} of {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
        raise DataError(
            f"{who} has samples that are a {kind}, but a sample must be a pair (x, y); wrap the Dataset in one whose "
            "__getitem__ returns a pair."
        )
    try:
        x, y = (_tensors(part) for part in sample)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{who} has samples that are not numbers ({error}); give tensors or arrays, for example with the transform "
            "ToTensor()."
        ) from None
    return x, y


def _tensors(part: Any) -> Samples:
    if isinstance(part, Mapping):
        return {key: torch.as_tensor(value) for key, value in sorted(part.items())}
    # A tuple is several inputs if it holds tensors or arrays, and one input if it holds numbers.
    if isinstance(part, tuple) and any(isinstance(value, Tensor | np.ndarray) for value in part):
        return tuple(torch.as_tensor(value) for value in part)
    return torch.as_tensor(part)
