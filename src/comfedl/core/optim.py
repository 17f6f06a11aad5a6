"""Optimisers, for the clients' gradients and for the server's aggregated updates; the public module ``cf.optim``.

An optimiser is a frozen dataclass. Its state (momentum and the like) is passed in and returned, so that it can be part
of a client's or the server's state. At a client, ``step`` descends along a gradient with the method's learning rate; at
the server, ``update`` follows the aggregated update D of a round with the optimiser's own ``lr``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from comfedl.core.learner import Params
from comfedl.utils import checks, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree


class ClientOptimizer(Protocol):
    """The interface that the local training loop uses."""

    name: ClassVar[str]

    @property
    def lr(self) -> float | None: ...

    @property
    def keep_state(self) -> bool:
        """Whether a client keeps the state from one of its rounds to the next."""

    @property
    def plain_decay(self) -> float | None:
        """The weight decay d of a step without memory, ``(1 - lr * d) * w - lr * gradient``; None for other steps."""

    def reach(self, steps: int) -> float | None:
        """How far this many steps go along a constant gradient, per unit of lr; None if that depends on its length."""

    def init(self, params: Params) -> Tree:
        """The state before the first step; its leaves have the shape of a parameter, or none for a counter."""

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        """The parameters and the state after one step; a state of None is the one before the first.

        The state is overwritten, and with ``in_place`` so are the parameters.
        """


class ServerOptimizer(Protocol):
    """The interface that the server uses."""

    name: ClassVar[str]

    def init_server(self, params: Params) -> Tree:
        """The state before the first round."""

    def update(self, params: Params, change: Params, state: Tree) -> tuple[Params, Tree]:
        """The parameters and the state after a round whose aggregated update is ``change``."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as ``torch.optim.SGD``: ``v <- momentum * v + g``, ``w <- w - lr * v``.

    At the server, g is minus the aggregated update; with momentum this is FedAvgM (Hsu et al. 2019).

    Args:
        lr: the server's step size, 1 for plain averaging. At a client it stays 1: the method's ``lr`` is the step size.
        momentum: how much of v remains, from 0 to below 1.
        nesterov: step along ``g + momentum * v`` instead of v.
        weight_decay: adds ``weight_decay * w`` to g.
        decoupled: instead shrink the weights by ``1 - lr * weight_decay``, apart from the momentum, as AdamW does.
        keep_state: a client keeps v from one of its rounds to the next; by default it starts from 0 in every round.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False
    keep_state: bool = False

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        checks.positive("lr", self.lr)
        checks.between("momentum", self.momentum, 0, 1)
        checks.not_below("weight_decay", self.weight_decay, 0)
        _check_flags(self, "nesterov", "decoupled", "keep_state")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov is true and momentum is 0; give a momentum above 0, such as 0.9.")

    @property
    def plain_decay(self) -> float | None:
        return None if self.momentum else self.weight_decay

    def init(self, params: Params) -> Tree:
        return {"momentum": tree.map(torch.zeros_like, params)} if self.momentum else {}

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        if self.plain_decay == 0:
            return (tree.step_in_place if in_place else tree.step)(params, lr, gradient), state or {}
        decay = self.weight_decay
        if state is None and not decay:  # v is the gradient: nothing to fill with zeros, and one pass less
            ahead = 1 + self.momentum if self.nesterov else 1.0
            return (tree.step_in_place if in_place else tree.step)(params, lr * ahead, gradient), {
                "momentum": tree.map(torch.clone, gradient)
            }
        state = self.init(params) if state is None else state
        params, gradient, state = _own(params, gradient, state, in_place)
        if self.decoupled and decay:
            torch._foreach_mul_(tree.leaves(params), 1 - lr * decay)
            decay = 0.0
        torch._fused_sgd_(
            tree.leaves(params),
            tree.leaves(gradient),
            tree.leaves(state["momentum"]) if self.momentum else [],
            weight_decay=decay,
            momentum=self.momentum,
            lr=float(lr),
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,
        )
        return params, state

    def reach(self, steps: int) -> float:
        mu = self.momentum
        if self.keep_state:
            return steps / (1 - mu)
        return sum((1 - mu ** (k + self.nesterov)) / (1 - mu) for k in range(1, steps + 1))

    def init_server(self, params: Params) -> Tree:
        return self.init(params)

    def update(self, params: Params, change: Params, state: Tree) -> tuple[Params, Tree]:
        return self.step(params, tree.map(torch.neg, change), tree.map(torch.clone, state), self.lr, in_place=False)


@dataclass(frozen=True)
class Adam:
    """Adam. At a client as ``torch.optim.Adam``, at the server as in FedOpt (Reddi et al. 2021).

    The two differ, and so do their defaults. At the server there is no bias correction, v starts at ``eps ** 2``, and
    ``m <- beta1 * m + (1 - beta1) * D``, ``v <- beta2 * v + (1 - beta2) * D ** 2``,
    ``w <- w + lr * m / (sqrt(v) + eps)``.

    Args:
        lr: the server's step size, by default 0.01. At a client it stays 1: the method's ``lr`` is the step size.
        beta1: the decay of the mean m.
        beta2: the decay of the mean square v; by default 0.999 at a client and 0.99 at the server.
        eps: added to the root of v; by default 1e-8 at a client and 1e-3 at the server (the paper's tau).
        weight_decay: adds ``weight_decay * w`` to the gradient; clients only.
        bias_correction: correct m and v for their start, which a client always does; v then starts at 0.
        keep_state: a client keeps m, v and the count of steps from one of its rounds to the next; by default it starts
            anew in every round.
    """

    lr: float | None = None
    beta1: float = 0.9
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float = 0.0
    bias_correction: bool = False
    keep_state: bool = False

    name: ClassVar[str] = "adam"
    plain_decay: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        _check_moments(self.lr, self.beta1, self.beta2, self.eps)
        checks.not_below("weight_decay", self.weight_decay, 0)
        _check_flags(self, "bias_correction", "keep_state")

    def reach(self, steps: int) -> float | None:
        return None

    def init(self, params: Params) -> Tree:
        zeros = tree.map(torch.zeros_like, params)
        step = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
        return {"mean": zeros, "square": tree.map(torch.zeros_like, params), "step": step}

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        if state is None:
            return self._first(params, gradient, lr)
        params, gradient, state = _own(params, gradient, state, in_place)
        state["step"] = state["step"] + 1
        parts = [tree.leaves(part) for part in (params, gradient, state["mean"], state["square"])]
        steps = state["step"].reshape(-1).tolist()  # one number, or one per client of a stack
        if min(steps) == max(steps):
            steps = steps[:1]
        else:  # clients that have taken part in different numbers of rounds: each has a bias correction of its own
            parts = [[row for leaf in part for row in leaf.unbind()] for part in parts]
        device = parts[0][0].device
        counts = [torch.full((), step, dtype=torch.float32, device=device) for step in steps]
        counts *= len(parts[0]) // len(counts)
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            parts[0],
            parts[1],
            parts[2],
            parts[3],
            [],
            counts,
            lr=float(lr),
            beta1=self.beta1,
            beta2=self._beta2,
            weight_decay=self.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )
        return params, state

    def _first(self, params: Params, gradient: Params, lr: float) -> tuple[Params, Tree]:
        """The first step: with the bias corrected, m is the gradient and v its square, without zeros to begin with."""
        decay = self.weight_decay
        if decay and not self.decoupled:
            gradient = {name: torch.add(g, params[name], alpha=decay) for name, g in gradient.items()}
        elif decay:
            params = {name: w * (1 - lr * decay) for name, w in params.items()}
        moved = {
            name: torch.addcdiv(w, gradient[name], gradient[name].abs().add_(self._eps), value=-lr)
            for name, w in params.items()
        }
        square = {name: (g * g).mul_(1 - self._beta2) for name, g in gradient.items()}
        mean = {name: g * (1 - self.beta1) for name, g in gradient.items()}
        step = torch.ones((), dtype=torch.int64, device=next(iter(params.values())).device)
        return moved, {"mean": mean, "square": square, "step": step}

    @property
    def _beta2(self) -> float:
        """At a client."""
        return 0.999 if self.beta2 is None else self.beta2

    @property
    def _eps(self) -> float:
        """At a client."""
        return 1e-8 if self.eps is None else self.eps

    @property
    def decoupled(self) -> bool:
        return False

    def init_server(self, params: Params) -> Tree:
        tau = 1e-3 if self.eps is None else self.eps
        return {
            **_moments(params, 0.0 if self.bias_correction else tau),
            "step": torch.zeros((), dtype=torch.int64),
        }

    def update(self, params: Params, change: Params, state: Tree) -> tuple[Params, Tree]:
        beta2, step = 0.99 if self.beta2 is None else self.beta2, int(state["step"]) + 1
        square = tree.map(lambda v, d: beta2 * v + (1 - beta2) * d * d, state["square"], change)
        moved, mean = _adaptive(self, params, change, state["mean"], square, beta2, step if self.bias_correction else 0)
        return moved, {"mean": mean, "square": square, "step": torch.tensor(step)}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay at the clients, as ``torch.optim.AdamW``.

    The weights shrink by ``1 - lr * weight_decay``, apart from the gradient's moments. For the arguments see ``Adam``.
    """

    weight_decay: float = 0.01

    name: ClassVar[str] = "adamw"

    @property
    def decoupled(self) -> bool:
        return True


@dataclass(frozen=True)
class Yogi:
    """Yogi at the server (Reddi et al. 2021): Adam whose v changes by at most ``(1 - beta2) * D ** 2`` in a round.

    Args:
        lr: the step size.
        beta1, beta2: the decay of the mean and of the mean square.
        eps: added to the root of v, which starts at ``eps ** 2``.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    name: ClassVar[str] = "yogi"

    def __post_init__(self) -> None:
        _check_moments(self.lr, self.beta1, self.beta2, self.eps)

    def init_server(self, params: Params) -> Tree:
        return _moments(params, self.eps)

    def update(self, params: Params, change: Params, state: Tree) -> tuple[Params, Tree]:
        square = tree.map(lambda v, d: v - (1 - self.beta2) * d * d * torch.sign(v - d * d), state["square"], change)
        moved, mean = _adaptive(self, params, change, state["mean"], square)
        return moved, {"mean": mean, "square": square}


@dataclass(frozen=True)
class Adagrad:
    """Adagrad at the server (Reddi et al. 2021): v is the sum of all ``D ** 2``.

    Args:
        lr: the step size.
        beta1: the decay of the mean of the updates.
        eps: added to the root of v, which starts at ``eps ** 2``.
    """

    lr: float = 0.01
    beta1: float = 0.9
    eps: float = 1e-3

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        _check_moments(self.lr, self.beta1, None, self.eps)

    def init_server(self, params: Params) -> Tree:
        return _moments(params, self.eps)

    def update(self, params: Params, change: Params, state: Tree) -> tuple[Params, Tree]:
        square = tree.map(lambda v, d: v + d * d, state["square"], change)
        moved, mean = _adaptive(self, params, change, state["mean"], square)
        return moved, {"mean": mean, "square": square}


CLIENT_OPTIMIZERS: dict[str, type] = {kind.name: kind for kind in (SGD, Adam, AdamW)}
SERVER_OPTIMIZERS: dict[str, type] = {kind.name: kind for kind in (SGD, Adam, Yogi, Adagrad)}
OPTIMIZERS = CLIENT_OPTIMIZERS | SERVER_OPTIMIZERS


def check_client(optimizer: object) -> None:
    """Check that clients can use this optimiser."""
    _check_kind("client_optimizer", optimizer, CLIENT_OPTIMIZERS, "SGD(momentum=0.9)")
    if (lr := getattr(optimizer, "lr", None)) not in (None, 1):
        raise ConfigError(
            f"client_optimizer has lr = {lr!r}, but a client's step size is the method's lr times its schedule; set "
            "the method's lr instead, and leave the optimiser's at 1."
        )
    if getattr(optimizer, "bias_correction", False):
        raise ConfigError("bias_correction is for a server optimiser; clients always correct, so leave it out.")


def check_server(optimizer: object) -> None:
    """Check that the server can use this optimiser."""
    _check_kind("server_optimizer", optimizer, SERVER_OPTIMIZERS, "SGD(momentum=0.9)")
    if getattr(optimizer, "keep_state", False):
        raise ConfigError("keep_state is for a client optimiser; the server always keeps its state, so leave it out.")
    if isinstance(optimizer, Adam) and optimizer.weight_decay:
        raise ConfigError(
            f"server_optimizer has weight_decay = {optimizer.weight_decay!r}, which Adam has only at clients; give it "
            "to client_optimizer."
        )


def _check_kind(key: str, optimizer: object, allowed: dict[str, type], example: str) -> None:
    if type(optimizer) not in allowed.values():
        given = getattr(optimizer, "name", None) if type(optimizer) in OPTIMIZERS.values() else None
        names = ", ".join(kind.__name__ for kind in allowed.values())
        raise ConfigError(
            f"{key} is {given or repr(optimizer)}, but it must be None or one of {names} of comfedl.optim, such as "
            f"{example}."
        )


def _check_flags(optimizer: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(optimizer, name), bool):
            raise ConfigError(f"{name} is {getattr(optimizer, name)!r}, but it must be true or false.")


def _check_moments(lr: float | None, beta1: float, beta2: float | None, eps: float | None) -> None:
    if lr is not None:
        checks.positive("lr", lr)
    checks.between("beta1", beta1, 0, 1)
    if beta2 is not None:
        checks.between("beta2", beta2, 0, 1)
    if eps is not None:
        checks.positive("eps", eps)


def _moments(params: Params, eps: float) -> dict[str, Params]:
    """The server's state before the first round: m = 0, and v = eps ** 2."""
    return {
        "mean": tree.map(torch.zeros_like, params),
        "square": tree.map(lambda leaf: torch.full_like(leaf, eps**2), params),
    }


def _adaptive(
    optimizer: Adam | Yogi | Adagrad,
    params: Params,
    change: Params,
    mean: Params,
    square: Params,
    beta2: float = 0.0,
    corrected_step: int = 0,
) -> tuple[Params, Params]:
    """``w + lr * m / (sqrt(v) + eps)``, and the new m; with a step above 0, m and v are corrected for their start."""
    beta1, lr = optimizer.beta1, 0.01 if optimizer.lr is None else optimizer.lr
    eps = 1e-3 if optimizer.eps is None else optimizer.eps
    mean = tree.map(lambda m, d: beta1 * m + (1 - beta1) * d, mean, change)
    first = 1 - beta1**corrected_step if corrected_step else 1.0
    second = 1 - beta2**corrected_step if corrected_step else 1.0

    def moved(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return w + lr * (m / first) / ((v / second).sqrt() + eps)

    return tree.map(moved, params, mean, square), mean


def _own(params: Params, gradient: Params, state: Tree, in_place: bool) -> tuple[Params, Params, dict[str, Tree]]:
    """Parameters that may be overwritten, and gradient and state in their memory layout, as fused kernels need them."""
    if not in_place:
        params = {name: leaf.clone() for name, leaf in params.items()}

    def alike(mate: Tensor, leaf: Tensor) -> Tensor:
        return leaf if leaf.stride() == mate.stride() else torch.empty_like(mate).copy_(leaf)

    kept = {name: part if isinstance(part, Tensor) else tree.map(alike, params, part) for name, part in state.items()}
    return params, tree.map(alike, params, gradient), kept
