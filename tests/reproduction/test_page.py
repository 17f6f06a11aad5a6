"""docs/reproduction.md is written from the results, whatever figures they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from comfedl_reproduction.claims import ADAPTED, FEDMAML_SAME, judge
from comfedl_reproduction.page import EARLIER, changes, earlier, fill, lacking, main, pending, planned, verdicts
from helpers.figures import METHODS, fig4, figure

ROOT = Path(__file__).parents[2]
PARTS = ("claims", "changes", "pictures", "details", "tables", "runs")
EMPTY = "".join(f"before {name}\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n" for name in PARTS) + "after\n"


def about(folder: Path, iterations: int, batch: int, seeds: int) -> None:
    told = {
        "local_iterations": [iterations],
        "batch_sizes": [batch],
        "seeds": list(range(seeds)),
        "figure": folder.name,
    }
    told |= {"data": "cifar10", "title": "", "commits": ["0123456789abc"], "runs": 5, "tuning_runs": 4}
    told |= {"core_seconds": 3, "tuning_core_seconds": 2}
    (folder / "about.json").write_text(json.dumps(told))


def results(folder: Path, iterations: int = 600, batch: int = 64, ours: bool = True) -> Path:
    """Figures 4, 5 and 6 with runs of this length, in which ComFedL-DAMAML is best."""
    ends = {method: [0.6 - 0.1 * i + 0.001 * seed for seed in range(5)] for i, method in enumerate(METHODS)}
    if ours:
        ends |= {ADAPTED: [0.7, 0.71, 0.7, 0.7, 0.7], FEDMAML_SAME: [0.6, 0.61, 0.6, 0.6, 0.6]}
    fig4(folder, ends)
    damaml, fedavg = METHODS[0], METHODS[-1]
    sweep = {"tau": ("1", "5", "15"), "gamma": ("0.1", "0.5", "5")}
    ends5 = {(kind, damaml, point): [0.5, 0.5, 0.5] for kind, points in sweep.items() for point in points}
    figure(folder / "fig5", ends5, personal=True)
    ends6 = {
        ("rho", method, point): [end, end + 0.001, end]
        for method, end in ((damaml, 0.6), (fedavg, 0.5))
        for point in ("0.1", "0.28", "0.55", "0.8")
    }
    figure(folder / "fig6", ends6, personal=True)
    for name, seeds in (("fig4", 5), ("fig5", 3), ("fig6", 3)):
        about(folder / name, iterations, batch, seeds)
        (folder / name / f"{name}.png").write_bytes(b"")
    return folder


def test_new_runs_replace_the_old_ones_on_the_page(tmp_path: Path) -> None:
    """First the short runs, then those that the settings ask for: the page says which are which, and what changed."""
    short = results(tmp_path / "results", iterations=180, batch=32, ours=False)
    (short / EARLIER).write_text(json.dumps(earlier(short)))
    page = fill(EMPTY, short)
    assert "**Claims 1 to 8 rest on older, shorter runs** (figure 4: 180 iterations of batch 32" in page
    assert page.count("| this row is from them |") == 8
    long = results(short)
    page = fill(page, long)
    assert "of its settings yet" not in page and "older" not in page and "this row is from them" not in page
    assert "Figure 4: 600 iterations of batch 64, exact derivatives, 5 seeds, in place of 180 iterations" in page
    assert "| 1 | 4 | ComFedL-DAMAML outperforms FedAvg, FedMAML, TR-MAML and Ditto" in page
    assert "| B | 4 | Robust weights gain something for personal models beyond that optimiser | **holds** |" in page
    assert "![Figure 4: CIFAR-10, personal models](../results/fig4/fig4.png)" in page
    assert "| fig4 | cifar10 | 0, 1, 2, 3, 4 | 600, 64 | 4 / 5 | 2 / 3 | `012345678` |" in page


def test_a_verdict_that_changed_is_shown_with_the_earlier_one(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    old = earlier(folder)
    old["verdicts"][0] = "does not hold"
    (folder / EARLIER).write_text(json.dumps(old))
    rows = [line for line in verdicts(judge(folder), folder).splitlines() if re.match(r"\| \d", line)]
    assert rows[0].endswith("| does not hold |") and all(row.endswith("| the same |") for row in rows[1:])


def test_fewer_seeds_or_another_batch_are_older_runs(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    assert not pending(folder)
    about(folder / "fig5", 600, 64, 2)
    about(folder / "fig6", 600, 32, 3)
    assert list(pending(folder)) == ["fig5", "fig6"]
    assert changes(judge(folder), folder).startswith("**Claims 5 to 8 rest on older, shorter runs**")


def test_missing_series_are_named(tmp_path: Path) -> None:
    folder = results(tmp_path / "results", ours=False)
    assert lacking(folder) == {"fig4": [ADAPTED, FEDMAML_SAME]}
    text = changes(judge(folder), folder)
    assert f"- Figure 4 does not have these series of its settings yet: {ADAPTED}; {FEDMAML_SAME}." in text


def test_what_the_settings_ask_for() -> None:
    assert str(planned("fig4")) == "600 iterations of batch 64, exact derivatives, 5 seeds"
    assert planned("fig5")[:2] == planned("fig6")[:2] == planned("fig4")[:2]
    assert planned("fig3")[:2] == ((500,), (20,))


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    page = fill(EMPTY, folder)
    kept = re.sub(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", r"\1old\n\3", page, flags=re.DOTALL)
    assert kept == EMPTY and fill(page, folder) == page
    target = tmp_path / "page.md"
    target.write_text(EMPTY, encoding="utf-8")
    main([str(folder), str(target)])
    assert target.read_text(encoding="utf-8") == page


def test_each_claim_has_a_row_and_folded_numbers(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    found, page = judge(folder), fill(EMPTY, folder)
    every = [*found.claims, *found.questions]
    assert page.count("<details markdown") == page.count("</details>") == len(every) == 10
    assert all(case.numbers in page for claim in every for case in claim.cases)
    assert "personal_accuracy" not in page and ".mean" not in page


def test_folded_numbers_are_rendered(tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown")
    page = fill(EMPTY, results(tmp_path / "results"))
    html = markdown.markdown(page, extensions=["tables", "md_in_html", "attr_list"])
    folded = re.findall(r"<details>(.*?)</details>", html, re.DOTALL)
    assert len(folded) == 10 and all("<summary>" in part and "<li>" in part for part in folded)
    assert "markdown=" not in html


def test_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert page == fill(page, ROOT / "results"), "python -m comfedl_reproduction.page results docs/reproduction.md"
    for name in PARTS:
        assert page.count(f"<!-- {name}: begin -->") == page.count(f"<!-- {name}: end -->") == 1
