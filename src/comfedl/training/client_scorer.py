"""Scores single clients after a run, on data that this process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from comfedl.core.intervals import Interval, bootstrap_work, counts_samples, score_intervals
from comfedl.core.learner import Learner, Model
from comfedl.data.federated import FederatedData
from comfedl.training.client_table import SPLITS
from comfedl.utils import rng, samples

MOST_SCORED = 1000  # with more clients, only what the records say is used
MOST_DRAWN = 8_000_000  # numbers that bootstraps may draw at the end of a run, which takes about a second


@dataclass(frozen=True)
class ClientScorer:
    """The clients' data and the model's functions, for what no round needs."""

    learner: Learner
    data: FederatedData
    seed: int
    reads: bool = True  # False: most clients' data are read by other ranks, and only accuracy has an interval

    def sizes(self) -> Mapping[str, NDArray[np.int64]]:
        """split -> the number of samples of every client, in the order of the names."""
        found = {name: self.data.split(name) for name in SPLITS}
        return {name: split.sizes for name, split in found.items() if split is not None}

    def counts_samples(self) -> bool:
        """Whether an accuracy is a share of a client's samples, so that it has Wilson's interval."""
        train = self.data.train
        return counts_samples(self.learner.metrics, train.all_y() if train.at_hand else train.head(2)[1])

    def bootstrap_work(self, model: Model, clients: Sequence[int], split: str) -> int:
        """How much the bootstraps of these clients' scores would draw; see ``bootstrap_work``."""
        found = self.data.split(split)
        sizes = [] if found is None else [int(found.sizes[client]) for client in clients]
        if found is None or not any(sizes) or not self.reads:
            return 0
        if found.at_hand:
            x, y = found.samples_of(clients[int(np.argmax(sizes))])
        else:
            x, y = found.head(2)
        return bootstrap_work(self.learner, model, (samples.between(x, 0, 2), samples.between(y, 0, 2)), sizes)

    def intervals(
        self, model: Model, client: int, split: str, with_own: bool = True, with_bootstrap: bool = True
    ) -> dict[str, Interval]:
        """The intervals of a model's scores at the client in this place; see ``score_intervals``."""
        found = self.data.split(split)
        if found is None or not found.sizes[client] or not self.reads:
            return {}
        draws = partial(rng.generator, self.seed, f"intervals {split}", 0, self.data.names[client])
        return score_intervals(self.learner, model, found.samples_of(client), draws, with_own, with_bootstrap)
