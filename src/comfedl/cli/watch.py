"""comfedl watch: follow a run of another process."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from comfedl.utils.errors import ConfigError


def watch(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs; it need not exist yet.")],
    web: Annotated[bool, typer.Option("--web", help="Serve a live report as a web page.")] = False,
    port: Annotated[int, typer.Option(help="The port of the web page; 0 picks a free one.")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on (default: only this machine).")] = "127.0.0.1",
) -> None:
    """Follow a run in progress, in this terminal or with --web in a browser."""
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file; give a run folder.")
    if not run.exists():
        typer.echo(f"There is no folder {run} yet{_near(run)}", err=True)
    try:
        if web:
            from comfedl.analysis.web_server import serve

            serve([run], host, port, typer.echo)
        else:
            from rich.console import Console

            from comfedl.analysis.terminal_watch import RunWatcher

            RunWatcher(run, Console()).follow()
    except KeyboardInterrupt:
        typer.echo("", err=True)


def _near(run: Path) -> str:
    """The folder beside it whose name is most like this one, if any is."""
    beside = [path.name for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
    close = difflib.get_close_matches(run.name, beside, n=1)
    return f"; did you mean {run.parent / close[0]}?" if close else "."
