"""comfedl: federated learning that looks after the worst-off client.

The public names are imported when they are first used, so that ``import comfedl`` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from comfedl import models
    from comfedl.algorithms.afl import AFL
    from comfedl.algorithms.comfedl import ComFedL
    from comfedl.algorithms.damaml import DAMAML
    from comfedl.algorithms.deltafl import DeltaFL
    from comfedl.algorithms.ditto import Ditto
    from comfedl.algorithms.drfa import DRFA
    from comfedl.algorithms.fedavg import FedAvg
    from comfedl.algorithms.fedmaml import FedMAML
    from comfedl.algorithms.qfedavg import QFedAvg
    from comfedl.algorithms.term import TERM
    from comfedl.algorithms.trmaml import TRMAML
    from comfedl.callbacks import Callback
    from comfedl.data import load, partition
    from comfedl.data.federated import FederatedData
    from comfedl.errors import ComfedlError, ConfigError, DataError, RunFolderError
    from comfedl.outer import KL, ChiSquare, Custom, CVaR, Exp, Identity, Power, Tilt
    from comfedl.problem import Adapt, Composition
    from comfedl.result import Result
    from comfedl.run import fit
    from comfedl.saved import load_run
    from comfedl.screen import QuorumError
    from comfedl.step import Diverged

_HOMES = {
    "AFL": "algorithms.afl",
    "Adapt": "problem",
    "CVaR": "outer",
    "Callback": "callbacks",
    "ChiSquare": "outer",
    "ComFedL": "algorithms.comfedl",
    "ComfedlError": "errors",
    "Composition": "problem",
    "ConfigError": "errors",
    "Custom": "outer",
    "DAMAML": "algorithms.damaml",
    "DRFA": "algorithms.drfa",
    "DataError": "errors",
    "DeltaFL": "algorithms.deltafl",
    "Ditto": "algorithms.ditto",
    "Diverged": "step",
    "Exp": "outer",
    "FedAvg": "algorithms.fedavg",
    "FedMAML": "algorithms.fedmaml",
    "FederatedData": "data.federated",
    "Identity": "outer",
    "KL": "outer",
    "Power": "outer",
    "QFedAvg": "algorithms.qfedavg",
    "QuorumError": "screen",
    "Result": "result",
    "RunFolderError": "errors",
    "TERM": "algorithms.term",
    "TRMAML": "algorithms.trmaml",
    "Tilt": "outer",
    "fit": "run",
    "load": "data",
    "load_run": "saved",
    "models": "models",
    "partition": "data",
}

__all__ = [
    "AFL",
    "DAMAML",
    "DRFA",
    "KL",
    "TERM",
    "TRMAML",
    "Adapt",
    "CVaR",
    "Callback",
    "ChiSquare",
    "ComFedL",
    "ComfedlError",
    "Composition",
    "ConfigError",
    "Custom",
    "DataError",
    "DeltaFL",
    "Ditto",
    "Diverged",
    "Exp",
    "FedAvg",
    "FedMAML",
    "FederatedData",
    "Identity",
    "Power",
    "QFedAvg",
    "QuorumError",
    "Result",
    "RunFolderError",
    "Tilt",
    "fit",
    "load",
    "load_run",
    "models",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'comfedl' has no attribute {name!r}")
    home = importlib.import_module(f"comfedl.{_HOMES[name]}")
    value = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
