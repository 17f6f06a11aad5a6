"""fit(): the result of a run, and a clear typed error for every mistake, with nothing written."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.models import zoo
from comfedl.utils.fingerprint import fingerprint

NAN, INF = float("nan"), float("inf")
STATISTICS = {"mean", "worst", "worst10", "std"}


def linear(seed: int = 0, outputs: int = 3) -> nn.Module:
    """A model for ``three_clients``, which have 4 features and 3 labels in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(4, outputs).double()


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


# The result of a run.


@pytest.mark.parametrize(
    ("rounds", "eval_every", "evaluated"),
    [(4, 1, [1, 2, 3, 4]), (4, 2, [2, 4]), (5, 2, [2, 4, 5]), (3, 100, [3]), (1, 1, [1])],
)
def test_rows_of_evaluated_rounds(
    three_clients: cf.FederatedData, rounds: int, eval_every: int, evaluated: list[int]
) -> None:
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=rounds, eval_every=eval_every)
    assert [row["round"] for row in result.rounds] == evaluated
    assert [(row["round"], row["client"]) for row in result.clients] == [(r, c) for r in evaluated for c in "abc"]
    assert result.summary()["rounds"] == rounds


def test_evaluating_less_often_changes_no_number(three_clients: cf.FederatedData) -> None:
    often = cf.fit(linear(), three_clients, cf.ComFedL(outer=cf.KL(0.2)), rounds=4)
    seldom = cf.fit(linear(), three_clients, cf.ComFedL(outer=cf.KL(0.2)), rounds=4, eval_every=3)
    assert seldom.rounds == [row for row in often.rounds if row["round"] in (3, 4)]
    assert all(torch.equal(often.params[name], seldom.params[name]) for name in often.params)


def test_the_keys_of_a_rounds_row(three_clients: cf.FederatedData) -> None:
    row = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=1).rounds[0]
    documented = {
        f"{split}.{metric}.{number}"
        for split in ("train", "validation")
        for metric in ("loss", "accuracy")
        for number in STATISTICS
    } | {"round", "objective", "effective_clients", "weights_kl", "participants", "up_bytes", "down_bytes"}
    assert documented <= set(row)
    assert all(key.split(".")[-1] in STATISTICS for key in set(row) - documented)
    assert not any(key.startswith("test.") for key in row)


def test_the_keys_of_a_clients_row(three_clients: cf.FederatedData) -> None:
    fed = cf.FederatedData(dict(three_clients.train), {"b": three_clients.train["b"]})
    rows = cf.fit(linear(), fed, cf.FedAvg(), rounds=1).clients
    for row in rows:
        assert {"round", "client", "train.loss", "train.accuracy", "weight"} <= set(row)
        assert ("validation.loss" in row) == ("validation.accuracy" in row) == (row["client"] == "b")


def test_a_rounds_row_is_made_of_its_clients_rows(three_clients: cf.FederatedData) -> None:
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=2)
    for row in result.rounds:
        clients = [client for client in result.clients if client["round"] == row["round"]]
        losses = [float(client["validation.loss"]) for client in clients]  # type: ignore[arg-type]
        accuracies = [float(client["train.accuracy"]) for client in clients]  # type: ignore[arg-type]
        assert row["validation.loss.worst"] == max(losses)
        assert row["train.accuracy.worst"] == min(accuracies)
        assert row["validation.loss.mean"] == pytest.approx(sum(losses) / 3)


def test_loss_samples_bounds_what_train_scores_are_taken_on(three_clients: cf.FederatedData) -> None:
    few, whole = (
        cf.fit(linear(), three_clients, cf.FedAvg(batch_size=4, loss_samples=samples), rounds=2)
        for samples in (3, None)
    )
    assert all(torch.equal(few.params[name], whole.params[name]) for name in whole.params)
    for a, b in zip(few.clients, whole.clients, strict=True):
        assert float(a["train.accuracy"]) * 3 == pytest.approx(round(float(a["train.accuracy"]) * 3))
        assert a["train.loss"] != b["train.loss"] and a["validation.loss"] == b["validation.loss"]


def test_the_numbers_of_a_row_are_those_of_the_model(three_clients: cf.FederatedData) -> None:
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=3)
    for row in result.clients[-3:]:
        x, y = three_clients.train[str(row["client"])]
        output = x @ result.params["weight"].T + result.params["bias"]
        assert row["train.loss"] == pytest.approx(float(nn.functional.cross_entropy(output, y)))
        assert row["train.accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))


@pytest.mark.filterwarnings("ignore:With one client per round")
@pytest.mark.parametrize("method", [cf.FedAvg(), cf.FedAvg(weighting="uniform"), cf.ComFedL(outer=cf.KL(0.1))])
@pytest.mark.parametrize("participants", [1, 2, 3, None])
def test_who_takes_part_and_with_which_weight(
    three_clients: cf.FederatedData, method: Any, participants: int | None
) -> None:
    result = cf.fit(linear(), three_clients, method, rounds=4, clients_per_round=participants)
    for row in result.rounds:
        weights = [float(c["weight"]) for c in result.clients if c["round"] == row["round"]]  # type: ignore[arg-type]
        assert row["participants"] == (participants or 3) >= sum(weight > 0 for weight in weights)
        assert 0 < sum(weights) <= 1 + 1e-9
        assert 1 - 1e-9 <= float(row["effective_clients"]) <= (participants or 3) + 1e-9  # type: ignore[arg-type]
        if isinstance(method, cf.FedAvg):
            assert sum(weights) == pytest.approx(1)


def test_traffic_is_what_travels(three_clients: cf.FederatedData) -> None:
    size = 15 * 8  # float64
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=5, clients_per_round=2)
    assert result.traffic == {"up_bytes": 5 * 2 * size, "down_bytes": 5 * 2 * size}
    assert [row["down_bytes"] for row in result.rounds] == [2 * size * number for number in range(1, 6)]
    robust = cf.fit(linear(), three_clients, cf.ComFedL(outer=cf.KL(0.2)), rounds=5, clients_per_round=2)
    assert robust.traffic == {"up_bytes": 5 * 2 * (size + 8), "down_bytes": 5 * 2 * size}


def test_the_summary_is_the_last_row_nested(three_clients: cf.FederatedData) -> None:
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=3)
    summary, last = result.summary(), result.rounds[-1]
    for split in ("train", "validation"):
        for metric in ("loss", "accuracy"):
            assert set(summary[split][metric]) == STATISTICS
            assert all(summary[split][metric][key] == last[f"{split}.{metric}.{key}"] for key in STATISTICS)
    assert summary["traffic"] == result.traffic
    assert 0 < summary["seconds"] < 60
    assert json.loads(json.dumps(summary)) == summary


def test_the_same_seed_gives_the_same_run_and_another_seed_another(three_clients: cf.FederatedData) -> None:
    def run(seed: int) -> cf.Result:
        return cf.fit(linear(), three_clients, cf.FedAvg(batch_size=2), rounds=3, seed=seed, clients_per_round=2)

    first, again, other = run(0), run(0), run(1)
    assert first.rounds == again.rounds and first.clients == again.clients
    assert torch.equal(first.params["weight"], again.params["weight"])
    assert not torch.equal(first.params["weight"], other.params["weight"])


def test_the_readers_model_and_torchs_generator_are_left_as_they_were(three_clients: cf.FederatedData) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    result = cf.fit(model, three_clients, cf.FedAvg(batch_size=4), rounds=2)
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    assert model.training and all(part.grad is None for part in model.parameters())
    assert set(result.params) | set(result.buffers) == set(before)
    assert not torch.equal(result.params["0.weight"], before["0.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_keeps_its_dtype(three_clients: cf.FederatedData, dtype: torch.dtype) -> None:
    result = cf.fit(nn.Linear(4, 3).to(dtype), three_clients, cf.ComFedL(outer=cf.KL(0.2)), rounds=1)
    assert {part.dtype for part in result.params.values()} == {dtype}


def test_the_order_in_which_clients_are_given_does_not_matter(three_clients: cf.FederatedData) -> None:
    turned = cf.FederatedData({name: three_clients.train[name] for name in "cab"})
    straight = cf.FederatedData({name: three_clients.train[name] for name in "abc"})
    ours, theirs = (cf.fit(linear(), fed, cf.FedAvg(), rounds=2) for fed in (turned, straight))
    assert ours.clients == theirs.clients


def test_lists_and_arrays_are_data_too() -> None:
    x, y = samples(6)
    given: list[Any] = [(x, y), (x.numpy(), y.numpy()), (x.tolist(), y.tolist()), [x, y.numpy().astype(np.uint8)]]
    results = [
        cf.fit(nn.Linear(4, 3), cf.FederatedData({"a": client}), cf.FedAvg(local_steps=1), rounds=1).clients[0]
        for client in given
    ]
    assert all(set(row) == set(results[0]) for row in results)


def test_an_unknown_client_has_no_personal_model(three_clients: cf.FederatedData) -> None:
    result = cf.fit(linear(), three_clients, cf.FedAvg(), rounds=1)
    assert set(result.personal("a")) == set(result.params)
    with pytest.raises(cf.ConfigError, match=r"'z' is not a client.*a, b, c"):
        result.personal("z")


def test_callbacks_hear_of_everything_in_order(three_clients: cf.FederatedData) -> None:
    heard: list[object] = []

    class Listener(cf.Callback):
        def started(self) -> None:
            heard.append("started")

        def round_done(self, number: int) -> None:
            heard.append(number)

        def evaluated(self, row: Any, clients: Any) -> None:
            heard.append(("evaluated", row["round"], len(clients)))

        def finished(self, result: cf.Result) -> None:
            heard.append(result.traffic["up_bytes"] > 0)

        def failed(self, error: BaseException) -> None:
            heard.append("failed")

    cf.fit(linear(), three_clients, cf.FedAvg(), rounds=3, eval_every=2, callbacks=[Listener()])
    assert heard == ["started", 1, ("evaluated", 2, 3), 2, ("evaluated", 3, 3), 3, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_callbacks_hear_of_a_failure(three_clients: cf.FederatedData, error: type[BaseException]) -> None:
    heard: list[object] = []

    class Stops(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 2:
                raise error

        def failed(self, error: BaseException) -> None:
            heard.append(type(error))

        def finished(self, result: cf.Result) -> None:
            heard.append("finished")

    with pytest.raises(error):
        cf.fit(linear(), three_clients, cf.FedAvg(), rounds=5, callbacks=[Stops()])
    assert heard == [error]


# What is wrong with the arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, ["rounds", "0", "1 or more"]),
        ({"rounds": -1}, ["rounds", "-1"]),
        ({"rounds": 1.5}, ["rounds", "1.5", "integer"]),
        ({"rounds": True}, ["rounds", "True", "integer"]),
        ({"rounds": "5"}, ["rounds", "'5'", "integer"]),
        ({"seed": -1}, ["seed", "-1", "0 or more"]),
        ({"seed": None}, ["seed", "None"]),
        ({"eval_every": 0}, ["eval_every", "0", "1 or more"]),
        ({"clients_per_round": 0}, ["clients_per_round", "0", "1 or more"]),
        ({"clients_per_round": 4}, ["clients_per_round", "4", "3 clients", "from 1 to 3"]),
        ({"clients_per_round": 1.5}, ["clients_per_round", "1.5"]),
        ({"engine": "embeded"}, ["engine", "'embeded'", "did you mean 'embedded'?"]),
        ({"loss": "crossentropy"}, ["loss", "'crossentropy'", "did you mean 'cross_entropy'?"]),
        ({"loss": 3}, ["loss", "3", "function"]),
        ({"algorithm": "fedavg"}, ["algorithm", "'fedavg'", "Robust("]),
        ({"algorithm": cf.FedAvg}, ["algorithm", "FedAvg", "Robust("]),
        ({"fed": {"a": samples(3)}}, ["fed", "dict", "FederatedData("]),
        ({"fed": None}, ["fed", "NoneType", "FederatedData("]),
        ({"model": None}, ["model", "NoneType", "nn.Module"]),
        ({"model": nn.Linear}, ["model", "type", "nn.Module"]),
        ({"model": nn.Flatten()}, ["no parameters"]),
        ({"model": {}}, ["model", "Composition"]),
        ({"model": {"w": torch.zeros(3)}}, ["dict", "Composition"]),
        ({"model": {"w": [1.0]}}, ["'w'", "tensor"]),
        ({"model": {"w": torch.zeros(3, dtype=torch.long)}}, ["'w'", "floating-point tensor"]),
    ],
)
def test_an_argument_that_cannot_be_is_named(
    three_clients: cf.FederatedData, tmp_path: Path, arguments: dict[str, Any], words: list[str]
) -> None:
    out = tmp_path / "runs" / "one"
    everything: dict[str, Any] = {
        "model": linear(),
        "fed": three_clients,
        "algorithm": cf.FedAvg(),
        "rounds": 1,
        "out": out,
    }
    with pytest.raises(cf.ConfigError) as error:
        cf.fit(**{**everything, **arguments})
    assert [word for word in words if word not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cf.FedAvg(lr=0), ["lr", "0", "above 0"]),
        (lambda: cf.FedAvg(lr=-1.0), ["lr", "-1.0", "above 0"]),
        (lambda: cf.FedAvg(lr=NAN), ["lr", "nan", "above 0"]),
        (lambda: cf.FedAvg(lr=INF), ["lr", "inf", "above 0"]),
        (lambda: cf.FedAvg(lr="0.1"), ["lr", "'0.1'", "above 0"]),
        (lambda: cf.FedAvg(lr=True), ["lr", "True", "above 0"]),
        (lambda: cf.FedAvg(lr=None), ["lr", "None", "above 0"]),
        (lambda: cf.FedAvg(lr=10**400), ["lr", "above 0"]),
        (lambda: cf.FedAvg(local_steps=0), ["local_steps", "0", "1 or more"]),
        (lambda: cf.FedAvg(local_steps=1.5), ["local_steps", "1.5", "integer"]),
        (lambda: cf.FedAvg(batch_size=0), ["batch_size", "0", "1 or more"]),
        (lambda: cf.FedAvg(batch_size=True), ["batch_size", "True", "integer"]),
        (lambda: cf.FedAvg(weighting="sample"), ["weighting", "'sample'", "did you mean 'samples'?"]),
        (lambda: cf.KL(0), ["gamma", "0", "above 0"]),
        (lambda: cf.KL(-0.1), ["gamma", "-0.1", "above 0"]),
        (lambda: cf.KL(NAN), ["gamma", "nan", "above 0"]),
        (lambda: cf.KL("0.2"), ["gamma", "'0.2'", "above 0"]),
        (lambda: cf.KL(0.2, cap=0.5), ["cap", "0.5", "1 or more"]),
        (lambda: cf.Exp(0), ["gamma", "0", "above 0"]),
        (lambda: cf.Adapt(lr=-1), ["lr", "-1", "0 or more"]),
        (lambda: cf.Adapt(lr=0.1, steps=0), ["steps", "0", "1 or more"]),
        (lambda: cf.Adapt(lr=0.1, order="second"), ["order", "'second'", "exact", "first", "hessian-free"]),
        (lambda: cf.ComFedL(outer="kl"), ["outer", "'kl'", "KL(gamma=0.2)"]),
        (lambda: cf.ComFedL(outer=cf.KL), ["outer", "KL", "KL(gamma=0.2)"]),
        (lambda: cf.ComFedL(outer=0.2), ["outer", "0.2", "KL(gamma=0.2)"]),
        (lambda: cf.ComFedL(inner=0.05), ["inner", "0.05", "Adapt(lr=0.05)"]),
        (lambda: cf.ComFedL(problem=print), ["problem", "Composition(inner, outer)"]),
        (
            lambda: cf.ComFedL(inner=cf.Adapt(0.1), problem=cf.Composition(lambda p, b: p, lambda y, b: y)),
            ["inner", "problem", "one of them"],
        ),
        (lambda: cf.ComFedL(outer_batch_size="some"), ["outer_batch_size", "did you mean 'same'?"]),
        (lambda: cf.ComFedL(loss_samples=0), ["loss_samples", "0", "1 or more"]),
    ],
)
def test_a_hyper_parameter_that_cannot_be_is_named(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        make()
    assert isinstance(error.value, ValueError)
    assert [word for word in words if word not in str(error.value)] == []


def test_names_that_are_not_there_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="FedAvgg"):
        cf.FedAvgg  # noqa: B018
    assert {"fit", "load", "FederatedData", "KL", "Diverged"} <= set(dir(cf))


# What is wrong with the data.

X, Y = samples(6)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, ["no client"]),
        ({"a": (X, Y), "b": (X[:0], Y[:0])}, ["'b'", "no samples"]),
        ({"a": (X, Y), "b": (X, Y[:4])}, ["'b'", "6", "4", "x", "y"]),
        ({"a": (X, Y), "b": (X[:, :3], Y)}, ["'b'", "(3,)", "'a'", "(4,)", "shape"]),
        ({"a": (X, Y), "b": (X, Y[:, None])}, ["'b'", "(1,)", "'a'", "()", "shape"]),
        ({"a": (X, Y), "b": (torch.where(X > 1.0, NAN, X), Y)}, ["'b'", "NaN", f" {int((X > 1.0).sum())} "]),
        ({"a": (torch.where(X > 1.0, INF, X), Y)}, ["'a'", "infinite", f" {int((X > 1.0).sum())} "]),
        ({"a": (X, torch.where(Y == 1, -INF, Y.float()))}, ["'a'", "infinite", f" {int((Y == 1).sum())} ", "y"]),
        ({"a": X[0, 0]}, ["'a'", "single number"]),
        ({"a": (X, Y, Y)}, ["'a'", "(x, y)"]),
        ({"a": (np.array([["x"]]), Y[:1])}, ["'a'", "x", "numbers"]),
        ({"a": (X, ["cat"] * 6)}, ["'a'", "y", "numbers"]),
        ({1: (X, Y)}, ["1", "name"]),
        ({"": (X, Y)}, ["''", "name"]),
        ({"a": (X, Y), "b": (X.long(), Y)}, ["'b'", "type"]),
    ],
)
def test_data_that_cannot_be_says_whose_and_what(train: dict[Any, Any], words: list[str]) -> None:
    with pytest.raises(cf.DataError) as error:
        cf.FederatedData(train)
    assert isinstance(error.value, ValueError) and isinstance(error.value, cf.ComfedlError)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_data_that_cannot_be(split: str) -> None:
    for clients, words in (
        ({"a": (torch.where(X > 1.0, NAN, X), Y)}, ["'a'", "NaN", split]),
        ({"z": (X, Y)}, ["'z'", "not in train", split]),
        ({"a": (X[:, :2], Y)}, ["(4,)", "(2,)", split]),
        ({"a": (X[:0], Y[:0])}, ["'a'", "no samples", split]),
    ):
        with pytest.raises(cf.DataError) as error:
            cf.FederatedData({"a": (X, Y)}, **{split: clients})
        assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("model", "client", "words"),
    [
        (nn.Linear(4, 2), (X, Y), ["'a'", "label 2", "train", "2 outputs", "0 to 1"]),
        (nn.Linear(4, 3), (X, Y - 1), ["'a'", "label -1", "0 to 2"]),
        (nn.Linear(5, 3), (X, Y), ["(4,)", "cannot be applied"]),
        (nn.Linear(4, 3), (X.long(), Y), ["int64", "cannot be applied"]),
        (nn.Linear(4, 3), (X, Y.float()), ["integer label", "float"]),
        (nn.Linear(4, 3), (X, Y[:, None]), ["(1,)", "label"]),
        (nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1))), (X, Y), ["[samples, classes]", "(2, 3, 1)"]),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), (X, Y), ["[samples, classes]"]),
    ],
)
def test_data_that_do_not_suit_the_model(
    tmp_path: Path, model: nn.Module, client: tuple[Tensor, Tensor], words: list[str]
) -> None:
    with pytest.raises(cf.DataError) as error:
        cf.fit(model, cf.FederatedData({"a": client}), cf.FedAvg(), rounds=1, out=tmp_path / "runs" / "one")
    assert [word for word in words if word not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


def test_a_label_out_of_range_in_held_out_data() -> None:
    fed = cf.FederatedData({"a": (X, Y), "b": (X, Y)}, {"b": (X, Y + 4)})
    with pytest.raises(cf.DataError, match=r"'b' has the label \d in validation"):
        cf.fit(nn.Linear(4, 3), fed, cf.FedAvg(), rounds=1)


@pytest.mark.parametrize("kind", ["client", "batch", "rest"])
def test_a_batch_of_one_with_batch_norm_is_no_raw_error(kind: str) -> None:
    """BatchNorm cannot take one sample of one pixel: that may be refused, but in words, not by torch."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"client": (20, 1), "batch": (20, 20), "rest": (20, 501)}[kind]
    train = {
        str(i): (torch.rand(size, 1, 8, 8, generator=generator), torch.arange(size) % 10)
        for i, size in enumerate(sizes)
    }
    model = zoo.build("cnn4", (1, 8, 8), 10, seed=0, filters=4)
    method = cf.FedAvg(local_steps=1, batch_size=1 if kind == "batch" else 4)
    try:
        cf.fit(model, cf.FederatedData(train), method, rounds=1)
    except cf.ComfedlError as error:
        assert "batch" in str(error).lower()


# Training that diverges.


def test_training_that_diverges_names_round_and_client(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(cf.Diverged) as error:
        cf.fit(linear(), three_clients, cf.FedAvg(lr=1e308), rounds=9, out=tmp_path / "runs" / "one")
    said = error.value
    assert isinstance(said, cf.ComfedlError) and isinstance(said, ArithmeticError)
    assert said.round == 1 and said.client in three_clients.names
    assert "Round 1" in str(said) and f"client {said.client!r}" in str(said) and "smaller lr" in str(said)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_for_one_client_in_a_later_round() -> None:
    """The client that breaks is named, not the first one; and the round in which it does."""
    fed = cf.FederatedData({"a": samples(6), "b": (torch.full((6, 4), 1e4), torch.arange(6) % 3), "c": samples(6)})

    def loss(output: Tensor, y: Tensor) -> Tensor:
        mean = nn.functional.cross_entropy(output, y)
        return mean * (INF if float(output.detach().abs().max()) > 1e6 else 1)

    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with pytest.raises(cf.Diverged) as error:
        cf.fit(model, fed, cf.FedAvg(lr=0.01, local_steps=1, batch_size=None), rounds=9, loss=loss)
    assert error.value.client == "b" and error.value.round >= 1
    assert "client 'b'" in str(error.value) and f"Round {error.value.round}" in str(error.value)


def test_the_literal_outer_says_what_to_use_instead(three_clients: cf.FederatedData) -> None:
    with pytest.raises(cf.Diverged) as error:
        cf.fit(linear(), three_clients, cf.ComFedL(lr=0.5, outer=cf.Exp(1e-4)), rounds=9)
    assert error.value.weight == INF and 0 < error.value.loss < INF
    for word in ("Round 1", "client 'a'", "gamma = 0.0001", f"{error.value.loss:.3g}", "KL(gamma=0.0001)"):
        assert word in str(error.value)


def test_a_loss_that_is_nan_only_when_evaluated_names_the_client(tmp_path: Path) -> None:
    x, y = samples(6)
    fed = cf.FederatedData({"a": (x, y), "b": (x, y)}, {"b": (x * 1e38, y)})
    with pytest.raises(cf.Diverged) as error:
        cf.fit(nn.Linear(4, 3), fed, cf.FedAvg(lr=100.0), rounds=1, out=tmp_path / "run")
    assert error.value.round == 1 and error.value.client == "b"
    assert list(tmp_path.iterdir()) == []


def test_an_error_can_be_sent_to_another_process() -> None:
    for error in (cf.Diverged(3, "a", 2, 1.5, 1.0), cf.Diverged(3, "a", None, NAN, 1.0), cf.ConfigError("no")):
        again = pickle.loads(pickle.dumps(error))  # as multiprocessing and torchrun do
        assert type(again) is type(error) and str(again) == str(error)


@pytest.mark.parametrize("value", [1.5, NAN])
def test_what_diverged_says(value: float) -> None:
    text = str(cf.Diverged(3, "hospital", 2, value, 4.0))
    assert all(part in text for part in ("Round 3", "'hospital'", "local step 2", f"{value:g}", "weight 4"))
    assert math.isnan(value) == ("nan" in text)


def test_the_state_dict_fits_the_model(three_clients: cf.FederatedData) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    module[0].requires_grad_(False)
    result = cf.fit(module, three_clients, cf.Ditto(0.1), rounds=2)
    for client in (None, "a"):
        module.load_state_dict(result.state_dict(client))
    assert torch.equal(module[2].weight, result.personal("a")["2.weight"])


def test_a_method_that_is_another_one_can_be_changed(three_clients: cf.FederatedData) -> None:
    calls = []

    class Mine(cf.FedMAML):
        def train(self, learner: Any, message: Any, state: Any, batches: Any) -> Any:
            calls.append(1)
            return super().train(learner, message, state, batches)

    cf.fit(nn.Linear(4, 3).double(), three_clients, Mine(0.05), rounds=2)
    assert len(calls) == 6


def test_one_client_a_round_makes_robust_weights_idle(three_clients: cf.FederatedData) -> None:
    with pytest.warns(UserWarning, match=r"always 1, so KL\(gamma=0.2, .*\) has no effect"):
        cf.fit(nn.Linear(4, 3).double(), three_clients, cf.ComFedL(outer=cf.KL(0.2)), rounds=1, clients_per_round=1)


def test_the_order_of_fits_arguments_is_the_designs(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    loop: tuple[Any, ...] = (2, 0, "cross_entropy", None, 1, "embedded", tmp_path / "run", False, False)
    result = cf.fit(nn.Linear(4, 3).double(), three_clients, cf.FedAvg(), *loop)
    assert len(result.rounds) == 2


# A sample of clients to evaluate.


def crowd(clients: int = 40) -> cf.FederatedData:
    x, y = samples(2 * clients)
    return cf.FederatedData.from_flat((x.double(), y, np.arange(clients + 1) * 2))


@pytest.mark.parametrize("method", [cf.FedAvg(), cf.ComFedL(outer=cf.KL(0.2))], ids=lambda method: method.name)
def test_a_sample_is_evaluated_as_all_would_be(method: Any) -> None:
    some = cf.fit(linear(), crowd(), method, rounds=4, clients_per_round=5, eval_every=2, eval_clients=9)
    everybody = cf.fit(linear(), crowd(), method, rounds=4, clients_per_round=5, eval_every=2)
    assert all(torch.equal(some.params[name], part) for name, part in everybody.params.items())
    judged = {row["client"] for row in some.clients}
    assert len(judged) == 9 and len(some.clients) == 18
    assert list(some.clients) == [row for row in everybody.clients if row["client"] in judged]
    for row, whole in zip(some.rounds, everybody.rounds, strict=True):
        losses = [float(each["train.loss"]) for each in some.clients if each["round"] == row["round"]]  # type: ignore[arg-type]
        assert row["eval_clients"] == 9 and "eval_clients" not in whole
        assert row["train.loss.worst"] == max(losses) and row["train.loss.mean"] == pytest.approx(np.mean(losses))
        kept = ("participants", "effective_clients", "weights_kl", "up_bytes")
        assert {name: row[name] for name in kept} == {name: whole[name] for name in kept}
    assert some.summary()["eval_clients"] == 9 and "eval_clients" not in everybody.summary()


def test_the_sample_is_the_seeds_and_the_methods_share_it() -> None:
    def judged(method: Any, seed: int) -> list[Any]:
        result = cf.fit(linear(), crowd(), method, rounds=1, seed=seed, eval_clients=6)
        return [row["client"] for row in result.clients]

    assert judged(cf.FedAvg(), 0) == judged(cf.Ditto(), 0) != judged(cf.FedAvg(), 1)
    assert judged(cf.FedAvg(), 0) == sorted(judged(cf.FedAvg(), 0))


def test_every_client_is_as_likely_to_be_in_the_sample() -> None:
    counts = dict.fromkeys(crowd(8).names, 0)
    for seed in range(200):
        for row in cf.fit(linear(), crowd(8), cf.FedAvg(local_steps=1), rounds=1, seed=seed, eval_clients=4).clients:
            counts[str(row["client"])] += 1
    assert sum(counts.values()) == 800 and all(70 < count < 130 for count in counts.values())


@pytest.mark.parametrize(
    ("value", "says"), [(0, "1 or more"), (41, "only 40 clients; give a number from 1 to 40"), (1.5, "1.5")]
)
def test_a_sample_that_cannot_be_had(value: Any, says: str) -> None:
    with pytest.raises(cf.ConfigError, match=f"eval_clients is .*{says}"):
        cf.fit(linear(), crowd(), cf.FedAvg(), eval_clients=value)


@pytest.mark.parametrize(("dtype", "method", "times"), [
    (torch.float32, cf.FedAvg(lr=0.1), 1),
    (torch.float64, cf.FedAvg(lr=0.1), 2),
    (torch.float32, cf.Robust(lr=0.1, on="outer"), 2),
])  # fmt: skip
def test_data_are_read_for_digests_as_often_as_they_differ(
    dtype: torch.dtype, method: cf.Algorithm, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, unless they were converted for the model or a part of them was set aside."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(12) % 2
    fed = cf.FederatedData({name: (torch.randn(12, 3, generator=draw, dtype=dtype), y) for name in "ab"})
    known, read = fed.digest(), Counter[int]()
    real = cf.FederatedData.contents

    def contents(self: cf.FederatedData, times: bool = True) -> Any:
        read[0] += 1
        return real(self, times)

    monkeypatch.setattr(cf.FederatedData, "contents", contents)
    model = torch.nn.Linear(3, 2)
    cf.fit(model, fed, method, rounds=1, out=tmp_path / "run")
    assert read[0] == times
    assert (tmp_path / "run" / "data.sha256").read_text().strip() == known
    kept = json.loads(next((tmp_path / "run").glob("checkpoint/*/meta.json")).read_text().partition("\n")[2])
    if method.name == "fedavg":
        start = fed.to(torch.float32, torch.device("cpu")).contents()
        assert kept["fingerprint"] == fingerprint(*start, model.weight.detach(), model.bias.detach())
