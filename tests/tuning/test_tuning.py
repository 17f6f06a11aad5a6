"""Searches: real studies in SQLite that are reproducible, resume after a kill, and never try a point twice."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import sqlite3
import sys
import time
import tomllib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import Engine, event

from comfedl.algorithms import ALGORITHMS
from comfedl.cli.tables import show_trials
from comfedl.config.schema import parse_config, read_config, run_config
from comfedl.tuning import run_trial as trial_module, worker_pool
from comfedl.tuning.interrupts import InterruptGuard
from comfedl.tuning.plan import Plan, make_plan
from comfedl.tuning.run_trial import COMPLETE, DataCache, Task, TrialOutcome, run_task
from comfedl.tuning.search import Tuned, tune
from comfedl.utils.errors import ComfedlError, ConfigError, RunFolderError
from comfedl.utils.lock import release_lock, take_lock
from comfedl.utils.toml import to_toml

with warnings.catch_warnings():  # typer 0.20 imports what click 8.5 calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from comfedl.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "digits", "partition": "imbalanced", "clients": 3, "large": 40, "small": 20},
    "algorithm": {"name": "fedavg", "lr": 0.1, "local_steps": 2, "batch_size": 10},
}
GRID = {"algorithm.lr": [0.05, 0.5, 1.0], "algorithm.local_steps": [1, 3]}


def write(folder: Path, space: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a config file, with a table [tune]."""
    settings = {**SETTINGS, **changes, **({} if space is None else {"tune": space})}
    path = folder / "config.toml"
    path.write_text(to_toml(settings))
    return path


def search(
    folder: Path, name: str = "study", space: dict[str, Any] | None = None, jobs: int = 1, **options: Any
) -> Tuned:
    """Run a search over the grid, or as the options say."""
    changes = options.pop("changes", {})
    plan = make_plan(write(folder, space or GRID, **changes), **{"sampler": "grid", **options})
    return tune(plan, folder / name, jobs)


def trials(folder: Path, name: str = "study") -> list[optuna.trial.FrozenTrial]:
    """The trials as Optuna itself reads them."""
    return optuna.load_study(study_name="tune", storage=f"sqlite:///{folder / name}/study.db").trials


def done(tuned: Tuned) -> dict[str, Any]:
    """State and value of every point that was not interrupted, none of them twice."""
    points = [
        (json.dumps(trial.params, sort_keys=True), trial) for trial in tuned.trials if trial.state != "interrupted"
    ]
    assert max(Counter(point for point, _ in points).values()) == 1
    return {point: (trial.state, trial.value) for point, trial in points}


# The search space.


@pytest.mark.parametrize(
    ("method", "keys", "size"),
    [
        ({"name": "fedavg"}, {"lr"}, 7),
        ({"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}}, {"lr", "outer.gamma"}, 28),
        ({"name": "comfedl", "outer": {"name": "exp", "gamma": 5.0}}, {"lr", "outer.gamma"}, 28),
        ({"name": "comfedl", "inner": {"lr": 0.05}}, {"lr", "inner.lr"}, 49),
        (
            {"name": "comfedl", "inner": {"lr": 0.05}, "outer": {"name": "kl", "gamma": 0.5}},
            {"lr", "inner.lr", "outer.gamma"},
            196,
        ),
        ({"name": "comfedl-damaml"}, {"lr", "adapt_lr", "gamma"}, 196),
        ({"name": "drfa"}, {"lr", "dual_lr"}, 21),
        ({"name": "q-fedavg"}, {"lr", "q"}, 35),
        ({"name": "fedmaml"}, {"lr", "adapt_lr"}, 49),
        ({"name": "tr-maml"}, {"lr", "adapt_lr", "dual_lr"}, 147),
        ({"name": "ditto"}, {"lr", "lam"}, 35),
    ],
    ids=lambda part: part["name"] if isinstance(part, dict) else None,
)
def test_paper_grid(tmp_path: Path, method: dict[str, Any], keys: set[str], size: int) -> None:
    plan = make_plan(write(tmp_path, algorithm=method), grid="paper")
    assert (plan.sampler, plan.trials, set(plan.space)) == ("grid", size, {f"algorithm.{key}" for key in keys})
    assert plan.space["algorithm.lr"].values == (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


def test_paper_grid_values(tmp_path: Path) -> None:
    lists = {}
    for name in ("comfedl-damaml", "drfa", "q-fedavg", "ditto"):
        lists |= make_plan(write(tmp_path, algorithm={"name": name}), grid="paper").space
    assert lists["algorithm.gamma"].values == (0.1, 0.5, 1, 5)
    assert lists["algorithm.dual_lr"].values == (8e-3, 8e-2, 8e-1)
    assert lists["algorithm.q"].values == (0.1, 0.2, 0.5, 1, 2)
    assert lists["algorithm.lam"].values == (0.05, 0.1, 0.5, 1, 5)


@pytest.mark.parametrize(
    ("method", "word"),
    [({"name": name}, name) for name in ("afl", "term", "delta-fl")]
    + [({"name": "comfedl", "outer": {"name": "cvar", "level": 0.5}}, "cvar")],
)
def test_methods_without_a_paper_grid(tmp_path: Path, method: dict[str, Any], word: str) -> None:
    assert {"afl", "term", "delta-fl"} < set(ALGORITHMS)
    with pytest.raises(ConfigError, match=f"no grid for .*'{word}'"):
        make_plan(write(tmp_path, algorithm=method), grid="paper")


def test_spellings_of_a_space(tmp_path: Path) -> None:
    """Quoted paths, dotted keys and tables are the same."""
    lines = {
        "quoted": '"algorithm.lr" = [0.1, 0.2]\n"algorithm.local_steps" = { low = 1, high = 9 }',
        "dotted": "algorithm.lr = [0.1, 0.2]\nalgorithm.local_steps = { low = 1, high = 9 }",
        "tables": "[algorithm]\nlr = [0.1, 0.2]\n[algorithm.local_steps]\nlow = 1\nhigh = 9",
    }
    spaces = []
    for name, text in lines.items():
        (tmp_path / f"{name}.toml").write_text(text)
        plan = make_plan(write(tmp_path), space=tmp_path / f"{name}.toml")
        assert (plan.sampler, plan.trials) == ("tpe", 50)
        spaces.append(plan.space)
    own = make_plan(write(tmp_path, tomllib.loads(lines["dotted"]))).space
    assert spaces[0] == spaces[1] == spaces[2] == own


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "names nothing to search"),
        ({"algorithm.lr": []}, "algorithm.lr is an empty list"),
        ({"algorithm.lr": 0.1}, "algorithm.lr is 0.1, but it must be a list"),
        ({"algorithm.lr": "0.1"}, "algorithm.lr is '0.1', but it must be a list"),
        ({"algorithm.lr": [0.1, 1, 1.0]}, "1.0 twice"),
        ({"algorithm.lr": {"low": 1.0, "high": 0.1}}, "low must be below high"),
        ({"algorithm.lr": {"low": 1.0, "high": 1.0}}, "low must be below high"),
        ({"algorithm.lr": {"low": 0.1}}, "algorithm.lr.high is missing"),
        ({"algorithm.lr": {"low": "a", "high": 1}}, "algorithm.lr.low is 'a', but it must be a number"),
        ({"algorithm.lr": {"low": 0.1, "high": float("inf")}}, "algorithm.lr.high is inf"),
        ({"algorithm.lr": {"low": 0.1, "high": 1.0, "log": 1}}, "log is 1, but it must be true or false"),
        ({"algorithm.lr": {"low": 0.0, "high": 1.0, "log": True}}, "must start above 0"),
        ({"algorithm.lr": {"low": 0.1, "high": 1.0, "step": 0.1}}, "'step', but a range has low, high and log"),
        ({"algorithm.lr": {"low": -1.0, "high": 1.0}}, "lr is -1.0, but it must be a number above 0"),
        ({"algorithm.lr": [0.1, -1.0]}, "lr is -1.0, but it must be a number above 0"),
        ({"algorithm.learning_rate": [0.1]}, "did you mean 'lr'"),
        ({"algorithm.local_steps": [1.5]}, "algorithm.local_steps is 1.5"),
        ({"algorithm.outer.gamma": [1.0]}, "algorithm.outer is not a key of fedavg"),
        ({"algorithm.lr.deep": [0.1]}, "which is 0.1 and not a table"),
        ({"algorithm": {"lr": [0.1]}, "algorithm.lr": [0.2]}, "given twice"),
        ({"seed": [0, 1]}, "seed cannot be searched"),
        ({"data.large": [10, 20]}, "data.large cannot be searched"),
        ({"rounds": [10, 20]}, "rounds cannot be searched"),
    ],
)
def test_invalid_spaces(tmp_path: Path, space: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(write(tmp_path, space))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("[tune]")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "test.accuracy.worst"}, "test data must not select hyper-parameters"),
        ({"metric": "validation.accuracy"}, "must be like validation.accuracy.worst"),
        ({"metric": "validation.accuracy.best"}, "one of mean, worst, worst10, std"),
        ({"metric": "objective"}, "must be like validation.accuracy.worst"),
        ({"sampler": "tpee"}, "did you mean 'tpe'"),
        ({"pruner": "medien"}, "did you mean 'median'"),
        ({"trials": 0}, "trials is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"grid": "papier"}, "--grid is 'papier'"),
        ({"grid": "paper", "space": Path("x.toml")}, "both given"),
        ({"space": Path("x.toml")}, "There is no config file x.toml"),
        ({"sampler": "grid"}, "algorithm.lr is a range, but a grid needs lists"),
        ({"pruner": "median", "changes": ["eval_every=3"]}, "at least two evaluations"),
        ({"changes": ["algorithm.name=nothing"]}, "'nothing', which is unknown"),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(write(tmp_path, {"algorithm.lr": {"low": 0.1, "high": 1.0}}), **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_nothing_to_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is nothing to search: give --grid paper"):
        make_plan(write(tmp_path))


def test_run_ignores_the_tune_table(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GRID))
    assert config.resolved() == read_config(write(tmp_path)).resolved()
    assert run_config(config).rounds


# A search.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuned]:
    """An uninterrupted search over the grid."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, search(folder)


def test_grid_search_tries_every_point(whole: tuple[Path, Tuned]) -> None:
    folder, tuned = whole
    assert len(done(tuned)) == 6 and not tuned.interrupted
    assert {"best.toml", "study.db"} <= set(os.listdir(folder / "study"))
    found = trials(folder)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 6
    assert all(sorted(trial.intermediate_values) == [1, 2, 3, 4] for trial in found)
    values = [trial.value for trial in tuned.trials]
    assert values == sorted(values, reverse=True) and values[0] == max(trial.value for trial in found)


def test_best_config_reproduces_the_best_value_exactly(whole: tuple[Path, Tuned]) -> None:
    _, tuned = whole
    best = tuned.trials[0]
    assert tuned.best is not None
    config = read_config(tuned.best)
    assert {path: config.algorithm.arguments[path.partition(".")[2]] for path in GRID} == best.params
    assert config.resolved() == tomllib.loads(tuned.best.read_text()) | {
        "clients_per_round": None,
        "eval_clients": None,
        "checkpoint_every": None,
    }
    last = run_config(config).rounds[-1]
    assert last["validation.accuracy.worst"] == best.value
    assert "test.accuracy.worst" in last


def test_a_trial_never_sees_test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(write(tmp_path))
    assert config.make_data().test is not None and DataCache()(config).test is None
    seen: list[str] = []

    def watched(config: Any, **options: Any) -> Any:
        result = run_config(config, **options)
        seen.extend(result.rounds[-1])
        return result

    monkeypatch.setattr(trial_module, "run_config", watched)
    outcome = run_task(
        Task(0, SETTINGS, 1, "validation.accuracy.worst"), DataCache(), lambda step, value, heaviest: False
    )
    assert outcome.state == COMPLETE
    assert "validation.loss.mean" in seen and not [name for name in seen if "test" in name]


def test_result_table_and_next_steps(whole: tuple[Path, Tuned]) -> None:
    folder, tuned = whole
    table = show_trials(tuned)
    assert [column.header for column in table.columns][:3] == [
        "trial",
        "validation.accuracy.worst",
        "algorithm.local_steps",
    ]
    assert list(table.columns[0].cells) == [str(trial.number) for trial in tuned.trials]
    assert show_trials(tuned, most=4).caption == "and 2 more trials in the study"
    assert f'optuna.load_study(study_name="tune", storage="sqlite:///{folder}/study/study.db")' in tuned.opening
    assert "optuna-dashboard sqlite:///" in tuned.opening and "test" in tuned.caution


def test_losses_are_minimised(tmp_path: Path) -> None:
    tuned = search(tmp_path, metric="validation.loss.mean", trials=3)
    values = [trial.value for trial in tuned.trials]
    assert len(values) == 3 and values == sorted(values)
    study = optuna.load_study(study_name="tune", storage=tuned.url)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE and study.best_value == values[0]


def test_eval_clients_is_enough_for_a_value(tmp_path: Path) -> None:
    tuned = search(tmp_path, space={"algorithm.lr": [0.5]}, changes={"eval_clients": 2})
    assert [trial.value is not None for trial in tuned.trials] == [True]


def test_the_value_is_the_mean_over_seeds(tmp_path: Path) -> None:
    tuned = search(tmp_path, space={"algorithm.lr": [0.5]}, seeds=2, changes={"seed": 5, "rounds": 3})
    runs = [
        run_config(
            parse_config({**SETTINGS, "rounds": 3, "seed": seed, "algorithm": {**SETTINGS["algorithm"], "lr": 0.5}})
        )
        for seed in (5, 6)
    ]
    curves = [[row["validation.accuracy.worst"] for row in run.rounds] for run in runs]
    assert curves[0] != curves[1]
    (found,) = trials(tmp_path)
    assert found.user_attrs["values"] == [curve[-1] for curve in curves]
    assert tuned.trials[0].value == fmean([curve[-1] for curve in curves])
    means = [fmean(pair) for pair in zip(*curves, strict=True)]
    assert found.intermediate_values == dict(enumerate(curves[0] + means, start=1))


def test_tables_as_choices(tmp_path: Path) -> None:
    space = {"algorithm.outer": [{"name": "kl", "gamma": 0.2}, {"name": "cvar", "level": 0.5}]}
    method = {"name": "comfedl", "lr": 0.5, "outer": {"name": "identity"}}
    tuned = search(tmp_path, space=space, changes={"algorithm": method})
    assert len(done(tuned)) == 2 and tuned.best is not None
    assert read_config(tuned.best).algorithm.arguments["outer"]["name"] in ("kl", "cvar")


SPACE = {"algorithm.lr": {"low": 0.01, "high": 2.0, "log": True}, "algorithm.local_steps": {"low": 1, "high": 4}}


def stored_trials(folder: Path, name: str) -> list[Any]:
    """Everything a study stores about completed and pruned trials, except times."""
    return [
        (trial.params, trial.values, trial.intermediate_values, trial.user_attrs["ended"])
        for trial in trials(folder, name)
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    ]


def test_the_same_seed_gives_the_same_search(tmp_path: Path) -> None:
    """Also if it stops after some trials and resumes; ``trials`` is the total."""
    options: dict[str, Any] = {"space": SPACE, "sampler": "tpe", "pruner": "median"}
    search(tmp_path, "whole", trials=12, **options)
    search(tmp_path, "again", trials=11, **options)
    assert len(stored_trials(tmp_path, "again")) == 11
    search(tmp_path, "again", trials=12, **options)
    assert stored_trials(tmp_path, "again") == stored_trials(tmp_path, "whole")
    search(tmp_path, "again", trials=12, **options)
    assert len(trials(tmp_path, "again")) == 12
    search(tmp_path, "other", trials=3, changes={"seed": 1}, **options)
    assert [part[0] for part in stored_trials(tmp_path, "other")] != [
        part[0] for part in stored_trials(tmp_path, "whole")[:3]
    ]
    assert all(isinstance(params["algorithm.local_steps"], int) for params, *_ in stored_trials(tmp_path, "whole"))


# Trials that do not complete.


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_bad_trials_are_pruned(tmp_path: Path, pruner: str) -> None:
    good, bad = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [1e-6, 2e-6, 3e-6, 4e-6]
    tuned = search(tmp_path, space={"algorithm.lr": good + bad}, pruner=pruner, changes={"rounds": 9})
    pruned = [trial for trial in trials(tmp_path) if trial.state == TrialState.PRUNED]
    assert {trial.params["algorithm.lr"] for trial in pruned} & set(bad)
    assert all(trial.last_step is not None and trial.last_step < 9 for trial in pruned)
    assert tuned.trials[0].params["algorithm.lr"] in good
    assert {trial.number for trial in tuned.trials if trial.state == "pruned"} == {trial.number for trial in pruned}


def test_a_diverged_trial_does_not_stop_the_search(tmp_path: Path) -> None:
    tuned = search(tmp_path, space={"algorithm.lr": [0.1, 1e38]})
    assert [trial.state for trial in tuned.trials] == ["complete", "diverged"]
    assert "Round 1" in tuned.trials[1].reason and tuned.trials[1].value is None
    assert [trial.state for trial in trials(tmp_path) if trial.params["algorithm.lr"] == 1e38] == [TrialState.PRUNED]


def test_a_trial_that_loses_clients_has_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its worst client a trial would look better than it is."""
    evaluated = trial_module._MetricReporter.evaluated

    def shorter(self: Any, row: Any, clients: Any) -> None:
        evaluated(self, row, clients[:-1])

    monkeypatch.setattr(trial_module._MetricReporter, "evaluated", shorter)
    outcome = run_task(Task(0, SETTINGS, 1, "validation.accuracy.worst"), DataCache(), lambda step, value: False)
    assert outcome.state == "diverged" and "2 of 3 clients" in outcome.reason


def test_an_invalid_point_is_a_failed_trial(tmp_path: Path) -> None:
    tuned = search(tmp_path, space={"clients_per_round": [2, 50]})
    assert [trial.state for trial in tuned.trials] == ["complete", "failed"]
    assert "clients_per_round is 50, but there are only 3 clients" in tuned.trials[1].reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "validation.f1.worst"}, "validation.accuracy, "),
        (
            {"changes": {"data": {**SETTINGS["data"], "validation": 0.0}}},
            "no validation split (data.validation is 0.0)",
        ),
        ({"jobs": 0}, "jobs is 0"),
        ({"name": "what?"}, "question mark"),
    ],
)
def test_an_early_error_leaves_no_files(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        search(tmp_path, **{"name": "deep/study", **options})
    assert words in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_another_search_in_the_folder_is_refused(whole: tuple[Path, Tuned], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "study", tmp_path / "study")
    for options, word in (
        ({"changes": {"rounds": 3}}, "config"),
        ({"space": {"algorithm.lr": [0.1]}}, "space"),
        ({"metric": "train.accuracy.worst"}, "metric"),
        ({"seeds": 2}, "seeds"),
        ({"sampler": "random"}, "sampler"),
        ({"pruner": "median"}, "pruner"),
    ):
        with pytest.raises(RunFolderError, match=f"holds a search with another {word};"):
            search(tmp_path, **options)
    assert len(trials(tmp_path)) == 6


def table_changes(folder: Path, rows: int = 120) -> dict[str, Any]:
    """A config's data: a table of two clients, whose last row is like the first."""
    lines = [f"{'ab'[row % 2]},{row % 7},{row % 7 > 3}" for row in range(rows)]
    (folder / "rows.csv").write_text("\n".join(["site,dose,ill", *lines]) + "\n")
    data = {"name": "csv", "path": str(folder / "rows.csv"), "client": "site", "target": "ill"}
    return {"changes": {"data": data, "loss": "bce"}, "space": {"algorithm.lr": [0.05, 0.5]}}


def test_a_search_is_not_continued_on_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor on data that another version encodes in another way: their digest says so too."""
    search(tmp_path, **table_changes(tmp_path))
    before = stored_trials(tmp_path, "study")
    assert search(tmp_path, **table_changes(tmp_path)).trials
    with pytest.raises(RunFolderError, match="a search whose data were others, or were encoded by another version"):
        search(tmp_path, **table_changes(tmp_path, rows=121))
    assert stored_trials(tmp_path, "study") == before and "digest" not in caplog.text


def test_a_search_without_a_digest_goes_on_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of an earlier version; from then on its data are known."""
    search(tmp_path, **table_changes(tmp_path))
    with contextlib.closing(sqlite3.connect(tmp_path / "study" / "study.db")) as connection, connection:
        assert connection.execute("DELETE FROM study_user_attributes WHERE key = 'data'").rowcount == 1
    search(tmp_path, **table_changes(tmp_path))
    assert "kept no digest of its data" in caplog.text
    caplog.clear()
    search(tmp_path, **table_changes(tmp_path))
    assert caplog.text == ""
    with pytest.raises(RunFolderError, match="whose data were others"):
        search(tmp_path, **table_changes(tmp_path, rows=121))


def test_unusable_folders(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.db").write_text("This is not a database. " * 100)
    with pytest.raises(RunFolderError, match=r"study.db cannot be used \(file is not a database\)"):
        search(tmp_path)
    (tmp_path / "study" / "study.db").unlink()
    lock = take_lock(tmp_path / "study")
    with pytest.raises(RunFolderError, match="being written by another"):
        search(tmp_path)
    release_lock(tmp_path / "study", lock)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        search(tmp_path, "file")


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ComfedlError, match=r"needs Optuna, which is not installed; pip install 'comfedl\[tune\]'"):
        search(tmp_path)


# Kills.


def child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(Exception), open(os.devnull, "w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
            work()
            code = 0
        os._exit(code)
    return pid


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, reads /proc")
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_search_killed_repeatedly(tmp_path: Path, sampler: str) -> None:
    """SIGKILL at a random time in each trial gives the same result as an uninterrupted search."""
    # Trials that are long beside the time in which the kill follows what is seen of them.
    options: dict[str, Any] = {"space": GRID if sampler == "grid" else SPACE, "sampler": sampler, "trials": 6}
    options["changes"] = {"rounds": 60, "eval_every": 1}
    whole = search(tmp_path, "whole", **options)
    length = min(trial.seconds for trial in whole.trials if trial.seconds is not None)
    chance = random.Random(3)
    for complete in range(5):
        pid = child(lambda: search(tmp_path, "cut", **options))
        wait_for(tmp_path / "cut", complete, lambda pid=pid: not alive(pid))
        time.sleep(chance.uniform(0, length / 2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tuned = search(tmp_path, "cut", **options)
    assert done(tuned) == done(whole)
    states = Counter(trial.state for trial in trials(tmp_path, "cut"))
    assert states[TrialState.COMPLETE] == 6 and states[TrialState.FAIL] > 0
    assert set(states) == {TrialState.COMPLETE, TrialState.FAIL}
    assert tuned.trials[0].params == whole.trials[0].params
    if sampler == "tpe":
        assert stored_trials(tmp_path, "cut") == stored_trials(tmp_path, "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_kill_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """SIGKILL before each write of a trial in turn, and before each write of the search that requeues it."""
    monkeypatch.setattr(worker_pool, "run_task", _quick)

    def again(name: str = "cut", trials: int = 2) -> Tuned:
        return search(tmp_path, name, space=GRID if sampler == "grid" else SPACE, sampler=sampler, trials=trials)

    again("begun", 1)
    for writes in range(30):  # until the kill hits a running trial
        shutil.rmtree(tmp_path / "in a trial", ignore_errors=True)
        shutil.copytree(tmp_path / "begun", tmp_path / "in a trial")
        assert not _survives(lambda: again("in a trial"), writes)
        last = trials(tmp_path, "in a trial")[-1]
        if last.state == TrialState.RUNNING and len(last.params) == 2:
            break
    else:
        pytest.fail("no kill hit a running trial")
    whole = done(again("whole"))
    for begun, most in (("begun", 30), ("in a trial", 12)):
        for writes in range(most):
            shutil.copytree(tmp_path / begun, tmp_path / "cut")
            survived = _survives(again, writes)
            tuned = again()
            states = Counter(trial.state for trial in tuned.trials)
            assert len(done(tuned)) == states[COMPLETE] == 2 and set(states) <= {COMPLETE, "interrupted"}
            assert done(tuned) == whole
            shutil.rmtree(tmp_path / "cut")
            if survived:
                break
        assert writes > 6


def _quick(task: Task, data: DataCache, report: Callable[[int, float, str], bool]) -> TrialOutcome:
    lr = task.settings["algorithm"]["lr"]
    report(1, lr, "")
    return TrialOutcome(COMPLETE, [lr])


def _survives(work: Callable[[], object], writes: int) -> bool:
    """Run ``work`` in a process that is killed after ``writes`` writes; return whether it finished first."""
    left = writes

    def execute(connection: object, cursor: object, statement: str, *rest: object) -> None:
        nonlocal left
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    def mortal() -> None:
        event.listen(Engine, "before_cursor_execute", execute)
        work()

    code = os.waitstatus_to_exitcode(os.waitpid(child(mortal), 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


def test_jobs_give_the_same_result(whole: tuple[Path, Tuned], tmp_path: Path) -> None:
    folder, one = whole
    two = search(tmp_path, jobs=2)
    assert done(two) == done(one)
    assert two.best is not None and one.best is not None and two.best.read_text() == one.best.read_text()
    spans = [(trial.datetime_start, trial.datetime_complete) for trial in trials(tmp_path)]
    assert any(a[0] < b[0] < a[1] for a in spans for b in spans), "no two trials ran at once"
    assert len(trials(folder)) == len(trials(tmp_path)) == 6


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, reads /proc")
def test_a_killed_search_with_jobs_resumes(tmp_path: Path) -> None:
    config = write(tmp_path, {"algorithm.lr": [round(0.1 + i / 50, 2) for i in range(12)]}, rounds=12)
    pid = child(lambda: tune(make_plan(config, sampler="grid"), tmp_path / "study", jobs=2))
    try:
        wait_for(tmp_path / "study", 2, lambda: not alive(pid))
        below = children(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert len(below) >= 2
    finished = {trial.number for trial in trials(tmp_path) if trial.state == TrialState.COMPLETE}
    running = {trial.number for trial in trials(tmp_path) if trial.state == TrialState.RUNNING}
    assert 2 <= len(finished) < 12 and 1 <= len(running) <= 2
    deadline = time.monotonic() + 60
    while any(alive(process) for process in below):
        assert time.monotonic() < deadline, "workers outlive their killed search"
        time.sleep(0.02)
    tuned = tune(make_plan(config, sampler="grid"), tmp_path / "study")
    assert len(done(tuned)) == 12
    states = Counter(trial.state for trial in trials(tmp_path))
    assert states == {TrialState.COMPLETE: 12, TrialState.FAIL: len(running)}
    assert {trial.number for trial in tuned.trials if trial.state == "interrupted"} == running


def wait_for(folder: Path, complete: int, gone: Callable[[], bool]) -> None:
    """Wait until a search in another process has completed this many trials and runs the next.

    Read with sqlite3, since Optuna would create the file.
    """
    deadline, found = time.monotonic() + 600, -1
    while found < complete:
        assert not gone() and time.monotonic() < deadline
        time.sleep(0.03)
        with contextlib.suppress(sqlite3.OperationalError), contextlib.ExitStack() as stack:  # not created yet
            database = sqlite3.connect(f"file:{folder}/study.db?mode=ro", uri=True)
            stack.callback(database.close)
            states = Counter(state for (state,) in database.execute("SELECT state FROM trials"))
            found = states["COMPLETE"] if states["RUNNING"] else found


# The command line.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["comfedl", "tune", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "grid.toml").write_text("algorithm.lr = [0.05, 0.5]")
    assert command(monkeypatch, "config.toml", "--grid", "grid.toml", "--set", "rounds=2") == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = [line for line in said.out.splitlines() if line.startswith("│")]
    assert len(rows) == 2 and " 0.5 " in rows[0]
    assert "comfedl run runs/tune/config/best.toml" in said.out
    assert "report results on test data" in said.out
    assert "optuna-dashboard sqlite:///runs/tune/config/study.db" in said.out
    assert command(monkeypatch, "config.toml", "--metric", "test.loss.mean", "--grid", "paper") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: --metric is 'test.loss.mean'")


def test_no_trial_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, {"algorithm.lr": [1e38]})
    assert command(monkeypatch, str(config), "--sampler", "grid", "--out", str(tmp_path / "study")) == 2
    said = capsys.readouterr()
    assert "diverged" in said.out and "None of 1 trials finished" in said.err
    assert not (tmp_path / "study/best.toml").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork, reads /proc")
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_is_usable(tmp_path: Path, number: int, jobs: int) -> None:
    config = write(tmp_path, {"algorithm.lr": [round(0.1 + i / 50, 2) for i in range(40)]})

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent of the tests may ignore it
        sys.argv = ["comfedl", "tune", str(config), "--sampler", "grid", "--out", str(tmp_path / "study")]
        sys.argv += ["--jobs", str(jobs)]
        try:
            main.main()
        except SystemExit as end:
            os._exit(int(end.code or 0))

    pid = child(run)
    wait_for(tmp_path / "study", 2, lambda: not alive(pid))
    os.kill(pid, number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    states = Counter(trial.state for trial in trials(tmp_path))
    assert 2 <= states[TrialState.COMPLETE] < 40 and not states[TrialState.RUNNING]
    assert states[TrialState.WAITING] == states[TrialState.FAIL] <= jobs
    assert read_config(tmp_path / "study/best.toml")
    plan: Plan = make_plan(config, sampler="grid", trials=states[TrialState.COMPLETE] + 2)
    assert len(done(tune(plan, tmp_path / "study"))) == states[TrialState.COMPLETE] + 2


@pytest.fixture
def heard() -> Iterator[None]:
    """Python's default SIGINT handler; the parent of the tests may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int, dropped: bool) -> None:
    """Send this process a signal; with ``dropped``, in a destructor, where Python drops exceptions."""
    if dropped:
        weakref.finalize(Counter(), os.kill, os.getpid(), number)  # runs at once: nothing else refers to the counter
    else:
        os.kill(os.getpid(), number)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process sends itself")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # dropped by Python, not by the search
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("where", ["study.Study.ask", "study.Study.report", "study.Study.tell", "worker_pool.run_task"])
def test_an_interrupt_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, dropped: bool, where: str
) -> None:
    """Python drops exceptions raised in destructors, and database calls run many of them."""
    plain = pkgutil.resolve_name(f"comfedl.tuning.{where}")
    begun = ended = 0

    def signalled(*given: Any) -> Any:
        nonlocal begun, ended
        begun += 1
        if begun == 2:
            send(number, dropped)
        found = plain(*given)
        ended += 1
        return found

    monkeypatch.setattr(f"comfedl.tuning.{where}", signalled)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tuned = search(tmp_path)
    assert begun == 2 and tuned.interrupted and len(tuned.trials) < 6
    if where != "worker_pool.run_task":  # writes are completed
        assert ended == 2
    assert not any(trial.state == TrialState.RUNNING for trial in trials(tmp_path))
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert len(done(search(tmp_path))) == 6


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process sends itself")
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("where", ["__init__", "requeue_running", "finished", "close"])
def test_opening_and_closing_a_study_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    plain = pkgutil.resolve_name(f"comfedl.tuning.study.Study.{where}")
    begun = ended = 0

    def signalled(*given: Any) -> Any:
        nonlocal begun, ended
        begun += 1
        os.kill(os.getpid(), signal.SIGTERM)
        found = plain(*given)
        ended += 1
        return found

    monkeypatch.setattr(f"comfedl.tuning.study.Study.{where}", signalled)
    tuned = search(tmp_path)
    assert begun == ended > 0
    assert tuned.interrupted == (where != "close")  # by then all trials are done
    assert not any(trial.state == TrialState.RUNNING for trial in trials(tmp_path))
    monkeypatch.undo()
    assert len(done(search(tmp_path))) == 6


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process sends itself")
@pytest.mark.usefixtures("heard")
def test_a_second_interrupt_does_not_stop_the_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deferred, sent = InterruptGuard.deferred, 0

    def again(guard: InterruptGuard) -> contextlib.AbstractContextManager[None]:
        nonlocal sent
        if sent:
            sent += 1
            os.kill(os.getpid(), signal.SIGINT)
        return deferred(guard)

    def first(*given: Any) -> None:
        nonlocal sent
        sent += 1
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(InterruptGuard, "deferred", again)
    monkeypatch.setattr(worker_pool, "run_task", first)
    assert search(tmp_path).interrupted and sent > 1
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.FAIL, TrialState.WAITING]


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process sends itself")
@pytest.mark.usefixtures("heard")
def test_an_interrupt_while_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = SpawnProcess.start

    def signalled(process: SpawnProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", signalled)
    assert search(tmp_path, jobs=2).interrupted
    assert not multiprocessing.active_children()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process sends itself")
def test_an_ignored_signal_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell ignores SIGINT for its background jobs."""
    run = run_task

    def signalled(*given: Any) -> TrialOutcome:
        os.kill(os.getpid(), signal.SIGINT)
        return run(*given)

    monkeypatch.setattr(worker_pool, "run_task", signalled)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tuned = search(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not tuned.interrupted and len(done(tuned)) == 6
