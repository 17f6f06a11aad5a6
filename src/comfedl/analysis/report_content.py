"""The contents of a report as plain values, for the page and the PNGs: curves, clients, the table, the configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from comfedl.analysis.read_runs import Method, Run
from comfedl.analysis.report_clients import Finals, about_clients, by_client, final_rows
from comfedl.analysis.stats import MetricChoice, choose_metric, difference, standard_error
from comfedl.analysis.summary_text import verdict
from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.utils.toml import flat

MAX_CLIENTS = 200  # of more, the page shows the worst, the best and a sample
MAX_ROUNDS = 150  # points per curve
MIN_ROUNDS = 40  # points per client curve when space is short
MAX_CLIENT_VALUES = 300_000  # of all client curves together, or the page becomes slow

Numbers = list[float | None]


@dataclass(frozen=True)
class ReportOptions:
    """The split and metric to compare by, and cautions to add to the verdict."""

    split: str | None = None
    metric: str | None = None
    cautions: Sequence[str] = ()


def report_contents(
    methods: Sequence[Method], notes: Sequence[str] = (), options: ReportOptions | None = None
) -> dict[str, Any]:
    """The contents of a report on these methods."""
    methods = [method for method in methods if any(run.rounds for run in method.runs)] or list(methods)
    options = options or ReportOptions()
    choice = choose_metric(methods, options.split, options.metric)
    finals = final_rows(methods)
    clients, sampling = _clients(methods, choice, finals)
    first = next((rows for rows in finals.values() if rows), [])
    names = _select_clients(first, choice, MAX_CLIENTS)
    return {
        "title": joined([method.name for method in methods]),
        "verdict": [*verdict(methods, choice, about_clients(methods, choice, finals)), *options.cautions],
        "notes": list(notes),
        "sampled": sampling,
        "splits": list(choice.splits),
        "metrics": list(choice.metrics),
        "personal": choice.has_personal,
        "split": choice.split,
        "metric": choice.base_metric,
        "first": "personal" if choice.metric != choice.base_metric else "global",
        "smaller": [metric for metric in choice.metrics if smaller_is_better(metric)],
        "methods": [_method(method, choice) for method in methods],
        "clients": clients,
        "table": table(methods, choice),
        "tables": {
            f"{split}.{metric}": table(methods, replace(choice, split=split, metric=metric))
            for split in choice.splits
            for metric in choice.metrics
        },
        "byClient": by_client(methods, choice, finals, names),
        "configs": configs(methods),
        "done": all(run.done for method in methods for run in method.runs),
    }


def joined(names: Sequence[str], limit: int = 4) -> str:
    """Names as a phrase.

    >>> joined(["FedAvg", "DRFA", "ComFedL"])
    'FedAvg, DRFA and ComFedL'
    """
    listed = [*names] if len(names) <= limit else [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


# Curves over seeds.


def _method(method: Method, choice: MetricChoice) -> dict[str, Any]:
    keys = [
        f"{split}.{prefix}{metric}.{statistic}"
        for split in choice.splits
        for prefix in choice.prefixes
        for metric in choice.metrics
        for statistic in ("mean", "worst")
    ]
    curves = {key: _curve(method, key) for key in (*keys, "effective_clients")}
    return {
        "name": method.name,
        "seeds": [run.seed for run in method.runs],
        "curves": {key: curve for key, curve in curves.items() if curve["rounds"]},
    }


def _curve(method: Method, key: str) -> dict[str, Numbers]:
    """A metric over rounds: its mean, minimum and maximum over seeds."""
    by_round: dict[int, list[float]] = {}
    for run in method.runs:
        for row in run.rounds:
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                by_round.setdefault(int(row["round"]), []).append(value)  # type: ignore[arg-type]
    complete = [number for number in sorted(by_round) if len(by_round[number]) == len(method.runs)]
    rounds = _thinned(complete or sorted(by_round))  # all rounds if none has every seed yet
    return {
        "rounds": [*rounds],
        "mean": [_rounded(float(np.mean(by_round[number]))) for number in rounds],
        "low": [_rounded(min(by_round[number])) for number in rounds],
        "high": [_rounded(max(by_round[number])) for number in rounds],
    }


def _thinned(rounds: Sequence[int], limit: int = MAX_ROUNDS) -> list[int]:
    """At most ``limit`` rounds, evenly spaced, including the first and the last."""
    if len(rounds) <= limit:
        return list(rounds)
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, limit).round().astype(int))]


# Clients.


def _clients(methods: Sequence[Method], choice: MetricChoice, finals: Finals) -> tuple[list[dict[str, Any]], list[str]]:
    """The client curves of every run (or of each method's first run, if all are too many), and notes on sampling."""
    notes, out = [], []
    runs = [(i, run, finals[i, run.seed]) for i, method in enumerate(methods) for run in method.runs]
    rounds_left = MAX_CLIENT_VALUES / max(1, sum(_width(rows) * min(len(rows), MAX_CLIENTS) for _, _, rows in runs))
    if rounds_left < MIN_ROUNDS and any(len(method.runs) > 1 for method in methods):
        runs = [(i, run, rows) for i, run, rows in runs if run is methods[i].runs[0]]
        notes.append("The plots by client show each method's first seed; the curves and the tables cover all seeds.")
    budget = MAX_CLIENT_VALUES / max(1, sum(_width(rows) for _, _, rows in runs))  # clients times rounds
    max_clients = int(min(MAX_CLIENTS, max(30, budget / MIN_ROUNDS)))
    largest = max((min(len(rows), max_clients) for _, _, rows in runs), default=0)
    max_rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, budget / max(1, largest))))
    for i, run, rows in runs:
        names = _select_clients(rows, choice, max_clients)
        if len(names) < len(rows):
            third = len(names) // 3
            notes.append(
                f"Of {len(rows):,} clients, {len(names)} are shown individually: the worst {third}, the best {third} "
                "and a sample of the others. The curves and the table of methods cover all."
            )
        curves = _client_curves(run, names, max_rounds)
        final = {str(row["client"]): row for row in rows}
        ends = {key: [_rounded(_float(final[name].get(key))) for name in names] for key in curves["values"]}
        out.append({"method": i, "seed": run.seed, **curves, "ends": ends})
    return out, list(dict.fromkeys(notes))


def _width(rows: Sequence[Row]) -> int:
    """Values per client and round, without the keys round and client."""
    return len(rows[0]) - 2 if rows else 0


def _select_clients(rows: Sequence[Row], choice: MetricChoice, limit: int) -> list[str]:
    """The clients to show, in recorded order: all, or the worst, the best and an even sample of the others."""
    if len(rows) <= limit:
        return [str(row["client"]) for row in rows]
    sign = -1 if smaller_is_better(choice.metric) else 1
    values = np.array([_float(row.get(choice.key)) for row in rows])
    worst_first = np.argsort(np.nan_to_num(sign * values, nan=np.inf), kind="stable")
    third = limit // 3
    middle = worst_first[third:-third]
    sample = middle[np.linspace(0, len(middle) - 1, limit - 2 * third).round().astype(int)]
    return [str(rows[i]["client"]) for i in sorted({*worst_first[:third], *worst_first[-third:], *sample})]


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _client_curves(run: Run, names: Sequence[str], max_rounds: int) -> dict[str, Any]:
    rounds = _thinned([int(row["round"]) for row in run.rounds], max_rounds)  # type: ignore[arg-type]
    records = run.client_records(names, set(rounds))
    weights, duals = records.values.get("weight"), records.values.get("dual")
    # With partial participation most weights are 0; the duals show what each client would weigh among all.
    partial = weights is not None and bool((weights == 0).any()) and duals is not None
    r = duals if partial else weights
    return {
        "names": list(names),
        "rounds": list(records.rounds),
        "values": {
            key: [[_rounded(value) for value in line] for line in matrix.tolist()]
            for key, matrix in records.values.items()
            if key not in ("weight", "dual")
        },
        "weights": None if r is None else [[_rounded(value) for value in line] for line in r.tolist()],
        "partial": partial,
    }


def _rounded(value: float) -> float | None:
    """Five significant digits, which is more than a plot can show; None for NaN and infinity."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Tables.


STATISTICS = {"average": "mean", "worst": "worst", "worst 10 %": "worst10", "std over clients": "std"}


def table(methods: Sequence[Method], choice: MetricChoice) -> dict[str, Any]:
    """One row per method, and one for its personal models: means over seeds with standard errors."""
    kinds = [(method, prefix) for method in methods for prefix in choice.prefixes]
    columns = [
        _column(
            {
                (method.name, prefix): method.final_values(f"{choice.split}.{prefix}{choice.base_metric}.{statistic}")
                for method, prefix in kinds
            },
            statistic == "std" or smaller_is_better(choice.metric),
        )
        for statistic in STATISTICS.values()
    ]
    costs: list[dict[str, Mapping[int, float]]] = [
        {method.name: method.final_values("effective_clients") for method in methods},
        {method.name: _traffic(method) for method in methods},
        {m.name: {run.seed: run.seconds for run in m.runs if run.seconds is not None} for m in methods},
        {method.name: _epsilon(method) for method in methods},
    ]
    columns += [_column({(name, ""): found for name, found in cost.items()}, None) for cost in costs]
    rows: list[dict[str, Any]] = []
    for method, prefix in kinds:
        cells = [column.get((method.name, prefix)) for column in columns]
        if any(cell is not None and cell["value"] is not None for cell in cells):
            rows.append({"name": method.name, "personal": bool(prefix), "seeds": len(method.runs), "cells": cells})
    heads = [*STATISTICS, "effective clients", "traffic, MB", "time, s", "epsilon"]
    used = [i for i in range(len(heads)) if any((row["cells"][i] or {}).get("value") is not None for row in rows)]
    return {
        "about": f"{choice.base_metric} on {choice.split} data",
        "columns": [heads[i] for i in used],
        "rows": [{**row, "cells": [row["cells"][i] for i in used]} for row in rows],
    }


def _epsilon(method: Method) -> dict[int, float]:
    """The epsilon of all rounds of each run, whichever of them the model is of."""
    last = {run.seed: run.rounds[-1].get("epsilon") for run in method.runs if run.rounds}
    return {seed: value for seed, value in last.items() if isinstance(value, int | float)}


def _traffic(method: Method) -> dict[int, float]:
    up, down = method.final_values("up_bytes"), method.final_values("down_bytes")
    return {seed: (up[seed] + down[seed]) / 1e6 for seed in up if seed in down}


def _column(
    values: Mapping[tuple[str, str], Mapping[int, float]], smaller: bool | None
) -> dict[tuple[str, str], dict[str, Any]]:
    """One cell per row; unless ``smaller`` is None, marks the best of all and what is within noise of it."""
    means = {name: float(np.mean([*by_seed.values()])) for name, by_seed in values.items() if by_seed}
    best = None
    if smaller is not None and len(means) > 1:
        best = (min if smaller else max)(means, key=lambda name: means[name])
    out = {}
    for name, by_seed in values.items():
        noise = best is not None and name in means and difference(values[best], by_seed).within_noise
        out[name] = {
            "value": _rounded(means[name]) if name in means else None,
            "error": _rounded(standard_error([*by_seed.values()])),
            "best": name == best,
            "noise": bool(noise and name != best),
        }
    return out


def configs(methods: Sequence[Method]) -> dict[str, Any]:
    """All settings, one column per method: those that differ, and those that are the same."""
    settings = [flat({key: value for key, value in method.settings.items() if key != "seed"}) for method in methods]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [{"key": key, "values": [_text(one.get(key)) for one in settings]} for key in keys]
    differ = [row for row in rows if len(set(row["values"])) > 1]
    return {
        "names": [method.name for method in methods],
        "seeds": [", ".join(str(run.seed) for run in method.runs) for method in methods],
        "differ": differ,
        "same": [row for row in rows if row not in differ],
    }


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
