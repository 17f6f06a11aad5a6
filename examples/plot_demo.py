"""Draw what `comfedl demo` wrote: each client's accuracy under both methods. Needs the extra `plot`.

comfedl demo && python examples/plot_demo.py comfedl-demo docs/images/demo.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"FedAvg": "#0072B2", "ComFedL": "#D55E00"}  # told apart by colour-blind readers too


def main(runs: Path, picture: Path) -> None:
    """One pair of points a client, sorted by FedAvg's accuracy, and the worst client over the rounds."""
    clients, rounds = {}, {}
    for method in COLOURS:
        rows = [json.loads(line) for line in (runs / method.lower() / "clients.jsonl").open()]
        last = max(row["round"] for row in rows)
        clients[method] = {row["client"]: row for row in rows if row["round"] == last}
        rounds[method] = [json.loads(line) for line in (runs / method.lower() / "rounds.jsonl").open()]
    order = sorted(clients["FedAvg"], key=lambda name: clients["FedAvg"][name]["validation.accuracy"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2])
    for i, name in enumerate(order):
        values = [clients[method][name]["validation.accuracy"] for method in COLOURS]
        left.plot([i, i], values, color="0.8", zorder=1)
    for method, colour in COLOURS.items():
        values = [clients[method][name]["validation.accuracy"] for name in order]
        left.scatter(range(len(order)), values, color=colour, label=method, zorder=2)
        left.axhline(min(values), color=colour, linestyle=":", linewidth=1)
        worst = [row["validation.accuracy.worst"] for row in rounds[method]]
        right.plot([row["round"] for row in rounds[method]], worst, color=colour, label=method)
    left.set_xticks(range(len(order)), [name.removeprefix("client-") for name in order])
    left.set_xlabel("client (dotted: the worst one)")
    left.set_ylabel("validation accuracy")
    left.legend(frameon=False, loc="lower right")
    right.set_xlabel("round")
    right.set_ylabel("accuracy of the worst client")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
