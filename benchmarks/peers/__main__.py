"""``python -m benchmarks.peers``: compares rounds of comfedl with those of its peers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import report, venvs
from benchmarks.peers.driver import ROOT, Plan, measure
from benchmarks.peers.roster import PEERS

# The variants of a workload take turns.
WORKS = {f"W{i}": [f"W{i}"] for i in range(8)} | {"W4": ["W4 first", "W4 exact"]}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS)[1:], metavar="W")
    peers = [peer for peer in PEERS if peer != "before"]
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, metavar="PEER", help=", ".join(peers))
    parser.add_argument("--repeats", type=_whole, default=7, help="turns per peer (default 7)")
    parser.add_argument("--seconds", type=_positive, default=1.0, help="target CPU seconds per turn (default 1)")
    parser.add_argument(
        "--limit", type=_positive, default=300.0, help="seconds allowed for a start or turn (default 300)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help="folder for the results")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("COMFEDL_BENCHMARK_VENVS") or cache / "comfedl-benchmarks")
    where = "folder of the peers' environments (default $COMFEDL_BENCHMARK_VENVS, or ~/.cache/comfedl-benchmarks)"
    parser.add_argument("--venvs", type=Path, default=folder, help=where)
    parser.add_argument("--before", metavar="REV", help="also run comfedl as of this commit, beside the others")
    parser.add_argument(
        "--resume", action="store_true", help="keep the workloads that --out has of this commit and plan"
    )
    parser.add_argument("--build", action="store_true", help="create the environments and exit")
    found = parser.parse_args(given)
    if found.out.exists() and not found.out.is_dir():
        parser.error(f"--out is {found.out}, which is a file; give a folder or a new name.")
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
    with checkout(asked.before) as before:
        return run(asked, torch, Plan(asked.repeats, asked.seconds, asked.limit, core, before))


@contextmanager
def checkout(commit: str | None) -> Iterator[Path | None]:
    """A folder with the files of another commit, while it is needed."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="before") as folder:
        tree = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x"], cwd=folder, input=tree, check=True)
        yield Path(folder)


def kept(out: Path, results: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """The workloads measured by an interrupted run of the same commit, plan and peers."""
    place = out / "peers.json"
    if not place.exists():
        return {}
    old = json.loads(place.read_text())
    same = [old["plan"] == results["plan"]]
    same += [old["machine"][part] == results["machine"][part] for part in ("cpu", "torch", "commit")]
    if not all(same):
        return {}
    return {work: found for work, found in old["works"].items() if set(found) == set(peers)}


def run(asked: argparse.Namespace, torch: str, plan: Plan) -> int:
    peers, core = [*asked.peers, *(["before"] if plan.before else [])], plan.core

    made: dict[str, Path | venvs.NotBuilt] = {}
    for peer in peers:
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
        "plan": {**vars(plan), "before": asked.before},
        "versions": {},
        "works": {},
    }
    if asked.resume:
        results["works"] = kept(asked.out, results, peers)
    for group in dict.fromkeys(asked.works):
        if all(work in results["works"] for work in WORKS[group]):
            continue
        results["works"] |= measure(WORKS[group], list(made), plan, python)
        results["versions"] = {peer: venvs.versions(peer, asked.venvs) for peer in made if PEERS[peer].requires}
        report.write(asked.out, results)  # after each workload, so that an interruption loses little
    print(report.as_markdown(results["works"], results["machine"]))
    if find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed (pip install 'comfedl[plot]').", file=sys.stderr)
    else:
        from benchmarks.peers.figure import draw

        draw(results["works"], asked.out / "peers.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
