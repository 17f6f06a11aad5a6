"""Ditto, section 6: the global model is FedAvg's, the personal ones stay with their clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from helpers.reference import (
    NAMES,
    SIZES,
    Array,
    Normed,
    batchable,
    by_hand_clients,
    close,
    gradient,
    linear,
    locally,
    loss,
    matrix,
    recorded,
    run,
    same,
    start,
    taking_part,
    train_data,
)

N, LR, STEPS, ROUNDS = len(SIZES), 0.3, 3, 4
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
BATCHED: dict[str, Any] = {**FULL, "batch_size": 4}


def by_hand(lam: float, sets: list[list[int]]) -> tuple[Array, list[Array]]:
    """v <- v - lr (grad f(v) + lam (v - w)), with w as it was received in this round; and plain FedAvg beside it."""
    clients, W, own = by_hand_clients(), start(), [start() for _ in range(N)]
    sizes = np.array(list(SIZES.values()))
    for chosen in sets:
        for k in chosen:
            own[k] = locally(own[k], lambda V, k=k, W=W: gradient(V, clients[k]) + lam * (V - W), LR, STEPS)[-1]
        ends = [locally(W, lambda V, k=k: gradient(V, clients[k]), LR, STEPS)[-1] for k in chosen]
        W = np.tensordot(sizes[chosen] / sizes[chosen].sum(), ends, axes=1)
    return W, own


SOME = [[0, 3], [1, 2], [2, 3], [0, 1]]  # client 4 never takes part


@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("sets", [[list(range(N))] * ROUNDS, SOME])
def test_by_hand(lam: float, sets: list[list[int]]) -> None:
    W, own = by_hand(lam, sets)
    with taking_part(sets):
        result = run(cf.Ditto(lam=lam, **FULL), ROUNDS, clients_per_round=len(sets[0]))
    close(matrix(result.params), W)
    for k, name in enumerate(NAMES):
        np.testing.assert_allclose(matrix(result.personal(name)), own[k], rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        recorded(result, "train.personal_loss")[-1],
        [loss(own[k], client) for k, client in enumerate(by_hand_clients())],
        atol=1e-9,
    )


def test_the_anchor_is_the_model_received() -> None:
    """Not the one that was trained meanwhile, nor that of the first round: those give other models."""
    _, own = by_hand(2.0, [list(range(N))] * ROUNDS)
    clients = by_hand_clients()
    wrong = start()
    for _ in range(ROUNDS):
        wrong = locally(wrong, lambda V: gradient(V, clients[0]) + 2.0 * (V - start()), LR, STEPS)[-1]
    assert np.abs(own[0] - wrong).max() > 1e-2


def test_a_client_that_is_never_chosen_keeps_the_initial_model() -> None:
    with taking_part(SOME):
        result = run(cf.Ditto(**BATCHED), ROUNDS, clients_per_round=2)
    own = result.personal("e")
    assert all(torch.equal(own[name], part) for name, part in linear().named_parameters())
    assert not torch.equal(result.params["weight"], own["weight"])
    assert recorded(result, "train.personal_loss")[-1][4] == pytest.approx(loss(start(), by_hand_clients()[4]))


def test_a_client_that_sits_a_round_out_keeps_its_model() -> None:
    with taking_part(SOME):
        after_one, after_two = (run(cf.Ditto(**BATCHED), rounds, clients_per_round=2) for rounds in (1, 2))
    for name in "ad":  # they took part in the first round only
        assert all(torch.equal(part, after_two.personal(name)[key]) for key, part in after_one.personal(name).items())
    for name in "bc":
        assert not torch.equal(after_one.personal(name)["weight"], after_two.personal(name)["weight"])


@pytest.mark.parametrize("batch_size", [None, 4])
def test_without_lam_it_is_purely_local_training(batch_size: int | None) -> None:
    """Invariant 8: the personal model is that of the client training alone, on the same batches.

    A client alone under FedAvg draws the same batches, for draws are keyed by its name.
    """
    options = {**FULL, "batch_size": batch_size}
    result = run(cf.Ditto(lam=0.0, **options), ROUNDS)
    for name, own in train_data().items():
        alone = cf.fit(linear(), cf.FederatedData({name: own}), cf.FedAvg(**options), ROUNDS)
        for key, part in result.personal(name).items():
            torch.testing.assert_close(part, alone.params[key], rtol=0, atol=1e-12)


def test_a_large_lam_holds_the_personal_models_at_the_global_one() -> None:
    options = {**FULL, "lr": 1e-3, "local_steps": 40}
    loose, tight = (run(cf.Ditto(lam=lam, **options), 2) for lam in (0.0, 500.0))
    received = matrix(run(cf.FedAvg(**options), 1).params)  # the model that the last round began from
    for name in NAMES:
        assert np.abs(matrix(tight.personal(name)) - received).max() < 0.01
    assert max(np.abs(matrix(loose.personal(name)) - received).max() for name in NAMES) > 0.03


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("some", [None, 2])
def test_the_global_path_is_fedavgs(weighting: str, lam: float, some: int | None) -> None:
    """Invariant 8, to the bit, with everything that is recorded of it."""
    plain = run(cf.FedAvg(weighting=weighting, **BATCHED), clients_per_round=some)
    ditto = run(cf.Ditto(lam=lam, weighting=weighting, **BATCHED), clients_per_round=some)
    assert same(plain, ditto) and plain.traffic == ditto.traffic
    for key in ("train.loss", "train.accuracy", "weight"):
        assert [row[key] for row in plain.clients] == [row[key] for row in ditto.clients]


@pytest.mark.parametrize(("running", "dropout"), [(True, 0.0), (False, 0.0), (True, 0.3), (False, 0.3)])
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_the_global_path_is_fedavgs_with_batch_norm_and_dropout(running: bool, dropout: float, lam: float) -> None:
    model = Normed(running, dropout)
    plain, ditto = (
        cf.fit(model, batchable(), method, rounds=3, clients_per_round=3)
        for method in (cf.FedAvg(**BATCHED), cf.Ditto(lam=lam, **BATCHED))
    )
    assert same(plain, ditto)


def test_personal_models_have_their_own_running_statistics() -> None:
    """They are those of the client's own path: with lam 0, of training alone."""
    result = cf.fit(Normed(), batchable(), cf.Ditto(lam=0.0, **BATCHED), rounds=3)
    for name in NAMES:
        alone = cf.fit(
            Normed(), cf.FederatedData({name: batchable().train[name]}), cf.FedAvg(**BATCHED), rounds=3
        ).buffers
        found = result.personal_model(name)["buffers"]
        for key, buffer in alone.items():
            torch.testing.assert_close(found[key], buffer, rtol=0, atol=1e-12)
        assert not torch.equal(found["layers.1.running_mean"], result.buffers["layers.1.running_mean"])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_evaluation_leaves_the_personal_models_alone(dropout: float) -> None:
    model = Normed(dropout=dropout)
    often, seldom = (
        cf.fit(model, batchable(), cf.Ditto(**BATCHED), rounds=5, clients_per_round=3, eval_every=every)
        for every in (1, 5)
    )
    assert same(often, seldom)
    for name in NAMES:
        one, other = often.personal_model(name), seldom.personal_model(name)
        for part in ("params", "buffers"):
            assert all(torch.equal(tensor, other[part][key]) for key, tensor in one[part].items())
    assert often.clients[-N:] == seldom.clients


def test_asking_for_a_personal_model_changes_nothing() -> None:
    result = run(cf.Ditto(**BATCHED))
    first, again = result.personal("a"), result.personal("a")
    assert all(torch.equal(part, again[key]) for key, part in first.items())


def test_personal_models_that_diverge_are_found_when_they_do_and_lam_is_named() -> None:
    """lr * lam = 3 is past the stable 2: the personal models grow without bound while the global one is well.

    The error names the round in which it happened, whether or not anybody was looking.
    """
    errors = []
    for every in (1, 40):
        with pytest.raises(cf.Diverged, match="lam") as error:
            cf.fit(
                linear().float(),
                cf.FederatedData(train_data()),
                cf.Ditto(lam=30.0, lr=0.1),
                rounds=40,
                eval_every=every,
            )
        errors.append(error.value.round)
    assert errors[0] == errors[1] < 40


def test_a_negative_lam_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match="lam"):
        cf.Ditto(lam=-0.1)
