"""The entry point of the command line: the app, its commands, and how errors are reported."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
import traceback
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
from comfedl.cli.privacy import privacy
from comfedl.cli.report import report
from comfedl.cli.reproduce import reproduce
from comfedl.cli.run import compare, demo, run
from comfedl.cli.tune import tune
from comfedl.cli.watch import watch
from comfedl.utils import torchrun
from comfedl.utils.errors import ComfedlError, ConfigError, RankLost

DEBUG = "COMFEDL_DEBUG"  # the environment variable that shows the traceback of an unexpected error

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
commands += [predict, evaluate, personalise, report, watch, privacy]
for command in commands:
    app.command(command.__name__.rstrip("_"))(command)


def main() -> None:
    """Run the command line; an error for the user is printed as one message, with exit code 2."""
    is_worker = torchrun.rank() > 0  # only the first process of torchrun prints
    if is_worker:
        warnings.simplefilter("ignore")
    _print_warnings(is_worker)
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
    except BrokenPipeError:  # whoever read the output has closed it, as head does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python complains when it flushes at exit
        sys.exit(1)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        typer.echo(f"error: {_unexpected(error)}", err=True)
        sys.exit(1)


class _Printer(logging.Handler):
    """Prints what the library warns of, each sentence once, on stderr."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(logging.WARNING)
        self._quiet, self._said = quiet, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not self._quiet and text not in self._said:
            self._said.add(text)
            typer.echo(text, err=True)


def _print_warnings(quiet: bool) -> None:
    logger = logging.getLogger("comfedl")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Printer)]:
        logger.removeHandler(handler)
    logger.addHandler(_Printer(quiet))


def _unexpected(error: Exception) -> str:
    """An unexpected error as one sentence; its traceback goes to a file."""
    text = " ".join(str(error).split())[:200]
    kind = type(error).__name__
    said = f"{kind}: {text}" if text else kind
    try:
        with tempfile.NamedTemporaryFile("w", prefix="comfedl-", suffix=".log", delete=False, encoding="utf-8") as file:
            file.write(f"comfedl {__version__}, Python {sys.version}\n{shlex.join(sys.argv)}\n\n")
            traceback.print_exception(error, file=file)
    except (OSError, ValueError):
        return f"an unexpected error ({said}); {DEBUG}=1 shows the details."
    return f"an unexpected error ({said}); the details are in {file.name}, and {DEBUG}=1 shows them here."


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
