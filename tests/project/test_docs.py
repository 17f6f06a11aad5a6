"""What the documents say is run: every block of Python and every command, in order, page by page."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer

import comfedl as cf
from comfedl.cli import main
from helpers.pages import FENCE, Shown, blocks, carry_out, command, commands, difference, write_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
CONTINUES = {"how-to-robust.md": "tutorial.md", "how-to-personal.md": "tutorial.md"}
"""Pages that use the files of another one."""
ELSEWHERE = {
    "how-to-own-data.md": "tests/cli/test_init.py",
    "examples.md": "tests/project/test_examples.py",
}
"""Pages that another test carries out."""
NOT_RUN = {
    "README.md": "a test of its own runs them below, on the table of how-to-own-data.md",
    "how-to-tune.md": "searches; tests/tuning/test_tuning.py runs them",
    "reproduction.md": "takes from minutes to hours; tests/reproduction runs a small one",
    "scaling.md": "starts processes with torchrun; tests/engines/test_distributed.py does",
    "flower.md": "starts servers; tests/flower/test_flower_real.py runs them",
}
"""Pages with commands that are only checked to exist, with the reason."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def to_run(page: Path) -> bool:
    return page.name not in ELSEWHERE and any(
        block.title or block.language in ("python", "sh", "console", "toml") for block in blocks(read(page))
    )


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: page.name)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "flower.md":
        pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setitem(sys.modules, "documented", type(sys)("documented"))
    text, before = read(page), read(DOCS / CONTINUES[page.name]) if page.name in CONTINUES else ""
    for block in blocks(before + text):
        if block.title.endswith(".py"):  # its module is this page's, and gone afterwards
            monkeypatch.setitem(sys.modules, block.title[:-3], None)
            del sys.modules[block.title[:-3]]
    write_files(before)
    for shown in carry_out(text):
        assert not (wrong := difference(shown)), wrong
    if not any(block.title or block.language in ("sh", "console") for block in blocks(text)):
        assert not os.listdir(tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(read(page))], ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    """Also where it is not run. Words in capitals stand for the reader's own."""
    for line in commands(read(page)):
        program = typer.main.get_command(main.app)
        words = line.split("#")[0].replace("'", "").split()[1:]
        with program.make_context("comfedl", words, resilient_parsing=True) as above:
            while hasattr(program, "get_command"):
                name, *words = words
                program = program.get_command(above, name)
                assert program is not None, line
            program.make_context(name, words, parent=above).close()


def test_what_is_not_run_is_listed() -> None:
    left = set()
    for page in PAGES:
        ran = [block.body for block in blocks(read(page)) if block.language in ("sh", "console")]
        if set(commands(read(page))) - {line for body in ran for line in commands(f"```\n{body}```\n")}:
            left.add(page.name)
    assert left == {name for name in NOT_RUN if name in {page.name for page in PAGES}}


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("worst 0.50", "worst 0.56"),
        ("8 clients", "9 clients"),
        ("the city", "the isle"),
        ("one line", "one line more"),
        ("", "something"),
    ],
)
def test_a_difference_is_seen(written: str, printed: str) -> None:
    assert difference(Shown(written, printed, 0))


def test_rounding_and_times_are_no_difference() -> None:
    assert not difference(Shown("│ worst  0.50 │ in 3.1 s", "| worst 0.51 | in 17.2 s", 0))


def test_a_page_that_lies_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "```python\nprint(0.5)\n```\n\n```text\n0.9\n```\n\n```console\n$ comfedl list models\nnothing\n```\n"
    number, listing = carry_out(page)
    assert difference(number) and difference(listing) and "logistic" in listing.printed


def test_the_readme_has_two_commands() -> None:
    install_and_demo, install_and_test = (
        block.body for block in blocks(read(ROOT / "README.md")) if block.language == "bash"
    )
    for line, end in ((install_and_demo, "comfedl demo"), (install_and_test, "pytest")):
        assert line.count("\n") == 1
        assert line.strip().endswith(end)
        assert "-c constraints.txt" in line
    assert install_and_demo in read(DOCS / "index.md")


def test_the_readme_goes_from_a_csv_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    how_to, front = blocks(read(DOCS / "how-to-own-data.md")), blocks(read(ROOT / "README.md"))
    (make_table,) = (block.body for block in how_to if block.title == "make_patients.py")
    exec(compile(make_table, "make_patients.py", "exec"), {})
    (config,) = (block.body for block in front if block.language == "toml")
    Path("mine.toml").write_text(config, encoding="utf-8")
    (lines,) = (block.body.splitlines() for block in front if block.language == "")
    printed = [command(line) for line in lines]
    assert "outvoted" in printed[0]
    assert "hill" in Path("report.html").read_text(encoding="utf-8")


def test_a_method_takes_under_forty_lines() -> None:
    method = blocks(read(DOCS / "adding-a-method.md"))[0].body
    assert "class FedProx" in method
    assert len(method.splitlines()) < 40


def anchors(page: Path) -> set[str]:
    """The places in a page that a link can name on the site and in the repository alike; their rules differ."""
    text = FENCE.sub("", read(page))
    headings = [re.sub(r"`|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.+?) *$", text, re.MULTILINE)]
    plain = [re.sub(r"[^\w\s-]", "", title.lower()) for title in headings]
    on_site = {re.sub(r"[-\s]+", "-", title.strip()) for title in plain}
    in_repository = {re.sub(r"\s", "-", title) for title in plain}
    return on_site & in_repository | set(re.findall(r"^::: (comfedl\S*)$", text, re.MULTILINE))


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    found = 0
    for page in pages:
        for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", FENCE.sub("", read(page))):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name} links to {path}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"
            found += bool(anchor)
    assert found > 10


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("1. Is anybody outvoted?", "1-is-anybody-outvoted"),
        ("The `api` of [comfedl](x.md)", "the-api-of-comfedl"),
        ("Two words, - apart", None),  # the site has one hyphen there, the repository three
    ],
)
def test_an_anchor_is_one_that_both_know(heading: str, anchor: str | None, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"```text\n# no heading\n```\n## {heading}\n", encoding="utf-8")
    assert anchors(tmp_path / "page.md") == ({anchor} if anchor else set())


def test_every_page_is_on_the_site() -> None:
    site = read(ROOT / "mkdocs.yml").partition("nav:")[2]
    for page in DOCS.glob("*.md"):
        assert re.search(rf" {re.escape(page.name)}$", site, re.MULTILINE), page.name


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"^::: comfedl\.(\w+)$", read(DOCS / "api.md"), re.MULTILINE)
    assert sorted(documented) == sorted(cf.__all__)


def test_every_promise_names_a_test_that_exists() -> None:
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    named = [re.search(r"`(tests/[\w/]+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) > 20 and all(named)
    for found in named:
        assert found is not None
        path, test = found.groups()
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_the_claims_are_counted_as_the_reproduction_has_them() -> None:
    found = re.findall(r"^\| \d+ \|[^*]*\*\*([^*]+)\*\* \|", read(DOCS / "reproduction.md"), re.MULTILINE)
    whole, partly = found.count("holds"), sum(verdict.startswith("holds only for") for verdict in found)
    said = " ".join(read(DOCS / "theory-results.md").split())
    never = len(found) - whole - partly
    assert (
        f"of {len(found)} claims {whole or 'none'} {'hold' if whole > 1 else 'holds'} throughout, {partly} hold in "
        f"some of the settings, and {never} do not hold for the paper's methods" in said
    )


def test_the_numbers_of_the_first_page_are_those_of_the_others() -> None:
    others = " ".join(read(page) for page in (ROOT / "README.md", DOCS / "reproduction.md", DOCS / "how-to-robust.md"))
    known = {(float(mean), float(error)) for mean, error in re.findall(r"(\d\.\d+) ± (\d\.\d+)", others)}
    said = re.findall(r"(\d\.\d+) ± (\d\.\d+)", read(DOCS / "index.md"))
    assert len(said) == 11
    for mean, error in said:
        assert any(abs(float(mean) - a) <= 6e-4 and abs(float(error) - b) <= 6e-4 for a, b in known), (mean, error)


def test_the_numbers_of_which_method_are_those_of_the_evidence() -> None:
    evidence = " ".join(read(DOCS / page) for page in ("quality.md", "attacks.md"))
    said = re.findall(r"(?<![\d.])0?\.\d{3}\b", read(DOCS / "which-method.md"))
    assert len(said) > 30
    for number in said:
        assert re.search(rf"(?<![\d.])0?{re.escape(number.lstrip('0'))}(?!\d)", evidence), number
    first = dict.fromkeys(("Robust", "FedAvg", "equal weights", "KL plain", "DRFA", "AFL", "q-FedAvg"), 0)
    rows = re.findall(r"^\|(.*)\|$", evidence.split("begin overview")[1].split("end overview")[0], re.MULTILINE)
    methods = [cell.strip() for cell in rows[0].split("|")]
    for row in rows[2:]:
        (best,) = (name for name, cell in zip(methods, row.split("|"), strict=True) if "**" in cell)
        first[next(name for name in first if best.startswith(name))] += 1
    table = read(DOCS / "which-method.md").split("| first |")[1]
    assert [int(n) for n in re.findall(r"^\| .*? \| .*? \| (\d+) \|", table, re.MULTILINE)] == [*first.values()]


def test_the_comparison_has_the_times_that_were_measured() -> None:
    measured = read(ROOT / "results" / "benchmarks" / "peers.md").splitlines()
    compared, front = read(DOCS / "compared.md"), read(ROOT / "README.md")
    (cells,) = (row.split("|") for row in front.splitlines() if row.startswith("| CPU time per round"))
    for name, column in (("Flower 1.41 on Ray", 3), ("pfl 0.6.0", 5), ("fluke 0.8.1", 6)):
        times, memory = (row for row in measured if row.startswith(f"| {name} |"))
        found = [float(ratio) for ratio in re.findall(r"\(([\d.]+);", times)][:3]
        (said,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", compared, re.MULTILINE)
        *ratios, peak = said.split(" | ")
        assert [f"{ratio:.1f}" for ratio in found] == [ratio for ratio in ratios if "no second" not in ratio]
        assert peak == memory.split("|")[4].split(";")[1].strip()
        low, high = re.findall(r"[\d.]+", cells[column])
        assert float(low) == round(min(found), 1) and float(high) == round(max(found))


def test_the_pictures_of_the_theory(tmp_path: Path) -> None:
    """They can be drawn again, and say what the page says of them."""
    pictures = runpy.run_path(str(DOCS / "pictures.py"))
    losses, averaged, robust = pictures["losses"], pictures["averaged"], pictures["robust"]
    equal = averaged(np.full(2, 0.5))
    assert np.allclose(robust(1e4), equal, atol=1e-3)
    worst = losses(robust(0.02))
    text = read(DOCS / "theory-problem.md")
    for number in (losses(averaged(pictures["SAMPLES"]))[1], losses(equal)[1], worst.max(), losses(equal)[0], worst[0]):
        assert f"{number:.2f}" in text
    pictures["draw"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in (DOCS / "images").iterdir()}
    for name in pictures["PICTURES"]:
        assert f"](images/{name}.svg)" in text and (tmp_path / f"{name}.svg").stat().st_size > 10_000


def test_the_docs_extra_is_pinned() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    pinned = {line.split("==")[0].lower() for line in read(ROOT / "constraints.txt").splitlines()}
    for wanted in project["optional-dependencies"]["docs"]:
        assert re.split(r"[\[<>=]", wanted)[0] in pinned
