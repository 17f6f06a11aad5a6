"""Options and output that several commands share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change a value of the config; repeatable.")
]
Log = Annotated[str, typer.Option(metavar="bar|json", help="json: one JSON line per evaluated round, on stdout.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="tensorboard|mlflow", help="Also log to TensorBoard or MLflow; repeatable."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing run in the folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")]


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; wide in a pipe, so that each row stays on one line."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
