"""What a user's type checker sees of the installed package. Checked by mypy, not run.

No expression in here may have the type Any, so a public name that loses its annotations is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_type

import numpy as np
import torch
from torch import Tensor, nn

import comfedl as cf

Row = dict[str, float | int | str | None]


class Worst(cf.Callback):
    """A callback of one's own; strict checking also compares it with the methods that it overrides."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def round_done(self, number: int) -> None:
        assert_type(number, int)

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        worst = row["validation.accuracy.worst"]
        assert_type(worst, float | int | str | None)
        self.seen += [float(worst)] if isinstance(worst, float) else []

    def finished(self, result: cf.Result) -> None:
        assert_type(result.seconds, float)


def my_loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y)


def share_of_ones(output: Tensor, y: Tensor) -> float:
    return float(output.argmax(1).float().mean())


def inner(params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[0] @ params["w"]


def outer(y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (y - batch[1]).square().mean()


def data() -> cf.FederatedData:
    x, y = np.zeros((8, 3)), np.zeros(8, dtype=np.int64)
    arrays = {"a": (x, y), "b": (x + 1, y)}
    tensors = {"a": (torch.zeros(8, 3), torch.zeros(8))}
    fed = cf.FederatedData(arrays, validation=tensors)
    assert_type(fed, cf.FederatedData)
    assert_type(len(fed), int)
    assert_type(cf.load("digits", cf.partition.Dirichlet(clients=4, alpha=0.5), seed=0), cf.FederatedData)
    return fed


def train(out: str) -> cf.Result:
    robust = cf.Robust(gamma=0.1, lr=0.1, client_optimizer=cf.optim.SGD(momentum=0.9))
    assert_type(robust, cf.Robust)
    assert_type(robust.lr, float)
    result = cf.fit(
        nn.Linear(3, 2),
        data(),
        robust,
        rounds=10,
        loss=my_loss,
        out=out,
        callbacks=[Worst()],
        stop=cf.EarlyStopping("validation.accuracy.worst", patience=3),
        metrics={"ones": share_of_ones, "cost": cf.Metric(share_of_ones, smaller_is_better=True)},
        faults=[cf.faults.SignFlip(["a"])],
    )
    assert_type(result, cf.Result)
    return result


def read(result: cf.Result) -> None:
    assert_type(result.params["weight"], Tensor)
    assert_type(result.rounds, list[Row])
    assert_type(result.clients, Sequence[Row])
    assert_type(result.traffic, dict[str, int])
    assert_type(result.best_round, int)
    assert_type(result.stopped, str | None)
    assert_type(result.personal("a")["weight"], Tensor)
    assert_type(result.state_dict()["weight"], Tensor)
    assert_type(result.to_module("a"), nn.Module)


def methods() -> list[object]:
    schedule = cf.schedule.Warmup(5, then=cf.schedule.Cosine(rounds=50))
    assert_type(cf.KL(0.2, cap=3.0), cf.KL)
    return [
        cf.FedAvg(lr=0.1, local_steps=5, batch_size=None, weighting="uniform", lr_schedule=schedule),
        cf.ComFedL(outer=cf.KL(0.2), step="safe"),
        cf.ComFedL(inner=cf.Adapt(lr=0.05), outer=cf.Exp(5.0)),
        cf.ComFedL(problem=cf.Composition(inner, outer)),
        cf.DRFA(dual_lr=0.1),
        cf.AFL(dual_lr=0.1),
        cf.QFedAvg(q=1.0),
        cf.FedMAML(adapt_lr=0.05, order="first"),
        cf.TRMAML(adapt_lr=0.05, dual_lr=0.1),
        cf.Ditto(lam=0.1),
        cf.FedProx(mu=0.01),
        cf.Scaffold(),
        cf.TERM(),
        cf.DeltaFL(),
        cf.FedAvg(server_optimizer=cf.optim.Adam(lr=0.01), clip_grad_norm=1.0, defence="strong"),
    ]


def saved(folder: str) -> None:
    run = cf.load_run(folder)
    assert_type(run.to_module(), nn.Module)
    try:
        cf.load_run(folder, trust=True)
    except cf.RunFolderError as error:
        assert_type(error, cf.RunFolderError)
