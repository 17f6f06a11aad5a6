"""Layers with closed-form first and second derivatives.

A layer object lives for one pass over one batch. ``forward`` and ``backward`` compute the gradient and keep their
intermediate values; ``forward_along`` and ``backward_along`` compute the derivatives of both along a direction v of the
parameters, which gives the Hessian-vector product (Pearlmutter's R-operator, Neural Computation 1994).

No layer modifies its inputs. Images are in channels-last layout (``layouts.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl.core.learner import Params
from comfedl.engines.kernels.dense_grads import SLOPE_DERIVATIVES, SLOPES
from comfedl.engines.kernels.layouts import Pool, channels_last, gather, scatter_add, to_images, to_rows

aten = torch.ops.aten


class Pass(NamedTuple):
    """The inputs of a pass over one batch: the parameters, and the buffers, which it updates."""

    params: Params
    buffers: Params


class Layer(ABC):
    """One layer in one pass.

    ``lowest`` marks the first trained layer: its input does not change along v, and needs no cotangent.
    """

    lowest = False

    def trains(self) -> bool:
        """Whether any of its parameters is trained."""
        return False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The output."""

    @abstractmethod
    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        """The cotangent of the input, from that of the output; the parameters' gradients go to ``found``."""

    @abstractmethod
    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        """The derivative of the output along v, from that of the input (None is 0)."""

    @abstractmethod
    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        """The derivative along v of the results of ``backward``, from that of its input ``d``."""


class Parts:
    """A layer's weight and bias; frozen ones come from the module."""

    def __init__(self, name: str, layer: nn.Module, within: Pass) -> None:
        self.layer: Any = layer
        self.names = named(name, "weight"), named(name, "bias")
        self.weight: Any = within.params.get(self.names[0], self.layer.weight)
        self.bias: Any = within.params.get(self.names[1], self.layer.bias)
        self.trained = [n in within.params for n in self.names]

    def along(self, v: Params) -> tuple[Tensor, Tensor | None]:
        """The directions of the weight (zero if it is frozen) and the bias."""
        weight, bias = self.names
        return v[weight] if weight in v else torch.zeros_like(self.weight), v.get(bias)

    def give(self, found: Params, *parts: Tensor) -> None:
        """Store the results for the weight and the bias, if they are trained."""
        found.update({n: part for n, part, trained in zip(self.names, parts, self.trained, strict=True) if trained})


class Weighted(Parts, Layer):
    """A layer with a weight and a bias."""

    def trains(self) -> bool:
        return any(self.trained)


class Convolution(Weighted):
    """``nn.Conv2d``. With ``centred`` its bias has no effect, since the next layer subtracts the mean."""

    def __init__(self, name: str, layer: nn.Module, within: Pass, padding: list[int], centred: bool) -> None:
        super().__init__(name, layer, within)
        self.shape = [*self.layer.stride], padding, [*self.layer.dilation], False, [0, 0], self.layer.groups
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        self.x = channels_last(x)
        return self._apply(self.x, self.weight, self.bias)

    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        self.d = channels_last(d)
        return self._pull_back(self.d, found)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        self.dx, (self.v, bias) = None if dx is None else channels_last(dx), self.along(v)
        out = self._apply(self.x, self.v, None if self.centred else bias)
        return out if self.dx is None else out.add_(self._apply(self.dx, self.weight, None))

    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        out = self._pull_back(channels_last(dd), found)
        if self.dx is None:
            return out
        # The weight's gradient is linear in x, the input's in the weight: one call gives both derivatives.
        mask = [not self.lowest, self.trained[0], False]
        back, weight, _ = aten.convolution_backward(self.d, self.dx, self.v, None, *self.shape, mask)
        if self.trained[0]:
            found[self.names[0]].add_(weight)
        return None if out is None else out.add_(back)

    def _apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return channels_last(aten.convolution(x, weight, bias, *self.shape))

    def _pull_back(self, d: Tensor, found: Params) -> Tensor | None:
        channels = len(self.weight)
        sums = self.trained[1] and not self.centred
        mask = [not self.lowest, self.trained[0], sums]
        back, weight, bias = aten.convolution_backward(d, self.x, self.weight, [channels], *self.shape, mask)
        self.give(found, weight, bias if sums else d.new_zeros(channels))
        return None if self.lowest else channels_last(back)


class Linear(Weighted):
    """``nn.Linear`` on [samples, features]."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return functional.linear(x, self.weight, self.bias)

    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        self.d = d
        self.give(found, d.t() @ self.x, d.sum(dim=0))
        return None if self.lowest else d @ self.weight

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        self.dx, (self.v, bias) = dx, self.along(v)
        out = functional.linear(self.x, self.v, bias)
        return out if dx is None else out.addmm_(dx, self.weight.t())

    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        weight = dd.t() @ self.x
        self.give(found, weight if self.dx is None else weight.addmm_(self.d.t(), self.dx), dd.sum(dim=0))
        return None if self.lowest else (dd @ self.weight).addmm_(self.d, self.v)


class Norm(Weighted):
    """Batch normalisation with the batch's statistics, fused with a max-pooling right after it.

    Let <.> be the mean over all but the channels, s the inverse deviation of x, and z = s (x - <x>). The output is
    weight z + bias, at each window's maximum if pooled. Per channel, everything is linear in x and in the cotangents at
    the pooled positions, so work that only these need is done only there. All tensors are rows.
    """

    def __init__(self, name: str, layer: nn.Module, within: Pass, pool: Pool | None) -> None:
        super().__init__(name, layer, within)
        self.pool = pool
        self.running = [within.buffers.get(named(name, part)) for part in ("running_mean", "running_var")]
        self.batches = within.buffers.get(named(name, "num_batches_tracked"))

    def forward(self, x: Tensor) -> Tensor:
        self.shape = self.out_shape = x.shape
        self.x = x = to_rows(x)
        self.mean, variance = aten.batch_norm_update_stats(x, *self.running, self._momentum())
        self.count = len(x)
        self.s = (variance + self.layer.eps).rsqrt_()
        if self.weight is None:
            self.weight = torch.ones_like(self.s)
        self.k = self.weight * self.s
        shift = subtract_product(self.bias, self.k, self.mean)
        if self.pool is None:
            self.at = x
        elif self.weight.min() > 0:  # a maximum of x is a maximum of the output
            self.at, self.places, self.out_shape = self.pool(x, self.shape)
        else:
            _, self.places, self.out_shape = self.pool(torch.addcmul(shift, x, self.k), self.shape)
            self.at = gather(x, self.places)
        return to_images(torch.addcmul(shift, self.at, self.k), self.out_shape)

    def backward(self, d: Tensor, found: Params) -> Tensor | None:
        self.d = to_rows(d)
        weight, bias = _sums(self.d, self.at, self.mean, self.s)
        self.give(found, weight, bias)
        self.q, self.r = weight / self.count, bias / self.count
        # The cotangent of x is k (d - <d> - z <d z>).
        return None if self.lowest else self._spread(self.d * self.k, self.k * self.r, self.k * self.q)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        self.dx = torch.zeros_like(self.x) if dx is None else to_rows(dx)
        self.dat = self.dx if self.pool is None else gather(self.dx, self.places)
        by_z, by_1 = _sums(self.dx, self.x, self.mean, self.s)
        self.a, self.b = by_1 / self.count, by_z / self.count  # the derivative of z is s (dx - a - b z)
        weight, bias = self.along(v)
        self.dk = self.s * subtract_product(weight, self.k, self.b)
        shift = subtract_product(subtract_product(bias, self.k, self.a), self.dk, self.mean)
        return to_images(torch.addcmul(shift, self.dat, self.k).addcmul_(self.at, self.dk), self.out_shape)

    def backward_along(self, dd: Tensor, found: Params) -> Tensor | None:
        dd = to_rows(dd)
        weight, bias = _sums(dd, self.at, self.mean, self.s)
        weight += _sums(self.d, self.dat, self.a, self.s)[0]
        weight.addcmul_(self.s * self.b, self.q, value=-self.count)
        self.give(found, weight, bias)
        if self.lowest:
            return None
        k, dk, dq, dr = self.k, self.dk, weight / self.count, bias / self.count
        h = k * self.q * self.s
        by_1, by_z = (
            (dk * then).addcmul_(k, now).addcmul_(h, moved, value=-1)
            for then, now, moved in ((self.r, dr, self.a), (self.q, dq, self.b))
        )
        return self._spread((dd * k).addcmul_(self.d, dk), by_1, by_z, h)

    def _spread(self, values: Tensor, by_1: Tensor, by_z: Tensor, by_dx: Tensor | None = None) -> Tensor:
        """The values scattered to the pooled positions, minus ``by_1 + by_z z + by_dx dx`` everywhere."""
        by_x = by_z * self.s
        out = torch.addcmul(by_x * self.mean - by_1, self.x, by_x, value=-1)
        if by_dx is not None:
            out.addcmul_(self.dx, by_dx, value=-1)
        out = out.add_(values) if self.pool is None else scatter_add(out, self.places, values)
        return to_images(out, self.shape)

    def _momentum(self) -> float:
        """Count this batch, and return its weight in the running statistics."""
        if self.batches is not None:
            self.batches.add_(1)
        if self.layer.momentum is not None:
            return float(self.layer.momentum)
        return 0.0 if self.batches is None else 1.0 / float(self.batches)


class MaxPool(Layer):
    """``nn.MaxPool2d``."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        out, self.places, self.out_shape = self.pool(to_rows(x), self.shape)
        return to_images(out, self.out_shape)

    def backward(self, d: Tensor, found: Params) -> Tensor:
        samples, channels, height, width = self.shape
        zeros = d.new_zeros(samples * height * width, channels)
        return to_images(scatter_add(zeros, self.places, to_rows(d)), self.shape)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        assert dx is not None
        return to_images(gather(to_rows(dx), self.places), self.out_shape)

    def backward_along(self, dd: Tensor, found: Params) -> Tensor:
        return self.backward(dd, found)


class Activation(Layer):
    """An elementwise function, one of ``ACTIVATIONS``."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.function, self.slope, self.dslope = ACTIVATIONS[kind], SLOPES[kind], SLOPE_DERIVATIVES[kind]

    def forward(self, x: Tensor) -> Tensor:
        self.out = self.function(x)
        return self.out

    def backward(self, d: Tensor, found: Params) -> Tensor:
        self.d = d
        return self.slope(d, self.out)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        assert dx is not None
        self.dout = self.slope(dx, self.out)
        return self.dout

    def backward_along(self, dd: Tensor, found: Params) -> Tensor:
        out = self.slope(dd, self.out)
        return out if self.dslope is None else out.add_(self.dslope(self.out).mul_(self.dout).mul_(self.d))


class Fixed(Layer):
    """A linear map without parameters, given with its transpose; it is its own derivative."""

    def __init__(self, apply: Callable[[Tensor], Tensor], transpose: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.apply, self.transpose = apply, transpose

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.apply(x)

    def backward(self, d: Tensor, found: Params) -> Tensor:
        return self.transpose(d, self.x)

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        assert dx is not None
        return self.apply(dx)

    def backward_along(self, dd: Tensor, found: Params) -> Tensor:
        return self.backward(dd, found)


class CrossEntropy:
    """The mean cross-entropy with labels, after the last layer."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def forward(self, x: Tensor) -> Tensor:
        self.log_probs = torch.log_softmax(x, dim=1)
        value, self.total = aten.nll_loss_forward(self.log_probs, self.labels, None, MEAN, IGNORE_INDEX)
        out: Tensor = value
        return out

    def backward(self, cotangent: Tensor) -> Tensor:
        self.g = aten.nll_loss_backward(cotangent, self.log_probs, self.labels, None, MEAN, IGNORE_INDEX, self.total)
        d: Tensor = aten._log_softmax_backward_data(self.g, self.log_probs, 1, self.log_probs.dtype)
        return d

    def along(self, dx: Tensor) -> Tensor:
        """The derivative of the result of ``backward``, from that of the logits."""
        p = self.log_probs.exp()
        moved = p * dx
        moved.addcmul_(p, moved.sum(dim=1, keepdim=True), value=-1)
        return moved.mul_(-self.g.sum(dim=1, keepdim=True))


ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu,
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
}

# Arguments of torch's nll_loss: the mean over samples, except those with this label.
MEAN, IGNORE_INDEX = 1, -100


def named(name: str, part: str) -> str:
    """The full name of a layer's parameter or buffer."""
    return f"{name}.{part}" if name else part


def subtract_product(x: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``x - a * b``; x of None is 0."""
    return -a * b if x is None else torch.addcmul(x, a, b, value=-1)


def _sums(d: Tensor, x: Tensor, mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of d s (x - mean) and of d over all rows."""
    mask = [False, True, True]
    _, by_z, by_1 = aten.native_batch_norm_backward(d, x, s, None, None, mean, s, True, 0.0, mask)
    return by_z, by_1
