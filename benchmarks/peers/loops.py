"""The loops that a user would write in plain torch, on tensors in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.pace import Pace
from benchmarks.workloads import ADAPT, LR, STEPS, Work, build, data, parts

Batch = tuple[Tensor, Tensor]
Rounds = tuple[nn.Module, Callable[[], None]]


def loop(work: Work, pace: Pace) -> None:
    _pace(loop_round(work), pace)


def loader(work: Work, pace: Pace) -> None:
    _pace(loop_round(work, loaded(work)), pace)


def lean(work: Work, pace: Pace) -> None:
    _pace(lean_round(work), pace)


def _pace(rounds: Rounds, pace: Pace) -> None:
    server, round = rounds
    while True:
        round()
        pace(server.parameters)


def loop_round(work: Work, batch: Callable[[int], Batch] | None = None) -> Rounds:
    """A model copy and an optimiser per client; exact MAML by differentiating through the inner step."""
    server, batch = build(work), batch or batches(work)

    def backward(local: nn.Module, on: Batch) -> None:
        local.zero_grad()
        cross_entropy(local(on[0]), on[1]).backward()

    def first_order(local: nn.Module, client: int) -> None:
        start = [p.detach().clone() for p in local.parameters()]
        backward(local, batch(client))
        with torch.no_grad():
            for p in local.parameters():
                p -= ADAPT * p.grad
        backward(local, batch(client))
        with torch.no_grad():
            for p, w in zip(local.parameters(), start, strict=True):
                p.copy_(w)

    def exact(local: nn.Module, client: int) -> None:
        local.zero_grad()
        params = dict(local.named_parameters())
        x, y = batch(client)
        grads = torch.autograd.grad(cross_entropy(local(x), y), list(params.values()), create_graph=True)
        adapted = {name: p - ADAPT * g for (name, p), g in zip(params.items(), grads, strict=True)}
        x, y = batch(client)
        cross_entropy(torch.func.functional_call(local, adapted, (x,)), y).backward()

    def trained(client: int) -> nn.Module:
        local = copy.deepcopy(server)
        optimizer = torch.optim.SGD(local.parameters(), lr=LR)
        for _ in range(STEPS):
            if work.maml is None:
                backward(local, batch(client))
            else:
                (exact if work.maml == "exact" else first_order)(local, client)
            optimizer.step()
        return local

    def round() -> None:
        total = {name: torch.zeros_like(part) for name, part in server.state_dict().items()}
        for client in range(work.clients):
            for name, part in trained(client).state_dict().items():
                total[name] += part / work.clients
        server.load_state_dict(total)

    return server, round


def lean_round(work: Work) -> Rounds:
    """One model copy, no optimiser and no deepcopy; exact MAML as v - a H v, with one Hessian-vector product."""
    server, batch = build(work), batches(work)
    local = copy.deepcopy(server)
    params = list(local.parameters())

    def gradient(on: Batch, create_graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(local(on[0]), on[1]), params, create_graph=create_graph)

    def meta_gradient(client: int) -> tuple[Tensor, ...]:
        exact = work.maml == "exact"
        inner = gradient(batch(client), exact)
        start = [p.detach().clone() for p in params]
        for p, g in zip(params, inner, strict=True):
            p.data = p.data - ADAPT * g.detach()  # out of place, since the graph of ``inner`` needs the old one
        outer = gradient(batch(client))
        for p, w in zip(params, start, strict=True):
            p.data = w
        if not exact:
            return outer
        product = torch.autograd.grad(inner, params, outer)
        return tuple(v - ADAPT * h for v, h in zip(outer, product, strict=True))

    def train(client: int) -> None:
        for _ in range(STEPS):
            grads = meta_gradient(client) if work.maml else gradient(batch(client))
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p -= LR * g

    def round() -> None:
        total = {name: torch.zeros_like(part) for name, part in server.state_dict().items()}
        for client in range(work.clients):
            local.load_state_dict(server.state_dict())
            train(client)
            for name, part in local.state_dict().items():
                total[name] += part / work.clients
        server.load_state_dict(total)

    return server, round


def batches(work: Work) -> Callable[[int], Batch]:
    """A function that draws a random batch of a client's data."""
    x, y = data(work)
    generator = torch.Generator().manual_seed(1)

    def batch(client: int) -> Batch:
        rows = client * work.samples + torch.randperm(work.samples, generator=generator)[: work.batch]
        return x[rows], y[rows]

    return batch


def loaded(work: Work) -> Callable[[int], Batch]:
    """The same by a ``DataLoader`` per client, shuffled anew in every epoch."""
    loaders = [DataLoader(TensorDataset(x, y), work.batch, shuffle=True) for x, y in parts(work)]
    epochs = [iter(loader) for loader in loaders]

    def batch(client: int) -> Batch:
        found = next(epochs[client], None)
        if found is None:
            epochs[client] = iter(loaders[client])
            found = next(epochs[client])
        x, y = found
        return x, y

    return batch
