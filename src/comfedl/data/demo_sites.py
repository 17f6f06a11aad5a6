"""The demo's sites: five places with handwritten digits, one of which has its scanner turned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comfedl.data.federated import FederatedData
from comfedl.data.registry import read
from comfedl.utils import rng

Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]

TRAIN = {"city": 400, "town": 200, "harbour": 150, "valley": 100, "island": 100}
VALIDATION = 160
TURNED = "island"


def demo_sites(seed: int = 0) -> FederatedData:
    """Five sites that draw scikit-learn's digits without replacement; the images of one are turned by 90 degrees."""
    raw = read("digits")
    order, at = rng.generator(seed, "data/demo sites").permutation(len(raw.y)), 0
    train: dict[str, tuple[Pixels, Labels]] = {}
    validation: dict[str, tuple[Pixels, Labels]] = {}
    for name, size in TRAIN.items():
        for split, count in ((train, size), (validation, VALIDATION)):
            rows = order[at : at + count]
            at += count
            x = np.rot90(raw.x[rows], axes=(2, 3)) if name == TURNED else raw.x[rows]
            split[name] = (np.ascontiguousarray(x), raw.y[rows])
    return FederatedData(train, validation)
