"""The gradient of a dense model's cross-entropy, written out: half the operations of autograd's.

Samples are last, [clients, features, samples], so that every product is of rows and the softmax runs along them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from comfedl.engines.stacked import mean_inside
from comfedl.problem import Params, Pullback

# The cotangent of an activation's input, from its output's and its output.
SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda d, out: torch.ops.aten.threshold_backward(d, out, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
    nn.Identity: lambda d, out: d,
}


@torch.no_grad()
def pull_cross_entropy(
    layers: Sequence[tuple[str, nn.Module]],
    part: Callable[[str, nn.Module, Params, int, str], Tensor | None],
    params: Params,
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
) -> tuple[Tensor, Pullback]:
    """Each client's mean cross-entropy on x [clients, samples, features], and its pullback to the parameters.

    The layers are linear ones and those of ``SLOPES``; ``part`` finds a layer's stacked parameter. ``inside`` says
    which samples count, None that all do.
    """
    at = x.transpose(1, 2)
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []  # each layer with its weight and input, or twice its output
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = (part(name, layer, params, len(x), which) for which in ("weight", "bias"))
            assert weight is not None
            seen.append((name, layer, weight, at))
            at = torch.bmm(weight, at)
            at = at if bias is None else at.add_(bias.unsqueeze(2))
        else:
            at = layer(at)
            seen.append((name, layer, at, at))
    chances, labels = torch.log_softmax(at, dim=1), y.unsqueeze(1)
    losses = -chances.gather(1, labels).squeeze(1)
    value = losses.mean(dim=1) if inside is None else mean_inside(losses, inside)

    @torch.no_grad()
    def pullback(cotangent: Tensor) -> Params:
        share = cotangent.unsqueeze(1) / y.shape[1]
        if inside is not None:
            share = torch.where(inside, (cotangent / inside.sum(dim=1)).unsqueeze(1), 0)
        d = chances.exp()
        d.scatter_add_(1, labels, d.new_full((), -1).expand(labels.shape)).mul_(share.unsqueeze(1))
        found: Params = {}
        for place, (name, layer, weight, at) in reversed(list(enumerate(seen))):
            if not isinstance(layer, nn.Linear):
                d = SLOPES[type(layer)](d, at)
                continue
            dot = f"{name}." if name else ""
            if f"{dot}weight" in params:
                found[f"{dot}weight"] = torch.bmm(d, at.transpose(1, 2))
            if f"{dot}bias" in params:
                found[f"{dot}bias"] = d.sum(dim=2)
            if not any(isinstance(below, nn.Linear) for _, below, *_ in seen[:place]):
                break
            d = torch.bmm(weight.transpose(1, 2), d)
        return {name: found[name] for name in params}  # in their order, as a tree needs it

    return value, pullback
