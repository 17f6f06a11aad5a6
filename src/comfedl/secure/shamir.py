"""Shamir's secret sharing: any ``threshold`` of the shares give the secret, and fewer say nothing about it.

The secret is the value at 0 of a random polynomial of degree ``threshold - 1`` over the integers modulo a prime, and
share x is its value at x. Shamir: How to share a secret, CACM 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping

PRIME = 2**256 + 297  # the first one above 2^256, so that 32 bytes of any value can be shared


def split(
    secret: int,
    places: Collection[int],
    threshold: int,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, int]:
    """The share of each place, a number from 1 to ``prime - 1``; ``draw(n)`` is uniform below n."""
    if not 0 <= secret < prime or not 1 <= threshold <= len(places):
        raise ValueError(f"a secret of {secret.bit_length()} bits cannot be shared {threshold} of {len(places)}")
    if len(set(places)) < len(places) or not all(0 < place < prime for place in places):
        raise ValueError("the places of shares must be different, and from 1 to the prime - 1")
    coefficients = [secret, *(draw(prime) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place, prime) for place in places}


def _value(coefficients: Collection[int], x: int, prime: int) -> int:
    found = 0
    for coefficient in reversed([*coefficients]):
        found = (found * x + coefficient) % prime
    return found


def join(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret, from ``threshold`` shares or more: Lagrange's interpolation at 0."""
    found = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != place:
                above = above * other % prime
                below = below * (other - place) % prime
        found = (found + share * above * pow(below, -1, prime)) % prime
    return found
