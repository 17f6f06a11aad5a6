"""Confidence intervals: closed forms, limits, and how often they hold the true value."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from comfedl.core.intervals import Interval, bootstrap, score_intervals, student, t_quantile, wilson, wilson_of
from comfedl.core.learner import Learner, Model
from comfedl.models.losses import LOSSES, CrossEntropy
from comfedl.models.metrics import METRICS, PerClient
from comfedl.utils import rng

draws = partial(rng.generator, 0, "test")


# Wilson.


@pytest.mark.parametrize(
    ("hits", "samples"), [(0, 1), (1, 1), (0, 9), (9, 9), (1, 2), (8, 10), (37, 400), (99_999, 10**5)]
)
def test_wilson_is_the_closed_form(hits: int, samples: int) -> None:
    found = wilson(hits, samples)
    expected = stats.binomtest(hits, samples).proportion_ci(method="wilson")
    assert found[:2] == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= found.low <= hits / samples <= found.high <= 1


def test_wilson_at_its_limits() -> None:
    """With no hits the upper bound is z^2 / (n + z^2), and with hits alone the lower one is its mirror image."""
    z2 = stats.norm.ppf(0.975) ** 2
    for n in (1, 7, 1000):
        assert wilson(0, n)[:2] == (0, pytest.approx(z2 / (n + z2)))
        assert wilson(n, n)[:2] == (pytest.approx(n / (n + z2)), 1)
    low, high, _ = wilson(5 * 10**9, 10**10)  # of endless data it is the share
    assert high - low < 3e-5


@pytest.mark.parametrize(("hits", "samples"), [(0, 0), (-1, 5), (6, 5)])
def test_what_is_no_share_is_refused(hits: int, samples: int) -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(hits, samples)


@pytest.mark.parametrize("samples", [5, 12, 40, 300])
def test_wilson_holds_the_true_rate_as_often_as_it_says(samples: int) -> None:
    """Exactly, over all outcomes: 95 % on average over the rates, whatever the number of samples."""
    bounds = np.array([wilson(hits, samples)[:2] for hits in range(samples + 1)])
    rates = np.linspace(0.01, 0.99, 197)
    chance = stats.binom.pmf(np.arange(samples + 1)[:, None], samples, rates)
    holds = (bounds[:, :1] <= rates) & (rates <= bounds[:, 1:])
    coverage = (chance * holds).sum(axis=0)
    assert coverage.mean() == pytest.approx(0.95, abs=0.012)
    assert coverage.min() > 0.83


def test_only_an_accuracy_that_hits_can_give_has_wilsons_interval() -> None:
    assert wilson_of("accuracy", float(np.float32(2 / 3)), 3) == wilson(2, 3)
    assert wilson_of("accuracy", float(np.float32(123_456 / 200_003)), 200_003) == wilson(123_456, 200_003)
    assert wilson_of("accuracy", 0.7, 3) is None  # of tokens, say
    assert wilson_of("accuracy", 0.12345649, 1_000_000) is None  # however many samples
    assert wilson_of("accuracy", 0.5, 0) is None and wilson_of("f1", 0.5, 2) is None
    assert all(wilson_of("accuracy", odd, 3) is None for odd in (math.inf, math.nan, -1.0, 2.0, 1e300))


# Means.


def test_students_quantiles_are_those_of_scipy() -> None:
    for freedom in (1, 2, 3, 4, 7, 20, 1000):
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


def test_students_interval_is_the_closed_form() -> None:
    values = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.6])
    found = student(values)
    low, high = stats.t.interval(0.95, 4, values.mean().item(), stats.sem(values.numpy()))
    assert found is not None and found[:2] == pytest.approx((low, high), abs=3e-4)
    assert student(values - 1) is not None


def test_a_mean_of_one_value_or_of_equal_ones_has_no_interval() -> None:
    assert student(torch.tensor([0.3])) is None
    assert student(torch.full((10,), 0.1)) is None
    assert student(torch.tensor([0.3, math.nan])) is None


def test_a_mean_of_errors_is_not_below_zero() -> None:
    found = student(torch.tensor([0.0, 0.0, 5.0]))
    assert found is not None and found.low == 0 and student(torch.tensor([-1.0, 5.0])).low < 0  # type: ignore[union-attr]


@pytest.mark.parametrize("samples", [4, 15])
def test_students_interval_holds_the_mean_of_normal_numbers(samples: int) -> None:
    values = torch.from_numpy(np.random.default_rng(1).normal(3.0, 1.0, (4000, samples)))
    found = [student(line) for line in values]
    share = np.mean([each is not None and each.low <= 3 <= each.high for each in found])
    assert share == pytest.approx(0.95, abs=3.5 * math.sqrt(0.95 * 0.05 / 4000))


# Bootstrap.

AUC, RMSE = METRICS["auc"].function, METRICS["rmse"].function


def scored(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 2, n)
    return torch.from_numpy(generator.normal(y * 1.0, 1.0)), torch.from_numpy(y)


def test_the_same_seed_gives_the_same_interval() -> None:
    output, y = scored(50, 3)
    first, again, other = (bootstrap(AUC, output, y, rng.generator(seed, "x")) for seed in (0, 0, 1))
    assert first == again != other and first is not None and first.method == "bootstrap (1000 draws)"


def test_a_bootstrap_of_a_mean_is_nearly_students_interval() -> None:
    """The mean absolute error through a metric of all outputs, which knows nothing of means."""
    output, y = scored(300, 4)
    function = PerClient("mae", lambda output, y: (output - y).abs().mean())
    found, exact = bootstrap(function, output, y, draws()), student((output - y).abs())
    assert found is not None and exact is not None
    width = exact.high - exact.low
    assert found[:2] == pytest.approx(exact[:2], abs=0.12 * width)


def test_many_clients_at_once_are_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    output, y = scored(40, 5)
    whole = bootstrap(AUC, output, y, draws())
    monkeypatch.setattr("comfedl.core.intervals.AT_ONCE", 100)  # two draws at a time
    assert bootstrap(AUC, output, y, draws()) == whole


@pytest.mark.parametrize("metric", ["auc", "rmse"])
def test_a_bootstrap_holds_the_true_value(metric: str) -> None:
    """The AUC of two normal distributions one deviation apart is Phi(1 / sqrt 2); the error is that of the noise."""
    held, runs, n = 0, 200, 80
    for seed in range(runs):
        output, y = scored(n, seed)
        if metric == "auc":
            found, true = bootstrap(AUC, output, y, rng.generator(seed, "x"), 400), stats.norm.cdf(1 / math.sqrt(2))
        else:
            found, true = bootstrap(RMSE, output, y.double(), rng.generator(seed, "x"), 400), 1.0
        held += found is not None and found.low <= true <= found.high
    # A percentile bootstrap of 80 samples is a little narrow: between 90 % and 98 %, give or take three deviations.
    assert 0.90 - 3 * math.sqrt(0.9 * 0.1 / runs) <= held / runs <= 0.98


def test_what_all_draws_agree_on_or_is_mostly_undefined_has_no_interval() -> None:
    y = torch.tensor([0, 0, 1, 1])
    assert bootstrap(AUC, torch.tensor([-2.0, -1.0, 1.0, 2.0]), y, draws()) is None  # 1 in every draw
    assert bootstrap(AUC, torch.randn(9), torch.zeros(9, dtype=torch.long), draws()) is None
    assert bootstrap(AUC, torch.randn(1), torch.ones(1, dtype=torch.long), draws()) is None


def test_large_clients_draw_less_often() -> None:
    output, y = scored(4000, 6)
    found = bootstrap(RMSE, output, y.double(), draws())
    assert found is not None and found.method == "bootstrap (200 draws)"


# All of a client's scores.


def learner(loss: object, metrics: dict[str, object], outputs: int = 3) -> tuple[Learner, Model]:
    torch.manual_seed(0)
    module = nn.Linear(4, outputs)
    model = Model(params={name: part.detach() for name, part in module.named_parameters()}, buffers={})
    return Learner(module, loss, metrics), model  # type: ignore[arg-type]


def classified(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("n", [2, 30, 1201])
def test_every_measure_has_its_kind_of_interval(n: int) -> None:
    loss, metrics = LOSSES["cross_entropy"]
    metrics = {**metrics, "f1": METRICS["f1"].function, "brier": METRICS["brier"].function}
    one, model = learner(loss, {**metrics, "own": PerClient("own", lambda output, y: output[:, 0].mean())})
    data = classified(n)
    found = score_intervals(one, model, data, draws)
    values = one.scores(model, data)
    assert found["accuracy"] == wilson(round(float(values["accuracy"]) * n), n)
    assert found["loss"].method == found["brier"].method == "Student's t"
    assert found["own"].method == "bootstrap (200 draws)"
    if n > 2:
        assert found["f1"].method.startswith("bootstrap")
    for name, interval in found.items():
        assert interval.low - 1e-6 <= float(values[name]) <= interval.high + 1e-6, name
    assert "own" not in score_intervals(one, model, data, draws, with_own=False)


def test_losses_with_arguments_and_of_ones_own() -> None:
    data = classified(40)
    smooth, model = learner(CrossEntropy(label_smoothing=0.1), {})
    assert score_intervals(smooth, model, data, draws)["loss"].method == "Student's t"
    own, model = learner(lambda output, y: (output.logsumexp(1) - output[:, 0]).mean(), {})
    found = score_intervals(own, model, data, draws)["loss"]
    assert found.method == "bootstrap (200 draws)" and found.low < found.high


@pytest.mark.parametrize("error", [AssertionError, KeyError, IndexError, ValueError])
def test_an_own_loss_that_fails_on_some_draws_has_no_interval(error: type[Exception]) -> None:
    def picky(output: Tensor, y: Tensor) -> Tensor:
        if len(y.unique()) < 3:
            raise error("a class is missing")
        return output.logsumexp(1).mean()

    one, model = learner(picky, {"accuracy": METRICS["accuracy"].function})
    assert set(score_intervals(one, model, classified(6), draws)) == {"accuracy"}


def test_an_own_metric_that_fails_on_some_draws_has_no_interval() -> None:
    def picky(output: Tensor, y: Tensor) -> float:
        if len(y.unique()) < 3:
            raise ValueError("a class is missing")
        return 1.0

    one, model = learner(LOSSES["cross_entropy"][0], {"picky": PerClient("picky", picky)})
    assert set(score_intervals(one, model, classified(6), draws)) == {"loss"}


def test_without_a_module_there_is_nothing() -> None:
    assert score_intervals(Learner(), Model(params={}, buffers={}), classified(3), draws) == {}


def test_an_accuracy_over_several_outputs_is_no_share_of_samples() -> None:
    one, model = learner(LOSSES["bce"][0], LOSSES["bce"][1], outputs=4)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = (torch.randn(30, 4, generator=torch.Generator().manual_seed(1)) > 0).long()
    one.metrics = {"accuracy": one.metrics["accuracy"]}
    found = score_intervals(one, model, (x, y), draws)["accuracy"]
    assert isinstance(found, Interval) and found.method == "Student's t" and found.high <= 1
