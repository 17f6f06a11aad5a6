"""Engines: where the clients live. They know no algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from comfedl import checks
from comfedl.data.federated import FederatedData
from comfedl.engines.embedded import Embedded
from comfedl.problem import Learner
from comfedl.step import Engine, Step
from comfedl.tree import Tree

ENGINES = {"embedded": Embedded}


def make_engine(
    name: str, data: FederatedData, learner: Learner, steps: Mapping[str, Step], seed: int, state: Tree = None
) -> Engine:
    """The engine of this name, with the clients' data on it; ``state`` is what each client starts with."""
    checks.one_of("engine", name, ENGINES)
    return ENGINES[name](data, learner, steps, seed, state)
