"""Partitions of labelled samples among clients, and held-out samples with the same label proportions.

``Partition.assign`` turns labels and a random generator into rows by client name. Partitions by label first make a
table of counts, ``[clients, classes]``, and then draw the samples of each class at random. A table that comes from
proportions is off by less than one sample per entry and never exceeds the size of a class.

>>> parts = IID(clients=3).assign(np.arange(7) % 2, np.random.default_rng(0))
>>> {name: len(rows) for name, rows in parts.items()}
{'client-0': 3, 'client-1': 2, 'client-2': 2}
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.rounding import largest_total, round_within
from comfedl.utils.errors import ConfigError, DataError

Rows = NDArray[np.int64]
Labels = NDArray[Any]
Parts = dict[str, Rows]


class Partition(ABC):
    """A rule that assigns each sample to at most one client."""

    @abstractmethod
    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        """Return client name -> sorted rows of ``labels``; no row is used twice and no client is empty.

        Only ``Natural`` uses ``groups``, one name per sample. Raises ``DataError`` if the data do not suffice.
        """

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        """The label distribution of each client, ``[clients, classes]``, from which to draw held-out samples.

        By default the proportions of its own samples. Partitions that draw uniformly return those of all samples:
        the proportions of a small client are only a noisy estimate of them.
        """
        return proportions(labels, parts, classes)


@dataclass(frozen=True)
class _Numbered(Partition):
    """A partition into a given number of clients, named client-0, client-1 and so on."""

    clients: int

    def __post_init__(self) -> None:
        _require_integer("clients", self.clients)

    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        labels = np.atleast_1d(labels)
        self._require_samples(self.clients, labels)
        width = len(str(self.clients - 1))
        return {f"client-{i:0{width}d}": np.sort(rows) for i, rows in enumerate(self._split(labels, rng))}

    @abstractmethod
    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """The rows of each client, in any order."""

    def _require_samples(self, samples: int, labels: Labels) -> None:
        if samples > len(labels):
            raise DataError(
                f"{self} needs at least {samples} samples, but the data have {len(labels)}; use fewer clients or "
                "samples, or more data."
            )


@dataclass(frozen=True)
class IID(_Numbered):
    """Uniformly random samples; all clients have equal sizes (to within one), or `samples` each."""

    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_integer("samples", self.samples, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        total = len(labels) if self.samples is None else self.clients * self.samples
        self._require_samples(total, labels)
        return np.array_split(rng.permutation(len(labels))[:total], self.clients)

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        return _overall_proportions(labels, parts, classes)


@dataclass(frozen=True)
class Imbalanced(_Numbered):
    """One client has `large` samples, the others `small`, of `classes` classes if given (the paper's MNIST)."""

    large: int
    small: int
    large_client: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_integer("large", self.large)
        _require_integer("small", self.small)
        _require_integer("large_client", self.large_client, least=0, most=self.clients - 1, optional=True)
        # A client with `small` samples has at most that many classes.
        _require_integer("classes", self.classes, most=self.small, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """Uniform draws without replacement; with ``classes``, a small client draws evenly from that many classes.

        These are random, each class about equally often. The large client draws uniformly from the remaining samples.
        """
        others = self.clients - 1
        self._require_samples(self.large + others * self.small, labels)
        large_client = int(rng.integers(self.clients)) if self.large_client is None else self.large_client
        if self.classes is None:
            order = rng.permutation(len(labels))
            parts = list(order[: others * self.small].reshape(others, self.small))
            rest = order[others * self.small :]
        else:
            codes, class_sizes = _encode_classes(labels, at_least=self.classes)
            portions = self.small // self.classes + (np.arange(self.classes) < self.small % self.classes)
            parts = _draw(codes, _choose_classes(class_sizes, others, portions, rng), rng)
            taken = np.concatenate([*parts, np.empty(0, np.int64)])
            rest = rng.permutation(np.setdiff1d(np.arange(len(labels)), taken))
        parts.insert(large_client, rest[: self.large])
        return parts

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        return (_overall_proportions if self.classes is None else proportions)(labels, parts, classes)


@dataclass(frozen=True)
class DominantClass(_Numbered):
    """A share `rho` of client i is of class i, the rest is even over all others (the paper's CIFAR-10)."""

    rho: float
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.rho) and 0 <= self.rho <= 1):
            raise ConfigError(f"`rho` is {self.rho!r}, but it is a share; give a number from 0 to 1.")
        _require_integer("samples", self.samples, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """``rho`` is a share of the client's samples; the class of client i is i modulo the number of classes.

        With as many clients as classes of equal size it is also a share of the class, the other reading of the paper.
        """
        codes, class_sizes = _encode_classes(labels, at_least=1 if self.rho == 1 else 2)
        classes, i = len(class_sizes), np.arange(self.clients)
        shares = np.full((self.clients, classes), (1 - self.rho) / max(classes - 1, 1))
        shares[i, i % classes] = self.rho
        largest = largest_total(shares, class_sizes)
        k = self.samples or largest
        counts = round_within(shares * k, class_sizes) if 0 < k <= largest else None
        if counts is None:
            raise DataError(
                f"{self} needs {k or 1} samples per client, but the classes allow {largest}; use fewer clients or "
                "samples, or more data."
            )
        return _draw(codes, counts, rng)


@dataclass(frozen=True)
class Dirichlet(_Numbered):
    """Each class is split by Dirichlet(`alpha`) shares: skewed labels, unequal sizes, all samples used."""

    alpha: float
    minimum: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.alpha) and 0 < self.alpha < math.inf):
            raise ConfigError(f"`alpha` is {self.alpha!r}; give a positive, finite number, such as 0.1 (strong skew).")
        _require_integer("minimum", self.minimum)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """One draw, then a repair: a client below ``minimum`` takes from the most common class of the largest client.

        The label skew is that of Hsu et al. (2019), whose clients have equal sizes; splitting each class uses all
        samples. Redrawing until all clients have enough would never end with many clients and a small alpha.
        """
        self._require_samples(self.clients * self.minimum, labels)
        codes, class_sizes = _encode_classes(labels)
        # Shares are practically equal from this bound on, and much larger values overflow in numpy.
        alpha = np.full(self.clients, min(self.alpha, 1e12))
        shares = rng.dirichlet(alpha, size=len(class_sizes))
        cuts = np.rint(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0).T
        sizes = counts.sum(axis=1)
        for i in np.flatnonzero(sizes < self.minimum):
            while sizes[i] < self.minimum:
                donor = np.argmax(sizes)
                c = np.argmax(counts[donor])
                moved = min(self.minimum - sizes[i], sizes[donor] - self.minimum, counts[donor, c])
                counts[[donor, i], c] += [-moved, moved]
                sizes[[donor, i]] += [-moved, moved]
        return _draw(codes, counts, rng)


@dataclass(frozen=True)
class Shards(_Numbered):
    """Every client has `classes` distinct labels, in equal shards of one label each (McMahan et al.)."""

    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_integer("classes", self.classes)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """Shards as large as possible, cut within a class; those of McMahan et al. may span two classes.

        So no shard has two labels and no client a label twice. Samples that fill no shard are lost: with 2 classes per
        client, 2 % of MNIST for 100 clients and 10 % for 10, and more if one class is much larger than the others.
        """
        codes, class_sizes = _encode_classes(labels, at_least=self.classes)
        needed = self.clients * self.classes
        size, too_large = 1, len(labels) // needed + 1
        while too_large - size > 1:  # bisection; a client takes at most one shard per class
            middle = (size + too_large) // 2
            enough = np.minimum(class_sizes // middle, self.clients).sum() >= needed
            size, too_large = (middle, too_large) if enough else (size, middle)
        counts = _choose_classes(class_sizes, self.clients, np.full(self.classes, size), rng)
        return _draw(codes, counts, rng)


@dataclass(frozen=True)
class Natural(Partition):
    """The natural groups, such as hospitals, writers or devices; `by` names one of several groupings."""

    # None is the data set's default grouping. ``load`` looks it up; ``assign`` is given the groups themselves.
    by: str | None = None

    def __post_init__(self) -> None:
        if self.by is not None and (not isinstance(self.by, str) or not self.by):
            raise ConfigError(f'`by` is {self.by!r}; give the name of a grouping, such as "carrier", or leave it out.')

    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        if groups is None:
            raise DataError("The partition natural needs data with groups, but these have none; use another partition.")
        groups = np.asarray(groups)
        if groups.shape != (len(labels),) or not len(labels):
            raise DataError(f"groups has shape {groups.shape} for {len(labels)} samples; give one group per sample.")
        if groups.dtype.kind in "OS":  # mixed types cannot be sorted, and bytes make no readable names
            groups = groups.astype(str)
        values, codes = np.unique(groups, return_inverse=True)
        names = [str(value) for value in values]
        missing = np.isin(codes, [i for i, name in enumerate(names) if name in ("", "nan", "None")]).sum()
        if missing:
            raise DataError(f"{missing} samples have no group; give them one, or leave them out.")
        return dict(zip(names, _rows_by_client(np.arange(len(codes)), codes, len(names)), strict=True))


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "imbalanced": Imbalanced,
    "dominant-class": DominantClass,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "natural": Natural,
}


def proportions(labels: Labels, parts: Mapping[str, Rows], classes: int) -> NDArray[np.float64]:
    """The label proportions of each client, ``[clients, classes]``; labels are 0 to ``classes - 1``."""
    counts = np.stack([np.bincount(labels[rows], minlength=classes) for rows in parts.values()])
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _overall_proportions(labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
    """The label proportions of all samples, repeated for each client."""
    return np.tile(np.bincount(labels, minlength=classes) / len(labels), (len(parts), 1))


def like(
    pool_labels: Labels,
    proportions: NDArray[Any],
    rng: np.random.Generator,
    per_client: int | None,
    names: Sequence[str],
) -> Parts:
    """Draw k held-out samples for every client in its own label proportions, without replacement.

    ``proportions`` has one row per name and one column per class (see ``Partition.distribution``). Every count is its
    share of k, rounded up or down by largest remainder, or otherwise if a class of the pool would run out.

    k is ``per_client``; by default the largest for which no class of the pool runs out. If that is 0, because the pool
    lacks a class of some client, it is the largest whose rounded counts fit. A single sample is of the client's most
    common class if possible, and always of a class that the client has.

    Returns:
        Client name -> sorted rows of ``pool_labels``.

    Raises:
        DataError: the pool is too small for k, or the arguments do not match.
    """
    pool_labels, shares = np.asarray(pool_labels), np.asarray(proportions, dtype=np.float64)
    _require_integer("per_client", per_client, optional=True)
    if shares.ndim != 2 or not len(shares) == len(names) == len(set(names)) > 0:
        raise DataError(f"proportions has shape {shares.shape} for {len(names)} names; give one row per distinct name.")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any(axis=1).all()):
        raise DataError("The label proportions of a client must be finite, not negative and not all zero.")
    if pool_labels.ndim != 1 or pool_labels.dtype.kind not in "iu" or (pool_labels < 0).any():
        raise DataError("The labels of the held-out pool must be class indices: integers from 0.")
    shares = shares / shares.sum(axis=1, keepdims=True)
    pool = np.bincount(pool_labels, minlength=shares.shape[1])[: shares.shape[1]]
    largest = largest_total(shares, pool)
    if not largest:
        tries = range(int(pool.sum()) // len(shares), 0, -1)
        largest = next((k for k in tries if round_within(shares * k, pool) is not None), 0)
    k = per_client or largest
    counts = round_within(shares * k, pool) if 0 < k <= largest else None
    if counts is None:
        raise DataError(
            f"{len(pool_labels)} held-out samples cannot give {len(shares)} clients {k or 1} each in their own label "
            f"proportions; the most is {largest}: use fewer samples or clients, or hold out more."
        )
    return dict(zip(names, _draw(pool_labels, counts, rng), strict=True))


def stratified(labels: Labels, fraction: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Split into (kept, held-out) rows, holding out ``fraction`` of each class, to within one sample.

    Unless ``fraction`` is 0, a class of two or more samples is on both sides.
    """
    if not (_is_number(fraction) and 0 <= fraction < 1):
        raise ConfigError(f"The held-out fraction is {fraction!r}; give a number of 0 or more and below 1.")
    codes, class_sizes = _encode_classes(np.asarray(labels))
    counts = np.rint(class_sizes * fraction).astype(np.int64)
    if fraction > 0:
        counts = np.clip(counts, class_sizes > 1, class_sizes - 1)
    (held,) = _draw(codes, counts[None], rng)
    return np.setdiff1d(np.arange(len(codes)), held), held


def drawn(labels: Labels, count: int, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Split into (kept, drawn) rows, drawing ``count`` in the proportions of the labels, to within one per class."""
    codes, class_sizes = _encode_classes(np.asarray(labels))
    counts = round_within((class_sizes * count / len(codes))[None], class_sizes)
    assert counts is not None  # no share of a class exceeds it
    (rows,) = _draw(codes, counts, rng)
    return np.setdiff1d(np.arange(len(codes)), rows), rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _require_integer(name: str, value: object, least: int = 1, most: int | None = None, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not least <= value <= (value if most is None else most):  # type: ignore[operator]
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"`{name}` is {value!r}; give an integer, {allowed}.")


def _encode_classes(labels: Labels, at_least: int = 1) -> tuple[Rows, Rows]:
    """The class of each sample, as an index into the sorted distinct labels, and the size of each class."""
    if labels.ndim != 1 or labels.dtype.kind not in "iubUS":
        raise DataError(
            f"Labels of shape {labels.shape} and type {labels.dtype} are not classes; give one integer or "
            "name per sample, or use the partition iid or natural."
        )
    _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if len(sizes) < at_least:
        raise DataError(f"At least {at_least} classes are needed, but the data have {len(sizes)}; ask for fewer.")
    return codes.astype(np.int64), sizes.astype(np.int64)


def _rows_by_client(rows: Rows, owners: Rows, clients: int) -> list[Rows]:
    """The sorted rows of each client; ``owners`` has the client of each row."""
    order = np.lexsort((rows, owners))
    bounds = np.searchsorted(owners[order], np.arange(clients + 1))
    return [rows[order[a:b]] for a, b in pairwise(bounds)]


def _draw(codes: Rows, counts: Rows, rng: np.random.Generator) -> list[Rows]:
    """Give client i ``counts[i, c]`` random samples of class c, without replacement."""
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    starts = np.searchsorted(codes[order], np.arange(counts.shape[1]))
    owners = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    rows = [order[start : start + len(owner)] for start, owner in zip(starts, owners, strict=True)]
    return _rows_by_client(np.concatenate(rows), np.concatenate(owners), len(counts))


def _choose_classes(class_sizes: Rows, clients: int, portions: Rows, rng: np.random.Generator) -> Rows:
    """Give every client ``len(portions)`` random classes, ``portions[j]`` samples of the j-th; returns the counts.

    Taking the classes with the most capacity left, ties at random, succeeds whenever a solution exists. Capacities are
    first capped at the lowest level that suffices, which makes most of them equal: classes are used about equally.
    """
    each, capacity = len(portions), class_sizes // portions.max()
    if np.minimum(capacity, clients).sum() < clients * each:
        raise DataError(
            f"The classes are too small for {clients} clients with {each} different classes each; use fewer clients, "
            "samples or `classes`, or use the partition dirichlet."
        )
    level = next(t for t in range(clients + 1) if np.minimum(capacity, t).sum() >= clients * each)
    left = np.minimum(capacity, level)
    counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
    for row, tie_breaks in zip(counts, rng.random(counts.shape), strict=True):
        chosen = np.argsort(-(left + tie_breaks))[:each]
        row[chosen] = portions
        left[chosen] -= 1
    return rng.permutation(counts)  # the first clients always got the largest classes
