"""Progress of a run: a display in a terminal, silence in a pipe, JSON lines, and ``watch`` from outside."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import comfedl as cf
from comfedl.analysis.terminal_watch import RunWatcher
from comfedl.analysis.web_server import make_server
from comfedl.cli.watch import watch
from comfedl.core.protocol import Scores
from comfedl.training import progress
from comfedl.training.client_records import Evaluation
from comfedl.training.progress import JsonLines, Progress, make_progress, seen
from comfedl.tuning.progress import SearchProgress
from comfedl.utils.errors import ConfigError
from comfedl.utils.lock import release_lock, take_lock
from comfedl_reproduction import runner
from helpers.handmade import write_run

ROW = {"round": 3, "validation.accuracy.mean": 0.7, "validation.accuracy.worst": 0.5, "train.loss.mean": 1.0}
CLIENTS = [
    {"round": 3, "client": "a", "validation.accuracy": 0.9, "weight": 0.2},
    {"round": 3, "client": "b", "validation.accuracy": 0.5, "weight": 0.3},
    {"round": 3, "client": "c", "validation.accuracy": 0.7, "weight": 0.5},
]


def test_what_one_looks_at() -> None:
    found = seen(ROW, CLIENTS)
    assert found is not None
    assert (found.worst_client, found.heaviest_client, found.heaviest_weight) == ("b", "c", 0.5)
    assert str(found) == "validation accuracy: mean 0.700, worst 0.500 (b); heaviest c 0.500"
    assert seen({"round": 1, "objective": 2.0}, []) is None


def test_the_worst_of_a_loss_is_the_largest_and_a_client_may_have_none() -> None:
    row = {"round": 1, "train.loss.mean": 2.0, "train.loss.worst": 3.0}
    clients = [{"client": "a", "train.loss": 1.0}, {"client": "b"}, {"client": "c", "train.loss": 3.0}]
    found = seen(row, clients)
    assert found is not None and found.worst_client == "c" and found.heaviest_client is None
    assert str(found) == "train loss: mean 2.000, worst 3.000 (c)"


def test_very_many_clients_are_looked_at_without_their_rows() -> None:
    names = [row["client"] for row in CLIENTS]
    scores = Scores(("validation.accuracy",), np.arange(3), np.array([[0.9], [0.5], [0.7]]))
    rows = Evaluation.of(3, names, [0, 1, 2], [scores], {"weight": np.array([0.2, 0.3, 0.5])})
    assert seen(ROW, rows) == seen(ROW, CLIENTS)


def show(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    """What the display writes in a run of three rounds."""
    file = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=file, force_terminal=terminal, width=100, _environ={})
    )
    bar = Progress(3, "[b]mine")
    bar.started()
    for number in (1, 2, 3):
        bar.evaluated({**ROW, "round": number}, CLIENTS)
        bar.round_done(number)
    bar.failed(RuntimeError())
    return file.getvalue()


def test_a_terminal_sees_round_mean_worst_and_heaviest(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(monkeypatch, terminal=True)
    assert "[b]mine" in text and "3/3" in text
    assert "mean 0.700, worst 0.500 (b); heaviest c 0.500" in text


def test_a_pipe_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, terminal=False) == ""


def test_a_line_of_json_an_evaluated_round(three_clients: cf.FederatedData, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 3).double()
    cf.fit(model, three_clients, cf.FedAvg(), rounds=3, eval_every=2, callbacks=[JsonLines(3, "mine")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line.get("round")) for line in lines] == [("round", 2), ("round", 3), ("finished", None)]
    assert lines[0]["run"] == "mine" and lines[0]["rounds"] == 3 and lines[0]["seconds"] >= 0
    assert {"validation.accuracy.worst", "worst_client", "heaviest_client"} <= lines[0].keys()
    assert lines[2]["validation"]["accuracy"]["worst"] == lines[1]["validation.accuracy.worst"]


def test_an_unknown_log() -> None:
    with pytest.raises(ConfigError, match=r"--log is 'jsn'.*did you mean 'json'"):
        make_progress("jsn", 3)


# Watching from outside.


def follower(path: Path, terminal: bool = False) -> tuple[RunWatcher, io.StringIO]:
    file = io.StringIO()
    return RunWatcher(path, Console(file=file, force_terminal=terminal, width=100, _environ={})), file


def copy_round(source: Path, folder: Path, number: int) -> None:
    for name in ("rounds.jsonl", "clients.jsonl"):
        lines = (source / name).read_text().splitlines(True)
        with (folder / name).open("a") as file:
            file.writelines(line for line in lines if json.loads(line)["round"] == number)


def test_watch_waits_for_a_run_and_follows_it_to_its_end(tmp_path: Path) -> None:
    whole, run = write_run(tmp_path / "whole"), tmp_path / "run"
    watched, said = follower(run)
    steps, held = iter([0, 1, 2, 4, "end"]), []

    def go_on(_: float) -> None:
        """What happens while the watcher waits."""
        step = next(steps)
        if step == 0:
            run.mkdir()
            held.append(take_lock(run))
            (run / "config.toml").write_bytes((whole / "config.toml").read_bytes())
        elif step == "end":
            (run / "summary.json").write_bytes((whole / "summary.json").read_bytes())
            release_lock(run, held.pop())
        else:
            copy_round(whole, run, step)

    watched.follow(wait=go_on)
    lines = said.getvalue().splitlines()
    assert lines[0] == f"Waiting for a run in {run} (Ctrl-C to stop)"
    assert [line.split(",")[0] for line in lines[1:-1]] == [f"run: round {number}/4" for number in (1, 2, 4)]
    assert "worst" in lines[1] and "(c)" in lines[1] and "\x1b" not in said.getvalue()
    assert lines[-1] == "run: finished"


def test_watch_says_at_once_that_there_is_no_such_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error: it waited as if the run was yet to begin."""
    monkeypatch.setattr(RunWatcher, "follow", lambda watcher: None)
    write_run(tmp_path / "robust")
    watch(tmp_path / "robst")
    assert (
        capsys.readouterr().err == f"There is no folder {tmp_path / 'robst'} yet; did you mean {tmp_path / 'robust'}?\n"
    )
    watch(tmp_path / "other" / "run")
    assert capsys.readouterr().err == f"There is no folder {tmp_path / 'other' / 'run'} yet.\n"
    watch(tmp_path / "robust")
    assert capsys.readouterr().err == ""


def test_watch_says_where_a_run_was_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=(1, 2), done=False)
    watched, said = follower(run)
    watched.follow(wait=lambda _: pytest.fail("nobody writes it any more"))
    assert said.getvalue().splitlines()[-1] == "run: stopped at round 2; continue with comfedl run --resume"


def test_watch_in_a_terminal_and_of_several_runs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "out" / name)
    watched, said = follower(tmp_path / "out", terminal=True)
    with watched._bar:
        assert not watched.poll()  # others may begin
    text = said.getvalue()
    assert "one" in text and "two: finished" in text and "4/4" in text


# The page's server.


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with make_server([tmp_path / "run"], "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: Any, path: str, **headers: str) -> tuple[int, bytes]:
    address = f"http://127.0.0.1:{server.server_address[1]}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def test_the_server_gives_the_page_its_data_and_nothing_else(server: Any, tmp_path: Path) -> None:
    status, text = ask(server, "/data.json?seen=")
    assert status == 200 and json.loads(text)["waiting"]
    write_run(tmp_path / "run")
    deadline = time.monotonic() + 60
    while "waiting" in (held := json.loads(ask(server, "/data.json")[1])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert held["methods"][0]["curves"]["validation.accuracy.worst"]["rounds"] == [1, 2, 4] and held["done"]
    assert ask(server, f"/data.json?seen={held['version']}") == (204, b"")
    status, page = ask(server, "/")
    assert status == 200 and b"connect-src 'self'" in page
    for path in ("/run", "/run/config.toml", "/../run/config.toml", "/favicon.ico", "/data.json/x"):
        assert ask(server, path)[0] == 404, path


def test_another_sites_name_is_turned_away(server: Any) -> None:
    """A page of another site could have its name point to this machine, and read what is served here."""
    assert ask(server, "/data.json", Host="evil.example")[0] == 403
    assert ask(server, "/data.json", Host="localhost:1")[0] == 200


def test_a_port_that_is_taken(server: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.server_address[1]} cannot be listened on"):
        make_server([tmp_path], "127.0.0.1", server.server_address[1])


def test_watch_from_the_command_line(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "comfedl", "watch"]
    done = subprocess.run([*command, "run"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run: round 4/4, validation accuracy: mean ") and "run: finished" in done.stdout
    file = subprocess.run(
        [*command, "run/config.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert file.returncode == 2 and "is a file" in file.stderr


# Many runs: searches and figures.


def test_a_search_in_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    watch = SearchProgress(2, 4, "validation.accuracy.worst", "json")
    watch.start()
    watch.step_done(0, 2, str(seen(ROW, CLIENTS)))
    watch.trial_done(0, 1, 0.5)
    watch.stop()
    out, err = capsys.readouterr()
    step, trial = (json.loads(line) for line in out.splitlines())
    assert (step["event"], step["trial"], step["step"], step["steps"]) == ("step", 0, 2, 4)
    assert "heaviest c 0.500" in step["said"]
    assert trial == {
        "event": "trial", "trial": 0, "done": 1, "trials": 2, "metric": "validation.accuracy.worst", "best": 0.5,
    }  # fmt: skip
    assert err == ""
    with pytest.raises(ConfigError, match="--log is 'xml'"):
        SearchProgress(2, 4, "validation.accuracy.worst", "xml")


def test_a_search_in_a_terminal_says_how_its_trial_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(
        "comfedl.tuning.progress.Console", lambda **_: Console(file=file, force_terminal=True, width=120, _environ={})
    )
    watch = SearchProgress(2, 4, "validation.accuracy.worst")
    watch.start()
    watch.step_done(7, 2, str(seen(ROW, CLIENTS)))
    watch.stop()
    assert "trial 7, step 2/4; validation accuracy: mean 0.700, worst 0.500 (b); heaviest c 0.500" in file.getvalue()


@pytest.mark.parametrize("log", ["bar", "json"])
def test_runs_of_a_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: str) -> None:
    file = io.StringIO()
    monkeypatch.setattr(runner, "Console", lambda **_: Console(file=file, force_terminal=True, width=120, _environ={}))
    with runner._progress_bar("tuning", 10.0, log) as show:
        for steps, done in ((2.0, 0), (5.0, 1), (7.0, 1), (10.0, 2)):
            show(steps, done, 2, f"comfedl, seed 1, round {steps:g}/10; {seen(ROW, CLIENTS)}")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    if log == "json":
        assert [(line["event"], line["done"], line["share"]) for line in lines] == [("runs", 1, 0.5), ("runs", 2, 1.0)]
        assert file.getvalue() == ""
    else:
        assert lines == [] and "heaviest c 0.500" in file.getvalue() and "2 of 2 runs" in file.getvalue()
