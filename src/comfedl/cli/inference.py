"""comfedl predict, evaluate and personalise: what is done with a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import print_table

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def predict(
    run: Run,
    data: Annotated[Path, typer.Argument(help="A CSV file with the columns of training, an .npz file, or images.")],
    client: Annotated[str | None, typer.Option(help="Use this client's own model (default: the global one).")] = None,
    model: Annotated[Path | None, typer.Option(help="Use the model of a file, such as personalise wrote.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the predictions.")] = Path("predictions.csv"),
    force: Replace = False,
) -> None:
    """Predict new rows with a trained model, and write a CSV file."""
    from comfedl.analysis.load_run import load_run
    from comfedl.analysis.predict import predict as predicted
    from comfedl.training.run_folder import readable
    from comfedl.utils.files import write_atomic

    _check_free(out, force)
    text = predicted(load_run(run), data, client, model)
    with readable(out):
        write_atomic(out, text.encode())
    typer.echo(f"Written to {out}: {text.count(chr(10)) - 1} predictions")


def evaluate(
    run: Run,
    split: Annotated[str | None, typer.Option(help="train, validation or test (default: the last there is).")] = None,
    data: Annotated[Path | None, typer.Option(help="Rows with labels, in place of the run's own data.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table as CSV too.")] = None,
    force: Replace = False,
) -> None:
    """Show what a trained model is worth to each client."""
    from comfedl.analysis.load_run import load_run
    from comfedl.analysis.predict import evaluate as evaluated
    from comfedl.analysis.predict import scores_csv
    from comfedl.cli.tables import show_scores
    from comfedl.training.run_folder import readable
    from comfedl.utils.files import write_atomic

    if out is not None:
        _check_free(out, force)
    scores = evaluated(load_run(run), split, data)
    print_table(show_scores(scores))
    if out is not None:
        with readable(out):
            write_atomic(out, scores_csv(scores).encode())
        typer.echo(f"Written to {out}")


def personalise(
    run: Run,
    data: Annotated[Path, typer.Option(help="The new client's rows with labels: CSV, .npz, or folders of images.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write its model (default: NAME-OF-DATA.safetensors).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps (default: the method's own).")] = None,
    lr: Annotated[float | None, typer.Option(help="The size of a step (default: the method's own).")] = None,
    held_out: Annotated[float, typer.Option(help="The share of the rows to judge by.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Which rows are held out, and the batches.")] = 0,
    force: Replace = False,
) -> None:
    """Adapt a trained model to a client that was never seen, and say what that gave."""
    from comfedl.analysis.load_run import load_run
    from comfedl.analysis.predict import personalise as personalised
    from comfedl.cli.tables import show_personalised
    from comfedl.training.run_folder import readable

    target = out or Path(f"{data.stem}.safetensors")
    _check_free(target, force)
    with readable(target):
        found = personalised(load_run(run), data, target, steps, lr, held_out, seed)
    typer.echo(f"Adapted by {found.steps} steps of size {found.lr:g} on {found.adapted_on} rows.")
    print_table(show_personalised(found))
    if found.after["loss"] > found.before["loss"]:
        typer.echo("Adapting made it worse on the rows held out: use the global model, or a smaller --lr.")
    typer.echo(f"Written to {target}; use it with: comfedl predict {run} DATA --model {target}")


def _check_free(out: Path, force: bool) -> None:
    from comfedl.utils.errors import RunFolderError

    if out.exists() and not force:
        raise RunFolderError(f"{out} exists; give another --out, or replace it (--force).")
