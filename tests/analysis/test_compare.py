"""Methods side by side: the same data, the same start, means and standard errors over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.analysis.compare import Comparison, run_comparison
from comfedl.analysis.load_run import read_encoding
from comfedl.cli import main, tables
from comfedl.config.schema import Config, parse_config, run_config
from comfedl.utils.toml import to_toml

BASE: dict[str, Any] = {
    "rounds": 2,
    "seed": 4,
    "data": {"name": "digits", "partition": "dirichlet", "clients": 4, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
}
TRAINING = {"lr": 0.2, "local_steps": 2, "batch_size": 8}


def config(method: str, changes: tuple[str, ...] = (), **algorithm: Any) -> Config:
    return parse_config({**BASE, "algorithm": {"name": method, **TRAINING, **algorithm}}, changes)


def compared(out: Path, configs: dict[str, Config], seeds: int = 2, split: str = "validation") -> Comparison:
    return run_comparison(configs, seeds, split, out, progress=False)


# Statistics by hand.


def rows(key: str, *numbers: float) -> list[dict[str, Any]]:
    return [{"round": 1, key: number} for number in numbers]


KEY = "validation.accuracy.mean"


def cells(*columns: list[float], key: str = KEY) -> list[Any]:
    found = Comparison({f"m{i}": rows(key, *numbers) for i, numbers in enumerate(columns)}, "validation").columns()
    return list(found["average client"].values())


def test_mean_and_standard_error() -> None:
    a, b = cells([0.5, 0.6, 0.7], [0.9, 0.9, 0.9])
    assert a.mean == pytest.approx(0.6) and b.mean == pytest.approx(0.9)
    # The deviation of a sample of three is 0.1; the error of its mean is that over the root of three.
    assert a.error == pytest.approx(0.1 / math.sqrt(3)) and b.error == pytest.approx(0, abs=1e-12)
    assert (a.best, b.best) == (False, True)


def test_the_smallest_loss_is_the_best() -> None:
    a, b = cells([0.5, 0.6], [0.9, 0.9], key="validation.loss.mean")
    assert (a.best, b.best) == (True, False)


def test_noise_is_judged_on_paired_differences() -> None:
    """Seeds move both methods alike: the difference is 0.1 with an error of 0.0029, far from noise, though each mean
    has an error of 0.12. Shuffled, the same numbers tell nothing."""
    good = [0.5, 0.7, 0.9]
    clear, best = cells([0.4, 0.605, 0.795], good)
    assert best.best and not clear.within_noise and clear.error > 0.1
    shuffled, best = cells([0.795, 0.4, 0.605], good)
    assert best.best and shuffled.within_noise
    assert clear.mean == pytest.approx(shuffled.mean)


@pytest.mark.parametrize(("gap", "close"), [(0.0200, True), (0.0199, True), (0.0202, False)])
def test_noise_is_two_standard_errors(gap: float, close: bool) -> None:
    """Differences gap - 0.01 and gap + 0.01 over two seeds have a standard error of 0.01."""
    other, best = cells([0.5 - gap + 0.01, 0.7 - gap - 0.01], [0.5, 0.7])
    assert best.best and other.within_noise == close


def test_one_seed_tells_nothing() -> None:
    a, b = cells([0.5], [0.6])
    assert math.isnan(a.error) and not a.within_noise and not b.within_noise and b.best


def test_the_best_is_never_its_own_noise_and_a_tie_is_noise() -> None:
    a, b = cells([0.5, 0.6], [0.5, 0.6])
    assert [a.best, b.best].count(True) == 1 and [a.within_noise, b.within_noise].count(True) == 1


def test_columns_are_those_that_there_are() -> None:
    comparison = Comparison(
        {
            "a": [{"test.accuracy.mean": 0.5, "test.accuracy.worst": 0.2, "test.personal_accuracy.mean": 0.8}],
            "b": [{"test.accuracy.mean": 0.6, "test.accuracy.worst": 0.1}],
        },
        "test",
    )
    columns = comparison.columns()
    assert list(columns) == ["average client", "worst client", "average (personal)"]
    assert columns["average client"]["b"].best and columns["worst client"]["a"].best
    assert list(columns["average (personal)"]) == ["a"]
    assert "-" in text_of(comparison)[0]


def text_of(comparison: Comparison) -> tuple[str, str]:
    table, note = tables.show_comparison(comparison)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text(), note


def test_the_table_marks_the_best_and_says_what_is_noise() -> None:
    comparison = Comparison(
        {"good": rows(KEY, 0.8, 0.9), "near": rows(KEY, 0.9, 0.79), "far": rows(KEY, 0.1, 0.2)}, "validation"
    )
    text, note = text_of(comparison)
    lines = {name: next(line for line in text.splitlines() if name in line) for name in ("good", "near", "far")}
    assert "0.8500 ± 0.0500 *" in lines["good"]
    assert "0.8450 ± 0.0550 ~" in lines["near"]
    assert "0.1500 ± 0.0500" in lines["far"] and "*" not in lines["far"] and "~" not in lines["far"]
    assert "validation accuracy over 2 seeds" in " ".join(text.split())
    assert "average client: near" in note and "far" not in note.split("(")[1]


def test_the_note_of_clear_differences_and_of_one_seed() -> None:
    _, note = text_of(Comparison({"a": rows(KEY, 0.1, 0.2), "b": rows(KEY, 0.8, 0.9)}, "validation"))
    assert "more than twice its standard error" in note
    text, note = text_of(Comparison({"a": rows(KEY, 0.1), "b": rows(KEY, 0.8)}, "validation"))
    assert "--seeds" in note and "±" not in text and "over 1 seed " in " ".join(text.split())


def test_a_method_is_shown_under_its_whole_name() -> None:
    """A config file may be called anything: square brackets are no markup."""
    text, _ = text_of(Comparison({"fedavg[samples]": rows(KEY, 0.1), "b": rows(KEY, 0.8)}, "validation"))
    assert "fedavg[samples]" in text


# Whole comparisons.


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Config], Comparison]:
    out = tmp_path_factory.mktemp("compare")
    configs = {
        "fedavg": config("fedavg"),
        "kl": config("comfedl", outer={"name": "kl", "gamma": 0.2}),
        "ditto": config("ditto", lam=0.5),
    }
    return out, configs, compared(out, configs, seeds=3)


def test_a_comparison_is_its_runs(three: tuple[Path, dict[str, Config], Comparison]) -> None:
    """Every cell from runs done one by one, with the seeds 4, 5 and 6."""
    out, configs, comparison = three
    for name, each in configs.items():
        alone = [run_config(each.model_copy(update={"seed": seed})).rounds[-1] for seed in (4, 5, 6)]
        assert [dict(row) for row in comparison.rows[name]] == alone
        numbers = [row["validation.accuracy.worst"] for row in alone]
        cell = comparison.columns()["worst client"][name]
        assert cell.mean == pytest.approx(np.mean(numbers), abs=1e-12)
        assert cell.error == pytest.approx(np.std(numbers, ddof=1) / math.sqrt(3), abs=1e-12)
        for i in range(3):
            assert json.loads((out / name / f"seed-{i}" / "summary.json").read_text())["rounds"] == 2
    assert len({row["train.loss.mean"] for row in comparison.rows["fedavg"]}) == 3


def test_a_table_is_encoded_as_it_was_when_the_runs_began(tmp_path: Path) -> None:
    """Versions before the input for others gave each category an input, in the order of the alphabet."""
    lines = [
        f"h{i % 4},{i % 7},{'aa' if i % 20 == 0 else 'ab'[i % 3 % 2]},{'no' if i % 5 else 'yes'}" for i in range(120)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["client,age,ward,y", *lines]) + "\n")
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "client": "client", "target": "y"}
    settings = {**BASE, "data": data, "algorithm": {"name": "fedavg", **TRAINING}}
    longer, begun = parse_config(settings), parse_config(settings, ("rounds=1",))
    now = longer.make_data().encoding
    assert now is not None and "ward=(other)" in now.columns[1].names
    ward = replace(now.columns[1], categories=("a", "aa", "b"), unseen="refuse")
    before = replace(now, columns=(now.columns[0], ward), report=None)
    out = tmp_path / "out"
    run_config(begun, out / "fedavg" / "seed-0", fed=begun.make_data(encoding=before))
    with pytest.raises(cf.RunFolderError, match=r"other data.*encoded in another way"):
        run_config(longer, out / "fedavg" / "seed-0", resume=True, fed=longer.make_data())
    configs = {"fedavg": longer, "term": longer.model_copy(update={"algorithm": config("term").algorithm})}
    rows = run_comparison(configs, 1, "validation", out, resume=True, progress=False).rows
    assert rows["fedavg"][0]["round"] == 2
    for name in configs:  # the data are the same for all, also for a method that had not begun
        assert read_encoding(out / name / "seed-0") == before


def test_the_csv_holds_every_number(three: tuple[Path, dict[str, Config], Comparison]) -> None:
    out, configs, comparison = three
    found = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert [(row["method"], row["run"]) for row in found] == [(name, str(i)) for name in configs for i in range(3)]
    for row in found:
        source = comparison.rows[row["method"]][int(row["run"])]
        for key, value in source.items():
            assert float(row[key]) == value
        assert {key for key, value in row.items() if value} == {"method", "run", *source}


def test_the_same_data_and_the_same_initial_model_for_every_method(tmp_path: Path) -> None:
    """With steps of no size what is left is what a run began with: one model and one data set a seed."""
    methods = ["fedavg", "comfedl", "drfa", "afl", "q-fedavg", "fedmaml", "tr-maml", "ditto", "term", "delta-fl"]
    configs = {name: config(name, ("rounds=1",), lr=1e-40, personal_steps=0) for name in methods}
    compared(tmp_path, configs)
    initial = []
    for i in range(2):
        seeded = configs["fedavg"].model_copy(update={"seed": 4 + i})
        expected = dict(seeded.make_model(seeded.make_data()).named_parameters())
        losses = []
        for name in methods:
            folder = tmp_path / name / f"seed-{i}"
            found = load_file(folder / "model.safetensors")
            for key, part in expected.items():
                torch.testing.assert_close(found[key], part.detach(), rtol=0, atol=1e-6)
            lines = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
            losses.append([line[f"{split}.loss"] for line in lines for split in ("train", "validation", "test")])
        np.testing.assert_allclose(losses, [losses[0]] * len(methods), atol=1e-5)
        initial.append((expected["1.weight"].detach(), losses[0]))
    assert not torch.equal(initial[0][0], initial[1][0]) and initial[0][1] != initial[1][1]


def test_with_a_seed_of_its_own_the_split_stays_while_the_model_changes(tmp_path: Path) -> None:
    each = config("fedavg", ("data.seed=9", "rounds=1"))
    fed = [each.model_copy(update={"seed": seed}).make_data() for seed in (4, 5)]
    assert torch.equal(fed[0].train.x, fed[1].train.x)
    comparison = compared(tmp_path, {"fedavg": each})
    assert len({row["train.loss.mean"] for row in comparison.rows["fedavg"]}) == 2


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("data.alpha=0.4", "data"),
        ("data.clients=5", "data"),
        ("data.validation=0.3", "data"),
        ("data.seed=1", "data"),
        ("model.hidden=[9]", "model"),
        ('model={name="logistic"}', "model"),
        ("seed=5", "seed"),
        ("rounds=3", "rounds"),
        ("clients_per_round=2", "clients_per_round"),
    ],
)
def test_configs_that_differ_in_more_than_the_method_are_refused(tmp_path: Path, change: str, key: str) -> None:
    with pytest.raises(cf.ConfigError, match=key):
        compared(tmp_path / "out", {"a": config("fedavg"), "b": config("comfedl", (change,))})
    assert not (tmp_path / "out").exists()


def test_nothing_is_run_where_the_last_folder_is_taken(tmp_path: Path) -> None:
    configs = {"a": config("fedavg"), "b": config("comfedl")}
    taken = tmp_path / "b" / "seed-1"
    taken.mkdir(parents=True)
    (taken / "config.toml").write_text("rounds = 1\n")
    with pytest.raises(cf.RunFolderError, match="already holds"):
        compared(tmp_path, configs)
    assert not (tmp_path / "a").exists()
    run_comparison(configs, 2, "validation", tmp_path, force=True, progress=False)
    assert (taken / "summary.json").exists()


@pytest.mark.parametrize("split", ["outer", "holdout"])
def test_a_split_that_is_none_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(cf.ConfigError, match="split"):
        compared(tmp_path / "out", {"a": config("fedavg")}, split=split)


def test_a_split_that_the_data_lack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match="split"):
        compared(tmp_path / "out", {"a": config("fedavg", ("data.test=0.0",))}, split="test")


# The command line, in this process.


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["comfedl", *words])
    with pytest.raises(SystemExit) as stop:
        main.main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def written(folder: Path, name: str, method: str, **changes: Any) -> str:
    path = folder / f"{name}.toml"
    settings = {**BASE, **changes, "algorithm": {"name": method, **TRAINING}}
    path.write_text(to_toml(settings))
    return str(path)


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "one", "fedavg"), written(tmp_path, "two", "comfedl")]
    out = tmp_path / "runs"
    code, text, _ = command(
        monkeypatch, capsys, "compare", *files, "--seeds", "2", "--out", str(out), "--set", "rounds=1"
    )
    assert code == 0
    for words in ("one", "two", "average client", "worst client", "worst (personal)", "±", "validation accuracy"):
        assert words in text
    assert (out / "comparison.csv").exists()
    found = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert {row["round"] for row in found} == {"1"} and len(found) == 4
    best = max(("one", "two"), key=lambda m: np.mean([float(row[KEY]) for row in found if row["method"] == m]))
    line = next(line for line in text.splitlines() if f" {best} " in line)
    assert "*" in line.split("│")[2]
    code, _, err = command(monkeypatch, capsys, "compare", *files, "--seeds", "2", "--out", str(out))
    assert code == 2 and "already holds" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [({"data": {**BASE["data"], "alpha": 0.9}}, "differ in data"), ({"seed": 1}, "differ in seed")],
)
def test_compare_refuses_different_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    words: str,
) -> None:
    files = [written(tmp_path, "one", "fedavg"), written(tmp_path, "two", "comfedl", **change)]
    code, _, err = command(monkeypatch, capsys, "compare", *files, "--out", str(tmp_path / "runs"))
    assert code == 2 and words in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_compare_refuses_two_files_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    files = [written(tmp_path, "one", "fedavg"), written(tmp_path / "other", "one", "comfedl")]
    code, _, err = command(monkeypatch, capsys, "compare", *files, "--out", str(tmp_path / "runs"))
    assert code == 2 and "same file name" in err


@pytest.mark.parametrize("seeds", ["0", "-1"])
def test_compare_needs_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seeds: str
) -> None:
    code, _, err = command(
        monkeypatch,
        capsys,
        "compare",
        written(tmp_path, "one", "fedavg"),
        "--seeds",
        seeds,
        "--out",
        str(tmp_path / "runs"),
    )
    assert code == 2 and "seeds" in err


def test_list_algorithms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every method with its paper, its objective and what it sends; long cells go on in the next line."""
    code, text, _ = command(monkeypatch, capsys, "list", "algorithms")
    assert code == 0
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("│")[1:-1]][:4]
        if len(parts) != 4:
            continue
        name = parts[0] or name
        before = found.get(name, [""] * 3)
        found[name] = [old + new.replace(" ", "") for old, new in zip(before, parts[1:], strict=True)]
    assert {*found} == {*ALGORITHMS}
    for name, method in ALGORITHMS.items():
        assert found[name] == [words.replace(" ", "") for words in (method.paper, method.goal, method.sends)]
    paper = {"fedavg", "comfedl", "comfedl-damaml", "drfa", "afl", "q-fedavg", "fedmaml", "tr-maml", "ditto"}
    assert {*found} == paper | {"robust", "term", "delta-fl", "fedprox", "scaffold"}
