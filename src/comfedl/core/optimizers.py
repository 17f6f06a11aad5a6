"""Optimisers: how a client moves along a gradient, and how the server moves along the aggregated update.

An optimiser is a frozen value with two pure functions. Its state (momentum and the like) is a tree that is handed in
and returned, so that it can be part of the state of a client or of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from comfedl.core.learner import Params
from comfedl.utils import tree
from comfedl.utils.tree import Tree


class Optimizer(Protocol):
    """What the local loop asks of an optimiser."""

    def init(self, params: Params) -> Tree:
        """The state before the first step."""

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        """The parameters and the state after one step; ``in_place`` says that the parameters may be overwritten."""


@dataclass(frozen=True)
class SGD:
    """``w - lr * gradient``."""

    def init(self, params: Params) -> Tree:
        return None

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        return (tree.step_in_place if in_place else tree.step)(params, lr, gradient), state
