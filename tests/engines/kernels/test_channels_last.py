"""The changes that the learner for images makes to its copy of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from comfedl.core.learner import Learner
from comfedl.engines.kernels.channels_last import ChannelsLast, pool_before_relu


@pytest.mark.parametrize("size", [2, 3])
def test_relu_behind_max_pooling_is_the_same_to_the_bit(size: int) -> None:
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(nn.ReLU(), nn.MaxPool2d(size, stride=2)), nn.ReLU()
    )
    moved = pool_before_relu(copy.deepcopy(plain))
    assert [type(layer) for layer in moved[1]] == [nn.MaxPool2d, nn.ReLU]
    x = torch.randn(6, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    x[:2] = x[:2].round()  # with ties
    x[2, :, :5] = 0.0
    results = []
    for module in (plain, moved):
        given_x = x.clone().requires_grad_()
        out = module(given_x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad((out * weights).sum(), [given_x, *module.parameters()])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_is_watched_stays_where_it_is() -> None:
    module = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    module[0].register_forward_hook(lambda *_: None)
    assert [type(layer) for layer in pool_before_relu(module)] == [nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("samples", [1, 4])
def test_images_are_laid_out_as_torch_tells_it(channels: int, samples: int) -> None:
    """A single channel fits both layouts; its strides decide whether torch uses its fast kernels."""
    x = torch.randn(2 + samples, channels, 5, 4)[2:]
    learner = ChannelsLast(Learner(nn.Conv2d(channels, 1, 3)))
    laid = learner.to_layout({"x": x, "y": torch.arange(3)})
    assert laid["x"].stride() == (20 * channels, 1, 4 * channels, channels)
    assert torch.equal(laid["x"], x)
    if channels == 1:
        assert laid["x"].data_ptr() == x.data_ptr()
    assert torch.equal(learner.from_layout(laid)["x"], x)
