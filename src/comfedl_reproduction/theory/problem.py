"""A composition problem whose objective, gradient and constants are all known, and the paper's bounds for it.

Client i has the inner map and the outer function

    f_i(w; xi) = (1 + S1 xi_1) tanh(A_i w + c_i) + S2 xi_2 v        xi_1, xi_2 = +1 or -1, each equally likely
    g_i(y; zeta) = sum_j log cosh(y_j - t_ij - S3 zeta)             zeta = +1 or -1, equally likely

with A_i a rotation times ``SCALE`` and v a unit vector. The clients differ in A_i, c_i and t_i. A client's data are
the few atoms of these laws: a batch larger than that is drawn with replacement, so its samples are independent draws
from a law of which every expectation is a finite sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from comfedl.core.objectives import Batch, Composition, Params
from comfedl.data.federated import FederatedData

F64 = torch.float64
SCALE = 1.2
S1, S2, S3 = 0.8, 0.6, 0.5
ANGLES = (-0.7, -0.2, 0.3, 0.9)
OFFSETS = ((0.3, -0.2), (-0.4, 0.1), (0.1, 0.4), (0.0, -0.3))
TARGETS = ((0.8, 0.5), (0.3, 0.9), (0.7, -0.1), (0.9, 0.6))
START = (-1.0, -1.0)
# A batch must have more samples than there are atoms of xi; then it is drawn with replacement.
LEAST_BATCH = 5
# The largest slope of tanh's slope, |tanh''| = 2 |tanh| (1 - tanh^2), at tanh^2 = 1/3.
BEND = 4 / (3 * math.sqrt(3))


class Constants(NamedTuple):
    """Assumptions 1 to 3. Norms of matrices are spectral; that of ``sigma1`` is Frobenius's: variances add up."""

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
        """The three terms of the theorem that fall with b = b1: sqrt(5) (G_f + G_g + L_g G_f) sigma / sqrt(b)."""
        return math.sqrt(5 / b) * (self.G_f + self.G_g + self.L_g * self.G_f) * self.sigma

    def drift(self, tau: int, eta: float) -> float:
        """Lemma 2: how far the average may be from where the round began, squared."""
        return (tau * eta * self.G_g * self.G_f) ** 2

    def error(self, tau: int, eta: float, b: int) -> float:
        """Lemma 3: how far the mean of the clients' directions may be from U, squared."""
        terms = self.G_f**2 + self.G_g**2 + self.L_g**2 * self.G_f**2
        return 5 * (self.H**2 * self.drift(tau, eta) + terms * self.sigma**2 / b)

    def descent(self, tau: int, eta: float, b: int) -> float:
        """The proof's inequality: how much one local step may raise F, beyond -eta ||grad F(w_s)||^2."""
        G = self.G_f * self.G_g
        return eta * (G * self._deviation(tau, eta, b) + (tau + 0.5) * self.L * eta * G**2)

    def theorem(self, gap: float, T: int, tau: int, eta: float, b: int) -> float:
        """Theorem 1 with the plus sign that its proof has; ``gap`` is F(w_0) - F*."""
        return gap / (T * eta) + self.descent(tau, eta, b) / eta

    def printed(self, gap: float, T: int, tau: int, eta: float, b: int) -> float:
        """Theorem 1 as printed: without that plus sign, two of its terms are a product."""
        G, root = self.G_f * self.G_g, math.sqrt(5 / b) * self.sigma
        product = math.sqrt(5) * self.H * tau * G * eta * root * self.G_f
        inside = product + root * (self.G_g + self.L_g * self.G_f)
        return gap / (T * eta) + G * inside + (tau + 0.5) * self.L * eta * G**2

    def _deviation(self, tau: int, eta: float, b: int) -> float:
        """The square root of Lemma 3's bound, taken term by term as the proof does."""
        return math.sqrt(5) * self.H * tau * self.G_g * self.G_f * eta + self.noise(b)


class Seen(NamedTuple):
    """What a client had in one local step: its own w, the inner value, and the means of its noise."""

    client: int
    w: Tensor
    y: Tensor
    noise: Tensor


@dataclass
class Watch:
    """Notes what the problem's functions are called with: the local steps, client by client, in their order."""

    steps: list[Seen] = field(default_factory=list)
    outer_noise: list[Tensor] = field(default_factory=list)


class Synthetic:
    """The problem: its functions as ``fit`` takes them, and what is known of them."""

    def __init__(self) -> None:
        turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in ANGLES]
        self.A = SCALE * torch.tensor(turns, dtype=F64)
        self.c, self.t = torch.tensor(OFFSETS, dtype=F64), torch.tensor(TARGETS, dtype=F64)
        self.clients, self.p, self.d = self.A.shape
        self.v = torch.ones(self.p, dtype=F64) / math.sqrt(self.p)
        self.start = torch.tensor(START, dtype=F64)

    # As ``fit`` takes it.

    def data(self, who: Sequence[int]) -> FederatedData:
        """One client for each entry of ``who``: the map that it has. A batch's y says which."""
        xi = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 2)
        zeta = torch.tensor([[-1.0], [1.0]], dtype=F64)
        names = [f"{k:05d}" for k in range(len(who))]
        return FederatedData(
            train={name: (xi, torch.full((len(xi),), i)) for name, i in zip(names, who, strict=True)},
            outer={name: (zeta, torch.full((len(zeta),), i)) for name, i in zip(names, who, strict=True)},
        )

    def composition(self, watch: Watch | None = None) -> Composition:
        """The two functions. They are linear in the noise, so its mean over the batch is taken first."""

        def inner(params: Params, batch: Batch) -> Tensor:
            i, noise = int(batch[1][0]), batch[0].mean(dim=0)
            y = (1 + S1 * noise[0]) * torch.tanh(self.A[i] @ params["w"] + self.c[i]) + S2 * noise[1] * self.v
            if watch is not None:
                watch.steps.append(Seen(i, params["w"].detach().clone(), y.detach(), noise))
            return y

        def outer(y: Tensor, batch: Batch) -> Tensor:
            i, noise = int(batch[1][0]), batch[0].mean(dim=0)
            if watch is not None:
                watch.outer_noise.append(noise)
            share = (1 + noise) / 2  # of the samples with zeta = 1
            r = y - self.t[i]
            return (share * log_cosh(r - S3) + (1 - share) * log_cosh(r + S3)).sum()

        return Composition(inner, outer)

    # What is known. All of these take w with any number of dimensions in front; clients come before the last.

    def inner_mean(self, w: Tensor) -> Tensor:
        """E f_i(w; xi), of shape [..., clients, p]."""
        return torch.tanh(torch.einsum("npd,...d->...np", self.A, w) + self.c)

    def outer_slope(self, y: Tensor) -> Tensor:
        """E grad g_i(y; zeta) for y of shape [..., clients, p]."""
        r = y - self.t
        return (torch.tanh(r - S3) + torch.tanh(r + S3)) / 2

    def client_gradients(self, w: Tensor) -> Tensor:
        """grad F_i(w) = J_i(w)^T grad g_i(f_i(w)), of shape [..., clients, d]."""
        y = self.inner_mean(w)
        return self.pull(y, self.outer_slope(y))

    def pull(self, y: Tensor, cotangent: Tensor) -> Tensor:
        """J_i^T times a cotangent, where y = f_i(w): the slope of tanh is 1 - y^2."""
        return torch.einsum("npd,...np->...nd", self.A, (1 - y**2) * cotangent)

    def gradient(self, w: Tensor) -> Tensor:
        """grad F(w)."""
        return self.client_gradients(w).mean(dim=-2)

    def objective(self, w: Tensor) -> Tensor:
        """F(w)."""
        r = self.inner_mean(w) - self.t
        return ((log_cosh(r - S3) + log_cosh(r + S3)) / 2).sum(dim=-1).mean(dim=-1)

    def lower_bound(self) -> float:
        """F is nowhere lower: E log cosh(r - S3 zeta) is even and convex in r, so least at r = 0."""
        return self.p * math.log(math.cosh(S3))

    def steepest(self) -> float:
        """No gradient of F is longer: G_f G_g for the means, in which there is no noise."""
        return SCALE * math.sqrt(self.p)

    def constants(self) -> Constants:
        """Assumptions 1 to 3, by |tanh| < 1, |tanh'| <= 1 and |tanh''| <= BEND; each row of A_i has the norm SCALE."""
        return Constants(
            G_f=(1 + S1) * SCALE,
            G_g=math.sqrt(self.p),
            L_f=(1 + S1) * BEND * SCALE**2,
            L_g=1.0,
            # Of F itself, by the chain rule on the means, in which there is no noise.
            L=math.sqrt(self.p) * BEND * SCALE**2 + SCALE**2,
            sigma1=S1 * SCALE * math.sqrt(self.p),
            sigma2=math.sqrt(S1**2 * self.p + S2**2),
            sigma3=math.sqrt(self.p) * math.tanh(S3),
        )

    def linear_part(self, w: Tensor, client: int, noise: Tensor, outer_noise: Tensor) -> Tensor:
        """The part of a step's direction that is linear in the noise, whose mean is 0; one row a step."""
        y = self.inner_mean(w)
        r, slope, bend = y - self.t, self.outer_slope(y), self._outer_bend(y)
        sway = (torch.tanh(r - S3) - torch.tanh(r + S3)) / 2  # what zeta adds to the slope
        by = torch.stack([S1 * (slope + bend * y), S2 * bend * self.v, sway])
        each = self.pull(y, by)[:, client]
        return torch.cat([noise, outer_noise], dim=-1) @ each

    def bias_limit(self, w: Tensor) -> Tensor:
        """b (E u - grad F(w)) for large b: half the second derivatives of the direction in the batch's mean noise."""
        y = self.inner_mean(w)
        bend = self._outer_bend(y)
        twist = sum(-2 * torch.tanh(r) / torch.cosh(r) ** 2 for r in (y - self.t - S3, y - self.t + S3)) / 2
        second = S1**2 * (2 * bend * y + twist * y**2) + S2**2 * twist * self.v**2
        return self.pull(y, second).mean(dim=-2) / 2

    def _outer_bend(self, y: Tensor) -> Tensor:
        """The derivative of ``outer_slope``."""
        r = y - self.t
        return (torch.cosh(r - S3) ** -2 + torch.cosh(r + S3) ** -2) / 2


def log_cosh(x: Tensor) -> Tensor:
    """log cosh x, without overflow."""
    return torch.logaddexp(x, -x) - math.log(2)
