"""The federations: data, model and length of the runs. All were fixed before any method was run on them.

``seed`` draws the split, the initial model and the batches. Tuning uses seeds of its own, so that where sites are
drawn at random, those that methods are judged on are new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import comfedl as cf
from comfedl.data.registry import RawData, read

Pixels = NDArray[np.float32]
FEW = 30  # a natural client with fewer samples held out cannot be judged, and is left out


@dataclass(frozen=True)
class Federation:
    """One benchmark; ``lrs`` is a decade and more, the same for all methods."""

    title: str
    make: Callable[[int], cf.FederatedData]
    model: str
    rounds: int
    lrs: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3)
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 50
    local_steps: int = 5
    clients_per_round: int | None = None
    loss_samples: int | None = None
    equal_sizes: bool = False
    evaluations: int = 20  # in a run; the last three count
    tuning: float = 1.0  # the length of a tuning run, as a share of ``rounds``
    values: int = 3  # of a method's own parameter
    tuning_draws: int = 1  # two where a client has fewer than 100 samples for validation

    @property
    def convex(self) -> bool:
        """Whether the optimum can be computed centrally."""
        return self.model == "logistic"


@cache
def _raw(name: str) -> RawData:
    return read(name)


def _classes(name: str, classes: Sequence[int] | None, clients: int, **options: Any) -> Callable[[int], Any]:
    def make(seed: int) -> cf.FederatedData:
        return cf.load(name, cf.partition.Shards(clients=clients, classes=1), seed, 0.2, classes=classes, **options)

    return make


def _natural(name: str, by: str | None = None, least: int = FEW) -> Callable[[int], cf.FederatedData]:
    def make(seed: int) -> cf.FederatedData:
        fed = cf.load(name, cf.partition.Natural(by), seed)
        assert fed.validation is not None and fed.test is not None
        kept = [
            client for i, client in enumerate(fed.names) if min(fed.test.sizes[i], fed.validation.sizes[i]) >= least
        ]
        pairs = ({client: split[client] for client in kept} for split in (fed.train, fed.validation, fed.test))
        return cf.FederatedData(*pairs)

    return make


def _plain(x: Pixels) -> Pixels:
    return x


def _turned(x: Pixels) -> Pixels:
    return np.ascontiguousarray(np.rot90(x, axes=(2, 3)))


def _inverted(x: Pixels) -> Pixels:
    return 1 - x


def odd_sites(seed: int) -> cf.FederatedData:
    """Ten sites of 2,000 to 200 images of clothing; at the smallest two the camera is turned, or inverts.

    A quarter of a site's images is for validation. Each is tested on 1,000 images of its own kind.
    """
    sizes = [2000, 2000, 1500, 1500, 1000, 1000, 600, 600, 200, 200]
    return _sites(seed, sizes, {8: _turned, 9: _inverted}, tested=1000, validation=0.25)


def many_sites(clients: int, odd: int) -> Callable[[int], cf.FederatedData]:
    """Sites of 200 images, of which some have a turned camera; tested on 100 images each."""

    def make(seed: int) -> cf.FederatedData:
        return _sites(seed, [200] * clients, dict.fromkeys(range(odd), _turned), tested=100, validation=0.25)

    return make


def _sites(
    seed: int, sizes: Sequence[int], kinds: Mapping[int, Callable[[Pixels], Pixels]], tested: int, validation: float
) -> cf.FederatedData:
    raw = _raw("fashion-mnist")
    assert raw.test_x is not None and raw.test_y is not None
    generator = np.random.default_rng([2026, seed, len(sizes)])
    order, starts = generator.permutation(len(raw.y)), np.cumsum([0, *sizes])
    train, held, test = {}, {}, {}
    for i, size in enumerate(sizes):
        kind, name = kinds.get(i, _plain), f"site-{i:03}"
        rows, kept = order[starts[i] : starts[i + 1]], round((1 - validation) * size)
        chosen = generator.choice(len(raw.test_y), tested, replace=False)
        train[name] = kind(raw.x[rows[:kept]]), raw.y[rows[:kept]]
        held[name] = kind(raw.x[rows[kept:]]), raw.y[rows[kept:]]
        test[name] = kind(raw.test_x[chosen]), raw.test_y[chosen]
    return cf.FederatedData(train, held, test)


def _dirichlet(seed: int) -> cf.FederatedData:
    partition = cf.partition.Dirichlet(clients=10, alpha=0.1, minimum=200)
    return cf.load("cifar10", partition, seed, 0.1, held_out=200)


def _cnn(filters: int = 16) -> dict[str, Any]:
    """What keeps a CNN's benchmark short: shorter tuning runs, of the learning rate alone; losses on a sample."""
    return {
        "model": "cnn4",
        "options": {"filters": filters},
        "rounds": 60,
        "evaluations": 10,
        "lrs": (0.01, 0.03, 0.1),
        "tuning": 0.5,
        "values": 1,
        "loss_samples": 200,
        "batch_size": 32,
    }


FEDERATIONS = {
    "afl": Federation(
        "Fashion-MNIST, 3 clients: t-shirt, pullover, shirt (AFL's)",
        _classes("fashion-mnist", (0, 2, 6), 3),
        "logistic",
        rounds=300,
        equal_sizes=True,
    ),
    "one-class": Federation(
        "Fashion-MNIST, 10 clients of one class each",
        _classes("fashion-mnist", None, 10),
        "logistic",
        rounds=300,
        equal_sizes=True,
        loss_samples=1000,
    ),
    "odd-mlp": Federation(
        "Fashion-MNIST, 10 sites, two of them odd, MLP", odd_sites, "mlp", rounds=200, tuning_draws=2
    ),
    "adult-phd": Federation(
        "Adult, PhD and not PhD (AFL's)", _natural("adult", "phd"), "logistic", rounds=300, tuning_draws=2
    ),
    "watch": Federation("Watch, 10 people, MLP", _natural("watch", least=1), "mlp", rounds=150, tuning_draws=2),
    "odd-logistic": Federation(
        "Fashion-MNIST, the odd sites, logistic", odd_sites, "logistic", rounds=200, tuning_draws=2
    ),
    "10-of-60": Federation(
        "Fashion-MNIST, 60 sites, 6 of them odd, MLP; 10 a round",
        many_sites(60, 6),
        "mlp",
        rounds=300,
        equal_sizes=True,
        clients_per_round=10,
        tuning_draws=2,
    ),
    "adult-occupation": Federation(
        "Adult, 13 occupations, MLP", _natural("adult", "occupation"), "mlp", rounds=200, tuning_draws=2
    ),
    "10-of-200": Federation(
        "Fashion-MNIST, 200 sites, 10 of them odd, MLP; 10 a round",
        many_sites(200, 10),
        "mlp",
        rounds=300,
        equal_sizes=True,
        clients_per_round=10,
        tuning_draws=2,
    ),
    "flights": Federation(
        "Flights, 15 carriers: late by more than 15 minutes?",
        _natural("flights"),
        "logistic",
        rounds=200,
        tuning_draws=2,
    ),
    "odd-cnn": Federation("Fashion-MNIST, the odd sites, CNN", odd_sites, tuning_draws=2, **_cnn()),
    "cifar-one-class": Federation(
        "CIFAR-10, 10 clients of one class each, CNN (short)",
        _classes("cifar10", None, 10, held_out=200),
        equal_sizes=True,
        **_cnn(),
    ),
    "cifar-dirichlet": Federation("CIFAR-10, 10 clients by Dirichlet(0.1), CNN (short)", _dirichlet, **_cnn()),
}
