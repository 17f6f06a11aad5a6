"""Digests that show whether two runs had the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def fingerprint(*parts: Any) -> str:
    """The SHA-256 digest of names, numbers and tensors."""
    return hashed(parts).hexdigest()


def hashed(parts: Iterable[Any], begun: hashlib._Hash | None = None) -> hashlib._Hash:
    """The same as a hash, to which more can be added: it goes on from a copy of ``begun``."""
    digest = hashlib.sha256() if begun is None else begun.copy()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(part).encode())
    return digest
