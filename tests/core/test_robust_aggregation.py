"""Robust means: closed forms, limits, and their resistance to a few bad clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as nps
from scipy.optimize import minimize
from torch import nn

import comfedl as cf
from comfedl.core.learner import Model
from comfedl.core.robust_aggregation import geometric_median, median, robust_mean, trimmed_mean
from comfedl.engines.replies import LocalReplies
from comfedl.utils import tree

quick = settings(max_examples=50, deadline=None)
points = nps.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-5, 5))


def uniform(n: int) -> torch.Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


@quick
@given(points)
def test_the_median_of_equal_weights_is_numpys(values: np.ndarray) -> None:
    found = median(torch.from_numpy(values), uniform(len(values)))
    np.testing.assert_allclose(found, np.median(values, axis=0), atol=1e-300)  # half of the least number is 0


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


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "geometric-median", "krum", "multi-krum"])
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
    cf.ComFedL(outer=cf.KL(0.5, cap=2), lr=0.1),
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


# What broke them: rows of the list of attacks, by their numbers.

RULES = ["median", "trimmed-mean", "geometric-median", "krum", "multi-krum"]
HOLDING = [*({"aggregate": rule, "trim": 0.2} for rule in RULES), {"clip_update_norm": 0.3}]


def replies_of(models: list[dict[str, dict[str, torch.Tensor]]]) -> LocalReplies:
    return LocalReplies(range(len(models)), [{"model": model} for model in models])


def with_statistics(shift: float, mean: float = 0.0, variance: float = 1.0, seen: int = 5) -> Model:
    return Model(
        params={"w": torch.full((3,), shift)},
        buffers={
            "running_mean": torch.tensor([mean, 1.0]),
            "running_var": torch.tensor([variance, 4.0]),
            "num_batches_tracked": torch.tensor(seen),
        },
    )


@pytest.mark.parametrize("bad", [1000.0, -1000.0])
@pytest.mark.parametrize("defence", HOLDING, ids=str)
def test_row_3_one_clients_statistics_do_not_get_through(defence: dict[str, Any], bad: float) -> None:
    """Its parameters are honest, its running means, variances and counters are not."""
    method = cf.FedAvg(weighting="uniform", **defence)
    honest = [with_statistics(0.1 * k, mean=0.01 * k, variance=1 + 0.01 * k) for k in range(9)]
    replies = replies_of([*honest, with_statistics(0.4, mean=bad, variance=bad, seen=2**40)])
    found = method.averaged(with_statistics(0.0), replies, uniform(10))["buffers"]
    assert 0 <= float(found["running_mean"][0]) <= 0.08
    assert 1 <= float(found["running_var"][0]) <= 1.08
    assert int(found["num_batches_tracked"]) == 5


def test_row_3_a_run_with_bad_statistics_learns() -> None:
    """The worst honest accuracy was 0 under every rule."""

    class Lying(cf.FedAvg):
        def train(self, learner: Any, message: Any, state: Any, batches: Any) -> Any:
            found = super().train(learner, message, state, batches)
            model = found.reply["model"]
            if len(batches["inner"][0][1]) == 30:  # the liar
                buffers = tree.map(lambda part: torch.full_like(part, 1000), model["buffers"])
                model = Model(params=model["params"], buffers=buffers)
            return found._replace(reply={"model": model})

    x = torch.randn(190, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = zip("abcdefgh", x.split([20] * 4 + [30] + [20] * 4), strict=False)
    fed = cf.FederatedData(train={name: (part, (part[:, 0] > 0).long()) for name, part in parts})
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    options: dict[str, Any] = {"lr": 0.2, "batch_size": None, "weighting": "uniform"}
    for held in ({"aggregate": "median"}, {"clip_update_norm": 10.0}):
        lied = cf.fit(model, fed, Lying(**options, **held), rounds=20)
        assert lied.rounds[-1]["train.accuracy.worst"] > 0.8


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e12, 1e15, 1e20, 1e37])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_row_4_the_rules_are_exact_at_any_scale(rule: str, dtype: torch.dtype, sign: int, scale: float) -> None:
    """However large the bad updates are, the rule stays where it is for those of 1,000 times the size."""
    good = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    direction = torch.tensor([sign * 1.0, 1, -1, 1, 2, -1], dtype=dtype)

    def rule_of(size: float) -> torch.Tensor:
        return robust_mean(rule, {"w": torch.cat([good, size * direction.expand(2, 6)])}, uniform(10), 0.2)["w"]

    found = rule_of(scale)
    assert float((found - good.mean(dim=0)).norm()) < 2.5
    if scale > 1:
        torch.testing.assert_close(found, rule_of(1e6), atol=1e-2 if scale == 1e3 else 1e-5, rtol=0)


def test_row_4_nothing_leaks_at_the_trims_border() -> None:
    values = torch.cat([torch.ones(8, 1), torch.full((2, 1), 3e38)])
    assert trimmed_mean(values, uniform(10), 0.2).item() == 1
    assert trimmed_mean(-values, uniform(10), 0.2).item() == -1
    assert trimmed_mean(values.double(), torch.full((10,), 0.1), 2 / 10).item() == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_equal_models_is_that_model(rule: str) -> None:
    params = {"w": torch.randn(3, 2).expand(7, 3, 2), "b": torch.randn(2).expand(7, 2)}
    found = robust_mean(rule, params, torch.softmax(torch.randn(7, dtype=torch.float64), 0), 0.1)
    for name, part in params.items():
        torch.testing.assert_close(found[name], part[0])


@quick
@given(points, st.randoms())
def test_the_order_of_the_clients_does_not_matter(values: np.ndarray, random: Any) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64)
    weights /= weights.sum()
    for rule in ("median", "trimmed-mean", "geometric-median"):  # Krum has ties
        found = robust_mean(rule, {"w": torch.from_numpy(values)}, weights, 0.2)["w"]
        again = robust_mean(rule, {"w": torch.from_numpy(values)[order]}, weights[order], 0.2)["w"]
        torch.testing.assert_close(found, again, atol=1e-5, rtol=0)


def test_krum_takes_the_model_among_its_neighbours() -> None:
    """By hand: f = 1 of 5, so each has n - f - 2 = 2 neighbours; multi-Krum takes the mean of the best 4."""
    values = {"w": torch.tensor([[0.0], [1.0], [3.0], [4.5], [100.0]])}
    weights = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)
    # Squared distances to two neighbours: 0: 1 + 9, 1: 1 + 4, 3: 2.25 + 4, 4.5: 2.25 + 12.25.
    assert robust_mean("krum", values, weights, 0.2)["w"].item() == 1
    mean = (0.1 * 0 + 0.2 * 1 + 0.3 * 3 + 0.3 * 4.5) / 0.9
    assert robust_mean("multi-krum", values, weights, 0.2)["w"].item() == pytest.approx(mean)


def test_krum_needs_enough_clients(three_clients: cf.FederatedData) -> None:
    with pytest.raises(cf.ConfigError, match="among 5 or more; 3 take part"):
        cf.fit(nn.Linear(4, 3).double(), three_clients, cf.FedAvg(aggregate="krum", trim=0.1), rounds=1)


def test_multi_krum_against_nobody_is_the_mean() -> None:
    values = {"w": torch.randn(6, 3, dtype=torch.float64)}
    weights = torch.softmax(torch.randn(6, dtype=torch.float64), 0)
    torch.testing.assert_close(robust_mean("multi-krum", values, weights, 0.0)["w"], weights @ values["w"])
