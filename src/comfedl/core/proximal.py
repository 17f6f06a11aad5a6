"""Weights that look ahead: the proximal step of a robust objective, from numbers that the server has.

The objective is F(w) = g(f_1(w), ..., f_n(w)) for a coupled outer g such as KL. Client i's update d_i is -R times its
gradient for a known reach R, and the clients' own curvature is at most 1 / R: their learning rate promises it. So after
a move m of the model client i's loss is at most ``f_i - <d_i, m> / R + |m|^2 / (2 R)``. The move that minimises g of
these bounds is again a weighted sum of the updates, ``m = sum_i r_i d_i``, where r maximises

    sum_i r_i f_i - penalty(r) - |sum_i r_i d_i|^2 / (2 R)

instead of the first two terms alone. Weights that follow the losses alone overshoot: they jump to the worst client, and
then to the one that this move makes the worst. These stop where the next client would become the worst.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.core.outer_functions import Coupled

FloatArray = NDArray[np.float64]

ITERATIONS = 50
TOLERANCE = 1e-12


def proximal_weights(g: Coupled, losses: FloatArray, gram: FloatArray) -> FloatArray:
    """The maximiser r, by Newton's method on the dual, ``min_a g(losses - gram a) + a^T gram a / 2``.

    Args:
        g: an outer with a known ``curvature``.
        losses: each client's loss.
        gram: the inner products of the clients' updates over the reach, ``<d_i, d_j> / R``.
    """
    c = g.curvature
    assert c is not None
    a = _weights(g, losses)
    value, r = _dual(g, losses, gram, a)
    for _ in range(ITERATIONS):
        gap = r - a
        if float(np.abs(gap).max()) < TOLERANCE:
            break
        free = r < r.max() if getattr(g, "cap", None) is not None else np.ones(len(r), dtype=bool)
        if not free.any() or (getattr(g, "cap", None) is not None and r.max() < _cap(g, len(r)) * (1 - 1e-9)):
            free = np.ones(len(r), dtype=bool)
        own = np.where(free, r, 0.0)
        response = np.diag(own) - np.outer(own, own) / own.sum()  # of the weights to the losses, over c
        direction = np.linalg.solve(np.eye(len(r)) + c * response @ gram, gap)
        slope, size = float(-gap @ gram @ direction), 1.0
        while size > 1e-6:
            after = a + size * direction
            value_after, r_after = _dual(g, losses, gram, after)
            if value_after <= value + 1e-4 * size * slope + 1e-15 * abs(value):
                break
            size /= 2
        a, value, r = after, value_after, r_after
    return r


def proximal_length(g: Coupled, losses: FloatArray, weights: FloatArray, products: FloatArray, square: float) -> float:
    """How far to go along one direction ``D = sum_i r_i d_i``: the s in [0, 1] that minimises the same bound.

    Args:
        weights: the weights r, those of ``losses``.
        products: ``<d_i, D> / R``.
        square: ``|D|^2 / R``.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slope = middle * square - float(_weights(g, losses - middle * products) @ products)
        low, high = (middle, high) if slope < 0 else (low, middle)
    return (low + high) / 2


def _dual(g: Coupled, losses: FloatArray, gram: FloatArray, a: FloatArray) -> tuple[float, FloatArray]:
    """The dual's value at a, and the weights there."""
    moved = gram @ a
    values = losses - moved
    if getattr(g, "cap", None) is not None:
        return float(g.objective(torch.from_numpy(values))) + float(a @ moved) / 2, _weights(g, values)
    c = g.curvature
    assert c is not None and c > 0
    most = float(values.max())
    shares = np.exp(c * (values - most))
    total = float(shares.sum())
    return most + float(np.log(total / len(values))) / c + float(a @ moved) / 2, shares / total


def _weights(g: Coupled, values: FloatArray) -> FloatArray:
    found: FloatArray = g.weights(torch.from_numpy(values)).numpy()
    return found


def _cap(g: Coupled, clients: int) -> float:
    return float(getattr(g, "cap", None) or clients) / clients
