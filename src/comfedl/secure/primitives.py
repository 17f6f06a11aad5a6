"""Key agreement, key derivation, masks and sealed shares, from the package ``cryptography``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from comfedl.secure.ring import Words
from comfedl.utils.errors import ConfigError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ConfigError(
        "Secure aggregation needs the package cryptography; install it with: pip install 'comfedl[secure]'"
    ) from error

KEY = 32  # bytes of a key, a seed or a shared secret
NONCE = 12


class Unsealable(ValueError):
    """What was sealed has been changed, or was sealed for somebody else."""


def new_secret() -> bytes:
    """A new private key for X25519, or the seed of a mask."""
    return secrets.token_bytes(KEY)


def public_key(secret: bytes) -> bytes:
    """The public key that belongs to a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """A key that only the owners of the two private keys can derive, another one for every purpose.

    Raises:
        ValueError: the public key is none that anybody would make.
    """
    common = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return derive(common, purpose)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key for a purpose."""
    return HKDF(SHA256(), KEY, salt=None, info=b"comfedl secure aggregation 1 " + purpose).derive(secret)


def add_mask(parts: Sequence[Words], key: bytes, sign: int) -> None:
    """Add to every word the next one of ChaCha20's key stream, or subtract it. A key must serve only once."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    for part in parts:
        mask = np.frombuffer(stream.update(bytes(part.nbytes)), dtype=part.dtype)
        if sign > 0:
            part += mask
        else:
            part -= mask


def seal(key: bytes, text: bytes, label: bytes) -> bytes:
    """Encrypt and authenticate; ``label`` must be the same when it is opened."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, label)


def unseal(key: bytes, sealed: bytes, label: bytes) -> bytes:
    """The text that ``seal`` was given."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], label)
    except (InvalidTag, ValueError) as error:
        raise Unsealable("it was sealed for somebody else, or has been changed") from error
