"""The command line. Heavy imports wait until a command needs them, so that help answers at once."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import click
import typer

from comfedl import __version__
from comfedl.cli import datasets, flower, report, runs, watch
from comfedl.cli.advise import advise
from comfedl.cli.init import init
from comfedl.cli.options import Changes, Force, Log, Track, print_table
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


def main() -> None:
    """Run the command line; an error that is meant for a person is one message and exit code 2."""
    follows = torchrun.rank() > 0  # of torchrun's processes the first one speaks
    if follows:
        warnings.simplefilter("ignore")
    try:
        code = app(standalone_mode=False)
        if code == 130 and not follows:
            typer.echo("interrupted; a run that has written a checkpoint goes on with --resume", err=True)
        sys.exit(code)
    except ComfedlError as error:
        if not follows or isinstance(error, RankLost):
            typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:  # a command or an option that does not exist
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
    if torchrun.world() > 1 and context.invoked_subcommand not in (None, "run"):
        raise ConfigError(f"torchrun has started {torchrun.world()} processes, but only `comfedl run` can use them.")
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Where to write the runs (default: comfedl-demo).")] = None,
    force: Force = False,
) -> None:
    """Train FedAvg and ComFedL on ten unequal clients and compare the worst-off one; under a minute."""
    from comfedl.cli.demo import run_demo

    # The default folder is the demo's own and is made anew; one that the reader names is not touched unasked.
    run_demo(out or Path("comfedl-demo"), force=force or out is None)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME-OF-CONFIG).")] = None,
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that the folder holds.")] = False,
    log: Log = "bar",
    track: Track = None,
) -> None:
    """Train as a config says and write the run's folder."""
    from comfedl.cli.tables import show_result
    from comfedl.config.schema import read_config, run_config
    from comfedl.training.progress import make_progress
    from comfedl.training.run_folder import check_free
    from comfedl.training.trackers import make_tracker

    parsed = read_config(config, set or ())
    folder = out or Path("runs") / config.stem
    if parsed.engine == "distributed":
        torchrun.check_started()
    elif torchrun.world() > 1:
        raise ConfigError(
            f"engine is {parsed.engine!r}, but torchrun has started {torchrun.world()} processes; use --set "
            "engine=distributed, or start one."
        )
    if torchrun.rank() > 0:
        run_config(parsed, out=folder)
        return
    if torchrun.goes_on(folder):
        force, resume = False, True
    if not resume and os.path.exists(folder / "config.toml") and (folder / "config.toml").samefile(config):
        raise ConfigError(f"{config} lies in the folder that the run would be written to; give another --out.")
    check_free(folder, force, resume)
    settings = parsed.resolved()
    hung = [make_tracker(kind, folder, settings, folder.name, resume) for kind in track or ()]
    hung.insert(0, make_progress(log, parsed.rounds, folder.name))
    result = run_config(parsed, folder, force, resume, callbacks=hung, fed=parsed.make_data(progress=True))
    if log != "json":
        print_table(show_result(result, parsed.algorithm.name))
        typer.echo(f"Written to {folder}")


@app.command()
def compare(
    configs: Annotated[list[Path], typer.Argument(help="TOML files that differ in their method.")],
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from the configs' own.")] = 3,
    split: Annotated[str, typer.Option(help="What to judge on: train, validation or test.")] = "validation",
    set: Changes = None,
    out: Annotated[Path, typer.Option(help="Where to write the runs and comparison.csv.")] = Path("runs/compare"),
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the runs that are done, and go on.")] = False,
    log: Log = "bar",
    track: Track = None,
) -> None:
    """Run several configs on the same data from the same initial model and show them side by side."""
    from comfedl.analysis.compare import run_comparison
    from comfedl.analysis.html_report import offer_report
    from comfedl.analysis.report_data import Asked
    from comfedl.cli.tables import show_comparison
    from comfedl.config.schema import Config, read_config
    from comfedl.training.callbacks import Callback
    from comfedl.training.progress import LOGS, make_progress
    from comfedl.training.trackers import TRACKERS, make_tracker
    from comfedl.utils import checks

    checks.one_of("--log", log, LOGS)
    for kind in track or ():
        checks.one_of("--track", kind, TRACKERS)
    names = [path.stem for path in configs]
    if len({*names}) < len(names):
        raise ConfigError(f"Two configs have the same file name ({', '.join(names)}); rename one.")
    parsed = {path.stem: read_config(path, set or ()) for path in configs}

    def hung(config: Config, label: str, folder: Path) -> list[Callback]:
        settings = config.resolved()
        trackers = [make_tracker(kind, folder, settings, label, resume) for kind in track or ()]
        return [make_progress(log, config.rounds, label), *trackers]

    comparison = run_comparison(parsed, seeds, split, out, force, resume, watch=hung)
    machine = log == "json"  # then standard output is theirs alone
    if not machine:
        table, note = show_comparison(comparison)
        print_table(table)
        typer.echo(note)
        typer.echo(f"Written to {out}")
    typer.echo(offer_report([out / name for name in names], out / "report.html", Asked(split)), err=machine)


@app.command()
def tune(
    config: Annotated[Path, typer.Argument(help="A TOML file; its table [tune] may say what to search.")],
    grid: Annotated[
        str | None, typer.Option(metavar="paper|FILE", help="Search a grid: the paper's (section 5.3), or a TOML file.")
    ] = None,
    space: Annotated[Path | None, typer.Option(help="Search what a TOML file says: lists and ranges.")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="grid, tpe or random (default: grid with --grid, else tpe).")
    ] = None,
    pruner: Annotated[str, typer.Option(help="Stop bad trials early: none, median or hyperband.")] = "none",
    trials: Annotated[
        int | None, typer.Option(help="How many in total (default: the whole grid, or 50).", show_default=False)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What to choose by, never test (default: validation.accuracy.worst, or rmse in a regression).",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds a trial is the mean of.")] = 1,
    jobs: Annotated[int, typer.Option(help="How many trials at a time, each in a process of its own.")] = 1,
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder (default: runs/tune/NAME-OF-CONFIG).")] = None,
    log: Log = "bar",
) -> None:
    """Search for good hyper-parameters; a search that was stopped goes on when the command is repeated."""
    from comfedl.cli.tables import show_trials
    from comfedl.tuning.plan import make_plan
    from comfedl.tuning.search import tune as search

    plan = make_plan(config, grid, space, sampler, pruner, trials, metric, seeds, set or ())
    tuned = search(plan, out or Path("runs/tune") / config.stem, jobs, log)
    machine = log == "json"  # then standard output is theirs alone
    if not machine:
        print_table(show_trials(tuned))
    if tuned.best is not None:
        typer.echo(f"The best config is {tuned.best}; run it with: comfedl run {tuned.best}", err=machine)
        typer.echo(tuned.caution, err=machine)
    typer.echo(f"Open the study with: {tuned.opening}", err=machine)
    if tuned.interrupted:
        typer.echo("interrupted; repeat the command to go on", err=True)
        sys.exit(130)
    if tuned.best is None:
        raise ConfigError(f"None of {len(tuned.trials)} trials came to its end, so there is no best config.")


@app.command()
def reproduce(
    figures: Annotated[list[str], typer.Argument(metavar="FIGURE...", help="fig2 to fig6, theory, or all.")],
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (what results/ holds).")] = "quick",
    seeds: Annotated[int | None, typer.Option(help="How many seeds judge (default: the preset's).")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write (default: runs/reproduce-PRESET).")] = None,
    jobs: Annotated[int | None, typer.Option(help="How many processes (default: one a core).")] = None,
    log: Log = "bar",
) -> None:
    """Run the paper's experiments: tables and a picture for each figure. What is finished is not run again."""
    from comfedl_reproduction import reproduce as carry_out

    try:
        folders = carry_out(figures, preset, seeds, out, jobs, log)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where it was", err=True)
        sys.exit(130)
    for folder in folders:
        typer.echo(f"Written to {folder}", err=log == "json")


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="algorithms, outers, datasets, partitions or models")]) -> None:
    """List what a config can name."""
    from comfedl.cli import tables

    lists = {
        "algorithms": tables.algorithms,
        "datasets": tables.datasets,
        "partitions": tables.partitions,
        "models": tables.models,
        "outers": tables.outers,
    }
    if what not in lists:
        from comfedl.utils.errors import nearest

        raise ConfigError(f"There is no list of {what!r}; {nearest(what, lists)}.")
    print_table(lists[what]())


for command in (init, advise, runs.predict, runs.evaluate, runs.personalise, report.report, watch.watch):
    app.command()(command)
