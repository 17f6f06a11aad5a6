"""load(): a public data set, partitioned among clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.data import partition as partitions
from comfedl.data.federated import FederatedData, Split
from comfedl.data.registry import RawData, read
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError

Rows = NDArray[np.int64]


def load(
    name: str,
    partition: partitions.Partition | None = None,
    seed: int = 0,
    validation: float = 0.2,
    test: float = 0.2,
    progress: bool = False,
    held_out: int | None = None,
) -> FederatedData:
    """Load a data set by name and partition it among clients.

    Args:
        name: "digits", "mnist", "fashion-mnist", "cifar10" or "watch".
        partition: how to assign the train samples to clients; by default ten IID clients, or natural ones.
        seed: the same seed gives the same partition.
        validation: the share of the samples held out for validation, before partitioning.
        test: the same for test, if the data set has no test set.
        progress: show the progress of a download.
        held_out: the number of validation and of test samples per client; None means as many as possible.

    Every client gets the same number of held-out samples, drawn without replacement in its own label proportions. With
    ``Natural`` each client's recordings are split by time instead: the last fifth is for test, the one before it for
    validation.
    """
    if partition is not None and not isinstance(partition, partitions.Partition):
        raise ConfigError(
            f"partition is {partition!r}, but it must be one, such as partition.Dirichlet(clients=10, alpha=0.3)."
        )
    for what, share in (("validation", validation), ("test", test)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ConfigError(f"{what} is {share!r}, but it must be a share of the samples: 0 or more and below 1.")
    if held_out is not None:
        checks.at_least("held_out", held_out, 1)
    raw = read(name, progress)
    chosen = partition or (partitions.IID(clients=10) if raw.groups is None else partitions.Natural())
    if isinstance(chosen, partitions.Natural) and raw.blocks is not None:
        if held_out is not None:
            raise ConfigError("held_out is given, but these recordings are split by time; leave it out.")
        parts = _by_time(raw, chosen, seed)
        parts = {split: rows for split, rows in parts.items() if {"validation": validation, "test": test}.get(split, 1)}
    else:
        parts = _by_label(raw, chosen, seed, validation, test, held_out)
    return _federated_data(raw, parts)


def _by_label(
    raw: RawData, partition: partitions.Partition, seed: int, validation: float, test: float, held_out: int | None
) -> dict[str, dict[str, Rows]]:
    """Rows by split and client; the rows of the data set's test set are numbered after all others."""
    shares = {"validation": validation} if raw.test_y is not None else {"validation": validation, "test": test}
    shares = {split: share for split, share in shares.items() if share > 0}
    if (total := sum(shares.values())) >= 1:
        raise ConfigError(f"validation and test hold out {total:g} of the samples; keep some for training.")
    train, pools, taken = np.arange(len(raw.y)), {}, 0.0
    for split, share in shares.items():
        generator = rng.generator(seed, f"data/{split} pool")
        kept, held = partitions.stratified(raw.y[train], share / (1 - taken), generator)
        train, pools[split], taken = train[kept], train[held], taken + share
    if raw.test_y is not None and test > 0:
        pools["test"] = len(raw.y) + np.arange(len(raw.test_y))
    labels = raw.y if raw.test_y is None else np.concatenate([raw.y, raw.test_y])
    groups = None if raw.groups is None else raw.groups[train]
    owned = partition.assign(labels[train], rng.generator(seed, "data/partition"), groups)
    proportions = partition.distribution(labels[train], owned, raw.classes)
    parts = {"train": {client: train[rows] for client, rows in owned.items()}}
    for split, pool in pools.items():
        generator = rng.generator(seed, f"data/{split}")
        drawn = partitions.like(labels[pool], proportions, generator, held_out, list(owned))
        parts[split] = {client: pool[rows] for client, rows in drawn.items()}
    return parts


def _by_time(raw: RawData, partition: partitions.Partition, seed: int) -> dict[str, dict[str, Rows]]:
    assert raw.blocks is not None
    owned = partition.assign(raw.y, rng.generator(seed, "data/partition"), raw.groups)
    last = int(raw.blocks.max())
    splits = {"train": raw.blocks < last - 1, "validation": raw.blocks == last - 1, "test": raw.blocks == last}
    return {split: {client: rows[mask[rows]] for client, rows in owned.items()} for split, mask in splits.items()}


def _federated_data(raw: RawData, parts: Mapping[str, Mapping[str, Rows]]) -> FederatedData:
    """FederatedData whose splits share one x and one y."""
    x = torch.from_numpy(raw.x if raw.test_x is None else np.concatenate([raw.x, raw.test_x]))
    y = torch.from_numpy(raw.y if raw.test_y is None else np.concatenate([raw.y, raw.test_y]))
    names = tuple(sorted(parts["train"]))
    splits = {}
    for split, clients in parts.items():
        rows = [clients[name] for name in names]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        splits[split] = Split(x, y, names, offsets, torch.from_numpy(np.concatenate(rows)))
    return FederatedData.from_splits(splits)
