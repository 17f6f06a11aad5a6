"""The verdict says what the numbers say, how sure that is, and nothing more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from comfedl.analysis.read_runs import Method, Run, read_methods
from comfedl.analysis.stats import choose_metric, difference
from comfedl.analysis.summary_text import verdict
from helpers.handmade import write_run


def method(name: str, worst: list[float], mean: list[float], metric: str = "accuracy", **settings: Any) -> Method:
    """A method with these last numbers, a seed each."""
    key = f"validation.{metric}"
    rows = [{"round": 9, f"{key}.worst": w, f"{key}.mean": m} for w, m in zip(worst, mean, strict=True)]
    config = {"algorithm": {"name": name}, **settings}
    runs = [Run({"seed": seed, **config}, [row], True) for seed, row in enumerate(rows)]
    return Method(name, runs)


def said(*methods: Method) -> list[str]:
    return verdict(methods, choose_metric(methods))


def test_one_seed_is_said_to_be_one() -> None:
    first, *more = said(method("fedavg", [0.71], [0.9]), method("comfedl", [0.79], [0.896]))
    assert first == (
        "Validation accuracy of the worst client: 0.790 with comfedl, 0.710 with fedavg; "
        "of the average client: 0.896 with comfedl, 0.900 with fedavg."
    )
    assert more == ["One seed only: differences may be chance; run more seeds before relying on them."]


def test_a_difference_that_holds_over_seeds() -> None:
    (first,) = said(method("fedavg", [0.70, 0.71, 0.72], [0.9] * 3), method("comfedl", [0.78, 0.79, 0.80], [0.9] * 3))
    note = "(more than two standard errors apart over 3 seeds)"
    assert f"worst client: 0.790 with comfedl, 0.710 with fedavg {note}" in first
    assert first.endswith("; of the average client: 0.900 with both.")


def test_a_difference_within_noise_is_said_to_be() -> None:
    (first,) = said(method("fedavg", [0.6, 0.9, 0.7], [0.9] * 3), method("comfedl", [0.9, 0.6, 0.8], [0.9] * 3))
    assert "worst client: 0.767 with comfedl, 0.733 with fedavg (within noise over 3 seeds)" in first


def test_what_holds_for_both_numbers_is_said_once() -> None:
    (first,) = said(method("fedavg", [0.70, 0.71, 0.72], [0.8] * 3), method("comfedl", [0.78, 0.79, 0.80], [0.9] * 3))
    assert first.endswith("0.800 with fedavg (both more than two standard errors apart over 3 seeds).")


def test_fedavg_is_what_others_are_held_against() -> None:
    found = said(method("drfa", [0.8], [0.9]), method("fedavg", [0.7], [0.9]), method("comfedl", [0.6], [0.9]))
    assert "0.800 with drfa, 0.700 with fedavg" in found[0] and "0.600 with comfedl, 0.700 with fedavg" in found[1]


def test_a_regression_is_compared_by_its_error() -> None:
    first, *_ = said(method("fedavg", [2.5], [1.5], "rmse"), method("comfedl", [2.0], [1.6], "rmse"))
    assert first.startswith("Validation rmse") and "worst client: 2.000 with comfedl, 2.500 with fedavg" in first


def test_a_method_alone() -> None:
    assert said(method("comfedl", [0.5], [0.75])) == [
        "Validation accuracy with comfedl: 0.750 for the average client, 0.500 for the worst.",
        "One seed only: another seed may give other results.",
    ]


def test_what_is_not_alike_is_said(tmp_path: Path) -> None:
    """Other data, other seeds, a run that goes on: the user must not take the results for a comparison of methods."""
    other = write_run(tmp_path / "other", "comfedl", seed=3, clients="ab", done=False)
    methods, _ = read_methods([write_run(tmp_path / "fedavg", rounds=(1, 2)), other])
    text = " ".join(verdict(methods, choose_metric(methods)))
    assert "Caution: the runs differ in data" in text
    assert "different seeds" in text
    assert "other (seed 3) has not finished: round 4 of 4" in text


def test_a_sample_of_clients_is_said() -> None:
    one = method("fedavg", [0.5], [0.75])
    one.runs[0].rounds[0]["eval_clients"] = 50
    assert "Only a sample of 50 clients was evaluated." in said(one)


def test_differences_are_paired_by_seed() -> None:
    """Seeds move both alike by 0.2, the difference is 0.1 all the same; other seeds cannot be paired."""
    paired = difference({0: 0.5, 1: 0.7}, {1: 0.81, 0: 0.6})
    assert paired.mean == pytest.approx(0.105) and paired.error == pytest.approx(0.005) and paired.within_noise is False
    apart = difference({0: 0.5, 1: 0.7}, {2: 0.6, 3: 0.81})
    assert apart.mean == pytest.approx(0.105) and apart.error > 0.1 and apart.within_noise is True
    alone = difference({0: 0.5}, {0: 0.6})
    assert math.isnan(alone.error) and alone.within_noise is None
