"""The paper's experiments: one command per figure, with tuning, seeds, error bars and tables.

The command line calls ``reproduce``. The settings of a figure are in experiments/FIGURE.toml; ``protocol`` tunes and
evaluates its methods on ``runner``, and ``report`` writes tables and plots. The convergence analysis is in ``theory``,
and ``published`` has the tables of other papers. ``claims`` judges the results, and ``page`` puts them into the docs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from comfedl.data.registry import fetch
from comfedl.training.progress import LOGS
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, nearest
from comfedl_reproduction.experiments import PRESETS, read_figure
from comfedl_reproduction.protocol import run_figures
from comfedl_reproduction.runner import Runner

FIGURES = ("fig2", "fig3", "fig4", "fig5", "fig6")
THEORY = "theory"
TABLES = "tables"


def reproduce(
    names: Sequence[str],
    preset: str = "quick",
    seeds: int | None = None,
    out: Path | None = None,
    jobs: int | None = None,
    log: str = "bar",
) -> list[Path]:
    """Run what is missing for these names ("all": all of them), write tables and plots, and return their folders."""
    allowed = (*FIGURES, THEORY, TABLES)
    for name in names:
        if name not in (*allowed, "all"):
            raise ConfigError(f"There is no figure {name!r}; {nearest(name, [*allowed, 'all'])}.")
    checks.one_of("preset", preset, PRESETS)
    if seeds is not None:
        checks.at_least("seeds", seeds, 1)
    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    checks.at_least("jobs", jobs, 1)
    checks.one_of("--log", log, LOGS)
    out = out or Path("runs") / f"reproduce-{preset}"
    chosen = [name for name in allowed if name in names or "all" in names]
    written = _figures([name for name in chosen if name in FIGURES], preset, seeds, out, jobs, log)
    if THEORY in chosen:
        from comfedl_reproduction import theory

        theory.run(out / THEORY, preset, seeds)
        written.append(out / THEORY)
    if TABLES in chosen:
        written.append(_tables(preset, seeds, out, jobs, log))
    return written


def _tables(preset: str, seeds: int | None, out: Path, jobs: int, log: str) -> Path:
    from comfedl_reproduction import published, report  # noqa: F401 - needs the extra `plot`: fails before anything runs

    figure = read_figure(TABLES, preset, seeds)
    for data in published.DATA:
        fetch(data, progress=True)
    runner = Runner(out / "runs", jobs, _commit(), log)
    outcome = run_figures([figure], {figure.name: figure}, runner)[figure.name]
    return published.write(outcome, out / TABLES)


def _figures(names: Sequence[str], preset: str, seeds: int | None, out: Path, jobs: int, log: str) -> list[Path]:
    if not names:
        return []
    from comfedl_reproduction.report import write  # needs the extra `plot`: fails before anything runs

    figures = [read_figure(name, preset, seeds) for name in names]
    sources = {figure.name: figure for figure in figures}
    for name in {arm.like.split("/")[0] for figure in figures for arm in figure.arms if arm.like is not None}:
        if name not in sources:
            sources[name] = read_figure(name, preset, seeds)
    for data in {figure.data for figure in figures}:
        fetch(data, progress=True)
    runner = Runner(out / "runs", jobs, _commit(), log)
    outcomes = run_figures(figures, sources, runner)
    return [write(outcome, out / name) for name, outcome in outcomes.items()]


def _commit() -> str | None:
    """The git commit of this source, with "+" if files have changed since; None outside a clone."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--", str(package.parent), str(package.parents[1] / "src")) else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
