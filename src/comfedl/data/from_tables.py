"""The reader's own data: tables and torch's datasets, each client's part split in itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from comfedl.data.client_names import Numbered
from comfedl.data.federated import Batch, FederatedData
from comfedl.data.partition import stratified
from comfedl.data.tabular import Encoding, Rows, Table, as_table, learn, read_csv
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")
TASKS = ("classification", "regression")


class Shares(NamedTuple):
    """How much of each client's samples is held out, and the seed by which they are drawn."""

    validation: float = 0.2
    test: float = 0.2
    seed: int = 0

    def check(self) -> None:
        """Refuse what are no shares."""
        for name, share in (("validation", self.validation), ("test", self.test)):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
                raise ConfigError(f"{name} is {share!r}, but it must be a share of the samples, from 0 to below 1.")
        if self.validation + self.test >= 1:
            held = self.validation + self.test
            raise ConfigError(f"validation and test hold out {held:g} of the samples; leave some to train.")
        checks.at_least("seed", self.seed, 0)

    def divide(self, client: str, labels: NDArray[np.int64]) -> dict[str, Rows]:
        """A client's rows by split, in the proportions of its labels; it does not depend on the other clients."""
        left, gone, rows = np.arange(len(labels)), 0.0, {}
        for split, share in (("validation", self.validation), ("test", self.test)):
            if share > 0:
                drawn = rng.generator(self.seed, f"data/own {split}", client=client)
                kept, held = stratified(labels[left], share / (1 - gone), drawn)
                left, rows[split], gone = left[kept], left[held], gone + share
        return {"train": left, **rows}


def from_table(
    frame: Any,
    client: str,
    target: str,
    shares: Shares,
    split: str | None = None,
    drop: Sequence[str] = (),
    task: str | None = None,
    scale: bool = True,
    scale_target: bool = False,
    missing: str = "error",
) -> FederatedData:
    """A table with a column that names each row's client; see ``FederatedData.from_dataframe``."""
    shares.check()
    table = as_table(frame)
    if task is not None:
        checks.one_of("task", task, TASKS)
    checks.one_of("missing", missing, ("error", "drop"))
    for what, value in (("scale", scale), ("scale_target", scale_target)):
        if not isinstance(value, bool):
            raise ConfigError(f"{what} is {value!r}, but it must be true or false.")
    if isinstance(drop, str) or not all(isinstance(name, str) for name in drop):
        raise ConfigError(f"drop is {drop!r}, but it must be a list of columns' names.")
    roles = [("client", client), ("target", target), *(("drop", name) for name in drop)]
    roles += [] if split is None else [("split", split)]
    for place, (role, name) in enumerate(roles):
        table.column(name)
        for other, same in roles[:place]:
            if same == name:
                raise ConfigError(f"Column {name!r} is both {other} and {role}; give each a column of its own.")
    if missing == "drop":
        table = table.complete([name for name in table.columns if name not in drop])
    names = np.array(table.texts(client), dtype=object)
    parts = _parts(table, names, target, shares, split, task)
    train = parts == "train"
    leave_out = [*drop, *([] if split is None else [split])]
    encoding = learn(table, train, target, client, leave_out, task, scale, scale_target)
    x, y = torch.from_numpy(encoding.x(table)), torch.from_numpy(encoding.y(table))
    return federated(by_split(x, y, names, parts), encoding)


def grouped(names: NDArray[Any]) -> dict[str, Rows]:
    """Each name's rows, in order."""
    found, codes = np.unique(names, return_inverse=True)
    rows = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    return {str(name): own for name, own in zip(found, rows, strict=True)}


def by_split(x: Tensor, y: Tensor, names: NDArray[Any], parts: NDArray[Any]) -> dict[str, dict[str, Batch]]:
    """The samples of each split and client, of rows that say both."""
    found: dict[str, dict[str, Batch]] = {part: {} for part in SPLITS}
    for name, own in grouped(names).items():
        for part in SPLITS:
            rows = torch.from_numpy(own[parts[own] == part])
            if len(rows):
                found[part][name] = (x[rows], y[rows])
    return found


def _parts(
    table: Table, names: NDArray[Any], target: str, shares: Shares, split: str | None, task: str | None
) -> NDArray[Any]:
    """Which split each row belongs to: as a column says, or drawn within each client."""
    if split is not None:
        parts = np.array(table.texts(split), dtype=object)
        strange = next((part for part in parts if part not in SPLITS), None)
        if strange is not None:
            raise DataError(
                f"Column {split!r} of {table.source} has the value {strange!r}, but it must be one of "
                f"{', '.join(SPLITS)}."
            )
        return parts
    _, values, gaps = table.cells(target)
    few = task != "regression" and not gaps.any() and (task is not None or len(np.unique(values.astype(str))) <= 20)
    labels = np.unique(values.astype(str), return_inverse=True)[1] if few else np.zeros(len(values), dtype=np.int64)
    parts = np.full(len(table), "train", dtype=object)
    for name, own in grouped(names).items():
        for part, rows in shares.divide(name, labels[own]).items():
            parts[own[rows]] = part
    return parts


def federated(parts: Mapping[str, Mapping[str, Batch]], encoding: Encoding | None = None) -> FederatedData:
    """Data from each split's clients; a split that nobody has is left out."""
    fed = FederatedData(parts["train"], parts.get("validation") or None, parts.get("test") or None)
    fed.encoding = encoding
    return fed


def from_csv(path: str, client: str, target: str, shares: Shares, **options: Any) -> FederatedData:
    """A CSV file with a column that names each row's client."""
    return from_table(read_csv(file_at(path)), client, target, shares, **options)


def file_at(path: Any) -> Path:
    """A path as the reader wrote it; it counts from the working folder."""
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"path is {path!r}, but it must be the name of a file or folder.")
    return Path(path).expanduser()


def divided(clients: Mapping[str, Batch], shares: Shares, encoding: Encoding | None = None) -> FederatedData:
    """Each client's samples split by shares."""
    shares.check()
    found: dict[str, dict[str, Batch]] = {part: {} for part in SPLITS}
    for name, (x, y) in clients.items():
        labelled = y.ndim == 1 and not y.is_floating_point()
        labels = y.numpy() if labelled else np.zeros(len(y), dtype=np.int64)
        for part, rows in shares.divide(name, labels).items():
            if len(rows):
                found[part][name] = (x[torch.from_numpy(rows)], y[torch.from_numpy(rows)])
    return federated(found, encoding)


# torch's datasets.


def from_datasets(train: Any, validation: Any, test: Any, seed: int) -> FederatedData:
    """torch Datasets, one a client; see ``FederatedData.from_datasets``."""
    share = {name: part for name, part in (("validation", validation), ("test", test)) if _is_share(part)}
    shares = Shares(**{"validation": 0.0, "test": 0.0, **share}, seed=seed)
    fed = divided(_read_all("train", train), shares)
    given = {name: part for name, part in (("validation", validation), ("test", test)) if not _is_share(part)}
    parts = {name: found for name in SPLITS if (found := fed.split(name)) is not None}
    read = {name: _read_all(name, part) for name, part in given.items() if part is not None}
    return federated({**parts, **read}) if read else fed


def _is_share(part: Any) -> bool:
    return isinstance(part, int | float)


def _read_all(split: str, given: Any) -> dict[str, Batch]:
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, list | tuple):
        named = dict(zip(Numbered(len(given)), given, strict=True))
    else:
        raise DataError(
            f"{split} is a {type(given).__name__}, but it must be a dict (client's name: Dataset) or a list of them."
        )
    return {name: _read(f"Client {name!r} in {split}", dataset) for name, dataset in named.items()}


def _read(who: str, dataset: Any) -> Batch:
    """All samples of a map-style Dataset."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{who} is a {type(dataset).__name__}; give a map-style Dataset, with __getitem__ and __len__.")
    if len(dataset) == 0:
        raise DataError(f"{who} has no samples; give it some, or leave it out.")
    xs, ys = zip(*(_sample(who, dataset[i]) for i in range(len(dataset))), strict=True)
    odd = next((x.shape for x in xs if x.shape != xs[0].shape), None)
    if odd is not None:
        raise DataError(f"{who} has samples of shape {tuple(xs[0].shape)} and {tuple(odd)}; give all one shape.")
    return torch.stack(xs), torch.stack(ys)


def _sample(who: str, sample: Any) -> Batch:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        kind = f"{type(sample).__name__} of {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
        raise DataError(
            f"{who} gives samples that are a {kind}, but a sample must be a pair (x, y); wrap the Dataset in one whose "
            "__getitem__ returns such a pair."
        )
    try:
        x, y = (torch.as_tensor(part) for part in sample)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{who} gives samples that are no numbers ({error}); give tensors or arrays, such as by the transform "
            "ToTensor()."
        ) from None
    return x, y
