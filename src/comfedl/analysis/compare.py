"""Compare methods: the same data and initial model for each, over several seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from comfedl.analysis.client_tables import about_worst_of, client_table, unjudged_in
from comfedl.analysis.load_run import read_encoding
from comfedl.analysis.read_runs import read_run
from comfedl.analysis.stats import difference, standard_error
from comfedl.config.schema import Config, run_config
from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.core.privacy import ABOUT_EPSILON, spent_text
from comfedl.training.callbacks import Callback
from comfedl.training.client_table import MOST_IN_TABLE, ClientTable
from comfedl.training.progress import Progress
from comfedl.training.run_folder import check_free, finished_row, with_all_spent
from comfedl.utils import checks
from comfedl.utils.csv_cells import without_formulas
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.files import write_atomic

COLUMNS = {
    "average client": "{split}.{metric}.mean",
    "worst client": "{split}.{metric}.worst",
    "average (personal)": "{split}.personal_{metric}.mean",
    "worst (personal)": "{split}.personal_{metric}.worst",
}


@dataclass(frozen=True)
class Cell:
    """Mean and standard error over seeds, and how the mean compares with the best of its column."""

    mean: float
    error: float
    best: bool
    within_noise: bool


@dataclass(frozen=True)
class Comparison:
    """The last row of every run, method -> one row per seed; and the tables by client, if they are at hand."""

    rows: Mapping[str, Sequence[Row]]
    split: str
    tables: Mapping[str, Sequence[ClientTable]] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """Accuracy or RMSE, whichever was recorded, else the loss."""
        first = next(iter(self.rows.values()))[0]
        return next((name for name in ("accuracy", "rmse") if f"{self.split}.{name}.mean" in first), "loss")

    def columns(self) -> dict[str, dict[str, Cell]]:
        """Column -> method -> cell; with a single seed no cell is marked as within noise."""
        out: dict[str, dict[str, Cell]] = {}
        for column, pattern in COLUMNS.items():
            key = pattern.format(split=self.split, metric=self.metric)
            recorded = {name: [row.get(key) for row in rows] for name, rows in self.rows.items()}
            values = {
                name: [float(value) for value in found if isinstance(value, int | float)]
                for name, found in recorded.items()
                if all(isinstance(value, int | float) for value in found)
            }
            if values:
                out[column] = _cells(values, -1 if smaller_is_better(self.metric) else 1)
        return out

    def notes(self) -> list[str]:
        """Which clients cannot be judged, how sure it is who is worst, and what epsilon covers, in sentences."""
        about = [*unjudged_in(self.tables), *about_worst_of(self.tables, self.split, self.metric)]
        return about + ([ABOUT_EPSILON] if self.spent() else [])

    def spent(self) -> dict[str, str]:
        """Epsilon and delta of one run of each private method, as text."""
        first = {name: rows[0] for name, rows in self.rows.items()}
        return {name: spent_text(row) for name, row in first.items() if "epsilon" in row}

    def to_csv(self) -> str:
        """One row per method and seed, with all values of the last round."""
        return rows_to_csv(
            [{"method": name, "run": i, **row} for name, rows in self.rows.items() for i, row in enumerate(rows)]
        )


def rows_to_csv(rows: Sequence[Row]) -> str:
    """CSV with a column for every key that occurs."""
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(without_formulas(names))
    writer.writerows(without_formulas([row.get(name, "") for name in names]) for row in rows)
    return text.getvalue()


def _cells(values: Mapping[str, Sequence[float]], sign: int) -> dict[str, Cell]:
    best = max(values, key=lambda name: sign * fmean(values[name]))
    by_seed = {name: dict(enumerate(found)) for name, found in values.items()}
    close = {name: bool(difference(by_seed[best], found).within_noise) for name, found in by_seed.items()}
    return {
        name: Cell(fmean(found), standard_error(found), name == best, name != best and close[name])
        for name, found in values.items()
    }


def run_comparison(
    configs: Mapping[str, Config],
    seeds: int,
    split: str,
    out: Path,
    force: bool = False,
    resume: bool = False,
    progress: bool = True,
    make_callbacks: Callable[[Config, str, Path], Sequence[Callback]] | None = None,
) -> Comparison:
    """Run every config with ``seeds`` seeds, counting up from its own, and write the runs and comparison.csv.

    With ``resume``, finished runs in ``out`` are kept and others continue, with a table encoded as it was for them.
    ``make_callbacks(config, label, folder)`` gives a run's callbacks; the default is a progress bar.
    """
    checks.at_least("seeds", seeds, 1)
    _check_comparable(configs)
    folders = {(name, i): out / name / f"seed-{i}" for name in configs for i in range(seeds)}
    for folder in folders.values():
        check_free(folder, force, resume)
    rows: dict[str, list[Row]] = {name: [] for name in configs}
    tables: dict[str, list[ClientTable]] = {name: [] for name in configs}
    for i in range(seeds):
        fed, digest = None, ""
        for name, config in configs.items():
            seeded = config.model_copy(update={"seed": config.seed + i})
            if fed is None:
                begun = (read_encoding(folders[each, i]) for each in configs if resume)
                fed = seeded.make_data(progress, next((found for found in begun if found is not None), None))
                digest = fed.digest() if resume else ""
            if split not in ("train", "validation", "test") or fed.split(split) is None:
                raise ConfigError(
                    f"split is {split!r}, but it must be train, or validation or test if the data have it."
                )
            few = len(fed) <= MOST_IN_TABLE
            done = finished_row(folders[name, i], seeded.resolved(), digest) if resume else None
            folder, label = folders[name, i], f"{name}, seed {seeded.seed}"
            if done is not None:
                rows[name].append(done)
                tables[name] += [client_table(read_run(folder), split)] if few else []
                continue
            if make_callbacks is not None:
                callbacks = make_callbacks(seeded, label, folder)
            else:
                callbacks = [Progress(config.rounds, label)] if progress else []
            try:
                result = run_config(seeded, folder, force, resume, callbacks=callbacks, fed=fed)
            except Diverged as error:
                error.advice = f"This is {name} with seed {seeded.seed}. {error.advice}"
                raise
            rows[name].append(with_all_spent(result.row, result.rounds))
            tables[name] += [client_table(read_run(folder), split)] if few else []
    comparison = Comparison(rows, split, tables)
    write_atomic(out / "comparison.csv", comparison.to_csv().encode())
    return comparison


def _check_comparable(configs: Mapping[str, Config]) -> None:
    (first, config), *others = configs.items()
    ours = config.resolved()
    for name, other in others:
        theirs = other.resolved()
        for key in ("data", "model", "seed", "rounds", "clients_per_round", "eval_clients", "loss"):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{first} and {name} differ in {key} ({ours.get(key)} and {theirs.get(key)}); methods are compared "
                    "on the same data, model and rounds: make them equal, for instance with --set."
                )
