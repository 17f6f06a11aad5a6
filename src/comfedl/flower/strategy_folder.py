"""The folder of a strategy's run: the state after each round, and a history of metrics by round and site.

``strategy.json`` says what the run is and which sites it has, ``checkpoint/`` has the state after the last two rounds,
and ``history.jsonl`` one line per round and phase ("train", "evaluate", "server").
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from comfedl.algorithms.base import State
from comfedl.core.learner import Model
from comfedl.training import checkpoint
from comfedl.training.checkpoint import Snapshot
from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import sync, write_atomic
from comfedl.utils.lock import release_lock, take_lock
from comfedl.utils.read_back import is_whole, parse_json, read_object

ABOUT, HISTORY, CHECKPOINTS = "strategy.json", "history.jsonl", "checkpoint"
PHASES = ("train", "evaluate", "server")
Lines = dict[tuple[int, str], dict[str, Any]]


class Saved(NamedTuple):
    """A run after a round; ``nodes`` says which site each node was."""

    round: int
    state: State
    sites: list[str]
    nodes: dict[int, str]
    lines: Lines


class StrategyFolder:
    """One process at a time writes to it.

    Args:
        settings: what must be the same when the run is continued.
    """

    def __init__(self, path: Path, settings: Mapping[str, Mapping[str, str]]) -> None:
        self.path, self._settings = path, {name: dict(part) for name, part in settings.items()}
        self._lock: IO[str] | None = None
        self._written: tuple[list[str], dict[int, str]] = [], {}

    def open(self, resume: bool, like: State) -> Saved | None:
        """Lock the folder and return the run to continue; None for a new one. ``like`` is a state of its method."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; give another one as out.")
        about = self.path / ABOUT
        if not about.exists() and self.path.is_dir() and any(self.path.iterdir()):
            raise RunFolderError(f"{self.path} has files of something else; give another folder as out.")
        if about.exists() and not resume:
            raise RunFolderError(f"{self.path} has a run already; continue it with resume=True, or give another out.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(self.path)
        try:
            if about.exists():
                return self._read(like)
            self._write_about([], {})
            return None
        except BaseException:
            self.close()
            raise

    def _read(self, like: State) -> Saved | None:
        path = self.path / ABOUT
        about = read_object(path)
        for part, own in self._settings.items():
            found = about.get(part)
            before = found if isinstance(found, dict) else {}
            for name in (*own, *before):
                if own.get(name) != before.get(name):
                    raise RunFolderError(
                        f"The run in {self.path} has {name} = {before.get(name)} and the strategy {own.get(name)}; "
                        "give the same as before, or another folder as out."
                    )
        try:
            sites, nodes = about["sites"], {int(node): site for node, site in about["nodes"].items()}
            if not isinstance(sites, list) or not all(isinstance(site, str) for site in (*sites, *nodes.values())):
                raise ValueError("it names no sites")
        except (KeyError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{path} cannot be read ({error}); restore it, or give another folder.") from None
        self._written = sites, nodes
        saved = checkpoint.read(self.path / CHECKPOINTS, "", like, torch.device("cpu"))
        done = 0 if saved is None else saved.snapshot.round
        return Saved(done, like if saved is None else saved.snapshot.state, [*sites], nodes, self._history(done))

    def _history(self, done: int) -> Lines:
        """The lines up to the last saved round; later ones, and one that was cut, are removed from the file."""
        path = self.path / HISTORY
        kept: Lines = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        written: list[bytes] = []
        for number, line in enumerate(whole, start=1):
            try:
                row = parse_json(line)
                if not is_whole(row["round"], 0) or row["phase"] not in PHASES:
                    raise ValueError("it has no round or phase")
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    f"{path}, line {number}, cannot be read ({error}); restore the file, or give another folder."
                ) from None
            if row["round"] <= done:
                kept[row["round"], row["phase"]] = row
                written.append(line)
        if b"".join(written) != data:
            write_atomic(path, b"".join(written))
        for number in range(1, done + 1):
            if (number, "train") not in kept:
                warnings.warn(f"{path} lacks round {number}, so the result has no metrics of it.", stacklevel=2)
                break
        return kept

    def _write_about(self, sites: Sequence[str], nodes: Mapping[int, str]) -> None:
        self._written = [*sites], {**nodes}
        content = {**self._settings, "sites": [*sites], "nodes": {str(node): site for node, site in nodes.items()}}
        write_atomic(self.path / ABOUT, json.dumps(content, indent=2).encode())

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line to the history."""
        with (self.path / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            sync(file)

    def save(self, run: Saved, reported: Model) -> None:
        """Write the state after a round; it is complete or absent, whenever the process is killed."""
        if (run.sites, run.nodes) != self._written:
            self._write_about(run.sites, run.nodes)
        snapshot = Snapshot(run.round, run.state, dict, {"up_bytes": 0, "down_bytes": 0}, {}, reported)
        checkpoint.write(self.path / CHECKPOINTS, snapshot, {}, "", {}, {})

    def close(self) -> None:
        """Unlock the folder."""
        release_lock(self.path, self._lock)
        self._lock = None
