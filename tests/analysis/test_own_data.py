"""Data that have changed since a run began, and samples given as new that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import comfedl as cf
from comfedl.analysis import own_data
from comfedl.analysis.compare import run_comparison
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.personalize import personalize
from comfedl.analysis.predict import predict
from comfedl.config.schema import Config, parse_config, run_config
from comfedl.data.split import Split


def patients(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"hospital": draw.choice(["east", "north", "south"], rows), "age": draw.normal(60, 10, rows)})
    frame["outcome"] = np.where(frame.age + draw.normal(0, 5, rows) > 60, "ill", "well")
    return frame


def config(**changes: Any) -> Config:
    data = {"name": "csv", "path": "patients.csv", "client": "hospital", "target": "outcome"}
    return parse_config({"rounds": 3, "data": data, "algorithm": {"name": "robust", "lr": 0.1}, **changes})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedRun:
    monkeypatch.chdir(tmp_path)
    patients().to_csv("patients.csv", index=False)
    run_config(config(), out=Path("run"))
    return cf.load_run("run")


def test_data_as_they_were_are_scored_without_a_word(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    assert len(evaluate(run).rows) == 3
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.iloc[:-1], "samples, and had"),
        (lambda frame: frame.iloc[::-1], "no number of samples, but values or their order"),
        (lambda frame: pd.concat([frame, frame[:9].assign(hospital="west")]), "the client 'west' is new"),
        (lambda frame: frame[frame.hospital != "east"], "the client 'east' is gone"),
    ],
)
def test_changed_data_are_not_scored(run: SavedRun, change: Any, said: str) -> None:
    change(patients()).to_csv("patients.csv", index=False)
    for split in (None, "train", "test"):
        with pytest.raises(cf.RunFolderError, match="have changed since it began") as refused:
            evaluate(run, split)
        assert said in str(refused.value) and "--data FILE" in str(refused.value)


def test_a_run_that_set_data_aside_for_its_weights_knows_its_data(
    run: SavedRun, caplog: pytest.LogCaptureFixture
) -> None:
    outer = {"name": "kl", "gamma": 0.5, "on": "outer"}
    run_config(config(algorithm={"name": "comfedl", "outer": outer}), out=Path("aside"))
    evaluate(cf.load_run("aside"))
    assert caplog.text == ""


def test_a_run_without_a_digest_is_scored_with_a_warning(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    """Those of earlier versions; continued by this one, they get a digest, since a resume checks the data."""
    before = evaluate(run).rows
    Path("run/data.sha256").unlink()
    assert evaluate(run).rows == before
    assert "cannot be told whether they have changed" in caplog.text
    run_config(config(rounds=4), out=Path("run"), resume=True, fed=config().make_data(encoding=run.encoding))
    caplog.clear()
    evaluate(cf.load_run("run"))
    assert caplog.text == ""


def test_rows_of_training_that_are_given_as_new_are_noticed(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    patients(60, seed=1).to_csv("new.csv", index=False)
    evaluate(run, data=Path("new.csv"))
    personalize(run, Path("new.csv"), Path("new.safetensors"))
    assert caplog.text == ""
    pd.concat([patients(60, seed=1), patients().iloc[:50]]).to_csv("mixed.csv", index=False)
    for use in (
        lambda: evaluate(run, data=Path("mixed.csv")),
        lambda: personalize(run, Path("mixed.csv"), Path("mixed.safetensors")),
    ):
        caplog.clear()
        use()
        assert "of 110 rows are equal to train rows of this run" in caplog.text
    personalize(run, Path("patients.csv"), Path("own.safetensors"))
    assert "patients.csv: 120 of 200 rows are equal to train rows" in caplog.text
    pd.concat([patients(), patients(60, seed=1)]).to_csv("patients.csv", index=False)  # now with new rows
    caplog.clear()
    evaluate(run, data=Path("patients.csv"))
    assert "260 of 260 rows are in the data that this run's config names" in caplog.text


def test_rows_that_are_equal_by_chance_are_not_mistaken(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    def few_values(seed: int) -> pd.DataFrame:
        frame = patients(seed=seed)
        return frame.assign(age=(frame.age > 60).astype(int))

    few_values(0).to_csv("few.csv", index=False)
    few_values(1).to_csv("new.csv", index=False)
    data = {"name": "csv", "path": "few.csv", "client": "hospital", "target": "outcome"}
    run_config(config(data=data), out=Path("few"))
    caplog.clear()
    evaluate(cf.load_run("few"), data=Path("new.csv"))
    assert caplog.text == ""


def test_a_comparison_is_not_continued_on_other_data(run: SavedRun) -> None:
    configs = {"one": config()}
    run_comparison(configs, 1, "validation", Path("compare"), progress=False)
    run_comparison(configs, 1, "validation", Path("compare"), resume=True, progress=False)
    patients().iloc[::-1].to_csv("patients.csv", index=False)
    with pytest.raises(cf.RunFolderError, match="a finished run whose data were others"):
        run_comparison(configs, 1, "validation", Path("compare"), resume=True, progress=False)


def test_predictions_need_no_data_of_training(run: SavedRun) -> None:
    """Not even where the loss is weighted by their labels."""
    loss = {"name": "cross_entropy", "class_weights": "balanced"}
    run_config(config(loss=loss), out=Path("balanced"))
    Path("patients.csv").rename("new.csv")
    assert predict(cf.load_run("balanced"), Path("new.csv")).count("\n") == 201


def test_a_client_without_held_out_rows_is_no_hindrance(run: SavedRun, caplog: pytest.LogCaptureFixture) -> None:
    """Of a run without a digest all splits are looked through, and so small a client has no validation or test rows."""
    pd.concat([patients(), patients(2).assign(hospital="west")]).to_csv("patients.csv", index=False)
    run_config(config(), out=Path("tiny"))
    Path("tiny/data.sha256").unlink()
    caplog.clear()
    evaluate(cf.load_run("tiny"), data=Path("patients.csv"))
    assert "202 of 202 rows are in the data that this run's config names" in caplog.text


def test_one_client_at_a_time_is_looked_through(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that data on disk need no more memory than in training."""
    events: list[str] = []
    read, rows = Split.samples_of, own_data._rows

    def samples_of(self: Split, i: int) -> Any:
        events.append(f"read {i}")
        return read(self, i)

    def spied(*args: Any) -> Any:
        events.append("count")
        return rows(*args)

    known = (run.config or config()).make_data(encoding=run.encoding).train["east"]
    monkeypatch.setattr(Split, "samples_of", samples_of)
    monkeypatch.setattr(own_data, "_rows", spied)
    own_data.note_known(run, Path("new.csv"), *known)
    assert events == ["read 0", "count", "read 1", "count", "read 2", "count", "count"]
