"""Tables from the runs: Markdown for the page, and one CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.federations import FEDERATIONS
from benchmarks.quality.methods import METHODS
from benchmarks.quality.runs import Row, Run, judged_runs, trial_score, trials
from comfedl.utils.files import write_atomic

WORST = "test.accuracy.worst"
COLUMNS = {WORST: "worst", "test.accuracy.worst10": "worst 10 %", "test.accuracy.mean": "mean"}
NEAR = 0.95  # of the optimum's gain over the optimum of equal weights
Rows = Mapping[Run, Row]


OVERVIEW, DETAILS = "overview", "details"  # the places of the tables in a page


def write(rows: Rows, optima: Mapping[str, Any], out: Path, page: Path | None = None) -> str:
    """Write ``summary.csv``, and the tables into the page; returns the tables."""
    done = [name for name in FEDERATIONS if judged(rows, name)]
    tables = {
        OVERVIEW: overview(rows, optima, done),
        DETAILS: "\n\n".join(details(rows, optima, name) for name in done),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "summary.csv", _summary(rows, done).encode())
    if page is not None:
        write_atomic(page, fill(page.read_text(encoding="utf-8"), tables).encode())
    return "\n\n".join(tables.values())


def fill(text: str, tables: Mapping[str, str]) -> str:
    """A page with each table between its two marks."""
    for name, table in tables.items():
        start, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + "\n" + table + "\n\n" + end + rest.partition(end)[2]
    return text


def judged(rows: Rows, federation: str) -> dict[str, list[Row]]:
    """The rows of each method that has all its judged runs."""
    found = {}
    for method in METHODS:
        wanted = judged_runs(rows, federation, method)
        if wanted and all(run in rows for run in wanted):
            found[method] = [rows[run] for run in wanted]
    return found


def _values(rows: Sequence[Row], measure: str) -> NDArray[np.float64]:
    return np.array([row.get(measure, 0.0) for row in rows], dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> str:
    return f"{values.mean():.3f} ± {_error(values):.3f}"


def _error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def standing(scores: Mapping[str, list[Row]], name: str) -> tuple[str, str]:
    """The best method but Robust, and what ``name`` is beside it: "ahead", "within noise" or "behind"."""
    others = {other: _values(found, WORST) for other, found in scores.items() if not other.startswith("robust")}
    best = max(others, key=lambda other: others[other].mean())
    gap = _values(scores[name], WORST) - others[best]
    noise = 2 * _error(gap)  # the difference of each seed's pair
    return best, "within noise" if abs(gap.mean()) <= noise else "ahead" if gap.mean() > 0 else "behind"


def overview(rows: Rows, optima: Mapping[str, Any], done: Sequence[str]) -> str:
    """One line per federation, one column per method: the worst client's test accuracy."""
    lines = ["| federation | " + " | ".join(entry.title for entry in METHODS.values()) + " | optimum | Robust is |"]
    lines.append("|---" * (len(METHODS) + 3) + "|")
    for name in done:
        scores = judged(rows, name)
        best = max(scores, key=lambda method: _values(scores[method], WORST).mean())
        cells = []
        for method in METHODS:
            text = _mean(_values(scores[method], WORST)) if method in scores else ""
            cells.append(f"**{text}**" if method == best else text)
        verdict = ""
        if "robust" in scores and len(scores) > 1:
            rival, verdict = standing(scores, "robust")
            if "robust-offset" in scores:
                verdict += f"; with `offset` {standing(scores, 'robust-offset')[1]}"
            verdict += f" ({METHODS[rival].title})"
        lines.append(f"| {FEDERATIONS[name].title} | {' | '.join(cells)} | {_optimum(optima, name)} | {verdict} |")
    return "\n".join(lines)


def _optimum(optima: Mapping[str, Any], federation: str, gamma: str = "0.1") -> str:
    if federation not in optima:
        return ""
    return f"{optima[federation][gamma][WORST]:.3f}"


def details(rows: Rows, optima: Mapping[str, Any], federation: str) -> str:
    scores = judged(rows, federation)
    plan = FEDERATIONS[federation]
    lines = [f"### {plan.title}", ""]
    per_round = f", {plan.clients_per_round} clients a round" if plan.clients_per_round else ""
    lines.append(
        f"`{federation}`: {plan.rounds} rounds of {plan.local_steps} steps, batch {plan.batch_size}{per_round}; "
        f"learning rates {', '.join(f'{lr:g}' for lr in plan.lrs)}."
    )
    if federation in optima:
        lines.append(
            f"Optimum of equal weights {_optimum(optima, federation, 'inf')}; of eq. (5) at gamma 0.3, 0.1, 0.03: "
            + ", ".join(_optimum(optima, federation, gamma) for gamma in ("0.3", "0.1", "0.03"))
            + "."
        )
    near = federation in optima
    lines += [
        "",
        "| method | " + " | ".join(COLUMNS.values()) + " | tuned to | least over all trials |" + " rounds |" * near,
    ]
    lines.append("|---" * (len(COLUMNS) + 3 + near) + "|")
    for method, found in scores.items():
        entry = METHODS[method]
        cells = [_mean(_values(found, measure)) for measure in COLUMNS]
        chosen = f"lr {found[0]['lr']:g}, {entry.parameter} {found[0]['value']:g}"
        least = min(max(0.0, trial_score(rows, trial, WORST)) for trial in trials(federation, method))
        cells += [chosen, f"{least:.3f}"]
        if near:
            cells.append(_rounds_to(found, optima[federation]))
        lines.append(f"| {entry.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rounds_to(found: Sequence[Row], optimum: Mapping[str, Any]) -> str:
    """The median round in which the worst client has 95 % of what the optimum gains over that of equal weights."""
    reached = []
    for row in found:
        low, high = optimum["inf"][WORST], optimum["0.1"][WORST]
        if high <= low:
            return "no gain"
        level = low + NEAR * (high - low)
        reached.append(min((int(n) for n, value in row.get("curve", {}).items() if value >= level), default=10**9))
    middle = int(np.median(reached))
    return "not reached" if middle == 10**9 else str(middle)


def _summary(rows: Rows, done: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["federation", "method", "lr", "value", *(f"{c} {k}" for c in COLUMNS for k in ("mean", "error")), "seeds"]
    )
    for name in done:
        for method, found in judged(rows, name).items():
            numbers = [f(_values(found, c)) for c in COLUMNS for f in (np.mean, _error)]
            first = found[0]
            writer.writerow([name, method, first["lr"], first["value"], *(f"{x:.5f}" for x in numbers), len(found)])
    return text.getvalue()
