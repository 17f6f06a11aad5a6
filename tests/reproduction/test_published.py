"""The field's tables: their protocol, our summary of runs, and the table on the page."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from comfedl.config.schema import parse_config, run_config
from comfedl_reproduction import published
from comfedl_reproduction.experiments import Figure, merged, read_figure
from comfedl_reproduction.protocol import Curve, FigureOutcome, Trial
from comfedl_reproduction.runner import FigureRun


def settings(figure: Figure, name: str) -> dict[str, Any]:
    arm = figure.arm(name)
    return parse_config(merged(arm.settings, arm.candidates[0])).resolved()


def test_the_protocol_is_that_of_the_public_code() -> None:
    figure = read_figure("tables", "paper")
    assert figure.seeds >= 5 and {len(arm.candidates) for arm in figure.arms if arm.tuned} == {6}
    for arm in figure.arms:
        found = parse_config(merged(arm.settings, arm.candidates[0])).resolved()
        assert found["rounds"] == (6000 if arm.group == "fashion" else 600)
        assert (found["algorithm"]["local_steps"], found["algorithm"]["batch_size"]) == (1, 10)
        # What is reported has trained on all training data; only tuning holds out a part.
        assert found["data"]["validation"] == 0 and found["model"]["name"] == "logistic"
        assert arm.group.startswith(tuple(published.TITLES))
    assert figure.tuning["data"]["validation"] == 0.2
    command = settings(figure, "tables/adult-published/q-fedavg")["algorithm"]
    assert (command["lr"], command["q"]) == (0.1, 5.0)
    command = settings(figure, "tables/adult-published/afl")["algorithm"]
    assert (command["lr"], command["dual_lr"]) == (0.1, 0.1)


def test_the_quick_preset_is_short() -> None:
    figure = read_figure("tables", "quick")
    rounds = [parse_config(merged(arm.settings, arm.candidates[0])).rounds for arm in figure.arms]
    trials = [len(arm.candidates) for arm in figure.arms if arm.tuned]
    assert set(rounds) == {200} and sum(trials) * figure.tuning_seeds + len(rounds) * figure.seeds < 60


def outcome(tmp_path: Path) -> FigureOutcome:
    """Made-up runs: on Adult equal weights and a method that diverges once, on Fashion-MNIST one that always does."""
    figure = read_figure("tables", "quick")
    accuracies: dict[str, list[dict[str, float] | None]] = {
        "tables/adult-published/equal": [{"phd": 0.7, "non-phd": 0.8}, {"phd": 0.8, "non-phd": 0.7}],
        "tables/adult/robust": [{"phd": 0.75, "non-phd": 0.8}, None],
        "tables/fashion/comfedl": [None, None],
    }
    curves = []
    for name, values in accuracies.items():
        arm = figure.arm(name)
        chosen = merged(arm.settings, arm.candidates[0])
        records = tuple(
            {
                "settings": parse_config({**chosen, "seed": seed}).resolved(),
                "clients": [{"client": who, "test.accuracy": a} for who, a in (value or {}).items()],
                "diverged": None if value else {"round": 1, "message": "NaN"},
                "core_seconds": 1.0,
                "commit": "0123456789",
            }
            for seed, value in enumerate(values)
        )
        curves.append(Curve(arm, tuple(FigureRun({**chosen, "seed": seed}) for seed in (0, 1)), records))
    arm = figure.arm("tables/adult/robust")
    trial = Trial(arm, arm.candidates[0], (FigureRun({**arm.settings, "seed": 1000}),), 0.7, 2.0)
    return FigureOutcome(figure, [trial], {arm.name: arm.candidates[0]}, curves)


def test_accuracy_of_the_worst_client_and_over_all_samples(tmp_path: Path) -> None:
    folder = published.write(outcome(tmp_path), tmp_path / "tables")
    with (folder / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert [run["worst"] for run in runs] == ["0.7", "0.7", "0.75", "", "", ""]
    assert float(runs[0]["average"]) == pytest.approx((181 * 0.7 + 16_100 * 0.8) / 16_281, abs=1e-5)
    assert json.loads(runs[2]["by client"]) == {"phd": 0.75, "non-phd": 0.8}
    with (folder / "summary.csv").open(newline="") as file:
        rows = {(row["group"], row["method"]): row for row in csv.DictReader(file)}
    assert rows["adult", "Robust"]["diverged"] == "1" and rows["adult", "Robust"]["worst"] == "0.75"
    assert rows["adult-published", "equal weights (q = 0)"]["worst ±"] == "0.0"
    about = json.loads((folder / "about.json").read_text())
    assert about["seeds"] == [0, 1] and about["commits"] == ["0123456789"]


def test_both_tables_on_the_page(tmp_path: Path) -> None:
    text = published.as_markdown(published.write(outcome(tmp_path), tmp_path / "tables"))
    assert text.index("**Adult") < text.index("| q-FFL's paper | AFL | 73.0 | 82.5 |") < text.index("**Fashion")
    assert "| ours, the command's values | equal weights (q = 0) | 70.0 ± 0.0 |" in text
    assert "| ours, tuned | Robust | 75.0 | 79.9 |" in text
    assert "| ours, tuned | ComFedL, eq. (5) | diverges | diverges |" in text
    assert published.as_markdown(tmp_path / "none") == ""


@pytest.mark.download
def test_the_data_are_those_of_the_public_code() -> None:
    adult = published.adult(0)
    assert adult.train.x.shape[1] == 99 and adult.validation is None and adult.test is not None
    assert dict(zip(adult.names, adult.train.sizes.tolist(), strict=True)) == {"phd": 413, "non-phd": 32_148}
    assert dict(zip(adult.names, adult.test.sizes.tolist(), strict=True)) == published.SAMPLES["adult"]
    assert set(adult.train.x.unique().tolist()) == {0.0, 1.0}
    # One category per column of the file, fewer where some are missing: 3 columns have missing values.
    assert set(adult.train.x.sum(dim=1).int().tolist()) == {5, 6, 7, 8}
    phd = adult.train["phd"][0]
    assert bool((phd == 1).all(dim=0).any())  # the doctorate itself

    fashion = published.fashion(0, validation=0.2)
    assert fashion.validation is not None and fashion.test is not None
    assert fashion.train.sizes.tolist() == [4800] * 3 and fashion.validation.sizes.tolist() == [1200] * 3
    assert dict(zip(fashion.names, fashion.test.sizes.tolist(), strict=True)) == published.SAMPLES["fashion"]
    assert all(len(set(fashion.train[name][1].tolist())) == 1 for name in fashion.names)


@pytest.mark.download
@pytest.mark.parametrize("name", ["adult-published/afl", "fashion/robust"])
def test_a_short_run(name: str) -> None:
    figure = read_figure("tables", "quick")
    arm = figure.arm(f"tables/{name}")
    config = parse_config({**merged(arm.settings, arm.candidates[0]), "rounds": 2, "eval_every": 2})
    clients = {row["client"] for row in run_config(config).clients}
    assert clients == set(published.SAMPLES[published.table_of(arm.group)])
