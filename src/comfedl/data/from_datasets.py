"""FederatedData from torch Datasets, one per client."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from comfedl.data.checked import check_clients
from comfedl.data.client_cache import ClientCache, cache_if_lazy
from comfedl.data.client_names import NumberedNames
from comfedl.data.federated import Batch, FederatedData
from comfedl.data.from_tables import SPLITS, Shares, from_batches, split_clients
from comfedl.data.lazy_data import drawn_rows, lazy_data
from comfedl.data.sources import IntArray, Source
from comfedl.utils import generators, samples, tree
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples


def from_datasets(
    train: Any, validation: Any, test: Any, seed: int, lazy: bool = False, memory_mb: float | None = None
) -> FederatedData:
    """See ``FederatedData.from_datasets``."""
    cache = cache_if_lazy(lazy, memory_mb)
    share = {name: part for name, part in (("validation", validation), ("test", test)) if _is_share(part)}
    shares = Shares(**{"validation": 0.0, "test": 0.0, **share}, seed=seed)
    if cache is not None:
        return _lazily(train, {"validation": validation, "test": test}, shares, cache)
    fed = split_clients(_read_all("train", train), shares)
    given = {name: part for name, part in (("validation", validation), ("test", test)) if not _is_share(part)}
    parts = {name: found for name in SPLITS if (found := fed.split(name)) is not None}
    read = {name: _read_all(name, part) for name, part in given.items() if part is not None}
    return from_batches({**parts, **read}) if read else fed


def _lazily(train: Any, others: Mapping[str, Any], shares: Shares, cache: ClientCache) -> FederatedData:
    given = {"train": _by_name("train", train)}
    given |= {name: _by_name(name, part) for name, part in others.items() if part is not None and not _is_share(part)}
    if not given["train"]:
        raise DataError("train has no clients; give at least one, as {name: Dataset}.")
    names = tuple(sorted(given["train"]))
    for split, datasets in given.items():
        check_clients(split, names, datasets)
    sources = {split: DatasetSource(split, names, [own.get(name) for name in names]) for split, own in given.items()}
    parts = drawn_rows(names, sources["train"], shares)
    return lazy_data(names, {**parts, **{split: (sources[split], None) for split in given if split != "train"}}, cache)


class DatasetSource(Source):
    """Map-style Datasets; ``__getitem__`` is called when a sample is needed, by one thread at a time."""

    runs_code = True

    def __init__(self, split: str, names: Sequence[str], datasets: Sequence[Any]) -> None:
        self._datasets, self._seen = datasets, [False] * len(datasets)
        self._draws: dict[int, bool] = {}
        for name, dataset in zip(names, datasets, strict=True):
            if dataset is not None:
                _check_map_style(f"Client {name!r} in {split}", dataset)
        self.sizes = np.array([0 if dataset is None else len(dataset) for dataset in datasets], dtype=np.int64)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        dataset, places = self._datasets[i], rows.tolist()
        with self._lock:
            if len(dataset) != self.sizes[i]:
                raise DataError(
                    f"{who} has {len(dataset)} samples, but had {self.sizes[i]} at the start; a Dataset must not "
                    "change during a run."
                )
            if _is_pair_of_tensors(dataset):
                chosen = torch.from_numpy(rows)
                return dataset.tensors[0].index_select(0, chosen), dataset.tensors[1].index_select(0, chosen)
            xs, ys = zip(*(self._sample(who, dataset, place) for place in places), strict=True)
            if not self._seen[i]:
                self._seen[i] = True
                again = {k: self._sample(who, dataset, places[k])[0] for k in _looks(len(places))}
                odd = _random_sample(xs, again)
                if odd is not None:
                    warnings.warn(
                        f"{who} has random samples: sample {places[odd]} was not the same when it was read again. A "
                        "sample is read anew whenever it is needed, so the run cannot be repeated or resumed exactly; "
                        "leave the randomness out of the Dataset, and give it to fit(transform=...), which changes "
                        "every batch.",
                        stacklevel=2,
                    )
            return _stacked(who, xs), _stacked(who, ys)

    def reading_draws(self, i: int, who: str) -> bool:
        if i not in self._draws:
            dataset = self._datasets[i]
            with self._lock, generators.restored() as before:
                if not _is_pair_of_tensors(dataset):
                    self._sample(who, dataset, 0)
                self._draws[i] = generators.states() != before
        return self._draws[i]

    def _sample(self, who: str, dataset: Any, place: int) -> Batch:
        try:
            found = dataset[place]
        except Exception as error:  # the user's Dataset may raise anything
            raise DataError(
                f"{who} cannot be read: sample {place} of its {type(dataset).__name__} raised {type(error).__name__}: "
                f"{error}"
            ) from error
        return _sample(who, found)

    def identity(self, times: bool) -> Iterator[Any]:
        for dataset in self._datasets:
            yield None if dataset is None else (type(dataset).__module__, type(dataset).__qualname__, len(dataset))
        i = int(np.flatnonzero(self.sizes)[0])
        for part in self.read(i, np.arange(1), "The first client"):
            yield from tree.leaves(part)


def _is_share(part: Any) -> bool:
    return isinstance(part, int | float)


def _by_name(split: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, list | tuple):
        return dict(zip(NumberedNames(len(given)), given, strict=True))
    raise DataError(
        f"{split} is a {type(given).__name__}, but it must be a dict of Datasets by client name, or a list."
    )


def _read_all(split: str, given: Any) -> dict[str, Batch]:
    named = _by_name(split, given)
    return {name: _read(f"Client {name!r} in {split}", dataset) for name, dataset in named.items()}


def _read(who: str, dataset: Any) -> Batch:
    """Stack all samples of a map-style Dataset."""
    if _is_pair_of_tensors(dataset):
        return dataset.tensors[0], dataset.tensors[1]
    _check_map_style(who, dataset)
    xs, ys = zip(*(_sample(who, dataset[i]) for i in range(len(dataset))), strict=True)
    _warn_of_randomness(who, dataset, xs)
    return _stacked(who, xs), _stacked(who, ys)


def _is_pair_of_tensors(dataset: Any) -> bool:
    return isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2


def _check_map_style(who: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{who} is a {type(dataset).__name__}; give a map-style Dataset, with __getitem__ and __len__.")
    if len(dataset) == 0:
        raise DataError(f"{who} has no samples; give it some, or leave it out.")


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
    odd = _random_sample(xs, {i: _sample(who, dataset[i])[0] for i in _looks(len(xs))})
    if odd is not None:
        warnings.warn(
            f"{who} has random samples: sample {odd} was not the same when it was read again. It is read once, so "
            "each sample keeps what it got for the whole run; leave the randomness out of the Dataset, and give "
            "it to fit(transform=...), which changes every batch.",
            stacklevel=6,
        )


def _looks(count: int) -> list[int]:
    """The samples that are read twice."""
    return sorted({0, count // 2, count - 1})[:LOOKS]


def _random_sample(xs: Sequence[Samples], again: Mapping[int, Samples]) -> int | None:
    """The first sample that was not the same when it was read again."""
    for i, second in again.items():
        pairs = zip(tree.leaves(xs[i]), tree.leaves(second), strict=False)
        if not all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs):
            return i
    return None


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
