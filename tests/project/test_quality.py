"""The benchmark of what methods do for the worst client: who runs what, how a trial is chosen, and the optimum."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import comfedl as cf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is run from the root and is not installed

from benchmarks.quality import federations, optimum, report, runs  # noqa: E402
from benchmarks.quality.federations import FEDERATIONS, Federation  # noqa: E402
from benchmarks.quality.methods import METHODS  # noqa: E402
from benchmarks.quality.optimum import centrally  # noqa: E402
from benchmarks.quality.runs import SEEDS, Row, Run  # noqa: E402


def tiny(seed: int) -> cf.FederatedData:
    return cf.load("digits", cf.partition.Dirichlet(clients=3, alpha=0.5), seed)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(FEDERATIONS, "tiny", Federation("tiny", tiny, "logistic", rounds=4, lrs=(0.1, 0.3)))
    return "tiny"


def test_every_method_has_the_same_budget() -> None:
    for federation, plan in FEDERATIONS.items():
        budgets = {len(runs.tuning_runs(federation, method)) for method in METHODS if runs.applies(federation, method)}
        assert budgets == {len(plan.lrs) * plan.values * plan.tuning_draws}
        assert max(plan.lrs) / min(plan.lrs) >= 10 - 1e-9
    assert not runs.applies("10-of-60", "afl") and not runs.applies("afl", "robust-offset")


@pytest.mark.parametrize("method", METHODS)
def test_a_run(small: str, method: str) -> None:
    run = Run(small, method, 0.1, METHODS[method].values[0], 0)
    row = runs.execute(run)
    assert Run(**{name: row[name] for name in Run.__dataclass_fields__}) == run
    assert list(row["curve"]) == [1, 2, 3, 4]
    assert row["test.accuracy.worst"] == pytest.approx(np.mean([row["curve"][k] for k in (2, 3, 4)]), abs=1e-4)
    assert json.loads(json.dumps(row))["test.accuracy.mean"] >= row["test.accuracy.worst"] > 0


def rows_of(federation: str, method: str, scores: dict[tuple[float, float], float]) -> dict[Run, Row]:
    """Tuning rows with these validation scores, and test scores that would mislead."""
    found: dict[Run, Row] = {}
    for run in runs.tuning_runs(federation, method):
        score = scores.get((run.lr, run.value), 0.1)
        found[run] = {"validation.accuracy.worst": score, "test.accuracy.worst": 1 - score}
    return found


def test_a_trial_is_chosen_on_validation_data(small: str) -> None:
    rows = rows_of(small, "robust", {(0.3, 0.03): 0.9})
    assert runs.judged_runs(rows, small, "robust") == [Run(small, "robust", 0.3, 0.03, seed) for seed in SEEDS]
    rows.pop(next(iter(rows)))
    assert runs.judged_runs(rows, small, "robust") == []  # before all trials have ended nothing is chosen


def test_a_trial_is_judged_by_all_its_draws(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEDERATIONS, small, dataclasses.replace(FEDERATIONS[small], tuning_draws=2))
    first, second, third = runs.trials(small, "robust")[:3]
    rows = rows_of(small, "robust", {})
    for trial, scores in ((first, (0.9, 0.3)), (second, (0.7, 0.6)), (third, (1.0, None))):
        for run, score in zip(trial, scores, strict=True):
            rows[run] = {"validation.accuracy.worst": score} if score is not None else {"diverged": "round 3"}
    assert {(run.lr, run.value) for run in runs.judged_runs(rows, small, "robust")} == {(second[0].lr, second[0].value)}


def test_a_diverged_trial_is_never_chosen(small: str) -> None:
    rows = rows_of(small, "fedavg", {})
    for run in list(rows)[1:]:
        rows[run] = dataclasses.asdict(run) | {"diverged": "round 3"}
    assert {run.lr for run in runs.judged_runs(rows, small, "fedavg")} == {next(iter(rows)).lr}


def test_noise_is_that_of_the_paired_difference() -> None:
    def judged(*scores: float) -> list[Row]:
        return [{"test.accuracy.worst": score} for score in scores]

    varied = (0.5, 0.6, 0.7, 0.8, 0.9)
    above = {"fedavg": judged(*varied), "robust": judged(*(x + 0.01 for x in varied))}
    assert report.standing(above, "robust") == ("fedavg", "ahead")
    assert report.standing({"fedavg": above["robust"], "robust": above["fedavg"]}, "robust")[1] == "behind"
    mixed = {"fedavg": judged(*varied), "equal": judged(*([0.1] * 5)), "robust": judged(*reversed(varied))}
    assert report.standing(mixed, "robust") == ("fedavg", "within noise")


def test_the_tables(small: str, tmp_path: Path) -> None:
    rows: dict[Run, Row] = {}
    for method, score in (("equal", 0.5), ("robust", 0.75)):
        rows |= rows_of(small, method, {(0.1, METHODS[method].values[0]): 0.9})
        for run in runs.judged_runs(rows, small, method):
            measures = dict.fromkeys(report.COLUMNS, score)
            rows[run] = dataclasses.asdict(run) | measures | {"curve": {1: 0.3, 2: 0.7}}
    optima = {small: {gamma: {"test.accuracy.worst": 0.5} for gamma in ("inf", "0.3", "0.03")}}
    optima[small]["0.1"] = {"test.accuracy.worst": 0.7}
    page = tmp_path / "page.md"
    page.write_text(
        "A\n<!-- begin overview -->\nold\n<!-- end overview -->\nB\n<!-- begin details -->\n<!-- end details -->"
    )
    text = report.write(rows, optima, tmp_path, page)
    assert "**0.750 ± 0.000**" in text and "ahead (equal weights)" in text and "| 0.700 |" in text
    assert "| Robust | 0.750 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.000 | lr 0.1, gamma 0.1 | 0.100 | 2 |" in text
    assert (tmp_path / "summary.csv").read_text().count("\n") == 3
    overview = text.split("\n\n")[0]
    begin, end = "<!-- begin overview -->\n\n", "\n\n<!-- end overview -->"
    assert page.read_text().startswith(f"A\n{begin}{overview}{end}\nB\n") and "old" not in page.read_text()


def test_the_page_has_the_tables_of_the_results() -> None:
    folder, page = ROOT / "results" / "quality", (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    rows, optima = runs.load(folder / "runs.jsonl"), optimum.load(folder / "optimum.json")
    done = [name for name in FEDERATIONS if report.judged(rows, name)]
    assert report.overview(rows, optima, done) in page
    for name in done:
        assert report.details(rows, optima, name) in page


def test_the_optimum_is_the_least() -> None:
    """Nothing near it is better, and gamma to infinity is the mean."""
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for name in "abc":
        x = torch.randn(60, 3, generator=generator)
        clients[name] = (x, torch.randint(0, 2, (60,), generator=generator))
    fed = cf.FederatedData(clients, test=clients)
    found = centrally(fed, (math.inf, 1e6, 0.1))
    assert found["inf"]["objective"] == pytest.approx(found["1e+06"]["objective"], abs=1e-6)
    assert found["0.1"]["objective"] >= found["inf"]["objective"]
    robust = cf.Robust(gamma=0.1, lr=0.3, local_steps=1, batch_size=None)
    reached = cf.fit(cf.models.logistic((3,), 2).double(), fed, robust, rounds=600, eval_every=600)
    assert float(reached.rounds[-1]["objective"]) == pytest.approx(found["0.1"]["objective"], abs=1e-5)  # type: ignore[arg-type]
    assert float(reached.rounds[-1]["objective"]) >= found["0.1"]["objective"] - 1e-9  # type: ignore[arg-type]


@pytest.mark.download
def test_the_federations() -> None:
    """Their sizes, that no image is at two sites, and that a seed is a draw."""
    first, again, other = (federations.odd_sites(seed) for seed in (0, 0, 1))
    assert [int(size) for size in first.train.sizes] == [1500, 1500, 1125, 1125, 750, 750, 450, 450, 150, 150]
    assert torch.equal(first.train.x, again.train.x) and not torch.equal(first.train.x, other.train.x)
    assert float(first.train["site-009"][0].mean()) > 0.6 > 0.4 > float(first.train["site-000"][0].mean())
    assert len(FEDERATIONS["adult-occupation"].make(0)) == 13
    assert len(FEDERATIONS["flights"].make(0)) == 15
    for name, plan in FEDERATIONS.items():
        held = plan.make(0).validation
        assert held is not None and (min(held.sizes) < 100) == (plan.tuning_draws == 2), name
