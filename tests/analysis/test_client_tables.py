"""Clients that cannot be judged, intervals and gains, wherever results are shown: run, evaluate, compare, report."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.read_runs import Method, Run, read_methods, read_run
from comfedl.analysis.report_clients import final_rows, gains
from comfedl.analysis.report_content import ReportOptions, report_contents
from comfedl.analysis.report_page import page
from comfedl.analysis.stats import choose_metric
from comfedl.cli import main
from comfedl.core.intervals import wilson
from comfedl.utils.errors import RunFolderError
from comfedl.utils.toml import to_toml
from helpers.handmade import ODD, write_run

NAMED = "1 of 4 clients has no validation rows: lonely."


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose client "lonely" has one row, which goes to train, and the configs of two methods."""
    monkeypatch.chdir(tmp_path)
    rng, lines = np.random.default_rng(0), ["site,a,b,y"]
    for site, rows in (("big", 400), ("middle", 120), ("small", 30), ("lonely", 1)):
        lines += [f"{site},{a:.3f},{b:.3f},{'yes' if a + b > 0 else 'no'}" for a, b in rng.normal(size=(rows, 2))]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    data = {"name": "csv", "path": "rows.csv", "client": "site", "target": "y"}
    for name in ("fedavg", "robust"):
        settings = {"rounds": 3, "data": data, "model": {"name": "logistic"}, "algorithm": {"name": name}}
        Path(f"{name}.toml").write_text(to_toml(settings))
    return tmp_path


def comfedl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["comfedl", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = capsys.readouterr()
    assert not end.value.code, said.err
    return said.out


def test_who_cannot_be_judged_is_named_in_all_places(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = comfedl(monkeypatch, capsys, "run", "fedavg.toml", "--out", "run")
    assert NAMED in ran and "1 of 4 clients has no test rows: lonely." in ran
    scored = comfedl(monkeypatch, capsys, "evaluate", "run", "--split", "validation")
    assert NAMED in scored
    compared = comfedl(monkeypatch, capsys, "compare", "fedavg.toml", "robust.toml", "--seeds", "2", "--out", "both")
    assert compared.count(NAMED) == 1  # the same for all runs, so it is said once
    assert NAMED in (here / "both" / "report.html").read_text()
    reported = comfedl(monkeypatch, capsys, "report", "both")
    assert NAMED in reported
    worst = r"Worst client by validation accuracy: \w+, 0\.\d+ \(95 % interval 0\.\d+ to [01]\.\d+, \d+ samples\)\."
    assert re.search(worst, ran) and re.search(worst, scored)
    both = (
        r"Worst client's validation accuracy, with its 95 % interval \(means over seeds\): "
        r"0\.\d+ \(0\.\d+ to [01]\.\d+\) with "
    )
    for text in (compared, reported):
        assert re.search(both + "fedavg, .* with robust", text)
    resumed = comfedl(
        monkeypatch, capsys, "compare", "fedavg.toml", "robust.toml", "--seeds", "2", "--out", "both", "--resume"
    )
    assert resumed == compared


def test_the_scores_have_intervals(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comfedl(monkeypatch, capsys, "run", "fedavg.toml", "--out", "run", "--set", 'metrics=["auc", "f1"]')
    run = cf.load_run("run")
    scores = evaluate(run, "validation")
    assert [row["client"] for row in scores.rows] == ["big", "middle", "small"]
    assert [(row["client"], row["samples"]) for row in scores.table][1] == ("lonely", 0)
    for row in scores.rows:
        n = int(row["samples"])  # type: ignore[arg-type]
        for kind in ("", "personal_"):
            low, high, _ = wilson(round(float(row[f"{kind}accuracy"] or 0) * n), n)
            assert (row[f"{kind}accuracy_low"], row[f"{kind}accuracy_high"]) == (low, high)
            assert row[f"{kind}loss_low"] < row[f"{kind}loss"] < row[f"{kind}loss_high"]  # type: ignore[operator]
    assert scores.table.methods == {
        "loss": "Student's t", "accuracy": "Wilson", "auc": "bootstrap (1000 draws)", "f1": "bootstrap (1000 draws)",
    }  # fmt: skip
    assert evaluate(cf.load_run("run"), "validation").rows == scores.rows
    # The run has the same ones: it was judged on the same rows by the same model, with the same draws.
    of_run = report_contents(*read_methods([Path("run")]))["byClient"]
    own = of_run["views"][0]["methods"][0]
    place = of_run["names"].index("big")
    for name in ("accuracy", "auc", "f1", "loss"):
        for end in ("low", "high"):
            assert own[end][f"validation.{name}"][place] == pytest.approx(scores.rows[0][f"{name}_{end}"], rel=1e-3)
    assert own["values"]["validation.accuracy"][of_run["names"].index("lonely")] is None
    text = comfedl(monkeypatch, capsys, "evaluate", "run", "--split", "validation", "--out", "scores.csv")
    assert "95 % confidence intervals" in text and "accuracy_low" in Path("scores.csv").read_text()
    assert "lonely,0," in Path("scores.csv").read_text()


# Gains and losses.


def method(name: str, **clients: list[float]) -> Method:
    """A method with the accuracies of its clients, one for each seed."""
    seeds = len(next(iter(clients.values())))
    runs = []
    for seed in range(seeds):
        rows = [{"round": 1, "client": key, "validation.accuracy": line[seed]} for key, line in clients.items()]
        last = {"round": 1, "validation.accuracy.mean": 0.5, "validation.accuracy.worst": 0.5}
        settings = {"seed": seed, "algorithm": {"name": name}}
        runs.append(Run(settings, [last], True, client_rows=rows))  # type: ignore[arg-type]
    return Method(name, runs)


def said(*methods: Method) -> list[str]:
    return gains(methods, choose_metric(methods), final_rows(methods))


def test_the_floor_bounds_every_loss() -> None:
    first = method("fedavg", a=[0.5], b=[0.8], c=[0.9])
    assert said(first, method("robust", a=[0.61], b=[0.788], c=[0.9])) == [
        "robust against fedavg: 1 of 3 clients gains, by up to 11.0 points (a); 1 loses; no client loses more than 1.2 "
        "points (b)."
    ]
    (text,) = said(first, method("robust", a=[0.5], b=[0.78799], c=[0.7]))
    assert text == "robust against fedavg: none of 3 clients gain; 2 lose; no client loses more than 20.0 points (c)."
    (text,) = said(first, method("robust", a=[0.6], b=[0.8], c=[0.91]))
    assert text == "robust against fedavg: 2 of 3 clients gain, by up to 10.0 points (a); no client loses."
    (text,) = said(first, method("robust", a=[0.6], b=[0.78799], c=[0.91]))
    assert "no client loses more than 1.3 points (b)" in text  # rounded up, so that it holds


def test_gains_are_means_over_the_seeds_that_both_have() -> None:
    (text,) = said(method("fedavg", a=[0.5, 0.6], b=[0.5, 0.5]), method("robust", a=[0.6, 0.6], b=[0.4, 0.6]))
    assert text == "robust against fedavg: 1 of 2 clients gains, by up to 5.0 points (a); no client loses."


def test_the_first_method_is_the_base_unless_there_is_fedavg() -> None:
    a, b = method("robust", a=[0.5], b=[0.5]), method("drfa", a=[0.6], b=[0.6])
    assert said(a, b)[0].startswith("drfa against robust: 2 of 2")
    assert [text.split(":")[0] for text in said(a, b, method("fedavg", a=[0.4], b=[0.5]))] == [
        "robust against fedavg", "drfa against fedavg",
    ]  # fmt: skip
    assert said(a) == []


def test_errors_are_no_points(tmp_path: Path) -> None:
    """A client gains if its error falls; the numbers are in units of y."""
    folders = [
        write_run(tmp_path / name, name, lift, metrics=("loss", "rmse"))
        for name, lift in (("fedavg", 0), ("robust", 1))
    ]
    text = report_contents(*read_methods(folders))["verdict"][1]
    assert re.fullmatch(r"robust against fedavg: 2 of 3 clients gain, by up to 0\.\d+ \(c\); no client loses\.", text)


# The page.


def test_the_best_of_a_column_is_one(tmp_path: Path) -> None:
    """With personal models too: a column had two bold numbers, one of the global and one of the personal models."""
    folders = []
    for name, lift in (("fedavg", 0.0), ("ditto", 1.0)):
        folder = write_run(tmp_path / name, name, lift)
        for file in ("rounds.jsonl", "clients.jsonl"):
            rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
            for row in rows:
                row |= {key.replace(".acc", ".personal_acc"): v for key, v in row.items() if ".accuracy" in key}
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    shown = report_contents(*read_methods(folders))
    assert len(shown["table"]["rows"]) == 4
    for column in zip(*(row["cells"] for row in shown["table"]["rows"]), strict=True):
        assert sum(bool(cell and cell["best"]) for cell in column) <= 1
    assert sum(bool(row["cells"][1]["best"]) for row in shown["table"]["rows"]) == 1
    assert set(shown["tables"]) == {
        f"{split}.{name}" for split in ("train", "validation") for name in ("accuracy", "loss")
    }


def test_the_table_by_client_has_each_seed_and_their_means(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"fedavg/seed-{seed}", seed=seed, clients=ODD) for seed in range(3)]
    found = report_contents(*read_methods(folders))["byClient"]
    assert [view["seed"] for view in found["views"]] == [None, 0, 1, 2] and found["names"] == ODD
    assert found["views"][0]["label"] == "means over seeds 0, 1 and 2"
    means, *each = (view["methods"][0] for view in found["views"])
    for part in ("values", "low", "high"):
        lines = np.array([one[part]["validation.accuracy"] for one in each])
        assert means[part]["validation.accuracy"] == pytest.approx(lines.mean(axis=0), rel=1e-4)
    assert found["views"][1]["samples"]["validation"] == [400, 400, 400]


def test_a_run_without_counts_has_no_intervals(tmp_path: Path) -> None:
    found = report_contents(*read_methods([write_run(tmp_path / "run", samples=None)]))["byClient"]
    view = found["views"][0]
    assert view["samples"] == {} and set(view["methods"][0]["low"]["validation.accuracy"]) == {None}


@pytest.mark.parametrize(
    "row",
    [
        '{"round": 4, "client": "a", "validation_samples": -5}',
        '{"round": 4, "client": "a", "validation_samples": 1e400, "validation.accuracy_low": NaN}',
        '{"round": 4, "client": "a", "train_samples": 0.5, "validation.loss_low": 1, "validation.loss_high": null}',
        '{"round": 4, "client": "a", "validation_samples": 9223372036854775807}',
        '{"round": 4, "client": "nobody", "validation_samples": 3}',
        '{"round": 9, "client": "</script><b>", "train_samples": 1, "x_low": 1, "x_high": 2}',
    ],
)
def test_an_odd_table_does_no_harm(row: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "clients_table.jsonl").write_text(row + "\n")
    html = page(report_contents(*read_methods([folder])))
    assert "<b>" not in html[html.index('<script type="application/json"') :].split("</script>")[0]


@pytest.mark.parametrize("text", ["{broken\n", "[1]\n", '{"round": 1}\n', '{"client": "a", "round": 1, "x": []}\n'])
def test_a_broken_table_is_one_sentence(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "clients_table.jsonl").write_text(text)
    with pytest.raises(RunFolderError, match=r"clients_table\.jsonl, line 1, cannot be read"):
        report_contents(*read_methods([folder]))
    assert read_run(folder).rounds


def test_another_measure_is_compared_as_asked(tmp_path: Path) -> None:
    folders: list[Any] = [write_run(tmp_path / name, name, lift) for name, lift in (("fedavg", 0), ("robust", 1))]
    shown = report_contents(*read_methods(folders), ReportOptions("validation", "loss"))
    assert "Worst client's validation loss, with its 95 % interval: " in " ".join(shown["verdict"])
