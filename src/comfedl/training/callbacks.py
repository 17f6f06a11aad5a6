"""Callbacks: the one way to hang something on the loop of rounds."""

from __future__ import annotations

from collections.abc import Sequence

from comfedl.core.client_statistics import Row
from comfedl.training.checkpoint import Snapshot
from comfedl.training.result import Result


class Callback:
    """Override what you need; each method is called at its moment of the run."""

    def started(self) -> None:
        """All input has been checked; the first round is about to begin."""

    def round_done(self, number: int) -> None:
        """A round has ended (and has been evaluated, where it was its turn)."""

    def settled(self, snapshot: Snapshot) -> None:
        """The same moment, with all that is needed to go on from here."""

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        """The clients have been evaluated: the round's row, and one row a client."""

    def finished(self, result: Result) -> None:
        """The run has ended well."""

    def failed(self, error: BaseException) -> None:
        """The run has ended with an error, or was interrupted."""
