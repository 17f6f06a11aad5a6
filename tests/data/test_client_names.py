"""Client names that are made on demand."""

from __future__ import annotations

import sys

import pytest

import comfedl as cf
from comfedl.data.client_names import NumberedNames, checked_names, find


@pytest.mark.parametrize("count", [1, 9, 10, 11, 1000, 1001])
def test_numbered_names_are_a_sequence_in_order(count: int) -> None:
    names = NumberedNames(count)
    everyone = list(names)
    assert len(names) == len(everyone) == len({*everyone}) == count
    assert everyone == sorted(everyone) and len({len(name) for name in everyone}) == 1
    assert names == everyone and names == tuple(everyone) and names == NumberedNames(count) and names != everyone[:-1]
    assert [names.index(name) for name in everyone] == list(range(count))
    assert all(name in names and find(names, name) == i for i, name in enumerate(everyone))
    assert names[-1] == everyone[-1] and names[1:3] == everyone[1:3]
    with pytest.raises(IndexError):
        names[count]


@pytest.mark.parametrize(
    "name", ["1", "00001", "9999", "-001", "+001", "1_00", " 001", "\u0660\u0660\u0660\u0661", "\xb2222", "", 1, None]
)
def test_other_names_are_not_numbered_names(name: object) -> None:
    names = NumberedNames(1001)
    assert name not in names
    with pytest.raises(ValueError):
        names.index(name)  # type: ignore[arg-type]


def test_a_million_names_take_no_memory() -> None:
    names = NumberedNames(1_000_000)
    assert names[999_999] == "999999" and names.index("012345") == 12345
    assert sum(sys.getsizeof(part) for part in vars(names).values()) < 1000


def test_finding_a_name() -> None:
    names = ("ann", "bob", "zoé")
    assert [find(names, name) for name in (*names, "", "bobo", "zz")] == [0, 1, 2, None, None, None]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a", "b"], "2 names for 3 clients"),
        (["a", "b", ""], "''"),
        (["a", "b", 3], "3"),
        (["a", "b", "b"], "'b' occurs twice"),
        (["a", "c", "b"], "'c' comes before 'b'"),
    ],
)
def test_invalid_names_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(cf.DataError, match=says):
        checked_names(names, 3)
