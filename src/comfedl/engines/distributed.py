"""The distributed engine: each of torchrun's processes runs the steps of its share of the clients."""

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
from comfedl.engines.distributed_replies import ReducedReplies, cpu_copy
from comfedl.engines.embedded import Embedded
from comfedl.engines.process_group import BACKENDS, Group
from comfedl.engines.replies import LocalReplies
from comfedl.utils import checks, torchrun, tree
from comfedl.utils.errors import ConfigError, Diverged, QuorumError, RankError
from comfedl.utils.fingerprint import fingerprint
from comfedl.utils.tree import Tree

# Commands of rank 0 between two steps; the other ranks wait for one before their next step.
RUN, STATES, BROADCAST, FINISH, FAILED = range(5)


class Distributed(Engine):
    """Every rank runs the same loop on the same data, but only the steps of its own clients.

    Replies stay on their rank: their sums are all-reduced, so all ranks compute the same new model, bit for bit. Only
    rank 0, the leader, writes; it collects the clients' states from the others for a checkpoint.

    Args:
        backend: "gloo" (CPU), "nccl" (GPU), or "auto", by the model's device.
        timeout_s: how many seconds a rank waits for the others.
        embedded: each rank's options of ``Embedded``.
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
        self.held_out = self._clients.held_out
        self._device = data.train.device
        self._group = Group(backend, timeout_s, self._device)
        self.is_leader = self._group.rank == 0
        self._owner = assign_ranks(self.sizes, self._group.size)
        self._waiting = True  # whether the other ranks wait, or soon will, for a command of the leader
        # Without the times of files on disk, which may differ from machine to machine.
        digest = int(fingerprint(*data.contents(times=False), seed)[:15], 16)
        if len({row[0] for row in self._group.all_gather_ints([digest])}) > 1:
            raise RankError("The ranks have different data or seeds; give all of them the same.")

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._waiting = False
        digest = _digest(step, clients, message, round)
        same = self._synchronize(RUN, digest) == digest
        places = np.flatnonzero(self._owner[np.asarray(clients, dtype=np.int64)] == self._group.rank).tolist()
        replies: Replies = LocalReplies([], [])
        failure: Exception | None = None
        try:
            if places:
                replies = self._clients.run(step, [clients[k] for k in places], message, round)
        except Exception as error:
            failure = error
        found = self._group.all_gather_ints([same, failure is not None, replies.nbytes()])
        if not all(row[0] for row in found):
            raise RankError(
                f"Round {round}: the ranks have different models, so their clients would train from different ones; "
                "use the same model, the same versions and the same kind of processor on all of them."
            )
        if any(row[1] for row in found):
            raise self._failure(failure, clients, round)
        return ReducedReplies(clients, replies, self._owner, self._group, sum(row[2] for row in found))

    def _failure(self, own: Exception | None, clients: Sequence[int], round: int) -> Exception:
        """The exception to raise on every rank if a step failed on some; the same on all if training diverged."""
        place = None
        if isinstance(own, Diverged):
            place = list(clients).index(find(self.names, own.client))  # type: ignore[arg-type]
        report = None if own is None else (place, own if place is not None else f"{type(own).__name__}: {own}")
        reports = enumerate(self._group.all_gather_objects(report))
        failures = {rank: report for rank, report in reports if report is not None}
        if own is not None and place is None:
            return own
        for rank, (at, text) in failures.items():
            if at is None:
                return RankError(f"Round {round}: rank {rank} has failed ({text}).")
        first: Diverged = min(failures.values(), key=lambda report: report[0])[1]
        return first

    def states(self) -> dict[int, Tree]:
        """As with any engine, but only on the leader."""
        self._synchronize(STATES)
        return self._gather_states()

    def _gather_states(self) -> dict[int, Tree]:
        own = {client: cpu_copy(state) for client, state in self._clients.states().items()}
        found = {client: state for part in self._group.gather_objects(own) for client, state in part.items()}
        return {client: found[client] for client in sorted(found)}

    def commit_round(self) -> None:
        self._clients.commit_round()
        self._waiting = True

    def restore(self, states: Mapping[int, Tree]) -> None:
        own = {client: state for client, state in states.items() if self._owner[client] == self._group.rank}
        self._clients.restore(tree.map(lambda leaf: leaf.to(self._device), own))

    def can_save(self, error: BaseException) -> bool:
        """A missed quorum is seen by all ranks, which then wait for the leader; else they wait between rounds only."""
        return isinstance(error, QuorumError) or (self._waiting and not isinstance(error, RankError))

    def broadcast(self, make: Callable[[], T]) -> T:
        value = make() if self.is_leader else None
        self._synchronize(BROADCAST)
        shared: T = self._group.broadcast_object(value)
        return shared

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._synchronize(FINISH)
            return
        no_quorum = isinstance(error, QuorumError)
        with contextlib.suppress(Exception):
            if self.is_leader and self.can_save(error):
                self._group.broadcast_ints(FAILED, 0)
                self._group.broadcast_object((isinstance(error, KeyboardInterrupt), str(error)))
            elif no_quorum:
                self._synchronize(FINISH)
        self._group.leave()

    def _synchronize(self, kind: int, value: int = 0) -> int:
        """Wait until rank 0 sends this command, serving others until then; the value that rank 0 sent with it."""
        command, number = self._group.broadcast_ints(kind, value)
        while command != kind:
            if command == FAILED:
                stopped, text = self._group.broadcast_object(None)
                raise KeyboardInterrupt(text) if stopped else RankError(f"The first rank has failed: {text}")
            if command != STATES:
                raise RankError("The ranks do not take the same steps; give all of them the same code and settings.")
            self._gather_states()
            command, number = self._group.broadcast_ints(kind, value)
        return number


def assign_ranks(sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The rank of each client: greedily, largest client first, to the rank with the fewest samples.

    >>> assign_ranks(np.array([5, 1, 2, 4]), 2)
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
    """A checksum of a request, to detect ranks that make different ones."""
    digest = zlib.crc32(f"{step} {round}".encode())
    digest = zlib.crc32(np.ascontiguousarray(clients, dtype=np.int64).data, digest)
    for leaf in tree.leaves(message):
        digest = zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, digest)
    return digest
