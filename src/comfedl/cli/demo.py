"""The demo: FedAvg and ComFedL on ten clients with unequal sizes and labels.

It is an illustration, not evidence: setting and split were chosen because they show the effect on validation data. The
README says what holds on fresh splits, and ``benchmarks/claims.py`` measures it.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from comfedl.analysis.report_content import ReportOptions
from comfedl.analysis.report_page import offer_report
from comfedl.cli.tables import side_by_side
from comfedl.config.schema import parse_config, run_config
from comfedl.training.progress import Progress
from comfedl.training.run_folder import check_free

COMMON = {
    "rounds": 80,
    "seed": 1,
    "eval_every": 5,
    "data": {"name": "digits", "partition": "dirichlet", "clients": 10, "alpha": 0.05, "validation": 0.4, "test": 0.0},
    "model": {"name": "logistic"},
}
TRAINING = {"lr": 0.5, "local_steps": 5, "batch_size": 32}
METHODS = {
    "FedAvg": {"name": "fedavg", **TRAINING},
    "ComFedL": {"name": "comfedl", **TRAINING, "outer": {"name": "kl", "gamma": 0.2}},
}
PICKED = "This split was chosen to show the effect; the README says what holds on fresh splits."


def run_demo(out: Path, force: bool) -> None:
    """Train both methods, print them side by side, and write the runs and a report."""
    console = Console(width=None if Console().is_terminal else 110)
    folders = {name: out / name.lower() for name in METHODS}
    for folder in folders.values():
        check_free(folder, force)
    started = time.perf_counter()
    configs = {name: parse_config({**COMMON, "algorithm": method}) for name, method in METHODS.items()}
    fed = configs["FedAvg"].make_data()
    sizes = fed.train.sizes
    console.print(
        f"{len(fed)} clients hold {int(sizes.sum())} handwritten digits: the smallest {sizes.min()}, the largest "
        f"{sizes.max()}, each with a different mix of labels."
    )
    results = {}
    for name, config in configs.items():
        progress = Progress(config.rounds, name)
        results[name] = run_config(config, out=folders[name], force=force, callbacks=[progress], fed=fed)
    console.print(side_by_side(results))
    worst = {name: result.summary()["validation"]["accuracy"]["worst"] for name, result in results.items()}
    console.print(
        f"Accuracy of the worst client: {worst['FedAvg']:.1%} with FedAvg, {worst['ComFedL']:.1%} with ComFedL, which "
        f"gives clients with a larger loss more weight. This took {time.perf_counter() - started:.0f} s."
    )
    console.print(PICKED)
    console.print(f"Written to {out}: " + ", ".join(str(folder.relative_to(out)) for folder in folders.values()))
    names = {folder: name for name, folder in folders.items()}
    report = offer_report([*names], out / "report.html", ReportOptions(cautions=[PICKED]), names)
    console.print(report, markup=False, highlight=False, soft_wrap=True)
