"""TensorBoard and MLflow, checked with their own readers."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import comfedl as cf
from comfedl.training.trackers import MLflow, TensorBoard, make_tracker
from comfedl.utils.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "ResourceWarning")
]

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # no network in tests

SETTINGS = {"rounds": 4, "seed": 0, "algorithm": {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}}}


class Killed(Exception):
    """Simulates a kill: the run ends without calling its callbacks."""


class KillAfter(cf.Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def round_done(self, number: int) -> None:
        if number == self.number:
            raise Killed


def train(fed: cf.FederatedData, out: Path, *callbacks: cf.Callback, **options: Any) -> cf.Result:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    method = cf.ComFedL(outer=cf.KL(0.2), local_steps=1, batch_size=4)
    return cf.fit(model, fed, method, rounds=4, out=out, checkpoint_every=2, callbacks=callbacks, **options)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    held = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0}, purge_orphaned_data=False)
    held.Reload()
    return held


def test_tensorboard_has_every_number(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    result = train(three_clients, tmp_path, TensorBoard(tmp_path / "tensorboard", SETTINGS))
    held = events(tmp_path / "tensorboard")
    for key in ("validation.accuracy.worst", "train.loss.mean", "objective", "effective_clients", "up_bytes"):
        found = [(event.step, event.value) for event in held.Scalars(key.replace(".", "/"))]
        assert [step for step, _ in found] == [1, 2, 3, 4]
        assert [value for _, value in found] == pytest.approx([row[key] for row in result.rounds], rel=1e-6)
    weights = held.Histograms("clients/weight")
    assert [event.step for event in weights] == [1, 2, 3, 4]
    assert weights[0].histogram_value.num == 3
    assert {"config/text_summary", "summary/text_summary"} <= set(held.Tags()["tensors"])
    text = held.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "gamma = 0.2" in text


def test_tensorboard_goes_on_without_doubles(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """Round 3 was written and then lost with its checkpoint, so it comes again."""
    folder = tmp_path / "run" / "tensorboard"
    with pytest.raises(Killed):
        train(three_clients, tmp_path / "run", KillAfter(3), TensorBoard(folder, SETTINGS))
    assert [event.step for event in events(folder).Scalars("objective")] == [1, 2, 3]
    train(three_clients, tmp_path / "run", TensorBoard(folder, SETTINGS, resume=True), resume=True)
    held = events(folder)
    assert [event.step for event in held.Scalars("objective")] == [1, 2, 3, 4]
    assert [event.step for event in held.Histograms("clients/weight")] == [1, 2, 3, 4]
    assert len(held.Tensors("config/text_summary")) == 1
    whole = train(three_clients, tmp_path / "whole")
    found = [event.value for event in held.Scalars("validation/accuracy/worst")]
    assert found == pytest.approx([row["validation.accuracy.worst"] for row in whole.rounds], rel=1e-6)


def test_events_of_another_run_are_not_mixed_in(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    train(three_clients, tmp_path / "one", TensorBoard(tmp_path / "events"))
    with pytest.raises(ConfigError, match="already holds events"):
        train(three_clients, tmp_path / "two", TensorBoard(tmp_path / "events"))
    assert not (tmp_path / "two").exists()


def test_a_forced_run_has_events_of_its_own(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    for _ in range(2):
        train(three_clients, tmp_path, TensorBoard(tmp_path / "tensorboard"), force=True)
    assert [event.step for event in events(tmp_path / "tensorboard").Scalars("objective")] == [1, 2, 3, 4]
    with pytest.raises(Killed):  # before its first checkpoint: the old run comes back, with its events
        train(three_clients, tmp_path, TensorBoard(tmp_path / "tensorboard"), KillAtOnce(), force=True)
    assert [event.step for event in events(tmp_path / "tensorboard").Scalars("objective")] == [1, 2, 3, 4]


class KillAtOnce(cf.Callback):
    def evaluated(self, row: Any, clients: Any) -> None:
        raise Killed


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow's own; making its tables takes long."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A database to track in, and a client that reads it."""
    from mlflow.tracking import MlflowClient

    shutil.copy(empty, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return MlflowClient()


def only_run(store: Any) -> Any:
    (run,) = store.search_runs([store.get_experiment_by_name("comfedl").experiment_id])
    return run


def test_mlflow_has_parameters_numbers_and_the_summary(
    three_clients: cf.FederatedData, tmp_path: Path, store: Any
) -> None:
    result = train(three_clients, tmp_path / "run", MLflow(SETTINGS, "mine"))
    run = only_run(store)
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params["algorithm.outer.gamma"] == "0.2" and run.data.params["rounds"] == "4"
    for key in ("validation.accuracy.worst", "objective", "train.loss.mean"):
        history = store.get_metric_history(run.info.run_id, key)
        assert [metric.step for metric in history] == [1, 2, 3, 4]
        assert [metric.value for metric in history] == pytest.approx([row[key] for row in result.rounds])
    last = [row for row in result.clients if row["round"] == 4]
    worst = min(last, key=lambda row: row["validation.accuracy"])["client"]
    assert run.data.tags["worst_client"] == worst
    path = store.download_artifacts(run.info.run_id, "summary.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["objective"] == result.rounds[-1]["objective"]


def test_mlflow_goes_on_with_the_same_run(three_clients: cf.FederatedData, tmp_path: Path, store: Any) -> None:
    out = tmp_path / "run"
    with pytest.raises(Killed):
        train(three_clients, out, KillAfter(3), MLflow(SETTINGS, "mine", out / "mlflow.json"))
    assert only_run(store).info.status == "FAILED"
    train(three_clients, out, MLflow(SETTINGS, "mine", out / "mlflow.json", resume=True), resume=True)
    run = only_run(store)
    assert run.info.status == "FINISHED"
    for key in ("objective", "validation.accuracy.worst"):
        assert [metric.step for metric in store.get_metric_history(run.info.run_id, key)] == [1, 2, 3, 4]


def test_mlflow_that_cannot_be_reached(
    three_clients: cf.FederatedData, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start that is an error and nothing is left; later the training goes on."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/no/such/folder/mlflow.db")
    (tmp_path / "no").write_text("a file")
    with pytest.raises(ConfigError, match="MLflow cannot be used"):
        train(three_clients, tmp_path / "run", MLflow(SETTINGS))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    class Breaks(MLflow):
        def round_done(self, number: int) -> None:
            if number == 2:
                self._run = "gone"

    with pytest.warns(UserWarning, match="Logging to MLflow has stopped"):
        result = train(three_clients, tmp_path / "run", Breaks(SETTINGS))
    assert [row["round"] for row in result.rounds] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_said(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.utils.tensorboard", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'comfedl\[track\]'"):
        make_tracker(kind, tmp_path, SETTINGS, "run", False)


def test_an_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--track is 'tensorbord'.*did you mean 'tensorboard'"):
        make_tracker("tensorbord", tmp_path, SETTINGS, "run", False)


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, capsys: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from comfedl.cli import main
    text = 'rounds = 2\n[data]\nname = "digits"\npartition = "iid"\nclients = 3\n[algorithm]\nname = "fedavg"\n'
    (tmp_path / "a.toml").write_text(text)
    words = ["compare", "a.toml", "--seeds", "1", "--out", "out", "--log", "json"]
    monkeypatch.setattr(sys, "argv", ["comfedl", *words, "--track", "tensorboard", "--track", "mlflow"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert not end.value.code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["round", "round", "finished"]
    assert [event.step for event in events(tmp_path / "out/a/seed-0/tensorboard").Scalars("objective")] == [1, 2]
    assert only_run(store).info.run_name == "a, seed 0"
