"""comfedl advise: whether anybody is outvoted, and the effect of each gamma."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comfedl.cli.options import Changes, print_table

if TYPE_CHECKING:
    from comfedl.analysis.robust_advice import Advice


def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    gamma: Annotated[list[float] | None, typer.Option(help="A gamma to try; repeatable (default: 0.01 to 5).")] = None,
    warmup: Annotated[int, typer.Option(help="Rounds of plain averaging before the losses are computed.")] = 20,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a plot.")] = None,
    set: Changes = None,
) -> None:
    """Say whether plain averaging outvotes a client, and what each gamma would do to the clients' weights."""
    from comfedl.analysis.robust_advice import advise as make_advice, plot_advice
    from comfedl.cli.tables import show_advice, show_fits, show_weights
    from comfedl.config.schema import read_config
    from comfedl.training.run_folder import readable

    advice = make_advice(read_config(config, set or ()), warmup, gamma or ())
    if advice.fits:
        print_table(show_fits(advice))
        for sentence in advice.about_worst:
            typer.echo(sentence)
        typer.echo(_verdict(advice))
    print_table(show_weights(advice))
    print_table(show_advice(advice))
    if advice.equal_losses:
        typer.echo("All clients have the same loss, so every gamma gives uniform weights; use a larger --warmup.")
    else:
        typer.echo(
            "noise factor: the variance of the weighted mean of the clients' gradients, relative to that of the plain "
            "mean; when noise limits convergence, expect about this factor more rounds.\n"
            "The weights are computed from the current losses; Robust's become more even as the losses come together."
        )
    if png is not None:
        with readable(png):
            plot_advice(advice, png)
        typer.echo(f"Written to {png}")


def _verdict(advice: Advice) -> str:
    """Whether robust weights can be expected to help, in a sentence or two."""
    from comfedl.analysis.robust_advice import FALL

    worst = max(advice.fits, key=lambda fit: fit.loss)
    if not advice.outvoted:
        return (
            f"No client is outvoted: fine-tuning on its own data lowers the loss of {worst.client}, the worst client, "
            f"by less than {FALL:.0%}. Its task is hard or its data are few; expect little from robust weights."
        )
    names = ", ".join(fit.client for fit in advice.outvoted[:5])
    rest = len(advice.outvoted) - 5
    one = len(advice.outvoted) == 1
    whose = "its own data serves it" if one else "their own data serves each of them"
    return (
        f"Outvoted: {names}{f' and {rest} more' if rest > 0 else ''}. A model fine-tuned on {whose} better than the "
        "averaged model, so more weight can help as well: try the method robust."
    )
