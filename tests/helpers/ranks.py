"""Ranks of a distributed run in forked processes, and what they have come to compared."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def forked(count: int, function: Callable[[int], Any]) -> list[Any]:
    """The result or exception of ``function(rank)`` on each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = []
    for rank in range(count):
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            answer: Any = None
            try:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                warnings.simplefilter("ignore")
                answer = function(rank)
            except BaseException as error:
                answer = error
            finally:
                with contextlib.suppress(BaseException), os.fdopen(theirs, "wb") as pipe:
                    pipe.write(pickle.dumps(answer))
                os._exit(0)
        os.close(theirs)
        pipes.append((pid, ours))
    answers = []
    for pid, ours in pipes:
        with os.fdopen(ours, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        answers.append(pickle.loads(data) if data else None)
    return answers


def assert_close(one: Any, other: Any, bound: float) -> None:
    """Equal in structure, and in values up to a tolerance."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_close(one[key], other[key], bound)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, bound)
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=bound, abs=bound)
    else:
        assert one == other
