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
        return dx, dw, db

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, vw: Tensor, vb: Tensor) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, inverse, gz_sum, g_sum = ctx.saved_tensors
        v, count = _like(v, x), x.numel() // len(mean)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        # With s the inverse deviation, z the normalised x and <a> the mean of a:
        #   dx = weight s (g - <g> - z <gz>),   dw = sum of gz,   db = sum of g.
        along, vz_sum, v_sum = _kernel(v, x, weight, mean, inverse, ctx.eps)
        mean_g, mean_gz, mean_v, mean_vz = (total / count for total in (g_sum, gz_sum, v_sum, vz_sum))
        mean_vg = (v * g).sum(dim=[d for d in range(x.ndim) if d != 1]) / count
        a = mean_vg - mean_v * mean_g - mean_vz * mean_gz
        square = inverse**2 if weight is None else weight * inverse**2
        by_v, by_g = -square * mean_gz, vw * inverse - square * mean_vz
        by_x = square * (2 * mean_gz * mean_vz - a) - vw * inverse * mean_gz
        along.addcmul_(x, (vw * inverse).view(shape)).add_((vb - vw * inverse * mean).view(shape))
        # by_v (v - <v>) + by_g (g - <g>) + by_x z, in as few passes as there are tensors
        at = -by_v * mean_v - by_g * mean_g - by_x * inverse * mean
        curve = torch.addcmul(at.view(shape), x, (by_x * inverse).view(shape))
        curve.addcmul_(g, by_g.view(shape)).addcmul_(v, by_v.view(shape))
        return along, curve, None if weight is None else inverse * count * a, None, None, None


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
