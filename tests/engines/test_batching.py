"""Batch sampling: the same draws one round at a time or several rounds at once."""

from __future__ import annotations

import numpy as np
import torch

from comfedl.core.protocol import Draw
from comfedl.data.split import Split
from comfedl.engines.batching import BatchSampler
from comfedl.utils import rng


def test_rounds_that_are_drawn_ahead_are_those_drawn_alone() -> None:
    """In any order of rounds: one after another, with gaps, one of them twice, and back again."""
    sizes = np.array([30, 4, 9])
    split = Split(torch.zeros(43, 1), torch.zeros(43), "abc", np.array([0, 30, 34, 43]))
    clients, draw = np.arange(3), Draw("train", 5, 2)

    def keys(round: int) -> list[int]:
        return [rng.key(7, "train/inner", round, name) for name in "abc"]

    sampler, asked = BatchSampler(split, draw, clients, np.ones(3, dtype=bool)), []
    for round in [1, 2, 3, 3, 4, 9, 10, *range(11, 40), 5, 6, 7]:
        found = sampler.places(round, lambda of: asked.append(of) or keys(of))
        alone = rng.subsets(keys(round), sizes, 2, 5) + np.array([0, 30, 34])[:, None, None]
        assert np.array_equal(found, alone)
        found += 1  # the caller may modify it
        if round == 1:
            assert asked == [1]  # the next round may have other participants
    assert asked[1:9] == [*range(2, 10)] and len(asked) < 100  # from the second round on several at once


def test_many_numbers_are_not_drawn_ahead() -> None:
    split = Split(torch.zeros(90, 1), torch.zeros(90), "abc", np.array([0, 30, 60, 90]))
    sampler, asked = BatchSampler(split, Draw("train", 5, 2000), np.arange(3), np.ones(3, dtype=bool)), []
    for round in (1, 2, 3):
        sampler.places(round, lambda of: asked.append(of) or [of, of + 1, of + 2])
    assert asked == [1, 2, 3]
