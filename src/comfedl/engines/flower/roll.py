"""Who is there: which client each node is, asked once of every node that is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from comfedl.engines.flower import wire
from comfedl.engines.flower.exchange import exchange
from comfedl.errors import ConfigError

logger = logging.getLogger("comfedl")

WHO = 120.0  # seconds at most that a node has to say who it is: all others wait for it
LOOK = 2.0  # seconds between two looks for sites that are still to come


class Roll:
    """The sites of a run in the order of their names, and which node each of them is now.

    Args:
        expected: how many sites there must be, or their names; None takes those that are there.
        patience: how many seconds to wait for them at the start.
        deadline: how many seconds a node has to say who it is.
    """

    def __init__(self, grid: Grid, expected: int | Sequence[str] | None, patience: float, deadline: float) -> None:
        self._grid, self._deadline = grid, min(deadline, WHO)
        self._known: dict[int, str | None] = {}  # what each node has said; None is one that is refused
        self._samples: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._complete = False
        # Whom there may be: None is anybody, until the run has begun.
        self._allowed = set(expected) if isinstance(expected, Sequence) else None
        self._await(expected, patience)
        self._complete, self._allowed = True, {*self._samples}
        self.names: Sequence[str] = sorted(self._samples)
        self.sizes: NDArray[np.int64] = np.array([self._samples[name] for name in self.names], dtype=np.int64)
        self.shape = self._shape()

    def nodes(self) -> dict[str, int]:
        """The node of every site that is connected; nodes that are new are asked who they are."""
        return self._call(set(self._grid.get_node_ids()))

    def _await(self, expected: int | Sequence[str] | None, patience: float) -> None:
        count = 1 if expected is None else expected if isinstance(expected, int) else len(expected)
        until, told = time.monotonic() + patience, -1
        while True:
            here = self._call(set(self._grid.get_node_ids()))
            if len(here) >= count:
                break
            if time.monotonic() >= until:
                raise ConfigError(
                    f"Only {len(here)} of {count} sites are there after {patience:g} seconds "
                    f"({', '.join(sorted(here)) or 'none'}); start the other SuperNodes, or give flower.patience more."
                )
            if told != len(here):
                logger.info("%d of %d sites are there.", len(here), count)
                told = len(here)
            time.sleep(LOOK)
        if isinstance(expected, int) and len(here) > expected:
            raise ConfigError(f"{len(here)} sites are there, but flower.sites is {expected}; see who they are.")

    def _call(self, online: set[int]) -> dict[str, int]:
        fresh = [node for node in online if node not in self._known]
        body = wire.content({"question": "who"})
        found = exchange(self._grid, dict.fromkeys(fresh, body), "query.who", "who", self._deadline)
        for node in sorted(fresh):
            answer = found[node]
            if isinstance(answer, str) or "error" in answer[0]:
                said = answer if isinstance(answer, str) else str(answer[0]["error"])
                logger.warning("Node %d does not say which client it is: %s.", node, said)
                continue
            self._enter(node, answer[0], online)
        return {name: node for node, name in self._known.items() if name is not None and node in online}

    def _enter(self, node: int, said: Mapping[str, Any], online: set[int]) -> None:
        """Write down what a node says of itself, unless another one says it too."""
        try:
            name, samples = str(said["name"]), int(said["samples"])
            shape = tuple(int(size) for size in said["shape"])
        except (KeyError, TypeError, ValueError):
            logger.warning("Node %d does not say which client it is: its answer cannot be read.", node)
            return
        twin = next((other for other, known in self._known.items() if known == name and other in online), None)
        if twin is not None and not self._complete:
            raise ConfigError(
                f"Two sites say that they are {name!r}; give each SuperNode a name of its own, and start again."
            )
        if twin is not None or (self._allowed is not None and name not in self._allowed):
            why = "another node is that site" if twin is not None else "it is not among the sites of this run"
            logger.warning("Node %d says that it is site %r, and is refused: %s.", node, name, why)
            if twin is None:
                self._known[node] = None  # one whose twin may go is asked again
            return
        if self._samples.setdefault(name, samples) != samples:
            logger.warning("Site %r had %d samples and now has %d.", name, self._samples[name], samples)
        self._known[node] = name
        self._shapes.setdefault(name, shape)

    def _shape(self) -> tuple[int, ...]:
        first = self.names[0]
        for name in self.names:
            if self._shapes[name] != self._shapes[first]:
                raise ConfigError(
                    f"Site {first!r} has samples of shape {self._shapes[first]} and site {name!r} of "
                    f"{self._shapes[name]}; all sites must share one shape."
                )
        return self._shapes[first]
