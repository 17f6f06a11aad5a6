"""Weights on the probability simplex, always computed in the log domain.

The common shift inside an exponent is shared by all clients; a shift of each client's own would delete the
re-weighting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_mean_exp(values: Tensor, gamma: float) -> Tensor:
    """``gamma * log(mean(exp(values / gamma)))``, the paper's eq. (5), finite for all finite values.

    >>> log_mean_exp(torch.tensor([1e4, 1e4], dtype=torch.float64), gamma=0.1).item()
    10000.0
    """
    peak = values.max() if gamma > 0 else values.min()
    return peak + gamma * torch.log(torch.exp((values - peak) / gamma).mean())


def softmax_weights(values: Tensor, gamma: float) -> Tensor:
    """``r_i = exp(values_i / gamma) / sum_j exp(values_j / gamma)``: the maximiser of the paper's eq. (4).

    >>> softmax_weights(torch.tensor([1.0, 1.0, 1.0, 1.0]), gamma=0.2)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    peak = values.max() if gamma > 0 else values.min()
    return torch.softmax((values - peak) / gamma, dim=0)


def capped_weights(values: Tensor, gamma: float, cap: float) -> Tensor:
    """The softmax weights with no client above ``cap`` times uniform: KL-regularised CVaR.

    The maximiser of ``sum r_i values_i - gamma * KL(r || uniform)`` over the simplex with ``r_i <= cap / n`` is
    ``r_i = min(exp((values_i - eta) / gamma), cap) / n`` with ``eta`` such that the weights sum to 1. With the k
    largest values at the cap, eta has a closed form; the right k is the first at which no other passes the cap.
    """
    n = len(values)
    ordered, order = ((values - values.max()) / gamma).sort(descending=True)
    capped = torch.arange(math.ceil(n / cap), device=values.device, dtype=values.dtype)
    tails = torch.logcumsumexp(ordered.flip(0), dim=0).flip(0)[: len(capped)]
    eta = tails - torch.log(n - cap * capped)
    fits = ordered[: len(capped)] - eta <= math.log(cap)
    fits[-1] = True  # all that is left is at most the cap: true but for rounding
    k = int(fits.nonzero()[0])
    weights = torch.exp(ordered - eta[k]) / n
    weights[:k] = cap / n
    return torch.empty_like(values).index_copy_(0, order, weights)
