"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.analysis.compare import Cell, Comparison
from comfedl.analysis.evaluate import ClientScores
from comfedl.analysis.personalize import Personalized
from comfedl.analysis.privacy_plan import PrivacyPlan
from comfedl.analysis.robust_advice import Advice
from comfedl.core.client_statistics import Row
from comfedl.core.optim import CLIENT_OPTIMIZERS, OPTIMIZERS, SERVER_OPTIMIZERS
from comfedl.core.outer_functions import OUTERS
from comfedl.core.privacy import spent_text
from comfedl.core.schedule import SCHEDULES
from comfedl.data.federated import FederatedData
from comfedl.data.partition import PARTITIONS
from comfedl.data.registry import SOURCES, is_cached
from comfedl.models.losses import LOSSES, OWN_LOSSES, TASKS
from comfedl.models.metrics import METRICS, names_for
from comfedl.models.zoo import MODELS
from comfedl.training.client_table import ClientTable, number
from comfedl.training.result import Result
from comfedl.tuning.search import Tuned
from comfedl.utils import samples


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def algorithms() -> Table:
    """The algorithms with their paper, objective and communication."""
    table = _table("Algorithms", "name", "paper", "objective", "sent per round and participant", "own arguments")
    common = {field.name for field in dataclasses.fields(Algorithm)}
    for name, method in ALGORITHMS.items():
        further = [field.name for field in dataclasses.fields(method) if field.name not in common]
        table.add_row(name, method.paper, method.goal, method.sends, ", ".join(further))
    table.caption = f"Common arguments: {', '.join(sorted(common))}."
    return table


def outers() -> Table:
    """The outer functions."""
    return _registry_table("Outer functions", OUTERS)


def optimizers() -> Table:
    """The optimisers, and which side can use each."""
    table = _registry_table("Optimisers", OPTIMIZERS)
    sides = {"client_optimizer": CLIENT_OPTIMIZERS, "server_optimizer": SERVER_OPTIMIZERS}
    table.caption = "; ".join(f"{side} takes {', '.join(names)}" for side, names in sides.items()) + "."
    return table


def schedules() -> Table:
    """The schedules of the learning rate."""
    table = _registry_table("Learning-rate schedules", SCHEDULES)
    table.caption = 'Your own: lr_schedule = "module:function", which maps the round (1, 2, ...) to a factor of lr.'
    return table


def losses() -> Table:
    """The losses, and what each is for."""
    table = _table("Losses", "name", "description", "arguments", "for")
    for name in dict.fromkeys([*LOSSES, *OWN_LOSSES]):
        kind = OWN_LOSSES.get(name)
        arguments = "" if kind is None else ", ".join(map(str, inspect.signature(kind).parameters.values()))
        summary = _summary(LOSSES[name][0] if kind is None else kind)
        table.add_row(name, summary, escape(arguments.replace("'", "")), TASKS[name if kind is None else kind.like])
    table.caption = 'As a table: loss = { name = "focal", gamma = 2.0 }; of your own: loss = "module:function".'
    return table


def metrics() -> Table:
    """The metrics, and the losses that each goes with."""
    table = _table("Metrics", "name", "description", "better", "losses")
    for name, metric in METRICS.items():
        losses = [loss for loss, task in TASKS.items() if name in names_for(task)]
        if losses:
            better = "lower" if metric.smaller_is_better else "higher"
            table.add_row(name, _summary(metric.function), better, ", ".join(losses))
    table.caption = 'Your own: metrics = ["module:function"], which maps a client\'s (output, y) to a number.'
    return table


def datasets() -> Table:
    """The data sets."""
    table = _table("Data sets", "name", "description", "samples", "shape", "classes", "cached")
    for name, source in SOURCES.items():
        samples = f"{source.samples}" + (f" + {source.test_samples}" if source.test_samples else "")
        cached = "not needed" if not source.files else "yes" if is_cached(name) else f"no: {source.download}"
        shape = "x".join(str(size) for size in source.shape)
        table.add_row(name, source.summary, samples, shape, str(source.classes), cached)
    groupings = "; ".join(f"{name} by {', '.join(s.groupings)}" for name, s in SOURCES.items() if s.groupings)
    table.caption = (
        f'Natural clients (partition = "natural", with by = one of these; the first is the default): {groupings}.\n'
        'For your data: "csv", "folder", or "module:function"; see docs/how-to-own-data.md.'
    )
    return table


def _summary(of: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(of) or "").splitlines()[0]


def _registry_table(title: str, registry: Mapping[str, Callable[..., object]], skip: int = 0) -> Table:
    """Name, first line of the docstring, and arguments after the first ``skip``."""
    table = _table(title, "name", "description", "arguments")
    for name, entry in registry.items():
        arguments = [str(parameter) for parameter in list(inspect.signature(entry).parameters.values())[skip:]]
        table.add_row(name, _summary(entry), ", ".join(arguments).replace("'", ""))
    return table


def partitions() -> Table:
    """The partitions."""
    return _registry_table("Partitions", PARTITIONS)


def models() -> Table:
    """The models."""
    return _registry_table("Models", MODELS, skip=2)


def clients(fed: FederatedData) -> Table:
    """The samples and labels of each client."""
    if not isinstance(fed.train.head(1)[1], Tensor):
        return _several_targets(fed)
    regression = fed.train.head(1)[1].is_floating_point()
    heading = "y in train (mean, min, max)" if regression else "labels in train (label:count)"
    table = _table(repr(fed), "client", "train", "validation", "test", heading)
    names = () if fed.encoding is None else fed.encoding.classes
    for i, name in enumerate(fed.names):
        sizes = ["-" if split is None else str(split.sizes[i]) for split in (fed.train, fed.validation, fed.test)]
        y = fed.train.y_of(i).numpy()
        if regression:
            content = f"{y.mean():.4g}, {y.min():.4g}, {y.max():.4g}" if y.size else ""
        else:
            pairs = zip(*np.unique(y, return_counts=True), strict=True)
            content = "  ".join(f"{names[label] if names else label}:{n}" for label, n in pairs)
        table.add_row(escape(name), *sizes, escape(content))
    return table


def _several_targets(fed: FederatedData) -> Table:
    """The samples of each client, whose y is a tuple or dict."""
    table = _table(f"{fed!r}, y: {samples.described(fed.train.head(1)[1])}", "client", "train", "validation", "test")
    for i, name in enumerate(fed.names):
        sizes = ["-" if split is None else str(split.sizes[i]) for split in (fed.train, fed.validation, fed.test)]
        table.add_row(escape(name), *sizes)
    return table


def _format(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def show_summary(summary: Mapping[str, Any], title: str) -> Table:
    """The summary of a run: statistics of each metric over clients."""
    sampled = f", {summary['eval_clients']} clients sampled" if "eval_clients" in summary else ""
    best = f" (model of round {summary['round']})" if "round" in summary else ""
    table = _table(
        f"{title}, after {summary['rounds']} rounds{best}{sampled}", "", "mean", "worst client", "worst 10 %", "std"
    )
    for split in ("train", "validation", "test"):
        for metric, values in summary.get(split, {}).items():
            # Under secure aggregation, only means are known.
            cells = (_format(values[name]) if name in values else "-" for name in ("mean", "worst", "worst10", "std"))
            table.add_row(f"{split} {metric.replace('_', ' ')}", *cells)
    if "objective" in summary:
        table.add_row("objective", _format(summary["objective"]))
    privacy = summary.get("privacy")
    if privacy is not None and privacy["epsilon"] is not None:
        table.add_row("epsilon", spent_text(privacy))
    return table


def show_privacy_plan(plan: PrivacyPlan) -> Table:
    """Epsilon by round."""
    table = _table("", "rounds", f"epsilon (delta {plan.privacy.delta:g})")
    table.title = None
    for rounds, epsilon in plan.by_round.items():
        table.add_row(f"{rounds:,}", f"{epsilon:.4g}")
    return table


def side_by_side(results: Mapping[str, Result], split: str = "validation") -> Table:
    """Accuracy of the average and the worst client per method, with the best marked."""
    title = f"Accuracy on each client's {split} data"
    table = _table(title, "method", "average client", "worst client", "std over clients")
    rows = {name: result.summary()[split]["accuracy"] for name, result in results.items()}
    best = {key: max(values[key] for values in rows.values()) for key in ("mean", "worst")}
    for name, values in rows.items():
        marked = (
            f"[bold]{values[key]:.3f} *[/bold]" if values[key] == best[key] else f"{values[key]:.3f}"
            for key in ("mean", "worst")
        )
        table.add_row(name, *marked, f"{values['std']:.3f}")
    return table


def show_comparison(comparison: Comparison) -> tuple[Table, str]:
    """Mean and standard error over seeds per method, with the best marked; and a note on noise."""
    columns = comparison.columns()
    seeds = len(next(iter(comparison.rows.values())))
    title = f"{comparison.split} {comparison.metric} over {seeds} seed{'s' if seeds > 1 else ''}"
    spent = comparison.spent()
    table = _table(title, "method", *columns, *(["epsilon of a run"] if spent else []))
    for method in comparison.rows:
        cells = [column.get(method) for column in columns.values()]
        private = [spent.get(method, "-")] if spent else []
        table.add_row(escape(method), *("-" if cell is None else _cell(cell) for cell in cells), *private)
    return table, _noise_note(columns, seeds)


def _cell(cell: Cell) -> str:
    text = f"{cell.mean:.4f}" + ("" if np.isnan(cell.error) else f" ± {cell.error:.4f}")
    return f"[bold]{text} *[/bold]" if cell.best else f"{text} ~" if cell.within_noise else text


def _noise_note(columns: Mapping[str, Mapping[str, Cell]], seeds: int) -> str:
    if seeds == 1:
        return "* best. With one seed a difference may be noise: use --seeds 3 or more."
    close = {
        column: [method for method, cell in cells.items() if cell.within_noise] for column, cells in columns.items()
    }
    listed = [f"{column}: {', '.join(methods)}" for column, methods in close.items() if methods]
    note = "* best; ± is the standard error over seeds."
    if not listed:
        return f"{note} Every difference from the best is more than twice its standard error."
    return f"{note} ~ within two standard errors of the best, paired by seed ({'; '.join(listed)})."


def show_trials(tuned: Tuned, most: int = 30) -> Table:
    """The trials of a search, best first."""
    paths = sorted(tuned.plan.space)
    title = f"{len(tuned.trials)} trials, {'smallest' if tuned.plan.minimise else 'largest'} {tuned.plan.metric} first"
    table = _table(title, "trial", tuned.plan.metric, *(escape(path) for path in paths), "state", "seconds", "reason")
    for trial in tuned.trials[:most]:
        table.add_row(
            str(trial.number),
            "-" if trial.value is None else _format(trial.value),
            *(escape(_format_param(trial.params.get(path, "-"))) for path in paths),
            trial.state,
            "-" if trial.seconds is None else f"{trial.seconds:.1f}",
            escape(trial.reason),
        )
    if len(tuned.trials) > most:
        table.caption = f"and {len(tuned.trials) - most} more trials in the study"
    return table


def _format_param(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_scores(scores: ClientScores) -> Table:
    """The scores per client with their 95 % intervals, and their summary over clients."""
    found = scores.table
    table = _table(f"Scores on {scores.split}", "client", "samples", *(key.replace("_", " ") for key in found.scores))
    for row in found:
        cells = (_score(found, row, key) for key in found.scores)
        table.add_row(escape(str(row["client"])), str(row["samples"]), *cells)
    table.add_section()
    for statistic, label in (("mean", "average client"), ("worst", "worst client")):
        table.add_row(label, "", *(_format(scores.summary[f"{key}.{statistic}"]) for key in found.scores))
    how = "; ".join(f"{key.replace('_', ' ')}: {method}" for key, method in found.methods.items())
    table.caption = f"In brackets: 95 % confidence intervals ({how})." if how else None
    return table


def _score(table: ClientTable, row: Row, key: str) -> str:
    value, bounds = row.get(key), table.interval(row, key)
    if not isinstance(value, int | float):
        return "-"
    return _format(float(value)) + ("" if bounds is None else f" ({number(bounds[0])} to {number(bounds[1])})")


def show_personalized(found: Personalized) -> Table:
    """Scores of the global and the adapted model on a new client."""
    table = _table(f"Scores on {found.held_out} held-out samples", "", "global model", "adapted")
    for key, value in found.before.items():
        table.add_row(key, _format(value), _format(found.after[key]))
    return table


def show_fits(advice: Advice, most: int = 10) -> Table:
    """The clients with the largest losses under plain averaging, and who of them is outvoted."""
    data = "held-out data" if advice.split == "validation" else "training data"
    title = f"Loss on {data} after {advice.warmup} rounds with equal weights"
    judged = [] if advice.split == "train" else [f"{advice.split} samples"]
    headings = ("client", "train samples", *judged, "averaged model", "95 % interval", "fine-tuned on its own data", "")
    table = _table(title, *headings)
    outvoted = {fit.client for fit in advice.outvoted}
    fits = sorted(advice.fits, key=lambda fit: -fit.loss)
    for fit in fits[:most]:
        verdict = "outvoted" if fit.client in outvoted else ""
        counts = [str(fit.samples), *(["-" if fit.judged_on is None else str(fit.judged_on)] if judged else [])]
        interval = "-" if fit.interval is None else " to ".join(map(_format, fit.interval))
        table.add_row(escape(fit.client), *counts, _format(fit.loss), interval, _format(fit.own), verdict)
    if len(fits) > most:
        table.caption = f"and {len(fits) - most} more clients with smaller losses"
    return table


def show_advice(advice: Advice) -> Table:
    """The effect of each gamma."""
    partial = f" of {advice.participants} per round" if advice.participants < len(advice.names) else ""
    title = f"What each gamma would do to the weights of the {len(advice.names)} clients (1 = uniform)"
    table = _table(
        title, "gamma", f"effective clients{partial}", "noise factor", "heaviest client", "its weight", "weighted loss"
    )
    for effect in advice.effects:
        heaviest = int(effect.weights.argmax())
        mark = " (config)" if effect.gamma == advice.config_gamma else ""
        table.add_row(
            f"{effect.gamma:.4g}{mark}",
            f"{effect.effective:.2f}",
            f"{effect.noise:.2f}",
            escape(advice.names[heaviest]),
            f"{len(advice.names) * effect.weights[heaviest]:.2f}",
            _format(effect.loss),
        )
    return table


def show_weights(advice: Advice, most: int = 10) -> Table:
    """The weights of the clients with the largest losses, for each gamma."""
    order = np.argsort(-advice.losses, kind="stable")
    title = "Each client's weight by gamma (1 = uniform)"
    table = _table(title, "client", "loss", *(f"{effect.gamma:.4g}" for effect in advice.effects))
    for i in order[:most]:
        weights = (f"{len(order) * effect.weights[i]:.2f}" for effect in advice.effects)
        table.add_row(escape(advice.names[int(i)]), _format(float(advice.losses[i])), *weights)
    if len(order) > most:
        table.caption = f"and {len(order) - most} more clients with smaller losses"
    return table
