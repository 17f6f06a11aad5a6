"""Models with several inputs and outputs, sequences, and targets that do not count: limits and equalities first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.cli.data_tables import small_clients
from comfedl.cli.tables import clients
from comfedl.config.schema import parse_config, run_config
from comfedl.core import learner as learning
from comfedl.models.metrics import METRICS, PerClient
from comfedl.utils import tree
from helpers.inputs import CASES, F64, IGNORED, Attending, DictNet, Recurrent, dict_data, federated, next_words, tokens
from helpers.stopped import StopAt, files

COMMON: dict[str, Any] = {"lr": 0.1, "local_steps": 3}
METHODS = {
    "fedavg": cf.FedAvg(batch_size=4, **COMMON),
    "all data": cf.FedAvg(batch_size=None, **COMMON),
    "kl": cf.ComFedL(outer=cf.KL(0.3), batch_size=4, **COMMON),
    "robust": cf.Robust(0.3, batch_size=4, **COMMON),
    "on outer": cf.Robust(0.3, on="outer", batch_size=4, **COMMON),
    "exact": cf.ComFedL(inner=cf.Adapt(0.05), outer=cf.KL(0.5), batch_size=4, **COMMON),
    "hessian-free": cf.FedMAML(0.05, order="hessian-free", batch_size=4, **COMMON),
    "drfa": cf.DRFA(0.05, batch_size=4, **COMMON),
    "ditto": cf.Ditto(lam=0.5, batch_size=4, **COMMON),
    "q": cf.QFedAvg(0.5, batch_size=4, **COMMON),
    "delta": cf.DeltaFL(0.5, batch_size=4, **COMMON),
    "scaffold": cf.Scaffold(batch_size=4, **COMMON),
}


def assert_same(one: cf.Result, other: cf.Result, within: float = 0.0, renamed: bool = False) -> None:
    """The same models and records; ``renamed`` if the models' parameters have other names."""
    pairs = zip(one.params.values(), other.params.values(), strict=True)
    assert renamed or list(one.params) == list(other.params)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=within)
    for ours, theirs in zip([*one.rounds, *one.clients], [*other.rounds, *other.clients], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, str) or within == 0:
                assert value == theirs[name], name
            else:
                assert math.isclose(value, theirs[name], rel_tol=10 * within, abs_tol=10 * within), name


def plain_data() -> cf.FederatedData:
    def make(size: int, source: torch.Generator) -> Any:
        x = torch.randn(size, 5, generator=source, dtype=F64)
        return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

    return federated(make)


def remade(fed: cf.FederatedData, change: Any) -> cf.FederatedData:
    """The same data with x changed."""
    splits = {name: fed.split(name) for name in ("train", "validation")}
    return cf.FederatedData(
        **{
            name: {client: (change(x), y) for client, (x, y) in split.items()}
            for name, split in splits.items()
            if split
        }
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).to(F64)


class Named(nn.Module):
    """``net`` with its five numbers under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, front: Tensor, back: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat([front, back], dim=1))
        return found


# Limits and equalities.


@pytest.mark.parametrize("method", METHODS)
def test_a_tuple_of_one_tensor_is_the_tensor(method: str) -> None:
    serial: dict[str, Any] = {"rounds": 3, "engine_options": {"vectorize": "serial"}}
    fed = plain_data()
    single = cf.fit(net(), remade(fed, lambda x: (x,)), METHODS[method], rounds=3)
    assert_same(single, cf.fit(net(), fed, METHODS[method], **serial))
    assert_same(single, cf.fit(net(), fed, METHODS[method], rounds=3), 1e-9)


@pytest.mark.parametrize("method", ["fedavg", "exact"])
def test_a_tuple_of_one_image_is_the_image(method: str) -> None:
    """Where plain images have derivatives written by hand."""

    def images(size: int, source: torch.Generator) -> Any:
        x = torch.randn(size, 2, 6, 6, generator=source, dtype=F64)
        return x, (x.mean(dim=(1, 2, 3)) > 0).long()

    def conv() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
        return nn.Sequential(*layers).to(F64)

    fed = federated(images)
    plain, single = (cf.fit(conv(), data, METHODS[method], rounds=2) for data in (fed, remade(fed, lambda x: (x,))))
    assert_same(single, plain, 1e-9)
    named = cf.fit(Keyword(conv()), remade(fed, lambda x: {"image": x}), METHODS[method], rounds=2)
    assert_same(named, plain, 1e-9, renamed=True)


class Keyword(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.net(image)
        return found


@pytest.mark.parametrize("method", METHODS)
def test_a_dict_is_its_tensors_in_one(method: str) -> None:
    fed = plain_data()
    parted = remade(fed, lambda x: {"front": x[:, :2], "back": x[:, 2:]})
    found = cf.fit(Named(), parted, METHODS[method], rounds=3)
    assert_same(found, cf.fit(net(), fed, METHODS[method], rounds=3), 1e-9, renamed=True)


@pytest.mark.parametrize("name", ["fedavg", "exact", "robust"])
@pytest.mark.parametrize("module", [Recurrent, Attending])
def test_padding_with_a_mask_is_no_padding(module: type[nn.Module], name: str) -> None:
    """What stands behind the end of a sequence does not count: neither how much of it nor what."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = module().to(F64)
        for layer in made.modules():  # the noise of dropout would depend on the padding
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0
        return made

    def whole(size: int, source: torch.Generator) -> Any:
        ids, mask = tokens(size, source)
        ids = torch.where(mask, ids, 1)
        targets = torch.roll(ids, -1, 1)
        return {"ids": ids, "mask": torch.ones_like(mask)}, targets

    def padded(size: int, source: torch.Generator) -> Any:
        x, y = whole(size, source)
        filler = torch.full((size, 3), 5)
        x = {"ids": torch.cat([x["ids"], filler], dim=1), "mask": functional.pad(x["mask"], (0, 3))}
        return x, functional.pad(y, (0, 3), value=IGNORED)

    found, wanted = (cf.fit(model(), federated(make), METHODS[name], rounds=2) for make in (padded, whole))
    assert_same(found, wanted, 1e-10)


def test_the_loss_of_sequences_is_the_mean_over_targets_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In however many chunks it is evaluated."""
    monkeypatch.setattr(learning, "CHUNK", 4)
    case = CASES["lstm"]
    result = case.fit(cf.FedAvg(lr=0.1, batch_size=4), rounds=1)
    module, fed = result.to_module(), case.data()
    for row in result.clients:
        x, y = fed.train[str(row["client"])]
        output = module(**x).detach()
        kept = y != IGNORED
        wanted = functional.cross_entropy(output[kept], y[kept])
        assert row["train.loss"] == pytest.approx(float(wanted), rel=1e-12)
        assert row["train.accuracy"] == pytest.approx(float((output.argmax(2)[kept] == y[kept]).double().mean()))


def test_a_chunk_without_a_target_that_counts_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "CHUNK", 4)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).to(F64)
    x, y = torch.randint(7, (8, 3)), torch.randint(7, (8, 3))
    y[:4] = IGNORED
    accuracy = METRICS["accuracy"].function
    learner = learning.Learner(module, functional.cross_entropy, {"accuracy": accuracy})
    model = learning.Model(params=dict(module.named_parameters()), buffers={})
    found = learner.scores(model, (x, y))
    assert found == learner.scores(model, (x[4:], y[4:])) and found["loss"].isfinite()
    nothing = learner.means(model, (x, torch.full_like(y, IGNORED)), {"loss": functional.cross_entropy})
    assert nothing["loss"].isnan()


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 8.0, dtype=F64)),
    ],
    ids=["function", "object", "arguments", "weights"],
)
def test_torchs_cross_entropy_is_the_same_in_any_chunks(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the classes in dimension 1, and other numbers of targets in each chunk, of which one has none."""
    monkeypatch.setattr(learning, "CHUNK", 4)

    class Turned(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(1, 2)

    torch.manual_seed(0)
    module = Turned(7, 7).to(F64)
    x, y = torch.randint(7, (12, 3)), torch.randint(7, (12, 3))
    y[:4, 1:] = y[4:8] = getattr(loss, "ignore_index", IGNORED)
    model = learning.Model(params=dict(module.named_parameters()), buffers={})
    found = learning.Learner(module, loss).mean_loss(model, (x, y))
    torch.testing.assert_close(found, loss(module(x), y).detach(), rtol=1e-12, atol=0)


def test_a_batch_without_a_target_that_counts_changes_nothing() -> None:
    source = torch.Generator().manual_seed(0)
    ids, mask = tokens(3, source)
    nothing = torch.full_like(ids, IGNORED)
    nothing[-1, 0] = 1  # the data as a whole have one
    fed = cf.FederatedData({"a": ({"ids": ids, "mask": mask}, nothing)})
    learner = learning.Learner(CASES["lstm"].model(), functional.cross_entropy)
    params = dict(CASES["lstm"].model().named_parameters())
    loss, pullback, _ = learner.loss_and_vjp(params, {}, (tree.map(lambda t: t[:2], fed.train["a"][0]), nothing[:2]))
    assert float(loss) == 0 and all(not part.any() for part in pullback(torch.ones_like(loss)).values())


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_exact_derivatives_of_sequence_models_are_those_of_differences(name: str) -> None:
    """Adapt's second derivative, also of attention, where torch's fast kernels have none."""
    module = CASES[name].model()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, nn.MultiheadAttention):
            layer.dropout = 0.0
    learner = learning.Learner(module, functional.cross_entropy)
    params = {key: part.detach() for key, part in module.named_parameters()}
    batch = CASES[name].data().train["a"]
    source = torch.Generator().manual_seed(1)
    v = tree.map(lambda part: torch.randn(part.shape, generator=source, dtype=F64), params)
    _, hvp, _ = learner.grad_and_hvp(params, {}, batch)

    def slope(step: float) -> Any:
        loss, pullback, _ = learner.loss_and_vjp(tree.step(params, -step, v), {}, batch)
        return pullback(torch.ones_like(loss))

    wanted = tree.map(lambda ahead, behind: (ahead - behind) / 2e-5, slope(1e-5), slope(-1e-5))
    for key, part in hvp(v).items():
        torch.testing.assert_close(part, wanted[key], rtol=1e-4, atol=1e-7)


# Outputs.


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    cache: Any = None


class WithOutput(nn.Module):
    """``net`` with another kind of output, and the loss if it is given labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(x)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return {"logits": logits, "loss": loss} if self.kind == "dict" else Output(logits, loss)


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), cf.losses.CrossEntropy(label_smoothing=0.1)])
def test_the_logits_of_an_output(kind: str, loss: Any) -> None:
    options: dict[str, Any] = {"rounds": 3, "loss": loss, "metrics": ["f1"]}
    found = cf.fit(WithOutput(kind), plain_data(), METHODS["fedavg"], **options)
    wanted = cf.fit(net(), plain_data(), METHODS["fedavg"], **options, engine_options={"vectorize": "serial"})
    assert_same(found, wanted, renamed=True)


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_a_loss_that_the_model_computes(kind: str) -> None:
    """As Hugging Face's models do, if x has the labels; and accuracy is there all the same."""
    fed = plain_data()
    labelled = cf.FederatedData({name: ({"x": x, "labels": y}, y) for name, (x, y) in fed.train.items()})
    serial: dict[str, Any] = {"rounds": 3, "engine_options": {"vectorize": "serial"}}
    plain = cf.fit(net(), cf.FederatedData(dict(fed.train)), METHODS["kl"], **serial)
    found = cf.fit(WithOutput(kind), labelled, METHODS["kl"], rounds=3, loss="model")
    assert_same(found, plain, renamed=True)
    own = cf.fit(
        WithOutput(kind),
        labelled,
        METHODS["kl"],
        rounds=3,
        loss=lambda output, y: output["loss"] if kind == "dict" else output.loss,
    )
    assert_same(own, plain, renamed=True)


def test_a_model_without_a_loss_of_its_own() -> None:
    with pytest.raises(cf.DataError, match='loss is "model", but the model returned a Tensor with no loss'):
        cf.fit(net(), plain_data(), METHODS["fedavg"], rounds=1, loss="model")


def test_classes_in_dimension_1_are_torchs_own_object() -> None:
    class Turned(Recurrent):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask).transpose(1, 2)

    def turned() -> nn.Module:
        torch.manual_seed(0)
        return Turned().to(F64)

    fed = next_words()
    with pytest.raises(cf.DataError, match="a target for each output"):
        cf.fit(turned(), fed, METHODS["fedavg"], rounds=1)
    found = cf.fit(turned(), fed, METHODS["fedavg"], rounds=2, loss=nn.CrossEntropyLoss())
    wanted = CASES["lstm"].fit(METHODS["fedavg"], rounds=2)
    assert_same(cf.fit(CASES["lstm"].model(), fed, METHODS["fedavg"], rounds=2, loss=nn.CrossEntropyLoss()), wanted)
    for name, part in wanted.params.items():
        torch.testing.assert_close(found.params[name], part, rtol=0, atol=1e-10)
    assert "train.accuracy.mean" not in found.rounds[-1]


@pytest.mark.parametrize(
    ("loss", "time", "words"),
    [
        (nn.CrossEntropyLoss(), 7, "the classes may be last or, as torch has them, in dimension 1"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 7, "the classes may be last or, as torch has them, in dimension 1"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 4, "needs the classes in dimension 1"),
        (nn.CrossEntropyLoss(ignore_index=0), 4, "needs the classes in dimension 1"),
    ],
)
def test_torchs_own_object_needs_classes_that_are_clearly_in_dimension_1(loss: Any, time: int, words: str) -> None:
    x = torch.randint(7, (8, time), generator=torch.Generator().manual_seed(0))
    chain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    with pytest.raises(cf.ConfigError, match=words):
        cf.fit(chain, cf.FederatedData(dict.fromkeys("ab", (x, x))), METHODS["fedavg"], rounds=1, loss=loss)


def test_two_outputs_come_whole_to_a_loss_and_a_metric_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CASES["two outputs"].fit(METHODS["kl"], rounds=2)
    monkeypatch.setattr(learning, "CHUNK", 5)
    assert_same(CASES["two outputs"].fit(METHODS["kl"], rounds=2), whole, 1e-12)
    fed, module = CASES["two outputs"].data(), whole.to_module()
    for row in whole.clients[-3:]:
        x, y = fed.train[str(row["client"])]
        found = (module(*x).kind.argmax(1) == y["kind"]).double().mean()
        assert row["train.hits"] == pytest.approx(float(found))


@pytest.mark.parametrize("size", [8, 11])
def test_parts_of_an_output_that_are_of_no_sample(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars are means over all samples, and a constant is itself, even if it is as long as the chunks."""
    monkeypatch.setattr(learning, "CHUNK", 4)

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            output = self.net(x)
            table = torch.arange(4.0, dtype=F64)
            return {"logits": output, "table": table, "parts": [output.square().mean(), output.mean().item(), None]}

    torch.manual_seed(0)
    module, x = Parts().to(F64), torch.randn(size, 3, dtype=F64)
    kept: list[Any] = []

    def keep(output: Any, y: Tensor) -> float:
        kept.append(output)
        return 0.0

    model = learning.Model(params=dict(module.named_parameters()), buffers={})
    learning.Learner(module).means(model, (x, torch.zeros(size)), {"own": PerClient("own", keep)})
    wanted = module(x)["logits"].detach()
    torch.testing.assert_close(kept[0]["logits"], wanted, rtol=0, atol=1e-12)
    assert torch.equal(kept[0]["table"], torch.arange(4.0, dtype=F64))
    square, mean, nothing = kept[0]["parts"]
    assert float(square) == pytest.approx(float(wanted.square().mean())) and nothing is None
    assert mean == pytest.approx(float(wanted.mean()))


def test_the_targets_of_two_outputs_need_a_loss_of_ones_own() -> None:
    case = CASES["two outputs"]
    with pytest.raises(cf.DataError, match="needs y as a tensor, but it is a dict of 'kind', 'size'"):
        cf.fit(case.model(), case.data(), METHODS["fedavg"], rounds=1)


# Runs that stop, other paths, and saved runs.


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 6, "checkpoint_every": 2, "clients_per_round": 2}
    method = cf.Ditto(lam=0.5, batch_size=4, **COMMON)
    whole = CASES[name].fit(method, out=tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="a bug"):
        CASES[name].fit(method, out=tmp_path / "cut", callbacks=[StopAt(3, RuntimeError("a bug"))], **options)
    assert_same(CASES[name].fit(method, out=tmp_path / "cut", resume=True, **options), whole)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_other_keys_are_other_data(tmp_path: Path) -> None:
    fed = dict_data()
    CASES["dict"].fit(METHODS["fedavg"], rounds=2, out=tmp_path / "run")
    renamed = remade(fed, lambda x: {"words": x["ids"], "mask": x["mask"], "numbers": x["numbers"]})

    class Renamed(DictNet):
        def forward(self, words: Tensor, mask: Tensor, numbers: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(words, mask, numbers)

    torch.manual_seed(0)
    with pytest.raises(cf.RunFolderError, match="other data"):
        cf.fit(Renamed().to(F64), renamed, METHODS["fedavg"], rounds=3, out=tmp_path / "run", resume=True)


def test_many_clients_at_once_are_for_plain_tensors() -> None:
    for case in ("dict", "two outputs"):
        with pytest.raises(cf.ConfigError, match="x or y is a tuple or dict of tensors; use"):
            CASES[case].fit(METHODS["fedavg"], rounds=1, engine_options={"vectorize": "vmap"})
    # A dense model of sequences could be stacked, but for targets that do not count.
    ids, mask = tokens(8, torch.Generator().manual_seed(0))
    fed = cf.FederatedData(dict.fromkeys("ab", (ids, torch.where(mask, ids, IGNORED))))
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).to(F64)
    result = cf.fit(chain, fed, METHODS["fedavg"], rounds=2)
    assert_same(cf.fit(chain, fed, METHODS["fedavg"], rounds=2, engine_options={"vectorize": "serial"}), result)
    with pytest.raises(cf.ConfigError, match="the targets are sequences"):
        cf.fit(chain, fed, METHODS["fedavg"], rounds=1, engine_options={"vectorize": "stack"})


def test_ones_own_loss_on_sequences_runs_one_client_after_another() -> None:
    """Accuracy is added, which many clients at once cannot tell from sequences."""

    def own(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, -2), y.flatten())

    ids, _ = tokens(8, torch.Generator().manual_seed(0))
    fed = cf.FederatedData(dict.fromkeys("ab", (ids, ids)))
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).to(F64)
    found, wanted = (cf.fit(chain, fed, METHODS["fedavg"], rounds=2, loss=loss) for loss in (own, "cross_entropy"))
    assert_same(found, wanted, 1e-12)
    with pytest.raises(cf.ConfigError, match=r"'vmap', but the targets are sequences.*use .auto. or"):
        cf.fit(chain, fed, METHODS["fedavg"], rounds=2, loss=own, engine_options={"vectorize": "vmap"})


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_vmap_sees_the_logits(kind: str) -> None:
    class Plain(WithOutput):
        def __init__(self, kind: str) -> None:
            super().__init__(kind)
            self.net[2].p = 0.0  # type: ignore[index]

    found, wanted = (
        cf.fit(Plain(kind), plain_data(), METHODS["kl"], rounds=2, metrics=["f1"], engine_options={"vectorize": path})
        for path in ("vmap", "serial")
    )
    assert_same(found, wanted, 1e-10)


def test_a_saved_run_takes_the_inputs_of_its_model(tmp_path: Path) -> None:
    result = CASES["dict"].fit(METHODS["fedavg"], rounds=2, out=tmp_path / "run")
    saved = cf.load_run(tmp_path / "run", CASES["dict"].model()).to_module("b")
    x, _ = dict_data().train["b"]
    assert torch.equal(saved(**x)["logits"], result.to_module("b")(**x)["logits"])


def config(out: Path | None = None, **more: Any) -> Any:
    return parse_config(
        {
            "rounds": 3,
            "data": {"name": "helpers.inputs:for_config"},
            "model": {"name": "helpers.inputs:recurrent"},
            "algorithm": {"name": "ditto", "batch_size": 4},
            **more,
        }
    )


def test_a_config_with_data_and_a_model_of_ones_own(tmp_path: Path) -> None:
    """The model's function is told the shapes; the run is evaluated and made again from its folder."""
    result = run_config(config(), out=tmp_path / "run")
    scores = evaluate(cf.load_run(tmp_path / "run", trust=True), "validation")
    last = {row["client"]: row for row in result.clients[-3:]}
    for row in scores.rows:
        assert row["loss"] == pytest.approx(last[row["client"]]["validation.loss"], rel=1e-12)
        assert row["personal_accuracy"] == pytest.approx(last[row["client"]]["validation.personal_accuracy"])
    assert not any("low" in key for row in scores.rows for key in row)  # targets of a sequence are not independent
    with pytest.raises(cf.ConfigError, match="The model mlp takes one tensor, but samples are"):
        run_config(config(model={"name": "mlp"}))


def test_data_of_several_inputs_and_targets_are_described() -> None:
    for name in ("two outputs", "lstm", "dict"):
        table, lines = clients(CASES[name].data()), list(small_clients(CASES[name].data()))
        assert table.row_count == 3 and any("Fewer than" in line for line in lines)


def test_the_share_set_aside_and_faults_on_labels() -> None:
    """Outer data are drawn from dicts, and targets that do not count are not flipped."""
    method = cf.Robust(0.3, on="outer", batch_size=4, **COMMON)
    assert "objective" in CASES["two outputs"].fit(method, rounds=2).rounds[-1]
    flipped = CASES["lstm"].fit(method, rounds=2, faults=[cf.faults.LabelFlip(["a"])])
    assert not torch.equal(flipped.params["out.bias"], CASES["lstm"].fit(method, rounds=2).params["out.bias"])
    from comfedl.engines.faults import poisoned

    fed = next_words()
    found = poisoned(fed, [cf.faults.LabelFlip(["a"])])
    before, after = fed.train["a"][1], found.train["a"][1]
    assert torch.equal(before == IGNORED, after == IGNORED) and torch.equal(fed.train["b"][1], found.train["b"][1])
    assert torch.equal(after[before != IGNORED], 6 - before[before != IGNORED])


# Bad input.


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (lambda y: torch.where(y == 3, 9, y), ["'a'", "the target 9 in train", "0 to 6", "-100"]),
        (lambda y: torch.where(y == 3, -1, y), ["'a'", "the target -1 in train"]),
        (lambda y: torch.full_like(y, IGNORED), ["client 'a'", "in train are -100", "nothing to predict"]),
        (lambda y: y[:, :4], ["a target for each output", "(2, 6, 7)", "(2, 4)"]),
        (lambda y: y.double(), ["integer label", "float64"]),
    ],
)
def test_targets_that_do_not_fit(y: Any, words: list[str]) -> None:
    fed = next_words()
    bad = cf.FederatedData({name: (x, y(own)) for name, (x, own) in fed.train.items()})
    with pytest.raises(cf.DataError) as error:
        cf.fit(CASES["lstm"].model(), bad, METHODS["fedavg"], rounds=1)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_inputs_that_the_model_does_not_take() -> None:
    fed = remade(dict_data(), lambda x: {"tokens": x["ids"], "mask": x["mask"]})
    with pytest.raises(cf.DataError) as error:
        cf.fit(CASES["dict"].model(), fed, METHODS["fedavg"], rounds=1)
    assert "['tokens'] (6,) torch.int64" in str(error.value) and "model(**x)" in str(error.value)
