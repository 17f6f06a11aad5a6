"""The synthetic problem of the convergence analysis, and the measurements on it."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian as derivative

from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl_reproduction import theory
from comfedl_reproduction.theory import points as point_files, problem
from comfedl_reproduction.theory.extensions import Plus
from comfedl_reproduction.theory.measure import LAWS, Bias, Drift, Rate
from comfedl_reproduction.theory.points import Point
from comfedl_reproduction.theory.problem import LEAST_BATCH, S1, S2, S3, Synthetic, log_cosh
from comfedl_reproduction.theory.robust import ESTIMATES, Descent, Estimate
from comfedl_reproduction.theory.summary import power_law, series_points, summarise

F64 = torch.float64
PROBLEM = Synthetic()
KNOWN = PROBLEM.constants()
CLIENTS = range(PROBLEM.clients)
SIGNS = (-1.0, 1.0)


def models(count: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(count, PROBLEM.d, generator=generator, dtype=F64)


def inner(w: Tensor, first: Tensor | float = 0.0, second: Tensor | float = 0.0) -> Tensor:
    """f_i of all clients for the noise of a sample or a batch mean, independently from the definition."""
    return (1 + S1 * first) * torch.tanh(
        (PROBLEM.A @ w[..., None, :, None])[..., 0] + PROBLEM.c
    ) + S2 * second * PROBLEM.v


def outer_slope(y: Tensor, zeta: float) -> Tensor:
    return torch.tanh(y - PROBLEM.t - S3 * zeta)


def mean_slope(y: Tensor) -> Tensor:
    return (outer_slope(y, -1.0) + outer_slope(y, 1.0)) / 2


def jacobian(w: Tensor, first: Tensor | float = 0.0) -> Tensor:
    """Of all clients, [..., clients, p, d]."""
    return ((1 + S1 * first) * (1 - inner(w) ** 2))[..., None] * PROBLEM.A


def pulled(slopes: Tensor, cotangent: Tensor) -> Tensor:
    return (slopes.mT @ cotangent[..., None])[..., 0]


# The problem.


def test_the_objective_is_what_the_data_define() -> None:
    """The closed form of F is the mean over all noise values of the functions passed to fit."""
    composition, data = PROBLEM.composition(), PROBLEM.data(CLIENTS)
    for w in models(5):
        values = []
        for name in data.names:
            assert data.outer is not None
            y = composition.inner({"w": w}, data.train[name])
            values.append(composition.outer(y, data.outer[name]))
        assert torch.stack(values).mean().item() == pytest.approx(float(PROBLEM.objective(w)), abs=1e-14)


def test_a_batch_is_the_mean_of_its_samples() -> None:
    """The functions average the noise first; averaging over samples gives the same."""
    composition, w = PROBLEM.composition(), models(1)[0]
    xi = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=F64)
    zeta = torch.tensor([[1.0], [1.0], [-1.0], [1.0], [-1.0]], dtype=F64)
    for i in CLIENTS:
        y = composition.inner({"w": w}, (xi, torch.full((3,), i)))
        assert torch.allclose(y, torch.stack([inner(w, *row)[i] for row in xi.tolist()]).mean(dim=0), atol=1e-14)
        expected = log_cosh(y - PROBLEM.t[i] - S3 * zeta).sum(dim=1).mean()
        assert torch.allclose(composition.outer(y, (zeta, torch.full((5,), i))), expected, atol=1e-14)


def test_derivatives_are_autograds() -> None:
    for w in models(5):
        assert torch.allclose(PROBLEM.gradient(w), derivative(PROBLEM.objective, w), atol=1e-13)
        assert torch.allclose(jacobian(w, 0.7), derivative(lambda w: inner(w, 0.7), w), atol=1e-13)
        assert torch.allclose(outer_slope(w, 1.0)[0], derivative(lambda y: log_cosh(y - PROBLEM.t[0] - S3).sum(), w))


def test_objective_and_gradient_bounds() -> None:
    values = PROBLEM.objective(models(20000, spread=4.0))
    assert PROBLEM.lower_bound() < float(values.min())
    assert float(PROBLEM.gradient(models(20000)).norm(dim=-1).max()) < PROBLEM.gradient_bound()


def test_first_derivatives_stay_below_their_constants() -> None:
    """For every sample; the constants are tight: the sampled maximum comes close."""
    slopes = torch.cat([jacobian(models(2000, 0.5), e) for e in SIGNS])
    assert 0.9 * KNOWN.G_f < float(torch.linalg.matrix_norm(slopes, 2).max()) <= KNOWN.G_f
    far = torch.cat([outer_slope(models(2000, 6.0)[:, None], z) for z in SIGNS])
    assert 0.99 * KNOWN.G_g < float(far.norm(dim=-1).max()) <= KNOWN.G_g


def test_lipschitz_quotients_stay_below_their_constants() -> None:
    """For close and distant pairs; L_f and L_g are tight, L is a product of bounds."""
    found: dict[str, list[Tensor]] = {"L_f": [], "L_g": [], "L": []}
    for apart in (1e-3, 0.3, 3.0):
        w, step = models(5000, 1.0, 1), apart * models(5000, 1.0, 2)
        far = step.norm(dim=-1, keepdim=True)
        change = jacobian(w + step, 1.0) - jacobian(w, 1.0)
        found["L_f"].append(torch.linalg.matrix_norm(change, 2) / far)
        found["L_g"].append((outer_slope((w + step)[:, None], 1.0) - outer_slope(w[:, None], 1.0)).norm(dim=-1) / far)
        found["L"].append((PROBLEM.gradient(w + step) - PROBLEM.gradient(w)).norm(dim=-1) / far[:, 0])
    for name, least in (("L_f", 0.9), ("L_g", 0.9), ("L", 0.25)):
        quotient = float(torch.cat(found[name]).max())
        assert least * getattr(KNOWN, name) < quotient <= getattr(KNOWN, name), name


def test_variances_stay_below_their_constants() -> None:
    """Exactly, over all values of the noise."""
    w = torch.cat([models(2000, 0.7), models(500, 6.0)])
    variances = {
        "sigma1": [(jacobian(w, e) - jacobian(w)).square().sum(dim=(-1, -2)) for e in SIGNS],
        "sigma2": [(inner(w, *e) - inner(w)).square().sum(dim=-1) for e in product(SIGNS, SIGNS)],
        "sigma3": [(outer_slope(w[:, None], z) - mean_slope(w[:, None])).square().sum(dim=-1) for z in SIGNS],
    }
    for name, parts in variances.items():
        largest = float(torch.stack(parts).mean(dim=0).max())
        assert 0.9 * getattr(KNOWN, name) ** 2 < largest <= getattr(KNOWN, name) ** 2, name


@pytest.mark.parametrize("seed", range(3))
def test_the_five_steps_of_lemma_3(seed: int) -> None:
    """Each difference in its proof stays below its term, over independent batches of 5."""
    b, draws = LEAST_BATCH, 2000
    generator = torch.Generator().manual_seed(seed)
    w, away = models(1, 0.7, seed)[0], models(1, 0.7, 10 + seed)[0]
    far = float((away - w).square().sum())
    bounds = [
        KNOWN.G_g**2 * KNOWN.L_f**2 * far,
        KNOWN.G_f**2 * KNOWN.sigma**2 / b,
        KNOWN.G_g**2 * KNOWN.sigma**2 / b,
        KNOWN.G_f**4 * KNOWN.L_g**2 * far,
        KNOWN.L_g**2 * KNOWN.G_f**2 * KNOWN.sigma**2 / b,
    ]
    signs = torch.randint(0, 2, (b, draws, PROBLEM.clients, 3), generator=generator).to(F64) * 2 - 1
    e1, e2, ones = signs.mean(dim=0)[..., None].unbind(dim=-2)

    def slope(y: Tensor) -> Tensor:
        share = (1 + ones) / 2
        return share * outer_slope(y, 1.0) + (1 - share) * outer_slope(y, -1.0)

    moved, start, exact = inner(away, e1, e2), inner(w, e1, e2), inner(w)
    path = [
        pulled(jacobian(away, e1), slope(moved)),
        pulled(jacobian(w, e1), slope(moved)),
        pulled(jacobian(w, e1), mean_slope(moved)),
        pulled(jacobian(w), mean_slope(moved)),
        pulled(jacobian(w), mean_slope(start)),
        pulled(jacobian(w), mean_slope(exact)).expand(draws, -1, -1),
    ]
    found = [(a - z).square().sum(dim=-1).mean(dim=0) for a, z in pairwise(path)]
    for value, bound in zip(found, bounds, strict=True):
        assert float(value.min()) > 0 and float(value.max()) < bound


def test_bias_limit_against_the_exact_expectation() -> None:
    """E u over the binomial distribution of a batch's mean noise, against the Taylor expansion."""
    w, b = torch.tensor([0.5, 0.4], dtype=F64), 200
    heads = torch.arange(b + 1, dtype=F64)
    log_weight = math.lgamma(b + 1) - torch.lgamma(heads + 1) - torch.lgamma(b - heads + 1) - b * math.log(2)
    weight, noise = log_weight.exp(), 2 * heads / b - 1
    y0 = PROBLEM.inner_mean(w)
    y = (1 + S1 * noise[:, None, None, None]) * y0 + S2 * noise[:, None, None] * PROBLEM.v
    factor = (1 + S1 * noise[:, None, None, None]) * PROBLEM.outer_gradient(y)
    expected = torch.einsum("a,b,abnd->nd", weight, weight, PROBLEM.vjp(y0, factor)).mean(dim=0)
    bias = expected - PROBLEM.gradient(w)
    assert torch.allclose(b * bias, PROBLEM.bias_limit(w), rtol=0.03)


def test_the_linear_part_is_the_derivative_in_the_noise() -> None:
    w = models(1)[0]

    def direction(e: Tensor) -> Tensor:
        y, share = inner(w, e[0], e[1]), (1 + e[2]) / 2
        return pulled(jacobian(w, e[0]), share * outer_slope(y, 1.0) + (1 - share) * outer_slope(y, -1.0))

    expected = derivative(direction, torch.zeros(3, dtype=F64))
    for i in CLIENTS:
        for k, noise in enumerate(torch.eye(3, dtype=F64)):
            assert torch.allclose(PROBLEM.linear_part(w, i, noise[:2], noise[2:]), expected[i, :, k], atol=1e-13)


# The paper's bounds.


def test_the_bounds_are_the_papers() -> None:
    G_f, G_g, L_f, L_g, L, s = KNOWN.G_f, KNOWN.G_g, KNOWN.L_f, KNOWN.L_g, KNOWN.L, KNOWN.sigma
    T, tau, eta, b, gap = 256, 4, 1 / 16, 64, 0.7
    H = math.sqrt(G_g**2 * L_f**2 + G_f**4 * L_g**2)
    lemma_2 = tau**2 * eta**2 * G_g**2 * G_f**2
    lemma_3 = 5 * H**2 * lemma_2 + 5 * G_f**2 * s**2 / b + 5 * G_g**2 * s**2 / b + 5 * L_g**2 * G_f**2 * s**2 / b
    drift = math.sqrt(5) * H * tau * G_g * G_f * eta
    first = math.sqrt(5) * G_f * s / math.sqrt(b)
    rest = math.sqrt(5) * G_g * s / math.sqrt(b) + math.sqrt(5) * L_g * G_f * s / math.sqrt(b)
    tail = L * tau * eta * G_g**2 * G_f**2 + L * eta / 2 * G_f**2 * G_g**2
    assert KNOWN.drift(tau, eta) == pytest.approx(lemma_2)
    assert KNOWN.error(tau, eta, b) == pytest.approx(lemma_3)
    assert KNOWN.theorem(gap, T, tau, eta, b) == pytest.approx(
        gap / (T * eta) + G_f * G_g * (drift + first + rest) + tail
    )
    assert KNOWN.printed(gap, T, tau, eta, b) == pytest.approx(
        gap / (T * eta) + G_f * G_g * (drift * first + rest) + tail
    )
    assert KNOWN.descent(tau, eta, b) == pytest.approx(eta * (G_f * G_g * (drift + first + rest) + tail))


def test_the_theorems_bound_has_the_slope_it_claims() -> None:
    Ts = [4**k for k in range(3, 9)]
    slope, error = power_law(Ts, [KNOWN.theorem(1.0, T, 4, T**-0.5, T) for T in Ts])
    assert slope == pytest.approx(-0.5, abs=1e-12) and error < 1e-12


# The measurements.

TINY: list[Point] = [
    *(Rate(law, T, seed) for law in LAWS for T in (32, 48) for seed in (0, 1)),
    *(Drift(tau, eta, seed) for tau in (1, 3) for eta in (0.01, 0.1) for seed in (0, 1)),
    *(Bias(b, 1, seed) for b in (8, 32) for seed in (0, 1)),
    *(Descent(gamma, 1, step) for gamma in (1.0, 0.01) for step in ("plain", "safe")),
    *(Estimate(estimate, T, seed) for estimate in ESTIMATES for T in (32, 64) for seed in (0, 1)),
]


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_bounds_are_above_what_is_measured(tmp_path: Path) -> None:
    """A small preset end to end: tables, slopes, bounds and the figure."""
    theory.write(tmp_path, point_files.measure(tmp_path, TINY, workers=1))
    rows = read(tmp_path / "theory.csv")
    bounded = [row for row in rows if row["bound"]]
    assert {row["quantity"] for row in bounded} == {
        "all rounds",
        "all rounds (as printed)",
        "drift of the average",
        "drift of the clients",
        "spread of the clients",
        "error of the direction",
        "descent",
        "inner value rms",
        "direction rms",
        "guaranteed over measured descent, at most",
        "change less its bound, at most",
    }
    assert all(float(row["value"]) < float(row["bound"]) for row in bounded)
    assert all(float(row["value"]) > 0 for row in rows if row["part"] == "rate")
    summary = read(tmp_path / "theory-summary.csv")
    assert {row["part"] for row in summary} == {"rate", "drift", "bias", "descent", "estimate"}
    assert all(row["seeds"] == ("1" if row["part"] == "descent" else "2") for row in summary)
    assert all(row["above_bound"] == "0" for row in summary)
    bias = next(row for row in summary if row["quantity"] == "direction bias")
    assert float(bias["slope"]) == pytest.approx(-1, abs=0.25)
    drift = next(row for row in summary if row["quantity"] == "drift of the average")
    assert float(drift["slope"]) == pytest.approx(2, abs=0.2)
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same problem without noise."""
    for name in ("S1", "S2", "S3"):
        monkeypatch.setattr(problem, name, 0.0)


def by_hand(eta: float, tau: int, rounds: int) -> Tensor:
    """All clients' models without noise, [rounds, tau + 1, clients, d]."""
    problem, w, path = Synthetic(), PROBLEM.start, []
    for _ in range(rounds):
        own = [w.expand(problem.clients, -1)]
        for _ in range(tau):
            each = [problem.client_gradients(own[-1][i])[i] for i in CLIENTS]
            own.append(own[-1] - eta * torch.stack(each))
        path.append(torch.stack(own))
        w = own[-1].mean(dim=0)
    return torch.stack(path)


@pytest.mark.usefixtures("silent")
def test_a_rate_point_is_the_mean_squared_gradient_of_the_run() -> None:
    rows = {row["quantity"]: row for row in Rate("b = T", 64, 0).rows()}
    squares = Synthetic().gradient(by_hand(1 / 8, 4, 16)[:, 0, 0]).square().sum(dim=-1)
    assert rows["all rounds"]["value"] == pytest.approx(float(squares.mean()), rel=1e-12)
    assert rows["second half of the rounds"]["value"] == pytest.approx(float(squares[8:].mean()), rel=1e-12)
    assert [rows["all rounds"][name] for name in ("T", "tau", "eta", "b")] == [64, 4, 1 / 8, 64]


@pytest.mark.usefixtures("silent")
def test_a_drift_point_is_what_the_engine_did() -> None:
    tau, eta, problem = 3, 0.1, Synthetic()
    rows = {row["quantity"]: row["value"] for row in Drift(tau, eta, 0).rows()}
    own = by_hand(eta, tau, 10)
    average, began = own.mean(dim=2), own[:, 0, 0]
    at_start = problem.gradient(began)[:, None]
    direction = torch.stack([problem.client_gradients(own[:, :-1, i])[:, :, i] for i in CLIENTS]).mean(dim=0)
    values = problem.objective(average)
    expected = {
        "drift of the average": (average - began[:, None]).square().sum(dim=-1),
        "drift of the clients": (own[:, :-1] - began[:, None, None]).square().sum(dim=-1).mean(dim=-1),
        "spread of the clients": (own[:, :-1] - average[:, :-1, None]).square().sum(dim=-1).mean(dim=-1),
        "error of the direction": (direction - at_start).square().sum(dim=-1),
        "descent": values[:, 1:] - values[:, :-1] + eta * at_start.square().sum(dim=-1),
    }
    assert rows.keys() == expected.keys()
    for name, each in expected.items():
        assert rows[name] == pytest.approx(float(each.mean(dim=0).max()), rel=1e-9), name


@pytest.mark.usefixtures("silent")
def test_without_noise_there_is_no_bias() -> None:
    rows = {row["quantity"]: row["value"] for row in Bias(8, 1, 0).rows()}
    assert rows.keys() == {"inner value rms", "direction rms", "direction bias", "direction bias (Taylor)"}
    assert all(value < 1e-14 for value in rows.values())


def test_rms_error_of_the_inner_value() -> None:
    """Its exact value is sqrt((S1^2 ||E f||^2 + S2^2) / b), at the model where the bias is measured."""
    rows = {row["quantity"]: row for row in Bias(16, 2, 0).rows()}
    inner_mean = PROBLEM.inner_mean(torch.tensor([0.5, 0.4], dtype=F64))
    expected = math.sqrt((S1**2 * float(inner_mean.square().sum(dim=-1).mean()) + S2**2) / 16)
    assert rows["inner value rms"]["value"] == pytest.approx(expected, rel=0.08)
    bias, limit = rows["direction bias"]["value"], rows["direction bias (Taylor)"]["value"]
    assert bias == pytest.approx(limit, rel=0.5)
    assert rows["direction rms"]["value"] > 4 * bias


# The theorem as it is printed.


def test_the_plus_sign_is_needed() -> None:
    """Without it, the bound is below the measured value; with it, above."""
    whole, printed = Plus(2048).rows()
    assert printed["bound"] < 0.6 * printed["value"] < printed["value"] == whole["value"] < whole["bound"]


def test_the_constants_of_that_problem() -> None:
    plus = Plus(1024)
    known, composition = plus.constants(), plus.composition()
    ws = torch.linspace(-3 * plus.R, 3 * plus.R, 40, dtype=F64)
    for sign in (1.0, -1.0):
        batch = (torch.tensor([sign], dtype=F64), torch.zeros(1, 0))
        slopes = [derivative(lambda w, batch=batch: composition.inner({"w": w}, batch), w) for w in ws]
        assert max(float(slope.norm()) for slope in slopes) <= known.G_f
        for w, slope in zip(ws, slopes, strict=True):
            step = 1e-3
            moved = derivative(lambda w, batch=batch: composition.inner({"w": w}, batch), w + step)
            assert float((moved - slope).norm()) <= known.L_f * step
    y = torch.zeros(2, dtype=F64)
    assert float(derivative(lambda y: composition.outer(y, batch), y).norm()) == pytest.approx(known.G_g)
    slopes = plus.e * torch.tanh(ws / plus.R)
    assert float((slopes.diff() / ws.diff()).max()) <= known.L
    both = [(torch.tensor([sign], dtype=F64), torch.zeros(1, 0)) for sign in (1.0, -1.0)]
    for w, slope in zip(ws, slopes, strict=True):
        found = derivative(lambda w: sum(composition.outer(composition.inner({"w": w}, b), b) for b in both) / 2, w)
        assert torch.allclose(found, slope, atol=1e-14)


# Stored points are not measured again.


def test_finished_points_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Point] = [Rate("b = T", 32, seed) for seed in range(3)]
    ran: list[int] = []
    rows = Rate.rows

    def counted(self: Rate) -> list[dict[str, object]]:
        if self.seed == 2 and 2 not in ran:
            ran.append(2)
            raise KeyboardInterrupt
        ran.append(self.seed)
        return rows(self)

    monkeypatch.setattr(Rate, "rows", counted)
    with pytest.raises(KeyboardInterrupt):
        point_files.measure(tmp_path, points, workers=1)
    first = point_files.measure(tmp_path, points, workers=1)
    assert ran == [0, 1, 2, 2]
    assert point_files.measure(tmp_path, points, workers=1) == first
    assert ran == [0, 1, 2, 2] and [row["seed"] for row in first] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_damaged_point_is_run_again(tmp_path: Path) -> None:
    points: list[Point] = [Drift(1, 0.1, 0)]
    first = point_files.measure(tmp_path, points, workers=1)
    (place,) = (tmp_path / "theory-points").iterdir()
    place.write_text(place.read_text()[:20])
    assert point_files.measure(tmp_path, points, workers=1) == first
    assert json.loads(place.read_text()) == first


def test_points_of_other_settings_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Rate("b = T", 32, 0)
    before = point_files.file_stem(point)
    assert before != point_files.file_stem(Rate("b = T", 32, 1))
    monkeypatch.setattr(point_files, "SETTINGS", "others")
    assert point_files.file_stem(point) != before


def test_workers_give_the_same_rows(tmp_path: Path) -> None:
    points: list[Point] = [Drift(2, 0.1, seed) for seed in range(2)]
    in_workers = point_files.measure(tmp_path / "two", points, workers=2)
    assert in_workers == point_files.measure(tmp_path / "one", points, workers=1)


def test_invalid_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="preset"):
        theory.run(tmp_path, "slow", None)
    with pytest.raises(ConfigError, match="seeds"):
        theory.run(tmp_path, "quick", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="another --out"):
        point_files.measure(tmp_path / "file", TINY, workers=1)
    monkeypatch.setattr(theory, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`plot`"):
        theory.run(tmp_path / "new", "quick", None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("preset", theory.PRESETS.values(), ids=theory.PRESETS)
def test_presets_are_valid(preset: theory.Preset) -> None:
    points = preset.points(preset.seeds)
    assert preset.seeds >= 3 and len(set(points)) == len(points)
    rates = [point for point in points if isinstance(point, Rate)]
    # Whole rounds, and a batch that is drawn with replacement.
    assert all(point.T % 4 == 0 and LAWS[point.law][0](point.T) >= LEAST_BATCH for point in rates)
    assert all(point.b >= LEAST_BATCH for point in points if isinstance(point, Bias))


# The fit.


def test_power_law_is_exact() -> None:
    x = [2.0**k for k in range(4, 12)]
    slope, error = power_law(x, [3 * value**-0.5 for value in x])
    assert slope == pytest.approx(-0.5, abs=1e-13) and error < 1e-13


def test_the_error_of_a_slope() -> None:
    """By hand: residuals 1, -2, 1 over u = -1, 0, 1 have the sum of squares 6, so the error is sqrt(6 / 1 / 2)."""
    slope, error = power_law([math.exp(u) for u in (-1, 0, 1)], [math.exp(v) for v in (-1 + 1, -2, 1 + 1)])
    assert (slope, error) == (pytest.approx(1), pytest.approx(math.sqrt(3)))


def test_too_few_points_for_a_slope() -> None:
    assert all(map(math.isnan, power_law([2, 2], [1, 3])))
    assert math.isnan(power_law([1, 2], [1, 2])[1])


def test_the_summary_of_known_rows() -> None:
    common = {"part": "rate", "series": "b = T", "quantity": "all rounds", "tau": 4}
    rows = [
        {**common, "T": T, "eta": T**-0.5, "b": T, "seed": seed, "value": (1 + seed) / T, "bound": 6 / T}
        for T in (4, 16, 64)
        for seed in (0, 1)
    ]
    (row,) = summarise(rows)
    assert row["slope"] == pytest.approx(-1) and row["last_slope"] == pytest.approx(-1)
    assert row["least_bound_over_value"] == pytest.approx(4) and row["above_bound"] == 0
    assert series_points(rows)[0].error == pytest.approx(0.5 / 4)
    rows[0]["value"] = rows[1]["value"] = 10.0
    assert summarise(rows)[0]["above_bound"] == 1
