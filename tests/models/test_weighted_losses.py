"""Losses with class weights, label smoothing and focus, and losses of one's own in a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.config.schema import parse_config, run_config
from comfedl.models.losses import BCE, CrossEntropy, Focal, name_of_torch_object

OUTPUT = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
WEIGHTS = (0.5, 1.0, 3.0)


def test_plain_arguments_are_the_plain_losses() -> None:
    plain = functional.cross_entropy(OUTPUT, LABELS)
    for loss in (CrossEntropy(), CrossEntropy((1, 1, 1)), Focal(0), Focal(0, (1, 1, 1))):
        torch.testing.assert_close(loss(OUTPUT, LABELS), plain, rtol=0, atol=1e-12)
    y = (LABELS > 0).double()
    binary = functional.binary_cross_entropy_with_logits(OUTPUT[:, 0], y)
    for weighted in (BCE(), BCE(1.0)):
        torch.testing.assert_close(weighted(OUTPUT[:, :1], y), binary, rtol=0, atol=1e-12)


def test_weights_and_smoothing_are_torchs_per_sample() -> None:
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    wanted = functional.cross_entropy(OUTPUT, LABELS, weight=weight, label_smoothing=0.2, reduction="none").mean()
    torch.testing.assert_close(CrossEntropy(WEIGHTS, 0.2)(OUTPUT, LABELS), wanted)
    y = (LABELS > 0).double()
    pos = functional.binary_cross_entropy_with_logits(
        OUTPUT[:, 0], y, pos_weight=torch.tensor(2.5, dtype=torch.float64)
    )
    torch.testing.assert_close(BCE(2.5)(OUTPUT[:, 0], y), pos)


def test_focal_by_hand() -> None:
    p = OUTPUT.softmax(dim=1)[torch.arange(40), LABELS]
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)[LABELS]
    torch.testing.assert_close(Focal(1.5, WEIGHTS)(OUTPUT, LABELS), (weight * (1 - p) ** 1.5 * -p.log()).mean())
    sure = torch.tensor([[100.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(Focal(0.5)(sure, torch.tensor([0])), sure)
    assert slope.isfinite().all()


def test_balanced_weights_make_classes_count_the_same() -> None:
    labels = torch.tensor([0] * 8 + [1] * 1 + [2] * 3)
    weights = CrossEntropy("balanced").resolved(labels, 4).class_weights
    assert weights is not None and not isinstance(weights, str)
    assert weights == (12 / 24, 12 / 3, 12 / 9, 0.0)  # the model's fourth class never occurs
    assert sum(weights[int(label)] for label in labels) == pytest.approx(12)
    assert BCE("balanced").resolved(torch.tensor([0, 0, 0, 1]), 1).positive_weight == 3
    with pytest.raises(cf.DataError, match="all train labels are the same"):
        BCE("balanced").resolved(torch.zeros(4), 1)


def fed() -> cf.FederatedData:
    rng = np.random.default_rng(2)

    def client(n: int) -> tuple[Any, Any]:
        x = rng.normal(size=(n, 4))
        return x, (x[:, 0] > 1).astype(np.int64) + (x[:, 1] > 1.5).astype(np.int64)

    return cf.FederatedData({"a": client(40), "b": client(25), "c": client(9)}, {"a": client(20), "b": client(20)})


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


METHOD = cf.ComFedL(outer=cf.KL(0.5), lr=0.2, batch_size=8)
LOSSES = [CrossEntropy("balanced", 0.1), CrossEntropy((1.0, 2.0, 4.0)), Focal(2.0), Focal(1.0, "balanced")]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_clients_run_at_once_with_the_same_result(loss: Any) -> None:
    one, many = (
        cf.fit(net(), fed(), METHOD, 3, loss=loss, engine_options={"vectorize": v}) for v in ("serial", "stack")
    )
    for name, part in one.params.items():
        torch.testing.assert_close(part, many.params[name], rtol=0, atol=1e-12)
    assert "validation.accuracy.worst" in one.rounds[-1]
    plain = cf.fit(net(), fed(), METHOD, 3)
    assert any(not torch.allclose(part, plain.params[name], atol=1e-4) for name, part in one.params.items())


def test_the_recorded_loss_is_the_one_that_is_trained() -> None:
    loss = CrossEntropy("balanced")
    data = fed()
    result = cf.fit(net(), data, METHOD, 2, loss=loss)
    whole = torch.cat([y for _, y in data.train.values()])
    x, y = data.train["b"]
    wanted = loss.resolved(whole, 3)(result.to_module()(x), y)
    found = next(row["train.loss"] for row in result.clients if row["round"] == 2 and row["client"] == "b")
    assert found == pytest.approx(float(wanted.detach()), abs=1e-9)


# Configs.


def own(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, label_smoothing=0.3)


def config(loss: Any) -> dict[str, Any]:
    data = {"name": "digits", "partition": "dirichlet", "clients": 4, "alpha": 0.5}
    return {"rounds": 2, "loss": loss, "data": data, "algorithm": {"name": "fedavg"}}


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ({"name": "cross_entropy", "class_weights": "balanced"}, CrossEntropy("balanced")),
        ({"name": "cross_entropy", "label_smoothing": 0.3}, CrossEntropy(None, 0.3)),
        ({"name": "focal", "gamma": 1.5}, Focal(1.5)),
        ("focal", Focal()),
        (f"{__name__}:own", own),
        ({"name": f"{__name__}:own", "task": "classification"}, own),
    ],
    ids=["balanced", "smoothed", "focal", "focal by name", "own", "own with its task"],
)
def test_a_config_trains_like_python_and_can_be_evaluated(tmp_path: Path, loss: Any, wanted: Any) -> None:
    parsed = parse_config(config(loss))
    assert parsed.make_loss() == wanted
    assert parse_config(parsed.resolved()).make_loss() == wanted
    result = run_config(parsed, out=tmp_path / "run")
    data = parsed.make_data()
    same = cf.fit(parsed.make_model(data), data, parsed.make_algorithm(), 2, loss=wanted)
    assert all(torch.equal(part, same.params[name]) for name, part in result.params.items())
    scores = evaluate(cf.load_run(tmp_path / "run", trust=True), "validation").summary
    for key in ("loss.mean", "accuracy.worst"):
        assert scores[key] == pytest.approx(result.rounds[-1][f"validation.{key}"], abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "cross_entropy", "class_weights": "even"}, ["class_weights", "'even'", "balanced"]),
        ({"name": "cross_entropy", "class_weights": [1.0, -1.0]}, ["class_weights", "0 or more"]),
        ({"name": "cross_entropy", "label_smoothing": 1.0}, ["label_smoothing is 1.0"]),
        ({"name": "focal", "gama": 1.0}, ["gama", "gamma"]),
        ({"name": "mse", "class_weights": "balanced"}, ["loss.class_weights"]),
        ({"name": "focall"}, ["loss.name is 'focall'", "focal"]),
        ({"gamma": 1.0}, ["must be a name or a table"]),
        (-1, ["loss is -1, but it must be a name or a table"]),
        ("nowhere:loss", ["loss is 'nowhere:loss'", "cannot be imported"]),
        ({"name": "m:f", "task": "ranking"}, ["loss.task is 'ranking'"]),
    ],
)
def test_a_loss_in_a_config_that_cannot_be_made(loss: Any, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config(config(loss))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_weights_for_other_classes_than_the_models() -> None:
    with pytest.raises(cf.ConfigError, match="class_weights has 2 numbers, but the model has 3 outputs"):
        cf.fit(net(), fed(), METHOD, 1, loss=CrossEntropy((1.0, 2.0)))


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss, nn.CrossEntropyLoss(reduction="none"), CrossEntropy], ids=["class", "none", "ours"]
)
def test_a_loss_that_is_meant_as_the_mean(loss: Any) -> None:
    found, plain = (cf.fit(net(), fed(), METHOD, 2, loss=each) for each in (loss, "cross_entropy"))
    for name, part in plain.params.items():
        torch.testing.assert_close(found.params[name], part, rtol=0, atol=0 if loss is not CrossEntropy else 1e-12)
    assert found.rounds == plain.rounds or loss is CrossEntropy


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum', which is no mean"),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none"), "can be taken in two ways"),
        (lambda output, y: nn.functional.cross_entropy(output, y, reduction="none"), "a tensor of shape"),
        (lambda output, y: 1.0, "returned a float"),
        (nn.Linear, "the class Linear, which cannot be made without arguments"),
    ],
    ids=["sum", "weights", "vector", "float", "another class"],
)
def test_losses_that_return_no_mean(loss: Any, words: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        cf.fit(net(), fed(), METHOD, 1, loss=loss)
    assert words in str(error.value) and "\n" not in str(error.value)


def numbers(binary: bool) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(2)
    x = {name: torch.randn(12, 4, generator=generator, dtype=torch.float64) for name in "abc"}
    return cf.FederatedData({name: (part, (part.sum(dim=1) > 0) if binary else part[:, 0]) for name, part in x.items()})


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (nn.BCEWithLogitsLoss(), "bce"),
        (nn.MSELoss(), "mse"),
        (nn.L1Loss(), "mae"),
        (nn.HuberLoss(), "huber"),
    ],
    ids=["cross_entropy", "bce", "mse", "mae", "huber"],
)
def test_an_object_of_torch_is_the_named_loss(loss: nn.Module, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With its metrics, and stacked."""
    data, outputs = (fed(), 3) if name == "cross_entropy" else (numbers(name == "bce"), 1)

    def run(of: Any) -> cf.Result:
        torch.manual_seed(0)
        return cf.fit(nn.Linear(4, outputs).double(), data, METHOD, 2, loss=of)

    by_object, by_name = run(loss), run(name)
    assert by_object.rounds == by_name.rounds
    assert all(torch.equal(part, by_name.params[key]) for key, part in by_object.params.items())
    assert "one after another" not in caplog.text


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.HuberLoss(delta=2.0),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
        nn.NLLLoss(),
        functional.cross_entropy,
        nn.MSELoss,
    ],
    ids=["weights", "smoothing", "ignored label", "delta", "positive weight", "another", "function", "class"],
)
def test_an_object_with_arguments_stays_what_it_is(loss: Any) -> None:
    assert name_of_torch_object(loss) is None


def test_labels_that_torchs_object_ignores_are_still_ignored() -> None:
    data = {name: (x, y.clone()) for name, (x, y) in fed().train.items()}
    for _, y in data.values():
        y[0] = -100
    result = cf.fit(net(), cf.FederatedData(data), METHOD, 1, loss=nn.CrossEntropyLoss())
    assert np.isfinite(result.rounds[-1]["train.loss.worst"])
