"""Weights on the probability simplex; exponentials are computed in the log domain, so that they cannot overflow.

All clients share one shift inside the exponent; a shift per client would cancel the re-weighting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-6  # relative rounding error of losses, which are computed in float32
MANY = 16_384  # with more values than this, sorting is too slow


def log_mean_exp(values: Tensor, gamma: float) -> Tensor:
    """``gamma * log(mean(exp(values / gamma)))``, the paper's eq. (5), finite for all finite values.

    >>> log_mean_exp(torch.tensor([1e4, 1e4], dtype=torch.float64), gamma=0.1).item()
    10000.0
    """
    peak = values.max() if gamma > 0 else values.min()
    # log1p and expm1 keep precision at a large gamma, where the mean of the exponentials is close to 1.
    return peak + gamma * torch.log1p(torch.expm1((values - peak) / gamma).mean())


def softmax_weights(values: Tensor, gamma: float) -> Tensor:
    """``r_i = exp(values_i / gamma) / sum_j exp(values_j / gamma)``: the maximiser of the paper's eq. (4).

    >>> softmax_weights(torch.tensor([1.0, 1.0, 1.0, 1.0]), gamma=0.2)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    peak = values.max() if gamma > 0 else values.min()
    return torch.softmax((values - peak) / gamma, dim=0)


def effective_weights(values: Tensor, clients: float) -> Tensor:
    """The softmax weights with ``1 / sum_i r_i^2 = clients``; see ``effective_gamma``.

    >>> effective_weights(torch.tensor([1.0, 2.0], dtype=torch.float64), clients=1).tolist()
    [0.0, 1.0]
    """
    gamma = effective_gamma(values, clients)
    if gamma > 0:
        return softmax_weights(values, gamma)
    top = (values == values.max()).to(values.dtype)
    return top / top.sum()


def effective_gamma(values: Tensor, clients: float) -> float:
    """The gamma at which the number of effective clients, ``1 / sum_i r_i^2`` of the softmax weights, is ``clients``.

    With b = 1 / gamma, ``log sum_i r_i^2`` has the derivative ``2 (E_{2b}[values] - E_b[values]) >= 0`` in b, where E_b
    is the mean under the softmax at b. So the number decreases from n at b = 0 to the number of clients tied at the
    largest value, and bisection finds it. Out of that range, gamma is infinity (plain averaging) or 0. Values that
    differ only by rounding count as equal: otherwise rounding would pick the clients at the start of training, when
    their losses are often all the same.
    """
    below = values.double() - values.double().max()
    spread = -float(below.min())
    if clients >= len(values) or spread <= ROUNDING * float(values.abs().max()):
        return math.inf
    if clients <= int((below == 0).sum()):
        return 0.0
    scaled = below / spread
    low, high = -30.0, 45.0  # log(b * spread), from uniform weights to one-hot weights in float64
    for _ in range(200):
        middle = (low + high) / 2
        odds = torch.exp(math.exp(middle) * scaled)
        found = float(odds.sum() ** 2 / odds.square().sum())
        if abs(found - clients) <= 1e-12 * clients or middle in (low, high):
            break
        low, high = (middle, high) if found > clients else (low, middle)
    return spread / math.exp(middle)


def capped_weights(values: Tensor, gamma: float, cap: float) -> Tensor:
    """The softmax weights with no client above ``cap`` times uniform: KL-regularised CVaR.

    The maximiser of ``sum r_i values_i - gamma * KL(r || uniform)`` over the simplex with ``r_i <= cap / n`` is
    ``r_i = min(exp((values_i - eta) / gamma), cap) / n``, with ``eta`` such that they sum to 1. Weights above the
    cap are set to it and the others share the rest by softmax, until none is above; each pass only raises the others.
    """
    n = len(values)
    weights = softmax_weights(values, gamma)
    capped = torch.zeros(n, dtype=torch.bool, device=values.device)
    while bool((above := (weights > cap / n) & ~capped).any()):
        capped |= above
        weights = torch.full_like(values, cap / n)
        if not bool(capped.all()):
            left = max(0.0, 1 - int(capped.sum()) * cap / n)
            weights[~capped] = left * softmax_weights(values[~capped], gamma)
    return weights


def limited_weights(weights: Tensor, cap: float) -> Tensor:
    """Weights with the same sum, none above ``cap`` times the mean; what is cut off goes to the others in proportion.

    >>> limited_weights(torch.tensor([0.6, 0.2, 0.2, 0.0], dtype=torch.float64), cap=2)
    tensor([0.5000, 0.2500, 0.2500, 0.0000], dtype=torch.float64)
    """
    most = cap * weights.sum() / len(weights) if cap < len(weights) else torch.inf
    whole, weights, at_cap = weights.sum(), weights.clone(), torch.zeros(len(weights), dtype=torch.bool)
    while bool((above := (weights > most * (1 + 1e-12)) & ~at_cap).any()):
        at_cap |= above
        left, others = whole - most * at_cap.sum(), weights[~at_cap]
        weights[at_cap] = most
        weights[~at_cap] = others * (left / others.sum()) if bool(others.any()) else left / len(others)
    return weights


def project(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """The Euclidean projection onto the probability simplex; value i counts ``counts[i]`` times.

    With values sorted in descending order, u_1 >= ... >= u_n, the support size is the largest k with ``u_k`` above the
    threshold ``(sum_{j<=k} u_j - 1) / k``, which is subtracted from all.

    >>> project(torch.tensor([0.5, 1.5], dtype=torch.float64)).tolist()
    [0.0, 1.0]
    """
    values = values.clamp(max=torch.finfo(values.dtype).max)  # infinite ones share the weight
    # Shifting leaves the projection unchanged, and keeps the precision of large values. What is more than 1 below the
    # largest gets no weight, so that a bound far below changes nothing but sums that would overflow.
    shifted = (values - values.max()).clamp_(min=-2)
    if counts is not None or len(values) > MANY:
        counts = torch.ones_like(values) if counts is None else counts
        return shifted.sub_(_threshold(shifted, counts)).clamp_(min=0)
    ordered = shifted.sort(descending=True).values
    counts = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    thresholds = (ordered.cumsum(dim=0) - 1) / counts
    k = int((ordered > thresholds).sum())
    return (shifted - thresholds[k - 1]).clamp(min=0)


def _threshold(shifted: Tensor, counts: Tensor) -> Tensor:
    """The same threshold without sorting, by Michelot's algorithm: drop values below it until none is left below."""
    above = shifted > -1  # the others get no weight: the largest value is 0, and the weights sum to 1
    while True:
        if not bool(above.all()):
            shifted, counts = shifted[above], counts[above]
        threshold = ((shifted * counts).sum() - 1) / counts.sum()
        above = shifted > threshold
        if bool(above.all()):
            return threshold


def top_weights(values: Tensor, level: float) -> Tensor:
    """The maximiser of ``sum r_i values_i`` with ``r_i <= 1 / (n (1 - level))``: CVaR's weights.

    Clients tied at the quantile share its weight equally, so that the order of clients does not matter.

    >>> top_weights(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), level=0.5).tolist()
    [0.0, 0.0, 0.5, 0.5]
    """
    n = len(values)
    cap = 1.0 if level >= 1 else min(1.0, 1 / (n * (1 - level)))
    ordered = values.sort(descending=True).values
    boundary = ordered[min(n - 1, math.ceil(1 / cap - 1e-9) - 1)]
    above, tied = values > boundary, values == boundary
    weights = torch.zeros_like(values)
    weights[above] = cap
    weights[tied] = (1 - cap * int(above.sum())) / int(tied.sum())
    return weights


def chi_square_weights(values: Tensor, rho: float) -> Tensor:
    """The maximiser of ``sum r_i values_i`` over the simplex with ``(1 / 2n) sum (n r_i - 1)^2 <= rho``.

    On the k largest values it is ``1 / k + c (values_i - their mean)``, with c from the radius, for the largest k at
    which no weight is negative. If the ball contains a vertex of the simplex, the largest values share all the weight.
    """
    n = len(values)
    # Relative to the largest value and the range, so that nearly equal losses keep their precision.
    below = values - values.max()
    ordered, order = (below / below.abs().max().clamp(min=torch.finfo(values.dtype).tiny)).sort(descending=True)
    counts = torch.arange(1, n + 1, device=values.device, dtype=values.dtype)
    means = ordered.cumsum(dim=0) / counts
    spread = ((ordered**2).cumsum(dim=0) - counts * means**2).clamp(min=0)
    room = (1 + 2 * rho) / n - 1 / counts  # what sum r_i^2 may have beyond uniform weights on k values
    top = int((ordered == ordered[0]).sum())
    slope = torch.sqrt(room.clamp(min=0) / spread.clamp(min=torch.finfo(values.dtype).tiny))
    fits = (room >= 0) & (1 / counts + slope * (ordered - means) >= 0)
    fits[:top] = False
    largest = fits.nonzero()
    weights = torch.zeros_like(values)
    if len(largest):
        k = int(largest[-1]) + 1
        weights[:k] = 1 / k + slope[k - 1] * (ordered[:k] - means[k - 1])
    else:
        weights[:top] = 1 / top
    return torch.empty_like(values).index_copy_(0, order, weights.clamp(min=0) / weights.clamp(min=0).sum())
