"""Writes the files of a figure: curves.csv, summary.csv, tuning.csv, about.json, the plots and HTML reports."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from comfedl import __version__
from comfedl.analysis.read_runs import Method, Run
from comfedl.analysis.report_content import ReportOptions
from comfedl.analysis.report_page import has_plotly, write_page
from comfedl.analysis.stats import standard_error
from comfedl.utils.files import write_atomic
from comfedl_reproduction.plots import plots
from comfedl_reproduction.protocol import Curve, FigureOutcome

SPLITS = ("train", "validation", "test")


def write(outcome: FigureOutcome, folder: Path) -> Path:
    """Write all files of a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"curves": curves(outcome), "summary": summary(outcome), "tuning": tuning(outcome)}
    for name, rows in tables.items():
        if rows:
            write_atomic(folder / f"{name}.csv", as_csv(rows).encode())
    for name, png in plots(outcome).items():
        write_atomic(folder / name, png)
    write_atomic(folder / "about.json", (json.dumps(about(outcome), indent=2) + "\n").encode())
    if has_plotly():
        write_pages(outcome, folder)
    return folder


def write_pages(outcome: FigureOutcome, folder: Path) -> None:
    """Write one HTML report on test data per group of curves, since only those within a group are comparable."""
    groups = list(dict.fromkeys(curve.arm.group for curve in outcome.curves))
    for name in groups:
        curves = [curve for curve in outcome.curves if curve.arm.group == name]
        methods = [Method(_title(curve), _completed(curve)) for curve in curves if _completed(curve)]
        notes = [
            f"{_title(curve)} diverged with {diverged} of {len(curve.records)} seeds, which are left out."
            for curve in curves
            if (diverged := len(curve.records) - len(_completed(curve)))
        ]
        if methods:
            title = f"{outcome.figure.title}: {outcome.figure.groups[name]}."
            options = ReportOptions("test", outcome.figure.metric, [title, *notes])
            write_page(methods, (), folder / f"report{f'-{name}' if len(groups) > 1 else ''}.html", options)


def _title(curve: Curve) -> str:
    return f"{curve.arm.label}, {curve.arm.point}" if curve.arm.point else curve.arm.label


def _completed(curve: Curve) -> list[Run]:
    """The runs that did not diverge."""
    return [
        Run(record["settings"], record["rounds"], True, client_rows=record["clients"])
        for record in curve.records
        if record["diverged"] is None
    ]


def metrics(outcome: FigureOutcome) -> list[str]:
    """The columns of the figure: loss and accuracy, mean and worst client, of the global or the personal models."""
    prefix = "personal_" if outcome.figure.metric.startswith("personal_") else ""
    return [f"{s}.{prefix}{m}.{k}" for s in SPLITS for m in ("accuracy", "loss") for k in ("mean", "worst")]


def curves(outcome: FigureOutcome) -> list[dict[str, Any]]:
    """One row per run and evaluated round."""
    return [
        {**_names(curve), "seed": seed, "round": row["round"], "iterations": row["round"] * _local_steps(record)}
        | {name: _rounded(row[name]) for name in metrics(outcome)}
        for curve in outcome.curves
        for seed, record in enumerate(curve.records)
        for row in record["rounds"]
    ]


def summary(outcome: FigureOutcome) -> list[dict[str, Any]]:
    """One row per arm: its algorithm, how many seeds diverged, and the last round's means with standard errors."""
    return [_summary_row(curve, metrics(outcome)) for curve in outcome.curves]


def _summary_row(curve: Curve, names: Sequence[str]) -> dict[str, Any]:
    completed = [record for record in curve.records if record["diverged"] is None]
    row: dict[str, Any] = {
        **_names(curve),
        "seeds": len(curve.records),
        "diverged": len(curve.records) - len(completed),
        "algorithm": json.dumps(curve.records[0]["settings"]["algorithm"]),
    }
    for name in names:
        values = [record["rounds"][-1][name] for record in completed]
        row[name] = _rounded(fmean(values)) if values else None
        row[f"{name} ±"] = _rounded(standard_error(values)) if len(values) > 1 else None
    row["message"] = next((record["diverged"]["message"] for record in curve.records if record["diverged"]), None)
    return row


def tuning(outcome: FigureOutcome) -> list[dict[str, Any]]:
    """One row per candidate, with its score and whether it was selected."""
    return [
        {
            "arm": trial.arm.name,
            "candidate": json.dumps(trial.candidate["algorithm"]),
            "metric": outcome.figure.choose_by,
            "seeds": " ".join(str(run.settings["seed"]) for run in trial.runs),
            "score": _rounded(trial.score) if math.isfinite(trial.score) else "diverged",
            "chosen": "yes" if outcome.winners[trial.arm.name] is trial.candidate else "",
        }
        for trial in outcome.trials
    ]


def about(outcome: FigureOutcome) -> dict[str, Any]:
    """The provenance of the numbers."""
    records = [record for curve in outcome.curves for record in curve.records]
    figure = outcome.figure
    iterations = {record["settings"]["rounds"] * _local_steps(record) for record in records}
    batches = {record["settings"]["algorithm"]["batch_size"] for record in records}
    return {
        "figure": figure.name,
        "title": figure.title,
        "preset": figure.preset,
        "data": figure.data,
        "seeds": list(range(figure.seeds)),
        "local_iterations": sorted(iterations),
        "batch_sizes": sorted(batches),
        "tuning_seeds": sorted({run.settings["seed"] for trial in outcome.trials for run in trial.runs}),
        "commits": sorted({str(record["commit"]) for record in records}),
        "tuning_runs": sum(len(trial.runs) for trial in outcome.trials),
        "tuning_core_seconds": round(sum(trial.core_seconds for trial in outcome.trials)),
        "runs": len(records),
        "core_seconds": round(sum(record["core_seconds"] for record in records)),
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _names(curve: Curve) -> dict[str, str]:
    arm = curve.arm
    return {"group": arm.group, "method": arm.label, "point": arm.point or ""}


def _local_steps(record: Mapping[str, Any]) -> int:
    return int(record["settings"]["algorithm"]["local_steps"])


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
