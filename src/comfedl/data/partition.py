"""Who owns which sample: partitions of a labelled pool over clients, and held-out samples to match.

A partition is a small frozen value; ``assign`` turns labels and a generator into rows by client name. Those
by label make a table of counts, ``[clients, classes]``, and deal it from shuffled classes. Where the table
comes from proportions it is rounded to within one sample an entry, and no class is ever overdrawn.

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

from comfedl.data.rounding import proportional, rounded
from comfedl.utils.errors import ConfigError, DataError

Rows = NDArray[np.int64]
Labels = NDArray[Any]
Parts = dict[str, Rows]


class Partition(ABC):
    """A way to give each sample to at most one client."""

    @abstractmethod
    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        """Return client name -> sorted rows of ``labels``; no row twice, no client empty.

        Only ``Natural`` reads ``groups``, one name per sample. Raises ``DataError`` if the data cannot do.
        """

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        """The label proportions that each client's samples were drawn with, ``[clients, classes]``.

        By default those of its samples. A partition of uniform draws gives the pool's to all, since twenty draws
        show their distribution only roughly.
        """
        return proportions(labels, parts, classes)


@dataclass(frozen=True)
class _Numbered(Partition):
    """A partition over a number of clients, which are named by their number."""

    clients: int

    def __post_init__(self) -> None:
        _whole("clients", self.clients)

    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        labels = np.atleast_1d(labels)
        self._need(self.clients, labels)
        width = len(str(self.clients - 1))
        return {f"client-{i:0{width}d}": np.sort(rows) for i, rows in enumerate(self._split(labels, rng))}

    @abstractmethod
    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """The rows of each client, in any order."""

    def _need(self, samples: int, labels: Labels) -> None:
        if samples > len(labels):
            raise DataError(
                f"{self} needs at least {samples} samples but the data has {len(labels)}; ask for fewer "
                "clients or samples, or bring more data."
            )


@dataclass(frozen=True)
class IID(_Numbered):
    """Every client draws uniformly from the pool: sizes equal to within one, or `samples` each."""

    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("samples", self.samples, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        total = len(labels) if self.samples is None else self.clients * self.samples
        self._need(total, labels)
        return np.array_split(rng.permutation(len(labels))[:total], self.clients)

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        return _uniform_draws(labels, parts, classes)


@dataclass(frozen=True)
class Imbalanced(_Numbered):
    """One client has `large` samples, the others `small` (the paper's MNIST); `classes` skews the small."""

    large: int
    small: int
    large_client: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("large", self.large)
        _whole("small", self.small)
        _whole("large_client", self.large_client, least=0, most=self.clients - 1, optional=True)
        # A client of `small` samples cannot show more classes than that.
        _whole("classes", self.classes, most=self.small, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """Uniform draws without reuse; with ``classes``, a small client's come evenly from that many classes.

        Those are drawn by lot, each class about equally often. The large client draws uniformly from all that
        the small ones leave, whatever its class.
        """
        others = self.clients - 1
        self._need(self.large + others * self.small, labels)
        giant = int(rng.integers(self.clients)) if self.large_client is None else self.large_client
        if self.classes is None:
            order = rng.permutation(len(labels))
            parts = list(order[: others * self.small].reshape(others, self.small))
            rest = order[others * self.small :]
        else:
            codes, pool = _classes(labels, at_least=self.classes)
            portions = self.small // self.classes + (np.arange(self.classes) < self.small % self.classes)
            parts = _deal(codes, _choose(pool, others, portions, rng), rng)
            taken = np.concatenate([*parts, np.empty(0, np.int64)])
            rest = rng.permutation(np.setdiff1d(np.arange(len(labels)), taken))
        parts.insert(giant, rest[: self.large])
        return parts

    def distribution(self, labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
        return (_uniform_draws if self.classes is None else proportions)(labels, parts, classes)


@dataclass(frozen=True)
class DominantClass(_Numbered):
    """Client i has a share `rho` of class i, equal shares of the others (the paper's CIFAR-10 split)."""

    rho: float
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.rho) and 0 <= self.rho <= 1):
            raise ConfigError(f"`rho` is {self.rho!r} but is a share; give a number from 0 to 1.")
        _whole("samples", self.samples, optional=True)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """Shares are of the client's own samples; its class is its number modulo the number of classes.

        With as many clients as classes, all of a size, they are shares of the class too, as one may also read
        the paper.
        """
        codes, pool = _classes(labels, at_least=1 if self.rho == 1 else 2)
        classes, i = len(pool), np.arange(self.clients)
        shares = np.full((self.clients, classes), (1 - self.rho) / max(classes - 1, 1))
        shares[i, i % classes] = self.rho
        largest = proportional(shares, pool)
        k = self.samples or largest
        counts = rounded(shares * k, pool) if 0 < k <= largest else None
        if counts is None:
            raise DataError(
                f"{self} needs {k or 1} samples per client but its classes allow {largest}; ask for "
                "fewer clients or samples, or bring more data."
            )
        return _deal(codes, counts, rng)


@dataclass(frozen=True)
class Dirichlet(_Numbered):
    """Each class is shared out by a Dirichlet(`alpha`) draw: skewed labels, unequal sizes, the whole pool."""

    alpha: float
    minimum: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.alpha) and 0 < self.alpha < math.inf):
            raise ConfigError(f"`alpha` is {self.alpha!r}; give a positive, finite number (0.1: skewed).")
        _whole("minimum", self.minimum)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """One draw, then a repair: who is short of ``minimum`` takes the largest client's commonest class.

        Label skew as in Hsu et al. (2019), but they fill clients of one size; sharing out each class uses the
        whole pool. To draw again until all have enough would never end for many clients and a small alpha.
        """
        self._need(self.clients * self.minimum, labels)
        codes, pool = _classes(labels)
        # Far above this bound, where all shares are alike in any case, numpy's draw would overflow.
        alpha = np.full(self.clients, min(self.alpha, 1e12))
        shares = rng.dirichlet(alpha, size=len(pool))
        cuts = np.rint(np.cumsum(shares, axis=1) * pool[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0).T
        sizes = counts.sum(axis=1)
        for i in np.flatnonzero(sizes < self.minimum):
            while sizes[i] < self.minimum:
                donor = np.argmax(sizes)
                c = np.argmax(counts[donor])
                moved = min(self.minimum - sizes[i], sizes[donor] - self.minimum, counts[donor, c])
                counts[[donor, i], c] += [-moved, moved]
                sizes[[donor, i]] += [-moved, moved]
        return _deal(codes, counts, rng)


@dataclass(frozen=True)
class Shards(_Numbered):
    """Every client has exactly `classes` different labels, in equal shards of one label (McMahan et al.)."""

    classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("classes", self.classes)

    def _split(self, labels: Labels, rng: np.random.Generator) -> list[Rows]:
        """Shards as large as the pool allows, cut within a class, where McMahan et al. cut across.

        So no shard has two labels and no client a label twice. The price is what fills no shard: of MNIST in
        2 classes each, 2 % for 100 clients and 10 % for 10; much, where one class outweighs the rest.
        """
        codes, pool = _classes(labels, at_least=self.classes)
        needed = self.clients * self.classes
        size, above = 1, len(labels) // needed + 1
        while above - size > 1:  # the largest size with enough shards, a client taking one of a class at most
            middle = (size + above) // 2
            enough = np.minimum(pool // middle, self.clients).sum() >= needed
            size, above = (middle, above) if enough else (size, middle)
        return _deal(codes, _choose(pool, self.clients, np.full(self.classes, size), rng), rng)


@dataclass(frozen=True)
class Natural(Partition):
    """The data's own groups, such as hospitals, writers or devices, under their own names."""

    def assign(self, labels: Labels, rng: np.random.Generator, groups: Labels | None = None) -> Parts:
        if groups is None:
            raise DataError("The partition natural needs data with groups, and this has none; use another.")
        groups = np.asarray(groups)
        if groups.shape != (len(labels),) or not len(labels):
            raise DataError(f"Groups of shape {groups.shape} do not give {len(labels)} samples a group each.")
        if groups.dtype.kind in "OS":  # mixed types have no order, and bytes no readable name
            groups = groups.astype(str)
        values, codes = np.unique(groups, return_inverse=True)
        names = [str(value) for value in values]
        missing = np.isin(codes, [i for i, name in enumerate(names) if name in ("", "nan", "None")]).sum()
        if missing:
            raise DataError(f"{missing} samples have no group; name it or leave them out.")
        return dict(zip(names, _gather(np.arange(len(codes)), codes, len(names)), strict=True))


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "imbalanced": Imbalanced,
    "dominant-class": DominantClass,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "natural": Natural,
}


def proportions(labels: Labels, parts: Mapping[str, Rows], classes: int) -> NDArray[np.float64]:
    """The label proportions of each client, ``[clients, classes]``, for labels 0 to ``classes`` - 1."""
    counts = np.stack([np.bincount(labels[rows], minlength=classes) for rows in parts.values()])
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _uniform_draws(labels: Labels, parts: Parts, classes: int) -> NDArray[np.float64]:
    """The pool's label proportions for every client."""
    return np.tile(np.bincount(labels, minlength=classes) / len(labels), (len(parts), 1))


def like(
    pool_labels: Labels,
    proportions: NDArray[Any],
    rng: np.random.Generator,
    per_client: int | None,
    names: Sequence[str],
) -> Parts:
    """Draw held-out samples from each client's own distribution, the same number k for all, none twice.

    A client's distribution is its label proportions (see ``Partition.distribution``): ``proportions`` has a row
    for each of ``names`` and a column for each class index. Every count is its share of k rounded up or down,
    by largest remainder, or otherwise where the pool would run out of a class.

    k is ``per_client``, else the largest for which the clients' shares of every class are within the pool.
    Where that is 0 (the pool lacks a class that somebody owns), it is the largest whose rounded counts still
    fit; a single sample is of the client's commonest class where possible, and always of one that it owns.

    Returns:
        Client name -> sorted rows of ``pool_labels``.

    Raises:
        DataError: The pool is too small for k, or the arguments do not fit together.
    """
    pool_labels, shares = np.asarray(pool_labels), np.asarray(proportions, dtype=np.float64)
    _whole("per_client", per_client, optional=True)
    if shares.ndim != 2 or not len(shares) == len(names) == len(set(names)) > 0:
        raise DataError(f"Proportions of shape {shares.shape} do not give {len(names)} names a row each.")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any(axis=1).all()):
        raise DataError("A client's label proportions must be finite, not negative and not all zero.")
    if pool_labels.ndim != 1 or pool_labels.dtype.kind not in "iu" or (pool_labels < 0).any():
        raise DataError("The held-out pool's labels must be class indices, whole numbers from 0.")
    shares = shares / shares.sum(axis=1, keepdims=True)
    pool = np.bincount(pool_labels, minlength=shares.shape[1])[: shares.shape[1]]
    largest = proportional(shares, pool)
    if not largest:
        tries = range(int(pool.sum()) // len(shares), 0, -1)
        largest = next((k for k in tries if rounded(shares * k, pool) is not None), 0)
    k = per_client or largest
    counts = rounded(shares * k, pool) if 0 < k <= largest else None
    if counts is None:
        raise DataError(
            f"{len(pool_labels)} held-out samples cannot give {len(shares)} clients {k or 1} each in "
            f"their own proportions; the most is {largest}: use fewer samples or clients or hold out more."
        )
    return dict(zip(names, _deal(pool_labels, counts, rng), strict=True))


def stratified(labels: Labels, fraction: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Split into (kept, held-out) rows: ``fraction`` of each class is held out, to within one sample.

    A class of two samples or more is on both sides, unless ``fraction`` is 0.
    """
    if not (_is_number(fraction) and 0 <= fraction < 1):
        raise ConfigError(f"The held-out fraction is {fraction!r}; give a number from 0 to below 1.")
    codes, pool = _classes(np.asarray(labels))
    counts = np.rint(pool * fraction).astype(np.int64)
    if fraction > 0:
        counts = np.clip(counts, pool > 1, pool - 1)
    (held,) = _deal(codes, counts[None], rng)
    return np.setdiff1d(np.arange(len(codes)), held), held


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _whole(name: str, value: object, least: int = 1, most: int | None = None, optional: bool = False) -> None:
    if value is None and optional:
        return
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not least <= value <= (value if most is None else most):  # type: ignore[operator]
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"`{name}` is {value!r}; give a whole number, {allowed}.")


def _classes(labels: Labels, at_least: int = 1) -> tuple[Rows, Rows]:
    """Each sample's class as an index into the sorted distinct labels, and the size of each class."""
    if labels.ndim != 1 or labels.dtype.kind not in "iubUS":
        raise DataError(
            f"Labels of shape {labels.shape} and type {labels.dtype} are not classes; give one whole number "
            "or name per sample, or use the partition iid or natural."
        )
    _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if len(sizes) < at_least:
        raise DataError(f"{at_least} classes or more are needed, the data has {len(sizes)}; ask for fewer.")
    return codes.astype(np.int64), sizes.astype(np.int64)


def _gather(rows: Rows, owners: Rows, clients: int) -> list[Rows]:
    """The sorted rows of each owner, 0 to ``clients`` - 1."""
    order = np.lexsort((rows, owners))
    bounds = np.searchsorted(owners[order], np.arange(clients + 1))
    return [rows[order[a:b]] for a, b in pairwise(bounds)]


def _deal(codes: Rows, counts: Rows, rng: np.random.Generator) -> list[Rows]:
    """Deal ``counts[i, c]`` random samples of class c to client i."""
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    starts = np.searchsorted(codes[order], np.arange(counts.shape[1]))
    owners = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    rows = [order[start : start + len(owner)] for start, owner in zip(starts, owners, strict=True)]
    return _gather(np.concatenate(rows), np.concatenate(owners), len(counts))


def _choose(pool: Rows, clients: int, portions: Rows, rng: np.random.Generator) -> Rows:
    """Counts in which every client has ``portions[j]`` of its j-th class, of as many different classes.

    To take the fullest classes first succeeds whenever anything does; ties are by lot. Lowering what a class
    may give to the least common level that suffices makes ties of most: classes are used about equally.
    """
    each, capacity = len(portions), pool // portions.max()
    if np.minimum(capacity, clients).sum() < clients * each:
        raise DataError(
            f"The classes are too small for {clients} clients with {each} different classes each; ask for "
            "fewer clients, samples or `classes`, or use the partition dirichlet."
        )
    level = next(t for t in range(clients + 1) if np.minimum(capacity, t).sum() >= clients * each)
    left = np.minimum(capacity, level)
    counts = np.zeros((clients, len(pool)), dtype=np.int64)
    for row, lot in zip(counts, rng.random(counts.shape), strict=True):
        chosen = np.argsort(-(left + lot))[:each]
        row[chosen] = portions
        left[chosen] -= 1
    return rng.permutation(counts)  # who chose early had less of a choice
