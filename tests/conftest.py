"""What the tests share."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import comfedl as cf
from helpers.browser import browser as browser, chromium as chromium

# Tests run side by side on a few cores: each takes one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# A shell has what it starts in the background ignore Ctrl-C, and processes pass that on: those of the tests must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def three_clients() -> cf.FederatedData:
    """Three clients of unequal size with different labels, in float64."""
    generator = torch.Generator().manual_seed(7)

    def client(samples: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(samples, 4, generator=generator, dtype=torch.float64) + shift
        y = (x.sum(dim=1) > 2 * shift).long() + (x[:, 0] > shift).long()
        return x, y

    train = {"a": client(12, 0.0), "b": client(5, 1.0), "c": client(30, -0.5)}
    validation = {"a": client(6, 0.0), "b": client(6, 1.0), "c": client(6, -0.5)}
    return cf.FederatedData(train, validation)
