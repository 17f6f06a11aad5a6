"""A sequence of batches that are made when they are accessed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

from comfedl.core.learner import Batch


class MadeBatches(Sequence[Batch], ABC):
    """Keeps the latest batch alone: a local step may use a batch twice, for both maps."""

    _latest: tuple[int, Batch] | None = None

    @abstractmethod
    def _make(self, k: int) -> Batch:
        """The k-th batch."""

    @overload
    def __getitem__(self, k: int) -> Batch: ...

    @overload
    def __getitem__(self, k: slice) -> Sequence[Batch]: ...

    def __getitem__(self, k: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(k, slice):
            return [self[place] for place in range(len(self))[k]]
        k = range(len(self))[k]
        if self._latest is None or self._latest[0] != k:
            self._latest = None  # frees its memory for the next one
            self._latest = k, self._make(k)
        return self._latest[1]
