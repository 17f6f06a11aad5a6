"""Closed-form gradients and Hessian-vector products against autograd, in double precision."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional

import comfedl as cf
from comfedl.core.learner import Batch, Learner, Model, Params, value_and_vjp
from comfedl.core.objectives import Adapt, Adapted, LocalLoss, gradient
from comfedl.engines.kernels import conv_chain, layouts
from comfedl.engines.kernels.channels_last import ChannelsLast
from comfedl.engines.kernels.conv_chain import Chain
from comfedl.engines.kernels.dense import Dense
from comfedl.engines.replies import stack_trees
from comfedl.models.functional import Stateless
from comfedl.utils import tree

F64 = torch.float64
CLASSES = 3


def state(module: nn.Module) -> Model:
    params = {name: part.detach() for name, part in module.named_parameters() if part.requires_grad}
    return Model(params=params, buffers=dict(module.named_buffers()))


def scattered(module: nn.Module, seed: int, negative: bool = False) -> nn.Module:
    """The module in double precision, with perturbed parameters and statistics."""
    generator = torch.Generator().manual_seed(seed)
    module = copy.deepcopy(module).double()
    for name, part in [*module.named_parameters(), *module.named_buffers()]:
        if not part.is_floating_point():
            continue
        noise = torch.randn(part.shape, generator=generator, dtype=F64)
        scale = part.ndim == 1 and name.endswith(("weight", "var"))
        part.data = (noise if negative else noise.abs() + 0.2) if scale else 0.5 * noise
    return module


def batch(shape: tuple[int, ...], samples: int = 5, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *shape, generator=generator, dtype=F64)
    return x, torch.randint(0, CLASSES, (samples,), generator=generator)


def direction(params: Params, seed: int = 2) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(part.shape, generator=generator, dtype=F64) for name, part in params.items()}


def plainly(module: nn.Module, model: Model, data: Batch, v: Params) -> tuple[Tensor, Params, Params, Params]:
    """The loss, gradient, Hessian-vector product and buffers, by torch's double backward."""
    call, after = Stateless(copy.deepcopy(module)), {name: part.clone() for name, part in model["buffers"].items()}
    if len(data[0]) == 1:
        data = (torch.cat([data[0]] * 2), torch.cat([data[1]] * 2))
    leaves = {name: part.clone().requires_grad_() for name, part in model["params"].items()}
    loss = functional.cross_entropy(call(data[0], True, leaves, after), data[1])
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    along = sum((slope * v[name]).sum() for name, slope in zip(leaves, slopes, strict=True))
    products = torch.autograd.grad(along, list(leaves.values()), materialize_grads=True)
    return (
        loss.detach(),
        {name: slope.detach() for name, slope in zip(leaves, slopes, strict=True)},
        dict(zip(leaves, products, strict=True)),
        after,
    )


def near(found: Params, expected: Params) -> None:
    """Equal to 1e-10 of the largest value: the gradient of a bias before a norm is 0 up to rounding."""
    assert list(found) == list(expected)
    size = max((float(part.abs().max()) for part in expected.values()), default=0.0)
    for name, part in expected.items():
        torch.testing.assert_close(
            found[name], part, rtol=0, atol=1e-10 * (size + 1), msg=lambda m, n=name: f"{n}: {m}"
        )


def agrees(module: nn.Module, data: Batch, model: Model | None = None) -> None:
    """The closed-form derivatives are used, and equal autograd's."""
    model = state(module) if model is None else model
    learner = ChannelsLast(Learner(module, functional.cross_entropy))
    chain = learner._chain
    assert chain is not None
    assert chain.takes(model["params"], data)
    v = direction(model["params"])
    before = {name: part.clone() for name, part in model["buffers"].items()}
    value, slope, product, after = plainly(module, model, data, v)

    found, pullback, seen = learner.loss_and_vjp(model["params"], model["buffers"], data)
    torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
    near(pullback(torch.tensor(2.0, dtype=F64)), {name: 2 * part for name, part in slope.items()})
    near(seen, after)

    curved, times, seen = learner.grad_and_hvp(model["params"], model["buffers"], data)
    near(curved, slope)
    near(seen, after)
    near(times(v), product)
    for name, part in before.items():
        assert torch.equal(model["buffers"][name], part), "the buffers that were handed in stay as they are"


# Random chains.


ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid)


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """A chain of image layers, then of flat ones, with the shape of a sample."""
    channels, height, width = draw(st.integers(1, 3)), draw(st.integers(5, 8)), draw(st.integers(5, 8))
    shape = (channels, height, width)
    layers: list[nn.Module] = []

    def fits(layer: nn.Module) -> bool:
        nonlocal channels, height, width
        try:
            out = nn.Sequential(layer)(torch.zeros(2, channels, height, width))
        except RuntimeError:
            return False
        if out.shape[2] * out.shape[3] == 0:
            return False
        below = next((one for one in reversed(layers) if not isinstance(one, nn.Identity)), None)
        # Autograd, the yardstick, cannot have an activation's output or the data changed.
        if getattr(layer, "inplace", False) and (below is None or isinstance(below, ACTIVATIONS)):
            layer = nn.ReLU()
        _, channels, height, width = out.shape
        layers.append(layer)
        return True

    sizes = st.integers(1, 3)
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([1, channels]))
        padding = draw(st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])))
        stride = 1 if padding == "same" else draw(st.integers(1, 2))
        kernel = draw(st.sampled_from([1, 3, (3, 1)] if padding == "same" else [1, 2, 3, (2, 3)]))
        options = {"stride": stride, "padding": padding, "dilation": draw(st.integers(1, 2)), "groups": groups}
        fits(nn.Conv2d(channels, groups * draw(sizes), kernel, bias=draw(st.booleans()), **options))
        if draw(st.booleans()):
            momentum = draw(st.sampled_from([0.1, 0.4, None]))
            fits(nn.BatchNorm2d(channels, 1e-3, momentum, draw(st.booleans()), draw(st.booleans())))
        act = draw(st.sampled_from([nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.Sigmoid(), nn.Identity()]))
        pool = draw(
            st.sampled_from(
                [
                    nn.MaxPool2d(2),
                    nn.MaxPool2d(3, stride=1, padding=1),
                    nn.MaxPool2d(2, stride=2, ceil_mode=True),
                    nn.MaxPool2d((2, 1), dilation=2),
                    nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
                    nn.AvgPool2d(3, stride=2, padding=1),
                    nn.AdaptiveAvgPool2d((2, 1)),
                    nn.Identity(),
                ]
            )
        )
        for layer in draw(st.permutations([act, pool])):
            fits(layer)
    width = channels * height * width
    head: list[nn.Module] = [nn.Flatten()]
    if draw(st.booleans()):
        head.append(nn.BatchNorm1d(width))
    if draw(st.booleans()):
        head += [nn.Linear(width, 4, bias=draw(st.booleans())), nn.BatchNorm1d(4), nn.Tanh()]
        width = 4
    return nn.Sequential(nn.Sequential(*layers), *head, nn.Linear(width, CLASSES)), shape


@settings(max_examples=80, deadline=None)
@given(chains(), st.integers(0, 100), st.integers(1, 6), st.booleans(), st.data())
def test_random_chains(made: Any, seed: int, samples: int, negative: bool, data: st.DataObject) -> None:
    module, shape = made
    module = scattered(module, seed, negative)
    freeze(module, data)
    # A lone sample of one place has no spread to be divided by: no number is right to 1e-10 there.
    agrees(module, batch(shape, max(samples, 2) if _normed(module) else samples, seed))


def freeze(module: nn.Module, data: st.DataObject) -> None:
    """Some of the parameters, but not all of them."""
    for part in module.parameters():
        part.requires_grad_(data.draw(st.sampled_from([True, True, False])))
    if not any(part.requires_grad for part in module.parameters()):
        next(iter(module.parameters())).requires_grad_(True)


def _normed(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def nearly(module: nn.Module, data: Batch, share: float) -> None:
    """Single precision agrees with double precision, relative to the largest value."""
    v = direction(state(module)["params"])
    _, slope, product, _ = plainly(module, state(module), data, v)
    single = copy.deepcopy(module).float()
    learner, model = ChannelsLast(Learner(single, functional.cross_entropy)), state(single)
    params, buffers, given = model["params"], model["buffers"], (data[0].float(), data[1])
    found, times, _ = learner.grad_and_hvp(params, buffers, given)
    close(found, slope, share)
    close(times({name: part.float() for name, part in v.items()}), product, share)
    close(learner.loss_and_vjp(params, buffers, given)[1](torch.ones(())), slope, share)


def close(found: Params, expected: Params, share: float) -> None:
    """Equal relative to the largest value."""
    size = max(float(part.abs().max()) for part in expected.values())
    for name, part in expected.items():
        assert float((found[name].double() - part).abs().max()) < share * size, name


# Named cases.


def small(norm: str = "batch") -> nn.Module:
    return scattered(cf.models.cnn4((2, 9, 8), CLASSES, filters=4, norm=norm), 0)


@pytest.mark.parametrize("norm", ["batch", "running", "none"])
def test_the_four_layer_cnn(norm: str) -> None:
    agrees(small(norm), batch((2, 9, 8), samples=7))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()])
@pytest.mark.parametrize("dilation", [1, 2])
def test_what_lies_otherwise_in_memory(pool: nn.Module, dilation: int) -> None:
    """Some of torch's kernels give the channels first, and so does what comes back from flat layers."""
    blocks = [
        nn.Sequential(nn.Conv2d(k, 3, 3, dilation=dilation, padding=dilation), nn.BatchNorm2d(3), pool) for k in (2, 3)
    ]
    module = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(3 * (64 if type(pool) is nn.Identity else 4), CLASSES))
    agrees(scattered(module, 4), batch((2, 8, 8)))


def test_single_precision_of_images_of_one_pixel() -> None:
    """They lie in either order, and torch has other kernels for single precision."""
    module = nn.Sequential(
        nn.Conv2d(2, 64, 3, padding=1), nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1)
    )
    module = scattered(nn.Sequential(*module, nn.BatchNorm2d(64), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES)), 2)
    nearly(module, batch((2, 3, 3), samples=16), 2e-5)


@pytest.mark.parametrize("between", [[nn.Tanh()], [nn.BatchNorm2d(2)], [nn.AdaptiveAvgPool2d(2)]])
def test_images_of_one_pixel_that_are_pooled(between: list[nn.Module]) -> None:
    """They lie in memory either way, and torch takes them for the other one."""
    pool = nn.MaxPool2d(2, 1, padding=1)
    flat = 2 * (9 if type(between[0]) is nn.AdaptiveAvgPool2d else 4)
    module = nn.Sequential(nn.Conv2d(2, 2, 5), *between, pool, nn.Flatten(), nn.Linear(flat, CLASSES))
    for negative in (False, True):
        agrees(scattered(module, 3, negative), batch((2, 5, 5)))


def test_another_default_device_changes_nothing() -> None:
    module, data = small(), batch((2, 9, 8), samples=11)
    learner, one = ChannelsLast(Learner(module, functional.cross_entropy)), torch.ones((), dtype=F64)
    model = learner.to_layout(state(module))
    v = direction(model["params"])
    layouts._plane_starts.cache_clear()
    with torch.device("meta"):
        learner.loss_and_vjp(model["params"], model["buffers"], learner.to_layout(data))[1](one)
        learner.grad_and_hvp(model["params"], model["buffers"], learner.to_layout(data))[1](v)
    agrees(module, data)


def test_a_lone_sample_counts_twice() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, CLASSES))
    agrees(scattered(module, 3), batch((2, 4, 4), samples=1))


def test_samples_without_a_label_are_left_out() -> None:
    x, y = batch((2, 9, 8), samples=6)
    y[[1, 4]] = -100
    agrees(small(), (x, y))


@pytest.mark.parametrize("weight", [-0.7, 0.0])
def test_a_norm_that_turns_around_what_is_largest(weight: float) -> None:
    module = small()
    scale = module[0][1].weight
    scale.data[1] = weight
    agrees(module, batch((2, 9, 8)))


def test_ties_in_a_window() -> None:
    x, y = batch((2, 9, 8))
    agrees(small(), (x.round(), y))
    x[:, :, :5] = 0.0
    agrees(small(), (x, y))


@pytest.mark.parametrize("frozen", ["0.0.weight", "0.0", "0", "0 1.0", "0 1", "5", "0.1.bias", "0 1 2 3 5.weight"])
def test_frozen_parameters_stay(frozen: str) -> None:
    module = small()
    for name, part in module.named_parameters():
        part.requires_grad_(not any(f"{name}.".startswith(f"{prefix}.") for prefix in frozen.split()))
    agrees(module, batch((2, 9, 8)))


def test_one_layer_for_several_places() -> None:
    act = nn.ReLU()
    module = nn.Sequential(nn.Conv2d(2, 3, 3), act, nn.Conv2d(3, 3, 2), act, nn.Flatten(), nn.Linear(27, CLASSES))
    agrees(scattered(module, 5), batch((2, 6, 6)))


@pytest.mark.parametrize(("filters", "side"), [(2, 16), (32, 16), (32, 12)])
def test_single_precision_is_as_near_as_autograd(filters: int, side: int) -> None:
    module = scattered(cf.models.cnn4((2, side, side), CLASSES, filters=filters), 0)
    nearly(module, batch((2, side, side), samples=16), 2e-5)


def hooked() -> nn.Module:
    module = small()
    module[0][0].register_forward_hook(lambda *_: None)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(40, CLASSES)).double()
    module[1].weight = module[0].weight
    return module


def counted_twice() -> nn.Module:
    norm = nn.BatchNorm2d(2, affine=False)
    return nn.Sequential(nn.Conv2d(2, 2, 3), norm, nn.Tanh(), norm, nn.Flatten(), nn.Linear(84, CLASSES)).double()


def replaced() -> nn.Module:
    module = small()
    module[1].forward = torch.sin
    return module


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def last(layer: nn.Module, features: int = 2 * 9 * 8) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), layer, nn.Flatten(), nn.Linear(features, CLASSES)
    ).double()


# Random or constant outputs cannot be compared.
UNLIKE = [last(nn.Dropout(0.5)), replaced]
OTHERS: list[Callable[[], nn.Module]] = [
    *UNLIKE,
    lambda: small("group"),
    hooked,
    tied,
    counted_twice,
    last(nn.GELU()),
    last(Scaled(2, 2, 3, padding=1)),
    last(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
    last(nn.Conv2d(2, 2, 2, padding="same")),
    lambda: nn.Sequential(nn.Conv2d(2, CLASSES, (9, 8)), nn.Flatten(2), nn.Flatten()).double(),
]


@pytest.mark.parametrize("make", OTHERS)
def test_what_is_not_such_a_chain_is_left_to_autograd(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert Chain.of(module) is None
    model, data = state(module), batch((2, 9, 8))
    learner, v = ChannelsLast(Learner(module, functional.cross_entropy)), direction(model["params"])
    if make in UNLIKE:
        return
    _, slope, product, after = plainly(module, model, data, v)
    found, times, seen = learner.grad_and_hvp(model["params"], model["buffers"], data)
    near(found, slope)
    near(times(v), product)
    near(seen, after)


def test_another_loss_or_chances_for_labels_are_left_to_autograd() -> None:
    module = small()
    model, (x, y) = state(module), batch((2, 9, 8))
    assert ChannelsLast(Learner(module, functional.mse_loss))._chain is None
    chances = functional.one_hot(y, CLASSES).double()
    learner = ChannelsLast(Learner(module, functional.cross_entropy))
    value, pullback, _ = learner.loss_and_vjp(model["params"], {}, (x, chances))
    expected, own, _ = learner.loss_and_vjp(model["params"], {}, (x, y))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    near(pullback(torch.ones_like(value)), own(torch.ones_like(value)))


# The whole of exact meta-learning.


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("own", [False, True])
def test_exact_meta_learning_is_double_backward(steps: int, own: bool) -> None:
    module = small("running")
    model, batches = tree.map(layouts.channels_last, state(module)), [batch((2, 9, 8), seed=seed) for seed in range(3)]
    adapt = Adapt(0.3, steps, "exact", hessian_batch="own" if own else "same")
    curved_on = batches[2] if own else None
    found = gradient(
        Adapted(ChannelsLast(Learner(module, functional.cross_entropy)), adapt),
        model,
        batches[0],
        batches[1],
        hessian_batch=curved_on,
    )
    expected = gradient(
        Adapted(Learner(module, functional.cross_entropy), adapt),
        state(module),
        batches[0],
        batches[1],
        hessian_batch=curved_on,
    )
    near(found.direction, expected.direction)
    near(found.buffers, expected.buffers)
    first = gradient(
        Adapted(Learner(module, functional.cross_entropy), Adapt(0.3, steps, "first")), model, *batches[:2]
    )
    assert max(float((found.direction[n] - first.direction[n]).abs().max()) for n in first.direction) > 1e-3


def test_what_the_product_has_kept_is_free_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = small(), []
    model = state(module)
    make = conv_chain.Linear
    monkeypatch.setattr(conv_chain, "Linear", lambda *given: made.append(weakref.ref(layer := make(*given))) or layer)
    learner = ChannelsLast(Learner(module, functional.cross_entropy))
    _, times, _ = learner.grad_and_hvp(model["params"], {}, batch((2, 9, 8)))
    assert made and all(layer() is not None for layer in made)
    times(direction(model["params"]))
    gc.collect()
    assert all(layer() is None for layer in made)


def test_what_is_given_can_be_used_for_anything() -> None:
    """Results may be differentiated, modified and kept, although tensors of inference mode may not."""
    module = scattered(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(126, CLASSES)), 3)
    model, learner = state(module), ChannelsLast(Learner(module, functional.cross_entropy))
    value, back, after = learner.loss_and_vjp(*model.values(), batch((2, 9, 8)))
    slope, times, again = learner.grad_and_hvp(*model.values(), batch((2, 9, 8)))
    given = [value, back(torch.ones_like(value)), after, slope, times(slope), again]
    for leaf in (leaf for part in given for leaf in tree.leaves(part)):
        assert not leaf.is_inference()
        leaf += 1
        if leaf.is_floating_point():
            (leaf * torch.ones_like(leaf).requires_grad_()).sum().backward()


# Dense models of many clients.


def dense(act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Tanh(), nn.Linear(6, 5), act(), nn.Linear(5, 4, bias=False), nn.Linear(4, CLASSES)
    )


@pytest.mark.parametrize("frozen", ["none", "2.weight", "2", "4", "5.bias", "2 4"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity])
def test_the_product_of_dense_models(act: type[nn.Module], frozen: str) -> None:
    module = scattered(dense(act), 1)
    for name, part in module.named_parameters():
        part.requires_grad_(not any(f"{name}.".startswith(f"{prefix}.") for prefix in frozen.split()))
    models = [state(scattered(module, seed))["params"] for seed in range(3)]
    kept = [name for name, part in module.named_parameters() if part.requires_grad]
    models = [{name: part for name, part in model.items() if name in kept} for model in models]
    batches = [batch((2, 3), samples=4, seed=seed) for seed in range(3)]
    directions = [direction(model, seed) for seed, model in enumerate(models)]
    learner = Dense(Learner(module, functional.cross_entropy))
    together = tuple(torch.stack(parts) for parts in zip(*batches, strict=True))
    found, times, _ = learner.grad_and_hvp(stack_trees(models), {}, together)  # type: ignore[arg-type]
    product = times(stack_trees(directions))
    again = times(stack_trees(directions))
    for k, (model, data, v) in enumerate(zip(models, batches, directions, strict=True)):
        _, slope, expected, _ = plainly(module, Model(params=model, buffers={}), data, v)
        near({name: part[k] for name, part in found.items()}, slope)
        near({name: part[k] for name, part in product.items()}, expected)
        near({name: part[k] for name, part in again.items()}, expected)


def test_the_learners_own_gradient_is_that_of_pull() -> None:
    """The default, by double backward, agrees with the plain gradient."""
    module = dense(nn.Tanh).double()
    model, data = state(module), batch((2, 3))
    learner = Learner(module, functional.cross_entropy)
    slope, _, _ = learner.grad_and_hvp(model["params"], {}, data)
    near(slope, gradient(LocalLoss(learner), model, data, data).direction)
    _, pullback, _ = value_and_vjp(lambda params: learner.loss(params, {}, data), model["params"])
    near(slope, pullback(torch.ones((), dtype=F64)))
