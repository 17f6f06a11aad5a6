"""Sites behind a real SuperLink and real SuperNodes on loopback, with TLS and keys; all of them end with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comfedl.config import Config, parse_config, run_config
from comfedl.sites.certs import make_certs
from comfedl.sites.daemons import MARK
from comfedl.sites.local import Trial, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")]

# A site that fails as a file in its own folder says: it raises, sends NaN, or takes too long.
FAULTY = """
import time
from pathlib import Path

import torch

from comfedl.engines.flower import client_app, wire
from comfedl.sites.local import share
from flwr.app import Message


def load(node):
    fault = Path(str(node["data"]) + ".fault")
    said = fault.read_text() if fault.exists() else ""
    if said == "raise":
        raise ValueError("this site is out of order")
    if said == "slow":
        time.sleep(60)
    return share(node)


def poison(message, context, call):
    reply = call(message, context)
    fault = Path(str(context.node_config["data"]) + ".fault")
    if not (fault.exists() and fault.read_text() == "nan"):
        return reply
    body, tensors = wire.opened(reply.content)
    packed = wire.Packed()
    for part in body.get("answers", ()):
        tree = wire.unpacked(part["reply"], tensors)
        if "model" in tree:
            tree["model"]["params"] = {k: v * torch.nan for k, v in tree["model"]["params"].items()}
        part["reply"] = packed.put(tree)
    return Message(wire.content(body, packed.record()), reply_to=message)


app = client_app(load, mods=[poison])
"""


def config(**more: Any) -> Config:
    return parse_config({
        "rounds": 2,
        "seed": 1,
        "data": {"name": "digits", "partition": "dirichlet", "clients": 3, "alpha": 0.5},
        "algorithm": {"name": "ditto"},
        "flower": {"deadline": 240.0, "patience": 240.0},
        **more,
    })  # fmt: skip


def left_over(mark: str) -> list[str]:
    """The processes that bear a mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(config(rounds=6, flower={"deadline": 30.0, "patience": 240.0}), 3, tmp_path, tmp_path / "run", FAULTY)
    with made.daemons:
        yield made
    assert not left_over(made.daemons.mark)


def training(trial: Trial) -> dict[int, dict[str, Any]]:
    path = trial.out / "sites.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["round"]: row for row in rows if row["step"] == "train"}


def test_the_command_ends_with_the_embedded_model(tmp_path: Path) -> None:
    from comfedl.settings import to_toml

    (tmp_path / "c.toml").write_text(to_toml(config().resolved()))
    command = [sys.executable, "-m", "comfedl", "flower", "local", "c.toml", "--sites", "3", "--out", "run"]
    mark = {MARK: "outer"}  # the trial's own mark takes its place in what it starts
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **mark}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "validation accuracy" in done.stdout
    expected = run_config(config())
    found = load_file(tmp_path / "run" / "model.safetensors")
    for name, part in expected.params.items():
        torch.testing.assert_close(found[name], part, rtol=0, atol=1e-6)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "comfedl-flower-" not in running


def test_sites_that_are_killed_slow_raising_or_bad(trial: Trial) -> None:
    """Site 2 is killed in round 2 and started again; site 1 raises, then sends NaN, then is slow."""
    trial.start_link()
    strangers = trial.folder / "strangers"
    make_certs(strangers, ["stranger"])
    for name in ("stranger.key", "stranger.pub"):
        (strangers / name).rename(trial.folder / "keys" / name)
    stranger = trial.start_node(0, key="stranger")
    assert stranger.wait(120) != 0  # a key that nobody has registered
    for place in range(3):
        trial.start_node(place)
    run = trial.submit()
    fault = trial.folder / "site-1.safetensors.fault"

    def reached(number: int) -> None:
        wait_for(lambda: number in training(trial), 300, f"Round {number} has not come", trial.daemons, "superlink")

    reached(1)
    trial.daemons.kill("site-2")
    fault.write_text("raise")
    reached(2)
    fault.write_text("nan")
    started = time.monotonic()
    while training(trial).keys() < {3}:  # its restart is refused until the server has noticed that it was gone
        node = trial.start_node(2)
        time.sleep(5)
        if node.poll() is None or time.monotonic() - started > 200:
            break
    reached(3)
    fault.write_text("slow")
    reached(4)
    fault.unlink()
    trial.finish(run, 400)
    took_part = {number: row["answered"] for number, row in training(trial).items()}
    names = list(trial.names)
    assert took_part[1] == names
    assert names[2] not in took_part[2]
    assert any(names[2] in answered for number, answered in took_part.items() if number > 2)
    reasons = {number: row["absent"].get(names[1], "") for number, row in training(trial).items()}
    assert any("ValueError" in reason for reason in reasons.values())
    assert (trial.out / "summary.json").exists()
