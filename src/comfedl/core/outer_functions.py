"""Outer functions g: how the clients' losses are combined into one objective.

There are two kinds. A *separable* outer acts on one client's value alone: the client multiplies each local gradient by
the slope ``g'(f_i)``, as in Algorithm 1 of the paper. A *coupled* outer needs all clients' values: it is a maximum over
weights r on the simplex, and the server weights the clients' updates by the maximiser. These weights are computed at
the model the clients received and stay fixed for the round: with a fixed normaliser, weights that shrink with the loss
at every local step would slow training down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from comfedl.core.offset import Offset
from comfedl.core.simplex import (
    capped_weights,
    chi_square_weights,
    effective_weights,
    log_mean_exp,
    softmax_weights,
    top_weights,
)
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import LATER


class Outer(ABC):
    """An outer function; ``objective`` is the value to monitor."""

    name: ClassVar[str] = "own"
    """Its name in a config."""

    @property
    def curvature(self) -> float | None:
        """How fast the weights follow the losses: c where the weights' derivative is ``c (diag(r) - r r^T)`` or less.

        This is what the safe step needs. None where there is no such bound, or where clients hide what it depends on.
        """
        return None

    @abstractmethod
    def objective(self, values: Tensor) -> Tensor:
        """The objective's value, given each client's inner value."""

    def explain(self, loss: float, weight: float) -> str:
        """Advice for a run that diverged (NaN or infinity) at this loss and weight."""
        return "Use a smaller lr, or fewer local_steps."


class Separable(Outer):
    """An outer of one client's value, g(y)."""

    @abstractmethod
    def slope(self, y: Tensor) -> Tensor:
        """The slope g'(y), elementwise."""


class Coupled(Outer):
    """An outer of all clients' values, ``max over r of sum_i r_i y_i - penalty(r)``."""

    @abstractmethod
    def weights(self, values: Tensor) -> Tensor:
        """The maximising weights r, one per client, with sum 1."""


@dataclass(frozen=True)
class Identity(Separable):
    """g(y) = y: every client counts the same, as in federated averaging with uniform weights."""

    name: ClassVar[str] = "identity"

    @property
    def curvature(self) -> float:
        return 0.0

    def slope(self, y: Tensor) -> Tensor:
        return torch.ones_like(y)

    def objective(self, values: Tensor) -> Tensor:
        return values.mean()


@dataclass(frozen=True)
class Exp(Separable):
    """g(y) = exp(y / gamma), eq. (6) to the letter, with the slope exp(y / gamma) / gamma.

    Kept for fidelity. At gamma = 0.2 and the initial loss ln 10 of a ten-class problem the slope is 5e5, so at ordinary
    learning rates the literal method diverges in its first round, and the run stops with an error. ``KL`` has the same
    minimisers and is stable. The objective is reported as eq. (5), gamma * log-mean-exp, which is finite and increases
    with eq. (6).
    """

    name: ClassVar[str] = "exp"

    gamma: float

    def __post_init__(self) -> None:
        checks.positive("gamma", self.gamma, "it says how far the weights may move from uniform")

    def slope(self, y: Tensor) -> Tensor:
        return torch.exp(y / self.gamma) / self.gamma

    def objective(self, values: Tensor) -> Tensor:
        return log_mean_exp(values, self.gamma)

    def explain(self, loss: float, weight: float) -> str:
        return (
            f"The literal outer Exp multiplies each gradient by exp(loss/gamma)/gamma, which is {weight:.3g} at "
            f"gamma = {self.gamma:g} and loss = {loss:.3g}. Use outer = KL(gamma={self.gamma:g}), which has the same "
            f"minimisers and is stable, or keep Exp with a larger gamma (1 or more) or a much smaller lr."
        )


@dataclass(frozen=True)
class KL(Coupled):
    """gamma * log(mean_i exp(y_i / gamma)), eq. (5): the worst mixture of clients under a KL penalty.

    The weights are softmax(y / gamma). A small gamma follows the worst client, a large one is plain averaging. ``cap``
    limits a client's weight to cap times uniform, so that a client that reports a false loss cannot take over the
    model; cap = 1 is uniform.

    ``effective_clients`` = k replaces gamma: every round uses the gamma at which the participants' weights are worth k
    equal clients, ``1 / sum_i r_i^2 = k``. k = 1 follows the worst client alone, k = the number of participants is
    plain averaging. The spread of the weights then does not shrink with the losses, and no client weighs more than
    ``1 / sqrt(k)``. As gamma changes with the losses there is no fixed objective; the weighted mean loss is reported.

    ``memory``: by default each round's weights follow the losses on all training data, which costs a pass over them.
    With memory = 0.98 they follow an estimate from the batches that training sees anyway: of the old estimate, moved
    along with the model, 98 % stay. It is for full participation; else clients measure their losses as by default.

    ``on = "outer"``: the weights follow each client's loss on its outer data, which local training does not use (with
    ``Adapt`` and ``Composition`` the value is judged on outer data in any case). These are the data's own outer split,
    or else a share that ``fit`` sets aside (``outer_share``); never validation or test data. The loss is measured in
    every round, by a pass over this small split, so ``memory`` does not apply.

    ``offset``: added to the clients' losses before the weights are computed, such as ``offset.Generalisation(1.0)`` or
    ``offset.Excess()``; the objective is then gamma * log(mean_i exp((y_i + o_i) / gamma)). With ``effective_clients``
    the weights and the reported mean are those of y_i + o_i too.
    """

    name: ClassVar[str] = "kl"

    gamma: float | None = None
    cap: float | None = None
    effective_clients: float | None = None
    memory: float | None = None
    on: str = field(default="train", metadata=LATER)
    offset: Offset | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            checks.between("memory", self.memory, 0, 1)
        checks.one_of("on", self.on, ("train", "outer"))
        if self.offset is not None and not isinstance(self.offset, Offset):
            raise ConfigError(
                f"offset is {self.offset!r}, but it must be None or like cf.offset.Generalisation(1.0) or "
                "cf.offset.Excess()."
            )
        if (self.gamma is None) == (self.effective_clients is None):
            given = "neither is" if self.gamma is None else "both are"
            raise ConfigError(f"KL needs either gamma or effective_clients, but {given} given; give one of them.")
        if self.gamma is not None:
            checks.positive("gamma", self.gamma, "small follows the worst client, large is plain averaging")
        if self.effective_clients is not None:
            checks.not_below("effective_clients", self.effective_clients, 1)
        if self.cap is not None:
            checks.not_below("cap", self.cap, 1)
            if self.effective_clients is not None:
                raise ConfigError(
                    f"effective_clients cannot be combined with cap = {self.cap:g}: it already limits a client's "
                    f"weight to 1 / sqrt({self.effective_clients:g}); leave cap out, or give gamma."
                )

    @property
    def curvature(self) -> float | None:
        return None if self.gamma is None else 1 / self.gamma  # a cap takes clients out of it, and lowers it

    def weights(self, values: Tensor) -> Tensor:
        if self.effective_clients is not None:
            return effective_weights(values, self.effective_clients)
        assert self.gamma is not None
        if self.cap is None:
            return softmax_weights(values, self.gamma)
        return capped_weights(values, self.gamma, self.cap)

    def objective(self, values: Tensor) -> Tensor:
        r = self.weights(values)
        if self.gamma is None:
            return (r * values).sum()
        if self.cap is None or bool((r < self.cap / len(r) * (1 - 1e-9)).all()):
            return log_mean_exp(values, self.gamma)  # the cap does not bind
        return (r * values).sum() - self.gamma * torch.xlogy(r, len(values) * r).sum()


@dataclass(frozen=True)
class Tilt(Coupled):
    """(1 / t) log(mean_i exp(t y_i)), TERM's tilted mean: t > 0 is KL(1 / t), t < 0 downweights outliers."""

    name: ClassVar[str] = "tilt"

    t: float

    def __post_init__(self) -> None:
        checks.not_zero("t", self.t, "above 0 favours the worst client, below 0 downweights it")

    @property
    def curvature(self) -> float:
        return max(0.0, self.t)  # with t < 0 the weights flee from large losses, and the term is negative

    def weights(self, values: Tensor) -> Tensor:
        return softmax_weights(values, 1 / self.t)

    def objective(self, values: Tensor) -> Tensor:
        return log_mean_exp(values, 1 / self.t)


@dataclass(frozen=True)
class CVaR(Coupled):
    """The mean over the worst fraction 1 - level of the clients: level 0 is the mean, level 0.9 the worst tenth."""

    name: ClassVar[str] = "cvar"

    level: float

    def __post_init__(self) -> None:
        checks.between("level", self.level, 0, 1)

    def weights(self, values: Tensor) -> Tensor:
        return top_weights(values, self.level)

    def objective(self, values: Tensor) -> Tensor:
        return (self.weights(values) * values).sum()


@dataclass(frozen=True)
class ChiSquare(Coupled):
    """The worst mixture r with (1 / 2n) sum_i (n r_i - 1)^2 <= rho: rho 0 is the mean, (n - 1) / 2 the worst client."""

    name: ClassVar[str] = "chi-square"

    rho: float

    def __post_init__(self) -> None:
        checks.not_below("rho", self.rho, 0)

    def weights(self, values: Tensor) -> Tensor:
        return chi_square_weights(values, self.rho)

    def objective(self, values: Tensor) -> Tensor:
        return (self.weights(values) * values).sum()


@dataclass(frozen=True)
class Power(Separable):
    """g(y) = y^(q + 1) / (q + 1), q-FFL's outer: q = 0 is the mean, a large q follows the worst client."""

    name: ClassVar[str] = "power"

    q: float

    def __post_init__(self) -> None:
        checks.not_below("q", self.q, 0)

    def slope(self, y: Tensor) -> Tensor:
        return y**self.q

    def objective(self, values: Tensor) -> Tensor:
        return (values ** (self.q + 1)).mean() / (self.q + 1)

    def explain(self, loss: float, weight: float) -> str:
        if loss < 0:
            return f"Power(q={self.q:g}) needs a loss that is never negative, but this one is {loss:.3g}."
        return f"Power multiplies each gradient by loss^q; use a smaller q than {self.q:g}, or a smaller lr."


@dataclass(frozen=True)
class Custom(Separable):
    """A user-defined outer function of one client's value: the function and its derivative, both elementwise."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]

    def slope(self, y: Tensor) -> Tensor:
        return self.derivative(y)

    def objective(self, values: Tensor) -> Tensor:
        return self.value(values).mean()


OUTERS: dict[str, type[Outer]] = {outer.name: outer for outer in (Identity, Exp, KL, Tilt, CVaR, ChiSquare, Power)}
"""The outer functions, by their names in a config."""
