"""Damages a run's folder at random and uses it: every command must end with an answer or one sentence, and soon.

    python -m benchmarks.mutations --count 600

Prints each damage that ended in an unexpected error or took longer than ten seconds, and how many there were. The tests
run some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from comfedl.cli.main import DEBUG, main

SECONDS = 10.0  # what a command may take
CONFIG = """
rounds = 4
seed = 1
eval_every = 1
checkpoint_every = 2

[data]
name = "csv"
path = "rows.csv"
client = "site"
target = "outcome"

[model]
name = "mlp"
hidden = [4]

[algorithm]
name = "ditto"
lr = 0.1
local_steps = 2
"""
# What numbers and texts are replaced by.
VALUES = (
    *("-1", "0", "1e999", "NaN", "null", "true", '"x"', "[]", "{}", "[[[[]]]]", "9" * 30, "9" * 5000, "1e-300"),
    *("[1, 2]", '{"a": 1}', "9223372036854775807", "9223372036854775808", "99999999", '"os:getcwd"', "1979-05-27"),
)


@dataclass(frozen=True)
class Failure:
    """A command that did not end as it should."""

    number: int
    damage: str
    command: str
    said: str


def make_run(folder: Path) -> None:
    """A small run of a table with a text column, and files to use it on."""
    draw = random.Random(0)
    lines = ["site,age,ward,outcome"]
    for k in range(60):
        age = draw.gauss(60, 10)
        lines.append(f"{'abc'[k % 3]},{age:.1f},{draw.choice('xy')},{'ill' if age > 60 else 'well'}")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIG)
    code, said = call("run", "run.toml", "--out", "whole")
    if code:
        raise RuntimeError(said)


def call(*arguments: str) -> tuple[int, str]:
    """The command line in this process: its exit code and what it wrote."""
    text = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["comfedl", *arguments]),
        mock.patch.dict(os.environ, {DEBUG: "1"}),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), text.getvalue()
        except BaseException as error:
            return 1, f"{type(error).__name__}: {error}"
    return 0, text.getvalue()


def flip(data: bytearray, draw: random.Random) -> str:
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    return f"bit flipped at {place}"


def cut(data: bytearray, draw: random.Random) -> str:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 5, 50, len(data)))]
    return f"cut at {start}"


def insert(data: bytearray, draw: random.Random) -> str:
    place = draw.randrange(len(data))
    data[place:place] = draw.choice(
        (b"\0", b"\xff\xfe", b"[" * 3000, b"{", b'"', b"\n", b"\r\n", b"# ", draw.randbytes(20))
    )
    return f"bytes inserted at {place}"


def put(data: bytearray, draw: random.Random) -> str:
    """Replace a number or a text by something else."""
    found = [*re.finditer(rb'-?\d[\d.e+-]*|"[^"\n]*"', bytes(data))]
    if not found:
        return flip(data, draw)
    token, value = draw.choice(found), draw.choice(VALUES)
    data[token.start() : token.end()] = value.encode()
    return f"{token[0][:20].decode(errors='replace')} at {token.start()} replaced by {value[:30]}"


def swap_lines(data: bytearray, draw: random.Random) -> str:
    lines = bytes(data).splitlines(keepends=True)
    draw.shuffle(lines)
    data[:] = b"".join(lines)
    return "lines shuffled"


DAMAGES: Sequence[Callable[[bytearray, random.Random], str]] = (flip, cut, insert, put, put, put, put, swap_lines)


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one file of a run, and mend the checksum of a checkpoint as an attacker would."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    texts = [path for path in files if path.suffix != ".safetensors"]
    path = draw.choice(texts if draw.random() < 0.7 else files)
    name = path.relative_to(folder).as_posix()
    if draw.random() < 0.05:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
        return f"{name}: removed"
    data = bytearray(path.read_bytes())
    checked = path.name == "meta.json" and draw.random() < 0.8
    if checked:
        data = data[data.index(b"\n") + 1 :]
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        said = draw.choice(DAMAGES)(data, draw) if data else "emptied"
    if checked:
        data = bytearray(hashlib.sha256(data).hexdigest().encode() + b"\n") + data
    path.write_bytes(bytes(data))
    if path.suffix == ".safetensors" and (meta := path.with_name("meta.json")).exists() and draw.random() < 0.8:
        described = json.loads(meta.read_bytes().partition(b"\n")[2])
        described["sha256"] = hashlib.sha256(data).hexdigest()
        text = json.dumps(described).encode()
        meta.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    return f"{name}: {said}"


COMMANDS: Sequence[Sequence[str]] = (
    ("evaluate", "damaged"),
    ("predict", "damaged", "rows.csv", "--client", "a", "--force"),
    ("personalise", "damaged", "--data", "rows.csv", "--steps", "1", "--force"),
    ("report", "damaged"),
    ("run", "run.toml", "--out", "damaged", "--resume"),
)


def failures(count: int, seed: int = 0) -> Iterator[Failure]:
    """Damage a run this many times, and yield what did not end in an answer or one sentence."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            make_run(Path(scratch))
            for number in range(count):
                yield from _one(number, random.Random(f"{seed} {number}"))
        finally:
            os.chdir(before)


def _one(number: int, draw: random.Random) -> Iterator[Failure]:
    shutil.copytree("whole", "damaged")
    if draw.random() < 0.3:  # a run that has not finished is read from its checkpoint
        Path("damaged/summary.json").unlink()
    done = damage(Path("damaged"), draw)
    for command in COMMANDS:
        began = time.perf_counter()
        code, said = call(*command)
        took = time.perf_counter() - began
        if code not in (0, 2) or (code and "error: " not in said) or "Traceback" in said or took > SECONDS:
            yield Failure(
                number, done, " ".join(command), f"exit code {code} after {took:.1f} s: {said.strip()[-300:]}"
            )
    shutil.rmtree("damaged")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = list(failures(arguments.count, arguments.seed))
    for failure in found:
        print(f"{failure.number}: {failure.damage}; {failure.command}: {failure.said}")
    print(f"{len(found)} failures of {arguments.count * len(COMMANDS)} commands on {arguments.count} damaged folders")
    sys.exit(bool(found))


if __name__ == "__main__":
    run()
