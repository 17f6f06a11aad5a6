"""A split: the samples of all clients in two flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data import client_names as naming

Batch = tuple[Tensor, Tensor]


class Split(Mapping[str, Batch]):
    """One split of all clients: rows of two flat tensors, so that many clients are gathered at once.

    As a mapping it gives each client's ``(x, y)``; clients that hold nothing in this split are left out.
    """

    def __init__(
        self, x: Tensor, y: Tensor, names: Sequence[str], offsets: NDArray[np.int64], rows: Tensor | None = None
    ) -> None:
        self.x, self.y, self.names, self.offsets, self.rows = x, y, names, offsets, rows
        self.sizes: NDArray[np.int64] = np.diff(offsets)

    def position(self, client: str) -> int:
        """The client's place in ``names``."""
        place = naming.find(self.names, client)
        if place is None:
            raise KeyError(client)
        return place

    def __getitem__(self, client: str) -> Batch:
        i = self.position(client)
        if not self.sizes[i]:
            raise KeyError(client)
        return self.whole(i)

    def __iter__(self) -> Iterator[str]:
        return (name for name, size in zip(self.names, self.sizes, strict=True) if size)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.sizes))

    def whole(self, i: int) -> Batch:
        """All of the i-th client's samples."""
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        if self.rows is None:
            return self.x[start:stop], self.y[start:stop]
        rows = self.rows[start:stop]
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

    def wholes(self, clients: NDArray[np.int64]) -> Batch:
        """All samples of these clients, one client after another."""
        if self.rows is None and (np.diff(clients) == 1).all():
            start, stop = int(self.offsets[clients[0]]), int(self.offsets[clients[-1] + 1])
            return self.x[start:stop], self.y[start:stop]
        return self.at(np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in clients]))

    def take(self, i: int, positions: NDArray[np.int64]) -> Batch:
        """The i-th client's samples at these positions; the result has their shape in front."""
        return self.at(positions + self.offsets[i])

    def at(self, places: NDArray[np.int64]) -> Batch:
        """The samples at these places, counted over all clients; the result has their shape in front."""
        return self.gathered(self.rows_of(places), places.shape)

    def rows_of(self, places: NDArray[np.int64]) -> Tensor:
        """The rows of ``x`` and ``y`` that hold the samples at these places, as one flat tensor."""
        flat = torch.from_numpy(places.reshape(-1)).to(self.x.device)
        return flat if self.rows is None else self.rows.index_select(0, flat)

    def gathered(self, rows: Tensor, shape: Sequence[int]) -> Batch:
        """The samples in these rows, with this shape in front."""
        x, y = self.x.index_select(0, rows), self.y.index_select(0, rows)
        return x.view(*shape, *x.shape[1:]), y.view(*shape, *y.shape[1:])

    def to(self, dtype: torch.dtype, device: torch.device) -> Split:
        """The same split with its floating-point numbers in this dtype, on this device."""
        x, y = (part.to(device, dtype if part.is_floating_point() else None) for part in (self.x, self.y))
        rows = None if self.rows is None else self.rows.to(device)
        return Split(x, y, self.names, self.offsets, rows)
