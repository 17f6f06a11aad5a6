"""How often a run is evaluated with ``eval_every = "auto"``.

Work is counted in samples and never timed, so that a run has the same records on every machine. The number of rounds
does not count, so that a run made longer is evaluated in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from comfedl.core.protocol import Engine, Step

# Samples of training for each sample evaluated, so that evaluation takes about a fifth of the time or less. A sample
# that is only evaluated costs less arithmetic, but is read from memory once, where training reuses a batch in cache.
RATIO = 5
FEW = 1000  # so few samples in all take no time worth saving: every round is evaluated
# "measured" takes the place of "train", and a client runs "baseline" once.
NOT_TRAINING = ("evaluate", "personal", "measured", "baseline")


def evaluation_gap(engine: Engine, steps: Mapping[str, Step], participants: int, evaluated: int | None) -> int:
    """The number of rounds between evaluations that leaves them about a fifth of the work; 1 for very small data.

    Args:
        steps: the method's steps, whose draws say how many samples they take.
        participants: the number of clients in a round.
        evaluated: the number of clients that are evaluated; None is all.
    """
    held_out = engine.sizes // 2 if engine.held_out is None else engine.held_out
    if (engine.sizes + held_out).sum() <= FEW:
        return 1
    training = [step for name, step in steps.items() if name not in NOT_TRAINING]
    trained = float(_drawn(engine, training).mean()) * participants
    own = _drawn(engine, [steps["personal"]])
    passes = 2 if own.any() else 1  # the global and the personal model
    scored = (passes * (engine.sizes + held_out) + own).mean() * (evaluated or len(engine.names))
    return max(1, math.ceil(RATIO * float(scored) / max(1.0, trained)))


def _drawn(engine: Engine, steps: list[Step]) -> NDArray[np.float64]:
    """The number of samples that these steps draw from each client's training data."""
    total = np.zeros(len(engine.sizes))
    for draw in (draw for step in steps for draw in step.draws.values()):
        size = engine.sizes if draw.size is None else draw.size
        total += draw.count * (np.minimum(engine.sizes, size) if draw.bounded else size)
    return total
