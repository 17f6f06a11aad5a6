"""The gradient of a dense model's cross-entropy and its Hessian's product, written out: half autograd's operations.

Samples are last, [clients, features, samples], so that every product is of rows and the softmax runs along them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comfedl.core.learner import Params, Pullback
from comfedl.engines.stacked import mean_inside

# The cotangent of an activation's input, from its output's and its output.
SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda d, out: torch.ops.aten.threshold_backward(d, out, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
    nn.Identity: lambda d, out: d,
}
# The slope of an activation's slope as a function of its output; None where that is 0.
BENDS: dict[type[nn.Module], Callable[[Tensor], Tensor] | None] = {
    nn.ReLU: None,
    nn.Tanh: lambda out: -2 * out,
    nn.Sigmoid: lambda out: 1 - 2 * out,
    nn.Identity: None,
}


class Named(NamedTuple):
    """A layer, and the names of its weight and bias; the bias's is empty where it has none.

    Nothing comes back to what is before the ``lowest`` linear one.
    """

    layer: nn.Module
    weight: str
    bias: str
    linear: bool
    lowest: bool


def named(layers: Iterable[tuple[str, nn.Module]]) -> list[Named]:
    """A chain of layers, each by the prefix of its parameters' names."""
    found: list[Named] = []
    for name, layer in layers:
        dot, linear = f"{name}." if name else "", isinstance(layer, nn.Linear)
        bias = "" if getattr(layer, "bias", None) is None else f"{dot}bias"
        found.append(Named(layer, f"{dot}weight", bias, linear, linear and not any(below.linear for below in found)))
    return found


def pull_cross_entropy(
    layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, inside: Tensor | None
) -> tuple[Tensor, Pullback]:
    """Each client's mean cross-entropy on x [clients, samples, features], and its pullback to the parameters.

    The layers are linear ones and those of ``SLOPES``; parameters that are not among ``params`` are the module's own.
    ``inside`` says which samples count, None that all do.
    """
    seen = _forward(layers, params, x, y, inside)
    return _value(seen), partial(_pulled_back, layers, params, seen)


def curve_cross_entropy(
    layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, inside: Tensor | None
) -> tuple[Params, Pullback]:
    """The gradient of each client's mean cross-entropy, and its Hessian-vector product."""
    seen = _forward(layers, params, x, y, inside)
    back = _backward(layers, params, seen, _share(seen))
    return _found(params, back), partial(_product, params, seen, back)


def _pulled_back(layers: Sequence[Named], params: Params, seen: Seen, cotangent: Tensor) -> Params:
    """The gradient of the mean losses, each times its cotangent."""
    share = _share(seen) * cotangent.view(-1, 1, 1)
    return _found(params, _backward(layers, params, seen, share))


@torch.no_grad()
def descend_cross_entropy(
    layers: Sequence[Named], params: Params, batches: Iterable[tuple[Tensor, Tensor, Tensor | None]], rate: float
) -> tuple[Params, Tensor] | None:
    """Where gradient steps end, one a batch (x, y, inside), and the losses [steps, clients] before each of them.

    A gradient's products are added to the parameters as they are made, so that it is never in memory. None where x is
    not [clients, samples, features].
    """
    after = dict(params)
    losses: list[Tensor] = []
    for x, y, inside in batches:
        if x.ndim != 3:
            return None
        own = len(losses) > 0  # from the second step on the parameters are nobody else's, and are moved where they are
        seen = _forward(layers, after, x, y, inside)
        # Where all samples count alike, the rate is scaled in their place, and losses become means at the end.
        losses.append(seen.likely() if inside is None else _value(seen))
        share, scaled = (None, rate / y.shape[1]) if inside is None else (_share(seen), rate)
        for (_, weight, bias, linear, _), d, at in _backward(layers, after, seen, share):
            if not linear:
                continue
            if (moved := after.get(weight)) is not None:
                after[weight] = torch.baddbmm(moved, d, at.mT, alpha=-scaled, out=moved if own else None)
            if (moved := after.get(bias)) is not None:
                after[bias] = torch.sub(moved, d.sum(2), alpha=scaled, out=moved if own else None)
        del x, seen, at  # the next batch takes their place in memory
    found = torch.stack(losses)
    return after, found if found.ndim == 2 else found.mean(dim=(2, 3)).neg_()


def _found(params: Params, back: Sequence[Back]) -> Params:
    """What comes back to the parameters."""
    found: Params = {}
    for (_, weight, bias, linear, _), d, at in back:
        if linear and weight in params:
            found[weight] = torch.bmm(d, at.transpose(1, 2))
        if linear and bias in params:
            found[bias] = d.sum(dim=2)
    return {name: found[name] for name in params}


def _product(params: Params, seen: Seen, back: Sequence[Back], v: Params) -> Params:
    """How the gradient changes along v: first what each layer sees, then what comes back to it."""
    change: Tensor | None = None
    changes: list[Tensor | None] = []  # of each layer's input or, where it is not linear, of its output
    for (layer, weight, bias, *_), _, at in reversed(back):
        if isinstance(layer, nn.Linear):
            changes.append(change)
            out = torch.bmm(_along(layer, weight, v, len(at)), at)
            if change is not None:
                out.baddbmm_(_weight(layer, weight, params, len(at)), change)
            change = out.add_(v[bias].unsqueeze(-1)) if bias in v else out
        else:
            assert change is not None
            change = SLOPES[type(layer)](change, at)
            changes.append(change)
    assert change is not None
    chances = seen.chances.exp()
    d = chances * change
    d.sub_(chances * d.sum(dim=1, keepdim=True)).mul_(_share(seen))
    found: Params = {}
    for ((layer, weight, bias, *_), before, at), change in zip(back, reversed(changes), strict=True):
        if not isinstance(layer, nn.Linear):
            slope, bend = SLOPES[type(layer)], BENDS[type(layer)]
            assert change is not None
            d = slope(d, at) if bend is None else slope(d, at) + bend(at) * change * before
            continue
        found[weight], found[bias] = torch.bmm(d, at.transpose(1, 2)), d.sum(dim=2)
        if change is not None:
            found[weight].baddbmm_(before, change.transpose(1, 2))
            d = torch.bmm(_weight(layer, weight, params, len(d)).transpose(1, 2), d)
            d.baddbmm_(_along(layer, weight, v, len(d)).transpose(1, 2), before)
    return {name: found[name] for name in params}


class Seen(NamedTuple):
    """What a forward pass saw: the logarithms of the chances, the labels, which samples count, each layer's input or,
    where it is not linear, its output."""

    chances: Tensor
    labels: Tensor
    inside: Tensor | None
    at: list[Tensor]

    def likely(self) -> Tensor:
        """The logarithm of each label's chance, [clients, 1, samples]."""
        return self.chances.gather(1, self.labels)


class Back(NamedTuple):
    """A layer, the cotangent of its output, and what ``Seen.at`` has for it."""

    named: Named
    cotangent: Tensor
    at: Tensor


def _forward(layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, inside: Tensor | None) -> Seen:
    at, kept = x.transpose(1, 2), []
    for layer, weight, bias, linear, _ in layers:
        if linear:
            kept.append(at)
            own = _weight(layer, weight, params, x.shape[0])
            at = torch.baddbmm(_bias(layer, bias, params), own, at) if bias else torch.bmm(own, at)
        else:
            at = layer(at)
            kept.append(at)
    return Seen(torch.log_softmax(at, dim=1), y.unsqueeze(1), inside, kept)


def _value(seen: Seen) -> Tensor:
    """Each client's mean cross-entropy."""
    if seen.inside is None:
        return seen.likely().sum(dim=(1, 2)).mul_(-1 / seen.labels.shape[2])
    return mean_inside(seen.likely().squeeze(1).neg_(), seen.inside)


def _backward(layers: Sequence[Named], params: Params, seen: Seen, share: Tensor | float | None) -> list[Back]:
    """What comes back to each layer, from the last one to the first that is linear.

    ``share`` is what each sample counts; None is 1.
    """
    d = seen.chances.exp()
    d.scatter_add_(1, seen.labels, _minus_one(seen.labels.shape, d.dtype, d.device))
    if share is not None:
        d.mul_(share)
    back: list[Back] = []
    for named, at in zip(reversed(layers), reversed(seen.at), strict=True):
        back.append(Back(named, d, at))
        if named.lowest:
            break
        if named.linear:
            d = torch.bmm(_weight(named.layer, named.weight, params, d.shape[0]).transpose(1, 2), d)
        else:
            d = SLOPES[type(named.layer)](d, at)
    return back


def _share(seen: Seen) -> Tensor | float:
    """What each sample counts in its client's mean."""
    if seen.inside is None:
        return 1 / seen.labels.shape[2]
    return torch.where(seen.inside, (1 / seen.inside.sum(dim=1, dtype=seen.chances.dtype)).unsqueeze(1), 0).unsqueeze(1)


@lru_cache(64)
def _minus_one(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1, dtype=dtype, device=device).expand(shape)


def _bias(layer: nn.Module, name: str, params: Params) -> Tensor:
    """A linear layer's bias, with a place for the samples; one that is frozen is the module's own."""
    own = params.get(name)
    return (layer.get_parameter("bias").detach() if own is None else own).unsqueeze(-1)


def _weight(layer: nn.Module, name: str, params: Params, clients: int) -> Tensor:
    """A linear layer's weight for all clients; one that is frozen is the module's own."""
    own = params.get(name)
    return layer.get_parameter("weight").detach().expand(clients, -1, -1) if own is None else own


def _along(layer: nn.Linear, name: str, v: Params, clients: int) -> Tensor:
    """A linear layer's direction for all clients; one that is frozen does not move."""
    return v[name] if name in v else layer.weight.new_zeros(()).expand(clients, *layer.weight.shape)
