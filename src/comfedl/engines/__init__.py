"""Engines: they hold the clients and run their steps, for any algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from comfedl.core.learner import Learner
from comfedl.core.protocol import Engine, Step
from comfedl.data.federated import FederatedData
from comfedl.data.transform import TransformFunction
from comfedl.engines.distributed import Distributed
from comfedl.engines.embedded import Embedded
from comfedl.engines.faults import Fault, Faulty
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

ENGINES: dict[str, type[Embedded] | type[Distributed]] = {"embedded": Embedded, "distributed": Distributed}
AT_SITES = "flower"
"""The engine whose clients are at remote sites: it is started by Flower, not by name."""


def default_options(name: str) -> dict[str, Any]:
    """An engine's options and defaults, from its signature; "distributed" also takes those of "embedded"."""
    parameters = inspect.signature(ENGINES[name]).parameters
    own = {key: p.default for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    below = default_options("embedded") if ENGINES[name] is Distributed else {}
    return below | {key: own[key] for key in [*own][5:]}


def make_engine(
    name: str,
    data: FederatedData,
    learner: Learner,
    steps: Mapping[str, Step],
    seed: int,
    state: Tree = None,
    options: Mapping[str, Any] | None = None,
    faults: Sequence[Fault] = (),
    transforms: Sequence[TransformFunction] = (),
) -> Engine:
    """The engine of this name, with these data; ``state`` is every client's initial state.

    Faults that change the data, see ``faults.poisoned``, are in ``data`` already.
    """
    if name == AT_SITES:
        raise ConfigError(
            'engine is "flower", whose clients are at remote sites; start a local trial with "comfedl flower local '
            'CONFIG", or a run over real sites with flwr run (docs/flower.md).'
        )
    checks.one_of("engine", name, ENGINES)
    for option in options or {}:
        checks.one_of(f"An option of the engine {name}", option, default_options(name))
    engine = ENGINES[name](data, learner, steps, seed, state, transforms=transforms, **options or {})
    return Faulty(engine, faults, steps, seed) if faults else engine
