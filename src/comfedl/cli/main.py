"""The entry point of the command line: the app, its commands, and how errors are reported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import click
import typer

from comfedl import __version__
from comfedl.cli import datasets, flower
from comfedl.cli.advise import advise
from comfedl.cli.catalog import list_
from comfedl.cli.inference import evaluate, personalise, predict
from comfedl.cli.init import init
from comfedl.cli.report import report
from comfedl.cli.reproduce import reproduce
from comfedl.cli.run import compare, demo, run
from comfedl.cli.tune import tune
from comfedl.cli.watch import watch
from comfedl.utils import torchrun
from comfedl.utils.errors import ComfedlError, ConfigError, RankLost

app = typer.Typer(
    name="comfedl",
    help="Federated learning that looks after the worst-off client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(datasets.app, name="data")
app.add_typer(flower.app, name="flower")
commands: list[Callable[..., None]] = [demo, run, compare, tune, reproduce, list_, init, advise]
commands += [predict, evaluate, personalise, report, watch]
for command in commands:
    app.command(command.__name__.rstrip("_"))(command)


def main() -> None:
    """Run the command line; an error for the user is printed as one message, with exit code 2."""
    is_worker = torchrun.rank() > 0  # only the first process of torchrun prints
    if is_worker:
        warnings.simplefilter("ignore")
    try:
        code = app(standalone_mode=False)
        if code == 130 and not is_worker:
            typer.echo("interrupted; if the run has written a checkpoint, continue it with --resume", err=True)
        sys.exit(code)
    except ComfedlError as error:
        if not is_worker or isinstance(error, RankLost):
            typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:  # an unknown command or option
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        typer.echo("interrupted", err=True)
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    processes = torchrun.world_size()
    if processes > 1 and context.invoked_subcommand not in (None, "run"):
        raise ConfigError(f"torchrun has started {processes} processes, but only `comfedl run` can use them.")
    if version:
        typer.echo(__version__)
        raise typer.Exit
