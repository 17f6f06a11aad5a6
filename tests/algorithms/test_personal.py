"""Personal models: by hand, as recorded, as written; and evaluation without effect on training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.core.learner import Model
from helpers.reference import (
    NAMES,
    SIZES,
    Client,
    Normed,
    by_hand_clients,
    gradient,
    linear,
    locally,
    loss,
    matrix,
    recorded,
    run,
    same,
    start,
    train_data,
)

LR, STEPS, ALPHA = 0.3, 3, 0.2
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
BATCHED: dict[str, Any] = {**FULL, "batch_size": 4}


def methods(options: dict[str, Any]) -> dict[str, Algorithm]:
    """Every method, with hyperparameters at which it differs from the others."""
    return {
        "fedavg": cf.FedAvg(**options),
        "comfedl": cf.ComFedL(**options),
        "comfedl kl": cf.ComFedL(outer=cf.KL(0.3), **options),
        "comfedl exp": cf.ComFedL(outer=cf.Exp(4.0), **options),
        "comfedl cvar": cf.ComFedL(outer=cf.CVaR(0.5), **options),
        "comfedl adapt": cf.ComFedL(inner=cf.Adapt(ALPHA), **options),
        "drfa": cf.DRFA(**options),
        "afl": cf.AFL(**options),
        "q-fedavg": cf.QFedAvg(q=1.0, **options),
        "term": cf.TERM(-1.0, **options),
        "delta-fl": cf.DeltaFL(0.5, **options),
        "fedmaml": cf.FedMAML(ALPHA, **options),
        "fedmaml first": cf.FedMAML(ALPHA, "first", **options),
        "fedmaml hessian-free": cf.FedMAML(ALPHA, "hessian-free", **options),
        "tr-maml": cf.TRMAML(ALPHA, **options),
        "damaml": cf.DAMAML(ALPHA, **options),
        "ditto": cf.Ditto(**options),
    }


ALL = list(methods(FULL))
META = {"comfedl adapt", "fedmaml", "fedmaml first", "fedmaml hessian-free", "tr-maml", "damaml"}


# By hand.


def stepped(result: cf.Result, client: Client, rate: float, steps: int) -> np.ndarray:
    return locally(matrix(result.params), lambda V: gradient(V, client), rate, steps)[-1]


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("name", [name for name in ALL if name != "ditto"])
def test_by_hand(name: str, steps: int | None) -> None:
    """One step of size lr from the global model on the client's train data; the adapting step of a meta-learner."""
    result = run(methods({**FULL, "personal_steps": steps})[name], 2)
    rate = ALPHA if name in META else LR
    for client, data in zip(NAMES, by_hand_clients(), strict=True):
        expected = stepped(result, data, rate, 1 if steps is None else steps)
        np.testing.assert_allclose(matrix(result.personal(client)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [cf.FedMAML, cf.TRMAML, cf.DAMAML])
def test_a_meta_learner_adapts_by_as_many_steps_as_it_trained_for(make: Any) -> None:
    result = run(make(ALPHA, adapt_steps=3, **FULL), 2)
    for client, data in zip(NAMES, by_hand_clients(), strict=True):
        np.testing.assert_allclose(matrix(result.personal(client)), stepped(result, data, ALPHA, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ALL if name != "ditto"])
def test_no_steps_are_the_global_model(name: str) -> None:
    result = run(methods({**BATCHED, "personal_steps": 0})[name], 2)
    for client in NAMES:
        assert all(torch.equal(part, result.params[key]) for key, part in result.personal(client).items())
    assert not any("personal" in key for key in result.rounds[-1])


def test_the_personal_model_starts_from_the_model_that_is_reported() -> None:
    """AFL reports the average of its iterates."""
    average, last = (run(cf.AFL(average=average, **FULL), 3) for average in (True, False))
    for result in (average, last):
        expected = stepped(result, by_hand_clients()[1], LR, 1)
        np.testing.assert_allclose(matrix(result.personal("b")), expected, rtol=0, atol=1e-12)
    assert not torch.equal(average.personal("b")["weight"], last.personal("b")["weight"])


def test_somebody_unknown() -> None:
    with pytest.raises(cf.ConfigError, match="not a client"):
        run(cf.FedAvg(**FULL), 1).personal("z")


# As recorded.


def judged(module: nn.Module, model: Model, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Loss and accuracy of a model on data, with the module's own functions and nothing of comfedl."""
    with torch.no_grad():
        output = functional_call(module.eval(), {**model["params"], **model["buffers"]}, (x,))
        return float(cross_entropy(output, y)), float((output.argmax(dim=1) == y).double().mean())


def splits() -> cf.FederatedData:
    """Train, validation and test data; not everybody has them all."""
    everything = train_data({name: 24 + size for name, size in SIZES.items()})
    cut = {
        "train": {name: (x[24:], y[24:]) for name, (x, y) in everything.items()},
        "validation": {name: (x[:10], y[:10]) for name, (x, y) in everything.items()},
        "test": {name: (x[10:24], y[10:24]) for name, (x, y) in everything.items() if name != "b"},
    }
    return cf.FederatedData(**cut)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("name", ALL)
def test_the_records_agree_with_the_personal_models(name: str, batch_size: int | None) -> None:
    """What is recorded in the last round is the score of exactly the model that ``personal`` gives."""
    fed, module = splits(), linear()
    method = methods({**FULL, "batch_size": batch_size, "personal_steps": 2})[name]
    result = cf.fit(module, fed, method, rounds=3, eval_every=2)
    rows = {row["client"]: row for row in result.clients if row["round"] == 3}
    for client in NAMES:
        own = result.personal_model(client)
        for split in ("train", "validation", "test"):
            data = fed.split(split)
            if client not in data:
                assert f"{split}.personal_loss" not in rows[client]
                continue
            found = judged(module, own, *data[client])
            assert rows[client][f"{split}.personal_loss"] == pytest.approx(found[0], abs=1e-12)
            assert rows[client][f"{split}.personal_accuracy"] == pytest.approx(found[1], abs=1e-12)
    for metric in ("loss", "accuracy"):
        numbers = [row[f"validation.personal_{metric}"] for row in rows.values()]
        last = result.rounds[-1]
        assert last[f"validation.personal_{metric}.mean"] == pytest.approx(np.mean(numbers))
        worst = max(numbers) if metric == "loss" else min(numbers)
        assert last[f"validation.personal_{metric}.worst"] == pytest.approx(worst)


@pytest.mark.parametrize(("running", "dropout"), [(True, 0.0), (True, 0.4), (False, 0.4)])
@pytest.mark.parametrize("name", ["fedavg", "comfedl kl", "fedmaml", "damaml", "ditto"])
def test_the_records_agree_with_batch_norm_and_dropout(name: str, running: bool, dropout: float) -> None:
    """Personal models have their own buffers, and their steps always see the same dropout."""
    fed, module = splits(), Normed(running, dropout)
    result = cf.fit(module, fed, methods({**BATCHED, "personal_steps": 2})[name], rounds=2)
    for client, recorded_loss in zip(NAMES, recorded(result, "validation.personal_loss")[-1], strict=True):
        own = result.personal_model(client)
        assert judged(Normed(running, dropout), own, *fed.validation[client])[0] == pytest.approx(recorded_loss)


def test_dittos_personal_loss_is_that_of_the_model_kept() -> None:
    result = run(cf.Ditto(lam=0.5, **BATCHED), 3)
    expected = [loss(matrix(result.personal(name)), data) for name, data in zip(NAMES, by_hand_clients(), strict=True)]
    np.testing.assert_allclose(recorded(result, "train.personal_loss")[-1], expected, atol=1e-12)
    assert np.abs(matrix(result.personal("a")) - start()).max() > 0.1


# As written.

ODD = ["../x", "a/b", "a%2Fb", "é", ".", "..", "a", "a b", "a.b", "-x", "\\", "a\nb", "x.safetensors", "*"]


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedmaml"])
def test_files(tmp_path: Path, name: str) -> None:
    """One file per client with the exact tensors, whatever the clients' names; nothing outside ``personal/``."""
    rng = np.random.default_rng(0)
    data = {client: (rng.normal(size=(6, 4)), rng.integers(0, 3, size=6)) for client in ODD}
    result = cf.fit(Normed(), cf.FederatedData(data), methods(BATCHED)[name], rounds=2, out=tmp_path / "deep" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]
    files = list((tmp_path / "deep" / "run" / "personal").iterdir())
    assert len(files) == len(ODD) and all(path.is_file() and path.suffix == ".safetensors" for path in files)
    assert not any(path.name.startswith(".") or {*path.name} & {"/", "\\", "*", "\n"} for path in files)
    written = [load_file(path) for path in files]
    for client in ODD:
        own = result.personal_model(client)
        tensors = {**own["params"], **own["buffers"]}
        matches = [
            found
            for found in written
            if found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)
        ]
        assert len(matches) == 1, client


def test_the_global_model_beside_them(tmp_path: Path) -> None:
    result = cf.fit(linear(), splits(), cf.FedAvg(**BATCHED), rounds=2, out=tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(part, written[name]) for name, part in result.params.items())
    own = load_file(tmp_path / "personal" / "a.safetensors")
    assert all(torch.equal(part, own[name]) for name, part in result.personal("a").items())
    assert not torch.equal(own["weight"], written["weight"])


@pytest.mark.parametrize("name", ["x" * 300, "市立病院" * 10])
def test_a_long_name_does_not_cost_the_run(tmp_path: Path, name: str) -> None:
    """A file system takes names of 255 bytes, and a letter of most of the world's scripts is nine when encoded."""
    data = {client: (np.eye(4), np.array([0, 1, 2, 0])) for client in (name, name + "2")}
    cf.fit(linear(), cf.FederatedData(data), cf.FedAvg(**BATCHED), rounds=1, out=tmp_path / "run")
    assert len(list((tmp_path / "run" / "personal").iterdir())) == 2


# Evaluation and training.


@pytest.mark.parametrize("name", ALL)
def test_evaluation_never_changes_training(name: str) -> None:
    """Evaluated after every round or after the last alone, with BatchNorm and dropout: the same to the bit."""
    fed = splits()
    data = cf.FederatedData({client: fed.validation[client] for client in NAMES})
    some = None if name == "afl" else 3
    often, seldom = (
        cf.fit(Normed(dropout=0.3), data, methods(BATCHED)[name], rounds=5, clients_per_round=some, eval_every=every)
        for every in (1, 5)
    )
    assert same(often, seldom) and often.traffic == seldom.traffic
    assert often.rounds[-1] == seldom.rounds[-1] and often.clients[-len(NAMES) :] == seldom.clients
    assert [row["round"] for row in often.rounds] == [1, 2, 3, 4, 5]
    for client in NAMES:
        one, other = often.personal(client), seldom.personal(client)
        assert all(torch.equal(part, other[key]) for key, part in one.items())
    assert all(math.isfinite(value) for value in often.rounds[-1].values())


def test_evaluation_leaves_torchs_own_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run(cf.Ditto(**BATCHED), 2).personal("a")
    assert torch.equal(torch.rand(3), expected)
