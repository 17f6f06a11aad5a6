"""The comparison with peers: its machinery on a tiny workload, and that all sides do the same work. No times."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import comfedl as cf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is run from the root and is not installed

from benchmarks import attacks, evaluation, sites, speed  # noqa: E402
from benchmarks.peers import driver, loops, report, venvs  # noqa: E402
from benchmarks.peers.__main__ import arguments, kept  # noqa: E402
from benchmarks.peers.ours import First, Stop, federated, method  # noqa: E402
from benchmarks.workloads import WORKS, Work, build, data, parts  # noqa: E402

SMALL = {name: Work("cnn4", (3, 16, 16), 2, 4, name) for name in ("first", "exact")} | {
    "plain": WORKS["W0"],
    "transformer": Work("transformer", (6,), 2, 4, vocabulary=9),
    "resnet8": Work("resnet8", (3, 8, 8), 2, 4),
    "lstm": Work("lstm", (6,), 2, 4, vocabulary=9, classes=9),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command prints and where it writes, for ourselves and the loop on the tiny workload."""
    out = tmp_path_factory.mktemp("peers")
    command = "-m benchmarks.peers --works W0 --peers ours loop --repeats 3 --seconds 0.02 --limit 120"
    source = Path(cf.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *command.split(), "--out", str(out / "results")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, out / "results"


def test_the_command_writes_every_sample_and_what_was_counted(run: tuple[str, Path]) -> None:
    results = json.loads((run[1] / "peers.json").read_text())
    assert {"cpu", "cores", "torch", "commit", "date"} <= set(results["machine"])
    for peer in ("ours", "loop"):
        record = results["works"]["W0"][peer]
        assert record["status"] == "ok"
        assert [sample["turn"] for sample in record["samples"]] == [0, 1, 2]
        assert all(sample["rounds"] >= 1 and sample["wall_s"] > 0 for sample in record["samples"])
        assert record["checks"]["passes"] == {"4": 15}  # three clients, five steps, batches of four
        assert record["checks"]["moved"] > 0 and record["peak_mb"] > 50 and record["start_s"] > 0
    assert results["works"]["W0"]["loop"]["checks"]["optimizer_steps"] == 15
    assert results["works"]["W0"]["ours"]["checks"]["apart"] < 1e-5


def test_the_table_the_csv_and_the_json_say_the_same(run: tuple[str, Path]) -> None:
    printed, out = run
    results = json.loads((out / "peers.json").read_text())["works"]["W0"]
    rows = {row["peer"]: row for row in csv.DictReader((out / "peers.csv").read_text().splitlines())}
    ratio = report.spread(report.ratios(results["loop"], results["ours"]))
    assert float(rows["loop"]["ratio"]) == pytest.approx(ratio.median, rel=1e-3)
    assert float(rows["ours"]["ratio"]) == 1 and rows["loop"]["work_done"] == "the same"
    assert printed.strip() == (out / "peers.md").read_text().strip()
    assert f"({ratio.median:.2f}; {ratio.low:.2f} to {ratio.high:.2f}) |" in printed


def test_ratios_are_taken_turn_by_turn() -> None:
    def record(*seconds: float, rounds: int, first: int = 0) -> dict[str, object]:
        samples = [{"turn": first + i, "cpu_s": s, "wall_s": 9.0, "rounds": rounds} for i, s in enumerate(seconds)]
        return {"status": "ok", "samples": samples, "note": ""}

    ours, peer = record(1.0, 2.0, 4.0, rounds=10), record(3.0, 8.0, rounds=5, first=1)  # it lost its first turn
    assert report.per_round(ours) == {0: 100.0, 1: 200.0, 2: 400.0}
    assert report.ratios(peer, ours) == [3.0, 4.0]
    found = {row["peer"]: row for row in report.rows({"W1": {"ours": ours, "pfl": peer}})}
    assert found["pfl"]["ratio"] == 3.5 and (found["pfl"]["ratio_q1"], found["pfl"]["ratio_q3"]) == (3.25, 3.75)
    assert found["pfl"]["cpu_ms"] == 1100.0 and found["ours"]["cpu_ms"] == 200.0


def test_works_of_one_name_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Fake:
        def __init__(self, python: Path, peer: str, work: str, plan: driver.Plan) -> None:
            self.what = work, peer

        def ask(self, order: str | None = None) -> dict[str, float]:
            if order is None:
                return {"round_s": 0.5}
            asked.append(self.what)
            if self.what == ("W4 exact", "loop") and len(asked) > 4:
                raise driver.Lost("gone")
            return {"rounds": int(order.split()[1]), "cpu_s": 3.0 if "exact" in self.what[0] else 2.0, "wall_s": 9.0}

        def stop(self) -> dict[str, float]:
            return {"peak_mb": 1.0, "start_s": 1.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(driver, "Worker", Fake)
    plan = driver.Plan(repeats=3, seconds=1.0)
    found = driver.measure(["W4 first", "W4 exact"], ["ours", "loop"], plan, lambda peer: Path(peer))
    pairs = [(work, peer) for peer in ("ours", "loop") for work in ("W4 first", "W4 exact")]
    assert asked[:4] == pairs and asked[4:8] == pairs[2:] + pairs[:2]  # a peer's are next to one another
    assert sorted(asked[8:]) == sorted(pairs[:3])  # who is lost takes no more turns, and the others go on
    assert [found["W4 exact"][peer]["status"] for peer in ("ours", "loop")] == ["ok", "failed"]
    assert [sample["rounds"] for sample in found["W4 exact"]["ours"]["samples"]] == [2, 2, 2]
    assert "Exact over first order of W4, ours: 1.50 (1.50 to 1.50)." in report.as_markdown(found, MACHINE)
    assert "Exact over" not in report.as_markdown({"W4 exact": found["W4 exact"]}, MACHINE)


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    plan, machine = {"repeats": 3}, {**MACHINE, "date": "today"}
    works = {"W1": {"ours": {}, "pfl": {}}, "W2": {"ours": {}}}
    (tmp_path / "peers.json").write_text(json.dumps({"plan": plan, "machine": machine, "works": works}))
    now = {"plan": plan, "machine": {**machine, "date": "tomorrow"}}
    assert list(kept(tmp_path, now, ["pfl", "ours"])) == ["W1"]  # W2 lacks a peer
    assert kept(tmp_path, {**now, "plan": {"repeats": 4}}, ["pfl", "ours"]) == {}
    assert kept(tmp_path, {**now, "machine": {**machine, "commit": "def"}}, ["pfl", "ours"]) == {}
    assert kept(tmp_path / "none", now, ["ours"]) == {}


def test_the_page_has_what_was_aimed_at_and_what_came_out(tmp_path: Path) -> None:
    def record(seconds: float) -> dict[str, object]:
        return {"status": "ok", "samples": [{"turn": 0, "cpu_s": seconds, "wall_s": 1.0, "rounds": 1}], "note": ""}

    works = {
        "W5": {"ours": record(1.0), "loop": record(1.2), "pfl": record(2.0)},
        "W1": {p: record(7.0) for p in ("pfl", "loop")},
    }
    works["W1"]["ours"] = record(1.0)
    (tmp_path / "peers.json").write_text(json.dumps({"works": works, "machine": MACHINE}))
    for name in ("cores", "ranks"):
        (tmp_path / f"{name}.md").write_text(f"The table of {name}.\n")
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    speed.write_page(page, tmp_path)
    text = page.read_text()
    assert "| W5 | 1.3 times loop | 1.20 (loop) | **missed** |" in text
    assert "| W1 | 6 times pfl and loop | 7.00 (pfl) | reached |" in text or "7.00 (loop)" in text
    assert "The table of cores.\n\nThe table of ranks." in text and "## How cost grows" in text
    speed.write_page(page, tmp_path)  # again is the same
    assert page.read_text() == text
    with pytest.raises(SystemExit, match="has no part"):
        speed.filled("An empty page.", "cores", "")


def test_a_measurement_of_another_commit_is_done_again(tmp_path: Path) -> None:
    place = tmp_path / "cores.json"
    assert not speed.is_done(place, "abc", ["W3"])
    place.write_text(json.dumps({"machine": {"commit": "abc"}, "works": {"W3": {}}}))
    assert speed.is_done(place, "abc", ["W3"])
    assert not speed.is_done(place, "def", ["W3"]) and not speed.is_done(place, "abc", ["W3", "W5"])


def test_less_work_is_told() -> None:
    def did(passes: dict[str, int], moved: float) -> dict[str, object]:
        return {"checks": {"passes": passes, "moved": moved}}

    ours = did({"50": 50}, 0.4)
    assert report.work_done("W1", "pfl", {"ours": ours, "pfl": did({"50": 50}, 0.41)}) == "the same"
    assert "{50: 40} instead of {50: 50}" in report.work_done("W1", "pfl", {"ours": ours, "pfl": did({"50": 40}, 0.4)})
    assert "0.50 times as far" in report.work_done("W1", "pfl", {"ours": ours, "pfl": did({"50": 50}, 0.2)})


def test_a_peer_that_cannot_is_named_with_the_reason() -> None:
    def python(peer: str) -> Path:
        if peer == "fluke":
            raise venvs.NotBuilt("pip install fluke-fl failed: no network")
        return Path(sys.executable)

    plan = driver.Plan(repeats=1, seconds=0.01, limit=60)
    records = driver.measure(["W4 first"], ["flwr", "fluke"], plan, python)["W4 first"]
    assert records["flwr"]["status"] == "lacks" and "no MAML" in records["flwr"]["note"]
    assert records["fluke"]["status"] == "failed" and "no network" in records["fluke"]["note"]
    records = driver.measure(["W0"], ["loop"], driver.Plan(limit=0.01), python)["W0"]
    assert (records["loop"]["status"], records["loop"]["note"]) == ("late", "no second round in 0.01 s")
    records = driver.measure(["W9"], ["lean"], plan, python)["W9"]  # its process fails
    assert records["lean"]["status"] == "failed" and "KeyError: 'W9'" in records["lean"]["note"]
    shown = {"loop": {"status": "late", "samples": [], "note": "no second round in 9 s"}}
    text = report.as_markdown({"W0": {**shown, "pfl": {"status": "failed", "samples": [], "note": "gone"}}}, MACHINE)
    assert "| no second round in 9 s |" in text and "| failed |" in text and "W0, pfl: gone." in text


MACHINE = {"cpu": "a core", "torch": "2", "commit": "abc", "date": "today"}


@pytest.mark.parametrize("work", SMALL.values(), ids=SMALL)
def test_the_two_loops_are_the_same_method(work: Work) -> None:
    models = []
    torch.set_default_dtype(torch.float64)
    try:
        for make in (loops.loop_round, loops.lean_round):
            server, round = make(work)
            round()
            models.append(torch.cat([part.detach().flatten() for part in server.parameters()]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(models[0], models[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("work", SMALL.values(), ids=SMALL)
def test_the_loop_moves_as_far_as_fit(work: Work) -> None:
    start = torch.cat([part.detach().flatten() for part in build(work).parameters()])
    server, round = loops.loop_round(work)
    round()
    first = First()
    with pytest.raises(Stop):
        cf.fit(build(work), federated(work), method(work), rounds=2, eval_every=2, callbacks=[first])
    theirs = torch.cat([part.detach().flatten() for part in server.parameters()])
    ours = torch.cat([part.flatten() for part in first.params.values()])
    assert 0.75 < float((theirs - start).norm() / (ours - start).norm()) < 1.33


def test_the_models_are_those_of_the_library() -> None:
    for name, model in (("W1", "logistic"), ("W3", "cnn4")):
        work = WORKS[name]
        plain, ours = build(work), cf.models.build(model, work.shape, 10, seed=0)
        x = torch.randn(7, *work.shape)
        assert [n for n, _ in plain.named_parameters()] == [n for n, _ in ours.named_parameters()]
        assert torch.equal(plain(x), ours(x))


def test_an_epoch_is_the_local_steps() -> None:
    for work in WORKS.values():
        assert work.samples == 5 * work.batch
    assert [len(y) for _, y in parts(WORKS["W0"])] == [20, 20, 20]
    assert data(WORKS["W0"])[1].unique().numel() > 1


def test_an_environment_that_is_there_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def install(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append([str(part) for part in command])
        return subprocess.CompletedProcess(command, 0, stdout='[{"name": "pfl", "version": "0.6.0"}]', stderr="")

    monkeypatch.setattr(venvs.venv, "create", lambda place, **_: (place / "bin").mkdir(parents=True))
    monkeypatch.setattr(venvs.subprocess, "run", install)
    python = venvs.interpreter("pfl", tmp_path, "2.13.0")
    assert python == tmp_path / "pfl" / "bin" / "python"
    assert [call[-2:] for call in calls[:2]] == [["torch==2.13.0", "numpy"], ["pfl==0.6.0", "torch==2.13.0"]]
    assert venvs.versions("pfl", tmp_path) == {"pfl": "0.6.0"}
    made = len(calls)
    assert venvs.interpreter("pfl", tmp_path, "2.13.0") == python and len(calls) == made
    venvs.interpreter("pfl", tmp_path, "2.14.0")  # another torch is another environment
    assert len(calls) > made
    assert venvs.interpreter("ours", tmp_path, "2.13.0") == Path(sys.executable)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--repeats", "0"], "it must be a whole number from 1"),
        (["--limit", "-3"], "it must be a number above 0"),
        (["--peers", "tff"], "invalid choice: 'tff'"),
        (["--out", __file__], "which is a file"),
    ],
)
def test_what_cannot_be_used_is_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        arguments(given)
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_a_simulated_round_of_many_sites() -> None:
    calm = sites.World(server_mbit=1000, up_mbit=20, down_mbit=100, train_s=10, spread=0, latency_s=0)

    def flat(count: int, size: int) -> float:
        return sites.seconds(calm, count, size, 0.0, np.random.default_rng(0))[0]

    # One site: there at its own speed, trained, back at its own speed and once through the server's link.
    assert flat(1, 10**6) == pytest.approx(8 / 100 + 10 + 8 / 20 + 8 / 1000)
    # Very many: the server's link sends one after another, and what comes back overlaps with that.
    assert flat(1000, 10**7) == pytest.approx(1000 * 80 / 1000 + 80 / 100 - 80 / 1000 + 10 + 80 / 20 + 80 / 1000)
    groups = sites.layered(calm, 1000, 10**7, 0.0, 20, np.random.default_rng(0))
    assert flat(50, 10**7) < groups < flat(50, 10**7) + 2 * 20 * 80 / 1000 < flat(1000, 10**7)
    # Where reading the replies takes longer than the link, that is what counts.
    slow = sites.seconds(calm, 1000, 10**6, 1e-6, np.random.default_rng(0))[0]
    assert slow == pytest.approx(8 / 100 + 10 + 8 / 20 + 1000 * 1.0)


def test_the_ledger_counts_what_a_method_sends() -> None:
    sent = sites.ledger(clients=2, rounds=1)
    model = sum(part.numel() * 4 for part in cf.models.build("cnn4", (3, 32, 32), 10, 0).parameters())
    assert sent["FedAvg"] == sent["Ditto"] == {"down": model, "up": model}
    assert sent["ComFedL, KL"]["up"] == model + 4  # a loss
    assert sent["DRFA"]["down"] > 2 * model  # it asks a second time, for losses


def test_what_evaluation_costs_adds_up() -> None:
    found = evaluation.shares(WORKS["W0"], rounds=4, repeats=1)
    assert list(found) == ["every round", "auto", "last only"]
    assert found["last only"][1] == 0
    assert all(ms > 0 and share < 1 for ms, share in found.values())


def test_the_attacks_are_run_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line of the table of defences, on few rounds."""
    out = tmp_path / "numbers.json"
    few = ["--seeds", "1", "--rounds", "2", "--only", "mean,strong", "--attacks"]
    attacks.main([*few, "none,bad buffers (BatchNorm)", "--methods", "Robust .1", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| method | attack | mean | strong |"
    assert [line.split(" | ")[1] for line in lines[2:]] == ["none", "bad buffers (BatchNorm)"]
    assert len(json.loads(out.read_text())) == 4
