"""The data that a run was trained on, loaded again from its config; and which samples of a file are among them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comfedl.analysis.load_run import SavedRun
from comfedl.config.data_schema import READERS
from comfedl.data.federated import FederatedData
from comfedl.data.stored_array import KNOWN_BY
from comfedl.training.client_table import SAMPLES, SPLITS
from comfedl.training.run_folder import TABLE, read_digest
from comfedl.utils.errors import ComfedlError, RunFolderError
from comfedl.utils.read_back import read_rows

logger = logging.getLogger("comfedl")


def own_data(run: SavedRun) -> FederatedData:
    """The run's data with their splits; an error if they have changed, since the splits are then others.

    Of runs of earlier versions, which kept no digest, nobody can tell: that is a warning.
    """
    fed, kept = run.settings.make_data(encoding=run.encoding), read_digest(run.path)
    if kept is None:
        logger.warning(
            "The run in %s was begun by a version of comfedl that kept no digest of its data, so it cannot be told "
            "whether they have changed; if so, rows that it was trained on are scored as held out.",
            run.path,
        )
    elif kept != fed.digest():
        raise RunFolderError(
            f"The data of the run in {run.path} have changed since it began{_difference(run, fed)}: drawn again, its "
            "splits would count rows that it was trained on as held out; restore the data, or score rows that it has "
            f"not seen with --data FILE.{KNOWN_BY if fed.on_disk else ''}"
        )
    return fed


def _difference(run: SavedRun, fed: FederatedData) -> str:
    """The first client with another number of samples, in brackets."""
    if not (run.path / TABLE).is_file():
        return ""
    now: dict[str, dict[str, int]] = {name: {} for name in fed.names}
    for split in SPLITS:
        part = fed.split(split)
        for name, size in [] if part is None else zip(part.names, part.sizes.tolist(), strict=True):
            now[name][split] = size
    then = {
        str(row["client"]): sum(value for split in SPLITS if isinstance(value := row.get(f"{split}{SAMPLES}"), int))
        for row in read_rows(run.path / TABLE)
    }
    for name in sorted({*then, *now}):
        if name not in then or name not in now:
            return f" (the client {name!r} {'is new' if name in now else 'is gone'})"
        if then[name] != sum(now[name].values()):
            return f" (the client {name!r} has {sum(now[name].values())} samples, and had {then[name]})"
    return " (no number of samples, but values or their order)"


def note_known(run: SavedRun, source: Path, x: Tensor, y: Tensor) -> None:
    """Warn if samples that are given as new ones are among those that the run was trained on.

    Only the user's own files are looked through. Samples of few distinct values are equal by chance; so what counts is
    whether more are known than of the train samples have a twin among the others.
    """
    if run.config is None or run.config.data.name not in READERS:
        return
    try:
        fed = run.config.make_data(encoding=run.encoding)
    except ComfedlError:  # the data may be elsewhere
        return
    same = read_digest(run.path) == fed.digest()
    splits = [fed.train] if same else [split for name in SPLITS if (split := fed.split(name)) is not None]
    if not all(split.is_plain and split.shape == x.shape[1:] for split in splits):
        return
    dtype = x.dtype if x.is_floating_point() else torch.float32
    known: Counter[bytes] = Counter()
    for split in splits:
        for i in np.flatnonzero(split.sizes).tolist():  # one client's samples at a time are in memory
            known.update(_rows(*split.samples_of(i), dtype))
    total, count = sum(known.values()), sum(row in known for row in _rows(x, y, dtype))
    twins = sum(number for number in known.values() if number > 1) / total
    if count <= len(x) * twins + 3 * math.sqrt(len(x) * twins * (1 - twins)):
        return
    if same:
        what = "are equal to train rows of this run"
    else:
        what = "are in the data that this run's config names, and it may have been trained on them"
    logger.warning("%s: %d of %d rows %s, so its scores are not those of new data.", source, count, len(x), what)


def _rows(x: Tensor, y: Tensor, dtype: torch.dtype) -> Iterator[bytes]:
    """A digest of each sample, of its numbers in this floating-point type."""
    rounded = [part.detach().cpu().to(dtype if part.is_floating_point() else None) for part in (x, y)]
    whole = torch.cat([part.double().reshape(len(x), math.prod(part.shape[1:])) for part in rounded], dim=1)
    return (blake2b(row.data, digest_size=16).digest() for row in whole.numpy())
