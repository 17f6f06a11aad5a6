"""The paper's experiments: one command a figure, with tuning, seeds, error bars and tables.

``reproduce`` is what the command line calls. A figure is settings in experiments/FIGURE.toml, carried out by
``protocol`` on ``runner``, and drawn by ``pictures``. What is not made of runs has a function of its own in ``OTHERS``.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from comfedl.data.registry import fetch
from comfedl.training.progress import LOGS
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, nearest
from comfedl_reproduction.experiments import PRESETS, read_figure
from comfedl_reproduction.protocol import carry_out
from comfedl_reproduction.runner import Runner

FIGURES = ("fig2", "fig3", "fig4", "fig5", "fig6")

# Name -> "module:function", called as function(out / name, preset, seeds).
OTHERS = {"theory": "comfedl_reproduction.theory:run"}


def reproduce(
    names: Sequence[str],
    preset: str = "quick",
    seeds: int | None = None,
    out: Path | None = None,
    jobs: int | None = None,
    log: str = "bar",
) -> list[Path]:
    """Run what is missing of these figures ("all" is every one) and write tables and pictures; gives their folders."""
    allowed = (*FIGURES, *OTHERS)
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
    for name in chosen:
        if name in OTHERS:
            module, _, function = OTHERS[name].partition(":")
            run: Callable[[Path, str, int | None], None] = getattr(importlib.import_module(module), function)
            run(out / name, preset, seeds)
            written.append(out / name)
    return written


def _figures(names: Sequence[str], preset: str, seeds: int | None, out: Path, jobs: int, log: str) -> list[Path]:
    if not names:
        return []
    from comfedl_reproduction.report import write  # draws, so it needs the extra `plot`: said before anything runs

    figures = [read_figure(name, preset, seeds) for name in names]
    sources = {figure.name: figure for figure in figures}
    for name in {arm.like.split("/")[0] for figure in figures for arm in figure.arms if arm.like is not None}:
        if name not in sources:
            sources[name] = read_figure(name, preset, seeds)
    for data in {figure.data for figure in figures}:
        fetch(data, progress=True)
    runner = Runner(out / "runs", jobs, _commit(), log)
    outcomes = carry_out(figures, sources, runner)
    return [write(outcome, out / name) for name, outcome in outcomes.items()]


def _commit() -> str | None:
    """The commit of the source that runs, with "+" where it has been changed since; None outside a clone."""
    here = Path(__file__).parent
    try:
        asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--", str(here.parent)]]
        head, changed = (
            subprocess.run(["git", "-C", str(here), *one], capture_output=True, text=True, check=True).stdout.strip()
            for one in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
