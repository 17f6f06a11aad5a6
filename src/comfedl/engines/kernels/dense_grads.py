"""Closed-form gradients and Hessian-vector products of dense models under cross-entropy: half autograd's operations.

Samples are last, [clients, features, samples], so that matrix products and the softmax read contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comfedl.core.learner import Params, Pullback
from comfedl.core.optim import ClientOptimizer
from comfedl.engines.stacked import masked_mean
from comfedl.utils.tree import Tree

# Activations backward: from the cotangent of the output and the output to the cotangent of the input.
SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda d, out: torch.ops.aten.threshold_backward(d, out, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
    nn.Identity: lambda d, out: d,
}
# The derivative of an activation's slope with respect to its output; None if it is 0.
SLOPE_DERIVATIVES: dict[type[nn.Module], Callable[[Tensor], Tensor] | None] = {
    nn.ReLU: None,
    nn.Tanh: lambda out: -2 * out,
    nn.Sigmoid: lambda out: 1 - 2 * out,
    nn.Identity: None,
}


class Named(NamedTuple):
    """A layer, and the names of its weight and bias (empty without a bias).

    ``lowest`` marks the first linear layer, at which the backward pass ends.
    """

    layer: nn.Module
    weight: str
    bias: str
    linear: bool
    lowest: bool


def named(layers: Iterable[tuple[str, nn.Module]]) -> list[Named]:
    """A chain of layers, from pairs of the prefix of their parameters' names and the layer."""
    found: list[Named] = []
    for name, layer in layers:
        dot, linear = f"{name}." if name else "", isinstance(layer, nn.Linear)
        bias = "" if getattr(layer, "bias", None) is None else f"{dot}bias"
        found.append(Named(layer, f"{dot}weight", bias, linear, linear and not any(below.linear for below in found)))
    return found


def cross_entropy_and_vjp(
    layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, mask: Tensor | None
) -> tuple[Tensor, Pullback]:
    """Each client's mean cross-entropy on x [clients, samples, features], and its VJP to the parameters.

    Layers are linear or in ``SLOPES``; parameters not in ``params`` come from the module. ``mask`` is the samples that
    count; None is all.
    """
    state = _forward(layers, params, x, y, mask)
    return _value(state), partial(_vjp, layers, params, state)


def cross_entropy_grad_and_hvp(
    layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, mask: Tensor | None
) -> tuple[Params, Pullback]:
    """The gradient of each client's mean cross-entropy, and its Hessian-vector product."""
    state = _forward(layers, params, x, y, mask)
    back = _backward(layers, params, state, _sample_weights(state))
    return _param_gradients(params, back), partial(_hvp, params, state, back)


def _vjp(layers: Sequence[Named], params: Params, state: ForwardState, cotangent: Tensor) -> Params:
    """The gradients of the mean losses, each times its cotangent."""
    sample_weights = _sample_weights(state) * cotangent.view(-1, 1, 1)
    return _param_gradients(params, _backward(layers, params, state, sample_weights))


@torch.no_grad()
def descend_cross_entropy(
    layers: Sequence[Named],
    params: Params,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    rate: float,
    optimizer: ClientOptimizer,
    memory: Tree,
) -> tuple[Params, Tensor, Tree] | None:
    """Gradient steps, one per batch (x, y, mask): the final parameters, the losses [steps, clients] before each, and
    the optimiser's state.

    If the optimiser has no memory, each layer's gradient is added to the parameters by the product that computes it,
    and never stored. None if x is not [clients, samples, features].
    """
    after, gradient = dict(params), dict[str, Tensor]()
    losses: list[Tensor] = []
    decay = optimizer.plain_decay
    for x, y, mask in batches:
        if x.ndim != 3:
            return None
        own = len(losses) > 0  # from the second step on, the parameters are ours, and are updated in place
        state = _forward(layers, after, x, y, mask)
        # If all samples count, scale the rate instead of each sample, and average the losses at the end.
        losses.append(state.label_log_probs() if mask is None else _value(state))
        sample_weights, scale = (None, 1 / y.shape[1]) if mask is None else (_sample_weights(state), 1.0)
        for (_, weight, bias, linear, _), d, at in _backward(layers, after, state, sample_weights):
            if not linear:
                continue
            if decay is None:
                if weight in after:
                    gradient[weight] = _product(gradient.get(weight), d, at, scale)
                if bias in after:
                    gradient[bias] = d.sum(2).mul_(scale)
                continue
            shrink = 1 - rate * decay
            if (moved := after.get(weight)) is not None:
                out = moved if own else None
                after[weight] = torch.baddbmm(moved, d, at.mT, beta=shrink, alpha=-rate * scale, out=out)
            if (moved := after.get(bias)) is not None:
                moved = moved if decay == 0 else moved * shrink
                after[bias] = torch.sub(moved, d.sum(2), alpha=rate * scale, out=moved if own or decay else None)
        del x, state, at  # so that the next batch can reuse their memory
        if decay is None:
            after, memory = optimizer.step(after, {name: gradient[name] for name in after}, memory, rate, own)
    found = torch.stack(losses)
    return after, found if found.ndim == 2 else found.mean(dim=(2, 3)).neg_(), memory


def _product(out: Tensor | None, d: Tensor, at: Tensor, scale: float) -> Tensor:
    """A weight's gradient, in the memory of the last step's."""
    if out is None:
        out = d.new_empty(d.shape[0], d.shape[1], at.shape[1])
    # With beta = 0 what was there before is ignored, NaN too.
    return torch.baddbmm(out, d, at.mT, beta=0, alpha=scale, out=out)


def _param_gradients(params: Params, back: Sequence[LayerGradient]) -> Params:
    """The gradients of the parameters, from those of the layers' outputs."""
    found: Params = {}
    for (_, weight, bias, linear, _), d, at in back:
        if linear and weight in params:
            found[weight] = torch.bmm(d, at.transpose(1, 2))
        if linear and bias in params:
            found[bias] = d.sum(dim=2)
    return {name: found[name] for name in params}


def _hvp(params: Params, state: ForwardState, back: Sequence[LayerGradient], v: Params) -> Params:
    """The gradient's derivative along v, forward and then backward through the layers (Pearlmutter's R-operator)."""
    change: Tensor | None = None
    changes: list[Tensor | None] = []  # of each linear layer's input, and of each activation's output
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
    probs = state.log_probs.exp()
    d = probs * change
    d.sub_(probs * d.sum(dim=1, keepdim=True)).mul_(_sample_weights(state))
    found: Params = {}
    for ((layer, weight, bias, *_), before, at), change in zip(back, reversed(changes), strict=True):
        if not isinstance(layer, nn.Linear):
            slope, dslope = SLOPES[type(layer)], SLOPE_DERIVATIVES[type(layer)]
            assert change is not None
            d = slope(d, at) if dslope is None else slope(d, at) + dslope(at) * change * before
            continue
        found[weight], found[bias] = torch.bmm(d, at.transpose(1, 2)), d.sum(dim=2)
        if change is not None:
            found[weight].baddbmm_(before, change.transpose(1, 2))
            d = torch.bmm(_weight(layer, weight, params, len(d)).transpose(1, 2), d)
            d.baddbmm_(_along(layer, weight, v, len(d)).transpose(1, 2), before)
    return {name: found[name] for name in params}


class ForwardState(NamedTuple):
    """A forward pass; ``at`` has each linear layer's input, and each activation's output."""

    log_probs: Tensor
    labels: Tensor
    mask: Tensor | None
    at: list[Tensor]

    def label_log_probs(self) -> Tensor:
        """The log-probability of each label, [clients, 1, samples]."""
        return self.log_probs.gather(1, self.labels)


class LayerGradient(NamedTuple):
    """A layer, the cotangent of its output, and its entry in ``ForwardState.at``."""

    named: Named
    cotangent: Tensor
    at: Tensor


def _forward(layers: Sequence[Named], params: Params, x: Tensor, y: Tensor, mask: Tensor | None) -> ForwardState:
    at, kept = x.transpose(1, 2), []
    for layer, weight, bias, linear, _ in layers:
        if linear:
            kept.append(at)
            own = _weight(layer, weight, params, x.shape[0])
            at = torch.baddbmm(_bias(layer, bias, params), own, at) if bias else torch.bmm(own, at)
        else:
            at = layer(at)
            kept.append(at)
    return ForwardState(torch.log_softmax(at, dim=1), y.unsqueeze(1), mask, kept)


def _value(state: ForwardState) -> Tensor:
    """Each client's mean cross-entropy."""
    if state.mask is None:
        return state.label_log_probs().sum(dim=(1, 2)).mul_(-1 / state.labels.shape[2])
    return masked_mean(state.label_log_probs().squeeze(1).neg_(), state.mask)


def _backward(
    layers: Sequence[Named], params: Params, state: ForwardState, sample_weights: Tensor | float | None
) -> list[LayerGradient]:
    """The cotangents of the layers' outputs, from the last layer to the first linear one.

    ``sample_weights`` of None is 1 for every sample.
    """
    d = state.log_probs.exp()
    d.scatter_add_(1, state.labels, _minus_one(state.labels.shape, d.dtype, d.device))
    if sample_weights is not None:
        d.mul_(sample_weights)
    back: list[LayerGradient] = []
    for named, at in zip(reversed(layers), reversed(state.at), strict=True):
        back.append(LayerGradient(named, d, at))
        if named.lowest:
            break
        if named.linear:
            d = torch.bmm(_weight(named.layer, named.weight, params, d.shape[0]).transpose(1, 2), d)
        else:
            d = SLOPES[type(named.layer)](d, at)
    return back


def _sample_weights(state: ForwardState) -> Tensor | float:
    """The weight of each sample in its client's mean."""
    if state.mask is None:
        return 1 / state.labels.shape[2]
    weights = 1 / state.mask.sum(dim=1, dtype=state.log_probs.dtype)
    return torch.where(state.mask, weights.unsqueeze(1), 0).unsqueeze(1)


@lru_cache(64)
def _minus_one(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1, dtype=dtype, device=device).expand(shape)


def _bias(layer: nn.Module, name: str, params: Params) -> Tensor:
    """A linear layer's bias, with a dimension for the samples; a frozen one comes from the module."""
    own = params.get(name)
    return (layer.get_parameter("bias").detach() if own is None else own).unsqueeze(-1)


def _weight(layer: nn.Module, name: str, params: Params, clients: int) -> Tensor:
    """A linear layer's weight for all clients; a frozen one comes from the module."""
    own = params.get(name)
    return layer.get_parameter("weight").detach().expand(clients, -1, -1) if own is None else own


def _along(layer: nn.Linear, name: str, v: Params, clients: int) -> Tensor:
    """The direction of a linear layer's weight for all clients; zero if it is frozen."""
    return v[name] if name in v else layer.weight.new_zeros(()).expand(clients, *layer.weight.shape)
