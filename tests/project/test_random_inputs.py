"""Random configs, random tables, and random runs that are stopped in every way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from comfedl.algorithms import ALGORITHMS
from comfedl.config.schema import parse_config
from comfedl.utils.errors import ComfedlError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is run from the root and is not installed

from benchmarks import random_inputs  # noqa: E402
from benchmarks.random_configs import draw_config  # noqa: E402


@pytest.mark.parametrize("kind", random_inputs.KINDS)
def test_random_inputs_end_in_an_answer_or_one_sentence(kind: str) -> None:
    """Many more, and others, by python -m benchmarks.random_inputs."""
    found = [random_inputs.use(kind, number, seed=1, seconds=60) for number in range(60)]
    assert [failure for outcome in found for failure in outcome.failures] == []
    assert sum(outcome.answered for outcome in found) > 20 and sum(outcome.refused for outcome in found) > 10


def test_drawn_configs_cover_the_methods_and_most_of_them_are_valid() -> None:
    drawn = [draw_config(random.Random(k)) for k in range(400)]
    assert {config["algorithm"]["name"] for config in drawn} == {*ALGORITHMS}
    valid = 0
    for config in drawn:
        try:
            parse_config(config)
        except ComfedlError:
            continue
        valid += 1
    assert valid > 250


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and /proc")
def test_a_soak(tmp_path: Path) -> None:
    """Five minutes of python -m benchmarks.soak; COMFEDL_SOAK=60 for an hour."""
    minutes = os.environ.get("COMFEDL_SOAK", "5")
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", minutes, "--engines", "embedded", "distributed"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    last = ended.stdout.splitlines()[-1]
    expected = ["embedded equal", "distributed equal", "killed", "interrupted", "terminated", "full"]
    if float(minutes) >= 30:  # rare: it needs a run that was stopped twice
        expected.append("damaged")
    for what in expected:
        assert what in last, last
    assert last.endswith("; 0 failures")
