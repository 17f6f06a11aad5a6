"""Setting aside a share of each client's train data as its outer data.

A client's draw depends on the seed and its name alone, so it is the same wherever the client is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.federated import FederatedData
from comfedl.data.partition import drawn
from comfedl.utils import rng
from comfedl.utils.errors import ConfigError
from comfedl.utils.samples import Samples


def held_out(samples: int, share: float) -> int:
    """How many of a client's samples are set aside: at least one, and not all.

    >>> [held_out(samples, 0.2) for samples in (2, 7, 8, 100)]
    [1, 1, 2, 20]
    """
    return min(max(1, round(share * samples)), samples - 1)


def set_aside(fed: FederatedData, share: float, seed: int) -> FederatedData:
    """The same data with this share of each client's train samples in the outer split, in proportion to its labels."""
    train = fed.train
    for i in np.flatnonzero(train.sizes < 2)[:1]:
        raise ConfigError(
            f"Client {train.names[int(i)]!r} has one train sample, of which no outer data can be set aside; give it "
            'outer data (FederatedData(outer=...)) or more samples, leave it out, or use on = "train".'
        )
    kept, held = [], []
    for i, name in enumerate(train.names):
        generator = rng.generator(seed, "data/outer share", client=name)
        samples = int(train.sizes[i])
        inside, outside = _split(train.y_of(i), samples, held_out(samples, share), generator)
        kept.append(inside)
        held.append(outside)
    splits = {name: split for name in ("validation", "test") if (split := fed.split(name)) is not None}
    made = FederatedData.from_splits({"train": train.part(kept), **splits, "outer": train.part(held)})
    made.encoding = fed.encoding
    return made


def _split(
    y: Samples, samples: int, count: int, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that stay and ``count`` that are set aside, stratified by label where labels are classes."""
    if isinstance(y, Tensor) and y.ndim == 1:
        labels = y.cpu()
        if not labels.is_floating_point() or bool(((labels == 0) | (labels == 1)).all()):
            return drawn(labels.numpy().astype(np.int64), count, generator)
    held = np.sort(generator.choice(samples, size=count, replace=False))
    return np.setdiff1d(np.arange(samples), held), held
