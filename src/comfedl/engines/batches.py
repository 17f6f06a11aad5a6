"""The batches of a step: which clients can run it together, and what each of them draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast, overload

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl import rng
from comfedl.data.federated import FederatedData, Split
from comfedl.engines.stacked import Ragged
from comfedl.problem import Batch
from comfedl.step import Draw

Sizes = NDArray[np.int64]

# What a client's part of a draw is, beside its size where it is all the client has.
NOTHING, DRAWN = -1, 0


def extents(split: Split | None, draw: Draw, clients: Sizes) -> Sizes:
    """For each client how many samples it gives whole, or ``DRAWN``, or ``NOTHING``."""
    if split is None:
        return np.full(len(clients), NOTHING)
    have = split.sizes[clients]
    whole = (have > 0) if draw.size is None else (have > 0) & (have <= draw.size if draw.bounded else False)
    return np.where(have == 0, NOTHING, np.where(whole, have, DRAWN))


class Gathered(Sequence[Batch]):
    """Batches at these places of a split, local steps first; each is gathered when it is asked for.

    So no more than one is in memory, and it is still in the processor's cache when it is used.
    """

    def __init__(self, split: Split, places: Sizes) -> None:
        self._split, self._shape = split, places.shape[1:]
        rows = split.rows_of(places)
        self._rows = rows.view(len(places), int(np.prod(self._shape))).unbind()
        # Labels are small: those of all steps are gathered at once.
        self._labels = split.y.index_select(0, rows).view(places.shape).unbind() if split.y.ndim == 1 else None
        self._latest: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, k: int) -> Batch: ...

    @overload
    def __getitem__(self, k: slice) -> Sequence[Batch]: ...

    def __getitem__(self, k: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(k, slice):
            return [self[place] for place in range(len(self))[k]]
        if self._latest is None or self._latest[0] != k:  # a step may use one batch for both maps
            self._latest = None  # its memory serves for the next
            self._latest = k, self._gathered(k)
        return self._latest[1]

    def _gathered(self, k: int) -> Batch:
        x, rows, shape = self._split.x, self._rows[k], self._shape
        if self._labels is None:
            return self._split.gathered(rows, shape)
        return x.index_select(0, rows).view(*shape, *x.shape[1:]), self._labels[k]


class Drawn:
    """The batches of one step in one round for some clients; samples are drawn at once, and gathered when asked for."""

    def __init__(
        self,
        data: FederatedData,
        draws: Mapping[str, Draw],
        step: str,
        clients: Sequence[int],
        seed: int,
        round: int,
        like: Drawn | None = None,
    ) -> None:
        self.clients = np.asarray(clients, dtype=np.int64)
        self._draws = draws
        self._splits = {name: data.split(draw.split, draw.instead) for name, draw in draws.items()}
        if like is not None and np.array_equal(like.clients, self.clients):  # the step's draws before, by the same ones
            self.extents: dict[str, Sizes] = like.extents
            self.whole: Sizes = like.whole
        else:
            self.extents = {name: extents(self._splits[name], draw, self.clients) for name, draw in draws.items()}
            # How many samples each client gives whole, over all draws.
            self.whole = sum((np.maximum(extent, 0) for extent in self.extents.values()), np.zeros_like(self.clients))
        self._positions: dict[str, tuple[Sizes, Sizes]] = {}
        for name, draw in draws.items():
            drawn, split = self.extents[name] == DRAWN, self._splits[name]
            if split is None or draw.size is None or not drawn.any():
                continue
            who, purpose = self.clients[drawn], draw.purpose or f"{step}/{name}"
            keys = [rng.key(seed, purpose, round, data.names[i]) for i in who]
            positions = rng.subsets(keys, split.sizes[who].tolist(), draw.count, draw.size)
            # Where each client's draws are, and the draws as places in the flat tensors of the split.
            self._positions[name] = np.cumsum(drawn) - 1, positions + split.offsets[who][:, None, None]

    def nbytes(self) -> int:
        """About how many bytes the batches of the client that has most hold."""
        total = 0
        for name, draw in self._draws.items():
            split, most = self._splits[name], int(self.extents[name].max(initial=NOTHING))
            if split is not None and most != NOTHING:
                row = sum(part[:1].numel() * part.element_size() for part in (split.x, split.y))
                total += row * (most or draw.count * (draw.size or 0))
        return total

    def of_one(self, k: int) -> dict[str, Sequence[Batch]]:
        """The batches of the k-th client."""
        return {name: self._one(name, k) for name in self._draws}

    def of_many(self, ks: Sizes) -> dict[str, Sequence[Batch]]:
        """The batches of several clients, stacked; each draw must be of one kind for all of them."""
        return {name: self._many(name, ks) for name in self._draws}

    def _one(self, name: str, k: int) -> Sequence[Batch]:
        split, extent = self._splits[name], self.extents[name][k]
        if split is None or extent == NOTHING:
            return ()
        if extent != DRAWN:
            return [split.whole(int(self.clients[k]))] * self._draws[name].count
        place, positions = self._positions[name]
        return Gathered(split, positions[place[k]])

    def _many(self, name: str, ks: Sizes) -> Sequence[Batch]:
        split, sizes = self._splits[name], self.extents[name][ks]
        if split is None or sizes[0] == NOTHING:
            return ()
        if sizes[0] == DRAWN:
            place, positions = self._positions[name]
            return Gathered(split, positions[place[ks]].transpose(1, 0, 2))
        x, y = split.wholes(self.clients[ks])
        if (sizes == sizes[0]).all():
            whole = x.view(len(ks), -1, *x.shape[1:]), y.view(len(ks), -1, *y.shape[1:])
        else:
            whole = cast(Batch, Ragged(x, y, torch.from_numpy(sizes).to(x.device)))
        return [whole] * self._draws[name].count


def alike(drawn: Drawn, keys: Sequence[object], ragged: bool) -> Iterator[Sizes]:
    """Clients (as places in ``drawn``) whose batches have one shape, or with ``ragged`` differ in whole data alone.

    ``keys`` is what else they must have in common. Those with whole data come in the order of their size.
    """
    groups: dict[object, list[int]] = {}
    if len(set(keys)) == 1 and all((column == column[0]).all() for column in drawn.extents.values()):
        yield np.arange(len(drawn.clients))
        return
    columns = [np.sign(column) if ragged else column for column in drawn.extents.values()]
    for k, row in enumerate(zip(keys, *(column.tolist() for column in columns), strict=True)):
        groups.setdefault(row, []).append(k)
    for group in groups.values():
        ks = np.asarray(group)
        yield ks[np.argsort(drawn.whole[ks], kind="stable")]


def portions(sizes: Sizes, most: int) -> Iterator[slice]:
    """Cut clients of rising sizes into chunks of at most ``most``, in which padding is no more than the data."""
    start = 0
    for stop in range(1, len(sizes) + 1):
        if stop < len(sizes):
            padded = sizes[stop] * (stop + 1 - start)
            if stop - start < most and padded <= 2 * sizes[start : stop + 1].sum():
                continue
        yield slice(start, stop)
        start = stop
