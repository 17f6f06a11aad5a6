"""``python -m benchmarks.peers``: rounds of comfedl and of its peers, side by side."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import report, venvs
from benchmarks.peers.driver import ROOT, Plan, measure
from benchmarks.peers.roster import PEERS

# Those of one name take turns with one another.
WORKS = {"W0": ["W0"], "W1": ["W1"], "W2": ["W2"], "W3": ["W3"], "W4": ["W4 first", "W4 exact"]}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["W1", "W2", "W3", "W4"], metavar="W")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--repeats", type=_whole, default=7, help="turns for each peer (default 7)")
    parser.add_argument("--seconds", type=_positive, default=1.0, help="CPU seconds that a turn aims at (default 1)")
    parser.add_argument("--limit", type=_positive, default=300.0, help="seconds for a start or a turn (default 300)")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help="folder for the results")
    folder = Path(os.environ.get("COMFEDL_BENCHMARK_VENVS", ROOT / ".benchmarks"))
    where = "folder of the peers' environments (default $COMFEDL_BENCHMARK_VENVS, or .benchmarks)"
    parser.add_argument("--venvs", type=Path, default=folder, help=where)
    parser.add_argument("--build", action="store_true", help="make the environments and stop")
    found = parser.parse_args(given)
    if found.out.exists() and not found.out.is_dir():
        parser.error(f"--out is {found.out}, which is a file; give a folder, or a name that is still free.")
    return found


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but it must be a whole number from 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}, but it must be a number above 0")
    return number


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    torch = version("torch").split("+")[0]
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
    plan = Plan(asked.repeats, asked.seconds, asked.limit, core)

    made: dict[str, Path | venvs.NotBuilt] = {}
    for peer in asked.peers:
        try:
            made[peer] = venvs.interpreter(peer, asked.venvs.absolute(), torch)
        except venvs.NotBuilt as error:
            made[peer] = error
            print(f"{peer}: {error}", file=sys.stderr)
    if asked.build:
        return int(any(isinstance(found, venvs.NotBuilt) for found in made.values()))

    def python(peer: str) -> Path:
        found = made[peer]
        if isinstance(found, venvs.NotBuilt):
            raise found
        return found

    results: dict[str, Any] = {
        "machine": report.machine(ROOT, torch, core),
        "plan": vars(plan),
        "versions": {},
        "works": {},
    }
    for group in dict.fromkeys(asked.works):
        results["works"] |= measure(WORKS[group], list(made), plan, python)
        results["versions"] = {peer: venvs.versions(peer, asked.venvs) for peer in made if PEERS[peer].requires}
        report.write(asked.out, results)  # after each of them, so that a stop loses little
    print(report.as_markdown(results["works"], results["machine"]))
    if find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed (pip install 'comfedl[plot]').", file=sys.stderr)
    else:
        from benchmarks.peers.figure import draw

        draw(results["works"], asked.out / "peers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
