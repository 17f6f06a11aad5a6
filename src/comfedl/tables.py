"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.compare import Cell, Comparison
from comfedl.data.federated import FederatedData
from comfedl.data.partition import PARTITIONS
from comfedl.data.sources import SOURCES, is_cached
from comfedl.models import MODELS
from comfedl.outer import OUTERS
from comfedl.result import Result
from comfedl.tuning.tune import Tuned


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _first_line(of: object) -> str:
    return (of.__doc__ or "").strip().splitlines()[0]


def algorithms() -> Table:
    """The methods, each with its paper, its objective and what it sends."""
    table = _table("Algorithms", "name", "paper", "objective", "sends in a round, per participant", "its own arguments")
    common = {field.name for field in dataclasses.fields(Algorithm)}
    for name, method in ALGORITHMS.items():
        own = [field.name for field in dataclasses.fields(method) if field.name not in common]
        table.add_row(name, method.paper, method.goal, method.sends, ", ".join(own))
    table.caption = f"All take {', '.join(sorted(common))}."
    return table


def outers() -> Table:
    """The outer functions."""
    return _described("Outer functions", OUTERS)


def datasets() -> Table:
    """The data sets."""
    table = _table("Data sets", "name", "what", "samples", "shape", "classes", "in the cache")
    for name, source in SOURCES.items():
        samples = f"{source.samples}" + (f" + {source.test_samples}" if source.test_samples else "")
        here = "not needed" if not source.files else "yes" if is_cached(name) else f"no: {source.download}"
        shape = "x".join(str(size) for size in source.shape)
        table.add_row(name, source.summary, samples, shape, str(source.classes), here)
    return table


def _described(title: str, things: Mapping[str, Callable[..., object]], given: int = 0) -> Table:
    table = _table(title, "name", "what", "arguments")
    for name, thing in things.items():
        arguments = [str(parameter) for parameter in list(inspect.signature(thing).parameters.values())[given:]]
        table.add_row(name, _first_line(thing), ", ".join(arguments).replace("'", ""))
    return table


def partitions() -> Table:
    """The partitions."""
    return _described("Partitions", PARTITIONS)


def models() -> Table:
    """The models."""
    return _described("Models", MODELS, given=2)


def clients(fed: FederatedData) -> Table:
    """What each client holds."""
    table = _table(repr(fed), "client", "train", "validation", "test", "labels in train (label:count)")
    for i, name in enumerate(fed.names):
        sizes = ["-" if split is None else str(split.sizes[i]) for split in (fed.train, fed.validation, fed.test)]
        labels, counts = np.unique(fed.train.whole(i)[1].numpy(), return_counts=True)
        table.add_row(escape(name), *sizes, "  ".join(f"{label}:{n}" for label, n in zip(labels, counts, strict=True)))
    return table


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def show_result(result: Result, title: str) -> Table:
    """The last evaluated round of one run: every metric over the clients."""
    return show_summary(result.summary(), title)


def show_summary(summary: Mapping[str, Any], title: str) -> Table:
    """The same from what a run's folder holds in summary.json."""
    some = f", of {summary['eval_clients']} clients" if "eval_clients" in summary else ""
    table = _table(f"{title}, after {summary['rounds']} rounds{some}", "", "mean", "worst client", "worst 10 %", "std")
    for split in ("train", "validation", "test"):
        for metric, numbers in summary.get(split, {}).items():
            table.add_row(
                f"{split} {metric}", *(_number(numbers[name]) for name in ("mean", "worst", "worst10", "std"))
            )
    table.add_row("objective", _number(summary["objective"]))
    return table


def side_by_side(results: Mapping[str, Result], split: str = "validation") -> Table:
    """Runs beside each other: average and worst client, the best marked."""
    table = _table(
        f"Accuracy on each client's own {split} data", "method", "average client", "worst client", "spread (std)"
    )
    rows = {name: result.summary()[split]["accuracy"] for name, result in results.items()}
    best = {key: max(numbers[key] for numbers in rows.values()) for key in ("mean", "worst")}
    for name, numbers in rows.items():
        marked = (
            f"[bold]{numbers[key]:.3f} *[/bold]" if numbers[key] == best[key] else f"{numbers[key]:.3f}"
            for key in ("mean", "worst")
        )
        table.add_row(name, *marked, f"{numbers['std']:.3f}")
    return table


def show_comparison(comparison: Comparison) -> tuple[Table, str]:
    """Methods by columns, mean and standard error over seeds, the best marked; and a note on what is noise."""
    columns = comparison.columns()
    seeds = len(next(iter(comparison.rows.values())))
    title = f"{comparison.split} {comparison.metric} over {seeds} seed{'s' if seeds > 1 else ''}"
    table = _table(title, "method", *columns)
    for method in comparison.rows:
        cells = [column.get(method) for column in columns.values()]
        table.add_row(escape(method), *("-" if cell is None else _cell(cell) for cell in cells))
    return table, _noise(columns, seeds)


def _cell(cell: Cell) -> str:
    text = f"{cell.mean:.4f}" + ("" if np.isnan(cell.error) else f" ± {cell.error:.4f}")
    return f"[bold]{text} *[/bold]" if cell.best else f"{text} ~" if cell.within_noise else text


def _noise(columns: Mapping[str, Mapping[str, Cell]], seeds: int) -> str:
    if seeds == 1:
        return "* best. One seed cannot tell a difference from noise: use --seeds 3 or more."
    close = {
        column: [method for method, cell in cells.items() if cell.within_noise] for column, cells in columns.items()
    }
    named = [f"{column}: {', '.join(methods)}" for column, methods in close.items() if methods]
    note = "* best; ± is the standard error over seeds."
    if not named:
        return f"{note} Every difference from the best is more than twice its standard error."
    return (
        f"{note} ~ within noise of the best, below two standard errors of the paired difference ({'; '.join(named)})."
    )


def show_trials(tuned: Tuned, most: int = 30) -> Table:
    """The trials of a search, best first."""
    paths = sorted(tuned.plan.space)
    title = f"{len(tuned.trials)} trials, {'smallest' if tuned.plan.minimise else 'largest'} {tuned.plan.metric} first"
    table = _table(title, "trial", tuned.plan.metric, *(escape(path) for path in paths), "ended", "seconds", "why")
    for trial in tuned.trials[:most]:
        table.add_row(
            str(trial.number),
            "-" if trial.value is None else _number(trial.value),
            *(escape(_short(trial.params.get(path, "-"))) for path in paths),
            trial.state,
            "-" if trial.seconds is None else f"{trial.seconds:.1f}",
            escape(trial.reason),
        )
    if len(tuned.trials) > most:
        table.caption = f"and {len(tuned.trials) - most} more in the study"
    return table


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
