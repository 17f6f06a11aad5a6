"""Clients at real sites, reached through Flower: the engine, and the two apps that Flower runs.

``server_app`` and ``client_app`` need configs and the loop of rounds, so they live above the engines, in
``comfedl.sites``; they are given here too, since this is where one looks for them. Nothing of Flower is imported before
it is needed; only that it is there is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from comfedl.errors import ConfigError

if importlib.util.find_spec("flwr") is None:
    raise ConfigError(
        "Flower is not installed, and it is what reaches the sites; install it with: pip install 'comfedl[flower]'."
    )

_HOMES = {
    "Sites": "comfedl.engines.flower.engine",
    "client_app": "comfedl.sites.apps",
    "server_app": "comfedl.sites.apps",
}

__all__ = ["Sites", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
