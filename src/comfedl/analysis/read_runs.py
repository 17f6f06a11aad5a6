"""Read run folders, also while they are being written, and group the runs by method over seeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.core.client_statistics import Row
from comfedl.models.metrics import set_direction
from comfedl.training.run_folder import TABLE
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.read_back import parse_row, read_lines, read_object, read_rows, read_toml, unreadable
from comfedl.utils.toml import flat

Settings = dict[str, Any]
LINE_START = re.compile(rb'\{"round": (\d{1,18}), "client": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class ClientRecords:
    """Recorded values per client: for each key a matrix [clients, rounds], NaN where nothing was recorded."""

    names: Sequence[str]
    rounds: Sequence[int]
    values: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Run:
    """One run: its config, one row per evaluated round, and where its client rows are."""

    settings: Settings
    rounds: Sequence[Row]
    done: bool
    seconds: float | None = None
    folder: Path | None = None
    client_rows: Sequence[Row] = field(default=(), repr=False)
    """The rows of clients.jsonl, for a run without a folder."""
    model_round: int | None = None
    """The round of the model, if it is not the last."""
    stopped: str | None = None
    """Why it stopped before its last round."""

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))

    def final_value(self, key: str) -> float | None:
        """A value of the model's round: the last one, or the best by early stopping."""
        chosen = [row for row in self.rounds if row["round"] == self.model_round] or self.rounds[-1:]
        value = chosen[-1].get(key) if chosen else None
        return float(value) if isinstance(value, int | float) else None

    def final_client_rows(self) -> list[Row]:
        """The client rows of the model's round."""
        if self.folder is not None and self.model_round is not None:
            return [row for row in read_rows(self.folder / "clients.jsonl") if row["round"] == self.model_round]
        if self.folder is None:
            last = max((row["round"] for row in self.client_rows), default=0)  # type: ignore[type-var]
            return [row for row in self.client_rows if row["round"] == last]
        return last_rows(self.folder / "clients.jsonl")

    def table_rows(self) -> list[Row]:
        """The numbers of samples, and the bounds of the scores, of every client; empty if they were not recorded."""
        path = None if self.folder is None else self.folder / TABLE
        return list(read_rows(path)) if path is not None and path.exists() else []

    def client_records(self, names: Sequence[str], rounds: Collection[int]) -> ClientRecords:
        """The records of these clients in these rounds."""
        if self.folder is None:
            wanted = set(names)
            rows: Iterable[Row] = (r for r in self.client_rows if r["client"] in wanted and r["round"] in rounds)
        else:
            rows = _matching_rows(self.folder / "clients.jsonl", names, rounds)
        return to_matrices(rows, names)


@dataclass(frozen=True)
class Method:
    """Runs whose configs differ only in the seed."""

    name: str
    runs: Sequence[Run]

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    def final_values(self, key: str) -> dict[int, float]:
        """Seed -> a value of that run's last evaluated round, where it is recorded and finite."""
        values = {run.seed: run.final_value(key) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None and np.isfinite(value)}


# Finding run folders.


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (path / "config.toml").is_file() and (path / "rounds.jsonl").is_file()


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """All run folders at or below the given paths, without duplicates."""
    found: dict[Path, Path] = {}
    for path in paths:
        runs = [path] if is_run(path) else _runs_below(path)
        if not runs:
            fault = "holds no run (no config.toml and rounds.jsonl)" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {fault}; give a run folder, or a folder of runs.")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_below(path: Path) -> list[Path]:
    runs = [records.parent for records in path.rglob("rounds.jsonl") if is_run(records.parent)]
    visible = [run for run in runs if not any(part.startswith(".") for part in run.relative_to(path).parts)]
    return sorted(visible, key=lambda run: [_natural_order(part) for part in run.parts])


def _natural_order(text: str) -> list[tuple[int, str]]:
    """Sort key that reads digits as numbers: seed-10 comes after seed-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# Reading run folders.


def read_run(folder: Path) -> Run:
    """Read a run folder in its current state."""
    settings, summary = read_settings(folder / "config.toml"), folder / "summary.json"
    rounds = list(read_rows(folder / "rounds.jsonl"))
    ended = read_object(summary) if summary.exists() else {}
    seconds, chosen, stopped = ended.get("seconds"), ended.get("round"), ended.get("stopped")
    finite = isinstance(seconds, int | float | None) and math.isfinite(seconds or 0)
    if not finite or not isinstance(chosen, int | None) or not isinstance(stopped, str | None):
        raise RunFolderError(f"{summary} cannot be read (it is no summary of a run); give another folder.")
    for metric in settings.get("metrics", []):
        if isinstance(metric, dict) and isinstance(metric.get("name"), str):
            set_direction(metric["name"], metric.get("smaller_is_better") is True)
    return Run(settings, rounds, seconds is not None, seconds, folder, model_round=chosen, stopped=stopped)


def read_settings(path: Path) -> Settings:
    """A run's config, as far as every report relies on it."""
    settings = read_toml(path)
    of_kind = {"algorithm": dict, "data": dict, "model": dict, "metrics": list, "rounds": int, "seed": int}
    for key, kind in of_kind.items():
        if key in settings and not isinstance(settings[key], kind):
            raise RunFolderError(f"{path} cannot be read ({key} is no {kind.__name__}); give another folder.")
    return settings


def last_rows(path: Path) -> list[Row]:
    """The last round's rows of a JSONL file, read from its end since it may be huge; empty if there is no file."""
    if not path.exists():
        return []
    size, window = path.stat().st_size, 1 << 16
    while True:
        with unreadable(path), path.open("rb") as file:
            file.seek(max(0, size - window))
            text = file.read(min(size, window))
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        if window < size:
            lines = lines[1:]  # the first one may be cut off
        rows: list[Row] = []
        # Only a change of round shows that the last round is in the window as a whole.
        if lines and (window >= size or _round_of(path, lines[0]) != _round_of(path, lines[-1])):
            last = _round_of(path, lines[-1])
            rows = [parse_row(path, None, line) for line in lines if _round_of(path, line) == last]
        if rows or window >= size:
            return rows
        window *= 4


def _round_of(path: Path, line: bytes) -> int:
    start = LINE_START.match(line)
    return int(start[1]) if start else int(parse_row(path, None, line)["round"] or 0)


def _matching_rows(path: Path, names: Sequence[str], rounds: Collection[int]) -> Iterator[Row]:
    """The rows of some clients in some rounds; other lines are skipped by their start, which is far faster."""
    if not path.exists():
        return
    wanted, encoded = set(names), {json.dumps(name).encode() for name in names}
    for number, line in read_lines(path):
        start = LINE_START.match(line)
        if start is not None and (int(start[1]) not in rounds or start[2] not in encoded):
            continue
        row = parse_row(path, number, line)
        if row["round"] in rounds and row["client"] in wanted:
            yield row


def to_matrices(rows: Iterable[Row], names: Sequence[str]) -> ClientRecords:
    """Client rows as one matrix per key, over the rounds that occur."""
    rows = list(rows)
    rounds = list(dict.fromkeys(int(row["round"]) for row in rows))  # type: ignore[arg-type]
    row_of, column_of = {name: i for i, name in enumerate(names)}, {number: j for j, number in enumerate(rounds)}
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("round", "client"))
    values = {key: np.full((len(names), len(rounds)), np.nan) for key in keys}
    for row in rows:
        i, j = row_of[str(row["client"])], column_of[int(row["round"])]  # type: ignore[arg-type]
        for key, value in row.items():
            if key in values and value is not None:
                values[key][i, j] = value
    return ClientRecords(names, rounds, values)


# Grouping runs.


def read_methods(paths: Iterable[Path], names: Mapping[Path, str] | None = None) -> tuple[list[Method], list[str]]:
    """The runs at these paths grouped by method, and notes for the user on how they were grouped."""
    names = names or {}
    return group([(names.get(folder) or _label(folder), read_run(folder)) for folder in find_runs(paths)])


def group(labelled: Iterable[tuple[str, Run]]) -> tuple[list[Method], list[str]]:
    """Group runs whose configs differ only in the seed; a copy of a run does not count as a further seed."""
    notes, found = [], dict[str, dict[int, tuple[str, Run]]]()
    for label, run in labelled:
        key = json.dumps({name: value for name, value in run.settings.items() if name != "seed"}, sort_keys=True)
        seeds = found.setdefault(key, {})
        if run.seed in seeds:
            first = seeds[run.seed][1]
            notes.append(f"{run.folder or label} is the same run as {first.folder or label} and is ignored.")
        else:
            seeds[run.seed] = (label, run)
    methods = [_method(list(seeds.values())) for seeds in found.values()]
    return _with_unique_names(methods), notes


def _method(labelled: Sequence[tuple[str, Run]]) -> Method:
    labels = list(dict.fromkeys(label for label, _ in labelled))
    runs = sorted((run for _, run in labelled), key=lambda run: run.seed)
    name = labels[0] if len(labels) == 1 else str(runs[0].settings.get("algorithm", {}).get("name", labels[0]))
    return Method(name, runs)


def _with_unique_names(methods: Sequence[Method]) -> list[Method]:
    """Append to equal names the settings in which the methods differ."""
    out: list[Method] = []
    for method in methods:
        namesakes = [flat(other.settings) for other in methods if other.name == method.name]
        if len(namesakes) > 1:
            own = flat(method.settings)
            differ = [key for key in own if key != "seed" and any(other.get(key) != own[key] for other in namesakes)]
            suffix = ", ".join(f"{key.removeprefix('algorithm.')}={own[key]}" for key in differ[:3])
            method = replace(method, name=f"{method.name} ({suffix or len(out) + 1})")
        out.append(method)
    names = [method.name for method in out]
    return [
        replace(method, name=f"{method.name} #{i + 1}") if names.count(method.name) > 1 else method
        for i, method in enumerate(out)
    ]


def _label(folder: Path) -> str:
    """The folder's name, or its parent's if it is named after a seed."""
    resolved = folder.resolve()
    return resolved.parent.name if re.fullmatch(r"(seed|run)[-_]?\d+", resolved.name) else resolved.name
