"""Batch normalisation that is cheap to differentiate twice: torch's own numbers, first and second derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfedl.core import batchnorm_hvp

F64 = torch.float64
KINDS: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (5, 3)),
    (nn.BatchNorm1d, (3, 3, 4)),
    (nn.BatchNorm2d, (3, 3, 2, 4)),
    (nn.BatchNorm3d, (2, 3, 2, 1, 3)),
]


def drawn(shape: tuple[int, ...], seed: int = 0, last: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def made(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Torch's layer away from where it starts, and the same one made cheap."""
    plain = kind(3, **options).double()
    for k, part in enumerate([*plain.parameters(), *plain.buffers()]):
        if part.is_floating_point():
            part.data = drawn(tuple(part.shape), k).abs() + 0.3
    return plain, batchnorm_hvp.made_curved(copy.deepcopy(plain))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_the_derivatives_are_those_of_differences(kind: Any, shape: tuple[int, ...], affine: bool) -> None:
    _, layer = made(kind, affine=affine, track_running_stats=False)
    names, parts = [name for name, _ in layer.named_parameters()], [part.detach() for part in layer.parameters()]

    def function(x: Tensor, *given: Tensor) -> Tensor:
        with batchnorm_hvp.curved():
            out: Tensor = torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))
        return out

    inputs = [part.clone().requires_grad_() for part in (drawn(shape), *parts)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("trained", ["x", "weight", "bias", "x weight", "weight bias"])
def test_the_derivatives_by_some_alone(trained: str) -> None:
    _, layer = made(nn.BatchNorm2d, track_running_stats=False)
    given = {"x": drawn((3, 3, 2, 4)), "weight": layer.weight.detach(), "bias": layer.bias.detach()}
    names = trained.split()

    def function(*parts: Tensor) -> Tensor:
        now = {**given, **dict(zip(names, parts, strict=True))}
        with batchnorm_hvp.curved():
            out: Tensor = torch.func.functional_call(layer, {n: now[n] for n in ("weight", "bias")}, (now["x"],))
        return out**2

    assert torch.autograd.gradgradcheck(function, [given[name].clone().requires_grad_() for name in names])


def second(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the first derivatives and the change of these along themselves."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    out = layer(leaves[0])
    slopes = torch.autograd.grad((out * out.sin()).sum(), leaves, create_graph=True)
    bends = torch.autograd.grad(sum((slope**2).sum() for slope in slopes), leaves)
    return [out, *slopes, *bends]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("affine", [True, False])
def test_all_is_as_torch_has_it(affine: bool, momentum: float | None, last: bool) -> None:
    plain, curved = made(nn.BatchNorm2d, affine=affine, momentum=momentum)
    for seed in range(3):  # momentum None is the mean over all batches so far
        x = drawn((4, 3, 3, 2), seed, last)
        expected = second(plain, x)
        with batchnorm_hvp.curved():
            found = second(curved, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        for (name, one), other in zip(curved.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=0, msg=name)
    assert int(curved.num_batches_tracked) == int(plain.num_batches_tracked)


@pytest.mark.parametrize("inside", [False, True])
def test_evaluation_takes_the_running_statistics(inside: bool) -> None:
    plain, curved = (layer.eval() for layer in made(nn.BatchNorm2d))
    x, before = drawn((4, 3, 3, 2)), curved.running_mean.clone()
    expected = second(plain, x)
    if inside:
        with batchnorm_hvp.curved():
            found = second(curved, x)
    else:
        found = second(curved, x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(curved.running_mean, before)


def test_evaluation_without_running_statistics_takes_the_batchs() -> None:
    plain, curved = (layer.eval() for layer in made(nn.BatchNorm2d, track_running_stats=False))
    with batchnorm_hvp.curved():
        found = second(curved, drawn((4, 3, 3, 2)))
    for one, other in zip(found, second(plain, drawn((4, 3, 3, 2))), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_outside_of_curved_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, curved = made(nn.BatchNorm2d)
    with monkeypatch.context() as patch:
        patch.setattr(batchnorm_hvp._Normalise, "apply", lambda *_: pytest.fail("it was not asked for"))
        found = second(curved, drawn((4, 3, 3, 2)))
    assert all(torch.equal(one, other) for one, other in zip(found, second(plain, drawn((4, 3, 3, 2))), strict=True))
    with pytest.raises(RuntimeError, match="stop"), batchnorm_hvp.curved():
        raise RuntimeError("stop")
    assert not batchnorm_hvp._curved.get()


def test_only_torchs_own_classes_are_changed() -> None:
    class Own(nn.BatchNorm2d):
        pass

    module = batchnorm_hvp.made_curved(nn.Sequential(Own(3), nn.BatchNorm2d(3), nn.ReLU()))
    assert [type(layer) for layer in module] == [Own, batchnorm_hvp.BatchNorm2d, nn.ReLU]
    assert isinstance(module[1], nn.BatchNorm2d)


def test_a_wrong_shape_is_refused_as_torch_does() -> None:
    _, curved = made(nn.BatchNorm2d)
    with batchnorm_hvp.curved(), pytest.raises(ValueError, match="expected 4D"):
        curved(drawn((4, 3)))
