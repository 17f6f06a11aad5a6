"""Tables of figures as the reproduction writes them, with invented numbers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

METHODS = ("ComFedL-DAMAML", "TR-MAML", "FedMAML", "Ditto", "FedAvg, one step at test")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def figure(
    folder: Path,
    ends: dict[tuple[str, str, str], Sequence[float | None]],
    personal: bool = False,
    rough: tuple[str, ...] = (),
) -> None:
    """Write curves of four rounds that rise to these accuracies, by group, method and point, one per seed.

    The loss is 1 - accuracy; a seed of None diverges before the first evaluation.
    """
    prefix, curves, summary = "personal_" if personal else "", [], []
    for (group, method, point), values in ends.items():
        for seed, end in enumerate(values):
            for r in range(1, 5) if end is not None else ():
                height = end * r / 4 + (0.02 + 0.001 * seed if method in rough and r == 3 else 0)
                row: dict[str, object] = {"group": group, "method": method, "point": point, "seed": seed, "round": r}
                for split in ("train", "validation", "test"):
                    for kind in ("mean", "worst"):
                        row[f"{split}.{prefix}accuracy.{kind}"] = height
                        row[f"{split}.{prefix}loss.{kind}"] = 1 - height
                curves.append(row)
        lost = sum(end is None for end in values)
        seeds: dict[str, object] = {"seeds": len(values), "diverged": lost}
        seeds["message"] = "Round 1: NaN. The literal outer ..." if lost else ""
        summary.append({"group": group, "method": method, "point": point, **seeds, "algorithm": '{"order": "exact"}'})
    write(folder / "curves.csv", curves)
    write(folder / "summary.csv", summary)


def fig4(results: Path, accuracy: dict[str, list[float]], rough: tuple[str, ...] = ()) -> None:
    figure(results / "fig4", {("main", method, ""): ends for method, ends in accuracy.items()}, True, rough)
