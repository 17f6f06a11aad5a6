"""Random configs and random tables, each used as a user would: an answer or one sentence must come, and soon.

    python -m benchmarks.random_inputs configs --count 10000 --jobs 2
    python -m benchmarks.random_inputs tables --count 10000 --jobs 2

Prints each input that ended in an unexpected error, took longer than ten seconds, or left half a run behind; and at the
end how many there were. ``--only N`` does input N again. The tests run some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.mutations import SECONDS, call
from benchmarks.random_configs import draw_config
from benchmarks.random_tables import draw_table
from comfedl.utils.toml import to_toml


@dataclass(frozen=True)
class Outcome:
    """What one input came to: how many commands answered and refused, and those that did neither, in words."""

    number: int
    answered: int
    refused: int
    failures: Sequence[str]


def a_config(draw: random.Random) -> Iterator[Sequence[str]]:
    """Write a config, and what is done with it."""
    wild = draw.choice([0.0, 0.0, 0.03, 0.1, 0.5])
    try:
        text = to_toml(draw_config(draw, wild))
    except RecursionError:
        text = ""
    if draw.random() < wild / 5:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(["[", '"', "=", "\n", "[algorithm]", "\0", "é"]) + text[place:]
    Path("run.toml").write_text(text)
    yield "run", "run.toml", "--out", "run"
    if draw.random() < 0.1:
        yield "data", "describe", "run.toml"
    if Path("run/summary.json").exists() and draw.random() < 0.2:
        yield "evaluate", "run"


def a_table(draw: random.Random) -> Iterator[Sequence[str]]:
    """Write a table and a config that reads it, and what is done with them."""
    data, loss = draw_table(draw, Path("rows.csv"))
    config: dict[str, Any] = {"rounds": 1, "data": data, "loss": loss, "algorithm": {"name": "robust", "lr": 0.01}}
    Path("run.toml").write_text(to_toml(config))
    yield "run", "run.toml", "--out", "run"
    if draw.random() < 0.3:
        yield "data", "describe", "run.toml"
    if Path("run/summary.json").exists():
        rows = str(data["path"])
        if draw.random() < 0.5:
            rows = str(draw_table(draw, Path("rows.csv"))[0]["path"])
        more = draw.choice([[], [], ["--client-column", "ward"], ["--keep", "c0"]])
        yield "predict", "run", rows, "--out", "predicted.csv", *more
        if draw.random() < 0.3:
            yield "personalise", "run", "--data", rows, "--steps", "1"
        if draw.random() < 0.3:
            yield "evaluate", "run", *draw.choice([[], ["--data", rows]])


KINDS: dict[str, Callable[[random.Random], Iterator[Sequence[str]]]] = {"configs": a_config, "tables": a_table}


def use(kind: str, number: int, seed: int = 0, seconds: float = SECONDS) -> Outcome:
    """Make one input and use it, in a folder of its own; a command may take so many seconds."""
    answered, refused, failures = 0, 0, []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for command in KINDS[kind](random.Random(f"{kind} {seed} {number}")):
            began = time.perf_counter()
            code, said = call(*command)
            took = time.perf_counter() - began
            fault = _fault(code, said, took, seconds)
            answered, refused = answered + (code == 0), refused + (code != 0)
            if fault:
                failures.append(f"{number}: {' '.join(command)}: {fault}")
    return Outcome(number, answered, refused, failures)


def _fault(code: int, said: str, took: float, seconds: float) -> str | None:
    """What was wrong with how a command ended; None if nothing was."""
    if took > seconds:
        return f"{took:.1f} s"
    if code not in (0, 2) or "Traceback" in said or (code and said.count("error: ") != 1):
        return f"exit code {code}: {said.strip()[-400:]}"
    left = [path for path in Path("run").rglob("*") if path.name.endswith((".tmp", ".part"))]
    if left or (Path("run").exists() and not Path("run/config.toml").exists()):
        return f"left behind: {sorted(map(str, Path('run').rglob('*')))[:5]}"
    return None


def outcomes(kind: str, numbers: Sequence[int], jobs: int = 1, seed: int = 0) -> Iterator[Outcome]:
    """Use many inputs, in several processes."""
    if jobs == 1:
        yield from (use(kind, number, seed) for number in numbers)
        return
    # Fresh processes now and then: what leaks in a library would slow down the later ones.
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=25) as pool:
        chunks = [numbers[k : k + 20] for k in range(0, len(numbers), 20)]
        for found in pool.map(_several, [(kind, chunk, seed) for chunk in chunks]):
            yield from found


def _several(asked: tuple[str, Sequence[int], int]) -> list[Outcome]:
    import torch

    torch.set_num_threads(1)
    kind, numbers, seed = asked
    return [use(kind, number, seed) for number in numbers]


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="do this one alone, and keep its files in the folder ./input")
    arguments = parser.parse_args()
    if arguments.only is not None:
        _show(arguments.kind, arguments.only, arguments.seed)
        return
    counts: Counter[str] = Counter()
    for outcome in outcomes(arguments.kind, range(arguments.count), arguments.jobs, arguments.seed):
        counts.update(answered=outcome.answered, refused=outcome.refused, failed=len(outcome.failures))
        for failure in outcome.failures:
            print(failure, flush=True)
    done = ", ".join(f"{counts[word]} {word}" for word in ("answered", "refused", "failed"))
    print(f"{arguments.count} {arguments.kind}: of {counts['answered'] + counts['refused']} commands {done}")
    sys.exit(bool(counts["failed"]))


def _show(kind: str, number: int, seed: int) -> None:
    shutil.rmtree("input", ignore_errors=True)
    os.mkdir("input")
    with contextlib.chdir("input"):
        for command in KINDS[kind](random.Random(f"{kind} {seed} {number}")):
            print("+", *command)
            print(*call(*command))


if __name__ == "__main__":
    run()
