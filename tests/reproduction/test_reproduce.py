"""From settings to tables and plots, in worker processes: finished runs stay, killed ones resume."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comfedl.utils.errors import ConfigError
from comfedl_reproduction import reproduce
from comfedl_reproduction.runner import FigureRun, Runner

PNG = b"\x89PNG\r\n\x1a\n"
SETTINGS = {
    "rounds": 2,
    "data": {"name": "digits", "partition": "iid", "clients": 3, "samples": 20},
    "algorithm": {"name": "fedavg", "lr": 0.1, "local_steps": 1, "batch_size": 5},
}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "about.json"}


def test_a_figure_end_to_end(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reproduce(["fig2", "fig3"], "quick", out=out, jobs=2) == [out / "fig2", out / "fig3"]
    records = {path: json.loads(path.read_text()) for path in (out / "runs").glob("*.json")}
    # Four tuning candidates, four arms on two seeds, and one run of figure 3; its other one is shared.
    assert len(records) == 4 + 8 + 1
    assert not list((out / "runs" / "unfinished").glob("*"))

    curves = rows(out / "fig2" / "curves.csv")
    found = {(row["group"], row["method"], row["seed"], row["round"]) for row in curves}
    assert ("independent", "FedAvg", "1", "3") in found and len(found) == len(curves)
    last = next(row for row in curves if row["method"] == "FedAvg" and (row["seed"], row["round"]) == ("1", "3"))
    assert last["iterations"] == "6"
    same = [
        record["rounds"][-1]["test.accuracy.worst"]
        for record in records.values()
        if record["settings"]["seed"] == 1 and record["settings"]["algorithm"]["name"] == "fedavg"
    ]
    assert [float(last["test.accuracy.worst"])] == pytest.approx(same, rel=1e-4)

    summary = {(row["group"], row["method"]): row for row in rows(out / "fig2" / "summary.csv")}
    literal = summary["published", "ComFedL, literal exponent"]
    assert (literal["seeds"], literal["diverged"]) == ("2", "2")
    assert "Round 1" in literal["message"] and "KL" in literal["message"]
    assert summary["independent", "FedAvg"]["diverged"] == "0"
    tuning = rows(out / "fig2" / "tuning.csv")
    assert [row["chosen"] for row in tuning].count("yes") == 2
    assert {row["seeds"] for row in tuning} == {"1000"}

    about = json.loads((out / "fig2" / "about.json").read_text())
    assert about["seeds"] == [0, 1] and about["runs"] == 8 and len(about["commits"]) == 1
    for picture in ("fig2/fig2-published.png", "fig2/fig2-independent.png", "fig3/fig3-independent.png"):
        png = (out / picture).read_bytes()
        assert png.startswith(PNG) and len(png) < 150_000
    page = (out / "fig2" / "report-independent.html").read_text(encoding="utf-8")
    assert "with ComFedL" in page and "with FedAvg" in page and "a small figure 2: tuned." in page
    lost = (out / "fig2" / "report-published.html").read_text(encoding="utf-8")
    assert "ComFedL, literal exponent diverged with 2 of 2 seeds, which are left out." in lost
    assert (out / "fig3" / "report.html").exists()

    # The second time nothing runs, and the same files are written.
    before, stamps = contents(out / "fig2"), {path: path.stat().st_mtime_ns for path in records}
    reproduce(["fig2"], "quick", out=out, jobs=1)
    assert contents(out / "fig2") == before
    assert {path: path.stat().st_mtime_ns for path in records} == stamps
    # With more seeds, only those are run.
    reproduce(["fig2"], "quick", seeds=3, out=out, jobs=1)
    assert len(list((out / "runs").glob("*.json"))) == 13 + 4
    assert {path: path.stat().st_mtime_ns for path in records} == stamps


def test_runs_with_equal_settings_are_shared(tmp_path: Path) -> None:
    spelt = {**SETTINGS, "seed": 0, "model": {"name": "logistic"}, "quorum": 0.5}
    assert FigureRun(SETTINGS).key == FigureRun(spelt).key
    assert FigureRun(SETTINGS).key != FigureRun({**SETTINGS, "seed": 1}).key
    runner = Runner(tmp_path / "runs", 1)
    records = runner.run([FigureRun(SETTINGS), FigureRun(spelt)], "test")
    assert list(records) == [FigureRun(SETTINGS).key] and runner.done == 1


def test_an_error_in_a_run_is_raised(tmp_path: Path) -> None:
    wrong = {**SETTINGS, "data": {"name": "digits", "partition": "iid", "clients": 3, "samples": 20000}}
    with pytest.raises(Exception, match="samples"):
        Runner(tmp_path / "runs", 1).run([FigureRun(wrong)], "test")


def test_invalid_arguments(tmp_path: Path) -> None:
    for arguments, message in (
        ((["fig7"],), "fig7.*fig6"),
        ((["fig2"], "fast"), "fast.*quick"),
        ((["fig2"], "quick", 0), "seeds.*0"),
        ((["fig2"], "quick", 1, tmp_path, 0), "jobs.*0"),
    ):
        with pytest.raises(ConfigError, match=message):
            reproduce(*arguments)
    assert not list(tmp_path.iterdir())


SCRIPT = """
import sys
from pathlib import Path
from comfedl_reproduction import experiments, reproduce
if __name__ == "__main__":
    experiments.folder = lambda: Path(sys.argv[1])
    reproduce(["fig2"], "quick", out=Path(sys.argv[2]), jobs=2)
"""


def started(small: Path, out: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen([sys.executable, str(script), str(small), str(out)], stderr=subprocess.PIPE)


def finished(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.long) for how in (signal.SIGTERM, signal.SIGINT))],
)
def test_resume_after_a_kill(small: Path, tmp_path: Path, how: signal.Signals) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # Long enough to be interrupted halfway.
    path = small / "fig2.toml"
    path.write_text(path.read_text().replace("rounds = 3\n", "rounds = 150\neval_every = 50\n"))
    process = started(small, broken, tmp_path)
    deadline = time.monotonic() + 120
    while len(finished(broken)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    kept = finished(broken)
    assert 3 <= len(kept) < 12
    time.sleep(0.5)
    assert finished(broken) == kept  # no worker keeps writing

    process = started(small, broken, tmp_path)
    assert process.communicate(timeout=120) and process.returncode == 0
    assert len(finished(broken)) == 12
    assert {path: stamp for path, stamp in finished(broken).items() if path in kept} == kept
    reproduce(["fig2"], "quick", out=whole, jobs=2)
    assert contents(broken / "fig2") == contents(whole / "fig2")


def test_the_command_line_reports_errors() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "comfedl", "reproduce", "fig9"], capture_output=True, text=True, env={**os.environ}
    )
    assert asked.returncode == 2
    assert asked.stderr.startswith("error: There is no figure 'fig9'") and asked.stderr.count("\n") == 1
