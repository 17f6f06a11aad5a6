"""Client by client in a report: the table with intervals, who gains and who loses, and who cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comfedl.analysis.client_tables import about_worst_of, client_table, method as how, unjudged_in
from comfedl.analysis.read_runs import Method, Run
from comfedl.analysis.stats import MetricChoice
from comfedl.core.client_statistics import Row, base, smaller_is_better
from comfedl.training.client_table import MOST_IN_TABLE, ClientTable, listed, number, plural, samples_of

SHARES = frozenset(
    ("accuracy", "balanced_accuracy", "f1", "precision", "sensitivity", "recall", "specificity", "auc", "auprc")
)
"""Measures from 0 to 1, whose differences are said in points of a hundred."""
MAX_COMPARED = 6  # methods that gains are told of; the table shows all
MAX_VALUES = 300_000  # numbers of the table, or it shows the means over seeds alone
EQUAL = 1e-6  # differences that are rounding

Finals = Mapping[tuple[int, int], Sequence[Row]]
"""(method, seed) -> the clients' rows of the model's round."""


def final_rows(methods: Sequence[Method]) -> Finals:
    """The clients' rows of every run."""
    return {(i, run.seed): run.final_client_rows() for i, method in enumerate(methods) for run in method.runs}


def baseline(methods: Sequence[Method]) -> int:
    """The place of the method that others are compared with: FedAvg if it is there, else the first."""
    names = [str(method.settings.get("algorithm", {}).get("name", "")) for method in methods]
    return names.index("fedavg") if "fedavg" in names else 0


# In words.


def about_clients(methods: Sequence[Method], choice: MetricChoice, finals: Finals) -> list[str]:
    """Who gains and who loses, who cannot be judged, and how sure it is who is worst, in sentences."""
    tables: dict[str, list[ClientTable]] = {}
    few = all(len(rows) <= MOST_IN_TABLE for rows in finals.values())
    for i, method in enumerate(methods if few else ()):
        found = [client_table(run, choice.split, finals[i, run.seed]) for run in method.runs]
        if all(found):
            tables[method.name] = found
    return [
        *gains(methods, choice, finals),
        *unjudged_in(tables),
        *about_worst_of(tables, choice.split, choice.metric),
    ]


def gains(methods: Sequence[Method], choice: MetricChoice, finals: Finals) -> list[str]:
    """Who gains and who loses against the method that others are compared with."""
    first = baseline(methods)
    said = []
    for i, method in enumerate(methods):
        changes = _changes(finals, first, i, choice.key) if i != first else {}
        if changes:
            said.append(_gain(methods[first].name, method.name, changes, choice))
    return said[:MAX_COMPARED]


def _changes(finals: Finals, first: int, other: int, key: str) -> dict[str, float]:
    """By client: what it gains, as a mean over the seeds that both methods have."""
    found: dict[str, list[float]] = {}
    sign = -1 if smaller_is_better(key) else 1
    for (method, seed), rows in finals.items():
        if method != other or (first, seed) not in finals:
            continue
        before = {row["client"]: _value(row, key) for row in finals[first, seed]}
        for row in rows:
            change = sign * (_value(row, key) - before.get(row["client"], math.nan))
            if math.isfinite(change):
                found.setdefault(str(row["client"]), []).append(change)
    return {client: float(np.mean(changes)) for client, changes in found.items()}


def _gain(first: str, other: str, changes: Mapping[str, float], choice: MetricChoice) -> str:
    gained, lost = max(changes, key=lambda k: changes[k]), min(changes, key=lambda k: changes[k])
    up, down = (sum(sign * change > EQUAL for change in changes.values()) for sign in (1, -1))
    total = plural(len(changes), "client")
    best = f", by up to {_size(changes[gained], choice)} ({listed([gained])})" if up else ""
    text = f"{other} against {first}: {up if up else 'none'} of {total} {'gains' if up == 1 else 'gain'}{best}"
    if not down:
        return f"{text}; no client loses."
    floor = f"no client loses more than {_size(changes[lost], choice, up=True)} ({listed([lost])})"
    return f"{text}; {down} {'loses' if down == 1 else 'lose'}; {floor}."


def _size(change: float, choice: MetricChoice, up: bool = False) -> str:
    """The size of a change; ``up`` rounds it up, so that it is a bound."""
    if choice.base_metric in SHARES:
        tenths = 1000 * abs(change)
        points = (math.ceil(tenths - 1e-3) if up else math.floor(tenths + 0.5)) / 10
        return f"{points:.1f} point{'' if points == 1 else 's'}"
    size = abs(change)
    if up and size:
        unit = 10.0 ** (math.floor(math.log10(size)) - 2)
        size = math.ceil(size / unit - 1e-3) * unit
    return number(size)


def _value(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


# As a table.


@dataclass(frozen=True)
class _Column:
    """What one run, or the mean over a method's runs, has for each client: NaN where it has nothing."""

    values: Mapping[str, np.ndarray]
    low: Mapping[str, np.ndarray]
    high: Mapping[str, np.ndarray]
    samples: Mapping[str, np.ndarray]


def by_client(methods: Sequence[Method], choice: MetricChoice, finals: Finals, names: Sequence[str]) -> dict[str, Any]:
    """The table by client for each seed and as means over seeds, for the page: lists in the order of ``names``."""
    keys = [
        f"{split}.{prefix}{metric}"
        for split in choice.splits
        for prefix in choice.prefixes
        for metric in choice.metrics
    ]
    columns = {
        (i, run.seed): _column(run, finals[i, run.seed], names, keys)
        for i, method in enumerate(methods)
        for run in method.runs
    }
    seeds = sorted({run.seed for method in methods for run in method.runs})
    views = [_view(None, columns, len(methods), keys)]
    if len(seeds) > 1 and len(names) * len(keys) * 3 * len(columns) <= MAX_VALUES:
        views += [
            _view(seed, {at: one for at, one in columns.items() if at[1] == seed}, len(methods), keys) for seed in seeds
        ]
    if len(seeds) > 1:
        *before, end = map(str, seeds)
        views[0]["label"] = f"means over seeds {', '.join(before)} and {end}"
    kinds = {how(key) for key in keys if any(np.isfinite(one.low[key]).any() for one in columns.values())}
    return {
        "names": list(names),
        "baseline": baseline(methods),
        "views": views,
        "methods": [m.name for m in methods],
        "intervals": {key: how(key) for key in keys},
        "any": bool(kinds),
        "shares": [metric for metric in choice.metrics if base(metric) in SHARES],
    }


def _column(run: Run, rows: Sequence[Row], names: Sequence[str], keys: Sequence[str]) -> _Column:
    place = {name: k for k, name in enumerate(names)}
    values, low, high = ({key: np.full(len(names), np.nan) for key in keys} for _ in range(3))
    shown = [row for row in rows if row["client"] in place]
    for split in dict.fromkeys(key.partition(".")[0] for key in keys):
        table = client_table(run, split, shown)
        for row in table:
            k = place[str(row["client"])]
            for name in table.scores:
                key = f"{split}.{name}"
                if key not in values:
                    continue
                values[key][k] = _value(row, name)
                found = table.interval(row, name)
                if found is not None:
                    low[key][k], high[key][k] = found
    counts = {
        split: np.array([float(of.get(name, math.nan)) for name in names])
        for split, of in samples_of(run.table_rows()).items()
    }
    return _Column(values, low, high, counts)


def _view(
    seed: int | None, columns: Mapping[tuple[int, int], _Column], methods: int, keys: Sequence[str]
) -> dict[str, Any]:
    """One view of the table: of one seed, or with means over all of them."""
    shown = []
    for i in range(methods):
        own = [column for (method, _), column in columns.items() if method == i]
        if not own:
            continue
        parts = {
            part: {key: _rounded(_mean([getattr(one, part)[key] for one in own])) for key in keys}
            for part in ("values", "low", "high")
        }
        shown.append({"method": i, **parts})
    splits = dict.fromkeys(split for column in columns.values() for split in column.samples)
    samples = {
        split: [None if value is None else round(value) for value in _rounded(_mean(list(found)))]
        for split in splits
        for found in [(one.samples[split] for one in columns.values() if split in one.samples)]
    }
    return {"seed": seed, "label": "" if seed is None else f"seed {seed}", "samples": samples, "methods": shown}


def _mean(lines: Sequence[np.ndarray]) -> np.ndarray:
    """The mean over those that have a number, NaN where none has."""
    stacked = np.stack(lines)
    there = np.isfinite(stacked)
    total, count = np.where(there, stacked, 0.0).sum(axis=0), there.sum(axis=0)
    mean: np.ndarray = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _rounded(values: np.ndarray) -> list[float | None]:
    return list(_each(values))


def _each(values: np.ndarray) -> Iterator[float | None]:
    for value in values.tolist():
        yield float(f"{value:.5g}") if math.isfinite(value) else None
