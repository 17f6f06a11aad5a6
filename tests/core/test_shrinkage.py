"""The offset Shrinkage: losses of tiny clients drawn towards their mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.config.schema import parse_config


def drawn(rng: np.random.Generator, means: Any, samples: Any, sd: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Each client's mean loss and mean squared loss, of normal losses around its own mean."""
    each = [rng.normal(mean, sd, size) for mean, size in zip(means, samples, strict=True)]
    return torch.tensor([one.mean() for one in each]), torch.tensor([np.square(one).mean() for one in each])


def test_it_is_the_formula_of_equal_sizes() -> None:
    """With n samples each, t^2 is the variance of the losses less s^2 / n: the analysis of variance, by hand."""
    rng = np.random.default_rng(0)
    y, squares = drawn(rng, rng.normal(5, 1, 40), [4] * 40)
    within = float((squares - y.square()).mean()) * 4 / 3
    share = 1 - within / 4 / float(y.var(correction=1))
    assert 0 < share < 1
    found = cf.offset.Shrinkage().towards_mean(y, squares, np.full(40, 4))
    assert torch.allclose(y + found, y.mean() + share * (y - y.mean()))


def test_the_losses_of_large_clients_stay() -> None:
    rng = np.random.default_rng(1)
    means, most = rng.normal(5, 1, 30), []
    for size in (4, 400, 40_000):
        y, squares = drawn(rng, means, [size] * 30)
        most.append(float(cf.offset.Shrinkage().towards_mean(y, squares, np.full(30, size)).abs().max()))
    assert most[0] > 10 * most[1] > 100 * most[2] and most[2] < 1e-3


def test_the_small_clients_are_drawn_most() -> None:
    rng = np.random.default_rng(2)
    sizes = np.array([2, 10, 50, 1000] * 20)
    y, squares = drawn(rng, rng.normal(5, 1, 80), sizes)
    shares = cf.offset.Shrinkage().towards_mean(y, squares, sizes) / y
    kept = 1 + cf.offset.Shrinkage().towards_mean(y - 5, squares - 10 * y + 25, sizes) / (y - 5)  # the same, shifted
    assert shares.isfinite().all() and kept[3] > kept[2] > kept[1] > kept[0]


def test_noise_alone_gives_about_equal_losses_and_less_error() -> None:
    """In most draws the estimated variance between clients is 0, and then all losses become the same."""
    rng, equal = np.random.default_rng(3), 0
    for _ in range(50):
        y, squares = drawn(rng, [5.0] * 50, [4] * 50)
        shrunk = y + cf.offset.Shrinkage().towards_mean(y, squares, np.full(50, 4))
        equal += bool(torch.allclose(shrunk, shrunk.mean()))
        assert shrunk.std() < 0.7 * y.std()
    assert equal >= 15
    gain = []
    for _ in range(50):  # with a difference between clients as large as the noise, the squared error halves
        means = rng.normal(5, 0.5, 50)
        y, squares = drawn(rng, means, [4] * 50)
        shrunk = y + cf.offset.Shrinkage().towards_mean(y, squares, np.full(50, 4))
        gain.append(float(((shrunk - torch.tensor(means)) ** 2).sum() / ((y - torch.tensor(means)) ** 2).sum()))
    assert np.mean(gain) == pytest.approx(0.5, abs=0.06)


def test_nothing_to_tell_noise_by_changes_nothing() -> None:
    y = torch.tensor([1.0, 2.0, 3.0])
    for squares, sizes in ((y**2, [5, 5, 5]), (2 * y**2, [1, 1, 1])):  # no variance within; single samples
        assert (cf.offset.Shrinkage().towards_mean(y, squares, np.array(sizes)) == 0).all()
    assert (cf.offset.Shrinkage().towards_mean(y[:1], 2 * y[:1] ** 2, np.array([5])) == 0).all()


def clients(samples: int, count: int = 12) -> cf.FederatedData:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(count, samples, 5)).astype("float32")
    y = (x[..., 0] + rng.normal(size=(count, samples)) > 0).astype("int64")
    return cf.FederatedData(train={f"{i:02d}": (x[i], y[i]) for i in range(count)})


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 2)


def weights(result: cf.Result) -> list[float]:
    return [row["weight"] for row in result.clients if row["round"] == result.rounds[-1]["round"]]


@pytest.mark.parametrize("vectorize", ["auto", "serial"])
@pytest.mark.parametrize("method", [cf.Robust, lambda gamma, **more: cf.ComFedL(outer=cf.KL(gamma, **more))])
def test_a_runs_weights_are_those_of_the_shrunk_losses(method: Any, vectorize: str) -> None:
    """One round from the same model, where the momentum and the model's change play no part yet."""
    fed, gamma = clients(4), 0.05
    done = cf.fit(
        model(),
        fed,
        cf.ComFedL(outer=cf.KL(gamma, offset=cf.offset.Shrinkage())),
        rounds=1,
        engine_options={"vectorize": vectorize},
    )
    start = model()
    each = [
        torch.nn.functional.cross_entropy(start(x), y, reduction="none").detach()
        for x, y in (fed.train[name] for name in fed.names)
    ]
    y, squares = torch.stack([one.mean() for one in each]), torch.stack([one.square().mean() for one in each])
    shrunk = y + cf.offset.Shrinkage().towards_mean(y, squares, np.full(12, 4))
    assert weights(done) == pytest.approx(torch.softmax(shrunk / gamma, 0).tolist(), rel=1e-4)
    plain, other = (
        cf.fit(model(), fed, method(gamma, **more), rounds=3, engine_options={"vectorize": vectorize})
        for more in ({}, {"offset": cf.offset.Shrinkage()})
    )
    assert max(weights(other)) < max(weights(plain))


def test_a_resumed_run_is_the_same(tmp_path: Any) -> None:
    method = cf.Robust(0.05, offset=cf.offset.Shrinkage())
    whole = cf.fit(model(), clients(4), method, rounds=6, clients_per_round=6, out=tmp_path / "whole")
    cf.fit(model(), clients(4), method, rounds=3, clients_per_round=6, out=tmp_path / "parts")
    parts = cf.fit(model(), clients(4), method, rounds=6, clients_per_round=6, out=tmp_path / "parts", resume=True)
    assert all(torch.equal(part, parts.params[name]) for name, part in whole.params.items())


def test_what_it_cannot_be_used_with_is_refused(tmp_path: Path) -> None:
    offset = cf.offset.Shrinkage()
    for make in (
        lambda: cf.Robust(0.1, on="outer", offset=offset),
        lambda: cf.Robust(0.1, inner=cf.Adapt(0.1), offset=offset),
    ):
        with pytest.raises(cf.ConfigError, match="Shrinkage is for losses on train data"):
            make()

    def own(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, y) ** 2

    for loss in (own, torch.nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.raises(cf.ConfigError, match="Shrinkage needs the loss of each sample"):
            cf.fit(model(), clients(4), cf.Robust(0.1, offset=offset), rounds=1, loss=loss, out=tmp_path / "run")
    words = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    draw = torch.randint(7, (3, 6, 5), generator=torch.Generator().manual_seed(0))
    for ignored in (0, 2):
        y = draw.clone()
        y[..., :ignored] = -100
        fed = cf.FederatedData({str(i): (draw[i], y[i]) for i in range(3)})
        cf.fit(words, fed, cf.Robust(0.1), rounds=1)
        with pytest.raises(cf.ConfigError, match=r"Shrinkage needs samples .* several targets per sample"):
            cf.fit(words, fed, cf.Robust(0.1, offset=offset), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_names_it() -> None:
    settings = {
        "rounds": 1,
        "data": {"name": "digits"},
        "algorithm": {"name": "robust", "offset": {"name": "shrinkage"}},
    }
    config = parse_config(settings)
    assert config.make_algorithm() == cf.Robust(offset=cf.offset.Shrinkage())
    assert parse_config(config.resolved()).make_algorithm() == config.make_algorithm()
