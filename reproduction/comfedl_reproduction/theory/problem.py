"""A composition problem with known objective, gradient and constants, and the paper's bounds for it.

Client i has the inner map and the outer function

    f_i(w; xi) = (1 + S1 xi_1) tanh(A_i w + c_i) + S2 xi_2 v        xi_1, xi_2 = +1 or -1, each equally likely
    g_i(y; zeta) = sum_j log cosh(y_j - t_ij - S3 zeta)             zeta = +1 or -1, equally likely

with A_i a rotation times ``SCALE`` and v a unit vector. The clients differ in A_i, c_i and t_i. A client's data are
the few values of its noise: a batch larger than that is drawn with replacement, so its samples are independent, and
every expectation is a finite sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from comfedl.core.learner import Batch, Params
from comfedl.core.objectives import Composition
from comfedl.data.federated import FederatedData

F64 = torch.float64
SCALE = 1.2
S1, S2, S3 = 0.8, 0.6, 0.5
ANGLES = (-0.7, -0.2, 0.3, 0.9)
OFFSETS = ((0.3, -0.2), (-0.4, 0.1), (0.1, 0.4), (0.0, -0.3))
TARGETS = ((0.8, 0.5), (0.3, 0.9), (0.7, -0.1), (0.9, 0.6))
START = (-1.0, -1.0)
# A batch larger than the four values of xi is drawn with replacement.
LEAST_BATCH = 5
# The maximum of |tanh''| = 2 |tanh| (1 - tanh^2), at tanh^2 = 1/3.
TANH_CURVATURE = 4 / (3 * math.sqrt(3))


class Constants(NamedTuple):
    """Assumptions 1 to 3. Matrix norms are spectral, except the Frobenius norm in ``sigma1``: variances add up."""

    G_f: float
    G_g: float
    L_f: float
    L_g: float
    L: float
    sigma1: float
    sigma2: float
    sigma3: float

    @property
    def sigma(self) -> float:
        return max(self.sigma1, self.sigma2, self.sigma3)

    @property
    def H(self) -> float:
        return math.sqrt(self.G_g**2 * self.L_f**2 + self.G_f**4 * self.L_g**2)

    def noise(self, b: int) -> float:
        """The three terms of the theorem that decrease with b = b1: sqrt(5) (G_f + G_g + L_g G_f) sigma / sqrt(b)."""
        return math.sqrt(5 / b) * (self.G_f + self.G_g + self.L_g * self.G_f) * self.sigma

    def drift(self, tau: int, eta: float) -> float:
        """Lemma 2: a bound of the squared distance between the average model and the start of the round."""
        return (tau * eta * self.G_g * self.G_f) ** 2

    def error(self, tau: int, eta: float, b: int) -> float:
        """Lemma 3: a bound of the squared distance between the mean of the clients' directions and U."""
        terms = self.G_f**2 + self.G_g**2 + self.L_g**2 * self.G_f**2
        return 5 * (self.H**2 * self.drift(tau, eta) + terms * self.sigma**2 / b)

    def descent(self, tau: int, eta: float, b: int) -> float:
        """The proof's descent inequality: how much one local step may change F, beyond -eta ||grad F(w_s)||^2."""
        G = self.G_f * self.G_g
        return eta * (G * self._deviation(tau, eta, b) + (tau + 0.5) * self.L * eta * G**2)

    def theorem(self, gap: float, T: int, tau: int, eta: float, b: int) -> float:
        """Theorem 1 with the plus sign that its proof has; ``gap`` is F(w_0) - F*."""
        return gap / (T * eta) + self.descent(tau, eta, b) / eta

    def printed(self, gap: float, T: int, tau: int, eta: float, b: int) -> float:
        """Theorem 1 as printed: without the plus sign, two of its terms become a product."""
        G, root = self.G_f * self.G_g, math.sqrt(5 / b) * self.sigma
        product = math.sqrt(5) * self.H * tau * G * eta * root * self.G_f
        inside = product + root * (self.G_g + self.L_g * self.G_f)
        return gap / (T * eta) + G * inside + (tau + 0.5) * self.L * eta * G**2

    def _deviation(self, tau: int, eta: float, b: int) -> float:
        """The square root of Lemma 3's bound, taken term by term as the proof does."""
        return math.sqrt(5) * self.H * tau * self.G_g * self.G_f * eta + self.noise(b)


class LocalStep(NamedTuple):
    """One local step of a client: its w, the inner value, and the batch means of its noise."""

    client: int
    w: Tensor
    y: Tensor
    noise: Tensor


@dataclass
class StepLog:
    """Records the calls of the problem's functions: the local steps in order, client by client."""

    steps: list[LocalStep] = field(default_factory=list)
    outer_noise: list[Tensor] = field(default_factory=list)


class Synthetic:
    """The problem: its functions for ``fit``, and their exact expectations and constants."""

    def __init__(self) -> None:
        turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in ANGLES]
        self.A = SCALE * torch.tensor(turns, dtype=F64)
        self.c, self.t = torch.tensor(OFFSETS, dtype=F64), torch.tensor(TARGETS, dtype=F64)
        self.clients, self.p, self.d = self.A.shape
        self.v = torch.ones(self.p, dtype=F64) / math.sqrt(self.p)
        self.start = torch.tensor(START, dtype=F64)

    # For ``fit``.

    def data(self, who: Sequence[int]) -> FederatedData:
        """One client per entry of ``who``, with the functions of that index, which is also the y of its samples."""
        xi = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 2)
        zeta = torch.tensor([[-1.0], [1.0]], dtype=F64)
        names = [f"{k:05d}" for k in range(len(who))]
        return FederatedData(
            train={name: (xi, torch.full((len(xi),), i)) for name, i in zip(names, who, strict=True)},
            outer={name: (zeta, torch.full((len(zeta),), i)) for name, i in zip(names, who, strict=True)},
        )

    def composition(self, log: StepLog | None = None) -> Composition:
        """The two functions. They are linear in the noise, so they first average it over the batch."""

        def inner(params: Params, batch: Batch) -> Tensor:
            i = int(batch[1][0])
            noise: Tensor = batch[0].mean(dim=0)
            y = (1 + S1 * noise[0]) * torch.tanh(self.A[i] @ params["w"] + self.c[i]) + S2 * noise[1] * self.v
            if log is not None:
                log.steps.append(LocalStep(i, params["w"].detach().clone(), y.detach(), noise))
            return y

        def outer(y: Tensor, batch: Batch) -> Tensor:
            i = int(batch[1][0])
            noise: Tensor = batch[0].mean(dim=0)
            if log is not None:
                log.outer_noise.append(noise)
            positive = (1 + noise) / 2  # the fraction of samples with zeta = 1
            r = y - self.t[i]
            return (positive * log_cosh(r - S3) + (1 - positive) * log_cosh(r + S3)).sum()

        return Composition(inner, outer)

    # Exact values. w may have any number of leading dimensions; results have clients as the second-last one.

    def inner_mean(self, w: Tensor) -> Tensor:
        """E f_i(w; xi), of shape [..., clients, p]."""
        return torch.tanh(torch.einsum("npd,...d->...np", self.A, w) + self.c)

    def outer_gradient(self, y: Tensor) -> Tensor:
        """E grad g_i(y; zeta) for y of shape [..., clients, p]."""
        r = y - self.t
        return (torch.tanh(r - S3) + torch.tanh(r + S3)) / 2

    def client_gradients(self, w: Tensor) -> Tensor:
        """grad F_i(w) = J_i(w)^T grad g_i(f_i(w)), of shape [..., clients, d]."""
        y = self.inner_mean(w)
        return self.vjp(y, self.outer_gradient(y))

    def vjp(self, y: Tensor, cotangent: Tensor) -> Tensor:
        """J_i^T times a cotangent, where y = f_i(w), so that the derivative of tanh is 1 - y^2."""
        return torch.einsum("npd,...np->...nd", self.A, (1 - y**2) * cotangent)

    def gradient(self, w: Tensor) -> Tensor:
        """grad F(w)."""
        return self.client_gradients(w).mean(dim=-2)

    def objective(self, w: Tensor) -> Tensor:
        """F(w)."""
        return self.client_objectives(w).mean(dim=-1)

    def client_objectives(self, w: Tensor) -> Tensor:
        """F_i(w), of shape [..., clients]."""
        r = self.inner_mean(w) - self.t
        return ((log_cosh(r - S3) + log_cosh(r + S3)) / 2).sum(dim=-1)

    def lower_bound(self) -> float:
        """A lower bound of F: E log cosh(r - S3 zeta) is even and convex in r, so it is smallest at r = 0."""
        return self.p * math.log(math.cosh(S3))

    def gradient_bound(self) -> float:
        """An upper bound of ||grad F||: G_f G_g of the expectations, which have no noise."""
        return SCALE * math.sqrt(self.p)

    def constants(self) -> Constants:
        """Assumptions 1 to 3, by |tanh| < 1, |tanh'| <= 1, |tanh''| <= TANH_CURVATURE and rows of norm SCALE in A_i."""
        return Constants(
            G_f=(1 + S1) * SCALE,
            G_g=math.sqrt(self.p),
            L_f=(1 + S1) * TANH_CURVATURE * SCALE**2,
            L_g=1.0,
            # Of F itself, by the chain rule on the expectations, which have no noise.
            L=math.sqrt(self.p) * TANH_CURVATURE * SCALE**2 + SCALE**2,
            sigma1=S1 * SCALE * math.sqrt(self.p),
            sigma2=math.sqrt(S1**2 * self.p + S2**2),
            sigma3=math.sqrt(self.p) * math.tanh(S3),
        )

    def linear_part(self, w: Tensor, client: int, noise: Tensor, outer_noise: Tensor) -> Tensor:
        """The part of a step's direction that is linear in the noise, and so has mean 0."""
        y = self.inner_mean(w)
        r, gradient, curvature = y - self.t, self.outer_gradient(y), self._outer_curvature(y)
        zeta_part = (torch.tanh(r - S3) - torch.tanh(r + S3)) / 2  # of the outer gradient
        by = torch.stack([S1 * (gradient + curvature * y), S2 * curvature * self.v, zeta_part])
        each = self.vjp(y, by)[:, client]
        return torch.cat([noise, outer_noise], dim=-1) @ each

    def bias_limit(self, w: Tensor) -> Tensor:
        """The limit of b (E u - grad F(w)) for large b: half the direction's second derivatives in the mean noise."""
        y = self.inner_mean(w)
        curvature = self._outer_curvature(y)
        third = sum(-2 * torch.tanh(r) / torch.cosh(r) ** 2 for r in (y - self.t - S3, y - self.t + S3)) / 2
        second = S1**2 * (2 * curvature * y + third * y**2) + S2**2 * third * self.v**2
        return self.vjp(y, second).mean(dim=-2) / 2

    def _outer_curvature(self, y: Tensor) -> Tensor:
        """The derivative of ``outer_gradient``."""
        r = y - self.t
        return (torch.cosh(r - S3) ** -2 + torch.cosh(r + S3) ** -2) / 2


def log_cosh(x: Tensor) -> Tensor:
    """log cosh x, without overflow."""
    return torch.logaddexp(x, -x) - math.log(2)
