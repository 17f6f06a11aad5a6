"""All that the page and the pictures show, as plain values: curves with bands, clients, the table, the configs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comfedl.analysis.read_runs import Method, Run
from comfedl.analysis.stats import Measures, difference, error, measures
from comfedl.analysis.summary_text import verdict
from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.utils.toml import flat

MOST_CLIENTS = 200  # more than these are shown by the worst, the best and a sample
MOST_ROUNDS = 150  # points of a curve
FEWEST_ROUNDS = 40
MOST_NUMBERS = 300_000  # of clients' curves in one page

Numbers = list[float | None]


@dataclass(frozen=True)
class Asked:
    """How to judge, where the reader has said so, and what else the verdict must say."""

    split: str | None = None
    metric: str | None = None
    beware: Sequence[str] = ()


def contents(methods: Sequence[Method], notes: Sequence[str] = (), asked: Asked | None = None) -> dict[str, Any]:
    """What a page shows of these methods."""
    methods = [method for method in methods if any(run.rounds for run in method.runs)] or list(methods)
    asked = asked or Asked()
    by = measures(methods, asked.split, asked.metric)
    shown, told = _clients(methods, by)
    return {
        "title": titled([method.name for method in methods]),
        "verdict": [*verdict(methods, by), *asked.beware],
        "notes": list(notes),
        "sampled": told,
        "splits": list(by.splits),
        "metrics": list(by.metrics),
        "personal": by.personal,
        "split": by.split,
        "metric": by.base,
        "first": "personal" if by.metric != by.base else "global",
        "smaller": [metric for metric in by.metrics if smaller_is_better(metric)],
        "methods": [_method(method, by) for method in methods],
        "clients": shown,
        "table": table(methods, by),
        "configs": configs(methods),
        "done": all(run.done for method in methods for run in method.runs),
    }


def titled(names: Sequence[str], most: int = 4) -> str:
    """Names in a row, as one says them.

    >>> titled(["FedAvg", "DRFA", "ComFedL"])
    'FedAvg, DRFA and ComFedL'
    """
    named = [*names] if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


# Curves over seeds.


def _method(method: Method, by: Measures) -> dict[str, Any]:
    keys = [
        f"{split}.{prefix}{metric}.{kind}"
        for split in by.splits
        for prefix in by.prefixes
        for metric in by.metrics
        for kind in ("mean", "worst")
    ]
    found = {key: curve(method, key) for key in (*keys, "effective_clients")}
    return {
        "name": method.name,
        "seeds": [run.seed for run in method.runs],
        "curves": {key: one for key, one in found.items() if one["rounds"]},
    }


def curve(method: Method, key: str) -> dict[str, Numbers]:
    """A number over the rounds: the mean over the seeds that have come so far, and the lowest and the highest."""
    by_round: dict[int, list[float]] = {}
    for run in method.runs:
        for row in run.rounds:
            value = row.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                by_round.setdefault(int(row["round"]), []).append(value)  # type: ignore[arg-type]
    whole = [number for number in sorted(by_round) if len(by_round[number]) == len(method.runs)]
    rounds = _thinned(whole or sorted(by_round))  # where no round has all the seeds, those that there are
    return {
        "rounds": [*rounds],
        "mean": [short(float(np.mean(by_round[number]))) for number in rounds],
        "low": [short(min(by_round[number])) for number in rounds],
        "high": [short(max(by_round[number])) for number in rounds],
    }


def _thinned(rounds: Sequence[int], most: int = MOST_ROUNDS) -> list[int]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))]


# Clients.


def _clients(methods: Sequence[Method], by: Measures) -> tuple[list[dict[str, Any]], list[str]]:
    """The clients of every run, or of each method's first where all would be too much to look at."""
    told, out = [], []
    runs = [(place, run, run.last_clients()) for place, method in enumerate(methods) for run in method.runs]
    room = MOST_NUMBERS / max(1, sum(_width(rows) * min(len(rows), MOST_CLIENTS) for _, _, rows in runs))
    if room < FEWEST_ROUNDS and any(len(method.runs) > 1 for method in methods):
        runs = [(place, run, rows) for place, run, rows in runs if run is methods[place].runs[0]]
        told.append("Clients are shown for each method's first seed; all seeds are in the curves and the table.")
    each = MOST_NUMBERS / max(
        1, sum(_width(rows) for _, _, rows in runs)
    )  # clients times rounds that there is room for
    most = int(min(MOST_CLIENTS, max(30, each / FEWEST_ROUNDS)))
    largest = max((min(len(rows), most) for _, _, rows in runs), default=0)
    rounds = int(min(MOST_ROUNDS, max(FEWEST_ROUNDS, each / max(1, largest))))
    for place, run, rows in runs:
        names = chosen(rows, by, most)
        if len(names) < len(rows):
            told.append(_sampled(len(names), len(rows)))
        out.append({"method": place, "seed": run.seed, **_shown(run, names, rounds)})
    return out, list(dict.fromkeys(told))


def _width(rows: Sequence[Row]) -> int:
    """How many numbers a client has in a round."""
    return len(rows[0]) - 2 if rows else 0


def _sampled(shown: int, clients: int) -> str:
    third = shown // 3
    return (
        f"Of {clients:,} clients, {shown} are shown one by one: the worst {third}, the best {third} and a "
        "sample of the others. The curves and the table are of all."
    )


def chosen(rows: Sequence[Row], by: Measures, most: int = MOST_CLIENTS) -> list[str]:
    """The clients to show, in the order of the records: all, or the worst, the best and evenly drawn others."""
    if len(rows) <= most:
        return [str(row["client"]) for row in rows]
    sign = -1 if smaller_is_better(by.metric) else 1
    values = np.array([_float(row.get(by.key)) for row in rows])
    order = np.argsort(np.nan_to_num(sign * values, nan=np.inf), kind="stable")  # the worst first
    third = most // 3
    middle = order[third:-third]
    drawn = middle[np.linspace(0, len(middle) - 1, most - 2 * third).round().astype(int)]
    return [str(rows[i]["client"]) for i in sorted({*order[:third], *order[-third:], *drawn})]


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _shown(run: Run, names: Sequence[str], most_rounds: int) -> dict[str, Any]:
    rounds = _thinned([int(row["round"]) for row in run.rounds], most_rounds)  # type: ignore[arg-type]
    found = run.clients(names, set(rounds))
    weights = found.values.get("weight")
    duals = found.values.get("dual")
    partial = weights is not None and bool((weights == 0).any()) and duals is not None
    r = duals if partial else weights
    return {
        "names": list(names),
        "rounds": list(found.rounds),
        "values": {
            key: [[short(value) for value in line] for line in matrix.tolist()]
            for key, matrix in found.values.items()
            if key not in ("weight", "dual")
        },
        "weights": None if r is None else [[short(value) for value in line] for line in r.tolist()],
        "partial": partial,
    }


def short(value: float) -> float | None:
    """A number with the digits that a picture can show; None for what is none."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Tables.


STATISTICS = {"average": "mean", "worst": "worst", "worst 10 %": "worst10", "std over clients": "std"}


def table(methods: Sequence[Method], by: Measures) -> dict[str, Any]:
    """A row a method, and one for its personal models: means over seeds with their standard errors."""
    costs = [
        {method.name: method.numbers("effective_clients") for method in methods},
        {method.name: _traffic(method) for method in methods},
        {m.name: {run.seed: run.seconds for run in m.runs if run.seconds is not None} for m in methods},
    ]
    rows: dict[str, list[dict[str, Any]]] = {method.name: [] for method in methods}
    for prefix in by.prefixes:
        columns = [
            _column({m.name: m.numbers(f"{by.split}.{prefix}{by.base}.{kind}") for m in methods}, smaller)
            for kind in STATISTICS.values()
            for smaller in [kind == "std" or smaller_is_better(by.metric)]
        ]
        columns += [_column(cost if not prefix else {}, None) for cost in costs]
        for method in methods:
            cells = [column.get(method.name) for column in columns]
            if any(cell is not None and cell["value"] is not None for cell in cells):
                rows[method.name].append(
                    {"name": method.name, "personal": bool(prefix), "seeds": len(method.runs), "cells": cells}
                )
    made = [row for own in rows.values() for row in own]
    heads = [*STATISTICS, "effective clients", "traffic, MB", "time, s"]
    used = [i for i in range(len(heads)) if any((row["cells"][i] or {}).get("value") is not None for row in made)]
    return {
        "about": f"{by.base} on {by.split} data",
        "columns": [heads[i] for i in used],
        "rows": [{**row, "cells": [row["cells"][i] for i in used]} for row in made],
    }


def _traffic(method: Method) -> dict[int, float]:
    up, down = method.numbers("up_bytes"), method.numbers("down_bytes")
    return {seed: (up[seed] + down[seed]) / 1e6 for seed in up if seed in down}


def _column(found: Mapping[str, Mapping[int, float]], smaller: bool | None) -> dict[str, dict[str, Any]]:
    """A column's cells; where one end is better, the best is marked, and what cannot be told from it."""
    means = {name: float(np.mean([*numbers.values()])) for name, numbers in found.items() if numbers}
    best = None
    if smaller is not None and len(means) > 1:
        best = (min if smaller else max)(means, key=lambda name: means[name])
    out = {}
    for name, numbers in found.items():
        noise = best is not None and name in means and difference(found[best], numbers).noise
        out[name] = {
            "value": short(means[name]) if name in means else None,
            "error": short(error([*numbers.values()])),
            "best": name == best,
            "noise": bool(noise and name != best),
        }
    return out


def configs(methods: Sequence[Method]) -> dict[str, Any]:
    """Every setting, a column a method, those that differ first."""
    settings = [flat({key: value for key, value in method.settings.items() if key != "seed"}) for method in methods]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [{"key": key, "values": [_text(one.get(key)) for one in settings]} for key in keys]
    differ = [row for row in rows if len(set(row["values"])) > 1]
    return {
        "names": [method.name for method in methods],
        "seeds": [_listed(run.seed for run in method.runs) for method in methods],
        "differ": differ,
        "same": [row for row in rows if row not in differ],
    }


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
