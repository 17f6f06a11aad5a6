"""The evidence for a claim: values over seeds from a figure's tables, and their paired differences."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """One check of a claim.

    Attributes:
        setting: where it was checked, in words.
        measure: what was measured there, if a setting has several measures.
        holds: whether the claim holds in this case.
        decides: the number that decides it, in a few words.
        numbers: all numbers behind it.
    """

    setting: str
    measure: str
    holds: bool
    decides: str
    numbers: str

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.setting, self.measure) if part)


@dataclass(frozen=True)
class Claim:
    """A statement, the rule that decides it, and the cases it was checked in.

    ``ours`` has the same checks with our optimisers in place of the paper's method, by the name of the optimiser: they
    never change whether the claim itself holds, but are told beside it.
    """

    figure: str
    statement: str
    rule: str
    cases: tuple[Case, ...]
    ours: Mapping[str, tuple[Case, ...]]

    @property
    def verdict(self) -> str:
        """In words, and what is different with our optimisers."""
        own = judged(self.cases)
        found = {name: judged(cases) for name, cases in self.ours.items()}
        if own == HOLDS or not found:
            return own
        if own == FAILS and (full := [name for name, verdict in found.items() if verdict == HOLDS]):
            return f"holds only with {' or '.join(full)}, not with the paper's method"
        told = [f"with {name} it {verdict}" for name, verdict in found.items() if verdict != FAILS]
        failed = [name for name, verdict in found.items() if verdict == FAILS]
        if not told:
            return own + (f", nor with {' or '.join(failed)}" if own == FAILS else "")
        return "; ".join([own, *told, *(f"with {name} it {FAILS}" for name in failed)])

    @property
    def decides(self) -> str:
        """The number of the first case that speaks against the claim, or of the first one."""
        case = next((case for case in self.cases if not case.holds), self.cases[0])
        return f"{case.name}: {case.decides}"


HOLDS, FAILS = "holds", "does not hold"


def judged(cases: Sequence[Case]) -> str:
    """Whether a claim holds in all cases, in none, or in which settings."""
    held = [case for case in cases if case.holds]
    if len(held) == len(cases):
        return HOLDS
    if not held:
        return FAILS
    settings = list(dict.fromkeys(case.setting for case in cases))
    alike: dict[tuple[str, ...], list[str]] = {}  # the settings in which the same measures hold
    for setting in settings:
        own = [case for case in cases if case.setting == setting]
        measures = tuple(case.measure for case in own if case.holds)
        alike.setdefault(() if len(measures) == len(own) else measures, []).extend([setting] if measures else [])
    parts = []
    for measures, where in alike.items():
        if where == settings:
            parts.append(join(measures))
        elif where:
            parts.append(join(where) + (f" ({join(measures)})" if measures else ""))
    return f"holds only for {'; '.join(parts)}"


def join(items: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


Rows = list[dict[str, str]]


class EvidenceTable:
    """A figure's curves.csv and summary.csv."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.summary = _read(folder / "curves.csv"), _read(folder / "summary.csv")
        self.last: dict[tuple[str, str], int] = {}
        for row in self.rows:
            key = row["group"], row["point"]
            self.last[key] = max(self.last.get(key, 0), int(row["round"]))

    def curve(self, group: str, method: str, column: str, point: str = "") -> dict[str, dict[int, float]]:
        """Seed -> round -> value, for the seeds that did not diverge: a diverged run has no last round."""
        out: dict[str, dict[int, float]] = {}
        for row in self.rows:
            if (row["group"], row["method"], row["point"]) == (group, method, point):
                out.setdefault(row["seed"], {})[int(row["round"])] = float(row[column])
        return {seed: curve for seed, curve in out.items() if max(curve) == self.last[group, point]}

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
