"""The methods, each with a learning rate and three values of one more parameter, so that all have the same budget.

Where a method has a parameter of its own, that is tuned; else the clients' weight decay is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.core.optim import SGD

MOMENTUM = SGD(momentum=0.9)


@dataclass(frozen=True)
class Entry:
    """A method; ``values`` are those of ``parameter``, the middle one first."""

    title: str
    parameter: str
    values: Sequence[float]
    make: Callable[..., Algorithm]
    can_sample: bool = True
    for_unequal_sizes: bool = False


def _decay(weight_decay: float) -> SGD:
    return SGD(weight_decay=weight_decay)


def _fedavg(value: float, **common: Any) -> Algorithm:
    return cf.FedAvg(client_optimizer=_decay(value), **common)


def _fedavgm(value: float, **common: Any) -> Algorithm:
    return cf.FedAvg(client_optimizer=_decay(value), server_optimizer=MOMENTUM, **common)


def _equal(value: float, **common: Any) -> Algorithm:
    return cf.ComFedL(client_optimizer=_decay(value), **common)


def _equal_momentum(value: float, **common: Any) -> Algorithm:
    return cf.ComFedL(client_optimizer=_decay(value), server_optimizer=MOMENTUM, server_average=0.9, **common)


def _qfedavg(value: float, **common: Any) -> Algorithm:
    return cf.QFedAvg(q=value, **common)


def _drfa(value: float, **common: Any) -> Algorithm:
    return cf.DRFA(dual_lr=value, **common)


def _afl(value: float, **common: Any) -> Algorithm:
    return cf.AFL(dual_lr=value, **common)


def _kl(value: float, **common: Any) -> Algorithm:
    return cf.ComFedL(outer=cf.KL(value), **common)


def _robust(value: float, **common: Any) -> Algorithm:
    return cf.Robust(gamma=value, **common)


def _robust_offset(value: float, **common: Any) -> Algorithm:
    return cf.Robust(gamma=0.1, offset=cf.offset.Generalisation(value), **common)


METHODS = {
    "fedavg": Entry("FedAvg", "weight decay", (0.0, 1e-3, 1e-2), _fedavg),
    "equal": Entry("equal weights", "weight decay", (0.0, 1e-3, 1e-2), _equal),
    "fedavgm": Entry("FedAvgM", "weight decay", (0.0, 1e-3, 1e-2), _fedavgm),
    "equal-momentum": Entry("equal weights, Robust's optimiser", "weight decay", (0.0, 1e-3, 1e-2), _equal_momentum),
    "q-fedavg": Entry("q-FedAvg", "q", (1.0, 0.2, 5.0), _qfedavg),
    "drfa": Entry("DRFA", "dual lr", (0.01, 0.08, 0.001), _drfa),
    "afl": Entry("AFL", "dual lr", (0.01, 0.08, 0.001), _afl, can_sample=False),
    "kl": Entry("KL plain (TERM, t = 1 / gamma)", "gamma", (0.1, 0.3, 0.03), _kl),
    "robust": Entry("Robust", "gamma", (0.1, 0.3, 0.03), _robust),
    "robust-offset": Entry(
        "Robust with `offset`", "c of Generalisation", (10.0, 30.0, 3.0), _robust_offset, for_unequal_sizes=True
    ),
}
