"""Models by name and custom ones: sizes, shapes, initial parameters and error messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from comfedl.models.zoo import MODELS, NORMS, build
from comfedl.utils.errors import ConfigError

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def parameters(model: nn.Module) -> int:
    return sum(part.numel() for part in model.parameters())


def equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Sizes and shapes.


@pytest.mark.parametrize(("filters", "size"), [(32, 30_186), (64, 115_658)])
def test_cnn4_has_the_size_of_the_paper(filters: int, size: int) -> None:
    assert parameters(build("cnn4", CIFAR, 10, seed=0, filters=filters)) == size


def test_cnn4_has_32_filters_and_batch_norm_by_default() -> None:
    assert equal(build("cnn4", CIFAR, 10, seed=3), build("cnn4", CIFAR, 10, seed=3, filters=32, norm="batch"))


def test_logistic_on_mnist_has_7850_parameters_all_zero() -> None:
    model = build("logistic", MNIST, 10, seed=0)
    assert parameters(model) == 7_850
    assert all(not part.any() for part in model.parameters())
    output = model(torch.rand(4, *MNIST))
    assert torch.equal(output, torch.zeros(4, 10))


@pytest.mark.parametrize(
    ("hidden", "size"),
    [
        ((80, 60), 784 * 80 + 80 + 80 * 60 + 60 + 60 * 10 + 10),
        ([5], 784 * 5 + 5 + 5 * 10 + 10),
        ([], 7_850),
    ],
)
def test_mlp_has_the_widths_it_is_given(hidden: list[int], size: int) -> None:
    assert parameters(build("mlp", MNIST, 10, seed=0, hidden=hidden)) == size
    assert parameters(build("mlp", MNIST, 10, seed=0)) == 784 * 80 + 80 + 80 * 60 + 60 + 60 * 10 + 10


def test_mlp_is_not_linear() -> None:
    model = build("mlp", (1, 1, 4), 3, seed=0, hidden=[16])
    x = torch.randn(20, 1, 1, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        origin = model(torch.zeros_like(x))
        assert not torch.allclose(model(x) - origin, origin - model(-x), atol=1e-3)


@pytest.mark.parametrize("shape", [MNIST, CIFAR, DIGITS, (1, 1, 1), (2, 5, 3), (6, 4, 40)])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_one_output_per_class(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=0)
    output = model(torch.rand(5, *shape))
    assert output.shape == (5, 7)
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_samples_need_not_be_images(name: str) -> None:
    assert build(name, (6, 100), 7, seed=0)(torch.rand(3, 6, 100)).shape == (3, 7)
    assert build(name, (4,), 3, seed=0)(torch.rand(3, 4)).shape == (3, 3)


@pytest.mark.parametrize("filters", [1, 6, 32])
@pytest.mark.parametrize("norm", NORMS)
def test_cnn4_with_every_norm(norm: str, filters: int) -> None:
    model = build("cnn4", MNIST, 10, seed=0, filters=filters, norm=norm)
    assert model(torch.rand(4, *MNIST)).shape == (4, 10)
    kinds = {"batch": nn.BatchNorm2d, "running": nn.BatchNorm2d, "group": nn.GroupNorm}
    normed = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d | nn.GroupNorm)]
    assert len(normed) == (0 if norm == "none" else 4)
    assert all(isinstance(part, kinds[norm]) for part in normed)
    assert bool(list(model.buffers())) == (norm == "running")


@pytest.mark.parametrize(("norm", "depends"), [("batch", True), ("running", False), ("group", False), ("none", False)])
def test_which_norm_depends_on_the_batch_in_eval_mode(norm: str, depends: bool) -> None:
    model = build("cnn4", DIGITS, 10, seed=0, filters=8, norm=norm).eval()
    x = torch.rand(6, *DIGITS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together, apart = model(x), torch.cat([model(x[:3]), model(x[3:])])
    assert torch.allclose(together, apart, atol=1e-5) != depends


# Initial parameters.


@pytest.mark.parametrize("name", ["mlp", "cnn4"])
def test_only_the_seed_determines_the_initial_parameters(name: str) -> None:
    torch.manual_seed(11)
    first = build(name, DIGITS, 10, seed=4)
    torch.manual_seed(12)
    assert equal(first, build(name, DIGITS, 10, seed=4))
    assert not equal(first, build(name, DIGITS, 10, seed=5))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_global_generator_is_not_changed(name: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    build(name, DIGITS, 10, seed=4)
    assert torch.equal(before, torch.get_rng_state())


def test_the_global_generator_is_not_changed_by_an_error() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        build("mlp", DIGITS, 10, seed=4, hidden=[0])
    assert torch.equal(before, torch.get_rng_state())


def test_cnn4_has_xavier_initialisation_and_zero_bias() -> None:
    model = build("cnn4", CIFAR, 10, seed=0, filters=64)
    for layer in (part for part in model.modules() if isinstance(part, nn.Conv2d)):
        assert layer.bias is not None and not layer.bias.any()
        bound = (6 / (9 * (layer.in_channels + layer.out_channels))) ** 0.5
        assert 0.98 * bound < float(layer.weight.detach().abs().max()) <= bound


# Errors.


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mlp", {"hidden": [80, 0]}, ["hidden", "0", "1 or more"]),
        ("mlp", {"hidden": [2.5]}, ["hidden", "2.5"]),
        ("cnn4", {"filters": 0}, ["filters", "0", "1 or more"]),
        ("cnn4", {"filters": True}, ["filters", "True"]),
        ("cnn4", {"norm": "bach"}, ["norm", "'bach'", "did you mean 'batch'"]),
        ("cnn4", {"norm": "layer"}, ["norm", "'layer'", *NORMS]),
    ],
)
def test_an_option_out_of_range_is_named(name: str, options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(name, DIGITS, 10, seed=0, **options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("shape", [(6, 100), (64,), (1, 0, 4)])
def test_cnn4_needs_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"channels, height, width") as error:
        build("cnn4", shape, 10, seed=0)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(("name", "meant"), [("logstic", "logistic"), ("cnn", "cnn4"), ("mpl", "mlp"), ("Mlp", "mlp")])
def test_an_unknown_name_suggests_the_closest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        build(name, DIGITS, 10, seed=0)


def test_a_custom_model() -> None:
    def make(shape: Sequence[int], classes: int, width: int = 2) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.Linear(width, classes))

    model = build(make, DIGITS, 10, seed=0, width=3)
    assert parameters(model) == 64 * 3 + 3 + 3 * 10 + 10
    assert equal(model, build(make, DIGITS, 10, seed=0, width=3))
    assert not equal(model, build(make, DIGITS, 10, seed=1, width=3))
