"""comfedl data: the registered data sets."""

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
    """Show the samples and labels of each client under a config."""
    from comfedl.cli import tables
    from comfedl.config.schema import read_data

    print_table(tables.clients(read_data(config, set or (), progress=True)))
