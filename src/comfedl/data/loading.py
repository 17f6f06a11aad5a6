"""load(): a real data set, split among clients."""

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
    """A data set by name, split among clients, with validation and test samples from each client's own distribution.

    Args:
        name: "digits", "mnist", "fashion-mnist", "cifar10" or "watch".
        partition: how the train samples are given to clients; by default ten equal clients, or the data's own.
        seed: the same seed gives the same split.
        validation: the share of the samples held out for validation, before the clients get theirs.
        test: the same for test, where the data set has no test part of its own.
        progress: show the download.
        held_out: how many validation and how many test samples each client gets; None is as many as there are.

    Held-out samples are drawn without reuse, in each client's own label proportions, the same number for every
    client. Under ``Natural`` each client's recordings are cut in time instead: the last fifth is for test, the one
    before it for validation.
    """
    if partition is not None and not isinstance(partition, partitions.Partition):
        raise ConfigError(
            f"partition is {partition!r}, but it must be like partition.Dirichlet(clients=10, alpha=0.3)."
        )
    for what, share in (("validation", validation), ("test", test)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ConfigError(f"{what} is {share!r}, but it must be a share of the samples, from 0 to below 1.")
    if held_out is not None:
        checks.at_least("held_out", held_out, 1)
    raw = read(name, progress)
    chosen = partition or (partitions.IID(clients=10) if raw.groups is None else partitions.Natural())
    if isinstance(chosen, partitions.Natural) and raw.blocks is not None:
        if held_out is not None:
            raise ConfigError("held_out is given, but these recordings are cut in time; leave it out.")
        parts = _by_time(raw, chosen, seed)
        parts = {split: rows for split, rows in parts.items() if {"validation": validation, "test": test}.get(split, 1)}
    else:
        parts = _by_label(raw, chosen, seed, validation, test, held_out)
    return _gather(raw, parts)


def _by_label(
    raw: RawData, partition: partitions.Partition, seed: int, validation: float, test: float, held_out: int | None
) -> dict[str, dict[str, Rows]]:
    """Rows by split and client; those of the data set's own test part come after all others."""
    shares = {"validation": validation} if raw.test_y is not None else {"validation": validation, "test": test}
    shares = {split: share for split, share in shares.items() if share > 0}
    if sum(shares.values()) >= 1:
        raise ConfigError(f"validation and test hold out {sum(shares.values()):g} of the samples; leave some to train.")
    left, pools, gone = np.arange(len(raw.y)), {}, 0.0
    for split, share in shares.items():
        kept, held = partitions.stratified(raw.y[left], share / (1 - gone), rng.generator(seed, f"data/{split} pool"))
        left, pools[split], gone = left[kept], left[held], gone + share
    if raw.test_y is not None and test > 0:
        pools["test"] = len(raw.y) + np.arange(len(raw.test_y))
    labels = raw.y if raw.test_y is None else np.concatenate([raw.y, raw.test_y])
    groups = None if raw.groups is None else raw.groups[left]
    owned = partition.assign(labels[left], rng.generator(seed, "data/partition"), groups)
    own = partition.distribution(labels[left], owned, raw.classes)
    parts = {"train": {client: left[rows] for client, rows in owned.items()}}
    for split, pool in pools.items():
        drawn = partitions.like(labels[pool], own, rng.generator(seed, f"data/{split}"), held_out, list(owned))
        parts[split] = {client: pool[rows] for client, rows in drawn.items()}
    return parts


def _by_time(raw: RawData, partition: partitions.Partition, seed: int) -> dict[str, dict[str, Rows]]:
    assert raw.blocks is not None
    owned = partition.assign(raw.y, rng.generator(seed, "data/partition"), raw.groups)
    last = int(raw.blocks.max())
    splits = {"train": raw.blocks < last - 1, "validation": raw.blocks == last - 1, "test": raw.blocks == last}
    return {split: {client: rows[inside[rows]] for client, rows in owned.items()} for split, inside in splits.items()}


def _gather(raw: RawData, parts: Mapping[str, Mapping[str, Rows]]) -> FederatedData:
    """The splits as views of one pair of tensors."""
    x = torch.from_numpy(raw.x if raw.test_x is None else np.concatenate([raw.x, raw.test_x]))
    y = torch.from_numpy(raw.y if raw.test_y is None else np.concatenate([raw.y, raw.test_y]))
    names = tuple(sorted(parts["train"]))
    splits = {}
    for split, clients in parts.items():
        rows = [clients[name] for name in names]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        splits[split] = Split(x, y, names, offsets, torch.from_numpy(np.concatenate(rows)))
    return FederatedData.from_splits(splits)
