"""Time a round of FedAvg (and first-order MAML) against the loop that a user would write, one thread, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/ours.py [W1 W2 W3 W4] [--repeats 5]

W1: softmax regression 784 -> 10, 10 clients, batch 50. W2: the same, 1,000 clients of 100 samples, batch 20. W3: the
four-layer CNN (32 filters, batch statistics) on 3x32x32, 10 clients, batch 32. W4: W3 with one-step first-order MAML.
Five local steps; data are random numbers of these shapes; no evaluation in the timed part. The times are CPU
milliseconds a round, medians; ratios carry from one machine to another, times do not.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.rounds import Round
from comfedl.data.federated import FederatedData, Split
from comfedl.engines import make_engine
from comfedl.losses import LOSSES
from comfedl.problem import Learner, Model

STEPS, LR, ADAPT = 5, 0.1, 0.05


@dataclass(frozen=True)
class Work:
    """One workload."""

    model: str
    shape: tuple[int, ...]
    clients: int
    samples: int
    batch: int
    rounds: int
    maml: bool = False


WORKS = {
    "W1": Work("logistic", (784,), 10, 600, 50, 20),
    "W2": Work("logistic", (784,), 1000, 100, 20, 1),
    "W3": Work("cnn4", (3, 32, 32), 10, 200, 32, 1),
    "W4": Work("cnn4", (3, 32, 32), 10, 200, 32, 1, maml=True),
}


def data(work: Work) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = work.clients * work.samples
    return torch.randn(n, *work.shape, generator=generator), torch.randint(0, 10, (n,), generator=generator)


def loop(work: Work) -> Callable[[int], None]:
    """The loop that a user would write, slicing tensors: a copy of the model and an optimiser for each client."""
    server = cf.models.build(work.model, work.shape, 10, 0)
    x, y = data(work)
    generator = torch.Generator().manual_seed(1)

    def batch(client: int) -> tuple[Tensor, Tensor]:
        rows = client * work.samples + torch.randperm(work.samples, generator=generator)[: work.batch]
        return x[rows], y[rows]

    def backward(local: nn.Module, on: tuple[Tensor, Tensor]) -> None:
        local.zero_grad()
        cross_entropy(local(on[0]), on[1]).backward()

    def trained(client: int) -> nn.Module:
        local = copy.deepcopy(server)
        optimizer = torch.optim.SGD(local.parameters(), lr=LR)
        for _ in range(STEPS):
            if work.maml:
                start = [p.detach().clone() for p in local.parameters()]
                backward(local, batch(client))
                with torch.no_grad():
                    for p in local.parameters():
                        p -= ADAPT * p.grad
            backward(local, batch(client))
            if work.maml:
                with torch.no_grad():
                    for p, w in zip(local.parameters(), start, strict=True):
                        p.copy_(w)
            optimizer.step()
        return local

    def round(number: int) -> None:
        total = {name: torch.zeros_like(part) for name, part in server.state_dict().items()}
        for client in range(work.clients):
            for name, part in trained(client).state_dict().items():
                total[name] += part / work.clients
        server.load_state_dict(total)

    return round


def lean_loop(work: Work) -> Callable[[int], None]:
    """The same by somebody who minds the time: one copy of the model, and neither optimiser nor deepcopy."""
    server = cf.models.build(work.model, work.shape, 10, 0)
    (x, y), local = data(work), copy.deepcopy(server)
    params = list(local.parameters())
    generator = torch.Generator().manual_seed(1)

    def batch(client: int) -> tuple[Tensor, Tensor]:
        rows = client * work.samples + torch.randperm(work.samples, generator=generator)[: work.batch]
        return x[rows], y[rows]

    def train(client: int) -> None:
        for _ in range(STEPS):
            here, there = batch(client), batch(client) if work.maml else None
            grads = torch.autograd.grad(cross_entropy(local(here[0]), here[1]), params)
            if there is not None:
                with torch.no_grad():
                    start = [p.clone() for p in params]
                    for p, g in zip(params, grads, strict=True):
                        p -= ADAPT * g
                grads = torch.autograd.grad(cross_entropy(local(there[0]), there[1]), params)
                with torch.no_grad():
                    for p, w in zip(params, start, strict=True):
                        p.copy_(w)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p -= LR * g

    def round(number: int) -> None:
        total = {name: torch.zeros_like(part) for name, part in server.state_dict().items()}
        for client in range(work.clients):
            local.load_state_dict(server.state_dict())
            train(client)
            for name, part in local.state_dict().items():
                total[name] += part / work.clients
        server.load_state_dict(total)

    return round


def ours(work: Work, vectorize: str) -> Callable[[int], None]:
    """A round of comfedl's."""
    common = {"lr": LR, "local_steps": STEPS, "batch_size": work.batch}
    algorithm: Algorithm = cf.FedMAML(adapt_lr=ADAPT, order="first", **common) if work.maml else cf.FedAvg(**common)
    module: nn.Module = cf.models.build(work.model, work.shape, 10, 0)
    x, y = data(work)
    names = [f"{i:04d}" for i in range(work.clients)]
    fed = FederatedData.from_splits({"train": Split(x, y, names, np.arange(work.clients + 1) * work.samples)})
    model = Model(params={name: part.detach() for name, part in module.named_parameters()}, buffers={})
    learner = Learner(module, *LOSSES["cross_entropy"])
    options = {"vectorize": vectorize}
    engine = make_engine("embedded", fed, learner, algorithm.steps(), 0, algorithm.client_state(model), options)
    state = algorithm.init(model, work.clients)

    def round(number: int) -> None:
        nonlocal state
        state, _ = algorithm.round(state, Round(number, 0, work.clients, engine))

    return round


def main() -> None:
    parser = argparse.ArgumentParser(description="Time comfedl's rounds against a plain loop.")
    parser.add_argument("works", nargs="*", default=["W1", "W2"], help=f"some of {', '.join(WORKS)}")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("loop ms", "lean ms", "serial ms", "auto ms", "loop/serial", "loop/auto", "lean/auto")
    print("    " + "".join(f"{column:>12}" for column in columns))
    for name in arguments.works:
        work = WORKS[name]
        ways = {"loop": loop(work), "lean": lean_loop(work), "serial": ours(work, "serial"), "auto": ours(work, "auto")}
        times: dict[str, list[float]] = {way: [] for way in ways}
        number = 0
        for repeat in range(arguments.repeats + 1):
            for way, round in ways.items():
                start = time.process_time()
                for _ in range(work.rounds):
                    number += 1
                    round(number)
                if repeat:  # the first warms up
                    times[way].append((time.process_time() - start) / work.rounds * 1e3)
        ms = {way: statistics.median(spent) for way, spent in times.items()}
        ratios = [ms["loop"] / ms["serial"], ms["loop"] / ms["auto"], ms["lean"] / ms["auto"]]
        print(f"{name:4}" + "".join(f"{number:12.2f}" for number in [*ms.values(), *ratios]))


if __name__ == "__main__":
    main()
