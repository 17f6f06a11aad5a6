"""The worker's side: counts and times the rounds of a peer's training loop, and makes it wait between turns.

It writes one line of JSON when the loop is warm (``checks``, ``start_s``, ``round_s``), then one per "go N" it reads,
with the CPU and wall seconds of N rounds. On "stop", or when the driver is gone, the process exits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.peers.processes import cpu_seconds, peak_mb
from benchmarks.workloads import LR, Work, build

WARM = 0.5  # seconds, and at least one round after the first


class Counting:
    """Counts gradients by batch size, and local optimiser steps, through torch's global hooks."""

    def __init__(self) -> None:
        self.passes: Counter[int] = Counter()
        self.steps = 0
        self._handles = [
            register_module_forward_pre_hook(self._forward),
            register_optimizer_step_post_hook(self._step),
        ]

    def _forward(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if getattr(module, "counted", False) and torch.is_grad_enabled():
            self.passes[len(inputs[0])] += 1

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += optimizer.param_groups[0]["lr"] == LR  # a server's optimiser has another rate

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


class Pace:
    """Called by a training loop at the end of every round."""

    def __init__(self, work: Work, started: float, tree: bool = False) -> None:
        """``started`` is the wall clock at the process's start; ``tree`` counts child processes as well."""
        self.work, self.tree = work, tree
        self._channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # keeps what the frameworks print out of the protocol
        self._started, self._rounds, self._left, self._ready = started, 0, 0, False
        self.counting = Counting()
        self.checks: dict[str, Any] = {}

    def __call__(self, params: Callable[[], Iterable[Tensor]]) -> None:
        """A round has ended; ``params`` gives the server's model after it."""
        self._rounds += 1
        if self._rounds == 1:
            self._first(params)
        elif not self._ready:
            cpu, wall = self._spent()
            if wall < WARM:
                return
            self._ready = True
            start = {"start_s": self._start, "round_s": cpu / (self._rounds - 1), "rounds": self._rounds}
            self._send({"checks": self.checks, **start})
            self._wait()
        elif self._left > 1:
            self._left -= 1
        else:
            cpu, wall = self._spent()
            self._send({"cpu_s": cpu, "wall_s": wall, "rounds": self._turn})
            self._wait()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude this block from the start time."""
        entered = time.time()
        yield
        self._started += time.time() - entered

    def _first(self, params: Callable[[], Iterable[Tensor]]) -> None:
        self._start = time.time() - self._started
        self.counting.stop()
        before = torch.cat([part.detach().flatten() for part in build(self.work).parameters()])
        after = torch.cat([part.detach().flatten() for part in params()])
        counted = {"passes": dict(self.counting.passes), "optimizer_steps": self.counting.steps}
        self.checks = {**counted, "moved": float((after - before).norm()), **self.checks}
        self._mark()

    def _mark(self) -> None:
        self._cpu, self._wall = cpu_seconds(self.tree), time.perf_counter()

    def _spent(self) -> tuple[float, float]:
        return cpu_seconds(self.tree) - self._cpu, time.perf_counter() - self._wall

    def _wait(self) -> None:
        command = sys.stdin.readline().split()
        if command[:1] != ["go"]:
            self._end()
        self._turn = self._left = int(command[1])
        self._mark()

    def _end(self) -> NoReturn:
        self._send({"peak_mb": peak_mb(self.tree)})
        os._exit(0)  # the peer's loop has no end

    def _send(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._channel, flush=True)
        except BrokenPipeError:
            os._exit(1)
