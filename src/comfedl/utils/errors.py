"""The exceptions of comfedl.

Each message says what was given, what is allowed and what to do. The command line prints it without a traceback and
exits with code 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LONGEST = 2000  # characters of a message
CLOSE = 0.65  # the least similarity of a suggestion: about one typing error in three or four letters


class ComfedlError(Exception):
    """The base class of all errors whose message is meant for the user.

    It quotes what was given and what is allowed, so of a very long one the middle is left out.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= LONGEST:
            return text
        start, end = text[: 3 * LONGEST // 4], text[-LONGEST // 8 :]
        return f"{start} [{len(text) - len(start) - len(end):,} characters left out] {end}"


class ConfigError(ComfedlError, ValueError):
    """An invalid setting: an unknown name or key, or a value out of range."""


class DataError(ComfedlError, ValueError):
    """Invalid data: empty, of the wrong shape, NaN or infinite, or not the expected file."""


class RunFolderError(ComfedlError, OSError):
    """A run folder that cannot be written or read."""


class RankError(ComfedlError, RuntimeError):
    """Another process of a distributed run has failed or disagrees with this one."""


class RankLost(RankError):
    """Another process of a distributed run is unreachable."""


class Diverged(ComfedlError, ArithmeticError):
    """Training diverged (NaN or infinity): says round, client, local step, loss and weight."""

    def __init__(self, round: int, client: str, step: int | None, loss: float, weight: float) -> None:
        self.round, self.client, self.step, self.loss, self.weight = round, client, step, loss, weight
        self.advice = ""
        super().__init__(round, client, step, loss, weight)

    def __str__(self) -> str:
        where = f"Round {self.round}, client {self.client!r}"
        if self.step is None:
            return f"{where}: its loss or its reply is not finite. {self.advice}".rstrip()
        return (
            f"{where}, local step {self.step}: training is no longer finite (loss {self.loss:.6g}, "
            f"weight {self.weight:.6g}). {self.advice}"
        ).rstrip()


class MetricFailed(ComfedlError, ValueError):
    """A user's metric raised an error, or did not return a number; ``client`` is set by whoever knows its name."""

    def __init__(self, metric: str, place: int, samples: int, reason: str) -> None:
        self.metric, self.place, self.samples, self.reason = metric, place, samples, reason
        self.client: str | None = None
        super().__init__(metric, place, samples, reason)

    def __str__(self) -> str:
        whom = "a client" if self.client is None else f"client {self.client!r}"
        return f"The metric {self.metric!r} {self.reason}, for the {self.samples} samples of {whom}; fix the function."


class QuorumError(ComfedlError, RuntimeError):
    """Too few replies of a round could be used."""


class MetricMissing(ConfigError):
    """The run does not record this metric, so no other trial will."""


class LocalTrialError(ComfedlError, RuntimeError):
    """An error raised by the server of a trial."""


class MalformedMessage(ComfedlError, ValueError):
    """A message that does not have the format of this module."""


class DaemonError(ComfedlError, RuntimeError):
    """A Flower process failed to start or ended too early."""


class WorkerDied(ComfedlError):
    """A worker process ended before its work was done."""

    def __init__(self, exit_code: int | None = None) -> None:
        code = "" if exit_code is None else f" (exit code {exit_code})"
        super().__init__(
            f"A worker process ended unexpectedly{code}, perhaps because memory ran out; finished work is kept, so run "
            "the same command again with fewer --jobs."
        )


class BadReply(UserWarning):
    """A client's reply was refused."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """The end of an "unknown name" message: the closest allowed name if one is close, then all of them.

    >>> nearest("comfdl", ["comfedl", "fedavg"])
    "did you mean 'comfedl'? Allowed: comfedl, fedavg"
    >>> nearest("hospital", ["capital_loss", "age"])
    'Allowed: age, capital_loss'
    """
    names = sorted(allowed)
    folded = {name.casefold(): name for name in names}
    close = [folded[name] for name in difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=CLOSE)]
    if not close:  # a part of a longer name: "steps" for "local_steps", "classify" for "classification"
        start, whole = given.casefold()[:6], given.casefold()
        close = [name for name in names if len(start) == 6 and name.casefold().startswith(start)][:1]
        close = close or [name for name in names if whole and whole in re.split(r"[_\W]", name.casefold())][:1]
    listing = f"Allowed: {', '.join(names)}" if names else "No name is allowed"
    return f"did you mean {close[0]!r}? {listing}" if close else listing
