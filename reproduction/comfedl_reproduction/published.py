"""The tables that AFL's and q-FFL's papers have in common, with our runs beside theirs.

The settings are in experiments/tables.toml. The data are prepared as in q-FFL's public code, which says that it follows
AFL's paper. Writes ``runs.csv`` (each run's test accuracy by client), ``summary.csv``, ``tuning.csv``, ``about.json``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comfedl.analysis.stats import standard_error
from comfedl.data import partition
from comfedl.data.federated import FederatedData
from comfedl.data.loading import load
from comfedl.data.registry import read
from comfedl.data.split import Split
from comfedl.utils.files import write_atomic
from comfedl_reproduction.protocol import Curve, FigureOutcome

DATA = ("adult", "fashion-mnist")
CLASSES = (0, 2, 6)  # t-shirt, pullover, shirt

# The registered data set has 6 numbers and then one column per category, a missing value "?" first where there is one.
ADULT_NUMBERS = 6
ADULT_MISSING = {6, 38, 66}  # of workclass, occupation and native-country


def adult(seed: int, validation: float = 0.0) -> FederatedData:
    """Adult's doctorates and all others, with the 99 categories alone; a missing one is a row of zeros."""
    fed = load("adult", partition.Natural(by="phd"), seed, validation)
    kept = [column for column in range(ADULT_NUMBERS, fed.train.x.shape[1]) if column not in ADULT_MISSING]
    return _with_x(fed, fed.train.x[:, kept])


def fashion(seed: int, validation: float = 0.0) -> FederatedData:
    """Fashion-MNIST's t-shirts, pullovers and shirts, one class per client; pixels are standardised over all ten."""
    shards = partition.Shards(clients=len(CLASSES), classes=1)
    fed = load("fashion-mnist", shards, seed, validation, classes=CLASSES)
    pixels = 255 * torch.from_numpy(read("fashion-mnist").x)
    mean, std = pixels.mean(dim=0), pixels.std(dim=0, unbiased=False)
    return _with_x(fed, (255 * fed.train.x - mean) / (std + 0.001))


def _with_x(fed: FederatedData, x: Tensor) -> FederatedData:
    """The same samples and splits with other features."""
    found = {name: split for name in ("train", "validation", "test") if (split := fed.split(name)) is not None}
    return FederatedData.from_splits(
        {name: Split(x, split.y, split.names, split.offsets, split.rows) for name, split in found.items()}
    )


# Test samples by client, for the accuracy over all of them, which is what the papers call the average.
SAMPLES = {"adult": {"phd": 181, "non-phd": 16_100}, "fashion": {f"client-{i}": 1000 for i in range(3)}}


class Printed(NamedTuple):
    """A row that was published: test accuracy in percent, of the worst client and over all samples."""

    source: str
    method: str
    worst: float
    average: float | None = None


PRINTED = {
    "adult": (
        Printed("q-FFL's paper", "q = 0", 69.9, 83.2),
        Printed("q-FFL's paper", "AFL", 73.0, 82.5),
        Printed("q-FFL's paper", "q-FFL", 74.1, 82.6),
    ),
    "fashion": (
        Printed("AFL's paper", "uniform", 71.2, 81.8),
        Printed("AFL's paper", "AFL", 74.5, 82.3),
        Printed("q-FFL's paper", "q = 0", 66.0, 78.8),
        Printed("q-FFL's paper", "AFL", 71.4, 77.8),
        Printed("q-FFL's paper", "q-FFL", 74.2, 77.8),
        Printed("ASPIRE-EASE's paper", "FedAvg", 66.6),
        Printed("ASPIRE-EASE's paper", "AFL", 77.3),
        Printed("ASPIRE-EASE's paper", "DRFA-Prox", 78.0),
        Printed("ASPIRE-EASE's paper", "ASPIRE-EASE", 78.8),
    ),
}
TITLES = {
    "adult": "Adult, doctorates and all others",
    "fashion": "Fashion-MNIST, t-shirt, pullover and shirt",
}


def table_of(group: str) -> str:
    """The table that a group of runs belongs to."""
    return group.partition("-")[0]


def write(outcome: FigureOutcome, folder: Path) -> Path:
    """Write the tables of all runs."""
    from comfedl_reproduction.report import about, as_csv, tuning  # needs the extra `plot`

    folder.mkdir(parents=True, exist_ok=True)
    runs = [_run(curve, seed, record) for curve in outcome.curves for seed, record in enumerate(curve.records)]
    for name, rows in (("runs", runs), ("summary", summary(runs)), ("tuning", tuning(outcome))):
        write_atomic(folder / f"{name}.csv", as_csv(rows).encode())
    told = {**about(outcome), "data": ", ".join(DATA)}
    write_atomic(folder / "about.json", (json.dumps(told, indent=2) + "\n").encode())
    return folder


def _run(curve: Curve, seed: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """A run's test accuracy: of the worst client, over all samples, and by client."""
    group = curve.arm.group
    sizes = SAMPLES[table_of(group)]
    clients = {row["client"]: row["test.accuracy"] for row in record["clients"]}
    row: dict[str, Any] = {
        "group": group,
        "method": curve.arm.label,
        "seed": seed,
        "diverged": bool(record["diverged"]),
    }
    if clients:
        row["worst"] = round(min(clients.values()), 5)
        row["average"] = round(sum(sizes[name] * value for name, value in clients.items()) / sum(sizes.values()), 5)
        row["by client"] = json.dumps({name: round(value, 5) for name, value in clients.items()})
    else:
        row |= {"worst": None, "average": None, "by client": None}
    row["algorithm"] = json.dumps(record["settings"]["algorithm"])
    row["rounds"], row["core_seconds"] = record["settings"]["rounds"], record["core_seconds"]
    return row


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard errors over seeds, by group and method."""
    found = []
    for group, method in dict.fromkeys((run["group"], run["method"]) for run in runs):
        own = [run for run in runs if (run["group"], run["method"]) == (group, method)]
        ended = [run for run in own if not run["diverged"]]
        row: dict[str, Any] = {"group": group, "method": method, "seeds": len(own), "diverged": len(own) - len(ended)}
        for name in ("worst", "average"):
            values = [run[name] for run in ended]
            row[name] = round(fmean(values), 5) if values else None
            row[f"{name} ±"] = round(standard_error(values), 5) if len(values) > 1 else None
        found.append({**row, "algorithm": own[0]["algorithm"]})
    return found


def as_markdown(folder: Path) -> str:
    """Both tables, theirs and ours; empty if there are no runs."""
    if not (folder / "summary.csv").exists():
        return ""
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for table, title in TITLES.items():
        lines += [f"**{title}**", "", "| | method | worst client | all samples |", "|---|---|---|---|"]
        for one in PRINTED[table]:
            average = "" if one.average is None else f"{one.average:.1f}"
            lines.append(f"| {one.source} | {one.method} | {one.worst:.1f} | {average} |")
        for row in rows:
            if table_of(row["group"]) == table:
                whose = "ours, the command's values" if row["group"].endswith("published") else "ours, tuned"
                numbers = [_percent(row, name) for name in ("worst", "average")]
                lines.append(f"| {whose} | {row['method']} | {numbers[0]} | {numbers[1]} |")
        lines.append("")
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    lines.append(
        f"Percent of test samples; ours are means of {len(about['seeds'])} seeds ± their standard error. "
        f"{about['tuning_runs']} tuning and {about['runs']} evaluation runs took "
        f"{about['tuning_core_seconds'] + about['core_seconds']} core seconds at "
        f"{', '.join(f'`{commit[:9]}`' for commit in about['commits'])}; every run is in `results/tables`."
    )
    return "\n".join(lines) + "\n"


def _percent(row: Mapping[str, str], name: str) -> str:
    if not row[name]:
        return "diverges"
    error = f" ± {100 * float(row[f'{name} ±']):.1f}" if row[f"{name} ±"] else ""
    return f"{100 * float(row[name]):.1f}{error}"
