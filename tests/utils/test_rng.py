"""Random draws: determined by their key, uniform, without replacement."""

from __future__ import annotations

import hashlib
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from comfedl.utils import rng

quick = settings(max_examples=60, deadline=None, derandomize=True)

keys = st.integers(0, 2**64 - 1)


def subsets(key: int, n: int, count: int, size: int) -> np.ndarray:
    return rng.subsets([key], [n], count, size)[0]


def uniform(counts: np.ndarray) -> float:
    return float(chisquare(counts.ravel()).pvalue)


@quick
@given(keys, st.integers(1, 40), st.integers(1, 4), st.data())
def test_a_batch_is_a_subset(key: int, n: int, count: int, data) -> None:
    size = data.draw(st.integers(1, n))
    drawn = subsets(key, n, count, size)
    assert drawn.shape == (count, size) and drawn.dtype == np.int64
    assert drawn.min() >= 0 and drawn.max() < n
    assert all(len(set(batch)) == size for batch in drawn.tolist())


@quick
@given(keys, st.integers(1, 30))
def test_a_batch_of_all_has_each_sample_once(key: int, n: int) -> None:
    for batch in subsets(key, n, 3, n).tolist():
        assert sorted(batch) == list(range(n))


@quick
@given(keys, st.integers(1, 10), st.integers(1, 30))
def test_a_small_client_draws_with_replacement(key: int, n: int, more: int) -> None:
    drawn = subsets(key, n, 2, n + more)
    assert drawn.shape == (2, n + more)
    assert drawn.min() >= 0 and drawn.max() < n


@pytest.mark.parametrize(("n", "size"), [(5, 2), (6, 3), (4, 1), (5, 4)])
def test_every_subset_is_equally_likely(n: int, size: int) -> None:
    places = {subset: i for i, subset in enumerate(combinations(range(n), size))}
    drawn = subsets(rng.key(1, "chi-square"), n, 400 * len(places), size)
    seen = [places[tuple(sorted(batch))] for batch in drawn.tolist()]
    assert uniform(np.bincount(seen, minlength=len(places))) > 1e-3


def test_every_subset_is_equally_likely_across_keys() -> None:
    """One batch per key, as with one batch per round: consecutive keys are as good as one long stream."""
    places = {subset: i for i, subset in enumerate(combinations(range(6), 2))}
    for name in (lambda i: rng.key(0, "train/inner", i, "a"), lambda i: i):
        drawn = rng.subsets([name(i) for i in range(6000)], [6] * 6000, 1, 2)[:, 0]
        seen = [places[tuple(sorted(batch))] for batch in drawn.tolist()]
        assert uniform(np.bincount(seen, minlength=len(places))) > 1e-3


def test_with_replacement_is_uniform_and_independent() -> None:
    drawn = subsets(rng.key(2, "chi-square"), 3, 4000, 4)
    pairs = drawn[:, 0] * 3 + drawn[:, 1]
    assert uniform(np.bincount(pairs, minlength=9)) > 1e-3
    assert uniform(np.bincount(drawn.ravel(), minlength=3)) > 1e-3


def test_successive_batches_are_independent() -> None:
    drawn = subsets(rng.key(3, "chi-square"), 4, 8001, 1)[:, 0]
    assert uniform(np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)) > 1e-3


def test_large_clients_are_covered_evenly() -> None:
    drawn = subsets(rng.key(4, "chi-square"), 1_000_003, 100, 100).ravel()
    assert uniform(np.histogram(drawn, bins=20, range=(0, 1_000_003))[0]) > 1e-3


@quick
@given(st.lists(st.tuples(keys, st.integers(1, 20)), min_size=1, max_size=6), st.integers(1, 25))
def test_draws_do_not_depend_on_the_other_clients(clients: list[tuple[int, int]], size: int) -> None:
    together = rng.subsets([key for key, _ in clients], [n for _, n in clients], 3, size)
    for (key, n), found in zip(clients, together, strict=True):
        assert (found == subsets(key, n, 3, size)).all()


@quick
@given(keys, st.integers(1, 20), st.integers(1, 25))
def test_the_first_batches_do_not_depend_on_how_many_follow(key: int, n: int, size: int) -> None:
    assert (subsets(key, n, 2, size) == subsets(key, n, 5, size)[:2]).all()


def test_keys_differ_by_each_argument() -> None:
    arguments = list(product((0, 1, 10), ("train", "train/inner", "clients"), (0, 1, 2, 11), ("", "a", "b", "1", "é")))
    assert len({rng.key(*each) for each in arguments}) == len(arguments)
    assert all(0 <= rng.key(*each) < 2**64 for each in arguments)


def test_keys_do_not_concatenate_their_arguments() -> None:
    assert rng.key(1, "a", 11, "b") != rng.key(1, "a1", 1, "b") != rng.key(11, "a", 1, "b")
    assert rng.key(0, "a", 1, "2") != rng.key(0, "a", 12, "") != rng.key(0, "a1", 2, "")


def floyd(key: int, n: int, count: int, size: int) -> list[list[int]]:
    """SplitMix64 of a counter and Floyd's algorithm, in plain integers."""
    most, batches = 2**64, []
    for t in range(count):
        batch: list[int] = []
        for j in range(size):
            z = (key + (t * size + j + 1) * 0x9E3779B97F4A7C15) % most
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % most
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % most
            bits = (z ^ (z >> 31)) >> 32
            bound = n if n < size else n - size + j + 1
            pick = bits * bound >> 32
            batch.append(bound - 1 if size <= n and pick in batch else pick)
        batches.append(batch)
    return batches


@quick
@given(keys, st.integers(1, 12), st.integers(1, 3), st.integers(1, 15))
def test_the_draws_never_change(key: int, n: int, count: int, size: int) -> None:
    """Later versions must reproduce recorded runs."""
    assert subsets(key, n, count, size).tolist() == floyd(key, n, count, size)


BATCHES, CELLS = rng.MAX_TABLE_BATCHES, rng.MAX_TABLE_CELLS


@pytest.mark.parametrize(("n", "count"), [(12, BATCHES // 3), (12, BATCHES), (CELLS // 9, 3), (CELLS, 3)])
@pytest.mark.parametrize("size", [2, 11])
def test_many_draws_at_once_are_the_same(n: int, count: int, size: int) -> None:
    """Below and above the bounds between the two implementations, each called twice."""
    names = [rng.key(0, "many", client=str(i)) for i in range(3)]
    draw = rng.Subsets([n] * 3, count, size)
    for wanted in (names, names[::-1]):
        assert draw(wanted).tolist() == [floyd(name, n, count, size) for name in wanted]


def test_the_keys_never_change() -> None:
    digest = hashlib.blake2b(b"7\x1ftrain/inner\x1f3\x1fa", digest_size=8).digest()
    assert rng.key(7, "train/inner", 3, "a") == int.from_bytes(digest, "little")


def test_generators_are_made_from_their_key() -> None:
    first = rng.generator(0, "clients", 3).random(4)
    assert (first == rng.generator(0, "clients", 3).random(4)).all()
    for other in ((1, "clients", 3), (0, "losses", 3), (0, "clients", 4), (0, "clients", 3, "a")):
        assert (first != rng.generator(*other).random(4)).any()
