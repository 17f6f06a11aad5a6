"""What hangs on the loop in a process that does not lead: it writes nothing, and takes part."""

from __future__ import annotations

import types
from typing import Any

from comfedl.training.callbacks import Callback
from comfedl.training.personal_models import asked
from comfedl.training.result import Result
from comfedl.utils.signals import caught, let_go


class Follower(Callback):
    """Stands where the folder does in a process that writes nothing: it takes part in what the folder asks for."""

    def __init__(self, save_personal: bool) -> None:
        self._personal, self._handlers, self._stopped = save_personal, dict[int, Any](), False

    def started(self) -> None:
        def stop(number: int, frame: types.FrameType | None) -> None:
            if self._stopped:
                raise KeyboardInterrupt
            self._stopped = True  # the process that writes has the signal too, and says when to stop

        self._handlers = caught(stop)

    def finished(self, result: Result) -> None:
        for clients in asked(result) if self._personal else ():
            for _ in result.ask_personal(clients):
                pass
        let_go(self._handlers)

    def failed(self, error: BaseException) -> None:
        let_go(self._handlers, error)
