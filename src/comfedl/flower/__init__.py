"""Clients at real sites, connected through Flower: the engine, the two apps that Flower runs, and strategies.

Flower takes seconds to import, so that happens on first use; importing this package only checks that it is installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from comfedl.utils.errors import ConfigError

if TYPE_CHECKING:
    from comfedl.flower.apps import client_app as client_app, server_app as server_app
    from comfedl.flower.engine import Sites as Sites
    from comfedl.flower.site_file import keep_data as keep_data
    from comfedl.flower.site_tables import site_table as site_table
    from comfedl.flower.strategy import (
        EqualStrategy as EqualStrategy,
        MethodStrategy as MethodStrategy,
        QFedAvgStrategy as QFedAvgStrategy,
        RobustStrategy as RobustStrategy,
    )

if importlib.util.find_spec("flwr") is None:
    raise ConfigError(
        "Flower, which connects the sites, is not installed; install it with: pip install 'comfedl[flower]'."
    )


def __getattr__(name: str) -> Any:
    if name == "Sites":
        from comfedl.flower.engine import Sites

        return Sites
    if name == "site_table":
        from comfedl.flower.site_tables import site_table

        return site_table
    if name in ("client_app", "server_app"):
        from comfedl.flower import apps

        return getattr(apps, name)
    if name in ("EqualStrategy", "MethodStrategy", "QFedAvgStrategy", "RobustStrategy"):
        from comfedl.flower import strategy

        return getattr(strategy, name)
    if name == "keep_data":
        from comfedl.flower.site_file import keep_data

        return keep_data
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
