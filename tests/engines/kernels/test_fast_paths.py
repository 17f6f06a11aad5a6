"""Many clients at once give the results of one client at a time, for every model and method, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from comfedl.engines.embedded import Embedded

F64 = torch.float64
CLASSES = 3


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def layered() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6, bias=False), nn.Tanh())
    return nn.Sequential(nn.Flatten(), hidden, nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, CLASSES))


def normed_by_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, CLASSES))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES))
    model[0].weight.requires_grad_(False)
    return model


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(12, CLASSES))


def running() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES))


def of_the_batch() -> nn.Module:
    # No ReLU: a batch of one and the same sample is normalised to 0, where rounding decides its slope.
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, CLASSES))


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, CLASSES))


def images() -> nn.Module:
    flat = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), flat, nn.Linear(4, CLASSES))


def four_layers() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *cf.models.cnn4((1, 2, 2), CLASSES, filters=4, norm="running"))


class Own(nn.Module):
    """A module that is not a chain of layers, with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.sin(x * self.scale)) + x[:, :CLASSES]
        return out


STACKED: list[Callable[[], nn.Module]] = [wide, layered, normed_by_layer, frozen, embedded, noisy]
MAPPED: list[Callable[[], nn.Module]] = [running, of_the_batch, Own, images]

# Few samples, a single one, and more than a batch; some have no validation data.
SIZES = {"a": 12, "b": 5, "c": 30, "d": 1, "e": 8, "f": 12, "g": 7, "h": 12}


def data(seed: int = 0, sizes: dict[str, int] = SIZES, whole: bool = False) -> cf.FederatedData:
    rng = np.random.default_rng(seed)

    def client(n: int, place: float) -> tuple[Any, Any]:
        x = rng.integers(0, 4, size=(n, 4)) if whole else rng.normal(loc=place, size=(n, 4))
        return x, rng.integers(0, CLASSES, size=n)

    train = {name: client(n, 0.2 * i) for i, (name, n) in enumerate(sizes.items())}
    validation = {name: client(3 + i % 4, 0.2 * i) for i, name in enumerate(sizes) if i % 3}
    return cf.FederatedData(train, validation)


# Every method, with its special options.
METHODS: dict[str, list[Algorithm]] = {name: [method(batch_size=6)] for name, method in ALGORITHMS.items()}
METHODS["fedavg"] += [cf.FedAvg(batch_size=None, local_steps=2, personal_steps=0)]
METHODS["comfedl"] += [
    cf.ComFedL(outer=cf.KL(0.3), batch_size=6, loss_samples=7),
    cf.ComFedL(outer=cf.Exp(2.0), batch_size=6),
    cf.ComFedL(inner=cf.Adapt(0.1, 2), outer=cf.KL(0.3), batch_size=6, outer_batch_size="all"),
    cf.ComFedL(inner=cf.Adapt(0.1, 2, "first"), batch_size=None, local_steps=2),
    cf.ComFedL(inner=cf.Adapt(0.1, 1, "hessian-free", delta=0.1), outer=cf.Power(2), batch_size=6),
]
METHODS["drfa"] += [cf.DRFA(batch_size=6, whole_loss=True, dual_lr=0.3)]
METHODS["comfedl-damaml"] += [cf.DAMAML(batch_size=6, hessian_batch="own")]
CASES = [pytest.param(method, id=f"{name}-{i}") for name in METHODS for i, method in enumerate(METHODS[name])]


def run(
    module: Callable[[], nn.Module], algorithm: Algorithm, way: str, fed: cf.FederatedData, **more: Any
) -> cf.Result:
    torch.manual_seed(3)
    options = {"vectorize": way, **more.pop("engine_options", {})}
    made = module().double()
    if "clients_per_round" in more and algorithm.name == "afl":
        del more["clients_per_round"]
    return cf.fit(made, fed, algorithm, **{"rounds": 2, "engine_options": options, **more})


def close(one: cf.Result, other: cf.Result) -> None:
    """Everything in a result, to 1e-9."""
    personal = [[run.personal_model(name) for run in (one, other)] for name in SIZES if name in one.names]
    for a, b in [({"p": one.params, "b": one.buffers}, {"p": other.params, "b": other.buffers}), *personal]:
        for part in a:
            assert a[part].keys() == b[part].keys()
            for name in a[part]:
                torch.testing.assert_close(a[part][name], b[part][name], rtol=0, atol=1e-9)
    assert one.traffic == other.traffic
    for ours, theirs in ((one.rounds, other.rounds), (one.clients, other.clients)):
        assert len(ours) == len(theirs)
        for row, their in zip(ours, theirs, strict=True):
            assert row.keys() == their.keys()
            for key, value in row.items():
                assert value == (pytest.approx(their[key], abs=1e-9) if isinstance(value, float) else their[key]), key


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients that ran at once, if more than one."""
    counts: list[int] = []
    real = Embedded._run_many

    def spy(self: Embedded, learner: Any, named: Any, drawn: Any, ks: Any, *more: Any) -> Any:
        counts.append(len(ks))
        return real(self, learner, named, drawn, ks, *more)

    monkeypatch.setattr(Embedded, "_run_many", spy)
    return counts


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("module", STACKED)
def test_stacked_is_serial(module: Any, algorithm: Algorithm, together: list[int]) -> None:
    fed = data(whole=module is embedded)
    serial = run(module, algorithm, "serial", fed)
    assert not together
    close(run(module, algorithm, "auto", fed), serial)
    assert max(together) > 2


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("module", MAPPED)
def test_vmap_is_serial(module: Any, algorithm: Algorithm, together: list[int]) -> None:
    fed = data()
    serial = run(module, algorithm, "serial", fed)
    close(run(module, algorithm, "vmap", fed), serial)
    assert together


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("algorithm", CASES)
def test_some_clients_in_small_chunks(algorithm: Algorithm, seed: int, together: list[int]) -> None:
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.choice([1, 2, 3, 9, 10, 11, 40])) for name in SIZES}
    options = {"clients_per_round": int(rng.integers(2, 8)), "seed": seed, "rounds": 4, "eval_every": 3}
    serial = run(layered, algorithm, "serial", data(seed, sizes), **options)
    small = run(layered, algorithm, "stack", data(seed, sizes), engine_options={"memory_mb": 0.2}, **options)
    close(small, serial)
    assert together


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("module", [images, four_layers])
def test_channels_last_is_channels_first(module: Any, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = data(sizes={name: 8 + n for name, n in SIZES.items()})  # for the same reason as in ``of_the_batch``
    fast = run(module, algorithm, "auto", fed)
    assert all(part.is_contiguous() for part in fast.params.values())
    monkeypatch.setattr("comfedl.engines.kernels.choice.convolves", lambda module: False)
    close(fast, run(module, algorithm, "auto", fed))


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (functional.one_hot(y, CLASSES) - output).square().sum(dim=1).mean() ** 0.5


def looks(output: Tensor, y: Tensor) -> Tensor:
    return squares(output, y) * (2 if float(output.detach().max()) > 0 else 1)


@pytest.mark.parametrize("algorithm", [cf.FedAvg(), cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(0.3), batch_size=6)])
def test_a_loss_of_ones_own(algorithm: Algorithm, together: list[int]) -> None:
    serial = run(layered, algorithm, "serial", data(), loss=squares)
    close(run(layered, algorithm, "auto", data(), loss=looks), run(layered, algorithm, "serial", data(), loss=looks))
    assert not together
    close(run(layered, algorithm, "stack", data(), loss=squares), serial)
    assert together
    for way in ("stack", "vmap"):
        with pytest.raises(cf.ConfigError, match="at once"):
            run(layered, algorithm, way, data(), loss=looks)


def test_a_loss_of_torchs(together: list[int]) -> None:
    fed = cf.FederatedData({name: (x, x[:, :CLASSES].sin()) for name, (x, _) in data().train.items()})
    serial = run(layered, cf.FedAvg(), "serial", fed, loss=functional.mse_loss)
    close(run(layered, cf.FedAvg(), "auto", fed, loss=functional.mse_loss), serial)
    assert together


# Which path is chosen.


def test_noise_is_not_for_vmap() -> None:
    with pytest.raises(cf.ConfigError, match="noise"):
        run(noisy, cf.FedAvg(), "vmap", data())


@pytest.mark.parametrize("module", [running, Own, images])
def test_a_choice_that_cannot_be_had_is_refused(module: Any) -> None:
    with pytest.raises(cf.ConfigError, match=r"vectorize is 'stack', but .* use \"auto\""):
        run(module, cf.FedAvg(), "stack", data())


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match="vectorize"):
        run(wide, cf.FedAvg(), "fast", data())
    with pytest.raises(cf.ConfigError, match=r"vectorise.*vectorize"):
        run(wide, cf.FedAvg(), "auto", data(), engine_options={"vectorise": "stack"})
    with pytest.raises(cf.ConfigError, match="memory_mb"):
        run(wide, cf.FedAvg(), "auto", data(), engine_options={"memory_mb": 0})


def test_a_method_of_ones_own_runs_serially_until_it_says_that_it_is_elementwise(together: list[int]) -> None:
    class Clipped(cf.FedAvg):
        """Not elementwise: the norm is taken over all parameters."""

        def train(self, *given: Any) -> Any:
            return super().train(*given)

    class Plain(Clipped):
        elementwise = True

    run(wide, Clipped(), "auto", data())
    assert not together
    with pytest.raises(cf.ConfigError, match="elementwise"):
        run(wide, Clipped(), "stack", data())
    run(wide, Plain(), "auto", data())
    assert together


# Errors.


@pytest.mark.parametrize("module", [wide, layered, normed_by_layer])
def test_the_error_is_the_same(module: Any, together: list[int]) -> None:
    algorithm, errors = cf.ComFedL(outer=cf.Exp(0.02), lr=1.0, batch_size=6), []
    for way in ("serial", "auto"):
        with pytest.raises(cf.Diverged) as error:
            run(module, algorithm, way, data())
        errors.append(error.value)
    assert together
    one, other = ((e.round, e.client, e.step) for e in errors)
    assert one == other
    assert errors[0].loss == pytest.approx(errors[1].loss, nan_ok=True)
    assert errors[0].weight == pytest.approx(errors[1].weight, nan_ok=True)


def test_the_four_layer_cnn_with_batch_statistics_is_plain_pytorch() -> None:
    """Convolutions in channels-last layout give the results of a naive loop."""
    generator = torch.Generator().manual_seed(4)
    data = {
        name: (torch.rand(n, 3, 16, 16, generator=generator, dtype=torch.float64), torch.arange(n) % 4)
        for name, n in (("a", 9), ("b", 14))
    }
    module = cf.models.build("cnn4", (3, 16, 16), 4, seed=0, filters=4).double()
    result = cf.fit(module, cf.FederatedData(data), cf.FedAvg(lr=0.1, local_steps=3, batch_size=None), rounds=2)
    expected = {name: part.detach().clone() for name, part in module.named_parameters()}
    for _ in range(2):
        ends = []
        for x, y in data.values():
            local = copy.deepcopy(module)
            local.load_state_dict(expected)
            for _ in range(3):
                loss = nn.functional.cross_entropy(local(x), y)
                grads = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for part, grad in zip(local.parameters(), grads, strict=True):
                        part -= 0.1 * grad
            ends.append({name: part.detach() for name, part in local.named_parameters()})
        expected = {name: (9 * ends[0][name] + 14 * ends[1][name]) / 23 for name in expected}
    for name, part in expected.items():
        torch.testing.assert_close(result.params[name], part, rtol=0, atol=1e-9)
        assert result.params[name].is_contiguous()


def test_a_dense_model_that_cannot_be_stacked_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def run(loss: Any) -> None:
        caplog.clear()
        cf.fit(nn.Linear(4, CLASSES), data(), cf.FedAvg(), rounds=1, loss=loss)

    run("cross_entropy")
    assert not caplog.records
    run(lambda output, y: nn.functional.cross_entropy(output, y))
    assert "one after another" in caplog.text and "the loss is user-defined" in caplog.text
