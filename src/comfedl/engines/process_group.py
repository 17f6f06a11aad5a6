"""The processes of a distributed run: torch.distributed, with readable errors.

All processes make the same calls in the same order. Sums are bit-identical on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comfedl.utils.errors import ConfigError, RankLost

BACKENDS = ("auto", "gloo", "nccl")


class Group:
    """All processes that torchrun started, numbered from 0.

    Args:
        backend: "gloo", "nccl", or "auto": nccl for tensors on a GPU, else gloo.
        timeout_s: how many seconds to wait for another process.
        device: the device of the tensors.
    """

    def __init__(self, backend: str, timeout_s: float, device: torch.device) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ConfigError("backend is 'nccl', but the model is not on a GPU; use 'auto' or 'gloo'.")
        self._timeout = timeout_s
        nccl = backend == "nccl" or (backend == "auto" and device.type == "cuda")
        self._device = device if nccl else torch.device("cpu")  # on which tensors are sent
        if not dist.is_available():
            raise ConfigError("This build of torch lacks torch.distributed; install another, or use 'embedded'.")
        if not dist.is_initialized():
            self._init("cpu:gloo,cuda:nccl" if nccl else "gloo")  # integers and objects are always sent by gloo
            atexit.register(self.leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def _init(self, backend: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore  # missing in some builds of torch
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=self._timeout)
        with self._rank_errors():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store = PrefixStore(_agree_on_prefix(store, rank, size, self._timeout), store)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        return self._all_reduce(part, dist.ReduceOp.SUM)

    def max(self, part: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' tensors."""
        return self._all_reduce(part, dist.ReduceOp.MAX)

    def _all_reduce(self, part: Tensor, how: Any) -> Tensor:
        buffer = part.to(self._device if part.is_cuda else "cpu", copy=True)
        with self._rank_errors():
            dist.all_reduce(buffer, how)
        return buffer.to(part.device)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """All ranks' integers, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._rank_errors():
            dist.all_gather(found, own)
        return [row.tolist() for row in found]

    def broadcast_ints(self, kind: int, value: int) -> tuple[int, int]:
        """Rank 0's two integers, on all ranks."""
        numbers = torch.tensor([kind, value], dtype=torch.int64)
        with self._rank_errors():
            dist.broadcast(numbers, 0)
        first, second = numbers.tolist()
        return first, second

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """One rank's object, on all ranks."""
        box = [value if self.rank == source else None]
        with self._rank_errors():
            dist.broadcast_object_list(box, source)
        return box[0]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """All ranks' objects, by rank, on all ranks."""
        found: list[Any] = [None] * self.size
        with self._rank_errors():
            dist.all_gather_object(found, value)
        return found

    def gather_objects(self, value: Any) -> list[Any]:
        """All ranks' objects, by rank, on rank 0; the others get an empty list."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._rank_errors():
            dist.gather_object(value, found)
        return found or []

    def leave(self) -> None:
        """Leave the group: processes that wait for this one fail at once."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _rank_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = re.sub(r"\[/\S*\] ", "", str(error)).partition(". ")[0].partition("\n")[0].rstrip(".")
            raise RankLost(
                f"Another process of the run has ended, or has not answered for {self._timeout:g} s ({said}); if the "
                "run has written a checkpoint, continue from it with the same command and --resume."
            ) from error


def _agree_on_prefix(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A key prefix shared by all processes of this start of torchrun, and by none of an earlier one.

    When torchrun restarts processes it keeps its store, with the addresses of the dead ones, and hosts may count
    restarts differently. So each process asks under a random key, and rank 0 answers until all have heard it.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"comfedl/asks/{rank}", own)
        word = str(store.get(f"comfedl/answer/{own}"), "ascii")
        store.set(f"comfedl/heard/{word}/{rank}", "")
        return word
    waits, deadline = {*range(1, size)}, time.monotonic() + timeout_s
    while waits:
        for other in sorted(waits):
            if store.check([f"comfedl/asks/{other}"]):
                store.set(f"comfedl/answer/{store.get(f'comfedl/asks/{other}').decode()}", own)
            if store.check([f"comfedl/heard/{own}/{other}"]):
                waits.remove(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(waits)} did not join")
        time.sleep(0.01)
    return own
