"""The workloads W1 to W4 in plain torch, so that they run in any environment with torch.

W1: softmax regression 784 -> 10, 10 clients, batch 50. W2: the same, 1,000 clients, batch 20. W3: the four-layer CNN
(32 filters, batch statistics) on 3x32x32, 10 clients, batch 32. W4: W3 with one-step MAML, first order or exact. All
clients participate, with five local steps of SGD. A client holds exactly five batches of samples, so that frameworks
that count epochs do the same work as those that count steps. W0 is a tiny one, for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES, STEPS, LR, ADAPT = 10, 5, 0.01, 0.05


@dataclass(frozen=True)
class Work:
    """One workload; ``maml`` is "first" or "exact" for MAML, None for federated averaging."""

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    maml: str | None = None

    @property
    def samples(self) -> int:
        """The number of samples per client: one epoch takes the local steps."""
        return STEPS * self.batch

    @property
    def passes(self) -> dict[int, int]:
        """The number of gradients per round, by batch size."""
        return {self.batch: self.clients * STEPS * (2 if self.maml else 1)}


WORKS = {
    "W0": Work("softmax", (6,), 3, 4),
    "W1": Work("softmax", (784,), 10, 50),
    "W2": Work("softmax", (784,), 1000, 20),
    "W3": Work("cnn4", (3, 32, 32), 10, 32),
    "W4 first": Work("cnn4", (3, 32, 32), 10, 32, "first"),
    "W4 exact": Work("cnn4", (3, 32, 32), 10, 32, "exact"),
}


def data(work: Work) -> tuple[Tensor, Tensor]:
    """The samples of all clients, client by client: random inputs, labelled by a random linear teacher."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.clients * work.samples, *work.shape, generator=generator)
    teacher = torch.randn(math.prod(work.shape), CLASSES, generator=generator)
    return x, (x.flatten(1) @ teacher).argmax(dim=1)


def parts(work: Work) -> list[tuple[Tensor, Tensor]]:
    """The data of each client."""
    return list(zip(*(whole.split(work.samples) for whole in data(work)), strict=True))


def build(work: Work) -> nn.Module:
    """The initial model, always the same; its mark lets ``Counting`` recognise it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = softmax(work.shape) if work.model == "softmax" else cnn4(work.shape)
    net.counted = True
    return net


def softmax(shape: tuple[int, ...]) -> nn.Module:
    linear = nn.Linear(math.prod(shape), CLASSES)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def cnn4(shape: tuple[int, ...], filters: int = 32) -> nn.Module:
    channels, height, width = shape
    blocks = []
    for _ in range(4):
        convolution = nn.Conv2d(channels, filters, 3, padding=1)
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        norm = nn.BatchNorm2d(filters, eps=1e-3, track_running_stats=False)
        blocks.append(nn.Sequential(convolution, norm, nn.ReLU(), nn.MaxPool2d(2)))
        channels, height, width = filters, height // 2, width // 2
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(filters * height * width, CLASSES))
