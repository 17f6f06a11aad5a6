"""The mechanism of a private round: what one client can change, the noise's distribution, and the limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms.aggregation import weighted_average
from comfedl.algorithms.context import Participation
from comfedl.algorithms.private_release import PrivateRelease, private_weights
from comfedl.core.privacy import Sums
from comfedl.core.secret_noise import SecretNoise, key_of_seed
from comfedl.core.simplex import capped_weights
from comfedl.utils.errors import ConfigError

CLIENTS, FEATURES = 12, 30


def federated(clients: int = CLIENTS, seed: int = 0) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(seed)

    def client(k: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(20, FEATURES, generator=generator, dtype=torch.float64)
        return x, (x[:, 0] + 0.2 * k * x[:, 1] > 0).long()

    return cf.FederatedData({f"client-{k:02}": client(k) for k in range(clients)})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 2).double()


def vector(params: Any) -> Tensor:
    return torch.cat([part.reshape(-1) for part in params.values()])


def trained(privacy: cf.DP | None, method: Any = None, fed: cf.FederatedData | None = None, **more: Any) -> cf.Result:
    method = method or cf.FedAvg(weighting="uniform", lr=0.3)
    return cf.fit(net(), fed or federated(), method, privacy=privacy, **{"rounds": 1, "eval_every": 100, **more})


METHODS = {
    "fedavg": cf.FedAvg(weighting="uniform", lr=0.3),
    "fedprox": cf.FedProx(weighting="uniform", lr=0.3),
    "fedmaml": cf.FedMAML(lr=0.3),
    "comfedl": cf.ComFedL(lr=0.3),
    "server optimiser": cf.FedAvg(weighting="uniform", server_optimizer=cf.optim.Yogi(lr=0.01)),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_wide_clip_and_no_noise_is_the_plain_run_to_the_bit(name: str) -> None:
    plain = trained(None, METHODS[name], rounds=4)
    for privacy in (cf.DP(None, 0.0, 1e-3), cf.DP(1e9, 0.0, 1e-3)):
        same = trained(privacy, METHODS[name], rounds=4)
        assert all(torch.equal(same.params[key], part) for key, part in plain.params.items())
        assert same.clients == plain.clients


@pytest.mark.parametrize("method", [cf.Robust(0.1, cap=3.0), cf.FedAvg(), cf.DRFA(), cf.Scaffold()])
def test_no_clip_and_no_noise_is_the_plain_run_of_any_method(method: Any) -> None:
    plain, same = trained(None, method, rounds=3), trained(cf.DP(None, 0.0, 1e-3), method, rounds=3)
    assert all(torch.equal(same.params[key], part) for key, part in plain.params.items())
    assert same.rounds == plain.rounds


def scatter(clip: float, noise: float, method: Any, runs: int, **more: Any) -> Tensor:
    """How far noisy models are from the one of the same run without noise."""
    centre = vector(trained(cf.DP(clip, 0.0, 1e-3), method).params)
    seeds = range(runs)
    return torch.stack(
        [vector(trained(cf.DP(clip, noise, 1e-3, noise_seed=k, **more), method).params) - centre for k in seeds]
    )


def assert_normal(found: Tensor, deviation: float) -> None:
    """Its variance is within what chance allows in 1 of 10,000 cases, and it is normal."""
    values = found.reshape(-1).numpy()
    low, high = (chi2.ppf(p, len(values)) for p in (5e-5, 1 - 5e-5))
    assert low < (values**2).sum() / deviation**2 < high
    assert kstest(values / deviation, "norm").pvalue > 1e-4


def test_the_noise_has_the_promised_variance() -> None:
    found = scatter(0.05, 1.5, cf.FedAvg(weighting="uniform", lr=0.3), runs=60)
    assert_normal(found, 1.5 * 0.05 / CLIENTS)
    assert abs(float(np.corrcoef(found[:, 0], found[:, 1])[0, 1])) < 0.5
    with pytest.raises(AssertionError):  # the test would notice 10 %
        assert_normal(found * 1.1, 1.5 * 0.05 / CLIENTS)


def test_the_update_s_noise_makes_room_for_the_count() -> None:
    found = scatter(0.05, 1.5, cf.FedAvg(weighting="uniform", lr=0.3), runs=60, quantile=0.5, side_share=0.4)
    assert_normal(found, 1.5 / math.sqrt(0.6) * 0.05 / CLIENTS)


def release(privacy: cf.DP, participants: int = CLIENTS, sides: int = 0, clients: int = CLIENTS) -> PrivateRelease:
    return PrivateRelease(privacy, clients, participants, SecretNoise(key_of_seed(1)), sides)


def test_the_noise_of_side_releases_has_the_promised_variance() -> None:
    one = release(cf.DP(1.0, 2.0, 1e-3, side_share=0.25), sides=1)
    found = torch.tensor([one.at_round(k).total(torch.zeros(3), 0.5) for k in range(3000)])
    assert_normal(found, 2.0 / math.sqrt(0.25) * 0.5)


@pytest.mark.parametrize("clip", [0.01, 0.2])
def test_no_client_moves_the_model_by_more_than_its_share(clip: float) -> None:
    """Replaced by a client whose data are wild, so that its update is long; twice the share, since it replaces one."""
    fed = federated()
    names = list(fed.names)
    wild = {name: (x * 1e3, 1 - y) if name == names[4] else (x, y) for name, (x, y) in fed.train.items()}
    one, other = (vector(trained(cf.DP(clip, 0.0, 1e-3), fed=each).params) for each in (fed, cf.FederatedData(wild)))
    apart = float((one - other).norm())
    assert apart <= 2 * clip / CLIENTS
    assert apart > 0.5 * clip / CLIENTS  # it does move the model


def test_an_absent_client_lowers_the_sum_and_the_divisor_stays() -> None:
    fed = federated()
    start, names = vector(dict(net().named_parameters())).detach(), list(fed.names)
    method = cf.FedAvg(weighting="uniform", lr=0.3)
    gone = cf.faults.Dropout(probability=1.0, clients=[names[3]])
    whole = vector(trained(cf.DP(1e9, 0.0, 1e-3), method, fed).params)
    less = vector(trained(cf.DP(1e9, 0.0, 1e-3), method, fed, faults=[gone]).params)
    own = vector(trained(None, method, cf.FederatedData({names[3]: fed.train[names[3]]}), seed=0).params)
    torch.testing.assert_close(whole - less, (own - start) / CLIENTS, rtol=1e-9, atol=1e-12)


def test_a_method_that_weighs_by_who_replied_is_stopped() -> None:
    class Careless(cf.FedAvg):
        def round(self, state: Any, context: Any) -> Any:
            replies = context.ask("train", context.sample()[1:], {"model": state["model"]})
            weights = torch.full((len(replies.clients),), 1 / len(replies.clients), dtype=torch.float64)
            return self.advance(state, replies, weights), Participation(replies.clients, weights)

        def check_privacy(self, model: Any, sampled: bool) -> Sums:
            return Sums()

    with pytest.raises(ConfigError, match="none may have more than"):
        trained(cf.DP(1.0, 0.0, 1e-3), Careless(weighting="uniform"))


# Robust weights.

KL = cf.KL(0.2, cap=3.0)


def kept(shift: float = 0.0) -> dict[str, Any]:
    return {"privacy": {"clip": torch.tensor(1.0), "shift": torch.tensor(shift, dtype=torch.float64)}}


def test_a_client_s_loss_moves_its_own_weight_alone() -> None:
    """Before the noisy sum divides them all; so the sums are of parts that do not depend on each other."""
    mechanism, generator = release(cf.DP(1.0, 0.0, 1e-3), sides=1), torch.Generator().manual_seed(1)
    losses = torch.rand(CLIENTS, generator=generator, dtype=torch.float64)
    for lie in (0.0, 0.5, 1e9, math.inf, -math.inf, math.nan):
        other = losses.clone()
        other[5] = lie
        found = []
        for values in (losses, other):
            _, weights, bound = private_weights(KL, kept(0.4), values, mechanism)
            assert float(weights.max()) <= bound * (1 + 1e-12)
            found.append(weights / bound * 3 / CLIENTS)  # without the division
        same = torch.arange(CLIENTS) != 5
        torch.testing.assert_close(found[0][same], found[1][same], rtol=1e-12, atol=0)
        assert float(found[1].max()) <= 3 / CLIENTS * (1 + 1e-12)


@pytest.mark.parametrize("level", [0.0, 5.0])
def test_with_losses_that_stay_the_weights_become_the_capped_ones(level: float) -> None:
    losses = level + torch.tensor([0.1, 0.2, 0.5, 0.3, 2.0, 0.4, 0.1, 0.2, 0.9, 0.1, 0.3, 0.2], dtype=torch.float64)
    state, mechanism = kept(), release(cf.DP(1.0, 0.0, 1e-3), sides=1)
    for _ in range(200):
        state, weights, _ = private_weights(KL, state, losses, mechanism)
    torch.testing.assert_close(weights, capped_weights(losses, 0.2, 3.0), rtol=1e-6, atol=1e-9)


def test_robust_s_noise_has_the_promised_variance() -> None:
    """In the first round every loss is far above the normaliser, so all weights are at the cap and add up to it."""
    method = cf.ComFedL(outer=cf.KL(0.01, cap=2.0), lr=0.3)
    noisy = [cf.DP(0.05, 1.5, 1e-3, noise_seed=k, side_share=0.25) for k in range(60)]
    centre = vector(trained(cf.DP(0.05, 0.0, 1e-3), method).params) - vector(dict(net().named_parameters())).detach()
    start = vector(dict(net().named_parameters())).detach()
    found = []
    for k, privacy in enumerate(noisy):
        total = PrivateRelease(privacy, CLIENTS, CLIENTS, SecretNoise(key_of_seed(k)), 1, 1).total(
            torch.full((CLIENTS,), math.log(2.0), dtype=torch.float64).exp() / CLIENTS, 2.0 / CLIENTS
        )
        scale = min(2.0, max(0.5, total)) / 2.0
        found.append((vector(trained(privacy, method).params) - start) * scale - centre)
    assert_normal(torch.stack(found), 1.5 / math.sqrt(0.75) * 0.05 / CLIENTS)


# Sampling.


def test_a_poisson_sample_takes_each_client_with_the_same_chance_and_independently() -> None:
    one = release(cf.DP(1.0, 1.0, 1e-3, sampling="poisson"), participants=10, clients=40)
    taken = np.zeros((4000, 40))
    for k in range(4000):
        taken[k, one.at_round(k).sample()] = 1
    share = taken.mean(axis=0)
    assert abs(share - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 4000)
    assert taken.sum(axis=1).var() == pytest.approx(40 * 0.25 * 0.75, rel=0.15)


def test_a_fixed_sample_has_its_number_and_each_client_the_same_chance() -> None:
    one = release(cf.DP(1.0, 1.0, 1e-3), participants=10, clients=40)
    samples = [one.at_round(k).sample() for k in range(4000)]
    assert all(len(each) == 10 == len({*each}) and each == sorted(each) for each in samples)
    share = np.bincount(np.concatenate(samples), minlength=40) / 4000
    assert abs(share - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_nobody_who_knows_the_seed_knows_the_sample_or_the_noise(sampling: str) -> None:
    runs = [trained(cf.DP(0.1, 1.0, 1e-3, sampling=sampling), clients_per_round=6, rounds=3) for _ in range(2)]
    assert not torch.equal(vector(runs[0].params), vector(runs[1].params))
    who = [[row["weight"] for row in run.clients] for run in runs]
    more = trained(cf.DP(0.1, 1.0, 1e-3, sampling=sampling), clients_per_round=6, rounds=3)
    assert len({tuple(map(bool, each)) for each in [*who, [row["weight"] for row in more.clients]]}) > 1


def test_a_round_in_which_nobody_takes_part_is_noise_alone() -> None:
    privacy = cf.DP(0.1, 1.0, 1e-3, sampling="poisson", noise_seed=3)
    run = trained(privacy, clients_per_round=1, rounds=12, eval_every=1)
    empty = [k for k, row in enumerate(run.rounds) if row["participants"] == 0]
    assert empty and len(empty) < 12
    robust = trained(privacy, cf.Robust(0.2, cap=2.0), clients_per_round=2, rounds=40, eval_every=1)
    assert 0 in [row["participants"] for row in robust.rounds]


def test_under_poisson_sampling_the_divisor_is_the_expected_number() -> None:
    privacy = cf.DP(1e9, 0.0, 1e-3, sampling="poisson", noise_seed=5)
    run = trained(privacy, clients_per_round=6, eval_every=1)
    weights = [row["weight"] for row in run.clients if row["weight"]]
    assert weights == [1 / 6] * int(run.rounds[0]["participants"] or 0) and len(weights) != 6


# Adaptive clipping.


@pytest.mark.parametrize("start", [1e-3, 10.0])
def test_the_clip_comes_to_the_quantile_of_the_norms(start: float) -> None:
    lengths = torch.linspace(0.1, 2.0, 21, dtype=torch.float64)
    mechanism = release(cf.DP(start, 0.0, 1e-3, quantile=0.75), participants=21)
    clip = start
    for _ in range(400):
        clip = float(mechanism._next_clip(clip, lengths))
    assert clip == pytest.approx(float(lengths.quantile(0.75)), rel=0.12)


def test_the_clip_of_a_run_follows_the_updates() -> None:
    wide = trained(cf.DP(1e3, 0.0, 1e-3, quantile=0.5, clip_lr=1.0), rounds=40)
    plain = trained(None, rounds=40)
    assert not torch.equal(vector(wide.params), vector(plain.params))  # in the end it clips


# What is refused.


def bn() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


ON = cf.DP(1.0, 1.0, 1e-3)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (cf.FedAvg(), 'use weighting = "uniform"'),
        (cf.Robust(0.1), "one client could have any weight"),
        (cf.ComFedL(outer=cf.KL(effective_clients=4)), "one client could have any weight"),
        (cf.ComFedL(outer=cf.CVaR(0.5)), "one client could have any weight"),
        (cf.TERM(1.0), "one client could have any weight"),
        (cf.ComFedL(outer=cf.KL(0.1, cap=2.0), step="safe"), "lengths of updates"),
        (cf.Robust(0.1, cap=2.0, offset=cf.offset.Excess()), "asks for losses"),
        (
            cf.Robust(0.1, cap=2.0, offset=cf.offset.Shrinkage()),
            "the offset Shrinkage may be from other clients",
        ),
        (cf.FedAvg(weighting="uniform", defence="strong"), "leave these out"),
        (cf.FedAvg(weighting="uniform", aggregate="median"), "leave these out"),
        (cf.FedAvg(weighting="uniform", clip_update_norm=1.0), "leave these out"),
        *((each, "its epsilon is not known") for each in (cf.DRFA(), cf.AFL(), cf.Scaffold(), cf.QFedAvg())),
        *((each, "its epsilon is not known") for each in (cf.DeltaFL(), cf.TRMAML())),
    ],
)
def test_a_method_whose_epsilon_is_not_known_is_refused(method: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(ON, method)


def test_what_else_would_leak_is_refused() -> None:
    uniform = cf.FedAvg(weighting="uniform")
    with pytest.raises(ConfigError, match="use GroupNorm"):
        cf.fit(bn(), federated(), uniform, rounds=1, privacy=ON)
    keeping = cf.FedAvg(weighting="uniform", client_optimizer=cf.optim.SGD(momentum=0.9, keep_state=True))
    with pytest.raises(ConfigError, match="clients keep a state"):
        trained(ON, keeping, clients_per_round=4)
    assert trained(ON, keeping).privacy is not None
    balanced = cf.losses.CrossEntropy(class_weights="balanced")
    with pytest.raises(ConfigError, match="count the labels of all clients"):
        trained(ON, uniform, loss=balanced)
    with pytest.raises(ConfigError, match="must be None or like DP"):
        trained({"clip": 1.0})  # type: ignore[arg-type]


# One sum, one noise.


def test_the_same_sum_has_the_same_noise_and_another_sum_has_another() -> None:
    """A round that is repeated after a kill may miss a client: the difference of the two must not be its plain part."""
    names, method = list(federated().names), cf.FedAvg(weighting="uniform", lr=0.3)
    privacy = cf.DP(0.05, 1.5, 1e-3, noise_seed=1)
    gone = {"faults": [cf.faults.Dropout(probability=1.0, clients=[names[3]])]}
    whole, again, less = (trained(privacy, method, **more) for more in ({}, {}, gone))
    assert torch.equal(vector(whole.params), vector(again.params))
    plain = [vector(trained(cf.DP(0.05, 0.0, 1e-3), method, **more).params) for more in ({}, gone)]
    apart = (vector(whole.params) - vector(less.params)) - (plain[0] - plain[1])
    assert_normal(apart, math.sqrt(2) * 1.5 * 0.05 / CLIENTS)


def test_a_number_s_noise_follows_the_number() -> None:
    one = release(cf.DP(1.0, 2.0, 1e-3, side_share=0.25), sides=1).at_round(3)
    noise = [one.total(torch.tensor([value], dtype=torch.float64), 0.5) - value for value in (0.1, 0.1, 0.2)]
    assert noise[0] == noise[1] and abs(noise[0] - noise[2]) > 1e-6


# What a round must do, and who says what it releases.


class Twice(cf.FedAvg):
    def round(self, state: Any, context: Any) -> Any:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        weights = context.release.equal_weights(len(replies.clients))
        state = self.advance(state, replies, weights)
        return self.advance(state, replies, weights), Participation(replies.clients, weights)


class Never(cf.FedAvg):
    def round(self, state: Any, context: Any) -> Any:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        weights = context.release.equal_weights(len(replies.clients))
        averaged = self.averaged(state["model"], replies, weights)
        return self.advance_to(state, averaged), Participation(replies.clients, weights)


@pytest.mark.parametrize(("kind", "says"), [(Twice, "averages updates twice"), (Never, "does not average updates by")])
def test_a_subclass_says_what_it_releases_and_releases_it_once(kind: Any, says: str) -> None:
    own = kind.__name__
    with pytest.raises(ConfigError, match=rf"{own}\.round is the method's own, .* {own}\.check_privacy"):
        trained(ON, kind(weighting="uniform"))

    class Said(kind):  # type: ignore[misc]
        def check_privacy(self, model: Any, sampled: bool) -> Sums:
            return Sums()

    with pytest.raises(ConfigError, match=says):
        trained(ON, Said(weighting="uniform"))

    class Inherits(Said):
        """With nothing of its own."""

    with pytest.raises(ConfigError, match=says):
        trained(ON, Inherits(weighting="uniform"))


@pytest.mark.parametrize("part", ["averaged", "advance_to", "reported", "init", "weigh", "foreseen", "offsets"])
def test_any_part_of_the_server_s_that_is_changed_is_asked_about(part: str) -> None:
    changed = type("Changed", (cf.Robust,), {part: lambda self, *given: getattr(cf.Robust, part)(self, *given)})
    with pytest.raises(ConfigError, match=rf"Changed\.{part} is the method's own"):
        trained(ON, changed(0.2, cap=3.0))


class BySize(cf.offset.Offset):
    def of(self, clients: Any, names: Any, sizes: Any) -> Tensor:
        return torch.full((len(clients),), float(sizes.max()), dtype=torch.float64)


class OwnGeneralisation(cf.offset.Generalisation):
    def of(self, clients: Any, names: Any, sizes: Any) -> Tensor:
        return torch.full((len(clients),), float(sizes.max()), dtype=torch.float64)


@pytest.mark.parametrize("offset", [BySize(), OwnGeneralisation(1.0), cf.offset.Shrinkage()])
def test_an_offset_that_may_know_of_other_clients_is_refused(offset: Any) -> None:
    with pytest.raises(ConfigError, match=f"the offset {type(offset).__name__} may be from other clients' losses"):
        trained(ON, cf.Robust(0.2, cap=3.0, offset=offset))


def test_an_offset_of_each_client_s_own_is_taken() -> None:
    baseline = dict.fromkeys(federated().names, 0.1)
    for offset in (cf.offset.Generalisation(1.0), cf.offset.Excess(baseline)):
        assert trained(ON, cf.Robust(0.2, cap=3.0, offset=offset)).privacy is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_which_sums_are_too_coarse_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"in which sums are rounded .* use float32 or float64"):
        cf.fit(net().to(dtype), federated(), cf.FedAvg(weighting="uniform"), rounds=1, privacy=ON)


def test_noisy_sums_of_float32_updates_are_those_of_doubles() -> None:
    """Where parameters are much larger than updates, float32 sums are off by more than the slack of the clip."""
    from comfedl.engines.replies import LocalReplies

    generator, count = torch.Generator().manual_seed(0), 50
    start = 1000 * torch.randn(200, generator=generator)
    ends = [start + 0.01 * torch.randn(200, generator=generator) for _ in range(count)]
    exact = sum((end.double() - start.double()) / 3 for end in ends)
    replies = LocalReplies(range(count), [{"model": {"params": {"w": end}, "buffers": {}}} for end in ends])
    weights = torch.full((count,), 1 / 3, dtype=torch.float64)
    found = replies.weighted_updates(("model", "params"), {"w": start}, weights)["w"]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
    model = {"params": {"w": start}, "buffers": {}}
    coarse = weighted_average(model, replies, weights)["params"]["w"].double() - start
    assert float((coarse - exact).norm()) > 1e-3 * float(exact.norm())
