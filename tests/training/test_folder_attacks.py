"""What others do to a run's folder while or after it is written; the rows are those of the attacks found by hand."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import comfedl as cf
from comfedl.analysis.terminal_watch import RunWatcher
from comfedl.training import run_folder
from comfedl.utils.lock import SUPPORTED, is_locked, release_lock, still_locked, take_lock

needs_locks = pytest.mark.skipif(not SUPPORTED, reason="needs flock")


def run(fed: cf.FederatedData, out: Path, rounds: int = 4, lr: float = 0.1, **options: Any) -> cf.Result:
    torch.manual_seed(0)
    return cf.fit(nn.Linear(4, 3).double(), fed, cf.FedAvg(lr=lr), rounds=rounds, out=out, **options)


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class At(cf.Callback):
    """Does something once, after a round."""

    def __init__(self, number: int, do: Any) -> None:
        self._number, self._do = number, do

    def round_done(self, number: int) -> None:
        if number == self._number:
            self._do()


@pytest.mark.parametrize("foreign", ["checkpoint/best.pt", "personal/photo.jpg", "data.json", "model.safetensors"])
def test_row_6_a_resume_into_a_folder_without_a_run_is_refused(
    foreign: str, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """It moved these files aside, and deleted them at its end."""
    (tmp_path / "mine" / foreign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine" / foreign).write_text("mine")
    with pytest.raises(cf.RunFolderError, match=r"holds no run to resume \(no config.toml\)"):
        run(three_clients, tmp_path / "mine", resume=True)
    assert content(tmp_path / "mine") == {foreign: b"mine"}
    run(three_clients, tmp_path / "new", resume=True)  # an empty one is still started


@needs_locks
def test_row_7_the_lock_file_stays_and_a_lock_on_another_file_counts_for_nothing(tmp_path: Path) -> None:
    """A finished run removed the lock file, so that a second and a third process could each lock one of that name."""
    lock = take_lock(tmp_path)
    release_lock(tmp_path, lock)
    assert (tmp_path / ".lock").exists() and not is_locked(tmp_path)
    lock = take_lock(tmp_path)
    assert is_locked(tmp_path) and still_locked(tmp_path, lock)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").touch()
    assert not still_locked(tmp_path, lock)
    second = take_lock(tmp_path)
    release_lock(tmp_path, lock, remove=True)
    assert still_locked(tmp_path, second)  # it is not removed by one that does not hold it
    release_lock(tmp_path, second)


@needs_locks
@pytest.mark.parametrize("when", ["a checkpoint", "the end"])
def test_row_7_a_run_whose_folder_was_replaced_writes_nothing_more(
    when: str, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """The folder ended with the config and the records of one run and the model of another."""
    out = tmp_path / "run"

    def replace() -> None:
        shutil.rmtree(out)
        run(three_clients, out, rounds=2, lr=0.3)

    run(three_clients, tmp_path / "other", rounds=2, lr=0.3)
    every = 1 if when == "a checkpoint" else 1000
    with pytest.raises(cf.RunFolderError, match="was removed or replaced while this run was writing"):
        run(three_clients, out, callbacks=[At(3, replace)], checkpoint_every=every)
    names = ("config.toml", "rounds.jsonl", "clients.jsonl", "model.safetensors")
    assert [content(out)[name] for name in names] == [content(tmp_path / "other")[name] for name in names]


def killed_during(what: str, fed: cf.FederatedData, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Run with --force and leave everything as a SIGKILL would: no clean-up happens."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patched:
        patched.setattr(run_folder.RunFolder, "failed", lambda self, error: release_lock(self.path, self._lock))
        if what.startswith("move"):
            moves, number = [], int(what.split()[1])
            real = os.replace

            def replace(source: Any, target: Any) -> None:
                if run_folder.REPLACED in str(target):
                    moves.append(target)
                    if len(moves) > number:
                        raise KeyboardInterrupt
                real(source, target)

            patched.setattr(os, "replace", replace)

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(fed, out, lr=0.3, force=True, callbacks=[At(2, interrupt)], **options)
    # With a process go its handlers and open files; here the run's objects hold both.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.collect()


@needs_locks
@pytest.mark.parametrize("what", ["move 1", "move 4", "training"])
@pytest.mark.parametrize("use", ["load_run", "run"])
def test_row_16_a_killed_force_restores_the_old_run_on_the_next_use(
    what: str, use: str, three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(three_clients, out)
    before = content(out)
    killed_during(what, three_clients, out, monkeypatch, checkpoint_every=1000)
    assert any(path.name.startswith(run_folder.REPLACED) for path in out.iterdir())
    if use == "load_run":
        cf.load_run(out, nn.Linear(4, 3).double())
    else:
        with pytest.raises(cf.RunFolderError, match="already holds a run"):
            run(three_clients, out)
    assert content(out) == before


@needs_locks
def test_row_16_once_the_new_run_has_a_checkpoint_the_replaced_one_is_cleaned_up(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(three_clients, out)
    run(three_clients, tmp_path / "other", lr=0.3)
    killed_during("training", three_clients, out, monkeypatch, checkpoint_every=1)
    run(three_clients, out, lr=0.3, resume=True, checkpoint_every=1)
    assert not any(path.name.startswith(run_folder.REPLACED) for path in out.iterdir())
    same = ("rounds.jsonl", "clients.jsonl", "model.safetensors")
    assert [content(out)[name] for name in same] == [content(tmp_path / "other")[name] for name in same]


KILLED = """
import sys, time
from pathlib import Path
from comfedl.utils.lock import take_lock
held = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@needs_locks
def test_row_16_watch_ends_after_the_run_was_killed(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """The lock file of a killed run stays, so the watcher waited for ever."""
    out, said = tmp_path / "run", io.StringIO()
    run(three_clients, out)
    (out / "summary.json").unlink()
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "held\n"
    watcher = RunWatcher(out, Console(file=said, width=200))
    assert not watcher.poll()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    until = time.monotonic() + 10
    while not watcher.poll():
        assert time.monotonic() < until
    assert "stopped at round 4" in said.getvalue()


def test_row_16_the_seconds_of_a_resumed_run_add_up(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """A resumed run counted from its own start."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(three_clients, tmp_path / "run", callbacks=[At(1, lambda: time.sleep(1.0)), At(2, interrupt)])
    for rounds in (4, 6):  # stopped and gone on with, then made longer
        result = run(three_clients, tmp_path / "run", rounds=rounds, resume=True)
        assert result.seconds >= 1.0


def test_what_is_called_a_later_checkpoint_does_not_push_out_the_real_ones(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """Two folders with names that sort last made every checkpoint be deleted as soon as it was written."""

    def interrupt() -> None:
        for name in ("round-999999998", "round-odd"):
            (tmp_path / "run" / "checkpoint" / name).mkdir(exist_ok=True)

    run(three_clients, tmp_path / "run", callbacks=[At(1, interrupt)], checkpoint_every=1)
    found = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert {"round-000000003", "round-000000004"} <= found
