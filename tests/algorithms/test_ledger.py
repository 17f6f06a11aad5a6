"""What travels in a round, counted in floats, against the table of section 0.

d is the number of the model's floats; m of n clients take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from helpers.reference import CLASSES, FEATURES, SIZES, Normed, batchable, linear, recorded, run, train_data

N, ROUNDS = len(SIZES), 3
d = CLASSES * (FEATURES + 1)
COMMON: dict[str, Any] = {"lr": 0.1, "local_steps": 3, "batch_size": 4}

# Per round with m participants: floats down and floats up, and whole numbers of 4 bytes down.
Count = Callable[[int], tuple[int, int, int]]

TABLE: list[tuple[Algorithm, Count]] = [
    (cf.FedAvg(**COMMON), lambda m: (m * d, m * d, 0)),
    (cf.ComFedL(**COMMON), lambda m: (m * d, m * d, 0)),
    (cf.ComFedL(outer=cf.KL(0.5), **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.ComFedL(outer=cf.KL(0.5), step="safe", **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.Robust(**COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.Robust(offset=cf.offset.Generalisation(1.0), **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.ComFedL(outer=cf.KL(0.5, cap=1.5), **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.ComFedL(outer=cf.CVaR(0.5), **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.ComFedL(outer=cf.ChiSquare(0.5), **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.ComFedL(outer=cf.Exp(5.0), **COMMON), lambda m: (m * d, m * d, 0)),
    (cf.ComFedL(outer=cf.Power(0.5), **COMMON), lambda m: (m * d, m * d, 0)),
    (cf.DRFA(**COMMON), lambda m: (2 * m * d, 2 * m * d + m, m)),
    (cf.DRFA(whole_loss=True, **COMMON), lambda m: (2 * m * d, 2 * m * d + m, m)),
    (cf.QFedAvg(**COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.QFedAvg(sampling="samples", **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.TERM(2.0, **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.TERM(-2.0, **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.FedMAML(0.1, **COMMON), lambda m: (m * d, m * d, 0)),
    (cf.FedMAML(0.1, "first", **COMMON), lambda m: (m * d, m * d, 0)),
    (cf.FedMAML(0.1, "hessian-free", **COMMON), lambda m: (m * d, m * d, 0)),
    (cf.TRMAML(0.1, **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.FedProx(**COMMON), lambda m: (m * d, m * d, 0)),
    (cf.Ditto(**COMMON), lambda m: (m * d, m * d, 0)),
    (cf.DAMAML(0.1, **COMMON), lambda m: (m * d, m * (d + 1), 0)),
    (cf.DAMAML(0.1, 4.0, outer="exp", **COMMON), lambda m: (m * d, m * d, 0)),
]


def name_of(row: Any) -> str:
    return type(row).__name__ if isinstance(row, Algorithm) else ""


@pytest.mark.parametrize(("m", "dtype", "size"), [(2, torch.float32, 4), (N, torch.float64, 8)])
@pytest.mark.parametrize(("method", "count"), TABLE, ids=name_of)
def test_the_table(method: Algorithm, count: Count, m: int, dtype: torch.dtype, size: int) -> None:
    result = cf.fit(linear().to(dtype), cf.FederatedData(train_data()), method, ROUNDS, clients_per_round=m)
    down, up, whole = count(m)
    assert result.traffic == {"down_bytes": ROUNDS * (size * down + 4 * whole), "up_bytes": ROUNDS * size * up}
    # The sum so far is recorded, and stays what it is where nobody looks.
    assert [row["up_bytes"] for row in result.rounds] == [size * up * (i + 1) for i in range(ROUNDS)]
    assert [row["down_bytes"] for row in result.rounds] == [(size * down + 4 * whole) * (i + 1) for i in range(ROUNDS)]
    assert result.summary()["traffic"] == result.traffic


def test_afl_hears_from_all_clients() -> None:
    result = run(cf.AFL(**COMMON), ROUNDS)
    assert result.traffic == {"down_bytes": 8 * ROUNDS * N * d, "up_bytes": 8 * ROUNDS * N * (d + 1)}


@pytest.mark.parametrize("rounds", [1, 4])
def test_an_estimated_baseline_is_one_number_a_client_once(rounds: int) -> None:
    """And the model once more, for the client to go on from."""
    result = run(cf.Robust(offset=cf.offset.Excess(steps=3), **COMMON), rounds)
    assert result.traffic == {"down_bytes": 8 * (rounds + 1) * N * d, "up_bytes": 8 * N * (rounds * (d + 1) + 1)}


@pytest.mark.parametrize("level", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("m", [3, N])
def test_deltafl_hears_models_only_from_clients_in_the_tail(level: float, m: int) -> None:
    """d down and one loss up for each of m; then d up from those that are kept, who have the model already."""
    result = run(cf.DeltaFL(level, **COMMON), ROUNDS, clients_per_round=m)
    kept = sum(np.count_nonzero(weights) for weights in recorded(result, "weight"))
    assert result.traffic == {"down_bytes": 8 * ROUNDS * m * d, "up_bytes": 8 * (ROUNDS * m + kept * d)}
    assert kept == ROUNDS * m if level == 0 else kept < ROUNDS * m


@pytest.mark.parametrize("m", [1, 3, N])
def test_drfa_moves_twice_what_fedavg_moves(m: int) -> None:
    """Invariant 12: twice the floats, and m losses and m times t' on top."""
    plain, drfa = (
        run(method, ROUNDS, clients_per_round=m).traffic for method in (cf.FedAvg(**COMMON), cf.DRFA(**COMMON))
    )
    assert sum(drfa.values()) == 2 * sum(plain.values()) + ROUNDS * m * (8 + 4)


@pytest.mark.parametrize("m", [2, N])
def test_scaffold_sends_a_control_variate_beside_each_model(m: int) -> None:
    """Twice FedAvg's floats; control variates have no buffers."""
    result = run(cf.Scaffold(**COMMON), ROUNDS, clients_per_round=m)
    assert result.traffic == {"down_bytes": 8 * ROUNDS * m * 2 * d, "up_bytes": 8 * ROUNDS * m * 2 * d}
    normed = Normed(dtype=torch.float32)
    floats = sum(part.numel() for part in normed.parameters())
    traffic = cf.fit(normed, batchable(), cf.Scaffold(**COMMON), ROUNDS, clients_per_round=m).traffic
    assert set(traffic.values()) == {ROUNDS * m * (4 * (2 * floats + 2 * 6) + 8)}


def test_every_method_is_in_the_tables_above() -> None:
    assert {type(method) for method, _ in TABLE} | {cf.AFL, cf.DeltaFL, cf.Scaffold} == {*ALGORITHMS.values()}


@pytest.mark.parametrize(("method", "count"), TABLE, ids=name_of)
def test_buffers_travel_too(method: Algorithm, count: Count) -> None:
    """BatchNorm's mean and variance count as floats beside the parameters, its counter as 8 bytes."""
    model = Normed(dtype=torch.float32)
    floats = sum(part.numel() for part in model.parameters()) + 2 * 6
    result = cf.fit(model, batchable(), method, ROUNDS, clients_per_round=2)
    down, up, whole = count(2)
    models_down, models_up = round(down / d), round(up / d)
    numbers = up - models_up * d
    assert result.traffic == {
        "down_bytes": ROUNDS * (models_down * (4 * floats + 8) + 4 * whole),
        "up_bytes": ROUNDS * (models_up * (4 * floats + 8) + 4 * numbers),
    }


@pytest.mark.parametrize("method", [cf.FedAvg(**COMMON), cf.Ditto(**COMMON), cf.DRFA(**COMMON)], ids=name_of)
def test_neither_evaluation_nor_personal_models_are_counted(method: Algorithm) -> None:
    often, seldom = (run(method, 4, eval_every=every) for every in (1, 4))
    often.personal("a")
    assert often.traffic == seldom.traffic == {key: often.rounds[-1][key] for key in ("up_bytes", "down_bytes")}


def test_the_objective_and_the_personal_model_cost_nothing() -> None:
    """What only the records need is not sent: more personal steps, the same traffic."""
    bare, rich = (run(cf.FedAvg(personal_steps=steps, **COMMON)).traffic for steps in (0, 5))
    assert bare == rich


def test_what_a_method_says_it_sends() -> None:
    """The words of ``comfedl list algorithms`` agree with what is counted above."""
    one_more = {"robust", "drfa", "afl", "q-fedavg", "term", "tr-maml", "delta-fl"}
    for name, method in ALGORITHMS.items():
        assert "down d" in method.sends and "up" in method.sends
        assert ("1 loss" in method.sends and "(+ 1" not in method.sends) == (name in one_more), name
