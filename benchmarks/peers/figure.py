"""The plot: the time of each peer in multiples of comfedl's, with quartiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.peers.report import Records, rows
from benchmarks.peers.roster import PEERS

# The palette of Okabe and Ito, safe for the colour-blind; markers differ too.
LOOK = {
    "loop": ("#000000", "o"),
    "loader": ("#009E73", "P"),
    "lean": ("#E69F00", "s"),
    "flwr": ("#D55E00", "^"),
    "fluke": ("#CC79A7", "D"),
    "pfl": ("#0072B2", "v"),
}
STYLE: dict[str, Any] = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
TITLES = {
    "W1": "W1  softmax regression,\n10 clients",
    "W2": "W2  softmax regression,\n1,000 clients",
    "W3": "W3  four-layer CNN,\n10 clients",
    "W4 first": "W4  MAML, first order,\nthe same CNN",
    "W4 exact": "W4  MAML, exact,\nthe same CNN",
    "W5": "W5  transformer,\n10 clients",
    "W6": "W6  ResNet, group norm,\n10 clients",
    "W7": "W7  character LSTM,\n10 clients",
}


def draw(records: Records, place: Path) -> bool:
    """Plot the ratios; return False if there are none."""
    table = [row for row in rows(records) if row["peer"] in LOOK]
    shown = [row for row in table if "ratio" in row and row["status"] == "ok"]
    if not shown:
        return False
    with pyplot.rc_context(STYLE):
        lines = [(work, row) for work in records for row in table if row["work"] == work and row["status"] != "lacks"]
        works = list(dict.fromkeys(work for work, _ in lines))
        figure, axes = pyplot.subplots(figsize=(5.6, 0.6 + 0.2 * (len(lines) + len(works))))
        y, ticks = 0.0, []
        right = max(max(row["ratio_q3"] for row in shown), 2) * 1.6
        left = min(0.9, min(row["ratio_q1"] for row in shown) * 0.9)
        for work in works:
            first = y
            for row in (row for of, row in lines if of == work):
                _point(axes, row, y, right)
                y -= 1
            ticks.append(((first + y + 1) / 2, TITLES.get(work, work)))
            if work != works[-1]:
                axes.axhline(y, color="0.85", linewidth=0.6)
            y -= 1
        axes.axvline(1, color="0.35", linewidth=0.8, linestyle=(0, (4, 2)))
        axes.text(1, 0.9, "ours", ha="center", va="bottom", color="0.35")
        axes.set_xscale("log")
        axes.set_xlim(left, right)
        axes.set_ylim(y + 1.3, 0.8)
        marks = [n for n in (0.5, 0.7, 1, 1.4, 2, 3, 5, 7, 10, 20, 30, 50, 100, 200, 500, 1000) if left <= n <= right]
        axes.xaxis.set_major_locator(FixedLocator(marks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks([tick for tick, _ in ticks], [title for _, title in ticks])
        axes.tick_params(axis="y", length=0, pad=6)
        axes.grid(axis="x", color="0.92", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_xlabel("CPU time per round, in multiples of comfedl's (median and quartiles)")
        if any(row["work_done"] != "the same" for row in shown):
            note = r"$^\dagger$ not the same work: see the table"
            axes.annotate(note, (1, 0), (0, -38), "axes fraction", "offset points", ha="right", va="top", size=7.5)
        _legend(axes, [peer for peer in LOOK if any(row["peer"] == peer for row in table)])
        figure.savefig(place, dpi=300, bbox_inches="tight", facecolor="white")
        pyplot.close(figure)
    return True


def _point(axes: Any, row: dict[str, Any], y: float, right: float) -> None:
    colour, mark = LOOK[row["peer"]]
    if "ratio" not in row:
        text = row["note"] if row["status"] == "late" else "failed"
        axes.plot(right, y, mark, color=colour, markersize=4.5, clip_on=False)
        axes.annotate(text, (right, y), (-6, 0), textcoords="offset points", ha="right", va="center", size=7.5)
        return
    low, middle, high = row["ratio_q1"], row["ratio"], row["ratio_q3"]
    bars = {"elinewidth": 0.9, "capsize": 2.5, "capthick": 0.9}
    axes.errorbar(middle, y, xerr=[[middle - low], [high - middle]], fmt=mark, color=colour, markersize=4, **bars)
    label = f"{middle:.2f}" if middle < 2 else f"{middle:.1f}" if middle < 100 else f"{middle:.0f}"
    label += "" if row["work_done"] == "the same" else r"$^\dagger$"
    axes.annotate(label, (high, y), (5, 0), textcoords="offset points", va="center", size=7.5, color="0.25")


def _legend(axes: Any, peers: list[str]) -> None:
    look = [(PEERS[peer].title, *LOOK[peer]) for peer in peers]
    handles = [axes.plot([], [], mark, color=colour, markersize=4.5, label=title)[0] for title, colour, mark in look]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=3, frameon=False, fontsize=8)
