"""Products by oneDNN: the derivatives of plain torch, used in training where it is worthwhile and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf
from comfedl.core.learner import Learner
from comfedl.engines.kernels import choice, products
from comfedl.engines.kernels.products import FastProducts, quicken

F64 = torch.float64
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=F64)


class Masked(nn.Module):
    """A transformer on [samples, 5, 8], with an attention mask."""

    def __init__(self, mask: Tensor | None = None, causal: bool = False, first: bool = True, bias: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=first, bias=bias)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.mask, self.causal, self.first = mask, causal, first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        mixed = self.encoder(x, mask=self.mask, is_causal=self.causal)
        return self.head(mixed.mean(dim=1 if self.first else 0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unmasked": Masked,
    "sequence first": lambda: Masked(first=False),
    "no bias": lambda: Masked(bias=False),
    "added mask": lambda: Masked(torch.randn(5, 5, dtype=F64)),
    "boolean mask": lambda: Masked(torch.ones(5, 5, dtype=torch.bool).triu(1)),
    "causal": lambda: Masked(CAUSAL, causal=True),
    "a mask per head": lambda: Masked(torch.randn(8, 5, 5, dtype=F64)),
}


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every product takes our path, in any dtype and on any processor; the shapes of those that did."""
    shapes: list[tuple[int, ...]] = []

    def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, len(weight)))
        out = x @ weight.t()
        return out if bias is None else out + bias

    monkeypatch.setattr(products, "WORTHWHILE", 0)
    monkeypatch.setattr(products, "_times", times)
    monkeypatch.setattr(products, "_is_plain", lambda part: part.dtype == F64)
    return shapes


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_transformer_has_the_derivatives_of_plain_torch(
    make: Callable[[], nn.Module], exactly: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model = make().to(F64)
    batch = torch.randn(4, 5, 8, dtype=F64), torch.randint(3, (4,))
    plain = Learner(model, functional.cross_entropy)
    ours = FastProducts(plain)
    params = {name: part.detach() for name, part in model.named_parameters()}
    v = {name: torch.randn_like(part) for name, part in params.items()}
    found = []
    for learner in (plain, ours):
        loss, pullback, _ = learner.loss_and_vjp(params, {}, batch)
        gradient, product, _ = learner.grad_and_hvp(params, {}, batch)
        found.append([loss, *pullback(torch.ones_like(loss)).values(), *gradient.values(), *product(v).values()])
        assert bool(exactly) == (learner is ours)
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(7, 3, 5), (7, 5, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_derivatives_of_a_product(
    rows: int, inputs: int, outputs: int, bias: bool, exactly: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    shapes = [(2, rows, inputs), (outputs, inputs), *([(outputs,)] if bias else [])]
    parts = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return products.linear(x, weight, bias).sin()

    assert torch.autograd.gradcheck(function, parts) and torch.autograd.gradgradcheck(function, parts)
    frozen = [part.detach().requires_grad_(place != 1) for place, part in enumerate(parts)]
    assert torch.autograd.gradcheck(function, frozen)
    # Without a graph of its own the gradient takes our products, and with one torch's.
    exactly.clear()
    torch.autograd.grad(function(*parts).sum(), parts)
    assert len(exactly) == 3


def test_the_products_are_right_in_single_precision() -> None:
    if not products.is_possible():
        pytest.skip("this processor has no AVX-512")
    torch.manual_seed(0)
    for rows, inputs, outputs in ((1000, 64, 256), (1000, 256, 64), (3000, 30, 77)):
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        d = torch.randn(rows, outputs)
        exact = [part.to(F64) for part in (x, weight, bias, d)]
        pairs = [
            (products._times(x, weight, bias), functional.linear(*exact[:3])),
            (products._times(d, weight.t()), exact[3] @ exact[1]),
            (products._cross(d, x), exact[3].t() @ exact[0]),
        ]
        for ours, right in pairs:
            assert ours.is_contiguous()
            assert float((ours - right).abs().max()) < 1e-5 * float(right.abs().max())


def test_small_products_and_others_than_single_precision_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("not worthwhile")

    monkeypatch.setattr(products, "_times", never)
    layer = nn.Linear(256, 256)
    large, small = torch.randn(64, 256), torch.randn(2, 256)
    with pytest.raises(AssertionError, match="not worthwhile"):
        products.linear(large, layer.weight, layer.bias)
    assert torch.equal(products.linear(small, layer.weight, layer.bias), layer(small))
    double = copy.deepcopy(layer).to(F64)
    assert torch.equal(products.linear(large.to(F64), double.weight, double.bias), double(large.to(F64)))
    batched = torch.func.vmap(lambda x: products.linear(x, layer.weight, layer.bias))(large.expand(3, 64, 256))
    assert torch.allclose(batched[0], layer(large), atol=1e-5)
    forward = torch.func.jvp(lambda x: products.linear(x, layer.weight, layer.bias), (large,), (large,))[1]
    assert torch.allclose(forward, large @ layer.weight.t(), atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(large, layer.weight, layer.bias).dtype == torch.bfloat16
    # Evaluation is torch's too, and so is a subclass of the user's.
    module = nn.Sequential(copy.deepcopy(layer), nn.ReLU())
    quicken(module)
    assert torch.equal(module.eval()(large), layer(large).relu())

    class Own(nn.Linear):
        pass

    own = Own(256, 256)
    quicken(own)
    assert type(own) is Own


@pytest.mark.parametrize("algorithm", [cf.FedAvg(lr=0.1, batch_size=8), cf.FedMAML(lr=0.1, batch_size=8)])
def test_a_run_is_that_of_plain_torch(
    algorithm: Any, exactly: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    fed = cf.FederatedData({name: (torch.randn(12, 5, 8, dtype=F64), torch.randint(3, (12,))) for name in "ab"})
    model = Masked().to(F64)
    before = copy.deepcopy(model)
    monkeypatch.setattr(choice, "gains", lambda module: False)
    plain = cf.fit(model, fed, algorithm, rounds=3).params
    assert not exactly
    monkeypatch.setattr(choice, "gains", lambda module: True)
    ours = cf.fit(model, fed, algorithm, rounds=3).params
    assert exactly
    assert all(torch.allclose(part, plain[name], rtol=0, atol=1e-9) for name, part in ours.items())
    assert type(model.head) is nn.Linear  # the user's model is left alone
    assert all(torch.equal(part, dict(before.named_parameters())[name]) for name, part in model.named_parameters())


def test_a_model_of_a_user_runs_on_it_where_the_processor_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(Masked(), functional.cross_entropy)
    for possible in (False, True):
        monkeypatch.setattr(products, "is_possible", lambda possible=possible: possible)
        assert (type(choice._one(learner)) is FastProducts) == possible
    assert type(choice._one(Learner(nn.LSTM(3, 3), functional.cross_entropy))) is Learner
