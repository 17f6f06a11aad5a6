"""Runs as they lie in their folders, also while they are being written, grouped by method over seeds."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.core.client_statistics import Row
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.toml import flat

Settings = dict[str, Any]
START = re.compile(rb'\{"round": (\d+), "client": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Clients:
    """What clients were recorded with: for each name a matrix, clients by rounds, NaN where there is no number."""

    names: Sequence[str]
    rounds: Sequence[int]
    values: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Run:
    """One run: its config, a row an evaluated round, and where the clients' rows are."""

    settings: Settings
    rounds: Sequence[Row]
    done: bool
    seconds: float | None = None
    folder: Path | None = None
    kept: Sequence[Row] = field(default=(), repr=False)
    """The clients' rows, for a run that has no folder."""

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))

    def number(self, key: str) -> float | None:
        """A number of the last evaluated round."""
        value = self.rounds[-1].get(key) if self.rounds else None
        return float(value) if isinstance(value, int | float) else None

    def last_clients(self) -> list[Row]:
        """The clients' rows of the last evaluated round."""
        if self.folder is None:
            last = max((row["round"] for row in self.kept), default=0)  # type: ignore[type-var]
            return [row for row in self.kept if row["round"] == last]
        return last_rows(self.folder / "clients.jsonl")

    def clients(self, names: Sequence[str], rounds: Collection[int]) -> Clients:
        """The records of these clients at these rounds."""
        if self.folder is None:
            wanted = set(names)
            rows: Iterable[Row] = (row for row in self.kept if row["client"] in wanted and row["round"] in rounds)
        else:
            rows = _chosen(self.folder / "clients.jsonl", names, rounds)
        return gather(rows, names)


@dataclass(frozen=True)
class Method:
    """Runs that differ in nothing but their seed."""

    name: str
    runs: Sequence[Run]

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    def numbers(self, key: str) -> dict[int, float]:
        """Seed -> a number of the run's last evaluated round, where there is one."""
        found = {run.seed: run.number(key) for run in self.runs}
        return {seed: number for seed, number in found.items() if number is not None and np.isfinite(number)}


# Finding runs.


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (path / "config.toml").is_file() and (path / "rounds.jsonl").is_file()


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs that are given, or lie below what is given, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        runs = [path] if is_run(path) else _below(path)
        if not runs:
            what = "is not there" if not path.exists() else "holds no run (a folder with config.toml and rounds.jsonl)"
            raise ConfigError(f"{path} {what}; give a run's folder, or a folder of runs.")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(path: Path) -> list[Path]:
    runs = [records.parent for records in path.rglob("rounds.jsonl") if is_run(records.parent)]
    visible = [run for run in runs if not any(part.startswith(".") for part in run.relative_to(path).parts)]
    return sorted(visible, key=lambda run: [_natural(part) for part in run.parts])


def _natural(text: str) -> list[tuple[int, str]]:
    """Numbers in names count as numbers: seed-10 comes after seed-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


# Reading them.


def read_run(folder: Path) -> Run:
    """A run's folder as it is now."""
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        rounds = list(read_rows(folder / "rounds.jsonl"))
        summary = folder / "summary.json"
        seconds = json.loads(summary.read_text(encoding="utf-8")).get("seconds") if summary.exists() else None
    except (OSError, ValueError) as error:  # not TOML, JSON or UTF-8
        raise RunFolderError(f"{folder} cannot be read as a run ({error}); give another folder.") from None
    return Run(settings, rounds, seconds is not None, seconds, folder)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of records; a last line that is still being written is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def last_rows(path: Path) -> list[Row]:
    """The rows of a file's last round, read from its end; nothing where there is no file yet."""
    if not path.exists():
        return []
    size, step = path.stat().st_size, 1 << 16
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - step))
            text = file.read(min(size, step))
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        if step < size:
            lines = lines[1:]  # the first may have been cut
        rows: list[Row] = []
        if lines and (step >= size or _round(lines[0]) != _round(lines[-1])):
            last = _round(lines[-1])
            rows = [json.loads(line) for line in lines if _round(line) == last]
        if rows or step >= size:
            return rows
        step *= 4


def _round(line: bytes) -> int:
    found = START.match(line)
    return int(found[1]) if found else int(json.loads(line)["round"])


def _chosen(path: Path, names: Sequence[str], rounds: Collection[int]) -> Iterator[Row]:
    """Some clients' rows at some rounds; of the others only the beginning of the line is looked at."""
    if not path.exists():
        return
    wanted, written = set(names), {json.dumps(name).encode() for name in names}
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            start = START.match(line)
            if start is not None and (int(start[1]) not in rounds or start[2] not in written):
                continue
            row = json.loads(line)
            if row["round"] in rounds and row["client"] in wanted:
                yield row


def gather(rows: Iterable[Row], names: Sequence[str]) -> Clients:
    """Rows as matrices; the rounds are those that there are."""
    found = list(rows)
    rounds = list(dict.fromkeys(int(row["round"]) for row in found))  # type: ignore[arg-type]
    place, when = {name: i for i, name in enumerate(names)}, {number: i for i, number in enumerate(rounds)}
    keys = dict.fromkeys(key for row in found for key in row if key not in ("round", "client"))
    values = {key: np.full((len(names), len(rounds)), np.nan) for key in keys}
    for row in found:
        i, j = place[str(row["client"])], when[int(row["round"])]  # type: ignore[arg-type]
        for key, value in row.items():
            if key in values and value is not None:
                values[key][i, j] = value
    return Clients(names, rounds, values)


# Grouping them.


def read_methods(paths: Iterable[Path], names: Mapping[Path, str] | None = None) -> tuple[list[Method], list[str]]:
    """The runs of these folders by method, and what the reader must know of how they were put together."""
    named = names or {}
    return group([(named.get(folder) or _label(folder), read_run(folder)) for folder in find_runs(paths)])


def group(named: Iterable[tuple[str, Run]]) -> tuple[list[Method], list[str]]:
    """Put runs together whose configs differ in the seed alone; the same run twice would not be two seeds."""
    notes, found = [], dict[str, dict[int, tuple[str, Run]]]()
    for label, run in named:
        key = json.dumps({name: value for name, value in run.settings.items() if name != "seed"}, sort_keys=True)
        seeds = found.setdefault(key, {})
        if run.seed in seeds:
            other = seeds[run.seed][1]
            notes.append(f"{run.folder or label} is the same run as {other.folder or label}; it counts once.")
        else:
            seeds[run.seed] = (label, run)
    methods = [_method(list(seeds.values())) for seeds in found.values()]
    return _told_apart(methods), notes


def _method(named: Sequence[tuple[str, Run]]) -> Method:
    labels = list(dict.fromkeys(label for label, _ in named))
    runs = sorted((run for _, run in named), key=lambda run: run.seed)
    name = labels[0] if len(labels) == 1 else str(runs[0].settings.get("algorithm", {}).get("name", labels[0]))
    return Method(name, runs)


def _told_apart(methods: Sequence[Method]) -> list[Method]:
    """Methods of the same name get what they differ in behind it."""
    out: list[Method] = []
    for method in methods:
        like = [flat(other.settings) for other in methods if other.name == method.name]
        if len(like) > 1:
            own = flat(method.settings)
            differ = [key for key in own if key != "seed" and any(other.get(key) != own[key] for other in like)]
            told = ", ".join(f"{key.removeprefix('algorithm.')}={own[key]}" for key in differ[:3])
            method = replace(method, name=f"{method.name} ({told or len(out) + 1})")
        out.append(method)
    names = [method.name for method in out]
    return [
        replace(method, name=f"{method.name} #{i + 1}") if names.count(method.name) > 1 else method
        for i, method in enumerate(out)
    ]


def _label(folder: Path) -> str:
    """A folder's name; that of the one above where it is a seed's."""
    resolved = folder.resolve()
    return resolved.parent.name if re.fullmatch(r"(seed|run)[-_]?\d+", resolved.name) else resolved.name
