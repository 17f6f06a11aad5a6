"""Client names: numbered ones are made on demand, so that a million of them take no memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, overload

from comfedl.utils.errors import DataError


class NumberedNames(Sequence[str]):
    """The numbers from 0 as strings of equal length, so that they sort like numbers; none is stored.

    >>> names = NumberedNames(1_000_000)
    >>> names[41], names.index("000041"), "41" in names
    ('000041', 41, False)
    """

    def __init__(self, count: int) -> None:
        self._numbers = range(count)
        self._width = len(str(max(0, count - 1)))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [f"{i:0{self._width}d}" for i in self._numbers[index]]
        return f"{self._numbers[index]:0{self._width}d}"

    def __contains__(self, name: object) -> bool:
        # str.isdigit and int also accept the digits of other scripts.
        is_number = isinstance(name, str) and len(name) == self._width and name.isascii() and name.isdigit()
        return is_number and int(str(name)) in self._numbers

    def index(self, name: str, start: int = 0, stop: int | None = None) -> int:
        """The index of a name."""
        if name not in self or int(name) not in self._numbers[start:stop]:
            raise ValueError(f"{name!r} is not among the names")
        return int(name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return len(self) == len(other)
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NumberedNames({len(self)})"


def find(names: Sequence[str], name: str) -> int | None:
    """The index of a name among sorted names, or None."""
    if isinstance(names, NumberedNames):
        return names.index(name) if name in names else None
    i = bisect_left(names, name)
    return i if i < len(names) and names[i] == name else None


def checked_names(names: Sequence[Any] | None, clients: int) -> Sequence[str]:
    """The given names, if they are valid for this number of clients; numbered names if None are given."""
    if names is None:
        return NumberedNames(clients)
    if isinstance(names, NumberedNames) and len(names) == clients:
        return names
    given = tuple(names)
    if len(given) != clients:
        raise DataError(f"There are {len(given)} names for {clients} clients; give one per client, or leave names out.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise DataError(f"A client's name is {name!r}, but it must be a non-empty string.")
    for first, second in pairwise(given):
        if first >= second:
            fault = "occurs twice in names" if first == second else f"comes before {second!r} in names"
            raise DataError(
                f"Client {first!r} {fault}, but names must be distinct and sorted; sort the clients with their "
                "samples, or leave names out."
            )
    return given
