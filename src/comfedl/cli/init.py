"""comfedl init: a new project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The project folder to create.")]) -> None:
    """Write a small project with its own data, model and config, ready to run."""
    from comfedl.cli.project_template import write_project

    write_project(folder)
    typer.echo(f"Written to {folder}; next: cd {folder} && comfedl run config.toml")
