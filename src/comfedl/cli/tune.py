"""comfedl tune: hyper-parameter search."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, Log, print_table
from comfedl.utils.errors import ConfigError


def tune(
    config: Annotated[Path, typer.Argument(help="A TOML file; its [tune] table may hold the search space.")],
    grid: Annotated[
        str | None, typer.Option(metavar="paper|FILE", help="Search a grid: the paper's (section 5.3) or a TOML file.")
    ] = None,
    space: Annotated[Path | None, typer.Option(help="A TOML file with the search space: lists and ranges.")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="grid, tpe or random (default: grid with --grid, else tpe).")
    ] = None,
    pruner: Annotated[str, typer.Option(help="Stop bad trials early: none, median or hyperband.")] = "none",
    trials: Annotated[
        int | None, typer.Option(help="Total number of trials (default: the whole grid, or 50).", show_default=False)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What to optimise, never on test (default: validation.accuracy.worst, or rmse for regression).",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds that a trial averages over.")] = 1,
    jobs: Annotated[int, typer.Option(help="Number of parallel trials, one process each.")] = 1,
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder (default: runs/tune/NAME-OF-CONFIG).")] = None,
    log: Log = "bar",
) -> None:
    """Search for good hyper-parameters; repeat the command to continue a search that was interrupted."""
    from comfedl.cli.tables import show_trials
    from comfedl.tuning.plan import make_plan
    from comfedl.tuning.search import tune as search

    plan = make_plan(config, grid, space, sampler, pruner, trials, metric, seeds, set or ())
    tuned = search(plan, out or Path("runs/tune") / config.stem, jobs, log)
    json_only = log == "json"  # keep stdout free of anything but JSON lines
    if not json_only:
        print_table(show_trials(tuned))
    if tuned.best is not None:
        typer.echo(f"The best config is {tuned.best}; run it with: comfedl run {tuned.best}", err=json_only)
        typer.echo(tuned.caution, err=json_only)
    typer.echo(f"Open the study with: {tuned.opening}", err=json_only)
    if tuned.interrupted:
        typer.echo("interrupted; repeat the command to continue", err=True)
        sys.exit(130)
    if tuned.best is None:
        raise ConfigError(f"None of {len(tuned.trials)} trials finished, so there is no best config.")
