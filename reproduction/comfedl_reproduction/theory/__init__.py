"""The paper's convergence analysis, measured on a problem with known constants: the rate, the lemmas and the bias.

Beside it stand what the paper does not analyse: the safe step's descent on eq. (5), and how estimates of the losses
compare. Writes ``theory.csv``, ``theory-summary.csv`` and ``theory.png``; docs/theory-check.md explains them.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comfedl.algorithms.comfedl import STEPS
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic
from comfedl_reproduction.theory.extensions import Plus
from comfedl_reproduction.theory.measure import LAWS, LONG, Bias, Drift, Rate, Row
from comfedl_reproduction.theory.points import Point, measure
from comfedl_reproduction.theory.robust import ESTIMATES, Descent, Estimate
from comfedl_reproduction.theory.summary import summarise

COLUMNS = ("part", "series", "quantity", "T", "tau", "eta", "b", "seed", "value", "bound")


@dataclass(frozen=True)
class Preset:
    """The points to measure; ``long`` has more values of T for the laws in ``LONG``, ``plus`` is the T of ``Plus``.

    ``gammas`` are those of ``Descent``, which has ``taus`` too, and ``estimates`` are the T of ``Estimate``.
    """

    T: tuple[int, ...]
    long: tuple[int, ...]
    taus: tuple[int, ...]
    etas: tuple[float, ...]
    batches: tuple[int, ...]
    repeats: int
    plus: int
    gammas: tuple[float, ...]
    estimates: tuple[int, ...]
    seeds: int = 3

    def points(self, seeds: int) -> list[Point]:
        """All points, longest first, so that no worker is left with a long one at the end."""
        points: list[Point] = [Plus(self.plus)]
        points += [Descent(gamma, tau, step) for gamma in self.gammas for tau in self.taus for step in STEPS]
        for seed in range(seeds):
            points += [Rate(law, T, seed) for law in LAWS for T in self.T]
            points += [Rate(law, T, seed) for law in LONG for T in self.long]
            points += [Drift(tau, eta, seed) for tau in self.taus for eta in self.etas]
            points += [Bias(b, self.repeats, seed) for b in self.batches]
            points += [Estimate(estimate, T, seed) for estimate in ESTIMATES for T in self.estimates]
        return sorted(points, key=lambda point: -point.cost)


PRESETS = {
    "quick": Preset(
        T=(64, 128, 256, 512),
        long=(),
        taus=(1, 4, 16),
        etas=(2**-8, 2**-5, 2**-2),
        batches=(8, 32, 128),
        repeats=3,
        plus=2048,
        gammas=(1.0, 0.1, 0.01),
        estimates=(64, 256),
    ),
    "paper": Preset(
        T=(64, 256, 1024, 4096),
        long=(8192,),
        taus=(1, 2, 4, 8, 16),
        etas=(2**-8, 2**-6, 2**-4, 2**-2),
        batches=(8, 32, 128, 512, 2048),
        repeats=8,
        plus=4096,
        gammas=(1.0, 0.3, 0.1, 0.03, 0.01, 0.003),
        estimates=(64, 256, 1024, 4096),
    ),
}


def run(out: Path, preset: str, seeds: int | None) -> None:
    """Measure the points that are not yet in ``out``, then write the tables and the figure."""
    checks.one_of("preset", preset, PRESETS)
    if seeds is not None:
        checks.at_least("seeds", seeds, 1)
    if find_spec("matplotlib") is None:
        raise ConfigError("The figure needs matplotlib, which is not installed; install comfedl with the extra `plot`.")
    chosen = PRESETS[preset]
    write(out, measure(out, chosen.points(seeds or chosen.seeds), workers=os.cpu_count() or 1))


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write the tables and the figure."""
    from comfedl_reproduction.theory.figure import draw  # needs the extra `plot`

    def order(row: Row) -> tuple[Any, ...]:
        return row["part"], row["series"], row["quantity"], *(row.get(name) or 0 for name in COLUMNS[3:8])

    write_atomic(out / "theory.csv", table(sorted(rows, key=order), COLUMNS))
    summary = summarise(sorted(rows, key=order))
    write_atomic(out / "theory-summary.csv", table(summary, tuple(summary[0])))
    write_atomic(out / "theory.png", draw(rows))


def table(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    """Rows as CSV; missing values and NaN are left empty."""

    def cell(value: Any) -> Any:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:.8g}"
        return value

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue().encode()
