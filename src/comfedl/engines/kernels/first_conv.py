"""The first layers of a chain, a convolution, its batch normalisation and max-pooling, as one.

Nothing moves below them and nothing is handed further down. Let P be the patch of the images under a place, <P> the
mean patch, and [t] the sum of t (P - <P>) over all places, a number for each weight. The output of the convolution less
its mean is y = W.(P - <P>), and the sum of t y over all places is W.[t]: so [y], and one more such sum for what comes
back, take the place of several passes over the whole output. With a one behind each patch, the mean is taken away by
the products themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comfedl.core.objectives import Params
from comfedl.engines.kernels.layers import Norm, Parts, Pass, less
from comfedl.engines.kernels.layouts import Pool, form, picked, put
from comfedl.engines.kernels.small_products import fast_products

SMALL = 9  # numbers of a patch: three by three of one channel


class Entry(Norm):
    """``nn.Conv2d`` without groups, the normalisation behind it, and the pooling behind that."""

    def __init__(
        self, convolution: Parts, padding: list[int], name: str, norm: nn.Module, within: Pass, pool: Pool
    ) -> None:
        super().__init__(name, norm, within, pool)
        self.convolution, self.padding, self.w = convolution, padding, convolution.weight.flatten(1)

    def trains(self) -> bool:
        return super().trains() or any(self.convolution.trained)

    def forward(self, x: Tensor) -> Tensor:
        padded = self._padded(x)
        windows = self._windows(padded)
        self.form = form(torch.Size((len(x), len(self.w), *windows.shape[1:3])), True)
        self.patches = x.new_empty(self.w.shape[1] + 1, windows.shape[1:4].numel())
        turned = windows.permute(0, 4, 5, 1, 2, 3)
        self.patches[:-1].view(turned.shape).copy_(turned)
        self.patches[-1] = 1
        self.mean_patch = self._windows(padded.sum(dim=3)).mean(dim=(1, 2)).flatten() / len(x)
        y = self._rows(self.w)
        self.by_y = self._sum(y)
        variance = (_dot(self.w, self.by_y) / len(y)).clamp_(min=0)
        self._track(variance, len(y))
        return self.normed(y, torch.zeros_like(variance), variance)

    def backward(self, d: Tensor, found: Params) -> None:
        d = self.out.rows(d)
        self.by_d = self._sum(put(self.x.zero_(), self.places, d))
        del self.x  # what is pooled is all that is needed of it
        weight = self.s * _dot(self.w, self.by_d)
        self.give(found, weight, d.sum(dim=0))
        # y gets k (d - <d> - z <d z>), and [1] is 0.
        self.qs = weight / self.count * self.s
        self.back = torch.addcmul(self.by_d, self.by_y, self.qs[:, None], value=-1)
        self._give(found, self.back * self.k[:, None])

    def forward_along(self, dx: Tensor | None, v: Params) -> Tensor:
        (direction, _), (weight, bias) = self.convolution.along(v), self.along(v)
        self.v = direction.flatten(1)
        self.dx = self._rows(self.v)
        dat = picked(self.dx, self.places)
        self.b = self.s * _dot(self.v, self.by_y) / self.count  # z moves by s (dy - b z)
        self.dk = self.s * less(weight, self.k, self.b)
        out = dat * self.k if bias is None else torch.addcmul(bias, dat, self.k)
        return self.out.images(out.addcmul_(self.at, self.dk))

    def backward_along(self, dd: Tensor, found: Params) -> None:
        dd = self.out.rows(dd)
        by_dd = self._sum(put(self.dx.mul_(-self.qs), self.places, dd))
        weight = self.s * (_dot(self.w, by_dd) + _dot(self.v, self.by_d))
        self.give(found, weight, dd.sum(dim=0))
        by_y = self.s * (weight / self.count - self.qs * self.b)
        by_dd.addcmul_(self.by_y, by_y[:, None], value=-1).mul_(self.k[:, None])
        self._give(found, by_dd.addcmul_(self.back, self.dk[:, None]))

    def _track(self, variance: Tensor, count: int) -> None:
        """Move the running statistics by those of this batch."""
        share, bias, (mean_, variance_) = self.share(), self.convolution.bias, self.running
        if mean_ is not None and variance_ is not None:
            mean = self.w @ self.mean_patch
            mean_.lerp_(mean if bias is None else mean + bias, share)
            variance_.lerp_(variance * (count / (count - 1)), share)

    def _padded(self, x: Tensor) -> Tensor:
        """Padded images, [channels, height, width, samples]."""
        (samples, channels, height, width), (up, left) = x.shape, self.padding
        padded = x.new_zeros(channels, height + 2 * up, width + 2 * left, samples)
        padded[:, up : up + height, left : left + width] = x.permute(1, 2, 3, 0)
        return padded

    def _windows(self, x: Tensor) -> Tensor:
        """What lies under each place, from [channels, height, width, ...]: the kernel's two dimensions come last."""
        layer = self.convolution.layer
        (tall, broad), (down, across) = layer.dilation, layer.stride
        reach = [step * (size - 1) + 1 for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        return x.unfold(1, reach[0], down).unfold(2, reach[1], across)[..., ::tall, ::broad]

    def _rows(self, weight: Tensor) -> Tensor:
        """The convolution of the patches with a weight, less its mean."""
        return self.patches.t() @ torch.column_stack((weight, -(weight @ self.mean_patch))).t()

    def _sum(self, t: Tensor) -> Tensor:
        """[t]."""
        sums = self.patches @ t
        return torch.addr(sums[:-1], self.mean_patch, sums[-1], alpha=-1).t()

    def _give(self, found: Params, weight: Tensor) -> None:
        self.convolution.give(found, weight.view_as(self.convolution.weight), torch.zeros_like(self.mean))


def entered(layer: nn.Conv2d, twice: bool) -> bool:
    """Whether a first convolution is faster for it: its patches are no more than its output, and small.

    They need not be small where the Hessian's product is asked for and products are fast (``benchmarks.layers``).
    """
    size = layer.weight[0].numel()
    most = layer.out_channels if twice and fast_products() else min(SMALL, layer.out_channels)
    return layer.groups == 1 and size <= most


def _dot(weight: Tensor, sums: Tensor) -> Tensor:
    """The inner product for each channel."""
    return (weight * sums).sum(dim=1)
