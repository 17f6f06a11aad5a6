"""SIGINT and SIGTERM, caught for as long as a run lasts."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from comfedl.utils.errors import RankLost


def caught(stop: Callable[[int, types.FrameType | None], None]) -> dict[int, Any]:
    """Have this called on SIGINT and SIGTERM, where it can be; gives back what was called before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}


def let_go(handlers: Mapping[int, Any], error: BaseException | None = None) -> None:
    """Have signals do what they did before they were caught.

    Where another process has died they stay caught: torchrun then sends SIGTERM to this one, which is about to say so.
    """
    if not isinstance(error, RankLost):
        for number, handler in handlers.items():
            signal.signal(number, handler)
