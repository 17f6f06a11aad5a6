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

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.core.outer_functions import KL, Coupled

FloatArray = NDArray[np.float64]

ITERATIONS = 50
MILD = 30.0
TOLERANCE = 1e-12


def proximal_weights(g: Coupled, losses: FloatArray, gram: FloatArray) -> FloatArray:
    """The maximiser r, by Newton's method on the dual, ``min_a g(losses - gram a) + a^T gram a / 2``.

    Args:
        g: an outer with a known ``curvature``.
        losses: each client's loss.
        gram: the inner products of the clients' updates over the reach, ``<d_i, d_j> / R``.
    """
    c, cap = g.curvature, getattr(g, "cap", None)
    assert c is not None
    # Where the weights respond steeply, Newton's method needs a good start: the solution of a milder problem.
    steepness = c * _largest(gram.diagonal())
    stages = max(0, math.ceil(math.log(steepness / MILD, 4))) if steepness > MILD else 0
    milder = [KL(4**k / c, cap=cap) for k in range(stages, 0, -1)]
    r = _value_and_weights(milder[0] if milder else g, losses)[1]
    for problem in (*milder, g):
        r = _solve(problem, losses, gram, r)
    return r


def _solve(g: Coupled, losses: FloatArray, gram: FloatArray, a: FloatArray) -> FloatArray:
    """The weights at the dual's solution, by Newton's method from a."""
    c, cap = g.curvature, getattr(g, "cap", None)
    assert c is not None
    most = np.inf if cap is None else cap / len(losses) * (1 - 1e-9)
    value, r = _dual(g, losses, gram, a)
    rounding = 1e-14 * (_largest(losses) + _largest(gram.diagonal()))  # the value may be small by cancellation
    for _ in range(ITERATIONS):
        gap = r - a
        if _largest(gap) < TOLERANCE:
            break
        own = r if cap is None else np.where(r < most, r, 0.0)  # a client at its cap does not respond
        # The identity plus (c (diag(own) - own own^T / sum(own))) gram.
        matrix = c * own[:, None] * (gram - (own @ gram) / (own.sum() or 1.0))
        matrix.flat[:: len(r) + 1] += 1
        direction = np.linalg.solve(matrix, gap)
        slope, size = -float(gap @ gram @ direction), 1.0
        while True:
            after = a + size * direction
            value_after, r_after = _dual(g, losses, gram, after)
            if size < 1e-6 or value_after <= value + 1e-4 * size * slope + rounding:
                break
            size /= 2
        a, value, r = after, value_after, r_after
        if size < 1e-6 or size * _largest(direction) < TOLERANCE:
            break
    return r


def proximal_length(g: Coupled, losses: FloatArray, products: FloatArray, square: float) -> float:
    """How far to go along ``D = sum_i r_i d_i``, with the weights r of the losses: the s in [0, 1] of the least bound.

    Args:
        products: ``<d_i, D> / R``.
        square: ``|D|^2 / R``.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slope = middle * square - float(_value_and_weights(g, losses - middle * products)[1] @ products)
        low, high = (middle, high) if slope < 0 else (low, middle)
    return (low + high) / 2


def _dual(g: Coupled, losses: FloatArray, gram: FloatArray, a: FloatArray) -> tuple[float, FloatArray]:
    """The dual's value at a, and the weights there."""
    moved = gram @ a
    value, weights = _value_and_weights(g, losses - moved)
    return value + float(a @ moved) / 2, weights


def _value_and_weights(g: Coupled, values: FloatArray) -> tuple[float, FloatArray]:
    """The objective and its weights; in NumPy, which is faster for few clients, where they are a softmax."""
    if getattr(g, "cap", None) is not None:
        found = torch.from_numpy(values)
        return float(g.objective(found)), g.weights(found).numpy()
    assert g.curvature
    most = max(values.tolist())
    shares = np.exp(g.curvature * (values - most))
    total = float(np.add.reduce(shares))
    return most + math.log(total / len(values)) / g.curvature, shares / total


def _largest(values: NDArray[np.floating[Any]]) -> float:
    """The largest absolute value; for few numbers Python's own ``max`` is the quickest."""
    return max(map(abs, values.tolist()), default=0.0)
