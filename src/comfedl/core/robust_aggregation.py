"""Robust weighted means of models, which a few bad clients cannot move far.

They take the clients' parameters stacked, ``[clients, ...]`` per leaf, and weights with sum 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfedl.utils import tree
from comfedl.utils.tree import Tree

RULES = ("mean", "median", "trimmed-mean", "geometric-median")


def _ordered(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each coordinate's values in ascending order, with their weights and cumulative weights."""
    ordered, order = values.sort(dim=0)
    shares = weights.to(values)[order]
    return ordered, shares, shares.cumsum(dim=0)


def median(values: Tensor, weights: Tensor) -> Tensor:
    """The coordinate-wise weighted median; the midpoint of two values if each side has exactly half the weight."""
    ordered, _, running = _ordered(values, weights)
    slack = 8 * torch.finfo(values.dtype).eps
    low = (running < 0.5 - slack).sum(dim=0, keepdim=True)
    high = (running < 0.5 + slack).sum(dim=0, keepdim=True).clamp(max=len(values) - 1)
    return (0.5 * (ordered.gather(0, low) + ordered.gather(0, high))).squeeze(0)


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """The coordinate-wise mean without the fraction ``trim`` of the weight at either end."""
    ordered, shares, running = _ordered(values, weights)
    inside = (running.clamp(max=1 - trim) - (running - shares).clamp(min=trim)).clamp(min=0)
    return (inside * ordered).sum(dim=0) / inside.sum(dim=0)


def geometric_median(stacked: Tree, weights: Tensor, turns: int = 200) -> Tree:
    """The minimiser of the weighted sum of distances to the clients' models, by the smoothed Weiszfeld algorithm."""
    count = len(weights)
    flat = torch.cat([leaf.reshape(count, -1) for leaf in tree.leaves(stacked)], dim=1).double()
    weights = weights.to(flat)
    point = weights @ flat
    scale = float((flat - point).norm(dim=1).max())
    for _ in range(turns if scale > 0 else 0):
        pull = weights / (flat - point).norm(dim=1).clamp(min=max(1e-9 * scale, 1e-300))
        moved = (pull / pull.sum()) @ flat
        done = (moved - point).norm() <= 1e-10 * scale
        point = moved
        if done:
            break
    # Towards a client's own model the iteration converges slowly: that model is taken where it is the better point.
    distances = (flat - point).norm(dim=1)
    nearest = flat[distances.argmin()]
    if weights @ (flat - nearest).norm(dim=1) <= weights @ distances:
        point = nearest
    parts = iter(torch.split(point, [leaf[0].numel() for leaf in tree.leaves(stacked)]))
    return tree.map(lambda leaf: next(parts).reshape(leaf.shape[1:]).to(leaf.dtype), stacked)


def robust_mean(rule: str, stacked: Tree, weights: Tensor, trim: float) -> Tree:
    """Aggregate the clients' parameters by the rule of this name."""
    if rule == "geometric-median":
        return geometric_median(stacked, weights)
    if rule == "median":
        return tree.map(lambda leaf: median(leaf, weights), stacked)
    return tree.map(lambda leaf: trimmed_mean(leaf, weights, trim), stacked)
