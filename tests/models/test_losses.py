"""Losses and metrics of regression and binary classification: against closed forms, scikit-learn and each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error
from torch import nn

import comfedl as cf
from comfedl.core import client_statistics
from comfedl.core.client_statistics import summarise, summarise_columns
from comfedl.models import losses, metrics

SIZES = {"a": 12, "b": 5, "c": 30, "d": 1}


def numbers(seed: int, sizes: dict[str, int] = SIZES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(loc=0.3 * i, size=(n, 4)), rng.normal(loc=i, size=n))
        for i, (name, n) in enumerate(sizes.items())
    }


def labels(seed: int, sizes: dict[str, int] = SIZES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Client b has only one label, client d only one sample."""
    return {
        name: (x, (y > y.mean()).astype(np.int64) if name != "b" else np.ones(len(y), dtype=np.int64))
        for name, (x, y) in numbers(seed, sizes).items()
    }


def linear(hidden: int = 0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1)] if hidden else [nn.Linear(4, 1)]
    return nn.Sequential(*layers).double()


# Closed forms.


@pytest.mark.parametrize("vectorize", ["serial", "stack", "vmap"])
def test_linear_regression_takes_the_explicit_gradient_step(vectorize: str) -> None:
    """FedAvg with full batches and one local step is gradient descent on the weighted mean squared error."""
    data = numbers(1)
    model, lr, rounds = linear(), 0.05, 4
    w = np.append(model[0].weight.detach().numpy()[0], model[0].bias.detach().numpy())
    total = sum(len(y) for _, y in data.values())
    for _ in range(rounds):
        step = np.zeros(5)
        for x, y in data.values():
            X = np.column_stack([x, np.ones(len(x))])
            step += 2 * X.T @ (X @ w - y) / total
        w = w - lr * step
    algorithm = cf.FedAvg(lr=lr, local_steps=1, batch_size=None)
    result = cf.fit(
        model, cf.FederatedData(data), algorithm, rounds, loss="mse", engine_options={"vectorize": vectorize}
    )
    np.testing.assert_allclose(result.params["0.weight"].numpy()[0], w[:4], rtol=1e-12)
    np.testing.assert_allclose(result.params["0.bias"].numpy()[0], w[4], rtol=1e-12)
    last = {row["client"]: row for row in result.clients if row["round"] == rounds}
    for name, (x, y) in data.items():
        predicted = np.column_stack([x, np.ones(len(x))]) @ w
        assert last[name]["train.rmse"] == pytest.approx(root_mean_squared_error(y, predicted), rel=1e-12)
        assert last[name]["train.rmse"] ** 2 == pytest.approx(last[name]["train.loss"], rel=1e-12)
        assert last[name]["train.mae"] == pytest.approx(np.abs(y - predicted).mean(), rel=1e-12)
        if len(y) > 1:
            assert last[name]["train.r2"] == pytest.approx(r2_score(y, predicted), rel=1e-10)
        else:
            assert "train.r2" not in last[name]


def test_robust_regression_weights_clients_by_the_softmax_of_their_losses() -> None:
    data = numbers(2)
    model, gamma = linear(), 0.7
    w = np.append(model[0].weight.detach().numpy()[0], model[0].bias.detach().numpy())
    found, slopes = [], []
    for x, y in data.values():
        X = np.column_stack([x, np.ones(len(x))])
        found.append(np.mean((X @ w - y) ** 2))
        slopes.append(2 * X.T @ (X @ w - y) / len(y))
    r = np.exp((np.array(found) - max(found)) / gamma)
    r /= r.sum()
    robust = cf.ComFedL(outer=cf.KL(gamma), lr=0.05, local_steps=1, batch_size=None)
    result = cf.fit(model, cf.FederatedData(data), robust, rounds=1, loss="mse")
    expected = w - 0.05 * (r[:, None] * np.array(slopes)).sum(axis=0)
    np.testing.assert_allclose(result.params["0.weight"].numpy()[0], expected[:4], rtol=1e-11)


def test_bce_is_cross_entropy_with_the_other_logit_at_zero() -> None:
    logits, y = torch.randn(50, 1, dtype=torch.float64), torch.randint(0, 2, (50,))
    both = torch.cat([torch.zeros_like(logits), logits], dim=1)
    assert losses.bce(logits, y) == pytest.approx(float(nn.functional.cross_entropy(both, y)), rel=1e-12)
    assert metrics.binary_accuracy(logits, y) == metrics.accuracy(both, y)


# Metrics against scikit-learn.


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=5)
)
def test_auc_is_scikit_learns_with_ties_and_several_clients(clients: list[list[tuple[int, bool]]]) -> None:
    sizes = torch.tensor([len(client) for client in clients])
    output = torch.tensor([[float(score)] for client in clients for score, _ in client])
    y = torch.tensor([int(label) for client in clients for _, label in client])
    found = metrics.auc(output, y, sizes).tolist()
    for client, auc in zip(clients, found, strict=True):
        scores, truth = zip(*client, strict=True)
        if len(set(truth)) == 2:
            assert auc == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)
        else:
            assert np.isnan(auc)


def test_r2_of_equal_values_is_undefined_despite_rounding() -> None:
    y = torch.full((3,), 0.1, dtype=torch.float64)
    assert metrics.r2(torch.zeros(3, 1, dtype=torch.float64), y, torch.tensor([3])).isnan().all()


def test_r2_and_rmse_of_several_outputs() -> None:
    rng = np.random.default_rng(0)
    y, predicted = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    sizes = torch.tensor([8, 12])
    found = metrics.r2(torch.from_numpy(predicted), torch.from_numpy(y), sizes)
    parts = [(y[:8], predicted[:8]), (y[8:], predicted[8:])]
    expected = [r2_score(*part, multioutput="variance_weighted") for part in parts]
    np.testing.assert_allclose(found.numpy(), expected)
    rmse = metrics.rmse(torch.from_numpy(predicted), torch.from_numpy(y), sizes)
    np.testing.assert_allclose(rmse.numpy(), [np.sqrt(((a - b) ** 2).mean()) for a, b in parts])


# One engine strategy against another.


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("loss", ["bce", "mse", "mae", "huber"])
def test_all_strategies_agree(loss: str, hidden: int) -> None:
    make = labels if loss == "bce" else numbers
    sizes = {f"client {i:02d}": n for i, n in enumerate([12, 5, 30, 1, 7, 7, 600])}
    fed = cf.FederatedData(make(3, sizes), {name: data for name, data in make(4, sizes).items() if name < "client 05"})
    rows = {}
    for strategy in ("serial", "stack", "vmap", "auto"):
        result = cf.fit(
            linear(hidden),
            fed,
            cf.ComFedL(outer=cf.KL(0.5), lr=0.1, local_steps=2, batch_size=6),
            rounds=2,
            loss=loss,
            engine_options={"vectorize": strategy},
        )
        rows[strategy] = sorted(result.clients, key=lambda row: (row["round"], row["client"]))
    for strategy in ("stack", "vmap", "auto"):
        for ours, theirs in zip(rows["serial"], rows[strategy], strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert value == (theirs[key] if isinstance(value, str) else pytest.approx(theirs[key], rel=1e-9)), key


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_exact_meta_learning_agrees_under_other_losses(loss: str) -> None:
    """The hand-written derivatives are those of the cross-entropy and must not be used for other losses."""
    fed = cf.FederatedData((labels if loss == "bce" else numbers)(5))
    models = [
        cf.fit(
            linear(5),
            fed,
            cf.FedMAML(adapt_lr=0.1, lr=0.1, batch_size=None),
            2,
            loss=loss,
            engine_options={"vectorize": w},
        ).params
        for w in ("serial", "stack")
    ]
    for name, part in models[0].items():
        torch.testing.assert_close(part, models[1][name], rtol=1e-9, atol=1e-12)


def test_images_under_another_loss() -> None:
    """So are those of the CNN: a step under another loss must agree with autograd."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(6, 1, 8, 8, generator=generator), torch.rand(6, generator=generator)
    model = cf.models.build("cnn4", (1, 8, 8), 1, seed=0, filters=4, norm="none")
    result = cf.fit(
        model, cf.FederatedData({"a": (x, y)}), cf.FedAvg(lr=0.1, local_steps=1, batch_size=None), 1, loss="mse"
    )
    nn.functional.mse_loss(model(x).squeeze(1), y).backward()
    for name, part in model.named_parameters():
        torch.testing.assert_close(result.params[name], part.detach() - 0.1 * part.grad, rtol=1e-4, atol=1e-6)


# The worst client, and undefined metrics.


def test_the_worst_error_is_the_largest() -> None:
    for name in ("rmse", "personal_rmse", "mae", "loss", "validation.personal_loss"):
        assert summarise(name, [1.0, 3.0])["worst"] == 3.0
    for name in ("accuracy", "r2", "auc", "train.personal_auc"):
        assert summarise(name, [0.1, 0.3])["worst"] == 0.1


def test_clients_with_a_defined_metric_are_counted() -> None:
    row = summarise_columns({"train.loss": [1.0, 2.0, 3.0], "train.auc": [0.5, 0.7]})
    assert row["train.auc.clients"] == 2 and row["train.auc.mean"] == pytest.approx(0.6)
    assert "train.loss.clients" not in row
    assert "train.auc.clients" not in summarise_columns({"train.loss": [1.0], "train.auc": [0.5]})


def test_a_client_with_one_label_has_no_auc_and_no_nan_is_written(tmp_path: Path) -> None:
    fed = cf.FederatedData(labels(6), labels(7))
    result = cf.fit(linear(), fed, cf.FedAvg(lr=0.1), rounds=2, loss="bce", out=tmp_path / "run")
    for name in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        text = (tmp_path / "run" / name).read_text()
        assert "NaN" not in text and "Infinity" not in text
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    with_auc = {row["client"] for row in rows if "validation.auc" in row}
    assert with_auc == {"a", "c"}
    assert all("validation.accuracy" in row and "train.loss" in row for row in rows)
    assert result.rounds[-1]["validation.auc.clients"] == 2
    assert result.summary()["validation"]["auc"]["clients"] == 2


def test_a_run_with_undefined_metrics_resumes_bit_for_bit(tmp_path: Path) -> None:
    fed, method = cf.FederatedData(labels(6), labels(7)), cf.FedAvg(lr=0.1)
    whole = cf.fit(linear(), fed, method, rounds=4, loss="bce", out=tmp_path / "whole", checkpoint_every=2)

    class Stop(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cf.fit(linear(), fed, method, 4, loss="bce", out=tmp_path / "cut", checkpoint_every=2, callbacks=[Stop()])
    again = cf.fit(linear(), fed, method, rounds=4, loss="bce", out=tmp_path / "cut", resume=True, checkpoint_every=2)
    assert again.rounds == whole.rounds and again.clients == whole.clients


def test_a_diverged_model_is_not_taken_for_an_undefined_metric() -> None:
    with pytest.raises(cf.Diverged):
        cf.fit(linear(), cf.FederatedData(numbers(1)), cf.FedAvg(lr=1e6, batch_size=None), rounds=60, loss="mse")


# Invalid input.


def test_outputs_that_do_not_fit_are_refused() -> None:
    fed = cf.FederatedData(numbers(1))
    with pytest.raises(cf.DataError, match=r"one output per number in y.*\(2, 3\)"):
        cf.fit(nn.Linear(4, 3).double(), fed, cf.FedAvg(), rounds=1, loss="mse")
    with pytest.raises(cf.DataError, match="labels that are 0 or 1"):
        cf.fit(linear(), fed, cf.FedAvg(), rounds=1, loss="bce")
    with pytest.raises(cf.ConfigError, match="did you mean 'mse'"):
        cf.fit(linear(), fed, cf.FedAvg(), rounds=1, loss="msee")


def test_every_loss_has_a_per_sample_form() -> None:
    """Without it, clients would run one after another."""
    for function, reported in losses.LOSSES.values():
        assert function in losses.PER_SAMPLE
        assert {*reported} <= {*metrics.METRICS}
        assert {*reported.values()} <= {metric.function for metric in metrics.METRICS.values()}


def test_the_registry_of_metrics() -> None:
    for name, metric in metrics.METRICS.items():
        assert metric.name == name and metric.whole == (metric.per_sample is None) == (metric.function in metrics.WHOLE)
        assert metric.whole != (metric.function in losses.PER_SAMPLE)
        for shown in (name, f"validation.personal_{name}"):
            assert client_statistics.smaller_is_better(shown) == (name in ("mae", "rmse", "brier", "ece"))
            assert client_statistics.undefinable(shown)
    assert client_statistics.smaller_is_better("train.loss") and not client_statistics.undefinable("loss")
    assert not client_statistics.smaller_is_better("other") and client_statistics.undefinable("other")
