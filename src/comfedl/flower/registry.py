"""Which site each connected node is; every new node is asked once."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from comfedl.flower import serialization
from comfedl.flower.messaging import exchange
from comfedl.flower.site_keys import SiteKeys
from comfedl.utils.errors import ConfigError, MalformedMessage

logger = logging.getLogger("comfedl")

# All in seconds.
IDENTIFY_TIMEOUT = 120.0  # the most a node gets to identify itself, since all others wait meanwhile
RETRY_AFTER = 600.0  # until a node that used up that time, or was refused for its key, is asked again in a run
RETRY_AT_START = 60.0  # and while the run waits for its sites
POLL_INTERVAL = 2.0  # between checks for missing sites

MAX_SAMPLES = 10**9  # more than that a site cannot claim to have
MAX_NAME, MAX_DIMENSIONS, MAX_SIZE = 200, 8, 2**31 - 1
MAX_INPUTS = 100  # tensors of one sample
IDENTITY_LIMIT = 1 << 16  # bytes of an answer to "who"
DOMINATES = 9  # a site with more than this many times the samples of all others together is mentioned


Shape = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]
"""The shape of a sample's x: of a tensor, or of each tensor of a tuple or dict."""


@dataclass(frozen=True)
class KnownSites:
    """What a resumed run knows about its sites: the number of samples per site, and the shape of a sample."""

    samples: Mapping[str, int]
    shape: Shape


class SiteRegistry:
    """The sites of a run in the order of their names, and the node of each connected one.

    Args:
        expected: the number of sites or their names; None accepts all that are connected.
        patience: seconds to wait for them at the start.
        deadline: seconds that a node has to identify itself.
        known: the sites of a resumed run; those that miss the deadline may join later.
        quorum: the fraction of the known sites that must be connected.
        outer_share: the share of its train samples that a site without outer data sets aside; None is nothing.
        max_share: the most that one site counts, as a share of all samples; None for what it says it has.
        question: what every node is told when it is asked who it is.
        keys: the keys that the sites' names are bound to; None to believe what nodes say.
        record: called with a dict of the nodes that are refused.
    """

    def __init__(
        self,
        grid: Grid,
        expected: int | Sequence[str] | None,
        patience: float,
        deadline: float,
        known: KnownSites | None = None,
        quorum: float = 1.0,
        outer_share: float | None = None,
        max_share: float | None = None,
        question: Mapping[str, Any] | None = None,
        keys: SiteKeys | None = None,
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._question = {"question": "who", **({} if outer_share is None else {"outer_share": outer_share})}
        self._question |= question or {}
        self.outer_share, self._keys, self._record = outer_share, keys, record or (lambda event: None)
        self._grid, self._deadline, self._resumed = grid, min(deadline, IDENTIFY_TIMEOUT), known
        self._site_of: dict[int, str | None] = {}  # by node; None if the node is refused
        self._claims: dict[int, str] = {}  # nodes that were refused for their key, and the names that they claim
        self._duplicates: dict[int, str] = {}  # nodes that claim the name of another connected node
        self._retry_at: dict[int, float] = {}  # nodes that did not identify themselves in time
        self._samples: dict[str, int] = {}
        self._shapes: dict[str, Shape] = {}
        self._started = False
        names = expected if known is None else list(known.samples)
        self._allowed = set(names) if isinstance(names, Sequence) else None  # None: anyone, until the run starts
        count = 1 if names is None else names if isinstance(names, int) else len(names)
        if known is None:
            connected = self._wait_for(count, count, patience, patience)
        else:
            connected = self._wait_for(count, math.ceil(max(1, quorum * count)), patience, min(deadline, patience))
        if isinstance(names, int) and len(connected) > names:
            raise ConfigError(
                f"{len(connected)} sites are connected ({', '.join(sorted(connected))}), but flower.sites is {names}; "
                "stop the extra SuperNodes, or change flower.sites."
            )
        if known is not None:
            self._samples = dict(known.samples)
            self._shapes = {name: self._shapes.get(name, known.shape) for name in known.samples}
        self._started, self._allowed = True, {*self._samples}
        self.names: Sequence[str] = sorted(self._samples)
        said = np.array([self._samples[name] for name in self.names], dtype=np.int64)
        self.sizes: NDArray[np.int64] = capped(said, max_share)
        largest = int(self.sizes.argmax())
        if len(said) > 1 and self.sizes[largest] > DOMINATES * (self.sizes.sum() - self.sizes[largest]):
            logger.warning(
                "Site %r says that it has %d samples, more than nine times those of all others together, and counts "
                "accordingly; if that is not so, bound it with flower.max_share.",
                self.names[largest],
                said[largest],
            )
        self.known = KnownSites({name: self._samples[name] for name in self.names}, self._common_shape())

    def nodes(self) -> dict[str, int]:
        """The node of every connected site; new nodes are asked to identify themselves."""
        online = set(self._grid.get_node_ids())
        for node in self._claims.keys() - online:  # it may come back with the right key
            del self._claims[node]
            self._retry_at.pop(node, None)
        self._forget_changed_keys()
        connected = {name for node, name in self._site_of.items() if name is not None and node in online}
        now = time.monotonic()
        new = [
            node
            for node in online
            if node not in self._site_of
            and self._duplicates.get(node) not in connected
            and self._retry_at.get(node, 0) <= now
        ]
        body = serialization.encode({**self._question, **self.fresh()})
        limits = dict.fromkeys(new, IDENTITY_LIMIT)
        answers = exchange(
            self._grid, dict.fromkeys(new, body), "query.who", "who", self._deadline, limits, self.check_reply
        )
        for node in sorted(new):
            answer = answers[node]
            if not isinstance(answer, tuple) or "error" in answer[0]:
                reason = serialization.shortened(answer[0]["error"]) if isinstance(answer, tuple) else str(answer)
                if node in self._claims:
                    self._refuse(node, self._claims[node], reason)
                    self._retry_at[node] = time.monotonic() + (RETRY_AFTER if self._started else RETRY_AT_START)
                    continue
                logger.warning("Node %d does not identify itself: %s.", node, reason)
                if self._started and time.monotonic() - now >= self._deadline:
                    self._retry_at[node] = time.monotonic() + RETRY_AFTER
                continue
            self._register(node, answer[0], online)
        return {name: node for node, name in self._site_of.items() if name is not None and node in online}

    def fresh(self) -> dict[str, Any]:
        """What makes a question one that was never asked before, so that no answer to another one fits."""
        return {} if self._keys is None else {"fresh": secrets.token_hex(16)}

    def check_reply(self, node: int, question: RecordDict, reply: RecordDict, body: Mapping[str, Any]) -> str | None:
        """Why a node's reply is not by the site that it claims to be; None if it is, or if names have no keys."""
        if self._keys is None or "error" in body:
            return None
        if self._site_of.get(node) is None and "name" not in body:  # its reply cannot be read, so it names nobody
            return "its reply cannot be read"
        name = self._site_of.get(node) or str(body.get("name"))[:MAX_NAME]
        fault = self._keys.fault(name, node, question, reply)
        if fault is not None and node not in self._site_of:
            self._claims[node] = name
        return fault

    def _forget_changed_keys(self) -> None:
        """Ask nodes again who they are whose site has another key now, or that were refused for their key."""
        changed = set() if self._keys is None else self._keys.reload()
        for name in changed:
            logger.warning("The key of site %r has changed: its node must identify itself again.", name)
        if changed:
            self._site_of = {node: site for node, site in self._site_of.items() if site not in changed}
            for node in self._claims:
                self._retry_at.pop(node, None)
            self._claims = {}

    def _refuse(self, node: int, name: str, why: str) -> None:
        shown = serialization.shortened(name)
        logger.warning("Node %d claims to be site %r and is refused: %s.", node, shown, why)
        absent = {f"node {node}": f"refused: it claims to be {shown!r}, but {why}"}
        self._record({"round": 0, "step": "who", "answered": [], "absent": absent})

    def _wait_for(self, count: int, quorum: int, patience: float, soon: float) -> dict[str, int]:
        """Wait for ``count`` sites; after ``soon`` seconds ``quorum`` of them are enough."""
        start, logged = time.monotonic(), -1
        while True:
            connected = self.nodes()
            elapsed = time.monotonic() - start
            if len(connected) >= count or (quorum < count and len(connected) >= quorum and elapsed >= soon):
                break
            if elapsed >= patience:
                raise ConfigError(
                    f"Only {len(connected)} of {count} sites connected within {patience:g} seconds "
                    f"({', '.join(sorted(connected)) or 'none'}); start the other SuperNodes, or raise flower.patience."
                )
            if logged != len(connected):
                logger.info("%d of %d sites are connected.", len(connected), count)
                logged = len(connected)
            time.sleep(min(POLL_INTERVAL, patience))
        if len(connected) < count:
            names = ", ".join(sorted(connected))
            logger.warning("The run resumes with %d of its %d sites: %s.", len(connected), count, names)
        return connected

    def _register(self, node: int, answer: Mapping[str, Any], online: set[int]) -> None:
        """Register a node as the site that it says it is, unless another node already is."""
        try:
            name, samples, shape = _identity(answer)
        except MalformedMessage as error:
            logger.warning("Node %d is refused: %s.", node, error)
            self._site_of[node] = None
            return
        taken = any(site == name and other in online for other, site in self._site_of.items())
        if taken and not self._started:
            raise ConfigError(f"Two sites are named {name!r}; give each SuperNode a unique name, and start again.")
        if taken or (self._allowed is not None and name not in self._allowed):
            self._refuse(node, name, "another node is that site" if taken else "it is not one of this run's sites")
            if taken:
                self._duplicates[node] = name  # asked again once the other node is gone
            else:
                self._site_of[node] = None
            return
        before = self._samples if self._resumed is None else self._resumed.samples
        if before.get(name, samples) != samples:
            change = f"Site {name!r} had {before[name]} samples when the run started and now has {samples}"
            if not self._started:
                raise ConfigError(f"{change}; restore its data, or start a new run.")
            logger.warning("%s; its weight stays the same.", change)
        self._samples.setdefault(name, samples)
        self._site_of[node] = name
        self._shapes.setdefault(name, shape)

    def _common_shape(self) -> Shape:
        first = self.names[0]
        for name in self.names:
            if self._shapes[name] != self._shapes[first]:
                raise ConfigError(
                    f"Site {first!r} has samples of shape {self._shapes[first]} and site {name!r} of "
                    f"{self._shapes[name]}; all sites must have the same shape."
                )
        return self._shapes[first]


def _identity(answer: Mapping[str, Any]) -> tuple[str, int, Shape]:
    """A site's name, its number of samples and the shape of one, from its answer."""
    name, samples, shape = answer.get("name"), answer.get("samples"), answer.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise MalformedMessage(f"its name must be a printable text of at most {MAX_NAME} characters")
    if not _is_whole(samples, 1, MAX_SAMPLES):
        raise MalformedMessage(f"site {name!r} must have a whole number of samples from 1 to {MAX_SAMPLES:,}")
    try:
        return name, int(samples or 0), read_shape(shape)
    except ValueError as error:
        raise MalformedMessage(f"the shape of site {name!r} must be {error}") from None


def read_shape(given: object) -> Shape:
    """A shape from JSON: a list of numbers, a list of such lists, or an object of them.

    Raises:
        ValueError: what it must be.
    """
    several = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [None]
    if isinstance(given, list) and not any(isinstance(part, list) for part in given):
        return _sizes(given)
    if not 0 < len(several) <= MAX_INPUTS:
        raise ValueError(f"of 1 to {MAX_INPUTS} tensors")
    if not isinstance(given, dict):
        return tuple(map(_sizes, several))
    if not all(0 < len(key) <= MAX_NAME and key.isprintable() for key in given):
        raise ValueError(f"by keys of at most {MAX_NAME} printable characters")
    return {key: _sizes(part) for key, part in given.items()}


def _sizes(given: object) -> tuple[int, ...]:
    sizes = given if isinstance(given, list) and len(given) <= MAX_DIMENSIONS else [None]
    if not all(_is_whole(size, 0, MAX_SIZE) for size in sizes):
        raise ValueError(f"at most {MAX_DIMENSIONS} whole numbers")
    return tuple(sizes)


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def capped(sizes: NDArray[np.int64], share: float | None) -> NDArray[np.int64]:
    """Sizes of which none is more than this share of their sum, as far as there are enough clients.

    >>> capped(np.array([10, 30, 1000]), 0.5).tolist()
    [10, 30, 40]
    """
    if share is None or int(sizes.max()) <= share * int(sizes.sum()):
        return sizes
    ordered = np.sort(sizes)[::-1]
    for k in range(1, len(sizes)):  # cut the k largest to what the share leaves them beside the others
        if share * k >= 1:
            break
        most = share * int(ordered[k:].sum()) / (1 - share * k)
        if ordered[k] <= most:
            return sizes.clip(max=max(1, int(most)))
    return np.full_like(sizes, ordered[-1])  # there are too few clients for such a share: all count alike
