"""Several yes-or-no labels per sample, each with a logit of its own: every metric is the mean over the labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import comfedl as cf
from comfedl.models.metrics import BINARY, METRICS, binary_accuracy, brier, function_for, names_for
from helpers.inputs import F64, federated

WHOLE = [name for name in names_for(BINARY) if METRICS.get(name, METRICS["accuracy"]).whole]


def labelled(labels: int, whole: bool = False) -> cf.FederatedData:
    def make(size: int, source: torch.Generator) -> Any:
        x = torch.randn(size, 4, generator=source, dtype=F64)
        y = x[:, :labels] + 0.5 * torch.randn(size, labels, generator=source, dtype=F64) > 0.3
        return x, y.long() if whole else y.to(F64)

    return federated(make)


def net(labels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, labels)).to(F64)


@pytest.mark.parametrize("name", WHOLE)
def test_a_metric_is_its_mean_over_the_labels_for_which_it_is_defined(name: str) -> None:
    source = torch.Generator().manual_seed(0)
    output, y = torch.randn(12, 3, generator=source, dtype=F64), torch.randint(2, (12, 3), generator=source)
    y[:5, 1] = 0  # the first client has no label 1 there
    metric, sizes = function_for(name, BINARY), torch.tensor([5, 7])
    each = torch.stack([metric(output[:, k], y[:, k], sizes) for k in range(3)])  # type: ignore[call-arg]
    for targets in (y, y.to(F64), y.bool()):
        torch.testing.assert_close(metric(output, targets, sizes), each.nanmean(dim=0))  # type: ignore[call-arg]
    if METRICS[name].may_be_undefined and name != "specificity":
        assert math.isnan(each[1, 0]) and not metric(output, y, sizes).isnan().any()  # type: ignore[call-arg]
        assert metric(output, 0 * y, sizes).isnan().all()  # type: ignore[call-arg]


def test_means_over_samples_and_labels() -> None:
    source = torch.Generator().manual_seed(0)
    output, y = torch.randn(12, 3, generator=source, dtype=F64), torch.randint(2, (12, 3), generator=source)
    assert binary_accuracy(output, y) == pytest.approx(float(((output > 0) == (y > 0)).double().mean()))
    columns = torch.stack([brier(output[:, k], y[:, k]) for k in range(3)])
    torch.testing.assert_close(brier(output, y), columns.mean())


@pytest.mark.parametrize("vectorize", ["stack", "vmap", "serial"])
@pytest.mark.parametrize("loss", ["bce", nn.BCEWithLogitsLoss(), cf.losses.BCE(positive_weight="balanced")])
def test_a_run_with_three_labels(loss: Any, vectorize: str) -> None:
    """The loss is the mean over samples and labels, on every path, whatever the dtype of y."""
    options: dict[str, Any] = {"rounds": 2, "metrics": ["f1", "brier", "auprc", "ece"], "loss": loss}
    method = cf.Robust(lr=0.1, batch_size=4)
    path = {"vectorize": vectorize}
    found = cf.fit(net(3), labelled(3), method, **options, engine_options=path)
    wanted = cf.fit(net(3), labelled(3, whole=True), method, **options, engine_options={"vectorize": "serial"})
    for ours, theirs in zip(found.clients, wanted.clients, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key], abs=1e-9) for key in ours)
    module, (x, y) = found.to_module(), labelled(3).train["c"]
    row = next(row for row in found.clients[-3:] if row["client"] == "c")
    assert row["train.accuracy"] == pytest.approx(float(((module(x) > 0) == (y > 0)).double().mean()))
    if loss == "bce":
        plain = nn.functional.binary_cross_entropy_with_logits(module(x), y)
        assert row["train.loss"] == pytest.approx(float(plain.detach()))


def test_a_column_of_one_label_is_the_label() -> None:
    def flat(fed: cf.FederatedData) -> cf.FederatedData:
        return cf.FederatedData({name: (x, y[:, 0]) for name, (x, y) in fed.train.items()})

    fed = cf.FederatedData(dict(labelled(1).train.items()))
    runs = [cf.fit(net(1), data, cf.FedAvg(lr=0.1), rounds=2, loss="bce", metrics=["f1"]) for data in (fed, flat(fed))]
    assert runs[0].rounds == runs[1].rounds
    assert all(torch.equal(part, runs[1].params[name]) for name, part in runs[0].params.items())


def test_intervals_contain_the_values() -> None:
    table = cf.fit(net(3), labelled(3), cf.FedAvg(lr=0.1), rounds=2, loss="bce").clients_table("train")
    for row in table:
        for name in ("accuracy", "auc", "loss"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"], (row["client"], name)
    assert "Wilson" not in table.methods["accuracy"]  # several labels of a sample are not independent


def test_uncounted_labels_have_no_share_in_scores_and_intervals() -> None:
    """Plain labels of -100 under torch's own cross-entropy: as if those samples were not there."""

    def some(size: int, source: torch.Generator) -> Any:
        x = torch.randn(size, 4, generator=source, dtype=F64)
        return x, torch.where(x[:, 3] > 0, (x[:, 0] > 0).long(), -100)

    fed = federated(some)
    kept = cf.FederatedData({name: (x[y >= 0], y[y >= 0]) for name, (x, y) in fed.train.items()})
    options: dict[str, Any] = {"rounds": 1, "loss": nn.CrossEntropyLoss(), "metrics": ["f1", "auc", "brier"]}
    found = cf.fit(net(2), cf.FederatedData(dict(fed.train.items())), cf.FedAvg(lr=1e-12), **options)
    wanted = cf.fit(net(2), kept, cf.FedAvg(lr=1e-12), **options)
    for ours, theirs in zip(found.clients_table(), wanted.clients_table(), strict=True):
        for name in ("accuracy", "f1", "auc", "brier", "loss"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9)
        bounded = [name for name in ("accuracy", "loss") if f"{name}_low" in ours]
        assert "loss" in bounded
        assert all(ours[f"{name}_low"] <= ours[name] <= ours[f"{name}_high"] for name in bounded)


CROSS = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0], dtype=F64)),
]


@pytest.mark.parametrize("loss", CROSS, ids=["plain", "smoothed", "a weight of 0"])
def test_a_batch_in_which_nothing_counts_is_no_step(loss: nn.CrossEntropyLoss) -> None:
    x, y = torch.randn(40, 4, dtype=F64), torch.full((40,), -100)
    if loss.weight is not None:
        y[:] = 1  # of a class that has no weight
    y[0] = 0
    fed = cf.FederatedData({"a": (x, y)})
    result = cf.fit(net(2), fed, cf.FedAvg(lr=0.1, batch_size=4, local_steps=10), rounds=1, loss=loss)
    assert all(part.isfinite().all() for part in result.params.values())
    # Nine of the ten batches of an epoch change nothing; the other one is a step on its one sample.
    module = net(2)
    loss(module(x[:1]), y[:1]).backward()
    for name, part in module.named_parameters():
        torch.testing.assert_close(result.params[name], (part - 0.1 * part.grad).detach())


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_client_without_a_target_that_counts(split: str) -> None:
    x, y = torch.randn(6, 4, dtype=F64), torch.randint(2, (6,))
    good, bad = {"a": (x, y), "b": (x, y)}, {"a": (x, y), "b": (x, torch.full_like(y, -100))}
    fed = cf.FederatedData(**{"train": good, "validation": good, split: bad})
    with pytest.raises(cf.DataError, match=f"No target of client 'b' in {split} counts for CrossEntropyLoss"):
        cf.fit(net(2), fed, cf.FedAvg(lr=0.1), rounds=1, loss=nn.CrossEntropyLoss())


def test_ignored_labels_are_not_for_many_clients_at_once() -> None:
    x, y = torch.randn(6, 4, dtype=F64), torch.tensor([0, 1, -100, 0, 1, 1])
    fed = cf.FederatedData(dict.fromkeys("ab", (x, y)))
    with pytest.raises(cf.ConfigError, match="'vmap', but there are negative labels"):
        cf.fit(net(2), fed, cf.FedAvg(), rounds=1, loss=nn.CrossEntropyLoss(), engine_options={"vectorize": "vmap"})
