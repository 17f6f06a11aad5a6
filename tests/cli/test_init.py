"""comfedl init, and every step of the how-to on using your data."""

from __future__ import annotations

import csv
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import comfedl as cf
from comfedl.cli import main
from comfedl.cli.project_template import FILES, write_project

PAGE = Path(__file__).parents[2] / "docs" / "how-to-own-data.md"
Run = Callable[[str], str]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Carries out a line of a shell in an empty folder; comfedl in this process, which is quicker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)  # the README's install does not bring it

    def run(line: str) -> str:
        program, *arguments = shlex.split(line, comments=True)
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            return capsys.readouterr().out
        assert program == "comfedl"
        monkeypatch.setattr("sys.argv", ["comfedl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        captured = capsys.readouterr()
        assert not ended.value.code, f"{line}\n{captured.err}"
        return captured.out

    return run


def steps() -> list[tuple[str, str]]:
    """The files that the page has the user write, by name, and the shell commands, in order."""
    found: list[tuple[str, str]] = []
    text = PAGE.read_text(encoding="utf-8")
    for head, body in re.findall(r"^```(\w+[^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        title = re.search(r'title="([^"]+)"', head)
        if title:
            found.append((title[1], body))
        elif head == "sh":
            found += [("", line) for line in body.splitlines()]
    return found


def test_every_step_of_the_how_to(say: Run) -> None:
    said = {}
    for name, text in steps():
        if name:
            Path(name).write_text(text, encoding="utf-8")
        elif not text.startswith("comfedl report"):
            said[text] = say(text)
    output = "\n".join(said.values())
    for words in ("valley", "effective clients", "worst client", "malignant", "held-out"):
        assert words in output, words
    for file in ("gamma.png", "coast-predictions.csv", "hill-predictions.csv", "coast-own.csv", "coast.safetensors"):
        assert Path(file).stat().st_size > 0
    lines = Path("coast-predictions.csv").read_text().splitlines()
    assert lines[0] == "row,patient,diagnosis,prediction,probability of benign,probability of malignant"
    assert len(lines) == len(Path("coast.csv").read_text().splitlines())
    own = list(csv.DictReader(Path("own-predictions.csv").read_text().splitlines()))
    assert all(row["model"] == row["hospital"] for row in own)
    scores = cf.load_run("runs/robust")
    assert scores.encoding is not None and scores.encoding.classes == ("benign", "malignant")


def test_the_how_to_ends_in_a_report(say: Run) -> None:
    for name, text in steps():
        if name:
            Path(name).write_text(text, encoding="utf-8")
        elif text.startswith(("python make", "comfedl run", "comfedl report")):
            say(text)
    assert "<html" in Path("report.html").read_text(encoding="utf-8").lower()


def test_a_project_runs_at_once(tmp_path: Path) -> None:
    """As somebody would do it, in a process of its own."""
    write_project(tmp_path / "mine" / "first")
    assert {path.name for path in (tmp_path / "mine" / "first").iterdir()} == FILES.keys()
    done = subprocess.run(
        [sys.executable, "-m", "comfedl", "run", "config.toml"],
        cwd=tmp_path / "mine" / "first",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "validation auc" in done.stdout


def test_what_the_projects_readme_says(say: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = say("comfedl init first")
    assert "cd first && comfedl run config.toml" in said
    monkeypatch.chdir("first")
    for name in ("my_data", "my_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    readme = Path("README.md").read_text()
    assert len(readme.splitlines()) <= 10
    for line in re.findall(r"^    (comfedl .*)$", readme, re.MULTILINE):
        if "predict" not in line:  # which needs new rows
            say(line)
    assert Path("runs/config/data.json").exists()


def test_files_that_are_there_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text("mine")
    with pytest.raises(cf.RunFolderError, match=r"already has my_data\.py"):
        write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["my_data.py"]
    (tmp_path / "file").write_text("")
    with pytest.raises(cf.RunFolderError, match="cannot be written"):
        write_project(tmp_path / "file" / "below")
