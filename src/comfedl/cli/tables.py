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
from comfedl.analysis.compare import Cell, Comparison
from comfedl.analysis.gamma_advice import Advice
from comfedl.analysis.predict import Personalised, Scores
from comfedl.core.outer_functions import OUTERS
from comfedl.data.federated import FederatedData
from comfedl.data.partition import PARTITIONS
from comfedl.data.registry import SOURCES, is_cached
from comfedl.models.zoo import MODELS
from comfedl.training.result import Result
from comfedl.tuning.search import Tuned


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
    table.caption = 'Your own: "csv", "folder", or "module:function" of yours; see docs/how-to-own-data.md.'
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
    numbers = fed.train.y.is_floating_point()
    held = "y in train (mean, from, to)" if numbers else "labels in train (label:count)"
    table = _table(repr(fed), "client", "train", "validation", "test", held)
    names = () if fed.encoding is None else fed.encoding.classes
    for i, name in enumerate(fed.names):
        sizes = ["-" if split is None else str(split.sizes[i]) for split in (fed.train, fed.validation, fed.test)]
        y = fed.train.whole(i)[1].numpy()
        if numbers:
            told = f"{y.mean():.4g}, {y.min():.4g}, {y.max():.4g}" if y.size else ""
        else:
            pairs = zip(*np.unique(y, return_counts=True), strict=True)
            told = "  ".join(f"{names[label] if names else label}:{n}" for label, n in pairs)
        table.add_row(escape(name), *sizes, escape(told))
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


def show_scores(scores: Scores) -> Table:
    """Each client's scores, and their summary over the clients."""
    keys = list(dict.fromkeys(key for row in scores.rows for key in row if key not in ("client", "samples")))
    table = _table(f"On {scores.split}", "client", "samples", *(key.replace("personal_", "personal ") for key in keys))
    for row in scores.rows:
        numbers = (row.get(key) for key in keys)
        cells = ("-" if number is None else _number(float(number)) for number in numbers)
        table.add_row(escape(str(row["client"])), str(row["samples"]), *cells)
    table.add_section()
    for statistic, told in (("mean", "average client"), ("worst", "worst client")):
        table.add_row(told, "", *(_number(scores.summary[f"{key}.{statistic}"]) for key in keys))
    return table


def show_personalised(found: Personalised) -> Table:
    """What adapting to a new client gave."""
    table = _table(f"On {found.held_out} rows held out", "", "global model", "adapted")
    for key, number in found.before.items():
        table.add_row(key, _number(number), _number(found.after[key]))
    return table


def show_advice(advice: Advice) -> Table:
    """What each gamma would do."""
    some = f" of {advice.participants} in a round" if advice.participants < len(advice.names) else ""
    title = f"After {advice.warmup} rounds of plain averaging, {len(advice.names)} clients"
    table = _table(
        title, "gamma", f"effective clients{some}", "noise", "heaviest client", "its weight", "weighted loss"
    )
    for option in advice.options:
        heaviest = int(option.weights.argmax())
        own = " (config)" if option.gamma == advice.chosen else ""
        times = len(advice.names) * option.weights[heaviest]
        table.add_row(
            f"{option.gamma:.4g}{own}",
            f"{option.effective:.2f}",
            f"x {option.noise:.2f}",
            escape(advice.names[heaviest]),
            f"{times:.2f} x uniform",
            _number(option.loss),
        )
    return table


def show_weights(advice: Advice, most: int = 10) -> Table:
    """What the clients with the largest losses would weigh, times uniform."""
    order = np.argsort(-advice.losses, kind="stable")
    title = "Weights, times uniform, at each gamma"
    table = _table(title, "client", "loss", *(f"{option.gamma:.4g}" for option in advice.options))
    for i in order[:most]:
        weights = (f"{len(order) * option.weights[i]:.2f}" for option in advice.options)
        table.add_row(escape(advice.names[int(i)]), _number(float(advice.losses[i])), *weights)
    if len(order) > most:
        table.caption = f"and {len(order) - most} clients with smaller losses"
    return table
