"""comfedl watch: a run that goes on in another terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.utils.errors import ConfigError


def watch(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of runs; it may yet have to begin.")],
    web: Annotated[bool, typer.Option("--web", help="Serve the report's plots on a page that updates itself.")] = False,
    port: Annotated[int, typer.Option(help="The page's port; 0 takes one that is free.")] = 8765,
    host: Annotated[str, typer.Option(help="Who may look: by default this machine alone.")] = "127.0.0.1",
) -> None:
    """Follow a run while it goes on: in this terminal, or with --web in a browser."""
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file; give a run's folder.")
    try:
        if web:
            from comfedl.analysis.web_server import serve

            serve([run], host, port, typer.echo)
        else:
            from rich.console import Console

            from comfedl.analysis.terminal_watch import Follower

            Follower(run, Console()).follow()
    except KeyboardInterrupt:
        typer.echo("", err=True)
