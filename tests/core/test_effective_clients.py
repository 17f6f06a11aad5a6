"""KL(effective_clients=k): each round uses the gamma at which the weights are worth k equal clients."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings as bounded, strategies as st

import comfedl as cf
from comfedl.config.schema import parse_config, run_config
from comfedl.core.client_statistics import effective_clients
from comfedl.core.simplex import effective_gamma, effective_weights, softmax_weights

losses_of = st.lists(st.floats(0, 1e3, allow_nan=False), min_size=2, max_size=30)
fractions = st.floats(0, 1)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def all_equal(losses: torch.Tensor) -> bool:
    return bool((losses == losses[0]).all())


def rounded_equal(losses: torch.Tensor) -> bool:
    return bool(losses.max() - losses.min() <= 1e-6 * losses.max())


@bounded(deadline=None)
@given(losses_of, fractions)
def test_the_number_is_attained_where_it_can_be(values: list[float], fraction: float) -> None:
    losses = tensor(values)
    assume(all_equal(losses) or not rounded_equal(losses))
    ties, n = int((losses == losses.max()).sum()), len(values)
    k = 1 + fraction * (n - 1)
    r = effective_weights(losses, k)
    assert float(r.sum()) == pytest.approx(1, abs=1e-12) and bool((r >= 0).all())
    reachable = min(max(k, ties), n) if ties < n else n
    # Losses that differ only in their last digits cannot reach every number in floating point.
    if float((losses.max() - losses[losses < losses.max()]).min() if ties < n else 1) > 1e-9 * float(losses.max()):
        assert effective_clients(r.tolist()) == pytest.approx(reachable, abs=1e-6)
    assert float(r.max()) <= 1 / max(1.0, reachable) ** 0.5 + 1e-6


@bounded(deadline=None)
@given(losses_of, fractions, fractions)
def test_more_clients_are_more_even_weights(values: list[float], a: float, b: float) -> None:
    losses, n = tensor(values), len(values)
    few, many = sorted((1 + a * (n - 1), 1 + b * (n - 1)))
    numbers = [effective_clients(effective_weights(losses, k).tolist()) for k in (few, many)]
    assert numbers[0] <= numbers[1] + 1e-6
    assert effective_gamma(losses, few) <= effective_gamma(losses, many)
    tops = [float(effective_weights(losses, k).max()) for k in (few, many)]
    assert tops[0] >= tops[1] - 1e-9


@bounded(deadline=None)
@given(losses_of)
def test_the_two_ends(values: list[float]) -> None:
    losses, n = tensor(values), len(values)
    for k in (n, n + 5):
        assert torch.equal(effective_weights(losses, k), torch.full((n,), 1 / n, dtype=torch.float64))
    assume(not rounded_equal(losses))
    top = (losses == losses.max()).double()
    assert torch.equal(effective_weights(losses, 1), top / top.sum())


@bounded(deadline=None)
@given(losses_of, st.floats(1.5, 5), st.floats(0.1, 100), st.floats(-50, 50))
def test_the_scale_of_the_losses_does_not_matter(values: list[float], k: float, scale: float, shift: float) -> None:
    losses = tensor([round(value) for value in values])
    one, other = effective_weights(losses, k), effective_weights(losses * scale + shift, k)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_rounding_does_not_choose_the_clients() -> None:
    """A model that starts at zero has the loss ln 10 at every client, to rounding."""
    losses = tensor([2.302585, 2.3025851, 2.3025850, 2.3025849])
    assert effective_weights(losses, 2).tolist() == [0.25] * 4


def test_it_is_the_softmax_at_that_gamma() -> None:
    losses = tensor([0.3, 0.9, 0.5, 2.0])
    r = effective_weights(losses, 2.5)
    assert torch.equal(r, softmax_weights(losses, effective_gamma(losses, 2.5)))
    assert torch.equal(cf.KL(effective_clients=2.5).weights(losses), r)
    assert float(cf.KL(effective_clients=2.5).objective(losses)) == pytest.approx(float((r * losses).sum()))
    gamma = effective_gamma(losses, 2.5)
    assert torch.allclose(cf.KL(gamma).weights(losses), r)


def test_nonsense_is_refused() -> None:
    for arguments, said in (
        ({}, "neither is given"),
        ({"gamma": 0.2, "effective_clients": 3}, "both are given"),
        ({"effective_clients": 0.5}, "1 or more"),
        ({"effective_clients": 3, "cap": 2.0}, "leave cap out"),
    ):
        with pytest.raises(cf.ConfigError, match=said):
            cf.KL(**arguments)


DATA = {"name": "digits", "partition": "dirichlet", "clients": 8, "alpha": 0.3}


def settings(**outer: float) -> dict[str, object]:
    method = {"name": "comfedl", "lr": 0.3, "local_steps": 1, "outer": {"name": "kl", **outer}}
    return {"rounds": 6, "eval_every": 1, "checkpoint_every": 2, "data": DATA, "algorithm": method}


def test_every_round_of_a_run_has_that_many() -> None:
    result = run_config(parse_config(settings(effective_clients=3)))
    # In the first round all losses are ln 10: no client is worse, and all weights are equal.
    assert [row["effective_clients"] for row in result.rounds] == pytest.approx([8] + [3] * 5, abs=1e-6)


def test_it_counts_among_the_participants() -> None:
    result = run_config(parse_config({**settings(effective_clients=2), "clients_per_round": 4, "rounds": 12}))
    late = [row["effective_clients"] for row in result.rounds[6:]]
    assert late == pytest.approx([2] * 6, abs=1e-6)
    with pytest.warns(UserWarning, match="effective_clients is 4 and 4 clients take part"):
        run_config(parse_config({**settings(effective_clients=4), "clients_per_round": 4, "rounds": 1}))


def test_a_config_keeps_it_and_a_stopped_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    config = parse_config(settings(effective_clients=3))
    whole = run_config(config, out=tmp_path / "whole")
    written = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())
    assert written["algorithm"]["outer"] == {"name": "kl", "effective_clients": 3.0}
    assert parse_config(written).resolved() == config.resolved()

    class Stop(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config, out=tmp_path / "cut", callbacks=[Stop()])
    assert run_config(config, out=tmp_path / "cut", resume=True).rounds == whole.rounds
