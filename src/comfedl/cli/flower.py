"""comfedl flower: sites that keep their data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, Force, print_table

app = typer.Typer(help="Sites that keep their data, through Flower.", no_args_is_help=True)


@app.command("local")
def local(
    config: Annotated[Path, typer.Argument(help="A TOML file; each of its clients is a site.")],
    sites: Annotated[
        int | None, typer.Option(help="How many sites (default: as many as the config's clients).")
    ] = None,
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME-OF-CONFIG).")] = None,
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that the folder holds.")] = False,
) -> None:
    """Try a config over sites on this machine: SuperLink and SuperNodes on loopback, with TLS and keys."""
    from comfedl.cli.tables import show_summary
    from comfedl.config.schema import read_config
    from comfedl.flower.local_trial import run_local

    parsed = read_config(config, set or ())
    folder = out or Path("runs") / config.stem
    try:
        run_local(parsed, folder, sites, force, resume, tell=lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo("interrupted; what was started is stopped; the run goes on with --resume", err=True)
        sys.exit(130)
    print_table(show_summary(json.loads((folder / "summary.json").read_text("utf-8")), parsed.algorithm.name))
    typer.echo(f"Written to {folder}")


@app.command("certs")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    sites: Annotated[str, typer.Option(metavar="A,B,C", help="The sites' names.")],
    hosts: Annotated[
        str, typer.Option(metavar="A,B", help="Names and addresses of the server, for its certificate.")
    ] = "",
) -> None:
    """Make a CA, a server's certificate and a key for every site, for a trial."""
    from comfedl.flower.certs import make_certs

    for path in make_certs(folder, _listed(sites), _listed(hosts)):
        typer.echo(f"Written {path}")
    typer.echo("Each site gets its own .key and ca.crt; the server's and the CA's keys stay where they are needed.")


@app.command("new")
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is not there yet.")]) -> None:
    """Write an app for Flower: a data function to fill in, a config, and a README with all commands."""
    from comfedl.flower.scaffold import new_app

    new_app(folder)
    typer.echo(f"Written to {folder}; read {folder / 'README.md'}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
