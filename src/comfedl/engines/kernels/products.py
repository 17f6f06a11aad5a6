"""Large matrix products of linear layers and of self-attention by oneDNN, on processors with AVX-512.

There torch multiplies matrices in single precision with MKL, which on some processors does not use the full width: on
an AMD Zen 5 oneDNN takes less than half the time. The results agree up to rounding. Second derivatives, other dtypes
and small products stay with torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from comfedl.core.learner import Learner

# Multiplications below which the overhead of a call outweighs the gain.
WORTHWHILE = 2**21


def is_possible() -> bool:
    """Whether this build of torch and this processor have the product."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class FastProducts(Learner):
    """A model whose linear layers and self-attention use oneDNN in training."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner.module, learner.loss_function, learner.metrics)
        assert self.module is not None
        quicken(self.module)


def gains(module: nn.Module) -> bool:
    """Whether a module has layers that may use oneDNN here."""
    return is_possible() and any(type(layer) in FAST for layer in module.modules())


def quicken(module: nn.Module) -> None:
    """Let the linear layers and self-attentions of a module use oneDNN in training, in place."""
    for layer in module.modules():
        if type(layer) in FAST:
            layer.__class__ = FAST[type(layer)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear``, by oneDNN where that is possible and worthwhile."""
    if x.numel() * len(weight) < WORTHWHILE or not all(_is_plain(part) for part in (x, weight)):
        return functional.linear(x, weight, bias)
    if (
        torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return functional.linear(x, weight, bias)
    return _product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def _is_plain(part: Tensor) -> bool:
    return type(part) in (Tensor, nn.Parameter) and part.dtype == torch.float32 and part.device.type == "cpu"


def _times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class _Product(torch.autograd.Function):
    """A linear layer on rows. Its second derivative is that of torch's products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        (d,), (x, weight), (of_x, of_weight, of_bias) = ds, ctx.saved_tensors, ctx.needs_input_grad
        total = d.sum(dim=0) if of_bias else None
        if torch.is_grad_enabled():  # this will be differentiated
            return d @ weight if of_x else None, d.t() @ x if of_weight else None, total
        return _times(d, weight.t()) if of_x else None, _cross(d, x) if of_weight else None, total


def _cross(d: Tensor, x: Tensor) -> Tensor:
    """d^T x, in the order that is faster."""
    if d.shape[1] <= x.shape[1]:
        return _times(d.t(), x.t())
    return _times(x.t(), d.t()).t().contiguous()


_product: Callable[..., Tensor] = _Product.apply


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias) if self.training else super().forward(input)


class _FastAttention(nn.MultiheadAttention):
    """Self-attention on batches, without padding; everything else is torch's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        given = _ATTENTION.bind(self, query, key, value, *args, **options).arguments
        mask, causal = given.get("attn_mask"), given.get("is_causal", False)
        if not (
            self.training
            and query is key is value
            and query.ndim == 3
            and self.in_proj_weight is not None
            and self.bias_k is None
            and not self.add_zero_attn
            and given.get("key_padding_mask") is None
            and not given.get("need_weights", True)
            and (mask is None or (mask.ndim == 2 and mask.dtype in (torch.bool, query.dtype)))
            and not (causal and mask is None)  # an error, which torch explains
        ):
            return super().forward(query, key, value, *args, **options)
        x = query if self.batch_first else query.transpose(0, 1)
        packed = linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = packed.view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if causal:  # torch takes the caller's word that the mask is the causal one
            mask = None
        elif mask is not None and mask.dtype == torch.bool:
            mask = ~mask  # this module masks what is true, and the function what is false
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=causal)
        out = linear(mixed.transpose(1, 2).reshape(x.shape), self.out_proj.weight, self.out_proj.bias)
        return out if self.batch_first else out.transpose(0, 1), None


_ATTENTION = inspect.signature(nn.MultiheadAttention.forward)
FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _FastLinear, nn.MultiheadAttention: _FastAttention}
