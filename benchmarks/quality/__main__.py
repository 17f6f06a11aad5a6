"""Every method on every federation, tuned with the same budget on validation data and judged on test data.

    python -m benchmarks.quality [FEDERATION ...] [--methods M ...] [--jobs 2] [--out results/quality]
    python -m benchmarks.quality --report --page docs/quality.md

Goes on where it was stopped: ``runs.jsonl`` gets each run as it ends. ``--report`` only makes the tables from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.quality import optimum, report, runs
from benchmarks.quality.federations import FEDERATIONS
from benchmarks.quality.methods import METHODS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("federations", nargs="*", metavar="FEDERATION", help=", ".join(FEDERATIONS))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[*METHODS], metavar="M", help=", ".join(METHODS)
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("results/quality"))
    parser.add_argument("--report", action="store_true", help="run nothing, only make the tables")
    parser.add_argument("--page", type=Path, help="a page to write the tables into")
    given = parser.parse_args()
    unknown = [name for name in given.federations if name not in FEDERATIONS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a federation; choose from {', '.join(FEDERATIONS)}.")
    wanted, path = given.federations or [*FEDERATIONS], given.out / "runs.jsonl"
    if not given.report:
        for row in runs.complete(wanted, given.methods, path, given.jobs):
            score = row.get("test.accuracy.worst", "diverged")
            kind = "tuning" if row["seed"] >= runs.TUNING_SEED else "judged"
            named = f"lr {row['lr']:g}, {METHODS[row['method']].parameter} {row['value']:g}, seed {row['seed']}"
            print(f"{row['federation']:16} {row['method']:14} {kind} {named}: {score}", flush=True)
        optimum.complete(wanted, given.out / "optimum.json")
    print(report.write(runs.load(path), optimum.load(given.out / "optimum.json"), given.out, given.page))


if __name__ == "__main__":
    main()
