"""A warning for weights that jump from client to client instead of settling."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from comfedl.algorithms.context import Participation

ROUNDS = 20
LIMIT = 0.25


class Turnover:
    """The share of the weight that changes hands from a round to the next, over the last rounds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=ROUNDS)
        self._clients: Sequence[int] = ()
        self._weights: Tensor | None = None
        self._warned = False

    @property
    def mean(self) -> float:
        """The mean over the last rounds; 0 if there are fewer than ``ROUNDS``."""
        return sum(self._last) / ROUNDS if len(self._last) == ROUNDS else 0.0

    def add(self, participation: Participation) -> None:
        """Compare a round's weights with the last ones, if the same clients took part."""
        clients, weights = list(participation.clients), participation.weights
        if self._weights is not None and clients == self._clients:
            self._last.append(float((weights - self._weights).abs().sum()) / 2)
        else:
            self._last.clear()
        self._clients, self._weights = clients, weights.detach().to(torch.float64)
        if self.mean > LIMIT and not self._warned:
            self._warned = True
            warnings.warn(
                f"The weights jump from client to client: over the last {ROUNDS} rounds, {self.mean:.0%} of the weight "
                "moved to other clients in each round. The worst client may be served less well than by averaging; use "
                "a larger gamma or a smaller lr, or, if this is another method, robust.",
                stacklevel=2,
            )
