"""The time per round over three sites behind Flower on this machine, and in one process.

    python -m benchmarks.flower [--rounds 8] [--sites 3] [--out results/benchmarks]

Both run ComFedL with KL weights on digits: the sites as ``comfedl flower local`` starts them (a SuperLink and
SuperNodes with TLS and keys), and the embedded engine. The script checks that both end with the same model and writes
the seconds of every round, the machine with its load and the commit to ``flower.json``, the medians to ``flower.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.cores import Clock
from benchmarks.peers.report import machine, machine_line, write_results
from comfedl.config.schema import Config, parse_config, run_config
from comfedl.flower.local_trial import run_local

ROOT = Path(__file__).resolve().parents[1]
MODELS: dict[str, dict[str, Any]] = {
    "logistic": {"name": "logistic"},
    "mlp of 2.5 million": {"name": "mlp", "hidden": [1600, 1500]},
}


def config(model: dict[str, Any], rounds: int, sites: int) -> Config:
    return parse_config({
        "rounds": rounds,
        "data": {"name": "digits", "partition": "dirichlet", "clients": sites, "alpha": 0.5},
        "model": model,
        "algorithm": {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}},
    })  # fmt: skip


def measure(settings: Config) -> dict[str, Any]:
    """Seconds of each round on both, and of the whole Flower run with start and end."""
    clock = Clock()
    expected = run_config(settings, callbacks=[clock])
    embedded = [after - before for before, after in pairwise(clock.times)]
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "run", time.perf_counter()
        run_local(settings, out, tell=print)
        whole = time.perf_counter() - start
        rows = [json.loads(line) for line in (out / "sites.jsonl").read_text().splitlines()]
        times = [datetime.fromisoformat(row["time"]).timestamp() for row in rows if row["step"] == "train"]
        found = load_file(out / "model.safetensors")
    apart = max(float((part - found[name]).abs().max()) for name, part in expected.params.items())
    assert apart < 1e-5, f"the models are {apart:.3g} apart"
    flower = [after - before for before, after in pairwise(times)]
    bytes_per_round = sum(expected.traffic.values()) / settings.rounds
    return {"embedded": embedded, "flower": flower, "whole": whole, "apart": apart, "bytes_a_round": bytes_per_round}


def write(out: Path, found: dict[str, Any], sites: int, rounds: int) -> None:
    lines = [
        f"Seconds per round, ComFedL with KL weights on digits, {sites} sites, medians of {rounds - 1} rounds:",
        "",
        "| model | bytes per round | embedded | Flower, loopback with TLS and keys (min to max) | whole run |",
        "|---|---|---|---|---|",
    ]
    for name, each in found["models"].items():
        spread = f"{statistics.median(each['flower']):.1f} ({min(each['flower']):.1f} to {max(each['flower']):.1f})"
        embedded = statistics.median(each["embedded"])
        lines.append(f"| {name} | {each['bytes_a_round']:,.0f} | {embedded:.4f} | {spread} | {each['whole']:.0f} |")
    lines += [
        "",
        f"The whole run has {rounds} rounds and includes starting and stopping all processes. Every message starts a "
        "new process at its site, which imports torch and loads the data; that and Flower's polling are the cost.",
        machine_line(found["machine"]),
    ]
    write_results(out, "flower", found, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="A round over sites behind Flower, and in one process.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    where = machine(ROOT, torch.__version__, None)
    found = {name: measure(config(model, given.rounds, given.sites)) for name, model in MODELS.items()}
    where["load_at_end"] = os.getloadavg()
    write(given.out, {"machine": where, "models": found}, given.sites, given.rounds)


if __name__ == "__main__":
    main()
