"""Clients' samples that were read and are kept for the next time, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

MEMORY_MB = 500


class ClientCache:
    """The least recently used clients make room for others; any thread may ask.

    Half of ``memory_mb`` is for clients that are kept, the other half for those that train and those read ahead. So
    two clients always fit: the one that trains and the next one.
    """

    def __init__(self, memory_mb: float) -> None:
        checks.positive("memory_mb", memory_mb)
        self.memory_mb, self.bound = memory_mb, memory_mb * 1e6 / 2
        self._kept: OrderedDict[Hashable, Tree] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """What is kept under a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def get_or_read(self, key: Hashable, read: Callable[[], Tree]) -> Any:
        """What is kept under a key; if nothing is, it is read."""
        found = self.get(key)
        if found is None:
            found = read()
            self._put(key, found)
        return found

    def _put(self, key: Hashable, value: Tree) -> None:
        size = tree.nbytes(value)
        if size > self.bound:
            return
        with self._lock:
            if key in self._kept:
                return
            while self._bytes + size > self.bound:
                self._bytes -= tree.nbytes(self._kept.popitem(last=False)[1])
            self._kept[key] = value
            self._bytes += size

    def __getstate__(self) -> float:
        return self.memory_mb  # in another process it begins empty

    def __setstate__(self, memory_mb: float) -> None:
        self.__init__(memory_mb)  # type: ignore[misc]


def cache_if_lazy(lazy: object, memory_mb: float | None) -> ClientCache | None:
    """The cache of data that stay on disk; None for data in memory."""
    if not isinstance(lazy, bool):
        raise ConfigError(f"lazy is {lazy!r}, but it must be true or false.")
    if not lazy:
        if memory_mb is not None:
            raise ConfigError(
                "memory_mb is given, but the data are read into memory; set lazy to true, or leave it out."
            )
        return None
    return ClientCache(MEMORY_MB if memory_mb is None else memory_mb)
