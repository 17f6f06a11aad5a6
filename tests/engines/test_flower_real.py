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
    time.sleep({"slow": 55, "pace": 6}.get(said, 0))
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
    made = Trial(config(rounds=6, flower={"deadline": 40.0, "patience": 240.0}), 3, tmp_path, tmp_path / "run", FAULTY)
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


def reached(trial: Trial, number: int) -> None:
    wait_for(lambda: number in training(trial), 300, f"Round {number} has not come", trial.daemons, "superlink")


def started(trial: Trial) -> Any:
    trial.start_link()
    for place in range(3):
        trial.start_node(place)
    return trial.submit()


def test_a_site_that_is_killed_takes_part_again(trial: Trial) -> None:
    fault = trial.folder / "site-0.safetensors.fault"
    fault.write_text("pace")  # rounds of some seconds more, so that the other one is back in time
    run = started(trial)
    reached(trial, 1)
    trial.daemons.kill("site-2")
    until = time.monotonic() + 200
    while time.monotonic() < until:  # it is refused until the server has noticed that it was gone
        node = trial.start_node(2)
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            break
    trial.finish(run, 400)
    took_part = {number: row["answered"] for number, row in training(trial).items()}
    first, second, third = trial.names
    assert sorted(took_part) == [1, 2, 3, 4, 5, 6]
    assert took_part[1] == took_part[6] == [first, second, third]
    assert took_part[2] == [first, second]
    assert training(trial)[2]["absent"].keys() == {third}


def test_sites_that_raise_send_nan_or_are_slow_and_one_with_a_wrong_key(trial: Trial) -> None:
    make_certs(trial.folder / "strangers", ["stranger"])
    for name in ("stranger.key", "stranger.pub"):
        (trial.folder / "strangers" / name).rename(trial.folder / "keys" / name)
    fault = trial.folder / "site-1.safetensors.fault"
    run = started(trial)
    reached(trial, 1)
    fault.write_text("raise")
    stranger = trial.start_node(0, key="stranger", name="stranger")
    reached(trial, 2)
    fault.write_text("nan")
    reached(trial, 3)
    fault.write_text("slow")
    reached(trial, 4)
    fault.unlink()
    trial.finish(run, 400)
    assert stranger.wait(60) != 0  # nobody has registered its key
    rows, bad = training(trial), trial.names[1]
    reasons = " ".join(row["absent"].get(bad, "") for row in rows.values())
    assert "ValueError" in reasons and "time" in reasons
    with (trial.out / "clients.jsonl").open() as file:
        weights = {(row["round"], row["client"]): row["weight"] for row in map(json.loads, file)}
    refused = [number for number, row in rows.items() if bad in row["answered"] and weights.get((number, bad), 0) == 0]
    assert refused, "the reply with NaN was used"
    assert rows[1]["answered"] == list(trial.names)
    assert all(len(row["answered"]) >= 2 for row in rows.values())
