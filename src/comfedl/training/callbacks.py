"""Callbacks: the way to extend the training loop."""

from __future__ import annotations

from collections.abc import Sequence

from comfedl.core.client_statistics import Row
from comfedl.training.checkpoint import Snapshot
from comfedl.training.result import Result


class Callback:
    """Override the methods you need."""

    def started(self) -> None:
        """Called before the first round, after all input has been checked."""

    def round_done(self, number: int) -> None:
        """Called after each round, and after its evaluation if it has one."""

    def settled(self, snapshot: Snapshot) -> None:
        """Called right after ``round_done``, with everything needed to resume from this round."""

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        """Called after each evaluation, with the round's row and one row per client."""

    def finished(self, result: Result) -> None:
        """Called when the run has succeeded."""

    def failed(self, error: BaseException) -> None:
        """Called when the run has failed or was interrupted."""
