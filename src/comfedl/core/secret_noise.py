"""Random numbers that nobody can predict or repeat without a key: SHAKE-256 of the key, a purpose and a round.

The library's other draws follow from the seed, which a run publishes. Noise that protects a client must not: whoever
can compute it can subtract it. Keyed by a purpose and a round, it is the same after a resume and on every rank.
"""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
_PORTION = 1 << 16  # words from one hash


def new_key() -> bytes:
    """A key from the system's source of randomness."""
    return os.urandom(KEY_BYTES)


def key_of_seed(seed: int) -> bytes:
    """A key that everybody knows, for tests."""
    return hashlib.blake2b(f"comfedl noise seed {seed}".encode(), digest_size=KEY_BYTES).digest()


class SecretNoise:
    """Draws of one key; each (purpose, round) has a stream of its own."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def uniforms(self, count: int, purpose: str, round: int) -> NDArray[np.float64]:
        """Numbers in (0, 1], in steps of 2^-53."""
        words = np.empty(count, dtype=np.float64)
        for portion, start in enumerate(range(0, count, _PORTION)):
            size = min(_PORTION, count - start)
            stream = hashlib.shake_256(self._key + f"\x1f{purpose}\x1f{round}\x1f{portion}".encode())
            bits = np.frombuffer(stream.digest(8 * size), dtype="<u8") >> np.uint64(11)
            words[start : start + size] = (bits + np.uint64(1)).astype(np.float64)
        return words * 2.0**-53

    def normals(self, count: int, purpose: str, round: int) -> NDArray[np.float64]:
        """Standard normal numbers (Box and Muller, 1958); none is beyond 8.6, which has a probability of 1e-17."""
        half = (count + 1) // 2
        uniform = self.uniforms(2 * half, purpose, round)
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:half])), 2 * math.pi * uniform[half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
