"""Handlers of SIGINT and SIGTERM for the time of a run."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from comfedl.utils.errors import RankLost


def install_handlers(handler: Callable[[int, types.FrameType | None], None]) -> dict[int, Any]:
    """Handle SIGINT and SIGTERM if this is the main thread; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}


def restore_handlers(handlers: Mapping[int, Any], error: BaseException | None = None) -> None:
    """Restore the previous handlers, except after the loss of another process.

    Then torchrun sends SIGTERM to this one as well, which must live long enough to report the error.
    """
    if not isinstance(error, RankLost):
        for number, handler in handlers.items():
            signal.signal(number, handler)
