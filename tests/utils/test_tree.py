"""Trees of tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from comfedl.utils import tree

A, B, C = torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([[4, 5]])
TREE = {"x": A, "rest": (B, [C, {"deep": A}])}


def equal(one: tree.Tree, other: tree.Tree) -> bool:
    pairs = zip(tree.named_leaves(one), tree.named_leaves(other), strict=True)
    return all(a == b and torch.equal(u, v) for (a, u), (b, v) in pairs)


def test_map_keeps_the_structure() -> None:
    twice = tree.map(lambda a, b: a + b, TREE, TREE)
    assert isinstance(twice["rest"], tuple) and isinstance(twice["rest"][1], list)
    assert equal(twice, {"x": 2 * A, "rest": (2 * B, [2 * C, {"deep": 2 * A}])})
    assert torch.equal(tree.map(torch.neg, A), -A)


class Pair(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


def test_map_keeps_named_tuples() -> None:
    found = tree.map(torch.neg, Pair(A, B))
    assert isinstance(found, Pair) and torch.equal(found.one, -A) and torch.equal(found.two, -B)


def test_map_matches_by_name_not_by_order() -> None:
    found = tree.map(lambda a, b: a - b, {"x": A, "y": B}, {"y": B, "x": A})
    assert equal(found, {"x": 0 * A, "y": 0 * B})


@pytest.mark.parametrize(("one", "other"), [((A, B), (A,)), ({"x": A}, {"y": A}), ({"x": (A,)}, {"x": (A, B)})])
def test_map_refuses_trees_of_different_structure(one: tree.Tree, other: tree.Tree) -> None:
    with pytest.raises((KeyError, ValueError)):
        tree.map(torch.add, one, other)


def test_leaves() -> None:
    assert [id(leaf) for leaf in tree.leaves(TREE)] == [id(A), id(B), id(C), id(A)]
    assert [name for name, _ in tree.named_leaves(TREE)] == ["x", "rest/0", "rest/1/0", "rest/1/1/deep"]
    assert list(tree.named_leaves(A, "x")) == [("x", A)]


def test_nbytes() -> None:
    assert tree.nbytes(TREE) == 8 + 4 + 16 + 8
    assert tree.nbytes({}) == 0
    assert tree.nbytes(torch.zeros(3, dtype=torch.float64)) == 24


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_finite(bad: float) -> None:
    assert tree.finite(TREE) and tree.finite({})
    assert not tree.finite({**TREE, "deep": [torch.tensor([0.0, bad])]})


def test_step_makes_new_tensors() -> None:
    before = A.clone()
    found = tree.step({"x": A}, 0.5, {"x": torch.tensor([2.0, 4.0])})
    assert torch.equal(found["x"], torch.zeros(2)) and torch.equal(A, before)


@pytest.mark.parametrize("rate", [0.0, 0.1, -3.0, 1e35])
def test_a_step_in_place_is_the_same_step(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, direction = (
        {"a": [torch.randn(3, 4, generator=generator)], "b": torch.randn(2, generator=generator)} for _ in "12"
    )
    wanted = tree.step(start, rate, direction)
    own = tree.map(torch.clone, start)
    found = tree.step_in_place(own, rate, direction)
    for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        assert torch.equal(one, other)
