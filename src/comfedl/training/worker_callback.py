"""The callback of ranks > 0 in a distributed run: it takes part in rank 0's requests, and writes nothing."""

from __future__ import annotations

import types
from typing import Any

from comfedl.training.callbacks import Callback
from comfedl.training.personal_models import client_batches
from comfedl.training.result import Result
from comfedl.utils.signals import install_handlers, restore_handlers


class WorkerCallback(Callback):
    """Takes the place of ``RunFolder`` in a process that writes nothing."""

    def __init__(self, save_personal: bool) -> None:
        self._personal, self._handlers, self._stopped = save_personal, dict[int, Any](), False

    def started(self) -> None:
        def stop(number: int, frame: types.FrameType | None) -> None:
            if self._stopped:
                raise KeyboardInterrupt
            self._stopped = True  # rank 0 gets the signal too, and tells the others when to stop

        self._handlers = install_handlers(stop)

    def finished(self, result: Result) -> None:
        for clients in client_batches(result) if self._personal else ():
            for _ in result.ask_personal(clients):
                pass
        restore_handlers(self._handlers)

    def failed(self, error: BaseException) -> None:
        restore_handlers(self._handlers, error)
