"""Everything that comfedl raises on purpose.

Each message is one readable sentence or two: what was given, what is allowed, what to do.
The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ComfedlError(Exception):
    """The base of all errors that are meant for a person to read."""


class ConfigError(ComfedlError, ValueError):
    """A setting that cannot be used: an unknown name or key, a value out of range."""


class DataError(ComfedlError, ValueError):
    """Data that cannot be used: empty, of the wrong shape, not finite, not the right file."""


class RunFolderError(ComfedlError, OSError):
    """A run folder that cannot be written or read."""


class RankError(ComfedlError, RuntimeError):
    """Another process of a distributed run has failed, or goes another way."""


class RankLost(RankError):
    """Another process of a distributed run cannot be reached."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Say what is allowed, the nearest name first: the tail of an "unknown name" message.

    >>> nearest("comfdl", ["comfedl", "fedavg"])
    "did you mean 'comfedl'? Allowed: comfedl, fedavg"
    """
    names = sorted(allowed)
    folded = {name.casefold(): name for name in names}
    close = [folded[name] for name in difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=0.5)]
    listing = f"Allowed: {', '.join(names)}" if names else "Nothing is allowed here"
    return f"did you mean {close[0]!r}? {listing}" if close else listing
