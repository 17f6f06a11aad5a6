"""Scores single clients after a run, on data that this process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from comfedl.core.intervals import Interval, counts_samples, score_intervals
from comfedl.core.learner import Learner, Model
from comfedl.data.federated import FederatedData
from comfedl.training.client_table import SPLITS
from comfedl.utils import rng

MOST_SCORED = 1000  # with more clients, only what the records say is used


@dataclass(frozen=True)
class ClientScorer:
    """The clients' data and the model's functions, for what no round needs."""

    learner: Learner
    data: FederatedData
    seed: int

    def sizes(self) -> Mapping[str, NDArray[np.int64]]:
        """split -> the number of samples of every client, in the order of the names."""
        found = {name: self.data.split(name) for name in SPLITS}
        return {name: split.sizes for name, split in found.items() if split is not None}

    def counts_samples(self) -> bool:
        """Whether an accuracy is a share of a client's samples, so that it has Wilson's interval."""
        return counts_samples(self.learner.metrics, self.data.train.y)

    def intervals(self, model: Model, client: int, split: str, with_own: bool = True) -> dict[str, Interval]:
        """The intervals of a model's scores at the client in this place; see ``score_intervals``."""
        found = self.data.split(split)
        if found is None or not found.sizes[client]:
            return {}
        draws = partial(rng.generator, self.seed, f"intervals {split}", 0, self.data.names[client])
        return score_intervals(self.learner, model, found.samples_of(client), draws, with_own)
