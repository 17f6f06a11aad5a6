"""The quickstart in examples/ behind a real SuperLink and two SuperNodes, with TLS and keys; killed and resumed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch
from safetensors.torch import load_file

import comfedl as cf
from comfedl.flower.superlink import Network

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")]

APP = Path(__file__).parents[2] / "examples" / "flower_quickstart"
LONG = 400  # seconds to wait for a condition
ROUNDS, STEPS, LR, GAMMA = 3, 4, 0.1, 0.1
SITES = {f"site-{k}": {"partition-id": k, "num-partitions": 2} for k in range(2)}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path, SITES)  # type: ignore[arg-type]
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    with made.daemons:
        made.start_link()
        for site in SITES:
            made.start_node(site)
        yield made


def start(network: Network, resume: bool) -> subprocess.Popen[bytes]:
    # Batches of all data make the clients deterministic, up to the order of their sums.
    options = f"num-server-rounds={ROUNDS} local-steps={STEPS} learning-rate={LR} gamma={GAMMA} batch-size=100000 "
    options += f"out={json.dumps(str(network.folder / 'run'))} resume={str(resume).lower()}"
    command = ["run", str(network.folder / "app"), "trial", "--stream", "-c", options]
    return network.start_flwr("run", [command])


def until(what: Callable[[], bool], run: subprocess.Popen[bytes], network: Network) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert (time.monotonic() < end and run.poll() is None) or what(), network.daemons.log_tail("run")
        time.sleep(0.2)


def phases(network: Network) -> list[tuple[int, str]]:
    path = network.folder / "run" / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(row["round"], row["phase"]) for row in (json.loads(line) for line in lines if line.endswith("\n"))]


def task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task", APP / "quickstart" / "task.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["task"] = module
    spec.loader.exec_module(module)
    return module


def simulated() -> tuple[cf.Result, dict[str, float]]:
    """The same training in this process, and the accuracy of its model at each site."""
    quickstart = task()
    train, test = (
        {f"site-{k}": quickstart.load_data(k, 2, 100_000)[split].dataset.tensors for k in range(2)} for split in (0, 1)
    )
    torch.manual_seed(0)
    model = quickstart.Net()
    method = cf.Robust(GAMMA, lr=LR, local_steps=STEPS, batch_size=None, memory=None)
    result = cf.fit(model, cf.FederatedData(train, test), method, rounds=ROUNDS)
    rows = {row["client"]: row["validation.accuracy"] for row in result.clients if row["round"] == ROUNDS}
    return result, rows


def test_the_quickstart_is_killed_resumed_and_ends_where_the_simulation_does(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(network, resume=False)
    until(lambda: (2, "train") in phases(network), run, network)
    network.daemons.kill("superlink")  # with the server's app, as a power cut would
    assert not (network.folder / "run" / "final_model.safetensors").exists()
    before = phases(network)

    monkeypatch.setattr(
        network, "run_flwr", lambda *commands: None
    )  # the keys are registered: they are in its database
    network.start_link()
    run = start(network, resume=True)
    final = network.folder / "run" / "final_model.safetensors"
    until(final.exists, run, network)
    after = phases(network)
    assert after[: len(before)] == before  # nothing that was done was done again
    assert sorted(after) == [(k, phase) for k in range(1, ROUNDS + 1) for phase in ("evaluate", "train")]

    expected, accuracies = simulated()
    found, state = load_file(final), expected.state_dict()
    assert found.keys() == state.keys()
    for name, part in state.items():
        torch.testing.assert_close(found[name], part, rtol=0, atol=1e-5)
    last = json.loads((network.folder / "run" / "history.jsonl").read_text().splitlines()[-1])
    assert last["metrics"]["eval_acc.worst"] == pytest.approx(min(accuracies.values()), abs=1e-6)
    log = network.daemons.log("run")
    for words in ("RobustStrategy continues after round", "accuracy: mean"):  # the log comes a little later
        until(lambda words=words: words in log.read_text(), run, network)
