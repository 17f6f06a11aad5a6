"""comfedl: federated learning that looks after the worst-off client.

The public names are imported when they are first used, so that ``import comfedl`` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from comfedl.algorithms.comfedl import ComFedL
    from comfedl.algorithms.fedavg import FedAvg
    from comfedl.callbacks import Callback
    from comfedl.data import load, partition
    from comfedl.data.federated import FederatedData
    from comfedl.errors import ComfedlError, ConfigError, DataError, RunFolderError
    from comfedl.outer import KL, Exp, Identity
    from comfedl.problem import Adapt, Composition
    from comfedl.result import Result
    from comfedl.run import fit
    from comfedl.step import Diverged

_HOMES = {
    "Adapt": "problem",
    "Callback": "callbacks",
    "ComFedL": "algorithms.comfedl",
    "ComfedlError": "errors",
    "Composition": "problem",
    "ConfigError": "errors",
    "DataError": "errors",
    "Diverged": "step",
    "Exp": "outer",
    "FedAvg": "algorithms.fedavg",
    "FederatedData": "data.federated",
    "Identity": "outer",
    "KL": "outer",
    "Result": "result",
    "RunFolderError": "errors",
    "fit": "run",
    "load": "data",
    "partition": "data",
}

__all__ = [
    "KL",
    "Adapt",
    "Callback",
    "ComFedL",
    "ComfedlError",
    "Composition",
    "ConfigError",
    "DataError",
    "Diverged",
    "Exp",
    "FedAvg",
    "FederatedData",
    "Identity",
    "Result",
    "RunFolderError",
    "fit",
    "load",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'comfedl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"comfedl.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
