"""The table by client of a run's folder: what it records, its numbers of samples, and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from comfedl.analysis.read_runs import Run
from comfedl.core.client_statistics import Row, base
from comfedl.core.intervals import BOOTSTRAP, STUDENT, WILSON
from comfedl.training.client_table import COUNTS, HIGH, LOW, PERSONAL, ClientTable, number, samples_of

MEANS = ("loss", "mae", "brier")  # of samples, which have Student's interval


def client_table(run: Run, split: str, recorded: Sequence[Row] | None = None) -> ClientTable:
    """The clients after the last evaluated round, or that of the model; ``recorded`` are their rows, if known."""
    rows = run.final_client_rows() if recorded is None else recorded
    kept = run.table_rows()
    at_end = bool(rows) and bool(kept) and kept[0]["round"] == rows[0]["round"]  # else the run goes on
    counts_samples = all(row.get(COUNTS, True) for row in kept)
    return ClientTable.of(split, rows, samples_of(kept), _bounds(kept, split) if at_end else None, counts_samples)


def _bounds(kept: Sequence[Row], split: str) -> dict[str, Mapping[str, tuple[float, float, str]]]:
    """client -> measure -> interval."""
    found: dict[str, Mapping[str, tuple[float, float, str]]] = {}
    for row in kept:
        own = {}
        for key, low in row.items():
            name = key.removeprefix(f"{split}.").removesuffix(LOW)
            high = row.get(f"{split}.{name}{HIGH}")
            if key == f"{split}.{name}{LOW}" and _finite(low) and _finite(high):
                own[name] = (float(low or 0), float(high or 0), method(name))
        found[str(row["client"])] = own
    return found


def method(measure: str) -> str:
    """How a run's intervals of a measure were found."""
    name = base(measure).removeprefix(PERSONAL)
    return WILSON if name == "accuracy" else STUDENT if name in MEANS else BOOTSTRAP


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def unjudged_in(tables: Mapping[str, Sequence[ClientTable]]) -> list[str]:
    """Which clients cannot be judged, in sentences; those that are not about all runs say which."""
    total = sum(len(found) for found in tables.values())
    said: dict[str, dict[str, int]] = {}
    for name, found in tables.items():
        for table in found:
            for sentence in table.unjudged():
                of = said.setdefault(sentence, {})
                of[name] = of.get(name, 0) + 1
    out = []
    for sentence, of in said.items():
        count = sum(of.values())
        if count == total:
            out.append(sentence)
        elif len(of) == len(tables):
            out.append(f"{sentence[:-1]} (in {count} of {total} runs).")
        else:
            out.append(f"{sentence[:-1]} (with {', '.join(of)}).")
    return out


def about_worst_of(tables: Mapping[str, Sequence[ClientTable]], split: str, measure: str) -> list[str]:
    """The worst client's interval with every method, and whether it is certain who that is; means over seeds."""
    intervals, unsure = [], []
    for name, found in tables.items():
        rows = [(table, worst) for table in found if (worst := table.worst(measure)) is not None]
        bounds = [own for table, worst in rows if (own := table.interval(worst, measure)) is not None]
        if not rows or len(bounds) < len(rows):
            continue
        value = fmean(float(worst[measure] or 0) for _, worst in rows)
        low, high = (fmean(own[k] for own in bounds) for k in (0, 1))
        intervals.append(f"{number(value)} ({number(low)} to {number(high)}) with {name}")
        overlapping = [pair[0] > 0 for table, _ in rows if (pair := table.overlapping(measure)) is not None]
        if 2 * sum(overlapping) >= len(rows):  # for half of the seeds or more
            unsure.append(name)
    if not intervals:
        return []
    seeds = " (means over seeds)" if max(len(found) for found in tables.values()) > 1 else ""
    label = f"{split} {measure.replace('_', ' ')}"
    said = [f"Worst client's {label}, with its 95 % interval{seeds}: {', '.join(intervals)}."]
    if unsure:
        *before, end = unsure
        names = f"{', '.join(before)} and {end}" if before else end
        start = "This interval" if len(unsure) == len(tables) else f"With {names} this interval"
        said.append(f"{start} overlaps those of other clients, so which client is worst is within noise.")
    return said
