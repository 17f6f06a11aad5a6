"""LazySplit: a split whose samples are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.checked import check_alike, check_finite, check_pair
from comfedl.data.client_cache import ClientCache
from comfedl.data.sources import Source
from comfedl.data.split import Batch, Check, Split
from comfedl.utils import samples, tree
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples
from comfedl.utils.tree import Tree

IntArray = NDArray[np.int64]
LINE = 64  # bytes; torch's tensors begin at multiples of it


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rows of each client that belong to a split, one client after another.

    ``aside``: they were set aside from a split, so in memory they would be copied together for each use.
    """

    rows: IntArray
    aside: bool = False


class LazySplit(Split):
    """Names and numbers of samples are known from the start; the samples are read from a ``Source``.

    A run on it is, to the bit, the run on the same data in memory. What would be checked there at the start is checked
    whenever samples are read.

    Args:
        split: what the split is called in errors.
        cache: keeps what was read; the splits of a federation share one.
        chosen: the rows that belong to this split; None is all of them.
    """

    at_hand = False

    def __init__(
        self,
        split: str,
        source: Source,
        names: Sequence[str],
        cache: ClientCache,
        chosen: Mapping[int, IntArray] | None,
    ) -> None:
        self._split, self._source, self.cache = split, source, cache
        sizes = source.sizes
        self._chosen: Chosen | None = None
        if chosen is not None:
            sizes = np.array([len(chosen[i]) for i in range(len(names))])
            self._chosen = Chosen(np.concatenate([chosen[i] for i in range(len(names))]))
        self._begin(names, sizes)
        self._dtype: torch.dtype | None = None  # of floating-point tensors; None as they are stored
        self._device = torch.device("cpu")
        self._checks: list[Check] = []
        self._changes: dict[int, list[Callable[[Samples], Samples]]] = {}  # of the y of a client
        self._head: Batch | None = None
        self._all: LazySplit | None = None  # what this was set aside from, in one step or several

    def _begin(self, names: Sequence[str], sizes: IntArray) -> None:
        self.names, self.sizes = names, sizes.astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def _copy(self) -> LazySplit:
        made = LazySplit.__new__(LazySplit)
        made.__dict__.update(self.__dict__)
        made._checks, made._changes = [*self._checks], {i: [*own] for i, own in self._changes.items()}
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "y", "rows"):
            raise DataError(
                f"These data stay on disk, so there is no {name} of all clients; ask for one client's (x, y), as "
                f'fed.{self._split}["{self.names[0]}"].'
            )
        raise AttributeError(name)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_plain(self) -> bool:
        return all(isinstance(part, Tensor) for part in self.head(1))

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = samples.shapes(self.head(1)[0])
        return found

    def head(self, size: int) -> Batch:
        if self._head is None or samples.count(self._head[0]) < size:
            places = np.arange(min(max(size, 2), int(self.offsets[-1])))
            parts = [self._take(i, rows) for i, rows in self._by_client(places)]
            self._head = samples.cat([x for x, _ in parts]), samples.cat([y for _, y in parts])
        x, y = self._head
        return samples.between(x, 0, size), samples.between(y, 0, size)

    def samples_of(self, i: int) -> Batch:
        if not self.sizes[i]:
            return self.head(0)
        x, y = self._whole(i)
        return x, self._changed(i, y)

    def samples_of_all(self, clients: IntArray) -> Batch:
        parts = [self.samples_of(i) for i in clients.tolist()]
        in_a_row = not self._is_aside and bool((np.diff(clients) == 1).all())
        start = int(self.offsets[clients[0]]) if in_a_row else 0
        x, y = (tree.map(lambda *p: placed(p, start), *(pair[k] for pair in parts)) for k in (0, 1))
        return x, y

    def gather(self, positions: IntArray) -> Batch:
        local, places = self.ready(positions)
        return local.gather(places)

    def ready(self, positions: IntArray) -> tuple[Split, IntArray]:
        distinct, places = np.unique(positions.reshape(-1), return_inverse=True)
        parts = [self._take(i, rows) for i, rows in self._by_client(distinct)]
        x, y = parts[0] if len(parts) == 1 else (samples.cat([pair[k] for pair in parts]) for k in (0, 1))
        return Split(x, y, (), np.array([0, len(distinct)])), places.reshape(positions.shape)

    def y_of(self, i: int) -> Samples:
        if not self.sizes[i]:
            return self.samples_of(i)[1]
        y = _with_labels(self._source.read_y(i, self._who(i)))
        rows = self._rows(i)
        y = self._moved(y if rows is None else samples.select(y, torch.from_numpy(rows)))
        return self._changed(i, y)

    def all_y(self) -> Samples:
        if self._all is not None:
            return self._all.all_y()
        return samples.cat([self.y_of(i) for i in np.flatnonzero(self.sizes).tolist()])

    def check_each(self, check: Check) -> None:
        self._checks.append(check)

    def part(self, positions: Sequence[IntArray]) -> Split:
        own = [self._rows(i) for i in range(len(self.names))]
        rows = [places if mine is None else mine[places] for mine, places in zip(own, positions, strict=True)]
        made = self._copy()
        made._begin(self.names, np.array([len(places) for places in positions]))
        made._chosen, made._head = Chosen(np.concatenate(rows), aside=True), None
        made._all = self._all or self
        return made

    @property
    def runs_code(self) -> bool:
        """Whether samples are read by code of the user's."""
        return self._source.runs_code

    def reading_draws(self, i: int) -> bool:
        """Whether reading the i-th client's samples draws from the global random generators."""
        return bool(self.sizes[i]) and self._source.reading_draws(i, self._who(i))

    def relabelled(self, clients: Iterable[int], change: Callable[[Tensor, Any], Tensor], more: Tree) -> Split:
        made = self._copy()
        for i in clients:
            made._changes.setdefault(i, []).append(lambda y: tree.map(change, y, more))
        made._head = None
        return made

    def identity(self, times: bool = True) -> Iterator[Any]:
        if self._chosen is not None:
            yield torch.from_numpy(self._chosen.rows)
        yield from self._source.identity(times)

    def to(self, dtype: torch.dtype, device: torch.device) -> Split:
        return self._moved_to(dtype, device)

    def _moved_to(self, dtype: torch.dtype, device: torch.device) -> LazySplit:
        made = self._copy()
        made._dtype, made._device, made._head = dtype, device, None
        made._all = None if self._all is None else self._all._moved_to(dtype, device)
        return made

    # Reading.

    def _who(self, i: int) -> str:
        return f"Client {self.names[i]!r} in {self._split}"

    @property
    def _is_aside(self) -> bool:
        return self._chosen is not None and self._chosen.aside

    def _rows(self, i: int) -> IntArray | None:
        """The rows of the i-th client; None for all."""
        return None if self._chosen is None else self._chosen.rows[self.offsets[i] : self.offsets[i + 1]]

    def _by_client(self, positions: IntArray) -> Iterator[tuple[int, IntArray]]:
        """The client of sorted positions, and the positions within the client."""
        owners = np.searchsorted(self.offsets, positions, side="right") - 1
        for i, own in zip(*np.unique(owners, return_index=True), strict=True):
            mine = positions[own : own + int((owners == i).sum())]
            yield int(i), mine - self.offsets[i]

    def _key(self, i: int, chosen: Chosen | None) -> tuple[Any, ...]:
        return self._source, chosen, self._dtype, self._device, i

    def _whole(self, i: int) -> Batch:
        """The i-th client's samples, from the cache if they are there; y as it is stored.

        The cache is shared with other runs, which check other things, so y is checked here and not when it is read.
        """
        x, y = self._kept(i)
        self._check(i, y, whole=True)
        return x, y

    def _check(self, i: int, y: Samples, whole: bool) -> None:
        for check in self._checks:
            check(self.names[i], y, whole)

    def _kept(self, i: int) -> Batch:
        rows, all_rows = self._rows(i), np.arange(self._source.sizes[i])
        start = 0 if self._is_aside else int(self.offsets[i])
        if rows is None or self._source.by_sample:
            key = self._key(i, self._chosen)
            found: Batch = self.cache.get_or_read(key, lambda: self._read(i, all_rows if rows is None else rows, start))
            return found
        stored = self.cache.get_or_read(self._key(i, None), lambda: self._read(i, all_rows, 0))
        x, y = (samples.select(part, torch.from_numpy(rows).to(self._device)) for part in stored)
        return tree.map(lambda part: placed([part], start), x), y

    def _take(self, i: int, positions: IntArray) -> Batch:
        """The i-th client's samples at these positions within the client."""
        if self._source.by_sample and self.cache.get(self._key(i, self._chosen)) is None:
            rows = self._rows(i)
            x, y = self._read(i, positions if rows is None else rows[positions], 0)
            self._check(i, y, whole=len(positions) == self.sizes[i])
        else:
            chosen = torch.from_numpy(positions).to(self._device)
            x, y = (samples.select(part, chosen) for part in self._whole(i))
        return x, self._changed(i, y)

    def _changed(self, i: int, y: Samples) -> Samples:
        for change in self._changes.get(i, ()):
            y = change(y)
        return y

    def _read(self, i: int, rows: IntArray, start: int) -> Batch:
        """Read samples and check their form; in memory they begin as those of the position ``start`` would."""
        x, y = check_pair(self._split, self.names[i], *self._source.read(i, rows, self._who(i)))
        if self._head is not None:
            first = self.names[int(np.flatnonzero(self.sizes)[0])]
            for what, like, part in zip("xy", self._head, (x, y), strict=True):
                check_alike(self._split, what, first, like, self.names[i], part)
                self._check_integers(what, first, like, i, part)
        check_finite(self._split, Split(x, y, self.names[i : i + 1], np.array([0, len(rows)])))
        x, y = self._moved(x), self._moved(y)
        return tree.map(lambda part: placed([part], start), x), tree.map(lambda part: placed([part], start), y)

    def _check_integers(self, what: str, first: str, like: Samples, i: int, part: Samples) -> None:
        """Refuse another type of integers, which would in memory be converted for all clients."""
        for (key, one), (_, other) in zip(samples.named(like), samples.named(part), strict=True):
            if not one.is_floating_point() and one.dtype != other.dtype:
                raise DataError(
                    f"Client {self.names[i]!r} has {what}{key} of type {other.dtype} in {self._split} but client "
                    f"{first!r} has {one.dtype}; give all clients the same type."
                )

    def _moved(self, part: Samples) -> Samples:
        return tree.map(lambda leaf: leaf.to(self._device, self._dtype if leaf.is_floating_point() else None), part)


def _with_labels(y: Samples) -> Samples:
    """Labels as int64, as ``check_pair`` has them."""
    return tree.map(lambda part: part.long() if part.ndim == 1 and not part.is_floating_point() else part, y)


def placed(parts: Sequence[Tensor], start: int) -> Tensor:
    """The parts in one tensor, aligned in memory as rows from ``start`` on of a tensor of all clients would be.

    The alignment can change the last bit of a product.
    """
    first, count = parts[0], sum(map(len, parts))
    width = first[:1].numel() * first.element_size()
    lead = start * width % LINE
    if first.device.type != "cpu" or not width:
        lead = 0
    if len(parts) == 1 and first.is_contiguous() and first.data_ptr() % LINE == lead:
        return first
    memory = first.new_empty(lead // first.element_size() + count * (width // first.element_size()))
    out = memory[lead // first.element_size() :].view(count, *first.shape[1:])
    torch.cat(list(parts), out=out)
    return out
