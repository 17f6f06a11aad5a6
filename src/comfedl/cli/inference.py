"""comfedl predict, evaluate and personalise: use a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comfedl.cli.options import print_table
from comfedl.utils.errors import RunFolderError

if TYPE_CHECKING:
    from comfedl.analysis.load_run import SavedRun

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Trust = Annotated[bool, typer.Option("--trust", help='Import code that the run\'s config names as "module:function".')]
Replace = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


def predict(
    run: Run,
    data: Annotated[
        Path, typer.Argument(help="A CSV or Parquet file with the training columns, an .npz file, or images.")
    ],
    client: Annotated[
        str | None, typer.Option(help="Use this client's personal model (default: the global one).")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Use a model file, such as personalise writes.")] = None,
    client_column: Annotated[
        str | None, typer.Option(help="Use for each row the personal model of the client that this column names.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Write this column of the data too; repeatable (default: all that the model does not use)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the predictions.")] = Path("predictions.csv"),
    force: Replace = False,
    trust: Trust = False,
) -> None:
    """Predict new samples with a trained model and write a CSV file."""
    from comfedl.analysis.predict import predict as make_predictions
    from comfedl.training.run_folder import readable
    from comfedl.utils.files import write_atomic

    _check_writable(out, force)
    text = make_predictions(_load(run, trust), data, client, model, client_column, keep)
    with readable(out):
        write_atomic(out, text.encode())
    typer.echo(f"Written to {out}: {_count_lines(text) - 1} predictions")


def evaluate(
    run: Run,
    split: Annotated[
        str | None, typer.Option(help="train, validation or test (default: test if there is one).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Labelled samples to use instead of the run's data.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table as CSV.")] = None,
    force: Replace = False,
    trust: Trust = False,
) -> None:
    """Score a trained model on each client's data."""
    from comfedl.analysis.compare import rows_to_csv
    from comfedl.analysis.evaluate import evaluate as make_scores
    from comfedl.cli.tables import show_scores
    from comfedl.training.run_folder import readable
    from comfedl.utils.files import write_atomic

    if out is not None:
        _check_writable(out, force)
    scores = make_scores(_load(run, trust), split, data)
    print_table(show_scores(scores))
    for sentence in scores.table.notes():
        typer.echo(sentence)
    if out is not None:
        with readable(out):
            write_atomic(out, rows_to_csv(scores.table.rows).encode())
        typer.echo(f"Written to {out}")


def personalise(
    run: Run,
    data: Annotated[Path, typer.Option(help="The new client's labelled samples: CSV, .npz, or folders of images.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the model (default: NAME-OF-DATA.safetensors).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of gradient steps (default: the method's).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the method's).")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the samples that is held out for scoring.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Seed of the held-out samples and the batches.")] = 0,
    force: Replace = False,
    trust: Trust = False,
) -> None:
    """Adapt a trained model to a new client, and show its scores before and after."""
    from comfedl.analysis.personalize import personalize
    from comfedl.cli.tables import show_personalized
    from comfedl.training.run_folder import readable

    target = out or Path(f"{data.stem}.safetensors")
    _check_writable(target, force)
    with readable(target):
        found = personalize(_load(run, trust), data, target, steps, lr, held_out, seed)
    typer.echo(f"Adapted with {found.steps} steps of lr {found.lr:g} on {found.adapted_on} samples.")
    print_table(show_personalized(found))
    if found.after["loss"] > found.before["loss"]:
        typer.echo("Adapting increased the held-out loss: use the global model, or a smaller --lr.")
    command = f"comfedl predict {run} DATA --model {target}{' --trust' if trust else ''}"
    typer.echo(f"Written to {target}; use it with: {command}")


def _load(folder: Path, trust: bool) -> SavedRun:
    """Load a run; if it has not finished, say where it is."""
    from comfedl.analysis.load_run import load_run

    run = load_run(folder, trust=trust)
    if run.unfinished is not None:
        typer.echo(run.unfinished, err=True)
    return run


def _count_lines(text: str) -> int:
    """The number of lines of a CSV text, whose quoted cells may hold line breaks."""
    return sum(part.count("\n") for part in text.split('"')[::2])


def _check_writable(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise RunFolderError(f"{out} exists; give another --out, or replace it with --force.")
