"""How time and memory grow with clients, participants, parameters and local steps: ``python -m benchmarks.growth``.

Every point is a run of ``comfedl.fit`` in its own process, on one thread. The time of a round is CPU time, the median
over the rounds after the first two, without the only evaluation, of ten clients. Memory is the process's peak
(``ru_maxrss``): ``peak_mb`` is all of it, ``own_mb`` what exceeds the peak after the imports plus the data.

clients      10 to 1,000,000 clients, of which 100 (or all ten) participate. Each holds 2 samples of 8 features, since a
             million clients with images would measure the images; the model is a softmax regression. Time and memory
             for clients that do not participate must not grow.
participants 10 to 10,000 clients, all participating, on the softmax regression 784 -> 10 with 5 local steps of batch 50
             and 60 samples per client, which are rows of a pool of 60,000, as of one data set.
parameters   1e3 to 1e7 parameters of an MLP with one hidden layer; 10 clients of 50 samples.
steps        1 to 50 local steps of the softmax regression 784 -> 10; 10 clients of 60 samples.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AXES = {
    "clients": [10, 100, 1_000, 10_000, 100_000, 1_000_000],
    "participants": [10, 100, 1_000, 10_000],
    "parameters": [1_000, 10_000, 100_000, 1_000_000, 10_000_000],
    "steps": [1, 2, 5, 10, 20, 50],
}
QUICK = {"clients": [10, 1_000, 100_000], "participants": [10, 100], "parameters": [1_000, 100_000], "steps": [1, 5]}
METHODS = {
    "clients": ("fedavg", "comfedl-kl", "ditto", "drfa", "tr-maml"),
    "participants": ("fedavg", "comfedl-kl", "ditto"),
    "parameters": ("fedavg", "comfedl-kl", "ditto"),
    "steps": ("fedavg", "comfedl-kl", "ditto"),
}
NAMES = {"fedavg": "FedAvg", "comfedl-kl": "ComFedL, KL", "ditto": "Ditto", "drfa": "DRFA", "tr-maml": "TR-MAML"}


@dataclass(frozen=True)
class Point:
    """One run: an axis, the value on it, and the method."""

    axis: str
    value: int
    method: str
    repeat: int = 0


def measure(point: Point) -> dict[str, Any]:
    """Run a point in this process."""
    import numpy as np
    import torch

    import comfedl as cf

    torch.set_num_threads(1)
    imports = _peak()
    fed, model, participants, local_steps, batch = _setting(point, np, torch, cf)
    data_bytes = sum(part.nbytes for part in (fed.train.x, fed.train.y, fed.train.rows) if part is not None)
    built = time.process_time()
    common = {"lr": 0.05, "local_steps": local_steps, "batch_size": batch}
    method = {
        "fedavg": cf.FedAvg(**common),
        "comfedl-kl": cf.ComFedL(outer=cf.KL(0.5), **common),
        "ditto": cf.Ditto(lam=0.1, **common),
        "drfa": cf.DRFA(dual_lr=1e-8, **common),
        "tr-maml": cf.TRMAML(dual_lr=1e-8, **common),
    }[point.method]
    times: list[float] = []

    class Clock(cf.Callback):
        def started(self) -> None:
            times.append(time.process_time())

        def round_done(self, number: int) -> None:
            times.append(time.process_time())

    rounds = _rounds(point)
    cf.fit(
        model,
        fed,
        method,
        rounds=rounds + 1,
        clients_per_round=participants,
        eval_every=rounds + 1,
        eval_clients=min(10, len(fed)),
        callbacks=[Clock()],
    )
    spent = [1e3 * (end - start) for start, end in pairwise(times)][2:-1]
    peak = _peak()
    return {
        **asdict(point),
        "round_ms": statistics.median(spent),
        "round_ms_low": statistics.quantiles(spent, n=4)[0],
        "round_ms_high": statistics.quantiles(spent, n=4)[2],
        "rounds": len(spent),
        "setup_s": times[0] - built,
        "peak_mb": peak / 1e6,
        "import_mb": imports / 1e6,
        "data_mb": data_bytes / 1e6,
        "own_mb": (peak - imports - data_bytes) / 1e6,
    }


def _setting(point: Point, np: Any, torch: Any, cf: Any) -> tuple[Any, Any, int | None, int, int]:
    """Data, model, participants, local steps and batch of a point."""
    from comfedl.data.client_names import NumberedNames
    from comfedl.data.federated import Split

    generator = torch.Generator().manual_seed(0)

    def samples(count: int, features: int) -> tuple[Any, Any]:
        return torch.randn(count, features, generator=generator), torch.randint(0, 10, (count,), generator=generator)

    if point.axis == "clients":
        n = point.value
        fed = cf.FederatedData.from_flat((*samples(2 * n, 8), np.arange(n + 1) * 2))
        return fed, cf.models.build("logistic", (8,), 10, 0), min(100, n), 5, 2
    if point.axis == "parameters":
        hidden = max(1, round(point.value / (64 + 10)))
        model = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))
        return cf.FederatedData.from_flat((*samples(500, 64), np.arange(11) * 50)), model, None, 5, 32
    model = cf.models.build("logistic", (784,), 10, 0)
    clients, steps = (point.value, 5) if point.axis == "participants" else (10, point.value)
    x, y = samples(60_000, 784)
    rows = torch.randint(0, len(x), (clients * 60,), generator=generator)
    split = Split(x, y, NumberedNames(clients), np.arange(clients + 1) * 60, rows)
    return cf.FederatedData.from_splits({"train": split}), model, None, steps, 50


def _rounds(point: Point) -> int:
    """The number of rounds to time: fewer if they take long."""
    if point.axis == "clients":
        return 40
    if point.axis == "participants":
        return max(4, min(20, 20_000 // point.value))
    return 6 if point.value >= 1_000_000 else 20


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_point(point: Point) -> dict[str, Any]:
    """Run a point in a new process."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(asdict(point))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{point} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def merge_repeats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per point: the smallest median time and the largest peak over its repeats."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["axis"], row["value"], row["method"]), []).append(row)
    return [
        {**min(group, key=lambda row: row["round_ms"]), "repeat": len(group)}
        | {key: max(row[key] for row in group) for key in ("peak_mb", "own_mb")}
        for group in groups.values()
    ]


def other_axes(path: Path, measured: list[str]) -> list[dict[str, Any]]:
    """Earlier points on the axes that are not measured now."""
    earlier = json.loads(path.read_text())["points"] if path.exists() else []
    return [point for point in earlier if point["axis"] not in measured]


def claims(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers quoted in the documentation."""
    by = {(row["axis"], row["value"], row["method"]): row for row in points}
    out: dict[str, Any] = {}
    for method in NAMES:
        many, few = (by.get(("clients", n, method)) for n in (1_000_000, 1_000))
        if many and few:
            out[f"round of 100 of 1,000,000 over 100 of 1,000, {method}"] = many["round_ms"] / few["round_ms"]
            out[f"peak of 1,000,000 less that of 1,000 in MB, without the data, {method}"] = (
                many["own_mb"] - few["own_mb"]
            )
            out[f"the same with the data, {method}"] = many["peak_mb"] - few["peak_mb"]
        all_in = by.get(("participants", 10_000, method))
        if all_in:
            out[f"{method}: peak of 10,000 participants, all in all (MB)"] = all_in["peak_mb"]
    return out


def machine() -> dict[str, Any]:
    """The machine, software and commit of the measurement."""
    import torch

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "threads": 1,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Time above, memory below, one column per axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "clients": ("clients (100 participate)", "a"),
        "participants": ("participants (all clients)", "b"),
        "parameters": ("parameters", "c"),
        "steps": ("local steps", "d"),
    }
    # The palette of Okabe and Ito, safe for the colour-blind; markers differ too.
    looks = {
        "fedavg": ("#0072B2", "o"),
        "comfedl-kl": ("#D55E00", "s"),
        "ditto": ("#009E73", "^"),
        "drfa": ("#CC79A7", "D"),
        "tr-maml": ("#E69F00", "v"),
    }
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(2, 4, figsize=(7.6, 3.9), sharex="col", layout="constrained")
        for column, (axis, (title, letter)) in enumerate(titles.items()):
            for row, (key, unit) in enumerate((("round_ms", "time per round (ms)"), ("peak_mb", "peak memory (MB)"))):
                panel = panels[row][column]
                for method, (colour, marker) in looks.items():
                    mine = sorted(
                        (p for p in points if (p["axis"], p["method"]) == (axis, method)), key=lambda p: p["value"]
                    )
                    if not mine:
                        continue
                    places, values = [p["value"] for p in mine], [p[key] for p in mine]
                    panel.plot(places, values, marker, ls="-", color=colour, ms=3.2, lw=1, label=NAMES[method])
                    if key == "round_ms":
                        low, high = ([p[f"round_ms_{end}"] for p in mine] for end in ("low", "high"))
                        panel.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)
                panel.set(xscale="log", yscale="log")
                panel.grid(True, which="major", lw=0.3, color="0.85")
                panel.tick_params(which="both", width=0.5, length=2.5)
                if column == 0:
                    panel.set_ylabel(unit)
            panels[0][column].set_title(letter, loc="left", fontweight="bold", fontsize=9)
            panels[1][column].set_xlabel(title)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=220)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few small points")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    parser.add_argument("--repeats", type=int, default=3, help="processes per point; the fastest counts")
    parser.add_argument("--axes", nargs="*", default=list(AXES), choices=list(AXES), help="the others are kept")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(Point(**json.loads(arguments.point)))))
        return
    axes, where, rows = QUICK if arguments.quick else AXES, machine(), []
    # The points of an axis take turns, so that a slow minute of the machine does not affect only one of them.
    for axis in arguments.axes:
        for repeat in range(1 if arguments.quick else arguments.repeats):
            for value in axes[axis]:
                for method in METHODS[axis]:
                    rows.append(run_point(Point(axis, value, method, repeat)) | {"commit": where["commit"]})
                    row = rows[-1]
                    print(
                        f"{axis:12} {value:>9} {method:11} {row['round_ms']:9.2f} ms per round, peak "
                        f"{row['peak_mb']:7.0f} MB, own {row['own_mb']:7.0f} MB, setup {row['setup_s']:.2f} s",
                        flush=True,
                    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    points = other_axes(arguments.out / "growth.json", arguments.axes) + merge_repeats(rows)
    points.sort(key=lambda p: (list(AXES).index(p["axis"]), p["value"], list(NAMES).index(p["method"])))
    with (arguments.out / "growth.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(points[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: round(v, 3) if isinstance(v, float) else v for key, v in p.items()} for p in points)
    summary = {"machine": where, "claims": claims(points), "points": points}
    (arguments.out / "growth.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(points, arguments.out / "growth.png")
    for claim, value in summary["claims"].items():
        print(f"{claim}: {value:.3g}")


if __name__ == "__main__":
    main()
