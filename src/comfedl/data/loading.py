"""load(): a public data set, partitioned among clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.data import partition as partitions
from comfedl.data.federated import FederatedData, Split
from comfedl.data.registry import RawData, read
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError, DataError, nearest

Rows = NDArray[np.int64]


def load(
    name: str,
    partition: partitions.Partition | None = None,
    seed: int = 0,
    validation: float = 0.2,
    test: float = 0.2,
    progress: bool = False,
    held_out: int | None = None,
    classes: Sequence[int] | None = None,
) -> FederatedData:
    """Load a data set by name and partition it among clients.

    Args:
        name: "digits", "mnist", "fashion-mnist", "cifar10", "watch", "adult", "flights" or "shakespeare".
        partition: how to assign the train samples to clients; by default ten IID clients, or natural ones.
        seed: the same seed gives the same partition.
        validation: the share of the samples held out for validation, before partitioning.
        test: the same for test, if the data set has no test set.
        progress: show the progress of a download.
        held_out: the number of validation and of test samples per client; None means as many as possible. With
            ``Natural`` it is an upper limit.
        classes: keep only these labels, numbered 0, 1, ... in this order, in train and test; None keeps all.

    Every client gets the same number of held-out samples, drawn without replacement in its own label proportions.

    With ``Natural`` they are the client's own instead. Each recording of "watch" is split by time: the last fifth is
    for test, the one before it for validation. Of the others each client's own rows are split, with its label
    proportions on both sides; a client of "adult" is tested on the rows of its group in the test set. So clients have
    as much as their size allows: with two rows, one is for validation and none for test, and a single row is for
    training. Rows without a group, such as an unknown occupation, are left out, and so are groups without train rows.

    The groupings of "adult" are occupation (the default), phd (doctorates and all others, the benchmark of agnostic
    federated learning), workclass, education, marital-status, relationship, race, sex and native-country; those of
    "flights" are carrier (the default), origin and dest; those of "shakespeare" play (the default) and speaker:
    ``Natural(by="phd")``.
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
    if classes is not None:
        raw = _with_classes(name, raw, classes)
    chosen = partition or (partitions.Natural() if raw.groups else partitions.IID(clients=10))
    if not isinstance(chosen, partitions.Natural):
        parts = _by_label(raw, chosen, seed, validation, test, held_out)
    else:
        grouping = check_grouping(name, tuple(raw.groups), chosen.by)
        if raw.blocks is None:
            parts = _by_group(raw, chosen, grouping, seed, validation, test, held_out)
        else:
            if held_out is not None:
                raise ConfigError("held_out is given, but these recordings are split by time; leave it out.")
            wanted = {"train": 1, "validation": validation, "test": test}
            parts = {split: rows for split, rows in _by_time(raw, chosen, grouping, seed).items() if wanted[split]}
    return _federated_data(raw, parts)


def check_grouping(name: str, groupings: Sequence[str], by: str | None) -> str:
    """The grouping of the data set ``name`` that ``Natural(by)`` means: the first one by default."""
    if not groupings:
        raise DataError(f"The partition natural needs data with groups, but {name!r} has none; use another partition.")
    if by is None or by in groupings:
        return by or groupings[0]
    if len(groupings) == 1:
        raise ConfigError(f"`by` is {by!r}, but {name!r} has only the grouping {groupings[0]!r}; leave `by` out.")
    raise ConfigError(f"`by` is {by!r}, which is no grouping of {name!r}; {nearest(by, groupings)}.")


def check_classes(name: str, classes: Sequence[int], count: int) -> tuple[int, ...]:
    """The labels to keep of the data set ``name``, which has ``count`` of them."""
    labels = list(classes) if isinstance(classes, list | tuple | range | np.ndarray) else []
    whole = all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in labels)
    if len(labels) < 2 or not whole or len(set(labels)) < len(labels) or not 0 <= min(labels) <= max(labels) < count:
        raise ConfigError(
            f"`classes` is {classes!r}, but the labels of {name!r} are 0 to {count - 1}; give two or more different "
            "ones, such as [0, 1]."
        )
    return tuple(int(label) for label in labels)


def _with_classes(name: str, raw: RawData, classes: Sequence[int]) -> RawData:
    """The samples with these labels, which are numbered in this order."""
    kept = check_classes(name, classes, raw.classes)
    numbers = np.full(raw.classes, -1)
    numbers[list(kept)] = np.arange(len(kept))
    rows = np.flatnonzero(numbers[raw.y] >= 0)
    chosen = dataclasses.replace(
        raw,
        x=raw.x[rows],
        y=numbers[raw.y[rows]],
        classes=len(kept),
        groups={by: groups[rows] for by, groups in raw.groups.items()},
        blocks=None if raw.blocks is None else raw.blocks[rows],
    )
    if raw.test_x is None or raw.test_y is None:
        return chosen
    rows = np.flatnonzero(numbers[raw.test_y] >= 0)
    return dataclasses.replace(
        chosen,
        test_x=raw.test_x[rows],
        test_y=numbers[raw.test_y[rows]],
        test_groups={by: groups[rows] for by, groups in raw.test_groups.items()},
    )


def _shares(raw: RawData, validation: float, test: float) -> dict[str, float]:
    """The shares of the rows of ``raw.y`` to hold out, by split."""
    shares = {"validation": validation} if raw.test_y is not None else {"validation": validation, "test": test}
    shares = {split: share for split, share in shares.items() if share > 0}
    if (total := sum(shares.values())) >= 1:
        raise ConfigError(f"validation and test hold out {total:g} of the samples; keep some for training.")
    return shares


def _by_label(
    raw: RawData, partition: partitions.Partition, seed: int, validation: float, test: float, held_out: int | None
) -> dict[str, dict[str, Rows]]:
    """Rows by split and client; the rows of the data set's test set are numbered after all others."""
    shares = _shares(raw, validation, test)
    train, pools, taken = np.arange(len(raw.y)), {}, 0.0
    for split, share in shares.items():
        generator = rng.generator(seed, f"data/{split} pool")
        kept, held = partitions.stratified(raw.y[train], share / (1 - taken), generator)
        train, pools[split], taken = train[kept], train[held], taken + share
    if raw.test_y is not None and test > 0:
        pools["test"] = len(raw.y) + np.arange(len(raw.test_y))
    labels = raw.y if raw.test_y is None else np.concatenate([raw.y, raw.test_y])
    groups = next(iter(raw.groups.values()))[train] if raw.groups else None
    owned = partition.assign(labels[train], rng.generator(seed, "data/partition"), groups)
    proportions = partition.distribution(labels[train], owned, raw.classes)
    parts = {"train": {client: train[rows] for client, rows in owned.items()}}
    for split, pool in pools.items():
        generator = rng.generator(seed, f"data/{split}")
        drawn = partitions.like(labels[pool], proportions, generator, held_out, list(owned))
        parts[split] = {client: pool[rows] for client, rows in drawn.items()}
    return parts


def _by_group(
    raw: RawData,
    partition: partitions.Partition,
    grouping: str,
    seed: int,
    validation: float,
    test: float,
    held_out: int | None,
) -> dict[str, dict[str, Rows]]:
    """Rows by split and client, where each client's held-out rows are of its own group, in its label proportions.

    Natural clients differ in x too, so a common pool would test them on the samples of others.
    """
    shares, groups = _shares(raw, validation, test), raw.groups[grouping]
    rows = np.flatnonzero(groups != "")
    owned = partition.assign(raw.y[rows], rng.generator(seed, "data/partition"), groups[rows])
    parts: dict[str, dict[str, Rows]] = {"train": {client: rows[own] for client, own in owned.items()}}
    for split, share in shares.items():
        generator = rng.generator(seed, f"data/{split}")
        parts[split] = {}
        for client, left in parts["train"].items():
            # At least one row, if another one remains to train on.
            count = min(max(round(share * len(owned[client])), 1), len(left) - 1)
            kept, held = partitions.drawn(raw.y[left], count, generator)
            parts["train"][client], parts[split][client] = left[kept], left[held]
    labels = raw.y
    if raw.test_y is not None and test > 0:
        labels, test_groups = np.concatenate([raw.y, raw.test_y]), raw.test_groups[grouping]
        parts["test"] = {client: len(raw.y) + np.flatnonzero(test_groups == client) for client in owned}
    if held_out is not None:
        for split in parts.keys() - {"train"}:
            generator = rng.generator(seed, f"data/{split} limit")
            for client, held in parts[split].items():
                if len(held) > held_out:
                    parts[split][client] = held[partitions.drawn(labels[held], held_out, generator)[1]]
    return parts


def _by_time(raw: RawData, partition: partitions.Partition, grouping: str, seed: int) -> dict[str, dict[str, Rows]]:
    assert raw.blocks is not None
    owned = partition.assign(raw.y, rng.generator(seed, "data/partition"), raw.groups[grouping])
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
