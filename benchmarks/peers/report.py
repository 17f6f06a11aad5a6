"""The results: medians, quartiles and ratios, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.roster import PEERS
from benchmarks.workloads import WORKS

Records = dict[str, dict[str, dict[str, Any]]]  # by workload and peer


class Spread(NamedTuple):
    """A median between its quartiles."""

    low: float
    median: float
    high: float


def spread(values: list[float]) -> Spread:
    """The quartiles of some numbers; a single number is all three.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(low=2.0, median=3.0, high=4.0)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def per_round(record: dict[str, Any], clock: str = "cpu_s") -> dict[int, float]:
    """Milliseconds per round, by turn."""
    return {sample["turn"]: 1e3 * sample[clock] / sample["rounds"] for sample in record["samples"]}


def ratios(record: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The ratios of two times, such as a peer's over ours, turn by turn: both were measured within seconds."""
    times, others = per_round(record), per_round(other)
    return [times[turn] / others[turn] for turn in times if turn in others]


def rows(records: Records) -> list[dict[str, Any]]:
    """One row per workload and peer, for CSV."""
    found = []
    for work, peers in records.items():
        for peer, record in peers.items():
            row: dict[str, Any] = {"work": work, "peer": peer, "status": record["status"]}
            if record["samples"]:
                cpu, wall = spread(list(per_round(record).values())), per_round(record, "wall_s").values()
                row |= {"cpu_ms": cpu.median, "cpu_ms_q1": cpu.low, "cpu_ms_q3": cpu.high}
                row |= {"wall_ms": statistics.median(wall), "turns": len(record["samples"])}
                ours = ratios(record, peers["ours"]) if "ours" in peers else []
                if ours:
                    ratio = spread(ours)
                    row |= {"ratio": ratio.median, "ratio_q1": ratio.low, "ratio_q3": ratio.high}
            row |= {key: record[key] for key in ("start_s", "peak_mb") if key in record}
            found.append({**row, "work_done": work_done(work, peer, peers), "note": record["note"]})
    return found


def work_done(work: str, peer: str, peers: dict[str, dict[str, Any]]) -> str:
    """Whether a peer's first round did the same work: gradients, batch size, and how far the model moved."""
    checks = peers[peer].get("checks")
    if checks is None:
        return ""
    wanted, did = WORKS[work].passes, {int(batch): count for batch, count in checks["passes"].items()}
    problems = [] if did == wanted else [f"gradients by batch size {did} instead of {wanted}"]
    if not checks["moved"] > 0:
        problems.append(f"the model moved by {checks['moved']}")
    ours = peers.get("ours", {}).get("checks", checks)["moved"]
    if (
        PEERS[peer].alike and not 0.75 < checks["moved"] / ours < 1.33
    ):  # half the rate, or a sum instead of a mean, differs more
        problems.append(f"the model moved {checks['moved'] / ours:.2f} times as far as ours")
    if checks.get("apart", 0.0) > 1e-4:
        problems.append(f"{checks['apart']:.1g} away from the path that was counted")
    return "the same" if not problems else "; ".join(problems)


FIELDS = [
    "work",
    "peer",
    "status",
    "cpu_ms",
    "cpu_ms_q1",
    "cpu_ms_q3",
    "wall_ms",
    "ratio",
    "ratio_q1",
    "ratio_q3",
    "turns",
    "start_s",
    "peak_mb",
    "work_done",
    "note",
]


def as_csv(records: Records) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in rows(records):
        writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def as_markdown(records: Records, machine: dict[str, Any]) -> str:
    """The tables of times, ratios and memory, then remarks on each peer."""
    table = {(row["work"], row["peer"]): row for row in rows(records)}
    peers = list(dict.fromkeys(row["peer"] for row in table.values()))
    lines = [
        "CPU milliseconds per round, median over turns; in brackets the ratio to ours, median and quartiles.",
        f"{machine['cpu']}, one core, one thread, torch {machine['torch']}; "
        f"commit {machine['commit']}, {machine['date']}.",
        "",
        f"| who | {' | '.join(records)} |",
        "|---" * (len(records) + 1) + "|",
    ]
    for peer in peers:
        lines.append(f"| {PEERS[peer].title} | {' | '.join(_cell(table[work, peer]) for work in records)} |")
    orders = [records.get(work, {}).get("ours", {"samples": []}) for work in ("W4 exact", "W4 first")]
    if found := ratios(*orders):
        ratio = spread(found)
        lines += ["", f"Exact over first order of W4, ours: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})."]
    lines += ["", "| start to the end of the first round, s; peak memory, MB | " + " | ".join(records) + " |"]
    lines.append("|---" * (len(records) + 1) + "|")
    for peer in peers:
        lines.append(f"| {PEERS[peer].title} | {' | '.join(_cost(table[work, peer]) for work in records)} |")
    lines += ["", "The work of the first round:", ""]
    for row in table.values():
        remarks = [f"{row['work_done']} work" if row["work_done"] == "the same" else row["work_done"], row["note"]]
        lines.append(f"- {row['work']}, {row['peer']}: {'; '.join(filter(None, remarks))}.")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return {"lacks": "not run", "late": row["note"], "failed": "failed"}[str(row["status"])]
    text = f"{row['cpu_ms']:.3g}" if row["cpu_ms"] < 1000 else f"{row['cpu_ms']:.0f}"
    if "ratio" not in row or row["peer"] == "ours":
        return text
    return f"{text} ({row['ratio']:.2f}; {row['ratio_q1']:.2f} to {row['ratio_q3']:.2f})"


def _cost(row: dict[str, Any]) -> str:
    return f"{row['start_s']:.1f}; {row['peak_mb']:.0f}" if "peak_mb" in row else ""


def machine(root: Path, torch: str, core: int | None) -> dict[str, Any]:
    """The machine, software and date of the measurement."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    changed = _git(root, "status", "--porcelain", "--", "src", "benchmarks")
    return {
        "cpu": named[0] if named else platform.machine(),
        "cores": os.cpu_count(),
        "pinned_to": "one core" if core is not None else None,
        "load_at_start": os.getloadavg(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch,
        "commit": _git(root, "rev-parse", "--short=12", "HEAD") + ("+" if changed else ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def _git(root: Path, *order: str) -> str:
    try:
        return subprocess.run(["git", *order], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "" if order[0] == "status" else "unknown"


def machine_line(where: dict[str, Any]) -> str:
    """The machine, the commit and the load in one sentence; the caller adds ``load_at_end``."""
    return (
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}; commit {where['commit']}, {where['date']}; "
        f"load {where['load_at_start'][0]:.1f} at the start and {where['load_at_end'][0]:.1f} at the end."
    )


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write peers.json, peers.csv and peers.md."""
    records = results["works"]
    write_files(
        folder,
        {
            "peers.json": json.dumps(results, indent=1) + "\n",
            "peers.csv": as_csv(records),
            "peers.md": as_markdown(records, results["machine"]),
        },
    )


def write_results(folder: Path, name: str, found: dict[str, Any], lines: list[str]) -> None:
    """Write the results to ``name.json`` and these lines to ``name.md``, and print the lines."""
    text = "\n".join(lines) + "\n"
    write_files(folder, {f"{name}.json": json.dumps(found, indent=1) + "\n", f"{name}.md": text})
    print(text, end="")


def write_files(folder: Path, texts: dict[str, str]) -> None:
    """Write files by name, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text)
        part.replace(folder / name)
