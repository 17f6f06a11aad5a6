"""The demo: federated averaging, equal weights and Robust on five sites, one of which is unlike the others.

The sites were fixed before the first run; the learning rate, gamma and the optimiser are the library's defaults.
``python benchmarks/claims.py demo`` repeats it on twenty other seeds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from comfedl.analysis.report_content import ReportOptions
from comfedl.analysis.report_page import offer_report
from comfedl.cli.tables import side_by_side
from comfedl.config.schema import parse_config, run_config
from comfedl.data.demo_sites import TRAIN, TURNED
from comfedl.training.progress import Progress
from comfedl.training.run_folder import check_free

COMMON: dict[str, Any] = {
    "rounds": 80,
    "eval_every": 5,
    "data": {"name": "comfedl.data.demo_sites:demo_sites"},
    "model": {"name": "logistic"},
}
# Robust's optimiser, so that what it gains over equal weights is due to its weights.
SAME = {"server_optimizer": {"name": "sgd", "momentum": 0.9}, "server_average": 0.9}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "equal weights": {"name": "comfedl", **SAME},
    "Robust": {"name": "robust"},
}
FOLDERS = {"FedAvg": "fedavg", "equal weights": "uniform", "Robust": "robust"}


def configs(seed: int) -> dict[str, Any]:
    """The demo's configs, by the name of the method."""
    return {name: parse_config({**COMMON, "seed": seed, "algorithm": method}) for name, method in METHODS.items()}


def run_demo(out: Path, force: bool, seed: int = 0) -> None:
    """Train the three methods, print them side by side, and write the runs and a report."""
    console = Console(width=None if Console().is_terminal else 110)
    folders = {name: out / folder for name, folder in FOLDERS.items()}
    for folder in folders.values():
        check_free(folder, force)
    started = time.perf_counter()
    plans = configs(seed)
    fed = plans["FedAvg"].make_data()
    console.print(
        f"{len(TRAIN)} sites hold {sum(TRAIN.values())} handwritten digits, from {min(TRAIN.values())} to "
        f"{max(TRAIN.values())} each. At one of the smallest, {TURNED}, the scanner is turned by 90 degrees."
    )
    results = {}
    for name, config in plans.items():
        progress = Progress(config.rounds, name)
        results[name] = run_config(config, out=folders[name], force=force, callbacks=[progress], fed=fed)
    console.print(side_by_side(results))
    worst = {name: result.summary()["validation"]["accuracy"]["worst"] for name, result in results.items()}
    console.print(
        f"Accuracy at the worst site: {worst['FedAvg']:.1%} with FedAvg, which weights sites by samples; "
        f"{worst['equal weights']:.1%} with equal weights; {worst['Robust']:.1%} with Robust, which gives sites with a "
        f"larger loss more weight. This took {time.perf_counter() - started:.0f} s; --seed K draws new sites."
    )
    console.print(f"Written to {out}: " + ", ".join(str(folder.relative_to(out)) for folder in folders.values()))
    names = {folder: name for name, folder in folders.items()}
    report = offer_report([*names], out / "report.html", ReportOptions(), names)
    console.print(report, markup=False, highlight=False, soft_wrap=True)
