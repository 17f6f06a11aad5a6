"""Split: the samples of all clients in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data import client_names
from comfedl.utils import samples, tree
from comfedl.utils.samples import Samples
from comfedl.utils.tree import Tree

Batch = tuple[Samples, Samples]

Check = Callable[[str, Samples, bool], None]
"""Checks a client's y, and may raise; the last argument says whether these are all of the client's in the split."""


class Split(Mapping[str, Batch]):
    """One split (such as train) of all clients, stored flat so that batches of many clients are gathered at once.

    ``x`` and ``y`` are tensors, or tuples or dicts of them. Client i has the positions from ``offsets[i]`` to
    ``offsets[i + 1] - 1``; position p is row p of ``x`` and ``y``, or ``rows[p]`` if given. As a mapping it has the
    ``(x, y)`` of each client that has samples in the split.
    """

    def __init__(
        self, x: Samples, y: Samples, names: Sequence[str], offsets: NDArray[np.int64], rows: Tensor | None = None
    ) -> None:
        self.x, self.y, self.names, self.offsets, self.rows = x, y, names, offsets, rows
        self.sizes: NDArray[np.int64] = np.diff(offsets)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return samples.first(self.x).device

    @property
    def is_plain(self) -> bool:
        """Whether x and y are a tensor each."""
        return isinstance(self.x, Tensor) and isinstance(self.y, Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one x; for a tuple or dict of tensors, a tuple or dict of shapes."""
        found: tuple[int, ...] = samples.shapes(self.x)
        return found

    def position(self, client: str) -> int:
        """The client's index in ``names``."""
        i = client_names.find(self.names, client)
        if i is None:
            raise KeyError(client)
        return i

    def __getitem__(self, client: str) -> Batch:
        i = self.position(client)
        if not self.sizes[i]:
            raise KeyError(client)
        return self.samples_of(i)

    def __iter__(self) -> Iterator[str]:
        return (name for name, size in zip(self.names, self.sizes, strict=True) if size)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.sizes))

    at_hand = True
    """Whether the samples are in memory; see ``LazySplit``."""

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample, x and y."""
        return sum(leaf[:1].numel() * leaf.element_size() for leaf in tree.leaves(self.head(1)))

    def head(self, size: int) -> Batch:
        """The first samples, of whichever client."""
        return samples.between(self.x, 0, size), samples.between(self.y, 0, size)

    def samples_of(self, i: int) -> Batch:
        """All of the i-th client's samples."""
        return self._between(int(self.offsets[i]), int(self.offsets[i + 1]))

    def y_of(self, i: int) -> Samples:
        """The y of all of the i-th client's samples."""
        return self.samples_of(i)[1]

    def all_y(self) -> Samples:
        """The y of all clients; of data that were set aside, also the y that they were set aside from."""
        return self.y

    def check_each(self, check: Check) -> None:
        """Check the y of every client: now, or when its samples are read."""
        for i, name in enumerate(self.names):
            check(name, self.y_of(i), True)

    def ready(self, positions: NDArray[np.int64]) -> tuple[Split, NDArray[np.int64]]:
        """A split in memory that has the samples at these positions, and their positions in it."""
        return self, positions

    def part(self, positions: Sequence[NDArray[np.int64]]) -> Split:
        """Each client's samples at these positions within the client, without copying them."""
        offsets = np.concatenate([[0], np.cumsum([len(own) for own in positions])]).astype(np.int64)
        places = np.concatenate([own + start for own, start in zip(positions, self.offsets, strict=False)])
        return Split(self.x, self.y, self.names, offsets, self.rows_at(places))

    def relabelled(self, clients: Iterable[int], change: Callable[[Tensor, Any], Tensor], more: Tree) -> Split:
        """The same with ``change(y, more)`` as the y of these clients; ``more`` has the structure of y."""
        ranges = [torch.arange(*self.offsets[i : i + 2].tolist(), device=self.device) for i in clients]
        rows = torch.cat(ranges) if self.rows is None else self.rows[torch.cat(ranges)]

        def changed(y: Tensor, own: Any) -> Tensor:
            y = y.clone()
            y[rows] = change(y[rows], own)
            return y

        return Split(self.x, tree.map(changed, self.y, more), self.names, self.offsets, self.rows)

    def identity(self, times: bool = True) -> Iterator[Any]:
        """What identifies the samples, for a fingerprint: the tensors, and the keys of a tuple or dict.

        ``times``: of files, also when they were changed.
        """
        for whole in (self.x, self.y, self.rows):
            for key, part in [] if whole is None else samples.named(whole):
                if key:
                    yield key
                yield part

    def _between(self, start: int, stop: int) -> Batch:
        """The samples at these positions in a row; views, unless there are ``rows``."""
        if self.rows is None:
            return samples.between(self.x, start, stop), samples.between(self.y, start, stop)
        rows = self.rows[start:stop]
        return samples.select(self.x, rows), samples.select(self.y, rows)

    def samples_of_all(self, clients: NDArray[np.int64]) -> Batch:
        """All samples of these clients, concatenated."""
        if self.rows is None and (np.diff(clients) == 1).all():
            return self._between(int(self.offsets[clients[0]]), int(self.offsets[clients[-1] + 1]))
        return self.gather(np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in clients]))

    def take(self, i: int, positions: NDArray[np.int64]) -> Batch:
        """The i-th client's samples at these positions within the client; see ``gather``."""
        return self.gather(positions + self.offsets[i])

    def gather(self, positions: NDArray[np.int64]) -> Batch:
        """The samples at these positions; x has the shape [*positions.shape, *sample shape], and so has y."""
        rows = self.rows_at(positions)
        x, y = (samples.shaped(samples.select(part, rows), positions.shape) for part in (self.x, self.y))
        return x, y

    def rows_at(self, positions: NDArray[np.int64]) -> Tensor:
        """The rows of ``x`` and ``y`` at these positions, as one flat tensor."""
        flat = torch.from_numpy(positions.reshape(-1)).to(self.device)
        return flat if self.rows is None else self.rows.index_select(0, flat)

    def to(self, dtype: torch.dtype, device: torch.device) -> Split:
        """A copy on this device, with floating-point tensors in this dtype."""

        def moved(part: Tensor) -> Tensor:
            return part.to(device, dtype if part.is_floating_point() else None)

        rows = None if self.rows is None else self.rows.to(device)
        return Split(tree.map(moved, self.x), tree.map(moved, self.y), self.names, self.offsets, rows)
