"""Robust weighted means of models, which a few bad clients cannot move far.

They take the clients' parameters stacked, ``[clients, ...]`` per leaf, and weights with sum 1, and compute in float64:
what a bad client sends may be 1e20 times the others' and must leave no rounding error behind.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comfedl.utils import tree
from comfedl.utils.tree import Tree

RULES = ("mean", "median", "trimmed-mean", "geometric-median", "krum", "multi-krum")

ROUNDING = 1e-9  # of weights that sum to 1: what is closer to a border is on it
FAR = 1e12  # beyond this many median distances only a client's direction matters


def _ordered(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each coordinate's values in ascending order, with their weights and cumulative weights."""
    ordered, order = values.sort(dim=0)
    shares = weights.to(values.device, torch.float64)[order]
    return ordered, shares, shares.cumsum(dim=0)


def median(values: Tensor, weights: Tensor) -> Tensor:
    """The coordinate-wise weighted median; the midpoint of two values if each side has exactly half the weight.

    Of integers, such as counters, it is the lower of the two.
    """
    ordered, _, running = _ordered(values, weights)
    low = ordered.gather(0, (running < 0.5 - ROUNDING).sum(dim=0, keepdim=True)).squeeze(0)
    if not values.is_floating_point():
        return low
    high = (running < 0.5 + ROUNDING).sum(dim=0, keepdim=True).clamp(max=len(values) - 1)
    return 0.5 * low + 0.5 * ordered.gather(0, high).squeeze(0)


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """The coordinate-wise mean without the fraction ``trim`` of the weight at either end."""
    ordered, shares, running = _ordered(values, weights)
    inside = running.clamp(max=1 - trim) - (running - shares).clamp(min=trim)
    inside = torch.where(inside > ROUNDING, inside, 0.0)
    return ((inside * ordered).sum(dim=0) / inside.sum(dim=0)).to(values.dtype)


def median_of(numbers: Tensor, weights: Tensor) -> float:
    """The weighted median of numbers, of which some may be infinite; the lower one of two."""
    ordered, order = numbers.double().sort()
    running = weights.double()[order].cumsum(0) / weights.double().sum()
    return float(ordered[min(int((running < 0.5 - ROUNDING).sum()), len(ordered) - 1)])


def geometric_median(stacked: Tree, weights: Tensor, turns: int = 200) -> Tree:
    """The minimiser of the weighted sum of distances to the clients' models, by the smoothed Weiszfeld algorithm.

    It starts from the coordinate-wise median and measures in median distances from there, so that no client's scale
    matters.
    """
    flat = _rows(stacked)
    weights = weights.to(flat)
    start = median(flat, weights)
    away = flat - start
    lengths = away.norm(dim=1)
    scale = median_of(lengths.cpu(), weights.cpu())
    if scale < 1e-300 or not math.isfinite(scale):  # half of the weight or more is there
        return _like(stacked, start)
    away *= (FAR * scale / lengths).clamp(max=1)[:, None] / scale
    point = torch.zeros_like(start)
    for turn in range(turns):
        smooth = max(1e-9, 0.5**turn)  # less from turn to turn: at a client's own model the iteration would stay
        pull = weights / (away - point).norm(dim=1).clamp(min=smooth)
        moved = (pull / pull.sum()) @ away
        done = smooth == 1e-9 and (moved - point).norm() <= 1e-10
        point = moved
        if done:
            break
    # Towards a client's own model the iteration converges slowly: that model is taken where it is the better point.
    distances = (away - point).norm(dim=1)
    nearest = away[distances.argmin()]
    others = (away - nearest).norm(dim=1)
    # Each |x - nearest| - |x - point|, without a difference of large numbers.
    gain = (2 * away - nearest - point) @ (point - nearest) / (others + distances).clamp(min=1e-300)
    if weights @ gain < -1e-12:
        point = nearest
    return _like(stacked, start + scale * point)


def krum(stacked: Tree, weights: Tensor, bad: float, several: bool) -> Tree:
    """Krum (Blanchard et al., 2017): the model that is closest to its n - f - 2 nearest neighbours.

    f is the fraction ``bad`` of the n clients, rounded up. Multi-Krum (``several``) is the weighted mean of the n - f
    best, so that with f = 0 it is the mean. Clients without weight do not count.
    """
    taken = weights > 0
    flat, shares = _rows(stacked)[taken], weights[taken].double()
    count = len(flat)
    f = bad_clients(bad, count)
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square().sort(dim=1).values
    scores = distances[:, 1 : max(2, count - f - 1)].sum(dim=1)
    best = scores.sort(stable=True).indices[: max(1, count - f) if several else 1]
    kept = shares.to(flat)[best]
    return _like(stacked, (kept / kept.sum()) @ flat[best])


def bad_clients(fraction: float, count: int) -> int:
    """How many of these clients Krum takes to be bad."""
    return math.ceil(fraction * count - ROUNDING)


def _rows(stacked: Tree) -> Tensor:
    """Each client's parameters as one row, in float64."""
    leaves = tree.leaves(stacked)
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], dim=1).double()


def _like(stacked: Tree, row: Tensor) -> Tree:
    """A row of ``_rows`` as a tree."""
    parts = iter(torch.split(row, [leaf[0].numel() for leaf in tree.leaves(stacked)]))
    return tree.map(lambda leaf: next(parts).reshape(leaf.shape[1:]).to(leaf.dtype), stacked)


def robust_mean(rule: str, stacked: Tree, weights: Tensor, trim: float) -> Tree:
    """Aggregate the clients' parameters by the rule of this name."""
    if rule == "mean":
        return tree.map(lambda leaf: torch.tensordot(weights.to(leaf), leaf, 1), stacked)
    if rule == "geometric-median":
        return geometric_median(stacked, weights)
    if rule in ("krum", "multi-krum"):
        return krum(stacked, weights, trim, several=rule == "multi-krum")
    if rule == "median":
        return tree.map(lambda leaf: median(leaf, weights), stacked)
    return tree.map(lambda leaf: trimmed_mean(leaf, weights, trim), stacked)


def robust_buffers(rule: str, stacked: Tree, weights: Tensor, trim: float) -> Tree:
    """Aggregate the clients' buffers beside parameters that the rule or a clip bounds.

    Statistics of different layers and channels have no common scale, so that no distance or norm between clients says
    which are bad: each takes its own weighted median, or trimmed mean where that is the rule. Both lie between values
    of good clients, so variances stay non-negative. Counters take the median.
    """

    def combine(leaf: Tensor) -> Tensor:
        trims = rule == "trimmed-mean" and leaf.is_floating_point()
        return trimmed_mean(leaf, weights, trim) if trims else median(leaf, weights)

    return tree.map(combine, stacked)
