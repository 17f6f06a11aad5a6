"""comfedl reproduce: the experiments of the paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Log


def reproduce(
    figures: Annotated[list[str], typer.Argument(metavar="FIGURE...", help="fig2 to fig6, theory, tables, or all.")],
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (as in results/).")] = "quick",
    seeds: Annotated[int | None, typer.Option(help="Number of evaluation seeds (default: the preset's).")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write (default: runs/reproduce-PRESET).")] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of processes (default: one per core).")] = None,
    log: Log = "bar",
) -> None:
    """Run the paper's experiments: tables and a plot per figure. Finished runs are not repeated.

    `theory` measures its convergence analysis; `tables` runs what the papers of AFL and q-FFL report.
    """
    from comfedl_reproduction import reproduce as run_experiments

    try:
        folders = run_experiments(figures, preset, seeds, out, jobs, log)
    except KeyboardInterrupt:
        typer.echo("interrupted; repeat the command to continue", err=True)
        sys.exit(130)
    for folder in folders:
        typer.echo(f"Written to {folder}", err=log == "json")
