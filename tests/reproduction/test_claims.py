"""Claims are decided by their rules."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from comfedl_reproduction.claims import ADAPTED, FEDMAML_SAME, LITERAL, judge
from comfedl_reproduction.evidence import Case, Claim, EvidenceTable, OverSeeds, judged, paired
from comfedl_reproduction.rules import SETTINGS, what, where
from helpers.figures import METHODS, fig4, figure, write

BASELINES = ("DRFL", "q-FedAvg", "FedAvg")
SAME = ("FedAvg, Robust's optimiser", "Equal weights, Robust's optimiser")


def verdicts(results: Path) -> list[str]:
    return [claim.verdict for claim in judge(results).claims]


def test_a_clear_winner(tmp_path: Path) -> None:
    ends = {method: [0.6 - 0.1 * i, 0.61 - 0.1 * i, 0.6 - 0.1 * i] for i, method in enumerate(METHODS)}
    fig4(tmp_path, ends)
    outperforms, fedavg_last, _, accelerates = verdicts(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("holds", "holds", "holds")
    fig4(tmp_path, {method: ends[other] for method, other in zip(METHODS, reversed(METHODS), strict=True)})
    outperforms, fedavg_last, _, accelerates = verdicts(tmp_path)
    assert (outperforms, fedavg_last, accelerates) == ("does not hold", "does not hold", "does not hold")


def test_roughness_of_curves(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.4, 0.45] for method in METHODS}
    fig4(tmp_path, ends, rough=("FedMAML", "Ditto"))
    assert verdicts(tmp_path)[2] == "holds"
    fig4(tmp_path, ends, rough=("TR-MAML", "Ditto"))
    assert verdicts(tmp_path)[2] == "does not hold"


def test_noise_does_not_support_a_claim(tmp_path: Path) -> None:
    ends = {method: [0.5, 0.3, 0.4] for method in METHODS}
    ends["ComFedL-DAMAML"] = [0.52, 0.28, 0.42]  # better by 0.007 ± 0.013
    fig4(tmp_path, ends)
    assert verdicts(tmp_path)[0] == "does not hold"


def test_our_optimiser_does_not_change_what_the_claim_compares(tmp_path: Path) -> None:
    """With it, claim 9 is told apart; the questions say whether it is the weights or the optimiser."""
    ends = {method: [0.5, 0.51, 0.5] for method in METHODS}
    fig4(tmp_path, {**ends, ADAPTED: [0.6, 0.61, 0.6], FEDMAML_SAME: [0.6, 0.61, 0.6]})
    found = judge(tmp_path)
    assert found.claims[0].verdict == "holds only with Robust, not with the paper's method"
    assert [question.verdict for question in found.questions] == ["holds", "does not hold"]
    fig4(tmp_path, ends)
    found = judge(tmp_path)
    assert found.claims[0].verdict == "does not hold" and not found.questions


def test_the_number_that_decides() -> None:
    cases = (Case("one", "", True, "0.1", ""), Case("another", "loss", False, "-0.2", ""))
    assert Claim("2", "", "", cases, {}).decides == "another, loss: -0.2"
    assert Claim("2", "", "", cases[:1], {}).decides == "one: 0.1"


def case(setting: str, measure: str, holds: bool) -> Case:
    return Case(setting, measure, holds, "", "")


def test_verdicts_in_words() -> None:
    a, b, c = case("a", "x", True), case("a", "y", False), case("b", "x", True)
    assert judged((a, c)) == "holds" and judged((b,)) == "does not hold"
    assert judged((a, b, c)) == "holds only for a (x); b"
    assert judged((case("", "x", True), case("", "y", False))) == "holds only for x"


def test_verdicts_with_our_optimisers() -> None:
    yes, no = case("a", "", True), case("b", "", False)
    told = {
        ((no,), (yes,), (yes,)): "holds only with R or S, not with the paper's method",
        ((no,), (no,), (no,)): "does not hold, nor with R or S",
        ((no,), (no,), (yes, no)): "does not hold; with S it holds only for a; with R it does not hold",
        ((yes, no), (yes,), (no,)): "holds only for a; with R it holds; with S it does not hold",
        ((yes, no), (no,), (no,)): "holds only for a",
        ((yes,), (no,), (no,)): "holds",
    }
    for (own, first, second), verdict in told.items():
        assert Claim("2", "", "", own, {"R": first, "S": second}).verdict == verdict


def test_differences_are_paired_by_seed() -> None:
    gap = paired({"0": 1.0, "1": 5.0, "2": 9.0}, {"1": 4.0, "0": 0.5})
    assert gap.values == (0.5, 1.0)
    assert (
        OverSeeds((1.0, 1.1)).above_zero and not OverSeeds((1.0, -0.9)).above_zero and not OverSeeds((1.0,)).above_zero
    )


def test_a_run_that_diverges_later_has_no_end(tmp_path: Path) -> None:
    figure(tmp_path, {("main", "A", ""): [0.5, 0.6], ("main", "B", ""): [0.5]})
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    kept = [row for row in rows if (row["method"], row["seed"]) != ("A", "1") or int(row["round"]) < 3]
    write(tmp_path / "curves.csv", [dict(row) for row in kept])
    assert EvidenceTable(tmp_path).per_seed("main", "A", "test.accuracy.mean") == {"0": 0.5}


def test_settings_and_columns_in_words() -> None:
    assert what("test.accuracy.worst") == "worst client's test accuracy"
    assert what("validation.personal_loss.mean") == "average validation loss"
    assert where("tau-skewed-robust") == where("skewed") == SETTINGS["skewed"] and where("rho") == ""


def fig2(results: Path, robust: float, same: float, literal: Sequence[float | None]) -> None:
    """Figure 2 with ComFedL at 0.8, its baselines at 0.85 and these ends; seeds differ by 0.01."""

    def seeds(end: float) -> list[float | None]:
        return [end, end + 0.01, end]

    ends: dict[tuple[str, str, str], Sequence[float | None]] = {
        ("published", "ComFedL, literal exponent", ""): [None, None, None]
    }
    for group in ("published", "independent", "skewed"):
        ends |= {(group, method, ""): seeds(0.85) for method in BASELINES} | {(group, "ComFedL", ""): seeds(0.8)}
        if group != "published":
            ends |= {(group, method, ""): seeds(same) for method in SAME}
            ends |= {(group, method, ""): literal for method in LITERAL}
            ends |= {(group, method, ""): seeds(robust) for method in ("Robust", "Safe step, momentum")}
    figure(results / "fig2", ends)


def test_optimiser_and_weights_are_told_apart(tmp_path: Path) -> None:
    fig2(tmp_path, robust=0.9, same=0.9, literal=[0.79, 0.8, 0.79])
    found = judge(tmp_path)
    assert found.claims[0].verdict == "does not hold" and "3 of 3 seeds" in found.claims[0].decides
    assert (
        found.claims[1].verdict == "holds only with the safe step and momentum or Robust, not with the paper's method"
    )
    assert [question.verdict for question in found.questions] == ["holds", "holds", "holds", "holds", "does not hold"]
    fig2(tmp_path, robust=0.9, same=0.8, literal=[None, 0.7, 0.7])
    verdicts = [question.verdict for question in judge(tmp_path).questions]
    assert verdicts == ["does not hold", "does not hold", "holds", "does not hold", "holds"]


def test_figure_3_is_judged_by_optimiser(tmp_path: Path) -> None:
    """ComFedL is faster with a large tau and small gamma, Robust is neither."""
    ends: dict[tuple[str, str, str], Sequence[float | None]] = {}
    for split in ("independent", "skewed"):
        for kind, points in (("tau", ("1", "20")), ("gamma", ("0.1", "0.2", "2", "5"))):
            for i, point in enumerate(points):
                rise = 0.1 * i if kind == "tau" else -0.1 * i
                ends[f"{kind}-{split}", "ComFedL", point] = [0.6 + rise, 0.61 + rise]
                ends[f"{kind}-{split}-robust", "Robust", point] = [0.6, 0.61]
    figure(tmp_path / "fig3", ends)
    similar, faster, gamma = judge(tmp_path).claims
    assert similar.verdict == "holds only with Robust, not with the paper's method"
    assert faster.verdict == gamma.verdict == "holds"
    assert {name for claim in (similar, faster, gamma) for name in claim.ours} == {"Robust"}
    assert [case.holds for case in gamma.ours["Robust"]] == [False] * 4


@pytest.mark.parametrize("large", [0.5, 0.7])
def test_figure_6_compares_the_leads(tmp_path: Path, large: float) -> None:
    ours, theirs = {"0.28": 0.6, "0.8": large}, {"0.28": 0.5, "0.8": 0.5}
    ends = {
        ("rho", method, point): [end, end + 0.001]
        for method, each in (("ComFedL-DAMAML", ours), ("FedAvg, one step at test", theirs))
        for point, end in each.items()
    }
    figure(tmp_path / "fig6", ends, personal=True)
    above, grows = verdicts(tmp_path)
    if large > 0.6:
        assert (above, grows) == ("holds", "holds")
    else:
        assert (above, grows) == ("holds only for rho 0.28", "does not hold")
