"""comfedl: federated learning that looks after the worst-off client.

The public names are imported when they are first used, so that ``import comfedl`` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # what type checkers, editors and import-linter see
    from comfedl import models as models
    from comfedl.algorithms.afl import AFL as AFL
    from comfedl.algorithms.comfedl import ComFedL as ComFedL
    from comfedl.algorithms.damaml import DAMAML as DAMAML
    from comfedl.algorithms.deltafl import DeltaFL as DeltaFL
    from comfedl.algorithms.ditto import Ditto as Ditto
    from comfedl.algorithms.drfa import DRFA as DRFA
    from comfedl.algorithms.fedavg import FedAvg as FedAvg
    from comfedl.algorithms.fedmaml import FedMAML as FedMAML
    from comfedl.algorithms.fedprox import FedProx as FedProx
    from comfedl.algorithms.qfedavg import QFedAvg as QFedAvg
    from comfedl.algorithms.robust import Robust as Robust
    from comfedl.algorithms.scaffold import Scaffold as Scaffold
    from comfedl.algorithms.term import TERM as TERM
    from comfedl.algorithms.trmaml import TRMAML as TRMAML
    from comfedl.analysis.load_run import load_run as load_run
    from comfedl.core import offset as offset, optim as optim, schedule as schedule
    from comfedl.core.objectives import Adapt as Adapt, Composition as Composition
    from comfedl.core.outer_functions import (
        KL as KL,
        ChiSquare as ChiSquare,
        Custom as Custom,
        CVaR as CVaR,
        Exp as Exp,
        Identity as Identity,
        Power as Power,
        Tilt as Tilt,
    )
    from comfedl.core.privacy import DP as DP
    from comfedl.data import load as load, partition as partition, transform as transform
    from comfedl.data.federated import FederatedData as FederatedData
    from comfedl.engines import faults as faults
    from comfedl.models import losses as losses
    from comfedl.models.metrics import Metric as Metric
    from comfedl.secure.settings import SecureAggregation as SecureAggregation
    from comfedl.training.callbacks import Callback as Callback
    from comfedl.training.fit import fit as fit
    from comfedl.training.result import Result as Result
    from comfedl.training.stopping import EarlyStopping as EarlyStopping
    from comfedl.utils.errors import (
        ComfedlError as ComfedlError,
        ConfigError as ConfigError,
        DataError as DataError,
        Diverged as Diverged,
        QuorumError as QuorumError,
        RunFolderError as RunFolderError,
    )

# The module of each public name. tests/project/test_public_names.py holds this table against the imports above.
_HOMES = {
    "AFL": "comfedl.algorithms.afl",
    "Adapt": "comfedl.core.objectives",
    "CVaR": "comfedl.core.outer_functions",
    "Callback": "comfedl.training.callbacks",
    "ChiSquare": "comfedl.core.outer_functions",
    "ComFedL": "comfedl.algorithms.comfedl",
    "ComfedlError": "comfedl.utils.errors",
    "Composition": "comfedl.core.objectives",
    "ConfigError": "comfedl.utils.errors",
    "Custom": "comfedl.core.outer_functions",
    "DAMAML": "comfedl.algorithms.damaml",
    "DP": "comfedl.core.privacy",
    "DRFA": "comfedl.algorithms.drfa",
    "DataError": "comfedl.utils.errors",
    "DeltaFL": "comfedl.algorithms.deltafl",
    "Ditto": "comfedl.algorithms.ditto",
    "Diverged": "comfedl.utils.errors",
    "EarlyStopping": "comfedl.training.stopping",
    "Exp": "comfedl.core.outer_functions",
    "FedAvg": "comfedl.algorithms.fedavg",
    "FedMAML": "comfedl.algorithms.fedmaml",
    "FedProx": "comfedl.algorithms.fedprox",
    "FederatedData": "comfedl.data.federated",
    "Identity": "comfedl.core.outer_functions",
    "KL": "comfedl.core.outer_functions",
    "Metric": "comfedl.models.metrics",
    "Power": "comfedl.core.outer_functions",
    "QFedAvg": "comfedl.algorithms.qfedavg",
    "QuorumError": "comfedl.utils.errors",
    "Result": "comfedl.training.result",
    "Robust": "comfedl.algorithms.robust",
    "RunFolderError": "comfedl.utils.errors",
    "Scaffold": "comfedl.algorithms.scaffold",
    "SecureAggregation": "comfedl.secure.settings",
    "TERM": "comfedl.algorithms.term",
    "TRMAML": "comfedl.algorithms.trmaml",
    "Tilt": "comfedl.core.outer_functions",
    "faults": "comfedl.engines",
    "fit": "comfedl.training.fit",
    "load": "comfedl.data",
    "load_run": "comfedl.analysis.load_run",
    "losses": "comfedl.models",
    "models": "comfedl.models",
    "offset": "comfedl.core",
    "optim": "comfedl.core",
    "partition": "comfedl.data",
    "schedule": "comfedl.core",
    "transform": "comfedl.data",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'comfedl' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__ == f"comfedl.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
