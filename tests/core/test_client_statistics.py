"""Statistics over clients: each client counts once, and the worst client is correct."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, strategies as st

from comfedl.core.client_statistics import effective_clients, nested, summarise
from helpers.handmade import summarise_clients

NUMBERS = st.floats(-1e6, 1e6)
SCORES = st.lists(NUMBERS, min_size=1, max_size=40)
WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


def near(a: float, b: float, scale: float = 1.0) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 * max(1.0, scale))


@given(values=SCORES)
def test_against_the_definitions(values: list[float]) -> None:
    tenth = -(-len(values) // 10)
    for metric, worst_first in (("loss", sorted(values, reverse=True)), ("accuracy", sorted(values))):
        told = summarise(metric, values)
        assert set(told) == {"mean", "worst", "worst10", "std"}
        scale = max(map(abs, values))
        assert near(told["mean"], statistics.fmean(values), scale)
        assert told["worst"] == worst_first[0]
        assert near(told["worst10"], statistics.fmean(worst_first[:tenth]), scale)
        assert near(told["std"], statistics.pstdev(values), scale)


def test_the_worst_client_has_the_largest_loss_and_the_smallest_accuracy() -> None:
    assert summarise("loss", [1.0, 3.0, 2.0])["worst"] == 3.0
    assert summarise("accuracy", [0.9, 0.2, 0.5])["worst"] == 0.2


@pytest.mark.parametrize(("clients", "counted"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_how_many_clients_are_the_worst_tenth(clients: int, counted: int) -> None:
    losses = [float(i) for i in range(clients)]
    assert summarise("loss", losses)["worst10"] == statistics.fmean(losses[-counted:])
    assert summarise("accuracy", losses)["worst10"] == statistics.fmean(losses[:counted])


@given(values=SCORES, seed=st.integers(0, 9))
def test_the_order_of_the_clients_does_not_matter(values: list[float], seed: int) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    for name, number in summarise("loss", values).items():
        assert near(number, summarise("loss", shuffled)[name], max(map(abs, values)))


@given(values=SCORES)
def test_the_worst_is_at_least_as_bad_as_the_worst_tenth_and_that_as_the_mean(values: list[float]) -> None:
    slack = 1e-9 * max(1.0, *map(abs, values))
    loss, accuracy = summarise("loss", values), summarise("accuracy", values)
    assert loss["worst"] + slack >= loss["worst10"] >= loss["mean"] - slack
    assert accuracy["worst"] - slack <= accuracy["worst10"] <= accuracy["mean"] + slack
    assert loss["std"] >= 0


@given(value=NUMBERS, clients=st.integers(1, 30))
def test_equal_clients_have_no_spread(value: float, clients: int) -> None:
    told = summarise("accuracy", [value] * clients)
    assert told["worst"] == value
    assert near(told["std"], 0, abs(value)) and near(told["mean"], value, abs(value))


# Effective clients: (sum r)^2 / sum r^2.


@given(weight=st.floats(1e-3, 1e3), clients=st.integers(1, 50))
def test_equal_weights_amount_to_all_clients(weight: float, clients: int) -> None:
    assert near(effective_clients([weight] * clients), clients)


@given(weights=WEIGHTS)
def test_effective_clients_lie_between_one_and_all(weights: list[float]) -> None:
    assert 1 - 1e-9 <= effective_clients(weights) <= len(weights) * (1 + 1e-9)


@given(weights=WEIGHTS, scale=st.floats(1e-3, 1e3))
def test_effective_clients_do_not_depend_on_the_scale(weights: list[float], scale: float) -> None:
    assert near(effective_clients(weights), effective_clients([scale * weight for weight in weights]))


@given(weights=WEIGHTS, idle=st.integers(0, 5))
def test_clients_without_weight_do_not_count(weights: list[float], idle: int) -> None:
    assert near(effective_clients(weights), effective_clients([*weights, *[0.0] * idle]))


def test_a_single_client_with_all_the_weight_and_no_weight_at_all() -> None:
    assert effective_clients([1.0, 0.0, 0.0]) == 1.0
    assert effective_clients([0.0, 0.0]) == 0.0
    assert effective_clients([]) == 0.0


# All metrics of a round, flat and nested.


def test_a_client_without_a_split_does_not_count_there() -> None:
    flat = summarise_clients(
        [
            {"train.loss": 1.0, "validation.loss": 5.0, "train.accuracy": 0.9},
            {"train.loss": 3.0, "train.accuracy": 0.5},
        ]
    )
    assert flat["train.loss.mean"] == 2.0 and flat["train.loss.worst"] == 3.0
    assert flat["train.accuracy.worst"] == 0.5
    assert flat["validation.loss.mean"] == flat["validation.loss.worst"] == 5.0
    assert set(flat) == {
        f"{name}.{number}"
        for name in ("train.loss", "train.accuracy", "validation.loss")
        for number in ("mean", "worst", "worst10", "std")
    }


@given(
    scores=st.lists(st.fixed_dictionaries({"train.loss": NUMBERS, "test.accuracy": NUMBERS}), min_size=1, max_size=12)
)
def test_nested_holds_the_flat_numbers_and_nothing_else(scores: list[dict[str, float]]) -> None:
    flat = summarise_clients(scores)
    tree = nested({"round": 3, "objective": 1.5, "client": "a", **flat})
    assert set(tree) == {"train", "test"}
    again = {
        f"{split}.{metric}.{name}": number
        for split, metrics in tree.items()
        for metric, numbers in metrics.items()
        for name, number in numbers.items()
    }
    assert again == flat
