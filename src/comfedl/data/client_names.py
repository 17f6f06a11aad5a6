"""The names of many clients: made when they are asked for, and looked up without a table of all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, overload

from comfedl.utils.errors import DataError


class Numbered(Sequence[str]):
    """The numbers from 0 as names of one length, which are in the order of texts too; none of them is kept.

    >>> names = Numbered(1_000_000)
    >>> names[41], names.index("000041"), "41" in names
    ('000041', 41, False)
    """

    def __init__(self, count: int) -> None:
        self._places = range(count)
        self._width = len(str(max(0, count - 1)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [f"{i:0{self._width}d}" for i in self._places[place]]
        return f"{self._places[place]:0{self._width}d}"

    def __contains__(self, name: object) -> bool:
        # Digits of other scripts are digits to Python.
        fits = isinstance(name, str) and len(name) == self._width and name.isascii() and name.isdigit()
        return fits and int(str(name)) in self._places

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """The place of a name."""
        if name not in self or int(name) not in self._places[start:stop]:
            raise ValueError(f"{name!r} is not among the names")
        return int(name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbered):
            return len(self) == len(other)
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Numbered({len(self)})"


def find(names: Sequence[str], name: str) -> int | None:
    """The place of a name among names in order, or None."""
    if isinstance(names, Numbered):
        return names.index(name) if name in names else None
    place = bisect_left(names, name)
    return place if place < len(names) and names[place] == name else None


def checked(names: Sequence[Any] | None, clients: int) -> Sequence[str]:
    """Names for so many clients: those given, if they can be used, or numbers."""
    if names is None:
        return Numbered(clients)
    if isinstance(names, Numbered) and len(names) == clients:
        return names
    given = tuple(names)
    if len(given) != clients:
        raise DataError(f"There are {len(given)} names for {clients} clients; give one for each, or leave names out.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise DataError(f"A client's name is {name!r}, but it must be a text that is not empty.")
    for first, second in pairwise(given):
        if first >= second:
            fault = "stands twice in names" if first == second else f"comes before {second!r} in names"
            raise DataError(
                f"Client {first!r} {fault}, but names must be different and in the order of texts; sort the clients "
                "with their samples, or leave names out."
            )
    return given
