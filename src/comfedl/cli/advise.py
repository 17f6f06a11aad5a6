"""comfedl advise: what each gamma would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, print_table


def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    gamma: Annotated[list[float] | None, typer.Option(help="A gamma to look at (default: 0.01 to 5).")] = None,
    warmup: Annotated[int, typer.Option(help="Rounds of plain averaging before the losses are taken.")] = 20,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture too.")] = None,
    set: Changes = None,
) -> None:
    """Show what each gamma of KL would do: weights, effective clients and what that costs."""
    from comfedl.analysis.gamma_advice import advise as advised
    from comfedl.analysis.gamma_advice import draw
    from comfedl.cli.tables import show_advice, show_weights
    from comfedl.config.schema import read_config
    from comfedl.training.run_folder import readable

    found = advised(read_config(config, set or ()), warmup, gamma or ())
    print_table(show_weights(found))
    print_table(show_advice(found))
    if found.equal:
        typer.echo("All clients have the same loss here, so every gamma gives uniform weights; give --warmup.")
    else:
        half = max(1.0, found.participants / 2)
        typer.echo(
            "noise: the variance of the weighted mean of the clients' gradients, in that of the plain mean. Where "
            "noise is what keeps training back, it takes so many times as many rounds.\n"
            f'The losses change in training; outer = {{ name = "kl", effective_clients = {half:g} }} keeps the number '
            "of effective clients instead of gamma."
        )
    if png is not None:
        with readable(png):
            draw(found, png)
        typer.echo(f"Written to {png}")
