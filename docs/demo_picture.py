"""Draw the demo on twenty fresh seeds: the worst site's accuracy under each method. Needs the extra `plot`.

python docs/demo_picture.py docs/images/demo.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from comfedl.cli import demo
from comfedl.config.schema import run_config

SEEDS = range(100, 120)
COLOURS = {
    "FedAvg": "#0072B2",
    "equal weights": "#009E73",
    "Robust": "#D55E00",
}  # told apart by colour-blind readers too


def main(picture: Path, seeds: range = SEEDS) -> None:
    """The worst site's accuracy in the end, seed by seed, and over the rounds."""
    curves: dict[str, list[list[float]]] = {method: [] for method in COLOURS}
    for seed in seeds:
        for method, config in demo.configs(seed).items():
            rows = run_config(config).rounds
            curves[method].append([row["validation.accuracy.worst"] for row in rows])
    rounds = [row["round"] for row in rows]
    last = {method: np.array(found)[:, -1] for method, found in curves.items()}
    order = np.argsort(last["equal weights"], kind="stable")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2], sharey=True)
    for i, k in enumerate(order):
        values = [last[method][k] for method in COLOURS]
        left.plot([i, i], [min(values), max(values)], color="0.85", zorder=1)
    for method, colour in COLOURS.items():
        left.scatter(range(len(order)), last[method][order], color=colour, label=method, zorder=2, s=22)
        middle = np.mean(curves[method], axis=0)
        spread = np.std(curves[method], axis=0)
        right.plot(rounds, middle, color=colour)
        right.fill_between(rounds, middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)
    left.set_xticks([])
    left.set_xlabel(f"{len(order)} draws of the sites")
    left.set_ylabel("accuracy at the worst site")
    left.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), handletextpad=0.1)
    right.set_xlabel("round (band: standard deviation)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
