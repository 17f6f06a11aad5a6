"""Adapters on a frozen model: only what is trained travels, is averaged and, if asked for, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import comfedl as cf
from comfedl.training import personal_models
from comfedl.utils import tree
from helpers.inputs import F64, IGNORED, federated, shifted, tokens
from helpers.stopped import StopAt


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(LowRank(nn.Linear(20, 30)), nn.Tanh(), LowRank(nn.Linear(30, 2))).to(F64)


def data() -> cf.FederatedData:
    def make(size: int, source: torch.Generator) -> Any:
        x = torch.randn(size, 20, generator=source, dtype=F64)
        return x, (x[:, 0] > 0).long()

    return federated(make)


TRAINED = {"0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"}
METHOD = cf.Ditto(lam=0.5, lr=0.1, batch_size=4)


def run(out: Path, **options: Any) -> cf.Result:
    return cf.fit(
        net(), data(), METHOD, **{"rounds": 4, "checkpoint_every": 1, "save_frozen": False, **options}, out=out
    )


def test_only_what_is_trained_travels(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    size = tree.nbytes([part for name, part in result.params.items() if name in TRAINED])
    assert size < 0.3 * tree.nbytes(result.params)
    assert result.traffic["down_bytes"] >= 4 * 3 * size and result.traffic["down_bytes"] < 4 * 3 * size + 4 * 3 * 64
    assert all(torch.equal(part, result.params[name]) for name, part in net().named_parameters() if name not in TRAINED)


def test_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    """And a run's folder with a model has the whole of it, as a folder with everything has."""
    adapters, whole = run(tmp_path / "adapters"), run(tmp_path / "whole", save_frozen=True)
    files = ["model.safetensors", *(f"personal/{name}.safetensors" for name in "abc")]
    for file in files:
        small, large = load_file(tmp_path / "adapters" / file), load_file(tmp_path / "whole" / file)
        assert small.keys() == TRAINED and large.keys() == whole.params.keys()
        assert all(torch.equal(part, large[name]) for name, part in small.items())
    assert "save_frozen = false" in (tmp_path / "adapters" / "config.toml").read_text()
    assert "save_frozen" not in (tmp_path / "whole" / "config.toml").read_text()
    x, _ = data().train["a"]
    saved = cf.load_run(tmp_path / "adapters", net())
    for client in (None, "b"):
        assert torch.equal(saved.to_module(client)(x), cf.load_run(tmp_path / "whole", net()).to_module(client)(x))
        assert torch.equal(saved.to_module(client)(x), adapters.to_module(client)(x))
    # Of a run that is to have everything, a missing part is an error.
    (tmp_path / "whole" / "model.safetensors").write_bytes((tmp_path / "adapters" / "model.safetensors").read_bytes())
    with pytest.raises(cf.RunFolderError, match=r"base\.bias is missing there"):
        cf.load_run(tmp_path / "whole", net()).to_module()


def test_a_stopped_run_of_adapters(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path / "cut", callbacks=[StopAt(2, RuntimeError("a bug"))])
    (saved,) = (tmp_path / "cut" / "checkpoint").glob("round-*2/tensors.safetensors")
    assert not any(part.shape == (30, 20) for part in load_file(saved).values())
    unfinished = cf.load_run(tmp_path / "cut", net())
    assert unfinished.unfinished is not None and unfinished.to_module()(torch.zeros(1, 20, dtype=F64)).shape == (1, 2)
    with pytest.raises(cf.RunFolderError, match="another initial model"):
        cf.fit(net(seed=1), data(), METHOD, 4, out=tmp_path / "cut", resume=True, save_frozen=False, checkpoint_every=1)
    result = run(tmp_path / "cut", resume=True)
    assert all(torch.equal(part, whole.params[name]) for name, part in result.params.items())
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_adapters_of_many_clients_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = run(tmp_path / "apart")
    monkeypatch.setattr(personal_models, "MOST_FILES", 2)
    packed = run(tmp_path / "packed")
    assert load_file(tmp_path / "packed" / "personal" / "models.safetensors").keys() == TRAINED
    for client in "abc":
        assert packed.personal(client).keys() == apart.personal(client).keys()
        assert all(torch.equal(part, packed.personal(client)[name]) for name, part in apart.personal(client).items())
    x, _ = data().train["a"]
    assert torch.equal(cf.load_run(tmp_path / "packed", net()).to_module("c")(x), apart.to_module("c")(x))


# Hugging Face's models, built from a config: nothing is fetched.


def words(following: bool) -> cf.FederatedData:
    """Sentences of 2 to 6 words with their masks, and a class of each or the next word everywhere."""

    def make(size: int, source: torch.Generator) -> Any:
        ids, mask = tokens(size, source)
        x = {"input_ids": ids, "attention_mask": mask.long()}
        return x, shifted(ids, mask) if following else (ids[:, 0] > 3).long()

    return federated(make)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra adapters")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=7, max_position_embeddings=16, **sizes)
    found: nn.Module = transformers.BertForSequenceClassification(config).double()
    return found


def adapted(model: nn.Module, targets: list[str], kind: str) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs the extra adapters")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type=kind, r=2, lora_alpha=4, lora_dropout=0.1, target_modules=targets)
    found: nn.Module = peft.get_peft_model(model, config).double()
    return found


hugging = pytest.mark.filterwarnings("ignore")


@hugging
def test_a_model_of_hugging_face_with_the_loss_of_its_own() -> None:
    fed = words(following=False)
    options: dict[str, Any] = {"rounds": 2, "metrics": ["f1"]}
    labelled = cf.FederatedData({name: ({**x, "labels": y}, y) for name, (x, y) in fed.train.items()})
    plain = cf.fit(bert(), cf.FederatedData(dict(fed.train)), cf.Robust(lr=0.1, batch_size=4), **options)
    own = cf.fit(bert(), labelled, cf.Robust(lr=0.1, batch_size=4), loss="model", **options)
    assert own.rounds == plain.rounds and "train.f1.mean" in own.rounds[-1]
    maml = cf.ComFedL(inner=cf.Adapt(0.05), outer=cf.KL(0.3), lr=0.1, batch_size=4)
    assert all(part.isfinite().all() for part in cf.fit(bert(), fed, maml, rounds=1).params.values())


@hugging
def test_lora_of_a_classifier(tmp_path: Path) -> None:
    """The ledger shows the difference; the folder holds the adapters; every client has its own."""

    def model() -> nn.Module:
        return adapted(bert(), ["query", "value"], "SEQ_CLS")

    options: dict[str, Any] = {"rounds": 4, "checkpoint_every": 1, "save_frozen": False}
    whole = cf.fit(bert(), words(following=False), METHOD, rounds=4)
    result = cf.fit(model(), words(following=False), METHOD, out=tmp_path / "run", **options)
    assert result.traffic["up_bytes"] < 0.2 * whole.traffic["up_bytes"]
    trained = {name for name, part in model().named_parameters() if part.requires_grad}
    assert load_file(tmp_path / "run" / "personal" / "b.safetensors").keys() >= trained
    assert not any("embeddings.word" in name for name in load_file(tmp_path / "run" / "model.safetensors"))
    x, _ = words(following=False).train["b"]
    for client in (None, "b"):
        ours, saved = result.to_module(client), cf.load_run(tmp_path / "run", model()).to_module(client)
        assert torch.equal(ours(**x).logits, saved(**x).logits)
    with pytest.raises(RuntimeError, match="a bug"):
        stop = [StopAt(2, RuntimeError("a bug"))]
        cf.fit(model(), words(following=False), METHOD, out=tmp_path / "cut", callbacks=stop, **options)
    again = cf.fit(model(), words(following=False), METHOD, out=tmp_path / "cut", resume=True, **options)
    assert all(torch.equal(part, result.params[name]) for name, part in again.params.items())


@hugging
def test_lora_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra adapters")
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = adapted(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=7, **sizes)), ["c_attn"], "CAUSAL_LM"
    )
    result = cf.fit(model, words(following=True), cf.FedAvg(lr=0.1, batch_size=4), rounds=2)
    module, counted = result.to_module(), 0.0
    x, y = words(following=True).train["c"]
    kept = y != IGNORED
    counted = float((module(**x).logits.argmax(2)[kept] == y[kept]).double().mean())
    last = next(row for row in result.clients[-3:] if row["client"] == "c")
    assert last["train.accuracy"] == pytest.approx(counted)
