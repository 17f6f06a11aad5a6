"""All that docs/performance.md says about W1 to W7, by one command on an otherwise idle machine (about 25 minutes).

    python -m benchmarks.speed [--repeats 5] [--out results/benchmarks] [--page docs/performance.md]

Compares with the peers, then measures two threads and two ranks, and puts the tables into the page. Run it again after
an interruption: what is there of the same commit is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import report
from benchmarks.peers.__main__ import main as compare

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["W3", "W5", "W6", "W7"]
# By workload: whom to compare with, and the least ratio that was aimed at.
PEER_GOALS = {
    "W1": (("pfl", "loop"), 6.0),
    "W2": (("pfl", "loop"), 10.0),
    "W3": (("fluke", "pfl", "loop", "loader", "lean", "flwr"), 1.4),
    "W4 first": (("loop",), 1.4),
    "W4 exact": (("loop",), 2.0),
    "W5": (("loop",), 1.3),
    "W6": (("fluke", "pfl", "loop", "loader", "lean", "flwr"), 1.0),
    "W7": (("fluke", "pfl", "loop", "loader", "lean", "flwr"), 1.0),
}


def goals(records: report.Records) -> list[str]:
    """The table of what was aimed at and what came out: the smallest ratio among the peers named."""
    lines = ["| | aim | came out | |", "|---|---|---|---|"]
    rows = {(row["work"], row["peer"]): row for row in report.rows(records)}
    for work, (peers, least) in PEER_GOALS.items():
        found = [(rows[work, peer]["ratio"], peer) for peer in peers if "ratio" in rows.get((work, peer), {})]
        if not found:
            continue
        ratio, peer = min(found)
        who = " and ".join(peers) if len(peers) <= 2 else "the fastest peer"
        verdict = "reached" if ratio >= least else "**missed**"
        lines.append(f"| {work} | {least:g} times {who} | {ratio:.2f} ({peer}) | {verdict} |")
    return lines


def filled(page: str, name: str, text: str) -> str:
    """The page with this text between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"The page has no part {begin} ... {end}.")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def write_page(page: Path, out: Path) -> None:
    """Put the tables of the results into the page."""
    results = json.loads((out / "peers.json").read_text())
    tables = report.as_markdown(results["works"], results["machine"]).split("The work of the first round:")[0]
    text = filled(page.read_text(), "peers", tables)
    text = filled(text, "goals", "\n".join(goals(results["works"])))
    both = [(out / f"{name}.md").read_text().strip() for name in ("cores", "ranks")]
    page.write_text(filled(text, "cores", "\n\n".join(both)))


def is_done(place: Path, commit: str, works: list[str]) -> bool:
    """Whether this file has these workloads, measured at this commit."""
    if not place.exists():
        return False
    found: dict[str, Any] = json.loads(place.read_text())
    return found["machine"]["commit"] == commit and not {*works} - {*found["works"]}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds per turn (default 1)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds allowed for a start or a turn (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per turn with two cores (default 3)")
    parser.add_argument("--works", nargs="+", default=[f"W{i}" for i in range(1, 8)])
    parser.add_argument("--peers", nargs="+", help="some of the peers (default all)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    asked = parser.parse_args(given)
    turns = ["--repeats", str(asked.repeats), "--seconds", str(asked.seconds), "--limit", str(asked.limit)]
    who = ["--peers", *asked.peers] if asked.peers else []
    if code := compare(["--resume", "--works", *asked.works, *who, *turns, "--out", str(asked.out)]):
        return code
    commit = report.machine(ROOT, torch.__version__, None)["commit"]
    works = [work for work in HEAVY if work in asked.works]
    for name in ("cores", "ranks") if works else ():
        if is_done(asked.out / f"{name}.json", commit, works):
            continue
        few = [
            "--works",
            *works,
            "--repeats",
            str(asked.repeats),
            "--rounds",
            str(asked.rounds),
            "--out",
            str(asked.out),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *few], cwd=ROOT, env=environment, check=True)
    write_page(asked.page, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
