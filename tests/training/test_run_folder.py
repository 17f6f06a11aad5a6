"""A run folder: complete or absent; a replaced run is restored on failure, and other files are never touched."""

from __future__ import annotations

import json
import stat
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

import comfedl as cf
from comfedl.training.run_folder import write_atomic

OWN = {
    ".lock",
    "config.toml",
    "rounds.jsonl",
    "clients.jsonl",
    "clients_table.jsonl",
    "data.sha256",
    "summary.json",
    "model.safetensors",
    "personal",
    "checkpoint",
}


class Stops(cf.Callback):
    """Fails after the second round, or at the given moment."""

    def __init__(self, error: BaseException, at: str = "round_done") -> None:
        self.error, self.at = error, at

    def started(self) -> None:
        if self.at == "started":
            raise self.error

    def round_done(self, number: int) -> None:
        if self.at == "round_done" and number == 2:
            raise self.error

    def finished(self, result: cf.Result) -> None:
        if self.at == "finished":
            raise self.error


def run(fed: cf.FederatedData, out: Path | str, rounds: int = 3, lr: float = 0.1, **arguments: Any) -> cf.Result:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, arguments.pop("outputs", 3)).double()
    return cf.fit(model, fed, cf.FedAvg(lr=lr), rounds=rounds, out=out, **arguments)


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder; without the lock file, which stays with a run."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock" or path.stat().st_size
    }


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit the size of files, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def strict(text: str) -> Any:
    """JSON as the standard has it: Python's own NaN and Infinity are none."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# What is in it.


def test_what_a_folder_holds(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    result = run(three_clients, tmp_path / "run", rounds=5, eval_every=2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == OWN
    rounds = [strict(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    clients = [strict(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert rounds == result.rounds and [row["round"] for row in rounds] == [2, 4, 5]
    assert clients == result.clients and len(clients) == 9
    assert strict((tmp_path / "run" / "summary.json").read_text()) == result.summary()
    told = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (told["rounds"], told["seed"], told["eval_every"]) == (5, 0, 2)
    assert told["algorithm"]["name"] == "fedavg" and told["algorithm"]["lr"] == 0.1


def test_the_summary_has_the_documented_structure(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run")
    summary = strict((tmp_path / "run" / "summary.json").read_text())
    documented = {"rounds", "train", "validation", "traffic", "seconds"}
    assert documented <= set(summary) <= documented | {"objective", "effective_clients"}
    assert summary["rounds"] == 3 and isinstance(summary["seconds"], float)
    assert set(summary["traffic"]) == {"up_bytes", "down_bytes"}
    assert all(isinstance(number, int) for number in summary["traffic"].values())
    for split in ("train", "validation"):
        assert {"loss", "accuracy"} <= set(summary[split])
        for numbers in summary[split].values():
            assert set(numbers) == {"mean", "worst", "worst10", "std"}
            assert all(isinstance(number, float) for number in numbers.values())
    assert summary["train"]["loss"]["worst"] >= summary["train"]["loss"]["mean"]
    assert summary["train"]["accuracy"]["worst"] <= summary["train"]["accuracy"]["mean"]


def test_the_model_can_be_loaded_into_a_module(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    result = cf.fit(model, three_clients, cf.FedAvg(), rounds=2, out=tmp_path / "run")
    tensors = load((tmp_path / "run" / "model.safetensors").read_bytes())
    model.load_state_dict(tensors)
    assert set(tensors) == set(result.params) | set(result.buffers)
    assert all(torch.equal(tensors[name], part) for name, part in {**result.params, **result.buffers}.items())


def test_each_client_has_its_personal_model(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    result = run(three_clients, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "personal").iterdir()) == [
        f"{name}.safetensors" for name in "abc"
    ]
    for name in "abc":
        tensors = load((tmp_path / "run" / "personal" / f"{name}.safetensors").read_bytes())
        assert all(torch.equal(tensors[part], value) for part, value in result.personal(name).items())


@pytest.mark.parametrize(
    "name",
    [
        "../escape",
        "a/b",
        "..",
        ".",
        ".hidden",
        "C:\\x",
        "a b",
        "Spital Zürich",
        "北京协和医院",
        "a\nb",
        "%2E",
        "*",
        "日" * 80,
    ],
    ids=lambda name: name[:12].encode("ascii", "backslashreplace").decode(),
)
def test_whatever_a_client_is_called_the_run_is_written_inside_its_folder(tmp_path: Path, name: str) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fed = cf.FederatedData({name: (x, torch.arange(6) % 3), "other": (x, torch.arange(6) % 3)})
    run(fed, tmp_path / "deep" / "run", rounds=1)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]
    assert {path.name for path in (tmp_path / "deep" / "run").iterdir()} == OWN
    assert len(list((tmp_path / "deep" / "run" / "personal").iterdir())) == 2
    rows = (tmp_path / "deep" / "run" / "clients.jsonl").read_text().splitlines()
    assert {json.loads(row)["client"] for row in rows} == {name, "other"}


def test_the_rows_are_there_while_the_run_goes_on(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Watches(cf.Callback):
        def round_done(self, number: int) -> None:
            folder = tmp_path / "run"
            seen.append(
                (
                    len((folder / "rounds.jsonl").read_text().splitlines()),
                    len((folder / "clients.jsonl").read_text().splitlines()),
                )
            )
            assert (folder / "config.toml").exists() and not (folder / "summary.json").exists()

    run(three_clients, tmp_path / "run", rounds=3, callbacks=[Watches()])
    assert seen == [(1, 3), (2, 6), (3, 9)]


def test_the_same_run_gives_the_same_bytes(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "one")
    run(three_clients, str(tmp_path / "two"))
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert set(one) == set(two)
    # These two say how long it took.
    assert {name for name in one if one[name] != two[name]} <= {
        "summary.json",
        "checkpoint/round-000000003/seconds.json",
    }


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_all_files_of_a_run_can_be_read_by_the_same_people(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    (tmp_path / "plain").write_text("as everything else that the reader writes")
    plain = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert set(modes.values()) == {oct(plain)}, modes


# What is already there.


def test_a_folder_that_holds_a_run_is_refused(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run")
    before = content(tmp_path)
    with pytest.raises(cf.RunFolderError, match="already holds a run") as error:
        run(three_clients, tmp_path / "run", lr=0.2)
    assert isinstance(error.value, cf.ComfedlError) and isinstance(error.value, OSError)
    assert str(tmp_path / "run") in str(error.value) and "--force" in str(error.value)
    assert content(tmp_path) == before


@pytest.mark.parametrize("part", ["config.toml", "rounds.jsonl", "summary.json"])
def test_a_part_of_a_run_is_refused_too(three_clients: cf.FederatedData, tmp_path: Path, part: str) -> None:
    (tmp_path / part).write_text("")
    with pytest.raises(cf.RunFolderError):
        run(three_clients, tmp_path)
    assert content(tmp_path) == {part: b""}


def test_force_replaces_the_run_and_leaves_the_rest(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run", rounds=5)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "plots").mkdir()
    (tmp_path / "run" / "plots" / "loss.png").write_bytes(b"mine")
    run(three_clients, tmp_path / "run", rounds=2, force=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == OWN | {"notes.txt", "plots"}
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "plots" / "loss.png").read_bytes() == b"mine"


def test_force_of_a_folder_that_is_not_there_is_no_error(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run", force=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == OWN


def test_a_folder_of_other_things_may_hold_a_run(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run(three_clients, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == OWN | {"notes.txt"}


@pytest.mark.parametrize("force", [False, True])
def test_a_file_in_place_of_a_folder(three_clients: cf.FederatedData, tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below" / "run"):
        with pytest.raises(cf.RunFolderError) as error:
            run(three_clients, out, force=force)
        assert str(out) in str(error.value)
    assert content(tmp_path) == {"file": b"mine"}


def test_a_name_that_is_too_long(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    for out in (tmp_path / "new" / ("n" * 300), tmp_path / ("n" * 300)):
        with pytest.raises(cf.RunFolderError):
            run(three_clients, out)
    assert content(tmp_path) == {}


# A run that fails.

FAILURES: dict[str, dict[str, Any]] = {
    "diverges": {"lr": 1e308},
    "interrupted": {"callbacks": [Stops(KeyboardInterrupt())]},
    "callback raises": {"callbacks": [Stops(RuntimeError("mine"))]},
    "callback raises at the start": {"callbacks": [Stops(RuntimeError("mine"), "started")]},
    "sys.exit": {"callbacks": [Stops(SystemExit(3))]},
}


STOPS = ("interrupted", "callback raises", "sys.exit")


@pytest.mark.parametrize("failure", STOPS)
def test_a_run_that_is_stopped_is_not_lost(three_clients: cf.FederatedData, tmp_path: Path, failure: str) -> None:
    """It has the model of its last round, and goes on from there to the bit."""
    run(three_clients, tmp_path / "whole", rounds=6)
    with pytest.raises((KeyboardInterrupt, RuntimeError, SystemExit)):
        run(three_clients, tmp_path / "run", rounds=6, **FAILURES[failure])
    two = run(three_clients, tmp_path / "two", rounds=2)
    stopped = cf.load_run(tmp_path / "run", nn.Linear(4, 3).double())
    assert all(torch.equal(stopped.tensors[name], part) for name, part in two.params.items())
    assert stopped.unfinished is not None and "after round 2 of 6; continue with --resume" in stopped.unfinished
    run(three_clients, tmp_path / "run", rounds=6, resume=True)
    one, other = content(tmp_path / "whole"), content(tmp_path / "run")
    same = [name for name in one if not name.startswith("checkpoint/") and name != "summary.json"]
    assert [name for name in same if one[name] != other[name]] == []


def test_a_run_that_diverges_keeps_its_checkpoint(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    class Explodes(cf.Callback):
        def settled(self, snapshot: Any) -> None:
            if snapshot.round == 3:
                raise cf.Diverged(4, "a", 1, float("nan"), 1.0)

    with pytest.raises(cf.Diverged):
        run(three_clients, tmp_path / "run", rounds=6, checkpoint_every=2, callbacks=[Explodes()])
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["round-000000002"]
    with pytest.raises(cf.Diverged):
        run(three_clients, tmp_path / "none", rounds=6, callbacks=[Explodes()])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("failure", [failure for failure in FAILURES if failure not in STOPS])
def test_a_run_that_fails_at_once_leaves_nothing(three_clients: cf.FederatedData, tmp_path: Path, failure: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises((cf.Diverged, KeyboardInterrupt, RuntimeError, SystemExit)):
        run(three_clients, tmp_path / "there" / "new" / "newer" / "run", **FAILURES[failure])
    assert content(tmp_path) == {"there": None}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_run_that_fails_leaves_the_one_that_it_was_to_replace(
    three_clients: cf.FederatedData, tmp_path: Path, failure: str
) -> None:
    run(three_clients, tmp_path / "run", rounds=4)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "checkpoint" / "state").write_bytes(b"\x00\x01")
    before = content(tmp_path)
    with pytest.raises((cf.Diverged, KeyboardInterrupt, RuntimeError, SystemExit)):
        run(three_clients, tmp_path / "run", force=True, **FAILURES[failure])
    assert content(tmp_path) == before


@pytest.mark.parametrize("replaces", [False, True])
def test_a_callback_that_fails_at_the_very_end_costs_no_run(
    three_clients: cf.FederatedData, tmp_path: Path, replaces: bool
) -> None:
    """Either counts, that the training has ended or that it has failed; but one whole run is there afterwards."""
    if replaces:
        run(three_clients, tmp_path / "run", rounds=4)
    before = content(tmp_path)
    with pytest.raises(RuntimeError, match="mine"):
        callbacks = [Stops(RuntimeError("mine"), "finished")]
        run(three_clients, tmp_path / "run", rounds=2, force=replaces, callbacks=callbacks)
    if content(tmp_path) != before:
        assert {path.name for path in (tmp_path / "run").iterdir()} == OWN
        assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("failure", FAILURES)
def test_a_run_that_fails_leaves_what_is_not_its_own(
    three_clients: cf.FederatedData, tmp_path: Path, failure: str
) -> None:
    """The user's folder may contain files with our names; a run that did not write them must not remove them."""
    for name in ("checkpoint/best.pt", "personal/photo.jpg", "model.safetensors", "clients.jsonl", "notes.txt"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text("mine")
    before = content(tmp_path)
    with pytest.raises((cf.Diverged, KeyboardInterrupt, RuntimeError, SystemExit, cf.RunFolderError)):
        run(three_clients, tmp_path / "project", **FAILURES[failure])
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["personal", "checkpoint"])
def test_a_folder_of_the_readers_with_a_name_of_ours(
    three_clients: cf.FederatedData, tmp_path: Path, name: str
) -> None:
    """Refused before the training or kept beside it, but not an error after it, and not removed."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "photo.jpg").write_text("mine")
    try:
        run(three_clients, tmp_path)
    except cf.RunFolderError:
        assert content(tmp_path) == {name: None, f"{name}/photo.jpg": b"mine"}
    assert (tmp_path / name / "photo.jpg").read_text() == "mine"


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        (0, {}),
        (8_000, {"rounds": 60}),
        (20_000, {"rounds": 2, "eval_every": 2, "outputs": 2_000}),
    ],
    ids=["at the start", "on the way", "at the end"],
)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_full_disk(
    three_clients: cf.FederatedData, tmp_path: Path, size: int, arguments: dict[str, Any], replaces: bool
) -> None:
    out = tmp_path / "new" / "run"
    if replaces:
        run(three_clients, out, rounds=1)
    before = content(tmp_path)
    with room_for(size), pytest.raises(OSError) as error:
        run(three_clients, out, force=replaces, **arguments)
    assert content(tmp_path) == before
    assert isinstance(error.value, cf.RunFolderError)


def test_one_callback_that_cannot_clean_up_does_not_keep_others_from_it(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    class Clumsy(Stops):
        def failed(self, error: BaseException) -> None:
            raise OSError("cannot clean up")

    heard: list[BaseException] = []

    class Listener(cf.Callback):
        def failed(self, error: BaseException) -> None:
            heard.append(error)

    first = RuntimeError("the first")
    with pytest.raises((RuntimeError, OSError)):
        run(three_clients, tmp_path / "run", callbacks=[Clumsy(first), Listener()])
    assert heard == [first]
    assert {path.name for path in (tmp_path / "run").glob(".*")} <= {".lock"}  # nothing half-written


# One file.


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with room_for(100), pytest.raises(OSError):
        write_atomic(path, b"new" * 100)
    assert content(tmp_path) == {"file": b"old"}
    write_atomic(path, b"new")
    assert content(tmp_path) == {"file": b"new"}
