"""comfedl list: the names that a config can use."""

from __future__ import annotations

from typing import Annotated

import typer

from comfedl.cli.options import print_table
from comfedl.utils.errors import ConfigError, nearest


def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, outers, optimizers, schedules, losses, metrics, datasets, partitions or models"
        ),
    ],
) -> None:
    """List the names that a config can use."""
    from comfedl.cli import tables

    lists = {
        "algorithms": tables.algorithms,
        "datasets": tables.datasets,
        "partitions": tables.partitions,
        "models": tables.models,
        "outers": tables.outers,
        "optimizers": tables.optimizers,
        "schedules": tables.schedules,
        "losses": tables.losses,
        "metrics": tables.metrics,
    }
    if what not in lists:
        raise ConfigError(f"There is no list of {what!r}; {nearest(what, lists)}.")
    print_table(lists[what]())
