"""Weights on the probability simplex; exponentials are always computed in the log domain.

The common shift inside an exponent is shared by all clients; a shift of each client's own would delete the
re-weighting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-6  # losses are computed in float32
MANY = 16_384  # for more values than this, sorting them all takes too long


def log_mean_exp(values: Tensor, gamma: float) -> Tensor:
    """``gamma * log(mean(exp(values / gamma)))``, the paper's eq. (5), finite for all finite values.

    >>> log_mean_exp(torch.tensor([1e4, 1e4], dtype=torch.float64), gamma=0.1).item()
    10000.0
    """
    peak = values.max() if gamma > 0 else values.min()
    # log1p and expm1 keep the digits of a large gamma, where the mean of the exponentials is all but 1.
    return peak + gamma * torch.log1p(torch.expm1((values - peak) / gamma).mean())


def softmax_weights(values: Tensor, gamma: float) -> Tensor:
    """``r_i = exp(values_i / gamma) / sum_j exp(values_j / gamma)``: the maximiser of the paper's eq. (4).

    >>> softmax_weights(torch.tensor([1.0, 1.0, 1.0, 1.0]), gamma=0.2)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    peak = values.max() if gamma > 0 else values.min()
    return torch.softmax((values - peak) / gamma, dim=0)


def effective_weights(values: Tensor, clients: float) -> Tensor:
    """The softmax weights at the gamma for which ``1 / sum_i r_i^2`` is so many clients; see ``effective_gamma``.

    >>> effective_weights(torch.tensor([1.0, 2.0], dtype=torch.float64), clients=1).tolist()
    [0.0, 1.0]
    """
    gamma = effective_gamma(values, clients)
    if gamma > 0:
        return softmax_weights(values, gamma)
    top = (values == values.max()).to(values.dtype)
    return top / top.sum()


def effective_gamma(values: Tensor, clients: float) -> float:
    """The gamma at which the softmax weights amount to so many equal clients, ``1 / sum_i r_i^2``.

    With b = 1 / gamma, ``log sum_i r_i^2`` has the slope ``2 (E_{2b}[values] - E_b[values]) >= 0`` in b, where E_b is
    the mean under the softmax at b: the number falls from n at b = 0 to that of the clients that share the largest
    value, so bisection finds it. What cannot be had is the nearest that can: infinity (plain averaging) for n or more,
    and 0 for as many as share the largest value, or fewer. Values that differ by rounding alone are equal: else the
    rounding of the first losses, which often are all the same, would choose the clients.
    """
    below = values.double() - values.double().max()
    spread = -float(below.min())
    if clients >= len(values) or spread <= ROUNDING * float(values.abs().max()):
        return math.inf
    if clients <= int((below == 0).sum()):
        return 0.0
    scaled = below / spread
    low, high = -30.0, 45.0  # the logarithm of b in units of the spread: uniform, and beyond what floats can tell apart
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
    ``r_i = min(exp((values_i - eta) / gamma), cap) / n`` with ``eta`` such that the weights sum to 1. Whoever is above
    the cap is put at it and the rest shares what is left by softmax, until nobody is: that only raises the others.
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


def project(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """The Euclidean projection on the probability simplex, where each value may stand for several that are equal.

    With the values sorted down, u_1 >= ... >= u_n, the support is the largest k with ``u_k`` above the threshold
    ``(sum_{j<=k} u_j - 1) / k``, which is subtracted from all.

    >>> project(torch.tensor([0.5, 1.5], dtype=torch.float64)).tolist()
    [0.0, 1.0]
    """
    shifted = values - values.max()  # the projection does not change, and large values keep their digits
    if counts is not None or len(values) > MANY:
        counts = torch.ones_like(values) if counts is None else counts
        return shifted.sub_(_threshold(shifted, counts)).clamp_(min=0)
    ordered = shifted.sort(descending=True).values
    counts = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    thresholds = (ordered.cumsum(dim=0) - 1) / counts
    k = int((ordered > thresholds).sum())
    return (shifted - thresholds[k - 1]).clamp(min=0)


def _threshold(shifted: Tensor, counts: Tensor) -> Tensor:
    """The same threshold without sorting, by Michelot's algorithm: those that are not above it are left out in turn."""
    above = shifted > -1  # others have no weight: the largest value is 0, and the weights add up to 1
    while True:
        if not bool(above.all()):
            shifted, counts = shifted[above], counts[above]
        threshold = ((shifted * counts).sum() - 1) / counts.sum()
        above = shifted > threshold
        if bool(above.all()):
            return threshold


def top_weights(values: Tensor, level: float) -> Tensor:
    """The maximiser of ``sum r_i values_i`` with ``r_i <= 1 / (n (1 - level))``: the worst share of the clients.

    Clients whose values are equal share what is left equally, so that no order of clients decides.

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

    On the k largest values it is ``1 / k + c (values_i - their mean)`` with c from the radius; the right k is the
    largest at which no weight is negative. Where the ball holds a corner of the simplex, the largest values share all.
    """
    n = len(values)
    # From the largest value down and in units of the range: losses that are all but equal keep their digits.
    below = values - values.max()
    ordered, order = (below / below.abs().max().clamp(min=torch.finfo(values.dtype).tiny)).sort(descending=True)
    counts = torch.arange(1, n + 1, device=values.device, dtype=values.dtype)
    means = ordered.cumsum(dim=0) / counts
    spread = ((ordered**2).cumsum(dim=0) - counts * means**2).clamp(min=0)
    room = (1 + 2 * rho) / n - 1 / counts  # what the squares of the weights may add up to beyond uniform on k
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
