"""comfedl demo, run and compare: train from configs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, Force, Log, Resume, Track, print_table
from comfedl.utils import torchrun
from comfedl.utils.errors import ConfigError


def demo(
    out: Annotated[Path | None, typer.Option(help="Where to write the runs (default: comfedl-demo).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the sites and their digits.")] = 0,
    force: Force = False,
) -> None:
    """Train FedAvg, equal weights and Robust on five sites and compare the worst site; takes a few seconds."""
    from comfedl.cli.demo import run_demo

    # The default folder is always replaced; a folder that the user names only with --force.
    run_demo(out or Path("comfedl-demo"), force or out is None, seed)


def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    set: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run folder (default: runs/NAME-OF-CONFIG).")] = None,
    force: Force = False,
    resume: Resume = False,
    log: Log = "bar",
    track: Track = None,
) -> None:
    """Train from a config and write a run folder."""
    from comfedl.analysis.load_run import read_encoding
    from comfedl.cli.tables import show_summary
    from comfedl.config.schema import read_config, run_config
    from comfedl.training.progress import make_progress
    from comfedl.training.run_folder import check_free
    from comfedl.training.trackers import make_tracker

    parsed = read_config(config, set or ())
    folder = out or Path("runs") / config.stem
    if parsed.engine == "distributed":
        torchrun.check_started()
    elif torchrun.world_size() > 1:
        raise ConfigError(
            f"engine is {parsed.engine!r}, but torchrun has started {torchrun.world_size()} processes; use --set "
            "engine=distributed, or start only one."
        )
    if torchrun.rank() > 0:
        run_config(parsed, out=folder)
        return
    if torchrun.is_restart(folder):
        force, resume = False, True
    if not resume and os.path.exists(folder / "config.toml") and (folder / "config.toml").samefile(config):
        raise ConfigError(f"{config} is in the folder that the run would be written to; give another --out.")
    check_free(folder, force, resume)
    settings = parsed.resolved()
    callbacks = [make_tracker(kind, folder, settings, folder.name, resume) for kind in track or ()]
    callbacks.insert(0, make_progress(log, parsed.rounds, folder.name))
    fed = parsed.make_data(progress=True, encoding=read_encoding(folder) if resume else None)
    try:
        result = run_config(parsed, folder, force, resume, callbacks=callbacks, fed=fed)
    except KeyboardInterrupt as stopped:
        if not str(stopped):  # before a round was complete, or by a second signal
            raise
        what = f"interrupted: {stopped} of {parsed.rounds}; you can use the model as it is, or continue with --resume"
        typer.echo(what, err=True)
        sys.exit(130)
    if log != "json":
        print_table(show_summary(result.summary(), parsed.algorithm.name))
        for sentence in [*result.notes(), *([] if result.stopped is None else [result.stopped])]:
            typer.echo(sentence)
        typer.echo(f"Written to {folder}")


def compare(
    configs: Annotated[list[Path], typer.Argument(help="TOML files that differ only in the method.")],
    seeds: Annotated[int, typer.Option(help="Number of seeds, counting up from the configs' seed.")] = 3,
    split: Annotated[str, typer.Option(help="Compare on train, validation or test.")] = "validation",
    set: Changes = None,
    out: Annotated[Path, typer.Option(help="Where to write the runs and comparison.csv.")] = Path("runs/compare"),
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished runs and continue.")] = False,
    log: Log = "bar",
    track: Track = None,
) -> None:
    """Run several configs on the same data and initial model and show them side by side."""
    from comfedl.analysis.compare import run_comparison
    from comfedl.analysis.report_content import ReportOptions
    from comfedl.analysis.report_page import offer_report
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

    def make_callbacks(config: Config, label: str, folder: Path) -> list[Callback]:
        settings = config.resolved()
        trackers = [make_tracker(kind, folder, settings, label, resume) for kind in track or ()]
        return [make_progress(log, config.rounds, label), *trackers]

    comparison = run_comparison(parsed, seeds, split, out, force, resume, make_callbacks=make_callbacks)
    json_only = log == "json"  # keep stdout free of anything but JSON lines
    if not json_only:
        table, note = show_comparison(comparison)
        print_table(table)
        for sentence in [note, *comparison.notes()]:
            typer.echo(sentence)
        typer.echo(f"Written to {out}")
    report = offer_report([out / name for name in names], out / "report.html", ReportOptions(split))
    typer.echo(report, err=json_only)
