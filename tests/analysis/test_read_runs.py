"""Runs read from their folders, finished or not, and put together by method."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfedl.analysis.read_runs import Method, Run, find_runs, group, last_rows, read_methods, read_run
from comfedl.analysis.stats import choose_metric
from comfedl.utils.errors import ConfigError, RunFolderError
from helpers.handmade import write_run


def test_folders_of_runs_are_looked_through_in_order(tmp_path: Path) -> None:
    for seed in (10, 9, 0):
        write_run(tmp_path / f"out/fedavg/seed-{seed}", seed=seed)
    write_run(tmp_path / "out/.replaced-1/old", seed=3)
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs([tmp_path / "out"])]
    assert found == ["out/fedavg/seed-0", "out/fedavg/seed-9", "out/fedavg/seed-10"]
    assert find_runs([tmp_path / "out" / "fedavg" / "seed-9", tmp_path / "out"])[0].name == "seed-9"
    assert len(find_runs([tmp_path / "out", tmp_path / "out" / "fedavg"])) == 3


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no run"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="gone does not exist"):
        find_runs([tmp_path / "gone"])


@pytest.mark.parametrize(("name", "text"), [("config.toml", "rounds = ="), ("rounds.jsonl", '{"round": \n')])
def test_a_folder_that_is_damaged_is_refused(tmp_path: Path, name: str, text: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_run(folder)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", done=False)
    whole = read_run(folder)
    last = whole.final_client_rows()
    for name in ("rounds.jsonl", "clients.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"round": 5, "client": "a", "validation.acc')
    again = read_run(folder)
    assert again.rounds == whole.rounds and not again.done
    assert again.final_client_rows() == last
    assert list(again.client_records(["a"], {1, 2, 4, 5}).rounds) == [1, 2, 4]


def test_the_last_round_is_read_from_the_end(tmp_path: Path) -> None:
    """More than the first 64 kB that are looked at, so that it has to go further back."""
    names = [f"client-{i}" for i in range(2000)]
    folder = write_run(tmp_path / "run", clients=names)
    rows = last_rows(folder / "clients.jsonl")
    assert [row["client"] for row in rows] == names and {row["round"] for row in rows} == {4}
    assert last_rows(folder / "missing.jsonl") == []


def test_clients_are_matrices_by_name_and_round(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "run")).client_records(["c", "a"], {1, 4})
    assert list(found.rounds) == [1, 4]
    assert found.values["validation.accuracy"].shape == (2, 2)
    assert found.values["validation.accuracy"][0, 0] < found.values["validation.accuracy"][1, 0]


def test_seeds_are_one_method_and_other_settings_another(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"out/{name}/seed-{s}", name, seed=s) for name in ("fedavg", "comfedl") for s in (0, 1)
    ]
    methods, notes = read_methods(folders)
    assert [(method.name, [run.seed for run in method.runs]) for method in methods] == [
        ("fedavg", [0, 1]),
        ("comfedl", [0, 1]),
    ]
    assert notes == []


def test_the_same_run_twice_is_not_two_seeds(tmp_path: Path) -> None:
    methods, notes = read_methods([write_run(tmp_path / "one"), write_run(tmp_path / "two")])
    assert len(methods) == 1 and len(methods[0].runs) == 1
    assert len(notes) == 1 and "two is the same run as" in notes[0]


def test_names_that_are_alike_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{place}/run", quorum=share) for place, share in (("a", 0.2), ("b", 0.5))]
    methods, _ = read_methods(folders)
    assert [method.name for method in methods] == ["run (quorum=0.2)", "run (quorum=0.5)"]


def test_metrics_are_those_of_the_records(tmp_path: Path) -> None:
    both = choose_metric(read_methods([write_run(tmp_path / "one")])[0])
    assert (both.key, list(both.metrics), list(both.splits)) == (
        "validation.accuracy",
        ["accuracy", "loss"],
        ["train", "validation"],
    )
    regression = choose_metric(read_methods([write_run(tmp_path / "two", metrics=("loss", "rmse", "r2"))])[0], "train")
    assert regression.key == "train.rmse" and list(regression.metrics) == ["rmse", "r2", "loss"]
    with pytest.raises(ConfigError, match="--split is 'test', but the runs have train, validation"):
        choose_metric(read_methods([write_run(tmp_path / "three")])[0], "test")
    with pytest.raises(ConfigError, match="--metric is 'auc', but the runs have loss, accuracy"):
        choose_metric(read_methods([write_run(tmp_path / "four")])[0], metric="auc")


def test_runs_without_a_folder_bring_their_rows() -> None:
    rows = [{"round": 3, "client": name, "test.loss": 0.5, "weight": 0.5} for name in "ab"]
    run = Run({"seed": 1}, [{"round": 3, "test.loss.mean": 0.5}], True, client_rows=rows)
    assert run.final_client_rows() == rows
    assert run.client_records(["b"], {3}).values["test.loss"].tolist() == [[0.5]]
    methods, _ = group([("mine", run)])
    assert methods == [Method("mine", [run])]
