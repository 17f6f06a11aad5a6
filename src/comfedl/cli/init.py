"""comfedl init: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The project's folder; it is made.")]) -> None:
    """Write a small project with data, model and config of its own, which runs at once."""
    from comfedl.cli.project_template import write_project

    write_project(folder)
    typer.echo(f"Written to {folder}; next: cd {folder} && comfedl run config.toml")
