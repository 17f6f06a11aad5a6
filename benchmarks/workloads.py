"""The workloads W1 to W7 in plain torch, so that they run in any environment with torch.

W1: softmax regression 784 -> 10, 10 clients, batch 50. W2: the same, 1,000 clients, batch 20. W3: the four-layer CNN
(32 filters, batch statistics) on 3x32x32, 10 clients, batch 32. W4: W3 with one-step MAML, first order or exact. W5, W6
and W7, each with 10 clients and batch 32: a transformer encoder (two layers of width 64, sequences of 32 tokens), a
ResNet-8 with group norm on 3x32x32, and LEAF's character LSTM for Shakespeare in small (embedding 8, two layers of 64,
sequences of 40).

All clients participate, with five local steps of SGD. A client holds exactly five batches of samples, so that
frameworks that count epochs do the same work as those that count steps. W0 is a tiny one, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, STEPS, LR, ADAPT = 10, 5, 0.01, 0.05


@dataclass(frozen=True)
class Work:
    """One workload; ``maml`` is "first" or "exact" for MAML, None for federated averaging.

    With a ``vocabulary``, samples are token ids below it. A sample has one of ``classes`` labels.
    """

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    maml: str | None = None
    vocabulary: int | None = None
    classes: int = CLASSES

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
    "W5": Work("transformer", (32,), 10, 32, vocabulary=80),
    "W6": Work("resnet8", (3, 32, 32), 10, 32),
    "W7": Work("lstm", (40,), 10, 32, vocabulary=80, classes=80),
}


def data(work: Work) -> tuple[Tensor, Tensor]:
    """The samples of all clients, client by client: random inputs, labelled by a random linear teacher."""
    generator = torch.Generator().manual_seed(0)
    count, size = work.clients * work.samples, math.prod(work.shape)
    if work.vocabulary is not None:
        x = torch.randint(work.vocabulary, (count, *work.shape), generator=generator)
        teacher = torch.randn(work.vocabulary, work.classes, generator=generator)
        return x, functional.embedding(x, teacher).sum(dim=1).argmax(dim=1)
    x = torch.randn(count, *work.shape, generator=generator)
    teacher = torch.randn(size, work.classes, generator=generator)
    return x, (x.flatten(1) @ teacher).argmax(dim=1)


def parts(work: Work) -> list[tuple[Tensor, Tensor]]:
    """The data of each client."""
    return list(zip(*(whole.split(work.samples) for whole in data(work)), strict=True))


def build(work: Work) -> nn.Module:
    """The initial model, always the same; its mark lets ``Counting`` recognise it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = MODELS[work.model](work)
    net.counted = True
    return net


def softmax(work: Work) -> nn.Module:
    linear = nn.Linear(math.prod(work.shape), work.classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def cnn4(work: Work, filters: int = 32) -> nn.Module:
    channels, height, width = work.shape
    blocks = []
    for _ in range(4):
        convolution = nn.Conv2d(channels, filters, 3, padding=1)
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        norm = nn.BatchNorm2d(filters, eps=1e-3, track_running_stats=False)
        blocks.append(nn.Sequential(convolution, norm, nn.ReLU(), nn.MaxPool2d(2)))
        channels, height, width = filters, height // 2, width // 2
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(filters * height * width, work.classes))


class Transformer(nn.Module):
    """A transformer encoder on token ids, whose outputs are averaged over the sequence and classified."""

    def __init__(self, work: Work, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        assert work.vocabulary is not None
        self.embedding = nn.Embedding(work.vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(*work.shape, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, work.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x) + self.position).mean(dim=1))


class Block(nn.Module):
    """Two convolutions with group norm and a shortcut."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, filters)
        self.second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, filters)
        changes = stride > 1 or channels != filters
        self.shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def resnet8(work: Work) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(work.shape[0], 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, work.classes))


class CharLSTM(nn.Module):
    """Predicts the character that follows a sequence."""

    def __init__(self, work: Work, embedded: int = 8, width: int = 64) -> None:
        super().__init__()
        assert work.vocabulary is not None
        self.embedding = nn.Embedding(work.vocabulary, embedded)
        self.lstm = nn.LSTM(embedded, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, work.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


MODELS: dict[str, Callable[[Work], nn.Module]] = {
    "softmax": softmax,
    "cnn4": cnn4,
    "transformer": Transformer,
    "resnet8": resnet8,
    "lstm": CharLSTM,
}
