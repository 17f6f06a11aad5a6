"""Epsilon against accountants of our own: closed forms, a numerical integration, and a second theorem."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from comfedl.core.accounting import Accountant, noise_for
from comfedl.core.privacy import DP
from comfedl.utils.errors import ConfigError

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'comfedl[privacy]'")


def dp(noise: float, delta: float = 1e-5, **more: str) -> DP:
    return DP(1.0, noise, delta, **more)  # type: ignore[arg-type]


def exact_delta(epsilon: float, mu: float) -> float:
    """Balle and Wang (2018): the delta of a Gaussian mechanism with sensitivity over deviation mu."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 100), (20.0, 300)])
def test_full_participation_is_the_exact_gaussian_and_below_the_renyi_bound(noise: float, rounds: int) -> None:
    delta, mu = 1e-5, math.sqrt(rounds) / noise
    exact = brentq(lambda epsilon: exact_delta(epsilon, mu) - delta, 0, 60)
    # Mironov (2017): T a / (2 z^2) + log(1 / delta) / (a - 1) at the best order a.
    classical = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    for accountant in ("pld", "rdp"):
        for sampling in ("fixed", "poisson"):
            found = Accountant(dp(noise, sampling=sampling, accountant=accountant), 50, 50).epsilon(rounds)
            assert found is not None
            assert exact * (1 - 1e-9) <= found <= classical * (1 + 1e-3)
            if accountant == "pld":
                assert found == pytest.approx(exact, rel=1e-6)


def losses_of_one_round(noise: float, share: float, removed: bool, step: float) -> tuple[NDArray[np.float64], float]:
    """The masses of the privacy loss on a grid, and the grid's first loss.

    Between (1 - q) N(0, z^2) + q N(1, z^2), a client more, and N(0, z^2).
    """
    x = np.linspace(-40 * noise, 1 + 40 * noise, 2_000_001)
    inside = (x[1:] + x[:-1]) / 2
    with_client = np.logaddexp(math.log1p(-share), math.log(share) + (2 * inside - 1) / (2 * noise**2))
    plain = np.diff(norm.cdf(x, 0, noise))
    mixed = (1 - share) * plain + share * np.diff(norm.cdf(x, 1, noise))
    loss, mass = (with_client, mixed) if removed else (-with_client, plain)
    kept = mass > 1e-300
    place = np.rint(loss[kept] / step).astype(np.int64)
    masses = np.bincount(place - place.min(), weights=mass[kept])
    return masses, float(place.min() * step)


def integrated_epsilon(noise: float, share: float, rounds: int, delta: float, step: float = 2e-4) -> float:
    found = []
    for removed in (True, False):
        masses, first = losses_of_one_round(noise, share, removed, step)
        tail = np.flatnonzero(np.cumsum(masses[::-1])[::-1] > 1e-16)[-1] + 1
        masses = masses[:tail]
        size = 1 << int(len(masses) * rounds - 1).bit_length()
        total = np.fft.irfft(np.fft.rfft(masses, size) ** rounds, size).clip(min=0)
        loss = first * rounds + step * np.arange(size)
        total[loss < 0] = 0

        def delta_at(epsilon: float, loss: NDArray[np.float64] = loss, total: NDArray[np.float64] = total) -> float:
            above = loss > epsilon
            return float((total[above] * -np.expm1(epsilon - loss[above])).sum())

        found.append(brentq(lambda epsilon: delta_at(epsilon) - delta, 0, 60))
    return max(found)


@pytest.mark.parametrize(
    ("noise", "clients", "participants", "rounds", "delta"),
    [(1.0, 100, 10, 20, 1e-4), (2.0, 1000, 100, 100, 1e-5), (0.8, 1000, 10, 50, 1e-5), (4.0, 10, 5, 60, 1e-3)],
)
def test_poisson_sampling_agrees_with_a_numerical_integration(
    noise: float, clients: int, participants: int, rounds: int, delta: float
) -> None:
    ours = integrated_epsilon(noise, participants / clients, rounds, delta)
    pld = Accountant(dp(noise, delta, sampling="poisson"), clients, participants).epsilon(rounds)
    rdp = Accountant(dp(noise, delta, sampling="poisson", accountant="rdp"), clients, participants).epsilon(rounds)
    assert pld is not None and rdp is not None
    assert pld == pytest.approx(ours, rel=0.02)
    assert ours * 0.995 <= pld <= rdp * (1 + 1e-9)
    assert pld < 0.5 * (Accountant(dp(noise, delta), clients, clients).epsilon(rounds) or 0)


def wang_epsilon(noise: float, share: float, rounds: int, delta: float) -> float:
    """Theorem 9 of Wang, Balle and Kasiviswanathan (2019), for a replacement, which moves the sum by two clips."""

    def renyi(order: float) -> float:
        return order * 2 / noise**2

    best = math.inf
    for order in range(2, 200):
        terms = [0.0]
        for j in range(2, order + 1):
            log_c = math.lgamma(order + 1) - math.lgamma(j + 1) - math.lgamma(order - j + 1)
            first = (
                min(math.log(4) + math.log(math.expm1(min(renyi(2), 700))), renyi(2) + math.log(2))
                if j == 2
                else math.log(2) + (j - 1) * renyi(j)
            )
            terms.append(j * math.log(share) + log_c + first)
        spent = rounds * float(np.logaddexp.reduce(terms)) / (order - 1)
        best = min(best, spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return best


@pytest.mark.parametrize(
    ("noise", "clients", "participants", "rounds"), [(2.0, 1000, 10, 50), (5.0, 1000, 20, 200), (8.0, 200, 10, 100)]
)
def test_a_fixed_number_lies_between_one_known_case_and_another_theorem(
    noise: float, clients: int, participants: int, rounds: int
) -> None:
    found = Accountant(dp(noise), clients, participants).epsilon(rounds)
    # If all other clients add nothing, the sample matters only by whether the client is in it: Poisson's distribution.
    lowest = Accountant(dp(noise, sampling="poisson"), clients, participants).epsilon(rounds)
    assert found is not None and lowest is not None
    assert lowest < found <= wang_epsilon(noise, participants / clients, rounds, 1e-5) * 1.001
    assert found < (Accountant(dp(noise), clients, clients).epsilon(rounds) or 0)


def test_where_the_bound_for_a_fixed_number_is_worse_than_none_it_is_not_used() -> None:
    almost_all = Accountant(dp(1.0), 100, 99).epsilon(100)
    assert almost_all == Accountant(dp(1.0), 100, 100).epsilon(100)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_epsilon_grows_with_rounds_and_share_and_falls_with_noise_and_delta(sampling: str) -> None:
    def epsilon(noise: float = 3.0, delta: float = 1e-5, participants: int = 10, rounds: int = 50) -> float:
        found = Accountant(dp(noise, delta, sampling=sampling), 200, participants).epsilon(rounds)
        assert found is not None
        return found

    assert 0 < epsilon(rounds=10) < epsilon() < epsilon(rounds=51) < epsilon(rounds=100)
    assert epsilon(participants=5) < epsilon() < epsilon(participants=40)
    assert epsilon(noise=6.0) < epsilon() < epsilon(noise=1.5)
    assert epsilon(delta=1e-3) < epsilon() < epsilon(delta=1e-9)


def test_nothing_is_spent_before_the_first_round_and_nothing_is_promised_without_noise() -> None:
    assert Accountant(dp(1.0), 10, 10).epsilon(0) == 0
    assert Accountant(dp(0.0), 10, 10).epsilon(5) is None


@pytest.mark.parametrize(("sampling", "participants"), [("fixed", 10), ("poisson", 10), ("fixed", 100)])
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_noise_for_an_epsilon_is_the_least(sampling: str, participants: int, epsilon: float) -> None:
    asked = DP(None, 0.0, 1e-4, sampling=sampling)
    noise = noise_for(epsilon, asked, 100, participants, 60)

    def spent(at: float) -> float:
        return Accountant(replace(asked, noise_multiplier=at, clip=1.0), 100, participants).epsilon(60) or math.inf

    assert spent(noise) <= epsilon < spent(noise * 0.995)


def test_an_epsilon_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a larger epsilon or delta"):
        noise_for(1e-12, DP(None, 0.0, 1e-12), 10, 10, 10**6)


def test_the_releases_of_a_round_are_together_worth_the_noise_multiplier() -> None:
    for sides in (0, 1, 2):
        privacy = dp(1.7)
        together = privacy.update_multiplier(sides) ** -2 + sides * privacy.side_multiplier**-2
        assert together**-0.5 == pytest.approx(1.7, rel=1e-12)
    # Andrew et al. (2021), section 3.1: z_update = (z^-2 - (2 sigma_b)^-2)^(-1/2), with deviation sigma_b of the count.
    privacy = replace(dp(1.0), side_share=0.01)
    sigma_b = privacy.side_multiplier / 2
    assert privacy.update_multiplier(1) == pytest.approx((1 - (2 * sigma_b) ** -2) ** -0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clip": None, "noise_multiplier": 1.0}, "give clip"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"sampling": "posson"}, "poisson"),
        ({"accountant": "moments"}, "accountant is 'moments'"),
        ({"quantile": 1.0}, "quantile is 1.0"),
        ({"clip": None, "noise_multiplier": 0.0, "quantile": 0.5}, "give clip"),
        ({"side_share": 0.5}, "side_share is 0.5"),
        ({"noise_seed": -1}, "noise_seed is -1"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DP(**{"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, **arguments})  # type: ignore[arg-type]


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'comfedl\[privacy\]'"):
        Accountant(dp(1.0), 10, 10).epsilon(3)
