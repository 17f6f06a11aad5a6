"""Robust means: closed forms, limits, and their resistance to a few bad clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as nps
from scipy.optimize import minimize
from torch import nn

import comfedl as cf
from comfedl.core.robust_aggregation import geometric_median, median, robust_mean, trimmed_mean

quick = settings(max_examples=50, deadline=None)
points = nps.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-5, 5))


def uniform(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


@quick
@given(points)
def test_the_median_of_equal_weights_is_numpys(values: np.ndarray) -> None:
    found = median(torch.from_numpy(values), uniform(len(values)))
    np.testing.assert_allclose(found, np.median(values, axis=0))


@quick
@given(points, st.floats(0, 0.49))
def test_a_trimmed_mean_lies_between_the_mean_and_the_median(values: np.ndarray, trim: float) -> None:
    stacked = torch.from_numpy(values)
    np.testing.assert_allclose(trimmed_mean(stacked, uniform(len(values)), 0.0), values.mean(axis=0), atol=1e-12)
    found = trimmed_mean(stacked, uniform(len(values)), trim).numpy()
    assert (found >= values.min(axis=0) - 1e-9).all()
    assert (found <= values.max(axis=0) + 1e-9).all()


def test_a_trimmed_mean_drops_the_ends() -> None:
    values = torch.tensor([[-100.0], [1.0], [2.0], [3.0], [1e6]], dtype=torch.float64)
    assert trimmed_mean(values, uniform(5), 0.2).item() == pytest.approx(2)
    # A client of twice the weight is trimmed by half.
    weights = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)
    assert trimmed_mean(values[:4], weights, 0.2).item() == pytest.approx((0.2 * -100 + 0.2 * 1 + 0.2 * 2) / 0.6)


@quick
@given(points)
@example(np.array([[0.0, 3.0], [0.0, 4.0], [4.0, 4.0], [4.0, 4.0]]))  # the minimiser is a client's own model
def test_the_geometric_median_minimises_the_distances(values: np.ndarray) -> None:
    def cost(point: np.ndarray) -> float:
        return float(np.linalg.norm(values - point, axis=1).mean())

    found = geometric_median({"w": torch.from_numpy(values)}, uniform(len(values)))["w"].numpy()
    numerical = min(minimize(cost, start, method="Nelder-Mead").fun for start in (values.mean(0), values[0]))
    assert cost(found) <= numerical + 1e-4


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "geometric-median"])
def test_two_bad_clients_of_ten_cannot_move_it_far(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    good = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    bad = torch.full((2, 6), 1e6, dtype=torch.float64)
    found = robust_mean(rule, {"w": torch.cat([good, bad])}, uniform(10), 0.25)["w"]
    assert float((found - good.mean(dim=0)).norm()) < 3
    assert float((torch.cat([good, bad]).mean(dim=0) - good.mean(dim=0)).norm()) > 1e5


# In a run.

METHODS = [
    cf.FedAvg(weighting="uniform", lr=0.1),
    cf.ComFedL(outer=cf.KL(0.5), lr=0.1),
    cf.FedMAML(0.05, lr=0.1),
    cf.DRFA(0.02, lr=0.1),
    cf.TRMAML(0.05, 0.02, lr=0.1),
    cf.QFedAvg(0.2, lr=0.1),
    cf.Ditto(0.1, lr=0.1),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "geometric-median"])
def test_a_rule_goes_with_every_method(three_clients: cf.FederatedData, method: cf.FedAvg, rule: str) -> None:
    from dataclasses import replace

    model = nn.Linear(4, 3).double()
    result = cf.fit(model, three_clients, replace(method, aggregate=rule, trim=0.2), rounds=15, eval_every=5)
    assert result.rounds[-1]["train.loss.mean"] < result.rounds[0]["train.loss.mean"]


def test_trimming_nothing_is_the_mean(three_clients: cf.FederatedData) -> None:
    model = nn.Linear(4, 3).double()
    plain = cf.fit(model, three_clients, cf.FedAvg(batch_size=4), rounds=5)
    trimmed = cf.fit(model, three_clients, cf.FedAvg(batch_size=4, aggregate="trimmed-mean", trim=0.0), rounds=5)
    for name, part in plain.params.items():
        torch.testing.assert_close(trimmed.params[name], part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_one_round_moves_no_further_than_the_clip(three_clients: cf.FederatedData, rule: str) -> None:
    model = nn.Linear(4, 3).double()

    def moved(clip: float | None) -> float:
        method = cf.FedAvg(lr=5.0, clip_update_norm=clip, aggregate=rule)
        params = cf.fit(model, three_clients, method, rounds=1).params
        with torch.no_grad():
            return sum(float((params[name] - part).square().sum()) for name, part in model.named_parameters()) ** 0.5

    assert moved(None) > 1
    # A coordinate-wise median of points in a ball may leave it by the root of the number of coordinates.
    assert moved(0.01) <= 0.01 * (1 + 1e-9) * (15**0.5 if rule == "median" else 1)
    assert moved(1e9) == pytest.approx(moved(None), rel=1e-9)


@pytest.mark.parametrize("arguments", [{"aggregate": "mode"}, {"trim": 0.5}, {"trim": -0.1}, {"clip_update_norm": 0.0}])
def test_bad_settings_are_named(arguments: dict[str, object]) -> None:
    with pytest.raises(cf.ConfigError, match=next(iter(arguments))):
        cf.FedAvg(**arguments)  # type: ignore[arg-type]


def test_a_round_in_which_nobody_has_any_weight(three_clients: cf.FederatedData) -> None:
    """If TR-MAML draws only clients with weight 0, the model does not change."""
    method = cf.TRMAML(0.05, 50.0, lr=0.1, aggregate="trimmed-mean")
    result = cf.fit(nn.Linear(4, 3).double(), three_clients, method, rounds=8, clients_per_round=1, seed=1)
    assert all(bool(torch.isfinite(part).all()) for part in result.params.values())
