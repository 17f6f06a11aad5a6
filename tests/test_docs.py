"""What the documents say is run: every Python block, in order, file by file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "flower.md":
        pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documented"}
    monkeypatch.setitem(sys.modules, "documented", type(sys)("documented"))
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    assert not os.listdir(tmp_path)


def test_the_readme_has_two_commands() -> None:
    install_and_demo, install_and_test = blocks(ROOT / "README.md", "bash")
    for command, end in ((install_and_demo, "comfedl demo"), (install_and_test, "pytest")):
        assert command.count("\n") == 1
        assert command.strip().endswith(end)
        assert "-c constraints.txt" in command


def test_a_method_takes_under_forty_lines() -> None:
    method = blocks(ROOT / "docs" / "adding-a-method.md", "python")[0]
    assert "class FedProx" in method
    assert len(method.splitlines()) < 40


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    named = [re.search(r"`(tests/[\w/]+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) > 20 and all(named)
    for found in named:
        assert found is not None
        path, test = found.groups()
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"
