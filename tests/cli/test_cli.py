"""The command line as a new user meets it: what it prints, what it writes, and every mistake as one message."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import comfedl
from comfedl.data.download import File, Mirror
from comfedl.data.registry import SOURCES, RawData, Source

with warnings.catch_warnings():  # typer 0.20 imports what click 8.5 calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from comfedl.cli import demo, main

CONFIG = """
rounds = 3
seed = 0
clients_per_round = 2
eval_every = 2
[data]
name = "digits"
partition = "imbalanced"
clients = 3
large = 60
small = 20
[model]
name = "logistic"
[algorithm]
name = "comfedl"
lr = 0.1
local_steps = 2
batch_size = 10
outer = { name = "kl", gamma = 0.2 }
"""
OWN = {"config.toml", "rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors", "personal", "checkpoint"}
OWN |= {".lock", "clients_table.jsonl", "data.sha256"}


@dataclass
class Done:
    """What a command has said, and its exit code."""

    code: int
    out: str
    err: str

    def refused(self, *words: str, lines: int = 1) -> None:
        """One readable message, exit code 2, and nothing else."""
        assert self.code == 2, self
        assert "Traceback" not in self.err and "Traceback" not in self.out
        assert self.out == ""
        assert self.err.startswith("error: ")
        assert len(self.err.strip().splitlines()) == lines, self.err
        assert [word for word in words if word not in self.err] == [], self.err

    def misused(self, *words: str) -> None:
        """A usage message, as of any command line."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        assert [word for word in words if word not in self.err] == [], self.err


Run = Callable[..., Done]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a config and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMFEDL_DATA", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def comfedl_(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process; an error that it does not turn into a message fails the test."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["comfedl", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    return call


def process(*arguments: str, cwd: Path, python: tuple[str, ...] = ()) -> Done:
    """The command line as it is: a process of its own."""
    done = subprocess.run(
        [sys.executable, *python, "-m", "comfedl", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts and path.name not in (".lock", "seconds.json")  # the same for equal runs
    }


def changes(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


# In processes of their own: few, for each has to import torch.


def test_help_answers_without_torch(here: Path) -> None:
    done = process("--help", cwd=here, python=("-X", "importtime"))
    assert done.code == 0
    for command in ("demo", "run", "list", "data"):
        assert command in done.out
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines() if "|" in line}
    assert "comfedl.cli" in imported
    assert imported & {"torch", "numpy", "sklearn", "pydantic", "safetensors"} == set()


def test_a_mistake_in_a_process_of_its_own(here: Path) -> None:
    before = content(here)
    done = process("run", "run.toml", "--set", "algorithm.learning_rate=1", "--out", "new/run", cwd=here)
    done.refused("algorithm.learning_rate", "did you mean 'lr'?")
    assert content(here) == before


def test_the_config_of_a_run_gives_the_same_run_in_another_process(here: Path, comfedl_: Run) -> None:
    assert comfedl_("run", "run.toml", "--out", "first").code == 0
    done = process("run", "first/config.toml", "--out", "second", cwd=here)
    assert done.code == 0, done
    assert "Written to second" in done.out
    for name in ("model.safetensors", "rounds.jsonl", "clients.jsonl", "config.toml"):
        assert (here / "first" / name).read_bytes() == (here / "second" / name).read_bytes(), name


def test_a_model_in_the_working_folder(here: Path) -> None:
    """``comfedl run`` is a script: unlike ``python -m``, Python does not look into the current folder for it (-P)."""
    (here / "my_model.py").write_text(
        "from torch import nn\n\n\ndef make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    done = process("run", "run.toml", "--set", "model.name=my_model:make", cwd=here, python=("-P",))
    assert done.code == 0, done.err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_control_c_in_the_middle_of_a_run(here: Path, comfedl_: Run) -> None:
    assert comfedl_("run", "run.toml", "--out", "run").code == 0
    before = content(here)
    command = ["run", "run.toml", "--out", "run", "--force", *changes("rounds=1000000", "eval_every=10")]
    with subprocess.Popen(
        [sys.executable, "-m", "comfedl", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        rows = here / "run" / "rounds.jsonl"
        deadline = time.monotonic() + 40
        while not rows.exists() or len(rows.read_bytes().splitlines()) < 4:  # the old run has two
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert content(here) != before
    assert "Traceback" not in err and out == ""
    assert re.search(r"interrupted: stopped by SIGINT after round \d+ of 1000000; .* continue with --resume", err), err
    # The round it was in has been finished and kept, and the run that it replaces is gone for good.
    assert list((here / "run" / "checkpoint").glob("round-*"))
    assert {path.name for path in (here / "run").glob(".*")} <= {".lock"}


def test_the_demo(here: Path) -> None:
    started = time.monotonic()
    done = process("demo", cwd=here)
    assert done.code == 0, done.err
    assert time.monotonic() - started < 60
    assert "Traceback" not in done.err
    words = ("average client", "worst client", *demo.METHODS, "Written to comfedl-demo")
    assert [word for word in words if word not in done.out] == []
    accuracies = {}
    for name in demo.FOLDERS.values():
        folder = here / "comfedl-demo" / name
        assert {path.name for path in folder.iterdir()} == OWN
        accuracies[name] = json.loads((folder / "summary.json").read_text())["validation"]["accuracy"]
        for key in ("mean", "worst"):
            assert f"{accuracies[name][key]:.3f}" in done.out
    assert accuracies["robust"]["worst"] > accuracies["uniform"]["worst"] > accuracies["fedavg"]["worst"]
    assert "Report: comfedl-demo/report.html" in done.out.replace(os.sep, "/")
    page = (here / "comfedl-demo" / "report.html").read_text(encoding="utf-8")
    assert "Validation accuracy of the worst client: " in page


# The demo again, with fewer rounds.


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.COMMON, "rounds", 2)


@pytest.mark.usefixtures("short_demo")
def test_the_demo_twice(here: Path, comfedl_: Run) -> None:
    for _ in range(2):
        done = comfedl_("demo")
        assert done.code == 0 and "Written to comfedl-demo" in done.out
    assert {path.name for path in (here / "comfedl-demo").iterdir()} == {*demo.FOLDERS.values(), "report.html"}
    assert {path.name for path in (here / "comfedl-demo" / "robust").iterdir()} == OWN


def test_the_demo_with_another_seed(here: Path) -> None:
    """Other sites; the methods differ in nothing but their weights, and a run can be repeated from its config."""
    assert process("demo", "--seed", "7", "--out", "seven", cwd=here).code == 0
    first, second = (
        tomllib.loads((here / "seven" / name / "config.toml").read_text()) for name in ("uniform", "robust")
    )
    assert first["seed"] == second["seed"] == 7
    for key in ("lr", "local_steps", "batch_size", "server_optimizer", "server_average"):
        assert first["algorithm"][key] == second["algorithm"][key]
    assert process("run", "seven/robust/config.toml", "--out", "again", cwd=here).code == 0
    again, before = (here / name / "model.safetensors" for name in ("again", "seven/robust"))
    assert again.read_bytes() == before.read_bytes()
    evaluated = process("evaluate", "seven/robust", cwd=here)  # without --trust: the demo's sites are the library's own
    assert evaluated.code == 0 and "island" in evaluated.out, evaluated.err


@pytest.mark.usefixtures("short_demo")
def test_the_demo_in_a_folder_of_the_users_choice(here: Path, comfedl_: Run) -> None:
    assert comfedl_("demo", "--out", "some/where").code == 0
    before = content(here)
    comfedl_("demo", "--out", "some/where").refused("some/where/fedavg", "already holds a run", "--force")
    assert content(here) == before
    assert comfedl_("demo", "--out", "some/where", "--force").code == 0


@pytest.mark.usefixtures("short_demo")
def test_the_demo_where_it_cannot_write(here: Path, comfedl_: Run) -> None:
    (here / "file").write_text("mine")
    before = content(here)
    done = comfedl_("demo", "--out", "file")
    assert done.code == 2 and done.err.startswith("error: file") and "Traceback" not in done.err
    assert content(here) == before


# A run that is right.


def test_a_run_says_what_came_out_and_where_it_is(here: Path, comfedl_: Run) -> None:
    done = comfedl_("run", "run.toml")
    assert done.code == 0
    assert "Written to runs/run" in done.out.replace(os.sep, "/")
    assert done.err == ""  # no bar where there is no terminal
    summary = json.loads((here / "runs" / "run" / "summary.json").read_text())
    for split in ("train", "validation", "test"):
        for metric in ("loss", "accuracy"):
            assert f"{split} {metric}" in done.out
            assert f"{summary[split][metric]['worst']:.4f}" in done.out
    assert "after 3 rounds" in done.out and "worst client" in done.out
    assert {path.name for path in (here / "runs" / "run").iterdir()} == OWN
    assert (here / "run.toml").read_text() == CONFIG


def test_the_rows_of_a_run(here: Path, comfedl_: Run) -> None:
    comfedl_("run", "run.toml", "--out", "run")
    rounds = [json.loads(line) for line in (here / "run" / "rounds.jsonl").read_text().splitlines()]
    clients = [json.loads(line) for line in (here / "run" / "clients.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rounds] == [2, 3]
    assert [(row["round"], row["client"]) for row in clients] == [
        (number, f"client-{i}") for number in (2, 3) for i in range(3)
    ]
    keys = {"round", "train.loss.mean", "validation.accuracy.worst", "test.accuracy.worst10", "objective"}
    assert keys | {"effective_clients", "up_bytes", "down_bytes"} <= set(rounds[0])
    assert {"round", "client", "train.loss", "validation.accuracy", "test.loss", "weight"} <= set(clients[0])
    for number in (2, 3):
        assert sum(row["weight"] > 0 for row in clients if row["round"] == number) <= 2
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["traffic"] == {"up_bytes": rounds[-1]["up_bytes"], "down_bytes": rounds[-1]["down_bytes"]}
    assert summary["traffic"]["down_bytes"] == 3 * 2 * 650 * 4


def test_the_config_of_a_run_is_complete(here: Path, comfedl_: Run) -> None:
    (here / "least.toml").write_text('rounds = 1\n[data]\nname = "digits"\n[algorithm]\nname = "comfedl"\n')
    assert comfedl_("run", "least.toml", "--out", "run").code == 0
    written = tomllib.loads((here / "run" / "config.toml").read_text())
    assert {"rounds", "seed", "eval_every", "engine", "data", "model", "algorithm"} <= set(written)
    assert written["data"] | {"name": "digits", "validation": 0.2, "test": 0.2} == written["data"]
    assert written["model"]["name"] == "logistic"
    assert written["algorithm"] | {"lr": 0.1, "local_steps": 5, "batch_size": 32} == written["algorithm"]


def test_set_on_the_command_line(here: Path, comfedl_: Run) -> None:
    pairs = changes(
        "rounds=1", "algorithm.outer.gamma=0.5", "algorithm.lr=1", "model={name='mlp', hidden=[4]}", "data.test=0"
    )
    assert comfedl_("run", "run.toml", "--out", "run", *pairs).code == 0
    written = tomllib.loads((here / "run" / "config.toml").read_text())
    assert written["rounds"] == 1 and written["data"]["test"] == 0
    assert written["algorithm"]["outer"] == {"name": "kl", "gamma": 0.5} and written["algorithm"]["lr"] == 1
    assert written["model"] == {"name": "mlp", "hidden": [4]}


@pytest.mark.parametrize(
    "pairs",
    [
        ['algorithm={name="fedavg"}'],
        ['algorithm={name="comfedl", inner={lr=0.05}, outer={name="kl", gamma=1}}'],
        ["model.name=cnn4", "model.filters=2"],
        ["model.name=mlp"],
        ['data={name="digits", partition="dirichlet", clients=3, alpha=0.3}'],
        ["data.validation=0", "data.test=0"],
        ["eval_every=100"],
        ["seed=123456789"],
    ],
)
def test_what_a_new_user_may_try_next(here: Path, comfedl_: Run, pairs: list[str]) -> None:
    done = comfedl_("run", "run.toml", "--out", "run", *changes("rounds=2", *pairs))
    assert done.code == 0, done.err
    first = content(here / "run")
    assert comfedl_("run", "run/config.toml", "--out", "again").code == 0
    again = content(here / "again")
    assert set(first) == set(again)
    assert [name for name in first if first[name] != again[name]] in ([], ["summary.json"])


# A run that is refused: one message, exit code 2, nothing written.


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["round=5"], ["round", "did you mean 'rounds'?"]),
        (["algorithm.gama=5"], ["algorithm.gama"]),
        (["algorithm.outer.gama=5"], ["algorithm.outer.gama", "did you mean 'gamma'?"]),
        (["algorithm.name=comfdl"], ["'comfdl'", "did you mean 'comfedl'?"]),
        (["data.name=digitz"], ["'digitz'", "did you mean 'digits'?"]),
        (["data.partition=imbalance"], ["'imbalance'", "did you mean 'imbalanced'?"]),
        (["model.name=logstic"], ["'logstic'", "did you mean 'logistic'?"]),
        (["engine=embeded"], ["'embeded'", "did you mean 'embedded'?"]),
        (["algorithm.outer.gamma=0"], ["gamma", "above 0"]),
        (["algorithm.outer.gamma=-1"], ["gamma", "-1", "above 0"]),
        (["algorithm.lr=0"], ["lr", "above 0"]),
        (["algorithm.lr=-0.5"], ["lr", "-0.5", "above 0"]),
        (["algorithm.lr=abc"], ["algorithm.lr", "'abc'", "number"]),
        (["algorithm.local_steps=0"], ["local_steps", "1 or more"]),
        (["clients_per_round=4"], ["clients_per_round", "4", "3 clients"]),
        (["rounds=0"], ["rounds", "1 or more"]),
        (["rounds=1.5"], ["rounds", "1.5", "integer"]),
        (["seed=-1"], ["seed", "-1", "0 or more"]),
        (["seed=100000000000000000000"], ["seed"]),
        (["algorithm.batch_size=0"], ["batch_size", "1 or more"]),
        (["algorithm.outer=kl"], ["algorithm.outer", "'kl'", '{ name = "kl"']),
        (['algorithm.outer={name="kl"}'], ["gamma or effective_clients", "neither"]),
        (['algorithm.outer={name="exp"}'], ["gamma", "missing"]),
        (["data.large=5000"], ["5040", "fewer"]),
        (["model.name=my_missing_module:make"], ["my_missing_module"]),
        (["model.name=math:pi"], ["math:pi"]),
        (["algorithm.lr=1e300"], ["Round 1", "client 'client-", "smaller lr"]),
        (['algorithm.outer={name="exp", gamma=0.001}'], ["Round 1", "client 'client-", "KL(gamma=0.001)"]),
        (["algorithm.lr"], ["--set 'algorithm.lr'", "a.b=value"]),
    ],
)
def test_a_run_that_is_refused(here: Path, comfedl_: Run, pairs: list[str], words: list[str]) -> None:
    before = content(here)
    comfedl_("run", "run.toml", "--out", "new/run", *changes(*pairs)).refused(*words)
    assert content(here) == before


def test_a_folder_that_holds_a_run_is_refused_unless_forced(here: Path, comfedl_: Run) -> None:
    assert comfedl_("run", "run.toml").code == 0
    before = content(here)
    comfedl_("run", "run.toml").refused("already holds a run", "--force")
    assert content(here) == before
    assert comfedl_("run", "run.toml", "--force", *changes("seed=1")).code == 0
    assert content(here / "runs") != before
    assert {path.name for path in (here / "runs" / "run").iterdir()} == OWN


@pytest.mark.parametrize("pair", ["algorithm.lr=1e300", "rounds=0", "data.large=5000", "algorithm.name=no"])
def test_a_forced_run_that_fails_leaves_the_old_one(here: Path, comfedl_: Run, pair: str) -> None:
    assert comfedl_("run", "run.toml").code == 0
    (here / "runs" / "run" / "checkpoint" / "state").write_bytes(b"\x00")
    before = content(here)
    comfedl_("run", "run.toml", "--force", *changes(pair)).refused()
    assert content(here) == before


@pytest.mark.parametrize("out", ["file", "file/below", "n" * 300])
def test_an_output_that_cannot_be_a_folder(here: Path, comfedl_: Run, out: str) -> None:
    (here / "file").write_text("mine")
    before = content(here)
    comfedl_("run", "run.toml", "--out", out).refused(out)
    assert content(here) == before


def test_a_config_that_lies_in_the_folder_to_write_to_is_not_called_a_run(here: Path, comfedl_: Run) -> None:
    """``comfedl run config.toml --out .``: nothing has been run yet, and --force would replace the config."""
    (here / "project").mkdir()
    (here / "project" / "config.toml").write_text(CONFIG)
    before = content(here)
    done = comfedl_("run", "project/config.toml", "--out", "project")
    done.refused("config.toml")
    assert "already holds a run" not in done.err
    assert content(here) == before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.toml", None, ["missing.toml", "no config file"]),
        ("folder", "", ["folder", "cannot be read"]),
        ("broken.toml", b"rounds = = 1", ["broken.toml", "not TOML", "line 1"]),
        ("binary.toml", b"\x80\xff\x00", ["binary.toml", "cannot be read"]),
        ("empty.toml", b"", ["data is missing", "[data]"]),
    ],
)
@pytest.mark.parametrize("command", [["run"], ["data", "describe"]])
def test_a_config_that_cannot_be_read(
    here: Path, comfedl_: Run, command: list[str], name: str, text: bytes | str | None, words: list[str]
) -> None:
    if isinstance(text, bytes):
        (here / name).write_bytes(text)
    elif text is not None:
        (here / name).mkdir()
    before = content(here)
    comfedl_(*command, name).refused(*words)
    assert content(here) == before


# Data sets that are not as they should be.

BYTES = b"the bytes of a data set" * 3
FILE = File("all.bin", len(BYTES), f"sha256:{hashlib.sha256(BYTES).hexdigest()}")
MADE_UP = changes('data={name="made-up", partition="iid", clients=3}', "clients_per_round=3")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Register the data set "made-up"; returns the list of what is fetched."""

    def register(brings: bytes = BYTES, classes: int = 3, spoil: Callable[[Any], None] | None = None) -> list[str]:
        fetched: list[str] = []

        def get(job: Any) -> dict[str, bytes]:
            fetched.extend(file.name for file in job.wanted)
            return {FILE.name: brings}

        def decode(contents: Any) -> RawData:
            x = np.random.default_rng(0).normal(size=(90, 1, 4, 4)).astype(np.float32)
            if spoil is not None:
                spoil(x)
            return RawData(x, np.arange(90) % 3, 3)

        source = Source("made-up", "for tests", 90, (1, 4, 4), classes, "little", decode, (FILE,), (Mirror("a", get),))
        monkeypatch.setitem(SOURCES, "made-up", source)
        return fetched

    return register


def test_a_damaged_file_of_the_cache_is_fetched_anew(
    here: Path, comfedl_: Run, made_up: Callable[..., list[str]]
) -> None:
    fetched = made_up()
    assert comfedl_("run", "run.toml", "--out", "one", *MADE_UP).code == 0
    assert comfedl_("run", "run.toml", "--out", "two", *MADE_UP).code == 0
    assert fetched == ["all.bin"]
    for number, damage in enumerate((b"short", BYTES[::-1])):
        (here / "cache" / "made-up" / "all.bin").write_bytes(damage)
        with pytest.warns(UserWarning, match="damaged"):
            assert comfedl_("run", "run.toml", "--out", f"again-{number}", *MADE_UP).code == 0
        assert (here / "cache" / "made-up" / "all.bin").read_bytes() == BYTES
    assert fetched == ["all.bin"] * 3
    assert (here / "one" / "model.safetensors").read_bytes() == (here / "again-1" / "model.safetensors").read_bytes()


def test_a_checksum_that_does_not_match(here: Path, comfedl_: Run, made_up: Callable[..., list[str]]) -> None:
    made_up(brings=BYTES[::-1])
    for command in (["run", "run.toml", "--out", "new/run", *MADE_UP], ["data", "fetch", "made-up"]):
        done = comfedl_(*command)
        assert done.code == 2 and done.out == "" and "Traceback" not in done.err
        assert done.err.startswith("error: The data set 'made-up'")
        assert "wrong checksum" in done.err and FILE.checksum in done.err and "all.bin" in done.err
        assert not (here / "new").exists()
        assert [path for path in (here / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(
    here: Path, comfedl_: Run, made_up: Callable[..., list[str]], number: float
) -> None:
    def spoil(x: Any) -> None:
        x[:, 0, 0, 0] = number  # one in each sample

    made_up(spoil=spoil)
    done = comfedl_("run", "run.toml", "--out", "new/run", *MADE_UP)
    done.refused("client-0", "NaN or infinite", "train")
    assert re.search(r"Client 'client-0' has \d+ NaN or infinite values", done.err)
    assert not (here / "new").exists()


def test_labels_outside_the_models_range(here: Path, comfedl_: Run, made_up: Callable[..., list[str]]) -> None:
    made_up(classes=2)
    done = comfedl_("run", "run.toml", "--out", "new/run", *MADE_UP)
    done.refused("label 2", "'client-0'", "2 outputs", "0 to 1")
    assert not (here / "new").exists()


def test_a_model_of_the_user_that_raises(here: Path, comfedl_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "raising_model.py").write_text("def make(shape, classes):\n    raise ValueError('no such width')\n")
    monkeypatch.syspath_prepend(str(here))
    before = content(here)
    done = comfedl_("run", "run.toml", "--out", "new/run", "--set", "model.name=raising_model:make")
    done.refused("raising_model:make", "no such width")
    assert content(here) == before


# Several configs.


def test_compare_shows_methods_side_by_side(here: Path, comfedl_: Run) -> None:
    plain = CONFIG.replace('"comfedl"', '"fedavg"').replace("outer =", "# outer =")
    (here / "plain.toml").write_text(plain)
    done = comfedl_("compare", "run.toml", "plain.toml", "--seeds", "2", "--out", "both")
    assert done.code == 0, done.err
    assert "worst client" in done.out and "over 2 seeds" in done.out and "Written to both" in done.out
    for name in ("run", "plain"):
        for seed in (0, 1):
            assert {path.name for path in (here / "both" / name / f"seed-{seed}").iterdir()} == OWN
    lines = (here / "both" / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 and "validation.accuracy.worst" in lines[0]
    before = content(here)
    comfedl_("compare", "run.toml", "plain.toml", "--seeds", "2", "--out", "both").refused("already holds a run")
    assert content(here) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run.toml", "other.toml"], ["seed", "0 and 1"]),
        (["run.toml", "missing.toml"], ["missing.toml"]),
        (["run.toml", "sub/run.toml"], ["same file name"]),
        (["run.toml", "--seeds", "0"], ["seeds", "1 or more"]),
        (["run.toml", "--split", "val"], ["split", "'val'", "validation"]),
    ],
)
def test_a_comparison_that_is_refused(here: Path, comfedl_: Run, arguments: list[str], words: list[str]) -> None:
    (here / "other.toml").write_text(CONFIG.replace("seed = 0", "seed = 1"))
    (here / "sub").mkdir()
    (here / "sub" / "run.toml").write_text(CONFIG)
    before = content(here)
    comfedl_("compare", *arguments, "--out", "new/both").refused(*words)
    assert content(here) == before


def test_a_comparison_in_which_one_method_fails_names_it(here: Path, comfedl_: Run) -> None:
    (here / "wild.toml").write_text(CONFIG.replace("lr = 0.1", "lr = 1e300"))
    comfedl_("compare", "run.toml", "wild.toml", "--out", "both").refused("Round 1", "client 'client-", "wild")


# Lists and data.


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("algorithms", ["fedavg", "comfedl"]),
        ("datasets", ["digits", "mnist", "fashion-mnist", "cifar10", "watch", "adult", "flights", "carrier", "phd"]),
        ("partitions", ["iid", "imbalanced", "dominant-class", "dirichlet", "shards", "natural", "rho", "alpha"]),
        ("losses", ["cross_entropy", "bce", "mse", "mae", "huber", "focal", "class_weights", "label_smoothing"]),
        ("models", ["logistic", "mlp", "cnn4", "hidden", "filters", "norm"]),
    ],
)
def test_lists(comfedl_: Run, what: str, names: list[str]) -> None:
    done = comfedl_("list", what)
    assert done.code == 0 and done.err == ""
    assert [name for name in names if name not in done.out] == []


@pytest.mark.parametrize(("what", "meant"), [("algorithm", "algorithms"), ("dataset", "datasets"), ("model", "models")])
def test_a_list_that_is_not_there(comfedl_: Run, what: str, meant: str) -> None:
    comfedl_("list", what).refused(f"{what!r}", f"did you mean '{meant}'?")


def test_data_list_says_what_would_be_fetched(here: Path, comfedl_: Run) -> None:
    done = comfedl_("data", "list")
    assert done.code == 0
    assert all(name in done.out for name in SOURCES)
    assert "not needed" in done.out and "MB" in done.out
    assert not (here / "cache").exists()


def test_data_fetch_of_what_needs_no_fetching(here: Path, comfedl_: Run) -> None:
    done = comfedl_("data", "fetch", "digits")
    assert done.code == 0 and "digits is ready" in done.out
    assert not (here / "cache").exists()


def test_data_fetch_says_where_it_is(here: Path, comfedl_: Run, made_up: Callable[..., list[str]]) -> None:
    fetched = made_up()
    for _ in range(2):
        done = comfedl_("data", "fetch", "made-up")
        assert done.code == 0 and str(here / "cache" / "made-up") in done.out
    assert fetched == ["all.bin"]
    assert comfedl_("data", "fetch", "made-up", "--force").code == 0
    assert fetched == ["all.bin"] * 2


@pytest.mark.parametrize("name", ["digitz", "Digits"])
def test_data_fetch_of_what_is_not_there(here: Path, comfedl_: Run, name: str) -> None:
    comfedl_("data", "fetch", name).refused(f"'{name}'", "did you mean 'digits'?")
    assert not (here / "cache").exists()


def test_data_describe_counts_what_each_client_holds(here: Path, comfedl_: Run) -> None:
    done = comfedl_("data", "describe", "run.toml", *changes("data.large_client=1"))
    assert done.code == 0
    rows = [line.split("│")[1:] for line in done.out.splitlines() if "client-" in line]
    assert [row[0].strip() for row in rows] == ["client-0", "client-1", "client-2"]
    assert [int(row[1]) for row in rows] == [20, 60, 20]
    for row in rows:
        assert sum(int(pair.split(":")[1]) for pair in row[4].split()) == int(row[1])


def test_data_describe_needs_no_more_than_the_data(here: Path, comfedl_: Run) -> None:
    """Its help asks for "a TOML file with a [data] table"."""
    (here / "data.toml").write_text('[data]\nname = "digits"\n')
    done = comfedl_("data", "describe", "data.toml")
    assert done.code == 0, done.err
    assert "client-9" in done.out


# Misuse.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["CONFIG"]),
        (["run", "run.toml", "--out"], ["--out"]),
        (["run", "run.toml", "--set"], ["--set"]),
        (["run", "run.toml", "--lr", "3"], ["--lr"]),
        (["run", "run.toml", "rounds=3"], ["rounds=3"]),
        (["rnu", "run.toml"], ["rnu", "run"]),
        (["list"], ["WHAT"]),
        (["data", "fetch"], ["NAME"]),
        (["data", "lst"], ["lst", "list"]),
        (["demo", "extra"], ["extra"]),
        (["--verbose"], ["--verbose"]),
    ],
)
def test_misuse_is_a_usage_message(here: Path, comfedl_: Run, arguments: list[str], words: list[str]) -> None:
    before = content(here)
    comfedl_(*arguments).misused(*words)
    assert content(here) == before


def test_no_command_is_a_request_for_help(comfedl_: Run) -> None:
    for arguments in ([], ["data"]):
        done = comfedl_(*arguments)
        assert "Usage" in done.out + done.err and "Traceback" not in done.err


def test_the_version(comfedl_: Run) -> None:
    done = comfedl_("--version")
    assert (done.code, done.out.strip()) == (0, comfedl.__version__)


@pytest.mark.parametrize("command", [["run"], ["demo"], ["list"], ["data"], ["data", "describe"], ["data", "fetch"]])
def test_every_command_has_help(comfedl_: Run, command: list[str]) -> None:
    done = comfedl_(*command, "--help")
    assert done.code == 0 and "Usage" in done.out


def test_a_killed_run_goes_on_from_the_command_line(here: Path, comfedl_: Run) -> None:
    """SIGKILL in the middle, then --resume: the files of a run that was never stopped."""
    slow = changes("rounds=400", "eval_every=10", "checkpoint_every=5")
    command = [sys.executable, "-m", "comfedl", "run", "run.toml", "--out", "cut", *slow]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        while not list((here / "cut" / "checkpoint").glob("round-*")):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        running.kill()
        running.communicate()
    comfedl_("run", "run.toml", "--out", "cut", *slow).refused("already holds a run", "--resume", "--force")
    assert comfedl_("run", "run.toml", "--out", "cut", "--resume", *slow).code == 0
    assert comfedl_("run", "run.toml", "--out", "whole", *slow).code == 0
    for name in ("rounds.jsonl", "clients.jsonl", "model.safetensors", "config.toml"):
        assert (here / "cut" / name).read_bytes() == (here / "whole" / name).read_bytes()


def test_a_comparison_goes_on_with_what_is_done(here: Path, comfedl_: Run) -> None:
    (here / "other.toml").write_text(CONFIG.replace("lr = 0.1", "lr = 0.2"))
    arguments = ("compare", "run.toml", "other.toml", "--out", "both", "--seeds", "2")
    assert comfedl_(*arguments).code == 0
    table = (here / "both" / "comparison.csv").read_bytes()
    kept = (here / "both" / "run" / "seed-0" / "summary.json").stat().st_mtime_ns
    (here / "both" / "other" / "seed-1" / "summary.json").unlink()
    comfedl_(*arguments).refused("already holds a run")
    assert comfedl_(*arguments, "--resume").code == 0
    assert (here / "both" / "comparison.csv").read_bytes() == table
    assert (here / "both" / "run" / "seed-0" / "summary.json").stat().st_mtime_ns == kept


@pytest.mark.parametrize("change", ["seed=abc", "rouns=3", "loss=-1"])
def test_data_describe_refuses_what_a_run_would(here: Path, comfedl_: Run, change: str) -> None:
    comfedl_("data", "describe", "run.toml", "--set", change).refused(change.split("=")[0])
