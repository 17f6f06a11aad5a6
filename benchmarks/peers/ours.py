"""comfedl as users run it: one call of ``fit``, timed by a callback. Nothing is evaluated before the last round."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import comfedl as cf
from benchmarks.peers.pace import Counting, Pace
from benchmarks.workloads import ADAPT, LR, STEPS, Work, build, parts
from comfedl.algorithms.base import Algorithm
from comfedl.core.learner import Params
from comfedl.engines.kernels import channels_last, choice
from comfedl.engines.kernels.conv_chain import Chain
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot

FOREVER = 10**9


class Stop(Exception):
    """Raised to stop ``fit``."""


class EachRound(Callback):
    """Calls the pace at the end of every round."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def settled(self, snapshot: Snapshot) -> None:
        self.pace(snapshot.state["model"]["params"].values)


class First(Callback):
    """Stores the model after the first round and stops."""

    params: Params

    def settled(self, snapshot: Snapshot) -> None:
        self.params = snapshot.state["model"]["params"]
        raise Stop


def method(work: Work) -> Algorithm:
    common = {"lr": LR, "local_steps": STEPS, "batch_size": work.batch}
    return cf.FedMAML(adapt_lr=ADAPT, order=work.maml, **common) if work.maml else cf.FedAvg(**common)


def robust_method(work: Work) -> Algorithm:
    return cf.Robust(gamma=0.1, lr=LR, local_steps=STEPS, batch_size=work.batch)


def adam_method(work: Work) -> Algorithm:
    return cf.FedAvg(lr=LR / 10, local_steps=STEPS, batch_size=work.batch, client_optimizer=cf.optim.Adam())


def federated(work: Work) -> cf.FederatedData:
    return cf.FederatedData({f"{client:04d}": part for client, part in enumerate(parts(work))})


def robust(work: Work, pace: Pace) -> None:
    run(work, pace, robust_method)


def adam(work: Work, pace: Pace) -> None:
    run(work, pace, adam_method)


def run(work: Work, pace: Pace, make: Callable[[Work], Algorithm] = method) -> None:
    # Hooks on the model do not see vectorised clients. So passes are counted with serial clients, and the default path
    # must give the same parameters. This runs in another process, to keep its memory out of the measurement.
    with pace.aside(), ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:
        pace.checks = elsewhere.submit(checked, work, make).result()
    fed = federated(work)
    loop = {"rounds": FOREVER, "eval_every": FOREVER, "callbacks": [EachRound(pace)]}
    cf.fit(build(work), fed, make(work), **loop)


def checked(work: Work, make: Callable[[Work], Algorithm] = method) -> dict[str, Any]:
    """Count the gradients of a round with serial clients, and compare the model with that of the default path."""
    torch.set_num_threads(1)
    fed, counting = federated(work), Counting()
    written_out, gains = Chain.of, choice.gains
    # The passes are autograd's, through the model, where they can be counted, and with torch's own products.
    Chain.of = lambda module: None
    choice.gains = channels_last.gains = lambda module: False
    counted = first_round(work, fed, "serial", make)
    Chain.of, choice.gains, channels_last.gains = written_out, gains, gains
    counting.stop()
    ours = first_round(work, fed, "auto", make)
    apart = max(float((ours[name] - part).abs().max()) for name, part in counted.items())
    return {"passes": dict(counting.passes), "apart": apart}


def first_round(
    work: Work, fed: cf.FederatedData, vectorize: str, make: Callable[[Work], Algorithm] = method
) -> Params:
    """The parameters after one round of ``fit``."""
    first = First()
    options = {"engine_options": {"vectorize": vectorize}, "callbacks": [first]}
    try:
        cf.fit(build(work), fed, make(work), rounds=2, eval_every=2, **options)
    except Stop:
        return first.params
    raise AssertionError("fit() did not call its callback")
