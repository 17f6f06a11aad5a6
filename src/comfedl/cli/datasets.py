"""comfedl data: the registered data sets, and what a config makes of the user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, print_table

app = typer.Typer(help="Data sets: list them, download one, or show each client's share.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the data sets and whether they are cached."""
    from comfedl.cli import tables

    print_table(tables.datasets())


@app.command("fetch")
def fetch(name: str, force: Annotated[bool, typer.Option("--force", help="Download it again.")] = False) -> None:
    """Download a data set into the cache and verify its checksums."""
    from comfedl.data import registry

    folder = registry.fetch(name, progress=True, force=force)
    typer.echo(f"{name} is ready" + (f" in {folder}" if folder.exists() else " (it comes with scikit-learn)"))


@app.command("describe")
def describe(
    config: Annotated[Path, typer.Argument(help="A TOML file with a [data] table.")], set: Changes = None
) -> None:
    """Show the samples and labels of each client under a config, and what becomes of each column of a table."""
    from comfedl.cli import data_tables, tables
    from comfedl.config.schema import read_data

    fed = read_data(config, set or (), progress=True)
    print_table(tables.clients(fed))
    for line in data_tables.small_clients(fed):
        typer.echo(line)
    report = None if fed.encoding is None else fed.encoding.report
    if report is not None:
        print_table(data_tables.columns(report))
        if report.dropped:
            print_table(data_tables.dropped_rows(report))
