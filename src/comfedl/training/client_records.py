"""Per-client records, stored in flat arrays and turned into rows on access."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import overload

import numpy as np
from numpy.typing import NDArray

from comfedl.core.client_statistics import Row
from comfedl.core.protocol import Scores
from comfedl.data.client_names import find

FEW = 100_000  # up to this many rows are returned as a list


@dataclass(frozen=True, eq=False)
class Evaluation(Sequence[Row]):
    """One row per client after one round; the values of row k are ``values[starts[k] : starts[k + 1]]``."""

    round: int
    names: Sequence[str]
    clients: NDArray[np.int64]
    kinds: Sequence[tuple[str, ...]]
    kind: NDArray[np.int64]
    starts: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        round: int,
        names: Sequence[str],
        clients: Sequence[int],
        groups: Sequence[Scores],
        extra: Mapping[str, NDArray[np.float64]],
    ) -> Evaluation:
        """From tables of scores, and extra columns that every client has."""
        more = np.stack(list(extra.values()), axis=1) if extra else np.zeros((len(clients), 0))
        kind, lengths = np.zeros(len(clients), dtype=np.int64), np.zeros(len(clients) + 1, dtype=np.int64)
        for number, group in enumerate(groups):
            kind[group.places] = number
            lengths[group.places + 1] = len(group.names) + len(extra)
        starts = np.cumsum(lengths)
        values = np.empty(starts[-1])
        for group in groups:
            columns = starts[group.places][:, None] + np.arange(len(group.names) + len(extra))
            values[columns] = np.concatenate([group.values, more[group.places]], axis=1)
        kinds = [(*group.names, *extra) for group in groups]
        return cls(round, names, np.asarray(clients, dtype=np.int64), kinds, kind, starts, values)

    def columns(self, leave_out: Iterable[str] = ()) -> dict[str, NDArray[np.float64]]:
        """The values under each name, in the order of the clients that have it."""
        _, first = np.unique(self.kind, return_index=True)
        in_order = [self.kinds[k] for k in self.kind[np.sort(first)]]
        found = {}
        for name in dict.fromkeys(name for names in in_order for name in names if name not in leave_out):
            offsets = np.array([names.index(name) if name in names else -1 for names in self.kinds])[self.kind]
            found[name] = self.values[(self.starts[:-1] + offsets)[offsets >= 0]]
        return found

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[k] for k in range(len(self))[place]]
        k = range(len(self))[place]
        numbers = self.values[self.starts[k] : self.starts[k + 1]].tolist()
        named = zip(self.kinds[self.kind[k]], numbers, strict=True)
        return {"round": self.round, "client": self.names[int(self.clients[k])], **dict(named)}


class ClientRows(Sequence[Row]):
    """The rows of all evaluations, one after another."""

    def __init__(self, evaluations: Iterable[Evaluation] = ()) -> None:
        self._evaluations: list[Evaluation] = []
        self._ends: list[int] = []
        for evaluation in evaluations:
            self.add(evaluation)

    def add(self, evaluation: Evaluation) -> None:
        """Append the rows of an evaluation."""
        self._evaluations.append(evaluation)
        self._ends.append(len(self) + len(evaluation))

    @classmethod
    def read(cls, rows: Iterable[Row], names: Sequence[str]) -> ClientRows:
        """From rows as they were written; ``names`` are those of all clients, in order."""
        found = cls()
        for number, each in groupby(rows, key=lambda row: row["round"]):
            found.add(_evaluation_of(int(number), each, names))
        return found

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[k] for k in range(len(self))[place]]
        k = range(len(self))[place]
        which = bisect_right(self._ends, k)
        return self._evaluations[which][k - (self._ends[which - 1] if which else 0)]

    def __iter__(self) -> Iterator[Row]:
        for evaluation in self._evaluations:
            yield from evaluation

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | ClientRows):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def few_as_list(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows as a plain list, unless there are too many."""
    return list(rows) if len(rows) <= FEW else rows


def _evaluation_of(round: int, rows: Iterable[Row], names: Sequence[str]) -> Evaluation:
    """An evaluation, from its rows."""
    kinds: dict[tuple[str, ...], int] = {}
    clients, kind, starts, values = array("q"), array("q"), array("q", [0]), array("d")
    for row in rows:
        _, client, *keys = row
        place = find(names, str(row[client]))
        assert place is not None
        clients.append(place)
        kind.append(kinds.setdefault(tuple(keys), len(kinds)))
        values.extend(row[key] for key in keys)  # type: ignore[misc]
        starts.append(len(values))
    whole = (np.frombuffer(numbers, dtype=np.int64) for numbers in (clients, kind, starts))
    places, kind_of, start = whole
    return Evaluation(round, names, places, list(kinds), kind_of, start, np.frombuffer(values))
