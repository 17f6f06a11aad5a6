"""Who is there: which client each node is, asked once of every node that is new."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from comfedl.flower import serialization
from comfedl.flower.messaging import exchange
from comfedl.utils.errors import ConfigError

logger = logging.getLogger("comfedl")

WHO = 120.0  # seconds at most that a node has to say who it is: all others wait for it
AGAIN = 600.0  # seconds until a node that has let all others wait is asked once more
LOOK = 2.0  # seconds between two looks for sites that are still to come


@dataclass(frozen=True)
class Known:
    """What a run that goes on knows of its sites: how many samples each has, and a sample's shape."""

    samples: Mapping[str, int]
    shape: tuple[int, ...]


class Roll:
    """The sites of a run in the order of their names, and which node each of them is now.

    Args:
        expected: how many sites there must be, or their names; None takes those that are there.
        patience: how many seconds to wait for them at the start.
        deadline: how many seconds a node has to say who it is.
        known: the sites of the run that goes on; whoever of them is not there within the deadline comes later.
        quorum: the share of the known sites that must be there.
    """

    def __init__(
        self,
        grid: Grid,
        expected: int | Sequence[str] | None,
        patience: float,
        deadline: float,
        known: Known | None = None,
        quorum: float = 1.0,
    ) -> None:
        self._grid, self._deadline, self._before = grid, min(deadline, WHO), known
        self._known: dict[int, str | None] = {}  # what each node has said; None is one that is refused
        self._twins: dict[int, str] = {}  # nodes that have said another one's name
        self._not_before: dict[int, float] = {}  # when to ask a node again that has let all others wait
        self._samples: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._complete = False
        # Whom there may be: None is anybody, until the run has begun.
        names = expected if known is None else list(known.samples)
        self._allowed = set(names) if isinstance(names, Sequence) else None
        count = 1 if names is None else names if isinstance(names, int) else len(names)
        if known is None:
            here = self._await(count, count, patience, patience)
        else:
            here = self._await(count, math.ceil(max(1, quorum * count)), patience, min(deadline, patience))
        if isinstance(names, int) and len(here) > names:
            raise ConfigError(f"{len(here)} sites are there, but flower.sites is {names}; see who they are.")
        if known is not None:
            self._samples = dict(known.samples)
            self._shapes = {name: self._shapes.get(name, known.shape) for name in known.samples}
        self._complete, self._allowed = True, {*self._samples}
        self.names: Sequence[str] = sorted(self._samples)
        self.sizes: NDArray[np.int64] = np.array([self._samples[name] for name in self.names], dtype=np.int64)
        self.known = Known({name: self._samples[name] for name in self.names}, self._shape())

    def nodes(self) -> dict[str, int]:
        """The node of every site that is connected; nodes that are new are asked who they are."""
        return self._call(set(self._grid.get_node_ids()))

    def _await(self, count: int, enough: int, patience: float, soon: float) -> dict[str, int]:
        """Wait for ``count`` sites; after ``soon`` seconds ``enough`` of them will do."""
        start, told = time.monotonic(), -1
        while True:
            here = self._call(set(self._grid.get_node_ids()))
            passed = time.monotonic() - start
            if len(here) >= count or (enough < count and len(here) >= enough and passed >= soon):
                break
            if passed >= patience:
                raise ConfigError(
                    f"Only {len(here)} of {count} sites are there after {patience:g} seconds "
                    f"({', '.join(sorted(here)) or 'none'}); start the other SuperNodes, or give flower.patience more."
                )
            if told != len(here):
                logger.info("%d of %d sites are there.", len(here), count)
                told = len(here)
            time.sleep(min(LOOK, patience))
        if len(here) < count:
            logger.warning("The run goes on with %d of its %d sites: %s.", len(here), count, ", ".join(sorted(here)))
        return here

    def _call(self, online: set[int]) -> dict[str, int]:
        there = {name for node, name in self._known.items() if name is not None and node in online}
        now = time.monotonic()
        fresh = [
            node
            for node in online
            if node not in self._known and self._twins.get(node) not in there and self._not_before.get(node, 0) <= now
        ]
        body = serialization.content({"question": "who"})
        found = exchange(self._grid, dict.fromkeys(fresh, body), "query.who", "who", self._deadline)
        for node in sorted(fresh):
            answer = found[node]
            if isinstance(answer, str) or "error" in answer[0]:
                said = answer if isinstance(answer, str) else str(answer[0]["error"])
                logger.warning("Node %d does not say which client it is: %s.", node, said)
                if self._complete and time.monotonic() - now >= self._deadline:
                    self._not_before[node] = time.monotonic() + AGAIN
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
                self._known[node] = None
            else:
                self._twins[node] = name  # asked again when the other one has gone
            return
        before = self._samples if self._before is None else self._before.samples
        if before.get(name, samples) != samples:
            said_before = f"Site {name!r} had {before[name]} samples when the run began and now has {samples}"
            if not self._complete:
                raise ConfigError(f"{said_before}; give it its data back, or start the run anew.")
            logger.warning("%s; it keeps the weight that it had.", said_before)
        self._samples.setdefault(name, samples)
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
