"""Batch normalisation that is cheap to differentiate twice.

Torch writes its second derivative out in some forty passes over the activations, which takes most of the time of exact
meta-learning on a network that has it. Here the first derivative is torch's own kernel, and the second is that kernel
once more, on the tangent, and a combination of three tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_curved: ContextVar[bool] = ContextVar("curved", default=False)


@contextmanager
def curved() -> Iterator[None]:
    """What is computed inside is going to be differentiated twice."""
    token = _curved.set(True)
    try:
        yield
    finally:
        _curved.reset(token)


def made_curved(module: nn.Module) -> nn.Module:
    """The module with its batch normalisations cheap to differentiate twice; it is changed in place."""
    for layer in module.modules():
        if type(layer) in _TWICE:
            layer.__class__ = _TWICE[type(layer)]
    return module


class _Curved(nn.modules.batchnorm._BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        tracked = self.running_mean is not None and self.running_var is not None
        if not _curved.get() or not (self.training or not tracked):
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        kept = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        out: Tensor = _Normalise.apply(x, self.weight, self.bias, *kept, factor, self.eps)  # type: ignore[no-untyped-call]
        return out


class BatchNorm1d(_Curved, nn.BatchNorm1d):
    """``nn.BatchNorm1d``."""


class BatchNorm2d(_Curved, nn.BatchNorm2d):
    """``nn.BatchNorm2d``."""


class BatchNorm3d(_Curved, nn.BatchNorm3d):
    """``nn.BatchNorm3d``."""


_TWICE: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


class _Normalise(torch.autograd.Function):
    """``weight * (x - mean) / sqrt(var + eps) + bias`` over a batch's own mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
        eps: float,
    ) -> Tensor:
        out, mean, inverse = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, factor, eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dx, dw, db = _Slope.apply(g, x, weight, mean, inverse, ctx.eps)  # type: ignore[no-untyped-call]
        needs = ctx.needs_input_grad
        return dx, dw if needs[1] else None, db if needs[2] else None, None, None, None, None


class _Slope(torch.autograd.Function):
    """The first derivative: what comes back to x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel reads g in the layout of x.
        g = _like(g, x)
        dx, dw, db = _kernel(g, x, weight, mean, inverse, eps)
        ctx.save_for_backward(g, x, weight, mean, inverse, dw, db)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return dx, dw, db

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, vw: Tensor | None, vb: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, inverse, gx_sum, g_sum = ctx.saved_tensors
        count = x.numel() // len(mean)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        scale = torch.ones_like(mean) if weight is None else weight
        # With s the inverse deviation, z the normalised x and <a> the mean of a:
        #   dx = scale s (g - <g> - z <gz>),   dw = sum of gz,   db = sum of g.
        mean_g, mean_gz = g_sum / count, gx_sum / count
        if v is None:
            along, dweight = torch.zeros_like(x), None
            by_x = by_v = by_g = torch.zeros_like(mean)
        else:
            v = _like(v, x)
            along, vz_sum, v_sum = _kernel(v, x, weight, mean, inverse, ctx.eps)
            mean_v, mean_vz = v_sum / count, vz_sum / count
            mean_vg = (v * g).sum(dim=[d for d in range(x.ndim) if d != 1]) / count
            a = mean_vg - mean_v * mean_g - mean_vz * mean_gz
            dweight = inverse * count * a
            square = scale * inverse**2
            by_v, by_g = -square * mean_gz, -square * mean_vz
            by_x = square * (2 * mean_gz * mean_vz - a)
        if vw is not None:  # from dw
            by_g = by_g + vw * inverse
            by_x = by_x - vw * inverse * mean_gz
            along = torch.addcmul(along, x, (vw * inverse).view(shape))
            along.sub_((vw * inverse * mean).view(shape))
        if vb is not None:
            along = along + vb.view(shape)
        # by_v (v - <v>) + by_g (g - <g>) + by_x z, in as few passes as there are tensors
        at = -by_g * mean_g - by_x * inverse * mean
        if v is not None:
            at = at - by_v * mean_v
        curve = torch.addcmul(at.view(shape), x, (by_x * inverse).view(shape))
        curve.addcmul_(g, by_g.view(shape))
        if v is not None:
            curve.addcmul_(v, by_v.view(shape))
        return along, curve, dweight if weight is not None else None, None, None, None


def _kernel(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own first derivative of batch normalisation."""
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        g, x, torch.ones_like(mean) if weight is None else weight, None, None, mean, inverse, True, eps, [True] * 3
    )
    return dx, dw, db


def _like(g: Tensor, x: Tensor) -> Tensor:
    """The numbers of g in the layout of x."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return g.contiguous(memory_format=torch.channels_last)
    return g.contiguous()
