"""The verdict says what the numbers say, how sure that is, and nothing more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from comfedl.analysis.read_runs import Method, Run, read_methods
from comfedl.analysis.stats import difference, measures
from comfedl.analysis.summary_text import verdict
from helpers.handmade import write_run


def method(name: str, worst: list[float], mean: list[float], metric: str = "accuracy", **settings: Any) -> Method:
    """A method with these last numbers, a seed each."""
    key = f"validation.{metric}"
    rows = [{"round": 9, f"{key}.worst": w, f"{key}.mean": m} for w, m in zip(worst, mean, strict=True)]
    told = {"algorithm": {"name": name}, **settings}
    runs = [Run({"seed": seed, **told}, [row], True) for seed, row in enumerate(rows)]
    return Method(name, runs)


def said(*methods: Method) -> list[str]:
    return verdict(methods, measures(methods))


def test_one_seed_is_said_to_be_one() -> None:
    first, *more = said(method("fedavg", [0.71], [0.9]), method("comfedl", [0.79], [0.896]))
    assert first == (
        "On validation data, beside fedavg, comfedl raises the worst client's accuracy from 0.710 to 0.790, "
        "and costs 0.4 points on average."
    )
    assert more == ["This is one seed: a difference cannot be told from chance; run more seeds before relying on it."]


def test_a_difference_that_holds_over_seeds() -> None:
    (first,) = said(method("fedavg", [0.70, 0.71, 0.72], [0.9] * 3), method("comfedl", [0.78, 0.79, 0.80], [0.9] * 3))
    sure = "(beyond twice the standard error over 3 seeds)"
    assert f"raises the worst client's accuracy from 0.710 to 0.790 {sure}" in first
    assert first.endswith("and leaves the average client's accuracy at 0.900.")


def test_a_difference_within_the_seeds_spread_raises_nothing() -> None:
    (first,) = said(method("fedavg", [0.6, 0.9, 0.7], [0.9] * 3), method("comfedl", [0.9, 0.6, 0.8], [0.9] * 3))
    assert "has the worst client's accuracy at 0.767 against 0.733 (within the noise of 3 seeds)" in first
    assert "raises" not in first


def test_what_holds_for_both_numbers_is_said_once() -> None:
    (first,) = said(method("fedavg", [0.70, 0.71, 0.72], [0.8] * 3), method("comfedl", [0.78, 0.79, 0.80], [0.9] * 3))
    assert first.endswith("gains 10.0 points on average (both beyond twice the standard error over 3 seeds).")


def test_fedavg_is_what_others_are_held_against() -> None:
    found = said(method("drfa", [0.8], [0.9]), method("fedavg", [0.7], [0.9]), method("comfedl", [0.6], [0.9]))
    assert [sentence.split(",")[1] for sentence in found[:2]] == [" beside fedavg"] * 2
    assert "drfa raises" in found[0] and "comfedl lowers" in found[1]


def test_an_error_is_lowered_and_not_spoken_of_in_points() -> None:
    first, *_ = said(method("fedavg", [2.5], [1.5], "rmse"), method("comfedl", [2.0], [1.6], "rmse"))
    assert "lowers the worst client's rmse from 2.500 to 2.000" in first
    assert "raises the average client's rmse from 1.500 to 1.600" in first and "points" not in first


def test_a_method_alone() -> None:
    assert said(method("comfedl", [0.5], [0.75])) == [
        "On validation data, comfedl gives the average client an accuracy of 0.750 and the worst client 0.500.",
        "This is one seed; another may differ.",
    ]


def test_what_is_not_alike_is_said(tmp_path: Path) -> None:
    """Other data, other seeds, a run that goes on: a reader must not take the numbers for a comparison of methods."""
    other = write_run(tmp_path / "other", "comfedl", seed=3, clients="ab", done=False)
    methods, _ = read_methods([write_run(tmp_path / "fedavg", rounds=(1, 2)), other])
    text = " ".join(verdict(methods, measures(methods)))
    assert "Beware: the runs differ in data" in text
    assert "different seeds" in text
    assert "other (seed 3) is unfinished: it is at round 4 of 4" in text


def test_a_sample_of_clients_is_said() -> None:
    one = method("fedavg", [0.5], [0.75])
    one.runs[0].rounds[0]["eval_clients"] = 50
    assert "Only a sample of 50 clients was evaluated." in said(one)


def test_differences_are_paired_by_seed() -> None:
    """Seeds move both alike by 0.2, the difference is 0.1 all the same; other seeds cannot be paired."""
    paired = difference({0: 0.5, 1: 0.7}, {1: 0.81, 0: 0.6})
    assert paired.gap == pytest.approx(0.105) and paired.error == pytest.approx(0.005) and paired.noise is False
    apart = difference({0: 0.5, 1: 0.7}, {2: 0.6, 3: 0.81})
    assert apart.gap == pytest.approx(0.105) and apart.error > 0.1 and apart.noise is True
    alone = difference({0: 0.5}, {0: 0.6})
    assert math.isnan(alone.error) and alone.noise is None
