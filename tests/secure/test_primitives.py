"""The ring, Shamir's shares, and what the keys do."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'comfedl[secure]'")

import comfedl as cf
from comfedl.secure import primitives, shamir
from comfedl.secure.ring import FEWEST_BITS, Ring, total

# The ring.


@given(
    bits=st.sampled_from([32, 64]),
    bound=st.floats(1e-3, 1e3),
    rows=st.lists(st.lists(st.floats(-2e3, 2e3), min_size=4, max_size=4), min_size=1, max_size=9),
)
def test_sums_in_the_ring_are_the_sums_of_what_was_cut_and_rounded(
    bits: int, bound: float, rows: list[list[float]]
) -> None:
    ring = Ring(bits, bound, len(rows))
    values = np.array(rows)
    words = [ring.encode(row) for row in values]
    found = ring.decode(total(own for own, _ in words))
    cut = values.clip(-bound, bound)
    assert np.abs(found - cut.sum(axis=0)).max() <= len(rows) * ring.unit / 2 + 1e-12 * bound * len(rows)
    assert [clipped for _, clipped in words] == [int((row != own).sum()) for row, own in zip(values, cut, strict=True)]


@given(st.sampled_from([32, 64]), st.floats(1e-3, 1e2), st.integers(1, 1000))
def test_no_sum_can_overflow_and_one_more_bit_could(bits: int, bound: float, sites: int) -> None:
    ring = Ring(bits, bound, sites)
    most = 2 ** (bits - 1) - 1
    largest, _ = ring.encode(np.array([bound, -bound]))
    signed = [int(word) for word in largest.view(f"<i{bits // 8}")]
    assert signed[0] == -signed[1]
    assert sites * signed[0] <= most
    assert 2 * sites * (signed[0] + 1) > most


@given(st.lists(st.lists(st.floats(-9, 9), min_size=3, max_size=3), min_size=2, max_size=8), st.randoms())
def test_the_order_of_a_sum_changes_no_bit(rows: list[list[float]], random: Random) -> None:
    words = [Ring(64, 8.0, len(rows)).encode(np.array(row))[0] for row in rows]
    found = total(words)
    random.shuffle(words)
    assert np.array_equal(found, total(words))


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(cf.ConfigError, match=r"32 bits for a number, but sums of 100000 sites .* smaller clip"):
        Ring(32, 16.0, 100_000)
    assert Ring(32, 16.0, 100).fraction >= FEWEST_BITS


def test_the_same_numbers_are_the_same_words_on_every_machine() -> None:
    words, _ = Ring(64, 2.0, 3).encode(np.array([0.1, -1.5, 0.5 * 2.0**-60]))
    assert Ring(64, 2.0, 3).fraction == 60
    assert words.tolist() == [round(0.1 * 2**60), 2**64 - 3 * 2**59, 0]  # the tie goes to the even one


# Shamir's shares.


@given(st.integers(0, 2**256 - 1), st.integers(1, 9), st.data())
@settings(deadline=None)
def test_any_threshold_of_the_shares_give_the_secret(secret: int, sites: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, sites))
    shares = shamir.split(secret, range(1, sites + 1), threshold)
    chosen = data.draw(st.permutations(range(1, sites + 1)))[:threshold]
    assert shamir.join({place: shares[place] for place in chosen}) == secret


@pytest.mark.parametrize(("threshold", "prime"), [(2, 7), (3, 5)])
def test_fewer_shares_are_uniform_whatever_the_secret(threshold: int, prime: int) -> None:
    """Over all polynomials: every value of threshold - 1 shares is as frequent as any other."""
    places = range(1, prime)
    for secret in range(prime):
        every = []
        for coefficients in product(range(prime), repeat=threshold - 1):
            left = iter(coefficients)
            every.append(shamir.split(secret, places, threshold, prime, lambda n, left=left: next(left)))
        for few in combinations(places, threshold - 1):
            count = Counter(tuple(shares[place] for place in few) for shares in every)
            assert len(count) == prime ** (threshold - 1)
            assert {*count.values()} == {1}


def test_the_modulus_is_prime() -> None:
    """Miller and Rabin's test: a number that passes for 40 bases is composite with a probability below 4^-40."""
    odd, twos = shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):
        powers = [pow(base, odd << k, shamir.PRIME) for k in range(twos)]
        assert powers[0] == 1 or shamir.PRIME - 1 in powers


def test_shares_that_cannot_be_made_are_refused() -> None:
    for wrong in ({"threshold": 4}, {"threshold": 0}, {"secret": shamir.PRIME}, {"places": [0, 1, 2]}):
        with pytest.raises(ValueError):
            shamir.split(**{"secret": 1, "places": [1, 2, 3], "threshold": 2, **wrong})  # type: ignore[arg-type]


# Keys.


def test_two_sites_agree_and_nobody_else_does() -> None:
    one, two, other = (primitives.new_secret() for _ in range(3))
    ours = primitives.agree(one, primitives.public_key(two), b"a")
    assert ours == primitives.agree(two, primitives.public_key(one), b"a")
    assert ours != primitives.agree(two, primitives.public_key(one), b"b")
    assert ours != primitives.agree(other, primitives.public_key(one), b"a")


def test_a_key_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError):
        primitives.agree(primitives.new_secret(), bytes(32), b"a")


def test_a_sealed_share_opens_for_its_receiver_and_exchange_alone() -> None:
    key = primitives.new_secret()
    sealed = primitives.seal(key, b"share", b"exchange 1")
    assert primitives.unseal(key, sealed, b"exchange 1") == b"share"
    assert primitives.seal(key, b"share", b"exchange 1") != sealed
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for args in ((key, sealed, b"exchange 2"), (primitives.new_secret(), sealed, b"exchange 1")):
        with pytest.raises(primitives.Unsealable):
            primitives.unseal(*args)
    for wrong in (changed, b"", sealed[:5]):
        with pytest.raises(primitives.Unsealable):
            primitives.unseal(key, wrong, b"exchange 1")


def test_the_mask_is_chacha20_s_key_stream() -> None:
    """The first block of RFC 8439, A.1, for a key and a nonce of zeros; other keys give others."""
    words = [np.zeros(4, dtype="<u4"), np.zeros(2, dtype="<u8")]
    primitives.add_mask(words, bytes(32), 1)
    assert b"".join(part.tobytes() for part in words).hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    )
    primitives.add_mask(words, bytes(32), -1)
    assert not any(part.any() for part in words)
