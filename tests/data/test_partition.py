"""Partitions: the properties promised by the docstrings, for many class sizes."""

from __future__ import annotations

import dataclasses
import doctest
import math
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

import comfedl.data.partition as partition
from comfedl.data.partition import (
    IID,
    PARTITIONS,
    Dirichlet,
    DominantClass,
    Imbalanced,
    Natural,
    Partition,
    Shards,
    like,
    proportions,
    stratified,
)
from comfedl.utils.errors import ConfigError, DataError

quick = settings(max_examples=60, deadline=None, derandomize=True)
thorough = settings(quick, max_examples=200)

seeds = st.integers(0, 2**32 - 1)
pools = st.lists(st.integers(1, 60), min_size=2, max_size=8)  # the size of each class


def labels_of(pool: Sequence[int], seed: int = 0) -> np.ndarray:
    """Labels 0, 1, ... in random order, with these class sizes."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(pool)), pool))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts_of(labels: np.ndarray, parts: dict[str, np.ndarray], classes: int) -> np.ndarray:
    return np.stack([np.bincount(labels[rows], minlength=classes) for rows in parts.values()])


def check_parts(parts: dict[str, np.ndarray], samples: int) -> None:
    """Disjoint, sorted, in range, int64, and no client is empty."""
    everything = np.concatenate(list(parts.values()))
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0 and everything.max() < samples
    for rows in parts.values():
        assert rows.dtype == np.int64 and len(rows) and (np.diff(rows) > 0).all()


# --- Common properties ------------------------------------------------------------------------------

ALL = [
    IID(7),
    IID(7, samples=11),
    Imbalanced(7, large=100, small=9),
    Imbalanced(7, large=100, small=9, classes=2),
    Imbalanced(7, large=100, small=9, large_client=3),
    DominantClass(7, rho=0.5),
    DominantClass(7, rho=0.5, samples=13),
    Dirichlet(7, alpha=0.3),
    Dirichlet(7, alpha=0.3, minimum=20),
    Shards(7, classes=2),
]


@pytest.mark.parametrize("split", ALL, ids=repr)
def test_contract_and_determinism(split: Partition) -> None:
    labels = labels_of([60, 50, 70, 60, 65])
    parts = split.assign(labels, rng(1))
    check_parts(parts, len(labels))
    assert list(parts) == [f"client-{i}" for i in range(7)]
    again = split.assign(labels, rng(1))
    assert all(np.array_equal(parts[name], again[name]) for name in parts)
    other = split.assign(labels, rng(2))
    assert any(not np.array_equal(parts[name], other[name]) for name in parts)


@pytest.mark.parametrize("split", ALL, ids=repr)
def test_assign_does_not_change_the_labels_and_partitions_are_frozen(split: Partition) -> None:
    labels = labels_of([60, 50, 70, 60, 65])
    before = labels.copy()
    split.assign(labels, rng())
    assert np.array_equal(labels, before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.clients = 3  # type: ignore[attr-defined]
    assert dataclasses.replace(split) == split  # type: ignore[type-var]


@pytest.mark.parametrize("clients, first, last", [(1, "0", "0"), (10, "0", "9"), (11, "00", "10"), (101, "000", "100")])
def test_names_have_the_width_they_need(clients: int, first: str, last: str) -> None:
    names = list(IID(clients).assign(np.zeros(200, int), rng()))
    assert (names[0], names[-1]) == (f"client-{first}", f"client-{last}")
    assert names == sorted(names)


def test_labels_may_be_names_or_sparse_numbers() -> None:
    labels = labels_of([40, 40, 40])
    plain = Shards(6, 2).assign(labels, rng())
    for alias in (np.array([7, -3, 900])[np.argsort([1, 0, 2])][labels], np.array(["a", "b", "c"])[labels]):
        parts = Shards(6, 2).assign(alias, rng())
        assert all(np.array_equal(parts[name], plain[name]) for name in plain)


def test_registry() -> None:
    assert list(PARTITIONS) == ["iid", "imbalanced", "dominant-class", "dirichlet", "shards", "natural"]
    for cls in PARTITIONS.values():
        doc = cls.__doc__ or ""
        assert "\n" not in doc and 20 < len(doc) < 110 and doc.endswith(".")
        assert not doc.startswith(cls.__name__ + "(")  # the default docstring of a dataclass
    assert [f.name for f in dataclasses.fields(IID)] == ["clients", "samples"]
    assert [f.name for f in dataclasses.fields(Natural)] == ["by"]


def test_docstring_example() -> None:
    results = doctest.testmod(partition)
    assert results.attempted > 0 and not results.failed


@pytest.mark.parametrize(
    "split",
    [
        IID(1000),
        Imbalanced(1000, 5000, 20),
        Imbalanced(1000, 5000, 20, classes=3),
        DominantClass(1000, 0.28),
        Dirichlet(1000, 0.1, minimum=5),
        Shards(1000, 2),
        Natural(),
    ],
    ids=repr,
)
def test_speed(split: Partition) -> None:
    labels = rng(1).integers(0, 10, 60_000)
    groups = rng(2).integers(0, 1000, 60_000)
    pool = rng(3).integers(0, 10, 10_000)
    start = perf_counter()
    parts = split.assign(labels, rng(), groups)
    like(pool, proportions(labels, parts, 10), rng(), None, list(parts))
    assert perf_counter() - start < 1


# --- Each partition ---------------------------------------------------------------------------------


@quick
@given(st.integers(1, 200), st.integers(1, 30), seeds)
def test_iid_uses_all_equal_to_within_one(samples: int, clients: int, seed: int) -> None:
    assume(clients <= samples)
    parts = IID(clients).assign(np.zeros(samples, int), rng(seed))
    check_parts(parts, samples)
    sizes = [len(rows) for rows in parts.values()]
    assert sum(sizes) == samples and max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 20), st.integers(1, 10), st.integers(0, 30), seeds)
def test_iid_with_samples(clients: int, samples: int, spare: int, seed: int) -> None:
    parts = IID(clients, samples).assign(np.zeros(clients * samples + spare, int), rng(seed))
    check_parts(parts, clients * samples + spare)
    assert {len(rows) for rows in parts.values()} == {samples}


def test_iid_is_uniform() -> None:
    owners = np.zeros((10, 2))
    for seed in range(2000):
        for i, rows in enumerate(IID(2, samples=3).assign(np.zeros(10, int), rng(seed)).values()):
            owners[rows, i] += 1
    assert np.abs(owners / 2000 - 0.3).max() < 0.05  # five standard deviations


def test_iid_takes_targets_that_are_not_classes() -> None:
    check_parts(IID(3).assign(rng().normal(size=(20, 2)), rng()), 20)


@quick
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 12), st.integers(0, 20), seeds)
def test_imbalanced_sizes(clients: int, large: int, small: int, spare: int, seed: int) -> None:
    samples = large + (clients - 1) * small + spare
    parts = Imbalanced(clients, large, small).assign(np.zeros(samples, int), rng(seed))
    check_parts(parts, samples)
    assert sorted(len(r) for r in parts.values()) == sorted([large] + [small] * (clients - 1))


def test_imbalanced_large_client_is_random_or_given() -> None:
    def large_client(split: Imbalanced, seed: int) -> int:
        return int(np.argmax([len(r) for r in split.assign(labels_of([40] * 4), rng(seed)).values()]))

    assert {large_client(Imbalanced(5, 50, 5), seed) for seed in range(60)} == set(range(5))
    assert {large_client(Imbalanced(5, 50, 5, large_client=3), seed) for seed in range(10)} == {3}
    assert {large_client(Imbalanced(5, 50, 5, large_client=0, classes=2), seed) for seed in range(10)} == {0}


def test_imbalanced_default_draws_ignore_the_labels() -> None:
    one = Imbalanced(5, 50, 5).assign(np.zeros(160, int), rng(4))
    two = Imbalanced(5, 50, 5).assign(labels_of([40] * 4), rng(4))
    assert all(np.array_equal(one[name], two[name]) for name in one)


@quick
@given(st.lists(st.integers(4, 90), min_size=2, max_size=8), st.integers(1, 10), st.data(), seeds)
def test_imbalanced_with_classes(pool: list[int], clients: int, data: st.DataObject, seed: int) -> None:
    classes = data.draw(st.integers(1, len(pool)))
    small = data.draw(st.integers(classes, classes * 4))
    labels = labels_of(pool)
    large = len(labels) - (clients - 1) * small  # all samples are needed
    assume(large >= 1)
    split = Imbalanced(clients, large, small, large_client=0, classes=classes)
    turns = [n // math.ceil(small / classes) for n in pool]  # how many clients a class suffices for
    levels = [t for t in range(clients) if sum(min(n, t) for n in turns) >= (clients - 1) * classes]
    if not levels:
        with pytest.raises(DataError, match="too small"):
            split.assign(labels, rng(seed))
        return
    parts = split.assign(labels, rng(seed))
    check_parts(parts, len(labels))
    counts = counts_of(labels, parts, len(pool))
    assert counts[0].sum() == large
    for row in counts[1:]:
        assert row.sum() == small and (row > 0).sum() == classes
        assert row.max() - row[row > 0].min() <= 1
    assert (counts[1:] > 0).sum(axis=0).max() <= levels[0]  # no class is used more often than necessary


def test_imbalanced_classes_are_drawn_and_the_large_client_sees_all() -> None:
    labels, pairs = labels_of([100] * 6), set()
    for seed in range(100):
        parts = Imbalanced(4, 200, 10, large_client=3, classes=2).assign(labels, rng(seed))
        pairs.add(tuple(np.unique(labels[parts["client-0"]])))
        assert len(np.unique(labels[parts["client-3"]])) == 6
    assert len(pairs) == 15


def dominant_shares(clients: int, classes: int, rho: float) -> np.ndarray:
    shares = np.full((clients, classes), (1 - rho) / (classes - 1))
    for i in range(clients):
        shares[i, i % classes] = rho
    return shares


@quick
@given(st.lists(st.integers(30, 90), min_size=2, max_size=8), st.integers(1, 12), st.floats(0, 1), seeds)
def test_dominant_class_shares(pool: list[int], clients: int, rho: float, seed: int) -> None:
    labels = labels_of(pool)
    shares = dominant_shares(clients, len(pool), rho)
    parts = DominantClass(clients, rho).assign(labels, rng(seed))
    check_parts(parts, len(labels))
    counts = counts_of(labels, parts, len(pool))
    k = int(counts[0].sum())
    assert (counts.sum(axis=1) == k).all()
    assert (np.abs(counts - shares * k) < 1 + 1e-6).all()
    assert (shares.sum(axis=0) * (k + 1) > np.array(pool)).any()  # one more would not fit
    assert (counts.sum(axis=0) <= pool).all()


@quick
@given(st.integers(1, 40), st.floats(0, 1), seeds)
def test_dominant_class_with_samples(samples: int, rho: float, seed: int) -> None:
    labels = labels_of([200] * 5)
    parts = DominantClass(6, rho, samples).assign(labels, rng(seed))
    counts = counts_of(labels, parts, 5)
    assert (counts.sum(axis=1) == samples).all()
    assert (np.abs(counts - dominant_shares(6, 5, rho) * samples) < 1 + 1e-6).all()


def test_dominant_class_of_the_paper() -> None:
    """CIFAR-10 with rho 0.28: 5000 images per client, 1400 of its dominant class, 400 of each other."""
    labels = labels_of([5000] * 10)
    counts = counts_of(labels, DominantClass(10, 0.28).assign(labels, rng()), 10)
    assert np.array_equal(counts, np.full((10, 10), 400) + 1000 * np.eye(10, dtype=int))


def test_dominant_class_ties_do_not_all_go_to_one_class() -> None:
    labels = labels_of([100] * 10)
    counts = counts_of(labels, DominantClass(10, 0.4, samples=5).assign(labels, rng()), 10)
    assert (counts.sum(axis=0) == 5).all()


@pytest.mark.parametrize("samples, given", [(None, "1 samples"), (5, "5 samples")])
def test_dominant_class_error_says_what_is_possible(samples: int | None, given: str) -> None:
    pool = [1, 100] if samples is None else [8, 100]
    with pytest.raises(DataError, match=f"{given}.*allow {0 if samples is None else 4}"):
        DominantClass(4, 0.5, samples).assign(labels_of(pool), rng())


@quick
@given(pools, st.integers(1, 20), st.floats(0.01, 100), st.integers(1, 6), seeds)
def test_dirichlet_uses_all_and_keeps_the_minimum(
    pool: list[int], clients: int, alpha: float, minimum: int, seed: int
) -> None:
    labels = labels_of(pool)
    split = Dirichlet(clients, alpha, minimum)
    if clients * minimum > len(labels):
        with pytest.raises(DataError):
            split.assign(labels, rng(seed))
        return
    parts = split.assign(labels, rng(seed))
    check_parts(parts, len(labels))
    assert sum(len(rows) for rows in parts.values()) == len(labels)
    assert min(len(rows) for rows in parts.values()) >= minimum


def test_dirichlet_alpha_sets_the_skew() -> None:
    labels = labels_of([500] * 10)

    def purity(alpha: float) -> float:  # the mean share of a client's most common class
        return float(proportions(labels, Dirichlet(20, alpha).assign(labels, rng()), 10).max(axis=1).mean())

    values = [purity(alpha) for alpha in (1e-300, 0.1, 1.0, 100.0, 1.7e308)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.9 and values[1] > 0.4 and values[3] < 0.15 and values[4] == pytest.approx(0.1)


def test_dirichlet_shares_have_the_moments_of_the_prior() -> None:
    labels = np.zeros(10_000, int)
    shares = np.array([[len(r) for r in Dirichlet(4, 2.0).assign(labels, rng(s)).values()] for s in range(600)]) / 1e4
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4, abs=0.03)
    assert shares.var(axis=0) == pytest.approx([0.25 * 0.75 / 9] * 4, rel=0.25)


@quick
@given(pools, st.integers(1, 12), st.data(), seeds)
def test_shards_are_equal_and_pure(pool: list[int], clients: int, data: st.DataObject, seed: int) -> None:
    classes = data.draw(st.integers(1, len(pool)))
    labels = labels_of(pool)

    def enough(size: int) -> bool:
        return sum(min(clients, n // size) for n in pool) >= clients * classes

    if not enough(1) or clients * classes > len(labels):
        with pytest.raises(DataError):
            Shards(clients, classes).assign(labels, rng(seed))
        return
    parts = Shards(clients, classes).assign(labels, rng(seed))
    check_parts(parts, len(labels))
    counts = counts_of(labels, parts, len(pool))
    assert ((counts > 0).sum(axis=1) == classes).all()
    size = counts[counts > 0][0]
    assert (counts[counts > 0] == size).all()
    assert not enough(int(size) + 1)


def test_shards_pair_classes_at_random_and_lose_few_samples() -> None:
    mnist = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    labels = labels_of(mnist)
    parts = Shards(100, 2).assign(labels, rng())
    assert len({tuple(np.unique(labels[rows])) for rows in parts.values()}) > 30  # of 45 pairs
    assert sum(len(rows) for rows in parts.values()) > 0.97 * 60_000
    labels = labels_of([900, 100, 100, 100])
    firsts = [Shards(10, 1).assign(labels, rng(seed))["client-0"] for seed in range(50)]
    assert 20 < sum(labels[rows[0]] == 0 for rows in firsts) < 50  # the order of the clients is random, too


@quick
@given(st.lists(st.sampled_from(["north", "south", "a/b", "7"]), min_size=1, max_size=50))
def test_natural_is_the_groups(groups: list[str]) -> None:
    parts = Natural().assign(np.zeros(len(groups), int), rng(), np.array(groups))
    check_parts(parts, len(groups))
    assert list(parts) == sorted(set(groups))
    for name, rows in parts.items():
        assert [i for i, group in enumerate(groups) if group == name] == rows.tolist()


def test_natural_names_of_other_types() -> None:
    labels = np.zeros(3, int)
    assert list(Natural().assign(labels, rng(), np.array([10, 9, 10]))) == ["9", "10"]
    assert list(Natural().assign(labels, rng(), np.array(["b", 2, "b"], dtype=object))) == ["2", "b"]
    assert list(Natural().assign(labels, rng(), np.array([b"x", b"y", b"x"]))) == ["x", "y"]


# --- Held-out samples -------------------------------------------------------------------------------


@st.composite
def demands(draw: st.DrawFn, holes: bool) -> tuple[list[int], np.ndarray]:
    """Class sizes of a pool, and skewed proportions with zeros; with ``holes``, the pool almost lacks some classes."""
    classes, clients = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    alpha = draw(st.sampled_from([0.05, 0.3, 1.0, 30.0]))
    source = rng(draw(seeds))
    counts = source.multinomial(draw(st.integers(1, 60)), source.dirichlet(np.full(classes, alpha), clients))
    pool = draw(st.lists(st.integers(0 if holes else 12, 3 if holes else 90), min_size=classes, max_size=classes))
    return pool, counts / counts.sum(axis=1, keepdims=True)


def brute_force_fits(shares: np.ndarray, pool: Sequence[int], k: int) -> bool:
    """Whether some rounding of the table has row sums k and columns within the pool."""
    reachable = {tuple([0] * len(pool))}
    for row in shares * k:
        choices = [
            choice
            for choice in product(*[{math.floor(q + 1e-9), math.ceil(q - 1e-9)} for q in row])
            if sum(choice) == k
        ]
        sums = {tuple(a + b for a, b in zip(t, c, strict=True)) for t in reachable for c in choices}
        reachable = {t for t in sums if all(a <= b for a, b in zip(t, pool, strict=True))}
    return bool(reachable)


def check_like(labels: np.ndarray, shares: np.ndarray, parts: dict[str, np.ndarray], k: int) -> np.ndarray:
    check_parts(parts, len(labels))
    counts = counts_of(labels, parts, shares.shape[1])
    assert (counts.sum(axis=1) == k).all()
    assert (np.abs(counts - shares * k) < 1).all()
    assert not counts[shares == 0].any()
    return counts


@thorough
@given(demands(holes=False), seeds)
def test_like_takes_as_many_as_the_proportions_allow(demand: tuple[list[int], np.ndarray], seed: int) -> None:
    pool, shares = demand
    labels, names = labels_of(pool), [f"c{i}" for i in range(len(shares))]
    need = shares.sum(axis=0)
    k = min(math.floor(n / d + 1e-9) for n, d in zip(pool, need, strict=True) if d)
    parts = like(labels, shares, rng(seed), None, names)
    assert list(parts) == names
    check_like(labels, shares, parts, k)
    fewer = max(1, k // 2)
    check_like(labels, shares, like(labels, shares, rng(seed), fewer, names), fewer)
    with pytest.raises(DataError, match=f"the most is {k}:"):
        like(labels, shares, rng(seed), k + 1, names)


@thorough
@given(demands(holes=True), seeds)
def test_like_where_the_pool_lacks_a_class(demand: tuple[list[int], np.ndarray], seed: int) -> None:
    """The largest possible k, by brute force, or an error if not even one sample is possible."""
    pool, shares = demand
    shares = shares[:4]
    assume(any(n < d for n, d in zip(pool, shares.sum(axis=0), strict=True) if d))
    labels, names = labels_of(pool), [f"c{i}" for i in range(len(shares))]
    fitting = [k for k in range(1, sum(pool) // len(shares) + 1) if brute_force_fits(shares, pool, k)]
    if not fitting:
        with pytest.raises(DataError, match="the most is 0"):
            like(labels, shares, rng(seed), None, names)
        return
    check_like(labels, shares, like(labels, shares, rng(seed), None, names), max(fitting))
    with pytest.raises(DataError, match=f"the most is {max(fitting)}:"):
        like(labels, shares, rng(seed), max(fitting) + 1, names)


@quick
@given(demands(holes=False))
def test_like_is_largest_remainder_where_the_pool_is_ample(demand: tuple[list[int], np.ndarray]) -> None:
    _, shares = demand
    labels = labels_of([2000] * shares.shape[1])
    counts = counts_of(labels, like(labels, shares, rng(), 10, [str(i) for i in range(len(shares))]), shares.shape[1])
    for count, quota in zip(counts, shares * 10, strict=True):
        rest = quota - np.floor(quota + 1e-9)
        up = count > np.floor(quota + 1e-9)
        if up.any() and not up.all():
            assert rest[up].min() >= rest[~up].max() - 1e-6


def test_like_rounding_up_never_exceeds_the_pool() -> None:
    """Largest remainders alone would need three samples of class 0; the pool has two."""
    labels, shares = labels_of([2, 1, 1]), np.array([[0.5, 0.25, 0.25]] * 3)
    counts = counts_of(labels, like(labels, shares, rng(), 1, list("abc")), 3)
    assert counts.sum(axis=0)[0] <= 2 and (counts.sum(axis=1) == 1).all()


def test_like_moves_the_client_with_the_smallest_difference() -> None:
    for shares, expected in (([[0.9, 0.1], [0.6, 0.4]], [0, 1]), ([[0.6, 0.4], [0.9, 0.1]], [1, 0])):
        parts = like(np.array([0, 1]), np.array(shares), rng(), None, ["a", "b"])
        assert [parts["a"][0], parts["b"][0]] == expected


def test_like_moves_a_surplus_along_a_path() -> None:
    """Class 0 is over capacity and shares no client with class 2, which has room: the path goes through class 1."""
    shares = np.array([[0.6, 0.4, 0], [0.6, 0.4, 0], [0, 0.6, 0.4]])
    counts = counts_of(np.array([0, 1, 2]), like(np.array([0, 1, 2]), shares, rng(), 1, list("abc")), 3)
    assert counts[2].tolist() == [0, 0, 1] and (counts.sum(axis=0) == 1).all()


def test_like_gives_the_most_common_class_with_one_sample_per_client() -> None:
    shares = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1]])
    counts = counts_of(labels_of([1, 2, 0]), like(labels_of([1, 2, 0]), shares, rng(), None, list("abc")), 3)
    assert counts.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


def test_like_one_rare_class_does_not_limit_all_clients() -> None:
    """One client has a twentieth of a class that the pool lacks: it gets no samples of it."""
    shares = np.array([[0.5, 0.5, 0.0], [0.5, 0.45, 0.05]])
    parts = like(labels_of([50, 50, 0]), shares, rng(), None, ["a", "b"])
    assert len(parts["a"]) == len(parts["b"]) == 19


def test_like_draws_random_samples_and_accepts_counts() -> None:
    labels, counts = labels_of([50, 50]), np.array([[3, 1], [1, 1]])
    one, two, three = (like(labels, counts, rng(seed), 4, ["a", "b"]) for seed in (0, 0, 1))
    assert np.array_equal(one["a"], two["a"]) and not np.array_equal(one["a"], three["a"])
    assert np.bincount(labels[one["a"]]).tolist() == [3, 1]


def test_like_ignores_classes_that_no_client_has() -> None:
    labels = labels_of([5, 5, 40])
    check_like(labels, np.array([[1.0, 0, 0]]), like(labels, np.array([[1.0, 0]]), rng(), None, ["a"]), 5)


@pytest.mark.parametrize(
    "labels, shares, names",
    [
        ([0, 1], [[0.5, 0.5]], ["a", "b"]),
        ([0, 1], [[0.5, 0.5], [0.5, 0.5]], ["a", "a"]),
        ([0, 1], [0.5, 0.5], ["a", "b"]),
        ([0, 1], np.empty((0, 2)), []),
        ([0, 1], [[0, 0]], ["a"]),
        ([0, 1], [[-1, 2]], ["a"]),
        ([0, 1], [[np.nan, 1]], ["a"]),
        ([0, -1], [[0.5, 0.5]], ["a"]),
        ([0.0, 1.0], [[0.5, 0.5]], ["a"]),
        ([1, 1], [[1, 0]], ["a"]),
        (np.empty(0, int), [[0.5, 0.5]], ["a"]),
    ],
)
def test_like_refuses(labels: Any, shares: Any, names: list[str]) -> None:
    with pytest.raises(DataError):
        like(np.array(labels), np.array(shares), rng(), None, names)


@quick
@given(pools, st.floats(0, 0.999), seeds)
def test_stratified(pool: list[int], fraction: float, seed: int) -> None:
    labels = labels_of(pool)
    kept, held = stratified(labels, fraction, rng(seed))
    assert kept.dtype == held.dtype == np.int64
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(labels)))
    assert (np.diff(kept) > 0).all() and (np.diff(held) > 0).all()
    counts = np.bincount(labels[held], minlength=len(pool))
    assert (np.abs(counts - np.array(pool) * fraction) <= 1).all()
    both = np.array(pool) > 1
    if fraction:
        assert (counts[both] >= 1).all() and (counts <= np.array(pool) - 1).all()
    else:
        assert not counts.any()


def test_stratified_depends_on_the_seed() -> None:
    labels = labels_of([50, 30])
    held = [stratified(labels, 0.2, rng(seed))[1].tolist() for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2] and len(held[0]) == 16


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, math.nan, "0.2", None, True])
def test_stratified_refuses(fraction: Any) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        stratified(labels_of([5, 5]), fraction, rng())


def test_proportions() -> None:
    parts = {"a": np.array([0, 1, 2, 3]), "b": np.array([4])}
    assert proportions(np.array([0, 0, 0, 2, 1]), parts, 4).tolist() == [[0.75, 0, 0.25, 0], [0, 1, 0, 0]]


# --- Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, values, word",
    [
        *[
            (cls, {"clients": bad}, "clients")
            for cls in (IID,)
            for bad in (0, -1, 2.5, 10.0, "3", None, True, math.nan)
        ],
        (IID, {"samples": 0}, "samples"),
        (Imbalanced, {"clients": 0, "large": 5, "small": 2}, "clients"),
        (Imbalanced, {"large": 0, "small": 2}, "large"),
        (Imbalanced, {"large": None, "small": 2}, "large"),
        (Imbalanced, {"large": 5, "small": 0}, "small"),
        (Imbalanced, {"large": 5, "small": 2, "large_client": 3}, "large_client"),
        (Imbalanced, {"large": 5, "small": 2, "large_client": -1}, "large_client"),
        (Imbalanced, {"large": 5, "small": 2, "classes": 0}, "classes"),
        (Imbalanced, {"large": 5, "small": 2, "classes": 3}, "classes"),
        (DominantClass, {"clients": 0, "rho": 0.5}, "clients"),
        *[(DominantClass, {"rho": bad}, "rho") for bad in (-0.01, 1.01, math.nan, "0.5", None, True)],
        (DominantClass, {"rho": 0.5, "samples": 0}, "samples"),
        (Dirichlet, {"clients": 0, "alpha": 0.5}, "clients"),
        *[(Dirichlet, {"alpha": bad}, "alpha") for bad in (0, -1, math.inf, math.nan, "1")],
        (Dirichlet, {"alpha": 1.0, "minimum": 0}, "minimum"),
        (Shards, {"clients": 0, "classes": 2}, "clients"),
        (Shards, {"classes": 0}, "classes"),
    ],
)
def test_invalid_settings(cls: type[Any], values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=rf"^`{word}` is .*; give .*\.$"):
        cls(**{"clients": 3, **values})


def test_numpy_numbers_are_valid_settings() -> None:
    assert IID(np.int64(3)) == IID(3)  # type: ignore[arg-type]
    assert Dirichlet(3, np.float32(0.5)).alpha == 0.5  # type: ignore[arg-type]
    assert DominantClass(3, 1).rho == 1 and DominantClass(3, 0).rho == 0


@pytest.mark.parametrize(
    "split, pool, words",
    [
        (IID(5), [2, 2], "IID.*needs at least 5 samples, but the data have 4"),
        (IID(5), [], "needs at least 5 samples, but the data have 0"),
        (IID(2, samples=3), [2, 3], "6 samples, but the data have 5"),
        (Imbalanced(3, 5, 2), [4, 4], "9 samples, but the data have 8"),
        (Imbalanced(3, 2, 2, classes=2), [9], "At least 2 classes"),
        (Imbalanced(4, 1, 2, classes=2), [1, 9], "too small"),
        (DominantClass(5, 0.5), [2, 2], "5 samples"),
        (DominantClass(2, 0.5), [9], "At least 2 classes"),
        (DominantClass(2, 0.5, samples=6), [5, 9], "allow 5"),
        (Dirichlet(3, 0.5, minimum=3), [4, 4], "9 samples"),
        (Shards(2, 3), [9, 9], "At least 3 classes"),
        (Shards(4, 2), [3, 9], "too small"),
        (Shards(4, 2), [2, 2], "too small"),
    ],
)
def test_too_little_data(split: Partition, pool: list[int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        split.assign(labels_of(pool), rng())


@pytest.mark.parametrize(
    "split", [Imbalanced(2, 3, 2, classes=1), DominantClass(2, 0.5), Dirichlet(2, 1.0), Shards(2, 1)]
)
@pytest.mark.parametrize("labels", [np.linspace(0, 1, 20), np.zeros((20, 2), int)])
def test_label_partitions_need_classes(split: Partition, labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="are not classes"):
        split.assign(labels, rng())


@pytest.mark.parametrize(
    "groups, words",
    [
        (None, "needs data with groups"),
        (np.array(["a"]), "3 samples"),
        (np.zeros((3, 1)), "3 samples"),
        (np.array(["a", "", "b"]), "1 samples have no group"),
        (np.array([1.0, np.nan, np.nan]), "2 samples have no group"),
        (np.array(["a", None, "b"], dtype=object), "1 samples have no group"),
    ],
)
def test_natural_refuses(groups: np.ndarray | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Natural().assign(np.zeros(3, int), rng(), groups)


def test_natural_refuses_empty_data() -> None:
    with pytest.raises(DataError):
        Natural().assign(np.empty(0, int), rng(), np.empty(0, str))


def test_tightest_pools_still_work() -> None:
    """If there is only one solution, it is found."""
    parts = Shards(4, 2).assign(labels_of([4, 2, 2]), rng())  # all clients must take class 0
    assert all(len(rows) == 2 for rows in parts.values())
    labels = labels_of([40, 2, 2])
    for seed in range(20):
        small = Imbalanced(5, 1, 2, large_client=4, classes=2).assign(labels, rng(seed))
        assert all((labels[small[f"client-{i}"]] == 0).sum() == 1 for i in range(4))
    for seed in range(20):
        even = Dirichlet(6, 0.3, minimum=5).assign(labels_of([10, 8, 12]), rng(seed))
        assert [len(rows) for rows in even.values()] == [5] * 6
    one_each = Dirichlet(8, 0.01).assign(labels_of([4, 4]), rng())
    assert [len(rows) for rows in one_each.values()] == [1] * 8
