"""The batches of a step: which clients can run it together, and what each of them draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.learner import Batch
from comfedl.core.protocol import Draw
from comfedl.data.federated import FederatedData, Split
from comfedl.engines.stacked import Ragged
from comfedl.utils import rng

Sizes = NDArray[np.int64]

# What a client's part of a draw is, beside its size where it is all the client has.
NOTHING, DRAWN = -1, 0
# How many rounds at most are drawn at once, and how many numbers.
ROUNDS, NUMBERS = 8, 20_000


def extents(split: Split | None, draw: Draw, clients: Sizes) -> Sizes:
    """For each client how many samples it gives whole, or ``DRAWN``, or ``NOTHING``."""
    if split is None:
        return np.full(len(clients), NOTHING)
    have = split.sizes[clients]
    whole = (have > 0) if draw.size is None else (have > 0) & (have <= draw.size if draw.bounded else False)
    return np.where(have == 0, NOTHING, np.where(whole, have, DRAWN))


class Room:
    """Memory that one batch after another is put into.

    It stays where it is between rounds: asked for and given back each time, it would leave holes that the next one does
    not quite fit into.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape, of the type and on the device of another one."""
        size = math.prod(shape)
        memory = self._memory
        if memory is None or len(memory) < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


class Gathered(Sequence[Batch]):
    """Batches at these places of a split, local steps first; each is gathered when it is asked for.

    So no more than one is in memory, and it is still in the processor's cache when it is used.
    """

    def __init__(self, split: Split, places: Sizes) -> None:
        self._split, self._shape = split, places.shape[1:]
        rows = split.rows_at(places)
        self._rows = rows.view(len(places), math.prod(self._shape)).unbind()
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

    def in_turn(self, room: Room) -> Iterator[Batch]:
        """All batches, one after another, each x in the same place of this room: the next one is written over it."""
        x = self._split.x
        out = room.of((math.prod(self._shape), *x.shape[1:]), x)
        shaped = out.view(*self._shape, *x.shape[1:])
        for k, rows in enumerate(self._rows):
            torch.index_select(x, 0, rows, out=out)
            yield shaped, self._y(k)

    def _gathered(self, k: int) -> Batch:
        x = self._split.x.index_select(0, self._rows[k])
        return x.view(*self._shape, *x.shape[1:]), self._y(k)

    def _y(self, k: int) -> Tensor:
        if self._labels is not None:
            return self._labels[k]
        y = self._split.y.index_select(0, self._rows[k])
        return y.view(*self._shape, *y.shape[1:])


class Drawers:
    """Those of the asked clients who draw batches from a split.

    Of a few clients who draw in one round after another, several rounds are drawn at once: a draw depends on its key
    alone, and most of the time would go into the calls.
    """

    def __init__(self, split: Split, draw: Draw, clients: Sizes, drawing: NDArray[np.bool_]) -> None:
        assert draw.size is not None
        who = clients[drawing]
        self.place: Sizes = np.cumsum(drawing) - 1  # where each asked client is among them
        self.who: list[int] = who.tolist()
        self._sizes, self._count, self._size = split.sizes[who], draw.count, draw.size
        self._offsets = split.offsets[who][:, None, None]
        batches = max(1, len(who) * draw.count)
        self._rounds = max(1, min(ROUNDS, rng.MAX_TABLE_BATCHES // batches, NUMBERS // (batches * draw.size)))
        self._subsets: dict[int, rng.Subsets] = {}  # by how many rounds they are for
        self._ahead: dict[int, Sizes] = {}
        self._last = -1

    def places(self, round: int, keys: Callable[[int], list[int]]) -> Sizes:
        """What they draw in a round, as places in the split's flat tensors, [clients, batches, samples].

        ``keys`` gives their keys of a round.
        """
        found = self._ahead.pop(round, None)
        if found is None:
            rounds = range(round, round + (self._rounds if self._last == round - 1 else 1))
            if len(rounds) not in self._subsets:
                self._subsets[len(rounds)] = rng.Subsets(np.tile(self._sizes, len(rounds)), self._count, self._size)
            drawn = self._subsets[len(rounds)]([key for each in rounds for key in keys(each)])
            drawn = drawn.reshape(len(rounds), *self._offsets.shape[:1], *drawn.shape[1:])
            drawn += self._offsets
            found, *ahead = drawn
            self._ahead = dict(zip(rounds[1:], ahead, strict=True))
        self._last = round
        return found


class Given:
    """Who is asked for a step, and what each of them gives for its draws; the same in all rounds that ask the same."""

    def __init__(self, data: FederatedData, draws: Mapping[str, Draw], clients: list[int]) -> None:
        self.asked, self.draws, self.names = clients, draws, data.names
        self.clients = np.asarray(clients, dtype=np.int64)
        self.splits = {name: data.split(draw.split, draw.instead) for name, draw in draws.items()}
        self.extents = {name: extents(self.splits[name], draw, self.clients) for name, draw in draws.items()}
        # How many samples each client gives whole, over all draws.
        self.whole: Sizes = sum(
            (np.maximum(extent, 0) for extent in self.extents.values()), np.zeros_like(self.clients)
        )
        self.even = all((column == column[:1]).all() for column in self.extents.values())
        self.drawers: dict[str, Drawers] = {}
        self.nbytes = 0  # about how many bytes the batches of the client that has most hold
        for name, draw in draws.items():
            extent, split = self.extents[name], self.splits[name]
            most = int(extent.max(initial=NOTHING))
            if split is None or most == NOTHING:
                continue
            row = sum(part[:1].numel() * part.element_size() for part in (split.x, split.y))
            self.nbytes += row * (most or draw.count * (draw.size or 0))
            drawing = extent == DRAWN
            if drawing.any():
                self.drawers[name] = Drawers(split, draw, self.clients, drawing)


class Drawn:
    """The batches of one step in one round; samples are drawn at once, and gathered when asked for."""

    def __init__(self, given: Given, step: str, seed: int, round: int) -> None:
        self.given, self.clients = given, given.clients
        # The draws of those who draw, as places in the flat tensors of the split.
        self._places: dict[str, Sizes] = {}
        for name, drawers in given.drawers.items():
            purpose = given.draws[name].purpose or f"{step}/{name}"
            self._places[name] = drawers.places(round, partial(_keys, given, drawers, seed, purpose))

    def of_one(self, k: int) -> dict[str, Sequence[Batch]]:
        """The batches of the k-th client."""
        return {name: self._one(name, k) for name in self.given.draws}

    def of_many(self, ks: Sizes) -> dict[str, Sequence[Batch]]:
        """The batches of several clients, stacked; each draw must be of one kind for all of them."""
        return {name: self._many(name, ks) for name in self.given.draws}

    def _one(self, name: str, k: int) -> Sequence[Batch]:
        given = self.given
        split, extent = given.splits[name], given.extents[name][k]
        if split is None or extent == NOTHING:
            return ()
        if extent != DRAWN:
            return [split.samples_of(int(self.clients[k]))] * given.draws[name].count
        return Gathered(split, self._places[name][given.drawers[name].place[k]])

    def _many(self, name: str, ks: Sizes) -> Sequence[Batch]:
        given = self.given
        split, sizes = given.splits[name], given.extents[name][ks]
        if split is None or sizes[0] == NOTHING:
            return ()
        if sizes[0] == DRAWN:
            return Gathered(split, self._places[name][given.drawers[name].place[ks]].transpose(1, 0, 2))
        x, y = split.samples_of_all(self.clients[ks])
        if (sizes == sizes[0]).all():
            whole = x.view(len(ks), -1, *x.shape[1:]), y.view(len(ks), -1, *y.shape[1:])
        else:
            whole = cast(Batch, Ragged(x, y, torch.from_numpy(sizes).to(x.device)))
        return [whole] * given.draws[name].count


def _keys(given: Given, drawers: Drawers, seed: int, purpose: str, round: int) -> list[int]:
    return [rng.key(seed, purpose, round, given.names[i]) for i in drawers.who]


def alike(given: Given, keys: Sequence[object], ragged: bool) -> Iterator[Sizes]:
    """Clients (as places in ``given``) whose batches have one shape, or with ``ragged`` differ in whole data alone.

    ``keys`` is what else they must have in common. Those with whole data come in the order of their size.
    """
    groups: dict[object, list[int]] = {}
    if given.even and len(set(keys)) == 1:
        yield np.arange(len(given.clients))
        return
    columns = [np.sign(column) if ragged else column for column in given.extents.values()]
    for k, row in enumerate(zip(keys, *(column.tolist() for column in columns), strict=True)):
        groups.setdefault(row, []).append(k)
    for group in groups.values():
        ks = np.asarray(group)
        yield ks[np.argsort(given.whole[ks], kind="stable")]


def portions(sizes: Sizes, most: int) -> Iterator[slice]:
    """Cut clients of rising sizes into chunks of at most ``most``, in which padding is no more than the data."""
    start, even = 0, len(sizes) > 0 and sizes[0] == sizes[-1]  # then nothing is padded
    for stop in range(most, len(sizes) + most, most) if even else range(1, len(sizes) + 1):
        if stop < len(sizes) and not even:
            padded = sizes[stop] * (stop + 1 - start)
            if stop - start < most and padded <= 2 * sizes[start : stop + 1].sum():
                continue
        yield slice(start, min(stop, len(sizes)))
        start = stop
