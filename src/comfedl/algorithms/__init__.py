"""The methods, by the names that a config uses."""

from __future__ import annotations

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import ComFedL
from comfedl.algorithms.fedavg import FedAvg

ALGORITHMS: dict[str, type[Algorithm]] = {method.name: method for method in (FedAvg, ComFedL)}
