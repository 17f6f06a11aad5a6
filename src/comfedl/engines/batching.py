"""The batches of a step: what each client draws, and which clients can run together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.learner import Batch
from comfedl.core.protocol import Draw
from comfedl.data.federated import FederatedData, Split
from comfedl.data.lazy_split import LazySplit
from comfedl.data.transform import TransformFunction
from comfedl.engines.made_batches import MadeBatches
from comfedl.engines.stacked import Ragged
from comfedl.engines.transformed import Changes, TransformedBatches
from comfedl.utils import rng, samples, tree
from comfedl.utils.samples import Samples

IntArray = NDArray[np.int64]

# A client's extent in a draw, if it is not the number of samples of a client that uses all it has.
NO_DATA, SAMPLED = -1, 0
# Limits on drawing ahead: rounds, and random numbers.
ROUNDS, NUMBERS = 8, 20_000


def extents(split: Split | None, draw: Draw, clients: IntArray) -> IntArray:
    """For each client its number of samples if it uses all of them, else ``SAMPLED`` or ``NO_DATA``."""
    if split is None:
        return np.full(len(clients), NO_DATA)
    have = split.sizes[clients]
    whole = (have > 0) if draw.size is None else (have > 0) & (have <= draw.size if draw.bounded else False)
    return np.where(have == 0, NO_DATA, np.where(whole, have, SAMPLED))


class BatchBuffer:
    """Memory that is reused for one batch after another, and across rounds.

    Allocating and freeing it every time would fragment the heap.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape, with the dtype and device of ``like``."""
        size = math.prod(shape)
        memory = self._memory
        if memory is None or len(memory) < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


class LazyBatches(MadeBatches):
    """Batches of the samples at these indices, [steps, ..., samples]; each is gathered when it is accessed.

    So at most one is in memory, and it is still in the CPU cache when it is used.
    """

    def __init__(self, split: Split, places: IntArray) -> None:
        self._split, self._shape = split, places.shape[1:]
        rows = split.rows_at(places)
        self._rows = rows.view(len(places), math.prod(self._shape)).unbind()
        y = split.y
        # Labels are small: gather those of all steps at once.
        is_label = isinstance(y, Tensor) and y.ndim == 1
        self._labels = y.index_select(0, rows).view(places.shape).unbind() if is_label else None

    def __len__(self) -> int:
        return len(self._rows)

    def iterate(self, buffer: BatchBuffer) -> Iterator[Batch]:
        """All batches in order; each x, a tensor, is in this buffer, and is overwritten by the next."""
        x: Tensor = self._split.x
        out = buffer.of((math.prod(self._shape), *x.shape[1:]), x)
        shaped = out.view(*self._shape, *x.shape[1:])
        for k, rows in enumerate(self._rows):
            torch.index_select(x, 0, rows, out=out)
            yield shaped, self._y(k)

    def _make(self, k: int) -> Batch:
        return self._of(self._split.x, k), self._y(k)

    def _y(self, k: int) -> Samples:
        return self._of(self._split.y, k) if self._labels is None else self._labels[k]

    def _of(self, part: Samples, k: int) -> Samples:
        if isinstance(part, Tensor):  # the common case, made fast
            return part.index_select(0, self._rows[k]).view(*self._shape, *part.shape[1:])
        return samples.shaped(samples.select(part, self._rows[k]), self._shape)


class JoinedBatches(LazyBatches):
    """The batches of several clients, whose samples were read apart; they are stacked when they are accessed.

    Copying all clients' samples together first would take as long as reading them.
    """

    def __init__(self, parts: Sequence[LazyBatches]) -> None:
        self._parts = parts
        self._shape = len(parts), *parts[0]._shape
        self._rows = parts[0]._rows

    def iterate(self, buffer: BatchBuffer) -> Iterator[Batch]:
        x: Tensor = self._parts[0]._split.x
        out = buffer.of((math.prod(self._shape), *x.shape[1:]), x).view(*self._shape, *x.shape[1:])
        for k in range(len(self)):
            for place, part in zip(out, self._parts, strict=True):
                torch.index_select(part._split.x, 0, part._rows[k], out=place)
            yield out, self._stacked_y(k)

    def _make(self, k: int) -> Batch:
        x = tree.map(lambda *own: torch.stack(own), *(part._of(part._split.x, k) for part in self._parts))
        return x, self._stacked_y(k)

    def _stacked_y(self, k: int) -> Samples:
        return tree.map(lambda *own: torch.stack(own), *(part._y(k) for part in self._parts))


class BatchSampler:
    """Draws the batches of those clients that sample from a split.

    A draw depends only on its key (seed, purpose, round, client). So for few clients, once the same ones take part in
    two rounds in a row, several rounds are drawn at once to save the overhead of calls.
    """

    def __init__(self, split: Split, draw: Draw, clients: IntArray, drawing: NDArray[np.bool_]) -> None:
        assert draw.size is not None
        who = clients[drawing]
        self.place: IntArray = np.cumsum(drawing) - 1  # the position of each client asked among those that sample
        self.who: list[int] = who.tolist()
        self._sizes, self._count, self._size = split.sizes[who], draw.count, draw.size
        self._offsets = split.offsets[who][:, None, None]
        batches = max(1, len(who) * draw.count)
        self._rounds = max(1, min(ROUNDS, rng.MAX_TABLE_BATCHES // batches, NUMBERS // (batches * draw.size)))
        self._subsets: dict[int, rng.Subsets] = {}  # by number of rounds
        self._ahead: dict[int, IntArray] = {}
        self._last = -1

    def places(self, round: int, keys: Callable[[int], list[int]]) -> IntArray:
        """The draws of a round as indices into the split's flat tensors, [clients, batches, samples].

        ``keys`` maps a round to the clients' random keys.
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


class StepPlan:
    """The clients of a step and their data for each draw; reused in rounds with the same clients."""

    def __init__(self, data: FederatedData, draws: Mapping[str, Draw], clients: list[int]) -> None:
        self.asked, self.draws, self.names = clients, draws, data.names
        self.clients = np.asarray(clients, dtype=np.int64)
        self.splits = {name: data.split(draw.split, draw.fallback) for name, draw in draws.items()}
        self.extents = {name: extents(self.splits[name], draw, self.clients) for name, draw in draws.items()}
        # Over all draws, the samples of each client that are used in full.
        self.whole: IntArray = sum(
            (np.maximum(extent, 0) for extent in self.extents.values()), np.zeros_like(self.clients)
        )
        self.even = all((column == column[:1]).all() for column in self.extents.values())
        self.samplers: dict[str, BatchSampler] = {}
        self.nbytes = 0  # approximate size of the largest client's batches
        for name, draw in draws.items():
            extent, split = self.extents[name], self.splits[name]
            most = int(extent.max(initial=NO_DATA))
            if split is None or most == NO_DATA:
                continue
            self.nbytes += split.row_bytes * (most or draw.count * (draw.size or 0))
            drawing = extent == SAMPLED
            if drawing.any():
                self.samplers[name] = BatchSampler(split, draw, self.clients, drawing)

    @property
    def at_hand(self) -> bool:
        """Whether all samples are in memory."""
        return all(split is None or split.at_hand for split in self.splits.values())

    @cached_property
    def reading_draws(self) -> bool:
        """Whether reading the samples draws numbers from the global random generators."""
        lazy = [split for split in self.splits.values() if isinstance(split, LazySplit)]
        return any(split.reading_draws(i) for split in lazy for i in self.asked)

    @property
    def runs_code(self) -> bool:
        """Whether samples are read by code of the user's."""
        return any(isinstance(split, LazySplit) and split.runs_code for split in self.splits.values())

    @property
    def read_ahead_bytes(self) -> float:
        """How many bytes of samples on disk may be read ahead."""
        return max(split.cache.bound for split in self.splits.values() if isinstance(split, LazySplit))

    def bytes_of(self, ks: IntArray) -> int:
        """About how many bytes the batches of these clients take."""
        total = 0
        for name, draw in self.draws.items():
            split, extent = self.splits[name], self.extents[name][ks]
            if split is not None:
                sampled = int((extent == SAMPLED).sum()) * draw.count * (draw.size or 0)
                total += split.row_bytes * (int(np.maximum(extent, 0).sum()) + sampled)
        return total


class StepBatches:
    """The batches of one step in one round; indices are drawn at once, samples are gathered on access."""

    def __init__(
        self, plan: StepPlan, step: str, seed: int, round: int, transforms: Sequence[TransformFunction] = ()
    ) -> None:
        self.plan, self.clients = plan, plan.clients
        self._seed, self._round, self._transforms = seed, round, transforms
        self._purposes = {name: draw.purpose or f"{step}/{name}" for name, draw in plan.draws.items()}
        self._places: dict[str, IntArray] = {}  # indices into the flat tensors of the split
        for name, sampler in plan.samplers.items():
            self._places[name] = sampler.places(round, partial(_keys, plan, sampler, seed, self._purposes[name]))

    def of(self, ks: IntArray) -> dict[str, Sequence[Batch]]:
        """The batches of these clients, stacked if there are several."""
        return self.of_many(ks) if len(ks) > 1 else self.of_one(int(ks[0]))

    def of_one(self, k: int) -> dict[str, Sequence[Batch]]:
        """The batches of the k-th client."""
        return {name: self._changed(name, self._one(name, k), [k], False) for name in self.plan.draws}

    def of_many(self, ks: IntArray) -> dict[str, Sequence[Batch]]:
        """The batches of several clients, stacked; ``group_clients`` says which can be."""
        return {name: self._changed(name, self._many(name, ks), ks.tolist(), True) for name in self.plan.draws}

    def _changed(self, name: str, batches: Sequence[Batch], ks: list[int], stacked: bool) -> Sequence[Batch]:
        """The batches after the user's transforms, if they are for training."""
        if not self._transforms or not self.plan.draws[name].transformed or not len(batches):
            return batches
        changes = []
        for k in ks:
            client = self.plan.names[int(self.clients[k])]
            seeds = partial(_noise_seed, self._seed, self._purposes[name], self._round, client)
            changes.append(Changes(self._transforms, self._round, client, seeds))
        return TransformedBatches(batches, changes, stacked)

    def _one(self, name: str, k: int) -> Sequence[Batch]:
        plan = self.plan
        split, extent = plan.splits[name], plan.extents[name][k]
        if split is None or extent == NO_DATA:
            return ()
        if extent != SAMPLED:
            return [split.samples_of(int(self.clients[k]))] * plan.draws[name].count
        return LazyBatches(*split.ready(self._places[name][plan.samplers[name].place[k]]))

    def _many(self, name: str, ks: IntArray) -> Sequence[Batch]:
        plan = self.plan
        split, sizes = plan.splits[name], plan.extents[name][ks]
        if split is None or sizes[0] == NO_DATA:
            return ()
        if sizes[0] == SAMPLED:
            places = self._places[name][plan.samplers[name].place[ks]]
            if split.at_hand:
                return LazyBatches(split, places.transpose(1, 0, 2))
            return JoinedBatches([LazyBatches(*split.ready(own)) for own in places])
        x, y = split.samples_of_all(self.clients[ks])
        if (sizes == sizes[0]).all():
            shape = (len(ks), int(sizes[0]))
            whole = samples.shaped(x, shape), samples.shaped(y, shape)
        else:
            whole = cast(Batch, Ragged(x, y, torch.from_numpy(sizes).to(x.device)))
        return [whole] * plan.draws[name].count


def _noise_seed(seed: int, purpose: str, round: int, client: str, k: int) -> int:
    """The seed of the transforms of the k-th batch."""
    return rng.key(seed, f"{purpose}/transform/{k}", round, client) >> 1


def _keys(plan: StepPlan, sampler: BatchSampler, seed: int, purpose: str, round: int) -> list[int]:
    return [rng.key(seed, purpose, round, plan.names[i]) for i in sampler.who]


def group_clients(plan: StepPlan, keys: Sequence[object], ragged: bool) -> Iterator[IntArray]:
    """Groups of clients (positions in ``plan``) with equal ``keys`` and batches of the same shape.

    With ``ragged``, datasets that are used in full may differ in size; clients are then sorted by it.
    """
    groups: dict[object, list[int]] = {}
    if plan.even and len(set(keys)) == 1:
        yield np.arange(len(plan.clients))
        return
    columns = [np.sign(column) if ragged else column for column in plan.extents.values()]
    for k, row in enumerate(zip(keys, *(column.tolist() for column in columns), strict=True)):
        groups.setdefault(row, []).append(k)
    for group in groups.values():
        ks = np.asarray(group)
        yield ks[np.argsort(plan.whole[ks], kind="stable")]


def chunk_slices(sizes: IntArray, most: int) -> Iterator[slice]:
    """Cut clients sorted by size into chunks of at most ``most``, with no more padding than data in each."""
    start, even = 0, len(sizes) > 0 and sizes[0] == sizes[-1]  # even sizes need no padding
    for stop in range(most, len(sizes) + most, most) if even else range(1, len(sizes) + 1):
        if stop < len(sizes) and not even:
            padded = sizes[stop] * (stop + 1 - start)
            if stop - start < most and padded <= 2 * sizes[start : stop + 1].sum():
                continue
        yield slice(start, min(stop, len(sizes)))
        start = stop
