"""Claims are decided by their rules, and the page says what the tables say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from comfedl_reproduction.claims import as_markdown, claims, filled
from comfedl_reproduction.evidence import Case, Claim, Number, paired

ROOT = Path(__file__).parents[2]
METHODS = ("ComFedL-DAMAML", "TR-MAML", "FedMAML", "Ditto", "FedAvg, one step at test")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def fig4(results: Path, accuracy: dict[str, list[float]], rough: tuple[str, ...] = ()) -> None:
    """Straight lines of four rounds to these accuracies, one a seed, or rough ones; the loss is one less them."""
    curves: list[dict[str, object]] = []
    for method, ends in accuracy.items():
        for seed, end in enumerate(ends):
            for r in range(1, 5):
                height = end * r / 4 + (0.02 + 0.001 * seed if method in rough and r == 3 else 0)
                row: dict[str, object] = {"group": "main", "method": method, "point": "", "seed": seed, "round": r}
                for split in ("validation", "test"):
                    for kind in ("mean", "worst"):
                        row[f"{split}.personal_accuracy.{kind}"] = height
                        row[f"{split}.personal_loss.{kind}"] = 1 - height
                curves.append(row)
    write(results / "fig4" / "curves.csv", curves)
    write(results / "fig4" / "summary.csv", [{"group": "main", "method": method, "point": ""} for method in accuracy])


def words(results: Path) -> list[str]:
    return [claim.word for claim in claims(results)]


def test_a_clear_winner(tmp_path: Path) -> None:
    ends = {method: [0.6 - 0.1 * i, 0.61 - 0.1 * i, 0.6 - 0.1 * i] for i, method in enumerate(METHODS)}
    fig4(tmp_path, ends)
    outperforms, fedavg_last, _, accelerates = words(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("reproduced", "reproduced", "reproduced")
    fig4(tmp_path, {method: ends[other] for method, other in zip(METHODS, reversed(METHODS), strict=True)})
    outperforms, fedavg_last, _, accelerates = words(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("not reproduced", "not reproduced", "not reproduced")


def test_a_rough_curve_is_told_from_a_smooth_one(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.4, 0.45] for method in METHODS}
    fig4(tmp_path, ends, rough=("FedMAML", "Ditto"))
    assert words(tmp_path)[2] == "reproduced"
    fig4(tmp_path, ends, rough=("TR-MAML", "Ditto"))
    assert words(tmp_path)[2] == "not reproduced"


def test_noise_does_not_carry_a_claim(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.3, 0.4] for method in METHODS}
    ends["ComFedL-DAMAML"] = [0.52, 0.28, 0.42]  # better by 0.007 ± 0.013
    fig4(tmp_path, ends)
    assert words(tmp_path)[0] == "not reproduced"


def test_a_claim_that_holds_somewhere_says_where() -> None:
    cases = (Case("here", True, ""), Case("there", False, ""))
    assert Claim("fig2", "", "", cases).word == "only under: here"


def test_differences_are_paired_by_seed() -> None:
    gap = paired({"0": 1.0, "1": 5.0, "2": 9.0}, {"1": 4.0, "0": 0.5})
    assert gap.values == (0.5, 1.0)
    assert Number((1.0, 1.1)).above_zero and not Number((1.0, -0.9)).above_zero and not Number((1.0,)).above_zero


def test_the_page_says_what_the_tables_say() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert page == filled(page, ROOT / "results"), "python -m comfedl_reproduction.claims results docs/reproduction.md"


def test_a_table_has_a_row_for_each_claim(tmp_path: Path) -> None:
    fig4(tmp_path, {method: [0.5, 0.4] for method in METHODS})
    found = claims(tmp_path)
    table = as_markdown(found)
    assert table.count("| fig4 |") == len(found) == 4
    assert all(case.numbers in table for claim in found for case in claim.cases)


@pytest.mark.parametrize("missing", ["<!-- claims: begin -->", "<!-- runs: end -->"])
def test_the_page_keeps_its_markers(missing: str) -> None:
    assert missing in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
