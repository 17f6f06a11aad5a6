"""Fixed-point numbers modulo 2^32 or 2^64, whose sums over the sites cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.utils.errors import ConfigError

Words = NDArray[Any]  # unsigned, of 32 or 64 bits
FEWEST_BITS = 12  # after the binary point


@dataclass(frozen=True)
class Ring:
    """Numbers of magnitude up to ``bound`` as multiples of ``2 ** -fraction`` in ``bits`` bits, for up to ``sites``.

    >>> ring = Ring(bits=32, bound=1.0, sites=3)
    >>> words, clipped = ring.encode(np.array([0.5, -0.25, 7.0]))
    >>> ring.decode(words + words).tolist(), clipped
    ([1.0, -0.5, 2.0], 1)
    """

    bits: int
    bound: float
    sites: int

    def __post_init__(self) -> None:
        if self.fraction < FEWEST_BITS:
            raise ConfigError(
                f"Secure aggregation has {self.bits} bits for a number, but sums of {self.sites} sites of numbers up "
                f"to {self.bound:g} leave {max(0, self.fraction)} of them after the binary point, and at least "
                f"{FEWEST_BITS} are needed; use bits = 64, or a smaller clip"
                " (or a cap, with a method whose weights follow losses)."
            )

    @cached_property
    def fraction(self) -> int:
        """The bits after the binary point: the most with which no sum overflows."""
        most = 2 ** (self.bits - 1) - 1  # of either sign
        bits = self.bits + max(0, -math.frexp(self.bound)[1]) + 1
        while self.sites * round(Fraction(self.bound) * Fraction(2) ** bits) > most:
            bits -= 1
        return bits

    @property
    def unit(self) -> float:
        """What rounding leaves undetermined in a site's number, at most half of it either way."""
        return 2.0**-self.fraction

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")

    def encode(self, values: NDArray[np.float64]) -> tuple[Words, int]:
        """The numbers as words, rounded to the nearest (ties to even), and how many were cut to the bound."""
        cut = values.clip(-self.bound, self.bound)
        signed = np.rint(cut * 2.0**self.fraction).astype(f"<i{self.bits // 8}")
        return signed.view(self.dtype), int(np.count_nonzero(cut != values))

    def decode(self, total: Words) -> NDArray[np.float64]:
        """The sum of numbers, from the sum of their words."""
        return total.view(f"<i{self.bits // 8}").astype(np.float64) * self.unit


def total(parts: Iterable[Words]) -> Words:
    """The sum of vectors of words, modulo 2 to the number of their bits."""
    first, *others = parts
    found = first.copy()
    for part in others:
        found += part
    return found
