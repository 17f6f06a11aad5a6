"""Optimisers, for a client's gradients and for the server's aggregated updates.

An optimiser is a frozen dataclass with two pure functions. Its state (momentum and the like) is passed in and returned,
so that it can be part of a client's or the server's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from comfedl.core.learner import Params
from comfedl.utils import tree
from comfedl.utils.tree import Tree


class Optimizer(Protocol):
    """The interface that the local training loop uses."""

    def init(self, params: Params) -> Tree:
        """The state before the first step."""

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        """The parameters and the state after one step; with ``in_place`` the parameters may be overwritten."""


@dataclass(frozen=True)
class SGD:
    """``w - lr * gradient``."""

    def init(self, params: Params) -> Tree:
        return None

    def step(self, params: Params, gradient: Params, state: Tree, lr: float, in_place: bool) -> tuple[Params, Tree]:
        return (tree.step_in_place if in_place else tree.step)(params, lr, gradient), state
