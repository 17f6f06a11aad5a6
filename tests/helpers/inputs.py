"""Models of several kinds of inputs and outputs, with small federations for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf

F64 = torch.float64
CLIENTS = {"a": 9, "b": 14, "c": 23}
WORDS, TIME = 7, 6
IGNORED = -100


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def federated(make: Callable[[int, torch.Generator], Any]) -> cf.FederatedData:
    """Three clients of 9, 14 and 23 samples, and half as many to validate."""
    source = generator()
    train = {name: make(size, source) for name, size in CLIENTS.items()}
    return cf.FederatedData(train, {name: make(size // 2, source) for name, size in CLIENTS.items()})


def tokens(size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of tokens of 2 to TIME words, padded with 0, and their masks."""
    ids = torch.randint(1, WORDS, (size, TIME), generator=source)
    lengths = torch.randint(2, TIME + 1, (size, 1), generator=source)
    mask = torch.arange(TIME) < lengths
    return ids * mask, mask


def dict_data() -> cf.FederatedData:
    """A class from tokens, their mask, and two numbers."""

    def make(size: int, source: torch.Generator) -> Any:
        ids, mask = tokens(size, source)
        numbers = torch.randn(size, 2, generator=source, dtype=F64)
        y = (ids[:, 0] > 3).long() + (numbers[:, 0] > 0).long()
        return {"ids": ids, "mask": mask, "numbers": numbers}, y

    return federated(make)


class DictNet(nn.Module):
    """Keywords in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 4), nn.Linear(6, 3)

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        weight = mask.to(numbers)[:, :, None]
        mean = (self.words(ids) * weight).sum(dim=1) / weight.sum(dim=1)
        return {"logits": self.out(torch.cat([mean, numbers], dim=1)), "hidden": mean}


def next_words() -> cf.FederatedData:
    """The next word at every position; nothing where there is none."""

    def make(size: int, source: torch.Generator) -> Any:
        ids, mask = tokens(size, source)
        return {"ids": ids, "mask": mask}, shifted(ids, mask)

    return federated(make)


def shifted(ids: Tensor, mask: Tensor) -> Tensor:
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = torch.where(mask[:, 1:], ids[:, 1:], IGNORED)
    return targets


class Recurrent(nn.Module):
    """An LSTM over words: an output per position and word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(WORDS, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.words(ids))[0])
        return found


class Attending(nn.Module):
    """A small transformer with a causal mask and a mask of padding, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        size = ids.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        padded = torch.zeros(mask.shape, dtype=self.out.weight.dtype).masked_fill(~mask, -1e9)
        blocked = torch.zeros(size, size, dtype=padded.dtype).masked_fill(later, -1e9)
        found: Tensor = self.out(self.block(self.words(ids), src_mask=blocked, src_key_padding_mask=padded))
        return found


def two_targets() -> cf.FederatedData:
    """A class and a number, from two inputs by position."""

    def make(size: int, source: torch.Generator) -> Any:
        one = torch.randn(size, 3, generator=source, dtype=F64)
        other = torch.randn(size, 2, generator=source, dtype=F64)
        return (one, other), {"kind": (one[:, 0] > 0).long(), "size": other.sum(dim=1)}

    return federated(make)


@dataclass
class Both:
    kind: Tensor
    size: Tensor
    note: str = "two outputs"


class TwoOutputs(nn.Module):
    """Two inputs by position, and two outputs in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, one: Tensor, other: Tensor) -> Both:
        hidden = torch.tanh(self.body(torch.cat([one, other], dim=1)))
        return Both(self.kind(hidden), self.size(hidden).squeeze(1))


def both_losses(output: Both, y: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.kind, y["kind"]) + functional.mse_loss(output.size, y["size"])


def hits(output: Both, y: dict[str, Tensor]) -> float:
    assert output.note == "two outputs" and len(output.kind) == len(y["kind"])
    return float((output.kind.argmax(dim=1) == y["kind"]).double().mean())


def sentences() -> cf.FederatedData:
    """A class of each sentence, under the names that Hugging Face's models take."""

    def make(size: int, source: torch.Generator) -> Any:
        ids, mask = tokens(size, source)
        return {"input_ids": ids, "attention_mask": mask.long()}, (ids[:, 0] > 3).long()

    return federated(make)


def adapted_bert() -> nn.Module:
    """A frozen BERT from a config with adapters: nothing is fetched."""
    transformers = pytest.importorskip("transformers", reason="needs the extra adapters")
    peft = pytest.importorskip("peft", reason="needs the extra adapters")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes)
    bert = transformers.BertForSequenceClassification(config)
    adapters = peft.LoraConfig("SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks for what transformers deprecates
        found: nn.Module = peft.get_peft_model(bert, adapters)
    return found


@dataclass(frozen=True)
class Case:
    data: Callable[[], cf.FederatedData]
    module: Callable[[], nn.Module]
    loss: Any = "cross_entropy"
    metrics: Any = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module().to(F64)

    def fit(self, method: Any, **options: Any) -> cf.Result:
        return cf.fit(self.model(), self.data(), method, loss=self.loss, metrics=self.metrics, **options)


CASES = {
    "dict": Case(dict_data, DictNet),
    "lstm": Case(next_words, Recurrent),
    "transformer": Case(next_words, Attending, metrics=["f1"]),
    "two outputs": Case(two_targets, TwoOutputs, both_losses, {"hits": hits}),
    "lora": Case(sentences, adapted_bert),
}

# By name, for configs.


MODELS = {
    "dict": "dict_net",
    "lstm": "recurrent",
    "transformer": "attending",
    "two outputs": "two_outputs",
    "lora": "lora",
}


def for_config(seed: int = 0, case: str = "lstm") -> cf.FederatedData:
    return CASES[case].data()


def lora(shape: Any, classes: int) -> nn.Module:
    return adapted_bert().to(F64)


def dict_net(shape: Any, classes: int) -> nn.Module:
    return DictNet().to(F64)


def recurrent(shape: Any, classes: int) -> nn.Module:
    assert shape == {"ids": (TIME,), "mask": (TIME,)}
    return Recurrent().to(F64)


def attending(shape: Any, classes: int) -> nn.Module:
    return Attending().to(F64)


def two_outputs(shape: Any, classes: int) -> nn.Module:
    return TwoOutputs().to(F64)


def rolled(x: Any, generator: torch.Generator) -> Any:
    """A transform for all of the cases: numbers get noise, and every integer or mask stays."""
    parts = x.items() if isinstance(x, dict) else enumerate(x)
    noisy = {
        key: part + 0.1 * torch.randn(part.shape, generator=generator, dtype=part.dtype)
        if part.is_floating_point()
        else part
        for key, part in parts
    }
    return noisy if isinstance(x, dict) else tuple(noisy.values())
