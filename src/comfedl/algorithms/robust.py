"""Robust: the method we recommend for a model that serves the worst-off client, too.

The objective is the paper's eq. (5), as in ``ComFedL(outer=KL(gamma))``. What differs is the path to its optimum. The
weights look ahead (``core/proximal.py``): they are those of the losses that clients will have after the step, momentum
included. And they follow moving averages of the losses on the training batches, so that a round costs about what
federated averaging's does. What is reported is a moving average of the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from comfedl.algorithms.comfedl import PARAMS, Compositional, Updates, scaled, squared_norm
from comfedl.core.learner import Model, Params
from comfedl.core.objectives import Adapt
from comfedl.core.offset import Offset
from comfedl.core.optim import SGD, Adagrad, Adam, Yogi
from comfedl.core.outer_functions import KL, Coupled, Outer
from comfedl.core.privacy import Sums
from comfedl.core.protocol import Replies
from comfedl.core.proximal import proximal_length, proximal_weights
from comfedl.utils.errors import ConfigError


@dataclass(frozen=True)
class Robust(Compositional):
    """Minimise gamma * log(mean_i exp(f_i(w) / gamma)), the clients' losses weighted towards the worst.

    Args:
        gamma: how far the weights may move from uniform, in units of the loss: small follows the worst client, large is
            plain averaging.
        inner: None for the local loss, ``Adapt(lr)`` for the loss after adapting to the client (meta-learning).
        cap: the largest weight of a client, as a multiple of uniform; None is no limit.
        memory: how much of a client's estimated loss stays from round to round; None measures all losses in every
            round, by a pass over the training data (so it is, in any case, if not all clients take part in a round).
        on: "train", or "outer" for weights that follow the losses on outer data, measured in every round (see ``KL``);
            how the next step changes them is still predicted from the updates, and so from train data.
        offset: added to the losses before the weights are computed, such as ``offset.Excess()`` (see ``KL``).
        server_optimizer: by default momentum 0.9; None leaves it out.
        server_average: by default 0.9, so the reported model is about the mean of the last ten rounds'.
    """

    gamma: float = 0.1
    inner: Adapt | None = None
    cap: float | None = None
    memory: float | None = 0.98
    on: str = "train"
    offset: Offset | None = None
    server_optimizer: SGD | Adam | Yogi | Adagrad | None = field(default=SGD(momentum=0.9), kw_only=True)
    server_average: float | None = field(default=0.9, kw_only=True)

    name: ClassVar[str] = "robust"
    paper: ClassVar[str] = "Huang and Li, eq. (5), by proximal steps with momentum"
    goal: ClassVar[str] = "min_w gamma log (1/n) sum_i exp(f_i(w) / gamma), eq. (5)"
    sends: ClassVar[str] = "down d; up d + 1 loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner is not None and not isinstance(self.inner, Adapt):
            raise ConfigError(f"inner is {self.inner!r}, but it must be None or like Adapt(lr=0.05).")

    @property
    def looks_back(self) -> bool:
        return True

    def foreseen(self, losses: Tensor, updates: Updates | None) -> Tensor:
        # The look-ahead in ``weigh`` joins the clients' updates before there is any noise; momentum's part does not.
        assert updates is not None
        return losses + self._momentum * updates.change

    @property
    def _momentum(self) -> float:
        return self.server_optimizer.momentum if isinstance(self.server_optimizer, SGD) else 0.0

    def weigh(
        self, model: Model, replies: Replies, losses: Tensor, updates: Updates | None
    ) -> tuple[Tensor, Callable[[Params], float] | None]:
        assert updates is not None and isinstance(self.g, Coupled)
        g, coming = self.g, self.foreseen(losses, updates).numpy()  # the losses after the momentum's part of the step
        gram = None if updates.gram is None else updates.gram.numpy()
        # Updates so long that their squares overflow predict nothing.
        if not math.isfinite(float(coming.sum()) + (0.0 if gram is None else float(gram.sum()))):
            return g.weights(losses), None
        if gram is not None:
            return torch.from_numpy(proximal_weights(g, coming, gram)), None
        # With many clients their inner products are too many; keep the direction and choose the length.
        weights = g.weights(torch.from_numpy(coming))

        def shrink(update: Params) -> float:
            products = scaled(replies.products(PARAMS, model["params"], update), updates.scale) / self.reach
            square = squared_norm(update) / self.reach
            if not products.isfinite().all() or not math.isfinite(square):
                return 1.0  # as above
            return proximal_length(g, coming, products.numpy(), square)

        return weights, shrink

    def check_privacy(self, model: Model, sampled: bool) -> Sums:
        return super().check_privacy(model, sampled)  # ``foreseen`` takes each client's own reply alone

    def for_sums(self) -> Self:
        """KL's weights of the losses that each client measures in every round; momentum and average stay.

        Memory and look-ahead need each client's loss and update.
        """
        return replace(self, memory=None)

    @property
    def adapt(self) -> Adapt | None:
        return self.inner

    @cached_property
    def g(self) -> Outer:
        return self.capped(KL(self.gamma, cap=self.cap, memory=self.memory, on=self.on, offset=self.offset))
