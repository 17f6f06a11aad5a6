"""Claims are decided by their rules, and the page agrees with the tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from comfedl_reproduction.claims import as_markdown, claims, fill
from comfedl_reproduction.evidence import Case, Claim, OverSeeds, paired

ROOT = Path(__file__).parents[2]
METHODS = ("ComFedL-DAMAML", "TR-MAML", "FedMAML", "Ditto", "FedAvg, one step at test")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def fig4(results: Path, accuracy: dict[str, list[float]], rough: tuple[str, ...] = ()) -> None:
    """Write curves of four rounds that rise to these accuracies, one per seed; the loss is 1 - accuracy."""
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


def verdicts(results: Path) -> list[str]:
    return [claim.verdict for claim in claims(results)]


def test_a_clear_winner(tmp_path: Path) -> None:
    ends = {method: [0.6 - 0.1 * i, 0.61 - 0.1 * i, 0.6 - 0.1 * i] for i, method in enumerate(METHODS)}
    fig4(tmp_path, ends)
    outperforms, fedavg_last, _, accelerates = verdicts(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("reproduced", "reproduced", "reproduced")
    fig4(tmp_path, {method: ends[other] for method, other in zip(METHODS, reversed(METHODS), strict=True)})
    outperforms, fedavg_last, _, accelerates = verdicts(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("not reproduced", "not reproduced", "not reproduced")


def test_roughness_of_curves(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.4, 0.45] for method in METHODS}
    fig4(tmp_path, ends, rough=("FedMAML", "Ditto"))
    assert verdicts(tmp_path)[2] == "reproduced"
    fig4(tmp_path, ends, rough=("TR-MAML", "Ditto"))
    assert verdicts(tmp_path)[2] == "not reproduced"


def test_noise_does_not_support_a_claim(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.3, 0.4] for method in METHODS}
    ends["ComFedL-DAMAML"] = [0.52, 0.28, 0.42]  # better by 0.007 ± 0.013
    fig4(tmp_path, ends)
    assert verdicts(tmp_path)[0] == "not reproduced"


def test_partial_verdict() -> None:
    cases = (Case("one", True, ""), Case("another", False, ""))
    assert Claim("fig2", "", "", cases).verdict == "only under: one"


def test_differences_are_paired_by_seed() -> None:
    gap = paired({"0": 1.0, "1": 5.0, "2": 9.0}, {"1": 4.0, "0": 0.5})
    assert gap.values == (0.5, 1.0)
    assert (
        OverSeeds((1.0, 1.1)).above_zero and not OverSeeds((1.0, -0.9)).above_zero and not OverSeeds((1.0,)).above_zero
    )


def test_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert page == fill(page, ROOT / "results"), "python -m comfedl_reproduction.claims results docs/reproduction.md"


def test_a_table_has_a_row_for_each_claim(tmp_path: Path) -> None:
    fig4(tmp_path, {method: [0.5, 0.4] for method in METHODS})
    found = claims(tmp_path)
    table = as_markdown(found)
    assert table.count("| fig4 |") == len(found) == 4
    assert all(case.numbers in table for claim in found for case in claim.cases)


@pytest.mark.parametrize("missing", ["<!-- claims: begin -->", "<!-- runs: end -->"])
def test_the_page_keeps_its_markers(missing: str) -> None:
    assert missing in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
