"""comfedl flower: training over sites that keep their data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, Force, Resume, print_table

app = typer.Typer(help="Train over sites that keep their data, with Flower.", no_args_is_help=True)


@app.command("local")
def local(
    config: Annotated[Path, typer.Argument(help="A TOML file; each of its clients becomes a site.")],
    sites: Annotated[
        int | None, typer.Option(help="Number of sites (default: the number of clients of the config).")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with one table per site, for data at sites.")
    ] = None,
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run folder (default: runs/NAME-OF-CONFIG).")] = None,
    force: Force = False,
    resume: Resume = False,
) -> None:
    """Run a config over sites on this machine: SuperLink and SuperNodes on loopback, with TLS and keys."""
    from comfedl.cli.tables import show_summary
    from comfedl.config.schema import read_config
    from comfedl.flower.local_trial import run_local
    from comfedl.utils.read_back import read_object

    parsed = read_config(config, set or ())
    folder = out or Path("runs") / config.stem
    try:
        run_local(parsed, folder, sites, force, resume, lambda line: typer.echo(line, err=True), tables)
    except KeyboardInterrupt:
        typer.echo("interrupted; all processes were stopped; continue the run with --resume", err=True)
        sys.exit(130)
    print_table(show_summary(read_object(folder / "summary.json"), parsed.algorithm.name))
    typer.echo(f"Written to {folder}")


@app.command("certs")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    sites: Annotated[str, typer.Option(metavar="A,B,C", help="The names of the sites.")] = "",
    hosts: Annotated[
        str, typer.Option(metavar="A,B", help="Host names and addresses of the server, for its certificate.")
    ] = "",
    add: Annotated[str, typer.Option(metavar="A,B", help="Add sites to the folder, with new keys.")] = "",
    rotate: Annotated[str, typer.Option(metavar="NAME", help="Give this site a new key.")] = "",
    revoke: Annotated[str, typer.Option(metavar="NAME", help="Take this site's key away.")] = "",
) -> None:
    """Create a CA, a server certificate and a key per site, for a trial; or change the sites' keys."""
    from comfedl.flower import certs as keys
    from comfedl.utils.errors import ConfigError

    given = [name for name, value in (("sites", sites), ("add", add), ("rotate", rotate), ("revoke", revoke)) if value]
    if len(given) != 1:
        shown = " and ".join(f"--{name}" for name in given) or "None of --sites, --add, --rotate and --revoke"
        raise ConfigError(f"{shown} {'are' if len(given) > 1 else 'is'} given; give one of the four.")
    if hosts and not sites:
        raise ConfigError("--hosts is for the server's certificate, which only --sites makes; leave it out.")
    if sites:
        written = keys.make_certs(folder, _split_names(sites), _split_names(hosts))
    elif add:
        written = keys.add_sites(folder, _split_names(add))
    else:
        written = keys.rotate(folder, rotate) if rotate else keys.revoke(folder, revoke)
    for path in written:
        typer.echo(f"Written to {path}")
    if sites:
        typer.echo("Give each site its .key and ca.crt; keep the keys of the server and the CA private.")
    if rotate or revoke:
        typer.echo(f"The old key is kept in {folder} under names that end in .old-N. Tell Flower, too (LINK is the")
        typer.echo("SuperLink's name in its config): flwr supernode list LINK shows the node's id, then")
        typer.echo("    flwr supernode unregister NODE-ID LINK")
    for name in [*_split_names(add), *([rotate] if rotate else [])]:
        typer.echo(f"    flwr supernode register {folder / name}.pub LINK")
    for name in [*_split_names(add), *([rotate] if rotate else [])]:
        typer.echo(f"Give {name}.key to the site alone, and {'restart' if rotate else 'start'} its SuperNode with it.")


@app.command("new")
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet.")]) -> None:
    """Write a Flower app: a data function to fill in, a config, and a README with all commands."""
    from comfedl.flower.scaffold import new_app

    new_app(folder)
    typer.echo(f"Written to {folder}; read {folder / 'README.md'}")


def _split_names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
