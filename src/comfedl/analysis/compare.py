"""Methods side by side: the same data, the same initial model, several seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comfedl.config.schema import Config, run_config
from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.core.protocol import Diverged
from comfedl.training.callbacks import Callback
from comfedl.training.progress import Progress
from comfedl.training.run_folder import check_free, finished_rows
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

COLUMNS = {
    "average client": "{split}.{metric}.mean",
    "worst client": "{split}.{metric}.worst",
    "average, personal": "{split}.personal_{metric}.mean",
    "worst, personal": "{split}.personal_{metric}.worst",
}


@dataclass(frozen=True)
class Cell:
    """A number over seeds: its mean and standard error, and how it stands to the best of its column."""

    mean: float
    error: float
    best: bool
    within_noise: bool


@dataclass(frozen=True)
class Comparison:
    """The last rows of every run, by method and seed."""

    rows: Mapping[str, Sequence[Row]]
    split: str

    @property
    def metric(self) -> str:
        """Accuracy where there is one, or the error of a regression, else the loss."""
        first = next(iter(self.rows.values()))[0]
        return next((name for name in ("accuracy", "rmse") if f"{self.split}.{name}.mean" in first), "loss")

    def columns(self) -> dict[str, dict[str, Cell]]:
        """Column -> method -> cell. A difference is within noise where it is below two standard errors of the
        paired differences between seeds; with one seed there is nothing to tell noise by, and no cell says so."""
        out: dict[str, dict[str, Cell]] = {}
        for column, pattern in COLUMNS.items():
            key = pattern.format(split=self.split, metric=self.metric)
            numbers = {name: [row.get(key) for row in rows] for name, rows in self.rows.items()}
            values = {
                name: np.array(found, dtype=np.float64)
                for name, found in numbers.items()
                if all(isinstance(number, int | float) for number in found)
            }
            if values:
                out[column] = _cells(values, -1 if smaller_is_better(self.metric) else 1)
        return out

    def to_csv(self) -> str:
        """One row a method and seed, with every number of the last round."""
        records = [{"method": name, "run": i, **row} for name, rows in self.rows.items() for i, row in enumerate(rows)]
        names = list(dict.fromkeys(key for record in records for key in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()


def _cells(values: Mapping[str, np.ndarray], sign: int) -> dict[str, Cell]:
    best = max(values, key=lambda name: sign * values[name].mean())
    cells = {}
    for name, numbers in values.items():
        gap, noise = abs((values[best] - numbers).mean()), 2 * _standard_error(values[best] - numbers)
        close = bool(name != best and len(numbers) > 1 and gap <= noise)
        cells[name] = Cell(float(numbers.mean()), _standard_error(numbers), name == best, close)
    return cells


def _standard_error(numbers: np.ndarray) -> float:
    return float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else math.nan


def run_comparison(
    configs: Mapping[str, Config],
    seeds: int,
    split: str,
    out: Path,
    force: bool = False,
    resume: bool = False,
    progress: bool = True,
    watch: Callable[[Config, str, Path], Sequence[Callback]] | None = None,
) -> Comparison:
    """Run every config with every seed, counted up from its own, and write the runs and a table of all numbers.

    With ``resume`` the runs that ``out`` already holds are not run again, or go on. ``watch`` makes what hangs on a run
    from its config, its name and its folder; by default that is a progress bar.
    """
    checks.at_least("seeds", seeds, 1)
    _check_alike(configs)
    folders = {(name, i): out / name / f"seed-{i}" for name in configs for i in range(seeds)}
    for folder in folders.values():
        check_free(folder, force, resume)
    rows: dict[str, list[Row]] = {name: [] for name in configs}
    for i in range(seeds):
        fed = None
        for name, config in configs.items():
            seeded = config.model_copy(update={"seed": config.seed + i})
            fed = seeded.make_data(progress) if fed is None else fed
            if split not in ("train", "validation", "test") or fed.split(split) is None:
                raise ConfigError(
                    f"split is {split!r}, but it must be train, or validation or test if the data has it."
                )
            done = finished_rows(folders[name, i], seeded.resolved()) if resume else None
            if done is not None:
                rows[name].append(done[-1])
                continue
            folder, label = folders[name, i], f"{name}, seed {seeded.seed}"
            if watch is not None:
                hung = watch(seeded, label, folder)
            else:
                hung = [Progress(config.rounds, label)] if progress else []
            try:
                result = run_config(seeded, folder, force, resume, callbacks=hung, fed=fed)
            except Diverged as error:
                error.advice = f"This is {name} with seed {seeded.seed}. {error.advice}"
                raise
            rows[name].append(result.rounds[-1])
    comparison = Comparison(rows, split)
    write_atomic(out / "comparison.csv", comparison.to_csv().encode())
    return comparison


def _check_alike(configs: Mapping[str, Config]) -> None:
    """A comparison is of methods: data, model and seed must be the same."""
    first, *others = configs.items()
    for name, config in others:
        ours, theirs = first[1].resolved(), config.resolved()
        for key in ("data", "model", "seed", "rounds", "clients_per_round", "eval_clients", "loss"):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{first[0]} and {name} differ in {key} ({ours.get(key)} and {theirs.get(key)}); a comparison is "
                    "of methods on the same data, model and rounds: make them equal, for instance with --set."
                )
