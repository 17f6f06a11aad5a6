"""comfedl advise: the effect of each gamma."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, print_table


def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    gamma: Annotated[list[float] | None, typer.Option(help="A gamma to try; repeatable (default: 0.01 to 5).")] = None,
    warmup: Annotated[int, typer.Option(help="Rounds of plain averaging before the losses are computed.")] = 20,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a plot.")] = None,
    set: Changes = None,
) -> None:
    """Show the effect of each gamma of KL: client weights, effective clients and gradient noise."""
    from comfedl.analysis.gamma_advice import advise as make_advice, plot_advice
    from comfedl.cli.tables import show_advice, show_weights
    from comfedl.config.schema import read_config
    from comfedl.training.run_folder import readable

    advice = make_advice(read_config(config, set or ()), warmup, gamma or ())
    print_table(show_weights(advice))
    print_table(show_advice(advice))
    if advice.equal_losses:
        typer.echo("All clients have the same loss, so every gamma gives uniform weights; use a larger --warmup.")
    else:
        half = max(1.0, advice.participants / 2)
        typer.echo(
            "noise: variance of the weighted mean of client gradients, relative to the plain mean; when noise limits "
            "convergence, expect about this factor more rounds.\n"
            f'Losses change during training; outer = {{ name = "kl", effective_clients = {half:g} }} fixes the number '
            "of effective clients instead of gamma."
        )
    if png is not None:
        with readable(png):
            plot_advice(advice, png)
        typer.echo(f"Written to {png}")
