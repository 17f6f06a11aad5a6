"""The methods, by their names in a config."""

from __future__ import annotations

from comfedl.algorithms.afl import AFL
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import ComFedL
from comfedl.algorithms.damaml import DAMAML
from comfedl.algorithms.deltafl import DeltaFL
from comfedl.algorithms.ditto import Ditto
from comfedl.algorithms.drfa import DRFA
from comfedl.algorithms.fedavg import FedAvg
from comfedl.algorithms.fedmaml import FedMAML
from comfedl.algorithms.fedprox import FedProx
from comfedl.algorithms.qfedavg import QFedAvg
from comfedl.algorithms.robust import Robust
from comfedl.algorithms.scaffold import Scaffold
from comfedl.algorithms.term import TERM
from comfedl.algorithms.trmaml import TRMAML

ALGORITHMS: dict[str, type[Algorithm]] = {
    method.name: method
    for method in (
        FedAvg,
        Robust,
        ComFedL,
        DAMAML,
        DRFA,
        AFL,
        QFedAvg,
        FedMAML,
        TRMAML,
        Ditto,
        TERM,
        DeltaFL,
        FedProx,
        Scaffold,
    )
}
