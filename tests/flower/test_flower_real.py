"""Sites behind a real SuperLink and real SuperNodes on loopback, with TLS and keys; each test stops them all."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch
from safetensors.torch import load_file

import comfedl as cf
from comfedl.config.schema import Config, parse_config, read_config, run_config
from comfedl.flower.certs import make_certs
from comfedl.flower.local_trial import LocalTrial, run_local
from comfedl.flower.processes import TAG, Daemons, free_ports, listening
from comfedl.flower.superlink import wait_for
from comfedl.utils.toml import to_toml

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")]

LONG = 400  # seconds to wait for a condition


def config(**more: Any) -> Config:
    return parse_config({
        "rounds": 3,
        "seed": 1,
        "data": {"name": "digits", "partition": "dirichlet", "clients": 3, "alpha": 0.5},
        "algorithm": {"name": "ditto"},
        "flower": {"deadline": 300.0, "patience": 300.0},
        **more,
    })  # fmt: skip


def left_over(tag: str) -> list[str]:
    """The command lines of all processes with a tag."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def trained(out: Path) -> dict[int, dict[str, Any]]:
    """The record of each round's training; for a repeated round, the last one."""
    path = out / "sites.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["round"]: row for row in rows if row["step"] == "train"}


def lines(out: Path) -> int:
    return len((out / "sites.jsonl").read_text().splitlines())


def until(what: Callable[[], bool], complaint: str) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end, complaint
        time.sleep(0.2)


def assert_model(out: Path, expected: cf.Result) -> None:
    found = load_file(out / "model.safetensors")
    for name, part in expected.params.items():
        torch.testing.assert_close(found[name], part, rtol=0, atol=1e-6)


# The command.


def tags_of(parent: int) -> set[str]:
    """The tags of a process's children."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                words = (entry / "environ").read_bytes().decode().split("\0")
                found |= {word.partition("=")[2] for word in words if word.startswith(f"{TAG}=")}
        except (OSError, UnicodeDecodeError):
            continue
    return found


def test_the_command_can_be_interrupted_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(config().resolved()))
    command = [sys.executable, "-m", "comfedl", "flower", "local", "c.toml", "--sites", "3", "--out", "run"]
    run, tags = tmp_path / "run", set()

    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *more], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
        said = process.communicate(timeout=LONG)
        assert [words for tag in tags for words in left_over(tag)] == []
        return process.returncode, *said

    first = start()  # stopped while it starts
    until(lambda: bool(tags_of(first.pid)) or first.poll() is not None, "nothing was started")
    tags |= tags_of(first.pid)
    assert tags
    first.terminate()
    code, _, errors = ends(first)
    assert code == 130, errors
    assert not run.exists()

    second = start()  # stopped in the middle
    until(lambda: 1 in trained(run) or second.poll() is not None, "the first round has not come")
    tags |= tags_of(second.pid)
    assert len(tags) == 2
    until(lambda: (run / "checkpoint" / "round-000000001").is_dir() or second.poll() is not None, "no checkpoint")
    second.send_signal(signal.SIGINT)
    code, _, errors = ends(second)
    assert (code, errors.splitlines()[-1].split(";")[0]) == (130, "interrupted"), errors
    assert not (run / "summary.json").exists()

    third = start("--resume")
    until(lambda: bool(tags_of(third.pid)) or third.poll() is not None, "nothing was started")
    tags |= tags_of(third.pid)
    code, printed, errors = ends(third)
    assert code == 0, errors
    assert "validation accuracy" in printed
    assert "round 3 of 3, train: 3 sites" in errors and "round 1 of 3" not in errors
    assert_model(run, run_config(config()))
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert {path.name for path in (run / "sites").iterdir()} == {"client-0", "client-1", "client-2"}
    assert not (run / "personal").exists()  # personal models stay at the sites


def test_sites_under_secure_aggregation(tmp_path: Path) -> None:
    method = {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}}
    settings = config(rounds=2, algorithm=method, secure_aggregation={"threshold": 0.6})
    told: list[str] = []
    run_local(settings, tmp_path / "run", 3, tell=told.append)
    assert_model(tmp_path / "run", run_config(settings))
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [row["participants"] for row in rows] == [3, 3]
    assert "validation.accuracy.mean" in rows[0] and "validation.accuracy.worst" not in rows[0]
    assert (tmp_path / "run" / "clients.jsonl").read_text() == ""
    assert len([*(tmp_path / "run" / "sites").glob("*/*.keys.json")]) == 3


# Faults.

# A site that fails as its .plan file says, which maps rounds to faults.
FAULTY = """
import json
import time
from pathlib import Path

import torch

from comfedl.flower import client_app, serialization
from comfedl.flower.local_trial import load_site
from flwr.app import Message


def fail(message, context, call):
    data = Path(str(context.node_config["data"]))
    plan = data.with_suffix(".plan")
    group = message.metadata.group_id
    fault = json.loads(plan.read_text()).get(group) if plan.exists() else None
    if fault == "wait":
        data.with_suffix(".waits").touch()
        while not data.with_suffix(".go").exists():
            time.sleep(0.1)
    if fault == "raise":
        raise ValueError("this site is out of order")
    reply = call(message, context)
    if fault == "nothing":
        return None
    if fault in ("nan", "shapes"):
        body, tensors = serialization.decode(reply.content)
        packer = serialization.TensorPacker()
        for part in body["answers"]:
            tree = serialization.unpack(part["reply"], tensors)
            if "model" in tree:
                change = (lambda leaf: leaf * torch.nan) if fault == "nan" else (lambda leaf: leaf[:1])
                tree["model"]["params"] = {name: change(leaf) for name, leaf in tree["model"]["params"].items()}
            part["reply"] = packer.add(tree)
        return Message(serialization.encode(body, packer.record()), reply_to=message)
    return reply


app = client_app(load_site, mods=[fail])
"""


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[LocalTrial]:
    settings = config(rounds=6, eval_every=1, quorum=0.3, flower={"deadline": 60.0, "patience": 300.0})
    made = LocalTrial(settings, 3, tmp_path, tmp_path / "run", FAULTY)
    with made.daemons:
        yield made
    assert left_over(made.daemons.tag) == []


def plan(trial: LocalTrial, site: str, faults: Mapping[int, str]) -> None:
    (trial.folder / f"{site}.plan").write_text(json.dumps({f"round {k}": fault for k, fault in faults.items()}))


def refused(daemons: Daemons, name: str, words: list[str]) -> None:
    """Check that a SuperNode started with these options is rejected."""
    node = daemons.start(name, words)
    assert node.wait(LONG) != 0
    log = daemons.log(name).read_text()
    assert "SuperNode ID" not in log, log


@pytest.mark.long
def test_sites_fail_in_every_way_and_come_back(trial: LocalTrial) -> None:
    daemons = trial.daemons
    plan(trial, "site-0", {5: "wait"})  # until the killed one is back
    plan(trial, "site-1", {1: "shapes", 2: "wait", 3: "raise", 4: "nothing", 5: "nan"})
    plan(trial, "site-2", {2: "wait"})
    trial.start_link()
    for site in trial.sites:
        trial.start_node(site)
    run = trial.submit()

    def waits(site: str) -> bool:
        return (trial.folder / f"{site}.waits").exists()

    wait_for(lambda: waits("site-1") and waits("site-2"), LONG, "Round 2 has not come", daemons, "superlink")
    daemons.kill("site-2")  # during its step
    (trial.folder / "site-2.plan").unlink()

    # Meanwhile, intruders: one without a key, one with an unregistered key.
    make_certs(trial.folder / "strangers", ["stranger"])
    port, keys = free_ports(1)[0], trial.folder / "keys"
    words = ["flower-supernode", "--superlink", f"127.0.0.1:{trial.port}", "--root-certificates", str(keys / "ca.crt")]
    words += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--node-config",
        f'data="{trial.folder / "site-2.safetensors"}"',
    ]
    refused(daemons, "no-key", words)
    refused(
        daemons, "wrong-key", [*words, "--auth-supernode-private-key", str(trial.folder / "strangers" / "stranger.key")]
    )

    def restart() -> bool:  # refused until the server notices that the old node is gone
        before = daemons.log("site-2").read_text().count("SuperNode ID")
        node = trial.start_node("site-2")
        until(
            lambda: node.poll() is not None or daemons.log("site-2").read_text().count("SuperNode ID") > before,
            "the SuperNode neither ends nor comes in",
        )
        return node.poll() is None

    until(restart, "the site that was killed does not come in again")
    wait_for(lambda: 2 in trained(trial.out), LONG, "Round 2 does not end", daemons, "superlink")
    for site in ("site-1", "site-0"):
        (trial.folder / f"{site}.go").touch()
    trial.wait(run, LONG)

    rows, (first, second, third) = trained(trial.out), trial.names
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert rows[1]["answered"] == rows[6]["answered"] == [first, second, third]
    assert rows[2]["answered"] == [first]
    assert rows[2]["absent"][second] == "no answer within 60 seconds"
    assert third in rows[2]["absent"]
    assert rows[3]["absent"][second] == "ValueError (see the site's log)"
    assert rows[4]["absent"][second] == "ConfigError: A mod returned NoneType instead of a reply"
    assert third in rows[5]["answered"] or third in rows[6]["answered"]
    log = daemons.log("run").read_text()
    assert f"site '{third}' is left out of 'train'" in log
    assert re.search(rf"Round 1: refused the reply of client '{second}': .* and not", log)
    assert re.search(rf"Round 5: refused the reply of client '{second}': .*not finite", log)
    with (trial.out / "clients.jsonl").open() as file:
        weights = {(row["round"], row["client"]): row["weight"] for row in map(json.loads, file)}
    assert weights[5, second] == 0  # its reply was refused
    assert weights[6, first] > 0 and weights[6, second] > 0 and weights[6, third] > 0
    assert json.loads((trial.out / "summary.json").read_text())["rounds"] == 6


def test_adapters_of_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the adapters travel and are saved; the sites build the frozen model themselves."""
    pytest.importorskip("peft", reason="needs the extra adapters")
    code = str(Path(__file__).parents[1])  # for the sites, which import the model
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([code, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    settings = config(
        data={"name": "helpers.inputs:for_config", "case": "lora"},
        model={"name": "helpers.inputs:lora"},
        algorithm={"name": "ditto", "batch_size": 4},
        save_frozen=False,
    )
    made = LocalTrial(settings, 3, tmp_path, tmp_path / "run")
    with made.daemons:
        made.start_link()
        for site in made.sites:
            made.start_node(site)
        made.wait(made.submit(), LONG)
    assert left_over(made.daemons.tag) == []
    result, found = run_config(settings), load_file(tmp_path / "run" / "model.safetensors")
    expected = result.state_dict()
    trained = {name for name in result.params if "lora" in name or "classifier" in name}
    assert found.keys() >= trained - {name for name in trained if "original_module" in name}
    assert not any("embeddings.word" in name for name in found)  # but its buffers are there
    for name, part in found.items():
        torch.testing.assert_close(part, expected[name], rtol=0, atol=1e-6)


# An app written by ``comfedl flower new``, run with the commands of its README.


class Site:
    """Runs the commands of an app's README on this machine."""

    def __init__(self, app: Path, names: list[str]) -> None:
        self.app, self.names = app, names
        self.daemons = Daemons(app.parent / "work")
        ports = free_ports(len(names) + 1)
        self.port, self._ports = ports[0], dict(zip(names, ports[1:], strict=True))
        text = (app / "README.md").read_text().replace("\\\n", " ")
        self.lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        start = self.lines.index("[superlink.ours]")
        (self.daemons.folder / "flwr" / "config.toml").write_text(
            "\n".join(map(self.adapted, self.lines[start : start + 3]))
        )

    def adapted(self, line: str, site: str = "north") -> str:
        replacements = {
            "0.0.0.0": "127.0.0.1",
            "server.example.org": "127.0.0.1",
            "8000": str(self.port),
            "9094": str(self._ports[site]),
            "keys/": f"{self.app}/keys/",
            " ca.crt": f" {self.app}/keys/ca.crt",
            " north.key": f" {self.app}/keys/north.key",
            "/data/north": f"{self.app.parent}/data/north",
            "/var/lib/comfedl": f"{self.app.parent}/state/north",
            "/etc/comfedl/": f"{self.app}/keys/",
            "/srv/runs": f"{self.app.parent}/runs",
        }
        for old, new in replacements.items():
            line = line.replace(old, new)
        return line.replace("north", site)

    def start(self, name: str, beginning: str, site: str = "north", place: int = 0) -> subprocess.Popen[bytes]:
        line = [line for line in self.lines if line.startswith(beginning)][place]
        return self.daemons.start(name, shlex.split(self.adapted(line, site)), self.app)

    def start_link(self) -> None:
        self.start("superlink", "flower-superlink")
        until(lambda: listening(self.port), "the SuperLink does not listen")

    def start_node(self, name: str) -> None:
        self.start(name, "flower-supernode", name)

    def run(self, resume: bool = False) -> subprocess.Popen[bytes]:
        return self.start("run", "flwr run", place=int(resume))


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Site]:
    comfedl = [sys.executable, "-m", "comfedl", "flower"]
    names = ["north", "south", "west"]
    subprocess.run([*comfedl, "new", "our-study"], cwd=tmp_path, check=True, capture_output=True)
    app = tmp_path / "our-study"
    subprocess.run([*comfedl, "certs", "keys", "--sites", ",".join(names)], cwd=app, check=True, capture_output=True)
    settings = app / "our_study" / "config.toml"
    text = settings.read_text().replace("rounds = 50", "rounds = 3\nquorum = 0.9")
    assert 'name = "robust"\ngamma = ' in text
    assert '# keys = "/srv/keys/sites.json"' in text
    text = text.replace('# keys = "/srv/keys/sites.json"', f'keys = "{app}/keys/sites.json"')
    settings.write_text(re.sub(r'name = "robust"\ngamma = .*', 'name = "ditto"', text))
    made = Site(app, names)
    with made.daemons:
        yield made
    assert left_over(made.daemons.tag) == []


def test_a_killed_server_and_a_run_below_the_quorum_resume(study: Site) -> None:
    out = study.app.parent / "runs" / "first"
    study.start_link()
    for name in study.names:
        assert study.start("register", "flwr supernode register", name).wait(LONG) == 0, study.daemons.log_tail(
            "register"
        )
        study.start_node(name)
    run = study.run()
    first = out / "checkpoint" / "round-000000001"  # written once its evaluation has come, with round 2's training
    until(lambda: (2 in trained(out) and first.is_dir()) or run.poll() is not None, "round 2 has not come")
    assert first.is_dir(), study.daemons.log_tail("run")
    study.daemons.kill("superlink")  # with the server's app, in the middle of round 3
    assert not (out / "summary.json").exists()

    study.start_link()
    run = study.run(resume=True)
    before = lines(out)
    until(lambda: lines(out) > before or run.poll() is not None, "round 2 is not done again")
    assert lines(out) > before, study.daemons.log_tail("run")
    study.daemons.end("west")
    said = "only 2 of 3 clients can be used"
    until(lambda: said in study.daemons.log("run").read_text(), "the run does not stop under its quorum")
    assert not (out / "summary.json").exists()

    study.start_node("west")
    study.run(resume=True)
    until(lambda: (out / "summary.json").exists(), "the run does not end")
    assert_model(out, embedded(study))
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for name in study.names:  # a client's state is in its site's folder
        assert [path.name for path in (study.app.parent / "state" / name).iterdir()] == [name]


def embedded(study: Site) -> cf.Result:
    """The same run with all sites' data in this process."""
    path = study.app / "our_study" / "data.py"
    spec = importlib.util.spec_from_file_location("our_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = {name: module.load_my_site({"site": name}) for name in study.names}
    fed = cf.FederatedData(
        train={name: part.train[name] for name, part in parts.items()},
        validation={name: part.validation[name] for name, part in parts.items()},
    )
    settings = read_config(study.app / "our_study" / "config.toml")
    return cf.fit(settings.make_model(fed), fed, settings.make_algorithm(), rounds=settings.rounds, seed=settings.seed)
