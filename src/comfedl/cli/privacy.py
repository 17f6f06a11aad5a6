"""comfedl privacy: the noise for an epsilon, and epsilon by round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comfedl.cli.options import Changes, print_table


def privacy(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    epsilon: Annotated[float | None, typer.Option(help="Find the least noise that keeps to this epsilon.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds (default: the config's).")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta (default: the config's).")] = None,
    set: Changes = None,
) -> None:
    """Say how much noise differential privacy takes, and what epsilon is after how many rounds."""
    from comfedl.analysis.privacy_plan import make_plan
    from comfedl.cli.tables import show_privacy_plan
    from comfedl.config.schema import read_config
    from comfedl.core.privacy import NOT_COVERED

    plan = make_plan(read_config(config, set or ()), epsilon, rounds, delta)
    if epsilon is not None:
        typer.echo(
            f"noise_multiplier = {plan.privacy.noise_multiplier:g} keeps epsilon at {epsilon:g} or less over "
            f"{plan.rounds:,} rounds."
        )
    typer.echo(f"Noise multiplier {plan.privacy.noise_multiplier:g}, {plan.sampling()}:")
    print_table(show_privacy_plan(plan))
    if plan.noise_norm is not None:
        typer.echo(
            f"The noise in a round's update of {plan.parameters:,} parameters has a norm of about "
            f"{plan.noise_norm:.3g}; the update itself is at most {plan.privacy.clip:g}, the clip. More clients per "
            "round make the noise smaller."
        )
    typer.echo(f"Covered: the global models of all rounds, per client. Not covered: {NOT_COVERED}.")
