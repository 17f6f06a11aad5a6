"""What the commands have in common."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

Changes = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change a value of the config.")]
Log = Annotated[
    str, typer.Option(metavar="bar|json", help="json: a line for machines an evaluated round, on standard output.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="tensorboard|mlflow", help="Also write the run for TensorBoard or MLflow; may be repeated."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder already holds.")]


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal; in a pipe there is no width to keep to, and a row stays a line."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
