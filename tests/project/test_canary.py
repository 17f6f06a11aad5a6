"""The benchmark that looks for a canary client: what it finds falls with epsilon, and stays within what that allows."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'comfedl[privacy]'")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is run from the root and is not installed

from benchmarks import canary


def test_the_canary_is_found_without_noise_and_lost_with_it() -> None:
    runs = 40
    plain, loud, quiet = canary.rows([math.inf, 30.0, 0.5], runs)
    assert plain["area"] == 1.0 and plain["advantage"] == 1.0
    assert loud["area"] > quiet["area"] + 0.15
    chance = math.sqrt(math.log(2 / 1e-4) / (2 * runs))  # Massart's bound on each empirical distribution, 1 in 10,000
    for row in (loud, quiet):
        assert row["advantage"] <= row["allowed"] + 2 * chance
    assert abs(quiet["area"] - 0.5) < 0.35


def test_the_attacker_s_numbers_are_what_they_say() -> None:
    one, other = np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0, -1.0])
    assert canary.area(one, other) == pytest.approx((3 + 2.5 + 2) / 9)
    assert canary.advantage(one, other) == pytest.approx(2 / 3)
    assert canary.allowed(0, 0) == 0 and canary.allowed(1000, 0) == 1
