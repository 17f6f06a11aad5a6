"""The processes of a distributed run and what they say to one another: torch.distributed, with errors to read.

All of a group make the same calls in the same order. Sums are the same to the bit in all of them.
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
    """All processes that torchrun has started, numbered from 0.

    Args:
        backend: "gloo", "nccl", or "auto", which is nccl for tensors on a GPU and gloo for all others.
        timeout_s: how long to wait for another process, in seconds.
        device: where the tensors are.
    """

    def __init__(self, backend: str, timeout_s: float, device: torch.device) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ConfigError("backend is 'nccl', but the model is not on a GPU; use 'auto' or 'gloo'.")
        self._timeout = timeout_s
        nccl = backend == "nccl" or (backend == "auto" and device.type == "cuda")
        self._device = device if nccl else torch.device("cpu")  # where tensors are when they travel
        if not dist.is_available():
            raise ConfigError("This torch was built without torch.distributed; install another, or use 'embedded'.")
        if not dist.is_initialized():
            self._begin("cpu:gloo,cuda:nccl" if nccl else "gloo")  # numbers are on the CPU in any case
            atexit.register(self.leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def _begin(self, backend: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore  # a torch may be built without
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=self._timeout)
        with self._reaching():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store = PrefixStore(_met(store, rank, size, self._timeout), store)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of everybody's tensor."""
        return self._reduced(part, dist.ReduceOp.SUM)

    def largest(self, part: Tensor) -> Tensor:
        """The largest of everybody's numbers, place by place."""
        return self._reduced(part, dist.ReduceOp.MAX)

    def _reduced(self, part: Tensor, how: Any) -> Tensor:
        travels = part.to(self._device if part.is_cuda else "cpu", copy=True)
        with self._reaching():
            dist.all_reduce(travels, how)
        return travels.to(part.device)

    def rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's whole numbers, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._reaching():
            dist.all_gather(found, own)
        return [row.tolist() for row in found]

    def said(self, kind: int, value: int) -> tuple[int, int]:
        """Two numbers as the first rank has them."""
        numbers = torch.tensor([kind, value], dtype=torch.int64)
        with self._reaching():
            dist.broadcast(numbers, 0)
        first, second = numbers.tolist()
        return first, second

    def told(self, value: Any, by: int = 0) -> Any:
        """Anything, as one rank has it."""
        box = [value if self.rank == by else None]
        with self._reaching():
            dist.broadcast_object_list(box, by)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """What everybody has, by rank, for all to see."""
        found: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(found, value)
        return found

    def collected(self, value: Any) -> list[Any]:
        """The same for the first rank alone; the others get nothing."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._reaching():
            dist.gather_object(value, found)
        return found or []

    def leave(self) -> None:
        """Be of the group no longer: whoever waits for this process hears so at once."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = re.sub(r"\[/\S*\] ", "", str(error)).partition(". ")[0].partition("\n")[0].rstrip(".")
            raise RankLost(
                f"Another process of the run has ended, or has not answered for {self._timeout:g} s ({said}); if the "
                "run has written a checkpoint, go on from it with the same command and --resume."
            ) from error


def _met(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """A word that all processes of this start have, and those of an earlier one have not had.

    Torchrun keeps its store when it starts processes anew, with the addresses of the dead in it, and processes on
    different hosts do not count the starts alike. So each process asks under a word of its own, and the first answers
    until all have heard it.
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
            raise RuntimeError(f"rank {min(waits)} has not come")
        time.sleep(0.01)
    return own
