"""A fair comparison: tuned on validation data with equal budgets, evaluated on separate seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from comfedl.analysis.stats import standard_error
from comfedl_reproduction.experiments import FIRST_TUNING_SEED, Figure, read_figure
from comfedl_reproduction.protocol import FigureOutcome, run_figures
from comfedl_reproduction.runner import FigureRun, Record, Runner


class FakeRunner(Runner):
    """Computes records by a rule instead of running anything."""

    def __init__(self, score: Callable[[dict[str, Any]], dict[str, float] | None]) -> None:
        super().__init__(Path("nowhere"), 1)
        self.score, self.asked = score, list[tuple[str, dict[str, Any]]]()

    def run(self, runs: Sequence[FigureRun], label: str) -> dict[str, Record]:
        self.asked += [(label, run.config.resolved()) for run in runs]
        return {run.key: self.fake_record(run.config.resolved()) for run in runs}

    def fake_record(self, settings: dict[str, Any]) -> Record:
        found = self.score(settings)
        rows = [] if found is None else [{"round": 1, **found}]
        diverged = None if found else {"round": 1, "message": "NaN"}
        return {"settings": settings, "rounds": rows, "diverged": diverged, "core_seconds": 1.0}


def done(
    small: Path, score: Callable[[dict[str, Any]], dict[str, float] | None], *names: str
) -> tuple[FakeRunner, dict[str, FigureOutcome]]:
    figures: dict[str, Figure] = {name: read_figure(name, "quick") for name in ("fig2", "fig3")}
    runner = FakeRunner(score)
    return runner, run_figures([figures[name] for name in names], figures, runner)


def by_validation(settings: dict[str, Any]) -> dict[str, float]:
    """The small learning rate is better on validation and worse on test."""
    small = settings["algorithm"]["lr"] < 0.1
    return {"validation.accuracy.worst": 0.8 if small else 0.7, "test.accuracy.worst": 0.1 if small else 0.9}


def test_validation_selects_the_winner(small: Path) -> None:
    _, outcomes = done(small, by_validation, "fig2")
    winners = outcomes["fig2"].winners
    assert winners["fig2/independent/comfedl"]["algorithm"]["lr"] == 0.001
    assert winners["fig2/independent/fedavg"]["algorithm"]["lr"] == 0.001
    assert winners["fig2/published/comfedl"]["algorithm"] == {"lr": 0.01}


def test_tuning_and_evaluation_seeds_are_separate(small: Path) -> None:
    runner, outcomes = done(small, by_validation, "fig2")
    seeds = {
        label: {settings["seed"] for asked, settings in runner.asked if asked == label} for label, _ in runner.asked
    }
    assert seeds == {"tuning": {FIRST_TUNING_SEED}, "figures": {0, 1}}
    judged = {record["settings"]["seed"] for curve in outcomes["fig2"].curves for record in curve.records}
    assert judged == {0, 1}


def test_equal_tuning_budgets(small: Path) -> None:
    runner, _ = done(small, by_validation, "fig2")
    tuned = [settings["algorithm"]["name"] for label, settings in runner.asked if label == "tuning"]
    assert tuned.count("comfedl") == tuned.count("fedavg") == 2


def test_diverged_candidates_are_not_selected(small: Path) -> None:
    _, outcomes = done(small, lambda s: None if s["algorithm"]["lr"] < 0.1 else by_validation(s), "fig2")
    assert outcomes["fig2"].winners["fig2/independent/fedavg"]["algorithm"]["lr"] == 0.5


def test_an_ablation_starts_from_the_winner(small: Path) -> None:
    runner, outcomes = done(small, by_validation, "fig3")
    assert list(outcomes) == ["fig3"]
    assert {label for label, _ in runner.asked} == {"tuning", "figures"}
    by_point = {curve.arm.point: curve.records[0]["settings"] for curve in outcomes["fig3"].curves}
    assert {point: s["algorithm"]["local_steps"] for point, s in by_point.items()} == {"1": 1, "2": 2}
    assert all(s["algorithm"]["lr"] == 0.001 for s in by_point.values())
    assert [s["rounds"] for s in by_point.values()] == [6, 3]


def test_runs_are_ordered_by_seed(small: Path) -> None:
    runner, _ = done(small, by_validation, "fig2")
    seeds = [settings["seed"] for label, settings in runner.asked if label == "figures"]
    assert seeds == sorted(seeds)


def test_the_standard_error_of_the_mean() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert standard_error([5.0], single=0.0) == 0.0
