"""fluke: its FedAVG (or PerFedAVG) with its Server and Client classes, in memory, without any evaluation."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.pace import Pace
from benchmarks.workloads import ADAPT, LR, Work, build, parts


def import_torchvision() -> None:
    """Import torchvision, which fluke needs, with a CPU build of torch.

    Torchvision's wheel is built for CUDA, so its C++ operators do not load, and its Python code fails on their missing
    names. Declaring these without code is enough, since nothing calls them; fluke itself is unchanged.
    """
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

        globals()["_kept"] = library  # keeps the declarations alive


def run(work: Work, pace: Pace) -> None:
    import_torchvision()
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.per_fedavg import PerFedAVG, PerFedAVGOptimizer
    from fluke.data import FastDataLoader
    from fluke.utils import FederationObserver

    class Splitter:
        """Gives every client its data."""

        def assign(self, n_clients: int, batch_size: int) -> Any:
            loaders = [
                FastDataLoader(x, y, num_labels=work.classes, batch_size=batch_size, shuffle=True)
                for x, y in parts(work)
            ]
            return (loaders, [None] * n_clients), None

    class EachRound(FederationObserver):
        def end_round(self, round: int) -> None:
            pace(algorithm.server.model.parameters)

    settings = FlukeENV()
    settings.set_seed(0)
    settings.set_device("cpu")
    settings.set_inmemory(True)
    settings.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    client: dict[str, Any] = {
        "batch_size": work.batch,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    if work.maml:  # the optimiser's rate is that of the inner step, beta that of the outer one
        client |= {"mode": "FO", "beta": LR, "optimizer": {"name": PerFedAVGOptimizer, "lr": ADAPT}}
    hyper = DDict(client=client, server={"weighted": True}, model=build(work))
    algorithm = (PerFedAVG if work.maml else FedAVG)(work.clients, Splitter(), hyper)
    algorithm.set_callbacks(EachRound())
    algorithm.run(n_rounds=10**9, eligible_perc=1)
