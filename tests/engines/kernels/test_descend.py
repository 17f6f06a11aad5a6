"""The fused loop of gradient steps of stacked dense models, against one gradient at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms.base import PLAIN, descend
from comfedl.core.learner import Learner, Model
from comfedl.core.objectives import LocalLoss
from comfedl.data.split import Split
from comfedl.engines.batching import BatchBuffer, LazyBatches
from comfedl.engines.kernels.dense import Dense
from comfedl.engines.stacked import Ragged
from comfedl.models.losses import LOSSES

CLIENTS, FEATURES, CLASSES = 4, 6, 3
Build = Callable[[], nn.Module]
MODELS: dict[str, Build] = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "no bias": lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)),
    "deep": lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, CLASSES)),
    "activation first": lambda: nn.Sequential(nn.Sigmoid(), nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)),
}


def dense(module: nn.Module) -> Dense:
    return Dense(Learner(module, *LOSSES["cross_entropy"]))


def start(module: nn.Module, frozen: str = "") -> Model:
    """Each client's parameters, except frozen ones."""
    torch.manual_seed(1)
    params = {
        name: torch.randn(CLIENTS, *leaf.shape, dtype=torch.float64)
        for name, leaf in module.named_parameters()
        if not frozen or not name.endswith(frozen)
    }
    return Model(params=params, buffers={})


def batches(samples: int, shape: tuple[int, ...] = (FEATURES,), steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [
        (
            torch.randn(CLIENTS, samples, *shape, dtype=torch.float64),
            torch.randint(0, CLASSES, (CLIENTS, samples)),
        )
        for _ in range(steps)
    ]


def one_by_one(learner: Dense, model: Model, drawn: list[tuple[Tensor, Tensor]], rate: float) -> tuple[Model, Tensor]:
    """The plain loop: the slope is 1, but the loop does not know it."""
    found = descend(LocalLoss(learner), model, drawn, drawn, rate, slope=lambda value: torch.ones_like(value))
    return found.model, found.watched["loss"]


def check(learner: Dense, model: Model, drawn: list[tuple[Tensor, Tensor]], rate: float = 0.3) -> None:
    before = {name: leaf.clone() for name, leaf in model["params"].items()}
    short = learner.descend(model, drawn, rate, PLAIN, {})
    assert short is not None
    params, losses, _ = short
    wanted, seen = one_by_one(learner, model, drawn, rate)
    assert list(params) == list(before)
    for name, leaf in params.items():
        torch.testing.assert_close(leaf, wanted["params"][name], rtol=1e-12, atol=1e-13)
        assert not torch.equal(leaf, before[name])
        assert torch.equal(model["params"][name], before[name])  # the arguments are unchanged
    torch.testing.assert_close(losses, seen, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_it_ends_where_the_loop_ends(name: str, samples: int) -> None:
    module = MODELS[name]().double()
    shape = (2, FEATURES // 2) if name == "flattened" else (FEATURES,)
    check(dense(module), start(module), batches(samples, shape))


@pytest.mark.parametrize("frozen", ["weight", "bias", "0.weight", "2.bias"])
def test_what_is_frozen_stays(frozen: str) -> None:
    module = MODELS["deep"]().double()
    check(dense(module), start(module, frozen), batches(5))


def test_clients_of_different_sizes() -> None:
    module = MODELS["deep"]().double()
    sizes = torch.tensor([3, 1, 7, 2])
    x, y = torch.randn(13, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (13,))
    check(dense(module), start(module), [Ragged(x, y, sizes)] * 3)


def test_a_model_that_all_share_is_not_written_on() -> None:
    module = MODELS["deep"]().double()
    params = {name: leaf.detach().expand(CLIENTS, *leaf.shape) for name, leaf in module.named_parameters()}
    check(dense(module), Model(params=params, buffers={}), batches(5))


def test_no_short_cut() -> None:
    """For layers without a closed-form gradient, no batches, and a rate that overflows the dtype."""
    known = MODELS["linear"]().double()
    assert dense(known).descend(start(known), [], 0.1, PLAIN, {}) is None
    assert dense(known).descend(start(known), batches(5), 1e300, PLAIN, {}) is None
    normed = nn.Sequential(nn.Linear(FEATURES, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)).double()
    assert dense(normed).descend(start(normed), batches(5), 0.1, PLAIN, {}) is None
    rows = [(x.unsqueeze(2), y) for x, y in batches(5)]  # a sample is a row of its features
    assert dense(known).descend(start(known), rows, 0.1, PLAIN, {}) is None


def test_room_is_kept_and_grows() -> None:
    buffer = BatchBuffer()
    first = buffer.of((2, 3), torch.zeros(1))
    assert buffer.of((3, 1), torch.zeros(1)).data_ptr() == first.data_ptr()
    assert buffer.of((4, 3), torch.zeros(1)).shape == (4, 3)
    assert buffer.of((2,), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_batches_of_all_kinds_come_in_turn_as_they_are_gathered() -> None:
    x = torch.arange(48.0).view(12, 2, 2)
    places = np.array([[[0, 5], [11, 7]], [[3, 3], [6, 10]]])
    for y in (torch.arange(12), torch.arange(24.0).view(12, 2)):
        for rows in (None, torch.arange(11, -1, -1)):
            drawn, seen = LazyBatches(Split(x, y, "ab", np.array([0, 6, 12]), rows), places), []
            for k, batch in enumerate(drawn.iterate(BatchBuffer())):
                seen.append(batch[0].data_ptr())
                for found, wanted in zip(batch, drawn[k], strict=True):
                    assert torch.equal(found, wanted) and found.shape == wanted.shape
            assert len(seen) == 2 and len(set(seen)) == 1  # the same place in memory


def test_it_is_what_averaging_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = Dense.descend
    monkeypatch.setattr(Dense, "descend", lambda *given: calls.append(len(given[2])) or original(*given))
    torch.manual_seed(0)
    fed = cf.FederatedData({name: (torch.randn(9, 4), torch.randint(0, 3, (9,))) for name in "abc"})
    cf.fit(nn.Linear(4, 3), fed, cf.FedAvg(local_steps=6, batch_size=4), rounds=2, eval_every=2)
    assert calls.count(6) == 2
