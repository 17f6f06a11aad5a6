"""The distributed engine: each of torchrun's processes has a share of the clients and runs their steps."""

from __future__ import annotations

import contextlib
import heapq
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.core.learner import Learner
from comfedl.core.protocol import Engine, Replies, Step, T
from comfedl.data.client_names import find
from comfedl.data.federated import FederatedData
from comfedl.engines.distributed_replies import ReducedReplies, packed
from comfedl.engines.embedded import Embedded
from comfedl.engines.process_group import BACKENDS, Group
from comfedl.engines.replies import LocalReplies
from comfedl.utils import checks, torchrun, tree
from comfedl.utils.errors import ConfigError, Diverged, QuorumError, RankError
from comfedl.utils.fingerprint import fingerprint
from comfedl.utils.tree import Tree

# What the first rank may ask for between two steps; the others wait for it where their next step begins.
RUN, STATES, SHARE, END, FAILED = range(5)


class Distributed(Engine):
    """Every rank runs the same loop on the same data, and the steps of its own clients alone.

    Replies stay where they are: sums of them are reduced, so all ranks come to the same new model, to the bit. The
    first rank leads: it alone writes, and asks the others for what clients keep when a checkpoint is due.

    Args:
        backend: "gloo" (CPU), "nccl" (GPU), or "auto", by where the model is.
        timeout_s: how long a rank may keep the others waiting, in seconds.
        embedded: the options of ``Embedded``, for each rank.
    """

    def __init__(
        self,
        data: FederatedData,
        learner: Learner,
        steps: Mapping[str, Step],
        seed: int,
        state: Tree = None,
        backend: str = "auto",
        timeout_s: float = 300,
        **embedded: Any,
    ) -> None:
        checks.one_of("backend", backend, BACKENDS)
        checks.positive("timeout_s", timeout_s)
        torchrun.check_started()
        if torchrun.world_size() > len(data):
            raise ConfigError(
                f"There are {torchrun.world_size()} ranks for {len(data)} clients; "
                "start at most as many ranks as there are clients."
            )
        self._clients = Embedded(data, learner, steps, seed, state, **embedded)
        self.names, self.sizes = self._clients.names, self._clients.sizes
        self._device = data.train.x.device
        self._group = Group(backend, timeout_s, self._device)
        self.leads = self._group.rank == 0
        self._owner = shares(self.sizes, self._group.size)
        self._waiting = True  # whether the other ranks are between two rounds, or will come there by themselves
        known = int(fingerprint(*data.contents(), seed)[:15], 16)
        if len({row[0] for row in self._group.rows([known])}) > 1:
            raise RankError("The ranks have different data or seeds; give all of them the same.")

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._waiting = False
        asked = _digest(step, clients, message, round)
        same = self._meet(RUN, asked) == asked
        places = np.flatnonzero(self._owner[np.asarray(clients, dtype=np.int64)] == self._group.rank).tolist()
        replies: Replies = LocalReplies([], [])
        failure: Exception | None = None
        try:
            if places:
                replies = self._clients.run(step, [clients[k] for k in places], message, round)
        except Exception as error:
            failure = error
        found = self._group.rows([same, failure is not None, replies.nbytes()])
        if not all(row[0] for row in found):
            raise RankError(
                f"Round {round}: the ranks have come to different models, so that their clients would train from them; "
                "give all of them the same model, the same versions and the same kind of processor."
            )
        if any(row[1] for row in found):
            raise self._failure(failure, clients, round)
        return ReducedReplies(clients, replies, self._owner, self._group, sum(row[2] for row in found))

    def _failure(self, own: Exception | None, clients: Sequence[int], round: int) -> Exception:
        """What to raise where a step has failed somewhere: in all ranks, and the same where training diverged."""
        place = None
        if isinstance(own, Diverged):
            place = list(clients).index(find(self.names, own.client))  # type: ignore[arg-type]
        report = None if own is None else (place, own if place is not None else f"{type(own).__name__}: {own}")
        failures = {rank: said for rank, said in enumerate(self._group.gathered(report)) if said is not None}
        if own is not None and place is None:
            return own
        for rank, (at, text) in failures.items():
            if at is None:
                return RankError(f"Round {round}: rank {rank} has failed ({text}).")
        first: Diverged = min(failures.values(), key=lambda said: said[0])[1]
        return first

    def states(self) -> dict[int, Tree]:
        """As with any engine, for the rank that leads."""
        self._meet(STATES)
        return self._collected()

    def _collected(self) -> dict[int, Tree]:
        own = {client: packed(state) for client, state in self._clients.states().items()}
        found = {client: state for part in self._group.collected(own) for client, state in part.items()}
        return {client: found[client] for client in sorted(found)}

    def settle(self) -> None:
        self._clients.settle()
        self._waiting = True

    def restore(self, states: Mapping[int, Tree]) -> None:
        own = {client: state for client, state in states.items() if self._owner[client] == self._group.rank}
        self._clients.restore(tree.map(lambda leaf: leaf.to(self._device), own))

    def share(self, make: Callable[[], T]) -> T:
        value = make() if self.leads else None
        self._meet(SHARE)
        shared: T = self._group.told(value)
        return shared

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._meet(END)
            return
        # Too few replies come to all ranks, and the one that leads then saves the last round.
        short = isinstance(error, QuorumError)
        with contextlib.suppress(Exception):
            if self.leads and (short or (self._waiting and not isinstance(error, RankError))):
                self._group.said(FAILED, 0)
                self._group.told((isinstance(error, KeyboardInterrupt), str(error)))
            elif short:
                self._meet(END)
        self._group.leave()

    def _meet(self, kind: int, value: int = 0) -> int:
        """Go on when the first rank says what all do next, and do until then what else it asks for."""
        said, number = self._group.said(kind, value)
        while said != kind:
            if said == FAILED:
                stopped, text = self._group.told(None)
                raise KeyboardInterrupt(text) if stopped else RankError(f"The first rank has failed: {text}")
            if said != STATES:
                raise RankError("The ranks do not take the same steps; give all of them the same code and settings.")
            self._collected()
            said, number = self._group.said(kind, value)
        return number


def shares(sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The rank of each client: the largest first, each to the rank that has the fewest samples.

    >>> shares(np.array([5, 1, 2, 4]), 2)
    array([0, 0, 1, 1])
    """
    loads = [(0, rank) for rank in range(count)]
    owner = np.zeros(len(sizes), dtype=np.int64)
    for client in np.argsort(-sizes, kind="stable").tolist():
        load, rank = loads[0]
        owner[client] = rank
        heapq.heapreplace(loads, (load + max(1, int(sizes[client])), rank))
    return owner


def _digest(step: str, clients: Sequence[int], message: Tree, round: int) -> int:
    """A number that differs, almost surely, where something else is asked for."""
    digest = zlib.crc32(f"{step} {round}".encode())
    digest = zlib.crc32(np.ascontiguousarray(clients, dtype=np.int64).data, digest)
    for leaf in tree.leaves(message):
        digest = zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, digest)
    return digest
