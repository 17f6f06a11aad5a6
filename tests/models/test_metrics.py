"""Metrics against scikit-learn, clients at once against one by one, and metrics that ``fit`` is asked for."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn import metrics as sk
from torch import Tensor, nn

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.config.schema import parse_config, run_config
from comfedl.core.client_statistics import smaller_is_better
from comfedl.models.metrics import BINARY, CLASSIFICATION, METRICS, REGRESSION, function_for, names_for
from comfedl.utils.errors import ConfigError, MetricFailed

TWO = ("balanced_accuracy", "f1", "precision", "sensitivity", "specificity", "auc", "auprc", "brier", "ece")


def by_sklearn(name: str, score: np.ndarray, y: np.ndarray) -> float:
    """A metric of two classes, from the logit of class 1; NaN where it is not defined."""
    guess, p = (score > 0).astype(int), 1 / (1 + np.exp(-score))
    one_label, positives = len(set(y.tolist())) == 1, int(y.sum())
    if name == "auc":
        return math.nan if one_label else float(sk.roc_auc_score(y, score))
    if name in ("f1", "precision", "sensitivity", "auprc") and not positives:
        return math.nan
    if name == "specificity":
        negatives = y == 0
        return float((guess[negatives] == 0).mean()) if negatives.any() else math.nan
    if name == "ece":
        confidence, right = np.maximum(p, 1 - p), guess == y
        bins = np.clip(np.ceil(confidence * 15).astype(int), 1, 15)
        return float(sum(abs((confidence - right)[bins == k].sum()) for k in range(1, 16)) / len(y))
    if name == "balanced_accuracy":
        return float(np.mean([(guess[y == k] == k).mean() for k in (0, 1) if (y == k).any()]))
    known = {
        "f1": lambda: sk.f1_score(y, guess, zero_division=0),
        "precision": lambda: sk.precision_score(y, guess, zero_division=0),
        "sensitivity": lambda: sk.recall_score(y, guess, zero_division=0),
        "auprc": lambda: sk.average_precision_score(y, score),
        "brier": lambda: sk.brier_score_loss(y, p, labels=[0, 1]),
    }
    return float(known[name]())


clients = st.lists(
    st.lists(st.tuples(st.sampled_from([-2.5, -1.0, -0.3, 0.4, 1.0, 3.0]), st.booleans()), min_size=1, max_size=9),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(clients, st.sampled_from(TWO))
def test_two_classes_are_scikit_learns_for_every_client(data: list[list[tuple[float, bool]]], name: str) -> None:
    """With ties, single samples and single labels, from one logit or from two outputs."""
    score = torch.tensor([value for client in data for value, _ in client], dtype=torch.float64)
    y = torch.tensor([int(label) for client in data for _, label in client])
    sizes = torch.tensor([len(client) for client in data])
    outputs = {BINARY: score[:, None], CLASSIFICATION: torch.stack([torch.zeros_like(score), score], dim=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [
            by_sklearn(name, np.array([value for value, _ in client]), np.array([int(label) for _, label in client]))
            for client in data
        ]
    for task, output in outputs.items():
        function: Any = function_for(name, task)
        if METRICS[name].whole:
            found = function(output, y, sizes)
        else:
            pairs = zip(torch.split(output, sizes.tolist()), torch.split(y, sizes.tolist()), strict=True)
            found = torch.stack([function(own, labels) for own, labels in pairs])
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("seed", range(5))
def test_many_classes_are_scikit_learns_macro_means(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (60,), generator=generator)
    sizes, guess, p = torch.tensor([60]), output.argmax(dim=1).numpy(), output.softmax(dim=1).numpy()
    truth, one_hot = y.numpy(), np.eye(4)[y.numpy()]
    wanted = {
        "f1": sk.f1_score(truth, guess, average="macro"),
        "precision": sk.precision_score(truth, guess, average="macro", zero_division=0),
        "recall": sk.recall_score(truth, guess, average="macro"),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, guess),
        "auc": sk.roc_auc_score(truth, p, multi_class="ovr", average="macro"),
        "auprc": np.mean([sk.average_precision_score(one_hot[:, k], p[:, k]) for k in range(4)]),
    }
    for name, value in wanted.items():
        function: Any = METRICS[name].function
        assert float(function(output, y, sizes)[0]) == pytest.approx(value, abs=1e-9), name
    brier: Any = METRICS["brier"].function
    assert float(brier(output, y)) == pytest.approx(((p - one_hot) ** 2).sum(axis=1).mean(), abs=1e-9)


def test_the_registry_by_task() -> None:
    assert {"accuracy", "f1", "auc", "brier", "ece"} <= set(names_for(CLASSIFICATION)) & set(names_for(BINARY))
    assert names_for(REGRESSION) == ["mae", "rmse", "r2"]
    assert {name for name in METRICS if smaller_is_better(name)} == {"brier", "ece", "mae", "rmse"}


# What ``fit`` is asked for.


def fed(labels: int = 2, dtype: Any = np.int64) -> cf.FederatedData:
    rng = np.random.default_rng(3)

    def client(n: int, shift: float) -> tuple[Any, Any]:
        x = rng.normal(size=(n, 4)) + shift
        return x, ((x[:, 0] + rng.normal(size=n) > shift).astype(dtype) if labels > 1 else np.zeros(n, dtype))

    names = {"a": 0.0, "b": 1.0, "c": -1.0}
    return cf.FederatedData(
        {name: client(20 + 7 * k, shift) for k, (name, shift) in enumerate(names.items())},
        {name: client(15 + k, shift) for k, (name, shift) in enumerate(names.items())},
    )


def net(outputs: int = 2) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs)).double()


def spread(output: Tensor, y: Tensor) -> float:
    return float(output.std())


METHOD = cf.FedAvg(lr=0.1)


@pytest.mark.parametrize("vectorize", ["stack", "serial"])
def test_names_and_functions_side_by_side(vectorize: str) -> None:
    """A user's function sees all of a client's outputs, and clients still run at once."""
    data = fed()
    asked = {"f1": "f1", "spread": spread, "cost": cf.Metric(lambda output, y: len(y), smaller_is_better=True)}
    options = {"metrics": asked, "engine_options": {"vectorize": vectorize}}
    result = cf.fit(net(), data, METHOD, 3, **options)
    model = result.to_module()
    assert data.validation is not None
    for row in (row for row in result.clients if row["round"] == 3):
        x, y = data.validation[str(row["client"])]
        output = model(x).detach()
        assert row["validation.spread"] == pytest.approx(float(output.std()), abs=1e-9)
        assert row["validation.f1"] == pytest.approx(sk.f1_score(y, output.argmax(dim=1)), abs=1e-9)
        assert row["validation.cost"] == len(y)
    last = result.rounds[-1]
    assert (last["validation.cost.worst"], last["validation.cost.mean"]) == (17, 16)
    plain = cf.fit(net(), data, METHOD, 3, engine_options={"vectorize": vectorize})
    assert all(torch.equal(part, plain.params[name]) for name, part in result.params.items())


def test_a_list_of_names_and_one_output() -> None:
    last = cf.fit(net(1), fed(), METHOD, 2, loss="bce", metrics=["auprc", "sensitivity", "brier"]).rounds[-1]
    assert {"validation.auprc.worst", "train.sensitivity.mean", "validation.brier.worst"} <= last.keys()
    assert last["validation.brier.worst"] >= last["validation.brier.mean"]  # type: ignore[operator]


def own_loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y) + 0.01 * output.square().mean()


def own_error(output: Tensor, y: Tensor) -> Tensor:
    return (output.squeeze(-1) - y).abs().pow(1.5).mean()


def test_a_loss_of_ones_own_keeps_the_metrics_of_its_task() -> None:
    classes = cf.fit(net(), fed(), METHOD, 1, loss=own_loss, metrics=["f1"]).rounds[-1]
    assert {"validation.accuracy.worst", "validation.f1.mean"} <= classes.keys()
    numbers = cf.FederatedData({name: (x, x.sum(dim=1)) for name, (x, _) in fed().train.items()})
    errors = cf.fit(net(1), numbers, METHOD, 1, loss=own_error).rounds[-1]
    assert {"train.rmse.worst", "train.mae.worst", "train.r2.worst"} <= errors.keys()


def test_a_config_and_what_is_read_back(tmp_path: Path) -> None:
    text = {
        "rounds": 2,
        "metrics": ["f1", f"{__name__}:spread"],
        "data": {"name": "digits", "partition": "iid", "clients": 3},
        "algorithm": {"name": "fedavg"},
    }
    config = parse_config(text)
    assert config.resolved()["metrics"] == text["metrics"]
    last = run_config(config, out=tmp_path / "run").rounds[-1]
    assert {"validation.f1.worst", "validation.spread.mean"} <= last.keys()
    scores = evaluate(cf.load_run(tmp_path / "run", trust=True), "validation")
    assert scores.summary["f1.worst"] == pytest.approx(last["validation.f1.worst"], abs=1e-6)


def test_the_worst_client_of_an_own_error_in_a_report(tmp_path: Path) -> None:
    from comfedl.analysis.read_runs import read_run
    from comfedl.models import metrics as module

    cf.fit(net(), fed(), METHOD, 1, metrics={"odd_cost": cf.Metric(spread, True)}, out=tmp_path / "run")
    module._DIRECTIONS.clear()  # as in another process
    read_run(tmp_path / "run")
    assert smaller_is_better("validation.odd_cost")


def fails(output: Tensor, y: Tensor) -> float:
    raise KeyError("no such class")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["acuracy"], "The metric 'acuracy' is unknown; did you mean 'accuracy'"),
        (["rmse"], "The metric 'rmse' does not apply to a loss for classes"),
        ("f1", "metrics is 'f1', but it must be a list of names"),
        ({"loss": spread}, "A metric is named 'loss'"),
        ({"a b": spread}, "A metric is named 'a b'"),
        ({"mine": 3}, "A metric's function is 3"),
    ],
)
def test_metrics_that_cannot_be_made(metrics: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cf.fit(net(), fed(), METHOD, 1, metrics=metrics)


@pytest.mark.parametrize("vectorize", ["stack", "serial"])
def test_a_metric_that_fails_is_one_sentence(vectorize: str) -> None:
    options = {"engine_options": {"vectorize": vectorize}}
    with pytest.raises(MetricFailed, match=r"The metric 'mine' raised KeyError .* for the \d+ samples of client 'a'"):
        cf.fit(net(), fed(), METHOD, 1, metrics={"mine": fails}, **options)
    with pytest.raises(MetricFailed, match=r"returned a tensor of shape \(\d+, 2\), but it must return one number"):
        cf.fit(net(), fed(), METHOD, 1, metrics={"mine": lambda output, y: output}, **options)


def test_a_metric_that_no_client_defines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The metric 'auc' is asked for, but it is defined for no client in round 1"):
        cf.fit(net(), fed(labels=1), METHOD, 3, metrics=["auc"], out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    cf.fit(net(1), fed(labels=1), METHOD, 1, loss="bce")  # auc comes with bce, and nobody asked for it


def test_clients_without_a_value_are_counted() -> None:
    data = fed()
    assert data.validation is not None
    validation = {name: (x, y * 0 if name == "b" else y) for name, (x, y) in data.validation.items()}
    last = cf.fit(net(), cf.FederatedData(dict(data.train), validation), METHOD, 1, metrics=["auc"]).rounds[-1]
    assert last["validation.auc.clients"] == 2 and "train.auc.clients" not in last
