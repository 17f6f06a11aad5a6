"""The global random generators of torch, Python and NumPy: whether something drew from them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

States = tuple[object, ...]


def states() -> States:
    """The states of the generators; equal if nothing was drawn in between."""
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())


@contextmanager
def restored() -> Iterator[States]:
    """Put the generators back afterwards; gives their states before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield states()
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
