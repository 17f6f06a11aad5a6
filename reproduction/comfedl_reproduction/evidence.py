"""The evidence for a claim: values over seeds from a figure's tables, and their paired differences."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from comfedl.analysis.stats import standard_error


@dataclass(frozen=True)
class OverSeeds:
    """The values of all seeds; shown as mean and standard error."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {standard_error(self.values, single=0.0):.3f}"

    @property
    def above_zero(self) -> bool:
        return len(self.values) > 1 and self.mean > 2 * standard_error(self.values)


@dataclass(frozen=True)
class Case:
    """One setting in which a claim was checked: whether it holds there, and the numbers."""

    setting: str
    holds: bool
    numbers: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the rule that decides it, and the cases it was checked in."""

    figure: str
    statement: str
    rule: str
    cases: tuple[Case, ...]

    @property
    def verdict(self) -> str:
        held = [case.setting for case in self.cases if case.holds]
        if len(held) == len(self.cases):
            return "reproduced"
        return f"only under: {'; '.join(held)}" if held else "not reproduced"


Rows = list[dict[str, str]]


class EvidenceTable:
    """A figure's curves.csv and summary.csv."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.summary = _read(folder / "curves.csv"), _read(folder / "summary.csv")

    def curve(self, group: str, method: str, column: str, point: str = "") -> dict[str, dict[int, float]]:
        """Seed -> round -> value."""
        out: dict[str, dict[int, float]] = {}
        for row in self.rows:
            if (row["group"], row["method"], row["point"]) == (group, method, point):
                out.setdefault(row["seed"], {})[int(row["round"])] = float(row[column])
        return out

    def per_seed(
        self,
        group: str,
        method: str,
        column: str,
        point: str = "",
        reduce: Callable[[dict[int, float]], float] | None = None,
    ) -> dict[str, float]:
        """Seed -> one value of its curve, by default the last."""
        reduce = reduce or (lambda curve: curve[max(curve)])
        return {seed: reduce(curve) for seed, curve in self.curve(group, method, column, point).items()}

    def methods(self, group: str) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.summary if row["group"] == group))

    def points(self, group: str) -> list[str]:
        return list(dict.fromkeys(row["point"] for row in self.summary if row["group"] == group))

    def groups(self) -> list[str]:
        return list(dict.fromkeys(row["group"] for row in self.summary))

    def message(self, group: str, method: str) -> tuple[int, int, str]:
        """The number of seeds, how many of them diverged, and the error message."""
        row = next(row for row in self.summary if (row["group"], row["method"]) == (group, method))
        return int(row["seeds"]), int(row["diverged"]), row["message"]


def _read(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> OverSeeds:
    """The differences per seed, over the seeds that both have."""
    return OverSeeds(tuple(a[seed] - b[seed] for seed in a if seed in b))


def over_seeds(values: Mapping[str, float]) -> OverSeeds:
    return OverSeeds(tuple(values.values()))
