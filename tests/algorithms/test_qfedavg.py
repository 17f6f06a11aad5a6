"""q-FedAvg, section 3 of the specifications: the step of q-FFL with L = 1 / lr and the squared norm."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms.context import RoundContext
from helpers.reference import (
    SIZES,
    Array,
    apart,
    by_hand_clients,
    close,
    gradient,
    locally,
    loss,
    matrix,
    recorded,
    run,
    start,
    taking_part,
)

LR, STEPS, ROUNDS = 0.3, 3, 4
FULL = {"lr": LR, "local_steps": STEPS, "batch_size": None}


def by_hand(q: float, sets: list[list[int]]) -> tuple[Array, list[Array]]:
    """Delta_k = F_k^q g_k, h_k = q F_k^(q-1) ||g_k||^2 + L F_k^q, w - sum Delta / sum h; and each F_k^q L / sum h."""
    clients, W, L = by_hand_clients(), start(), 1 / LR
    weights = []
    for chosen in sets:
        deltas, h, factor = [], [], []
        for k in chosen:
            F = loss(W, clients[k]) + 1e-10
            g = L * (W - locally(W, lambda V, k=k: gradient(V, clients[k]), LR, STEPS)[-1])
            deltas.append(F**q * g)
            h.append((q * F ** (q - 1) * np.square(g).sum() if q else 0.0) + L * F**q)
            factor.append(F**q * L)
        weights.append(np.zeros(len(SIZES)))
        weights[-1][chosen] = np.array(factor) / sum(h)
        W = W - sum(deltas) / sum(h)
    return W, weights


EVERYBODY = [list(range(len(SIZES)))] * ROUNDS


@pytest.mark.parametrize("q", [0.0, 0.01, 0.2, 1.0, 2.0, 5.0])
def test_by_hand(q: float) -> None:
    expected, weights = by_hand(q, EVERYBODY)
    result = run(cf.QFedAvg(q=q, **FULL), ROUNDS)
    close(matrix(result.params), expected)
    np.testing.assert_allclose(recorded(result, "weight"), weights, atol=1e-9)


@pytest.mark.parametrize("q", [0.2, 2.0])
def test_by_hand_with_some_of_the_clients(q: float) -> None:
    sets = [[0, 3], [1, 2], [2, 4], [0, 1]]
    with taking_part(sets):
        result = run(cf.QFedAvg(q=q, **FULL), ROUNDS, clients_per_round=2)
    close(matrix(result.params), by_hand(q, sets)[0])


def test_the_values_of_q_above_are_different_methods() -> None:
    ends = [by_hand(q, EVERYBODY)[0] for q in (0.0, 0.01, 0.2, 1.0, 2.0, 5.0)]
    assert min(np.abs(one - other).max() for one, other in pairwise(ends)) > 1e-3


def test_the_objective_recorded_is_that_of_q_ffl() -> None:
    result = run(cf.QFedAvg(q=2.0, **FULL), 1)
    values = [loss(matrix(result.params), client) for client in by_hand_clients()]
    assert result.rounds[-1]["objective"] == pytest.approx(np.mean(np.power(values, 3)) / 3, abs=1e-12)


@pytest.mark.parametrize("some", [None, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_q_0_is_the_uniform_average(some: int | None, batch_size: int | None) -> None:
    """Invariant 4, with the same draws."""
    options = {**FULL, "batch_size": batch_size}
    plain = run(cf.FedAvg(weighting="uniform", **options), clients_per_round=some)
    assert apart(run(cf.QFedAvg(q=0.0, **options), clients_per_round=some), plain) < 1e-12


def test_a_small_q_tends_to_the_uniform_average() -> None:
    plain = run(cf.FedAvg(weighting="uniform", **FULL))
    gaps = [apart(run(cf.QFedAvg(q=q, **FULL)), plain) for q in (1e-2, 1e-4, 1e-6)]
    assert 50 < gaps[0] / gaps[1] < 200 and 50 < gaps[1] / gaps[2] < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [0.01, 0.2, 0.9, 5.0, 40.0])
def test_a_client_without_loss_breaks_nothing(q: float, dtype: torch.dtype) -> None:
    """F^(q-1) has no bound as F goes to 0: client a's loss is 0 to the last bit, b's is large."""
    x = torch.eye(2, dtype=dtype).repeat(4, 1)
    y = torch.arange(8) % 2
    model = nn.Linear(2, 2, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(400 * torch.eye(2))
    fed = cf.FederatedData({"a": (x, y), "b": (x, 1 - y)})
    result = cf.fit(model, fed, cf.QFedAvg(q=q, lr=0.1, local_steps=2, batch_size=None), rounds=2)
    weights = recorded(result, "weight")[0]
    assert np.isfinite(weights).all() and weights[0] < weights[1] <= 1
    # With F_b = 400, two steps of size lr, and g_a = 0: what is left is b's own ratio.
    F, g = 400.0, 2 * math.sqrt(4 * 0.25)
    h = q * F ** (q - 1) * g**2 + 10 * F**q + 10 * 1e-10**q
    assert weights[1] == pytest.approx(10 * F**q / h, rel=1e-4)


def test_clients_are_drawn_by_their_samples_where_asked() -> None:
    """One of five clients per round, with probabilities in proportion to their samples."""

    class Engine:
        names, sizes = tuple("abcde"), np.array(list(SIZES.values()))

    draws = [RoundContext(s, 0, 1, Engine()).sample_by(Engine.sizes)[0] for s in range(1, 4001)]  # type: ignore[arg-type]
    shares = np.bincount(draws, minlength=5) / len(draws)
    expected = Engine.sizes / Engine.sizes.sum()
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected / len(draws))).all()


def test_drawing_by_samples_changes_who_takes_part_and_nothing_else() -> None:
    uniform, by_samples = (
        run(cf.QFedAvg(q=0.2, sampling=sampling, **FULL), 12, clients_per_round=1)
        for sampling in ("uniform", "samples")
    )
    often = [sum(weights > 0) for weights in np.transpose(recorded(by_samples, "weight"))]
    assert sum(often) == 12 and often[2] > often[3]
    assert apart(uniform, by_samples) > 1e-3


def test_a_negative_loss_is_refused_with_advice() -> None:
    """F^q is undefined; the error must name the cause, and not blame a client's reply."""
    data = {name: (torch.randn(6, 2), torch.randn(6)) for name in "ab"}
    with pytest.raises(cf.ComfedlError, match="negative"):
        cf.fit(
            nn.Linear(2, 1),
            cf.FederatedData(data),
            cf.QFedAvg(q=1.0, lr=0.01),
            rounds=1,
            loss=lambda output, y: (output[:, 0] - y).square().mean() - 50,
        )


def test_with_q_0_a_negative_loss_is_no_matter() -> None:
    """q = 0 is the plain average, whatever the sign of the loss."""
    model, data = nn.Linear(2, 1), {name: (torch.randn(6, 2), torch.randn(6)) for name in "ab"}

    def shifted(output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0] - y).square().mean() - 50

    plain, zero = (
        cf.fit(model, cf.FederatedData(data), algorithm, rounds=2, loss=shifted)
        for algorithm in (cf.FedAvg(weighting="uniform", lr=0.01), cf.QFedAvg(q=0.0, lr=0.01))
    )
    assert apart(plain, zero) < 1e-6


@pytest.mark.parametrize("options", [{"q": -0.1}, {"q": math.nan}, {"sampling": "sizes"}])
def test_values_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(cf.ConfigError):
        cf.QFedAvg(**options)  # type: ignore[arg-type]
