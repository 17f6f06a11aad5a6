"""The claims of section 5, each with a rule that decides from the tables whether it holds, and questions beside them.

The rules were written before the runs. What they compare is the paper's methods; where a claim is about ComFedL, the
same rule is applied to our optimisers of the same objective too, and told separately. ``page`` writes what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from comfedl_reproduction import rules
from comfedl_reproduction.evidence import Case, Claim, EvidenceTable

COMFEDL, LITERAL = "ComFedL", ("ComFedL, literal, gamma 1", "ComFedL, literal, gamma 5")
SAFE, ROBUST = "Safe step, momentum", "Robust"
FEDAVG_SAME, EQUAL_SAME = "FedAvg, Robust's optimiser", "Equal weights, Robust's optimiser"
OURS = {"the safe step and momentum": SAFE, "Robust": ROBUST}
DAMAML, FEDAVG = "ComFedL-DAMAML", "FedAvg, one step at test"
ADAPTED, FEDMAML_SAME = "Robust, adapted", "FedMAML, Robust's optimiser"
TESTED = ("test.accuracy.mean", "test.accuracy.worst")
SHOWN = (*TESTED, "validation.accuracy.mean", "validation.accuracy.worst")


class Found(NamedTuple):
    """What the tables say: of the paper's claims, and of questions that are ours."""

    claims: list[Claim]
    questions: list[Claim]


def _with_ours(
    table: EvidenceTable, group: str, ours: dict[str, str], cases: Callable[[str], Sequence[Case]]
) -> dict[str, tuple[Case, ...]]:
    """The same cases for each of our optimisers that the tables have."""
    return {name: tuple(cases(method)) for name, method in ours.items() if method in table.methods(group)}


def _splits(table: EvidenceTable, prefix: str = "", suffix: str = "") -> list[str]:
    return [split for split in ("independent", "skewed") if f"{prefix}{split}{suffix}" in table.groups()]


def fig2(table: EvidenceTable) -> Iterator[Claim]:
    yield Claim(
        "2",
        "Algorithm 1 with the exponent of eq. (6), gamma 0.2 and learning rate 0.01 trains",
        "no seed diverges (NaN or infinity)",
        (rules.runs(table, "published", "ComFedL, literal exponent", "the paper's values"),),
        {},
    )
    tried = [group for group in ("published", "independent", "skewed") if group in table.groups()]
    tuned, others = _splits(table), ["DRFL", "q-FedAvg", "FedAvg"]
    yield Claim(
        "2",
        "ComFedL significantly outperforms all baselines in average and in worst accuracy",
        "above every baseline (in this and all later rows ComFedL is eq. (5), the stable form)",
        tuple(rules.beats_all(table, group, COMFEDL, column, others) for group in tried for column in SHOWN),
        _with_ours(
            table,
            "independent",
            OURS,
            lambda ours: [rules.beats_all(table, g, ours, column, others) for g in tuned for column in SHOWN],
        ),
    )
    yield Claim(
        "2",
        "FedAvg, which weights by samples, serves clients with few images poorly",
        "its worst client is below that of the best of ComFedL, DRFL and q-FedAvg",
        tuple(
            rules.below_best(table, group, "FedAvg", "test.accuracy.worst", [COMFEDL, "DRFL", "q-FedAvg"])
            for group in tried
        ),
        {},
    )
    slowest = "validation.accuracy.worst"
    yield Claim(
        "2",
        "ComFedL is simpler to train than DRFL's minimax problem",
        "it reaches 95 % of DRFL's final worst validation accuracy in fewer rounds",
        tuple(rules.faster(table, group, COMFEDL, "DRFL", slowest) for group in tried),
        _with_ours(
            table,
            "independent",
            OURS,
            lambda ours: [rules.faster(table, group, ours, "DRFL", slowest) for group in tuned],
        ),
    )
    if "lr-one" in table.groups():
        yield Claim(
            "section 5.3",
            "With learning rate 1 most methods diverge",
            "more than half of the methods diverge or end with a mean validation accuracy below 0.5",
            (rules.diverge_at_lr_one(table),),
            {},
        )


def fig2_questions(table: EvidenceTable) -> Iterator[Claim]:
    splits = _splits(table)
    if not all(name in table.methods(group) for group in splits for name in (*LITERAL, ROBUST)):
        return
    printed = [
        (split, name, f"{name.rpartition(', ')[2]}, {rules.where(split)}") for split in splits for name in LITERAL
    ]
    yield Claim(
        "2",
        "Algorithm 1 as printed runs at gamma 1 and at gamma 5",
        "with the best of twelve learning rates no seed diverges",
        tuple(rules.runs(table, split, name, words) for split, name, words in printed),
        {},
    )
    yield Claim(
        "2",
        "There it ends as well as the stable form, eq. (5)",
        f"its mean is at most {rules.CLOSE:.0%} below that of ComFedL",
        tuple(
            rules.not_behind(table, split, name, COMFEDL, column, words)
            for split, name, words in printed
            for column in TESTED
        ),
        {},
    )
    yield Claim(
        "2",
        "The safe step with momentum is better than Algorithm 1's step, for eq. (5)",
        "above ComFedL",
        tuple(rules.leads(table, split, SAFE, COMFEDL, column) for split in splits for column in TESTED),
        {},
    )
    yield Claim(
        "2",
        "Momentum and averaging at the server alone improve FedAvg",
        "FedAvg with Robust's optimiser is above FedAvg",
        tuple(rules.leads(table, split, FEDAVG_SAME, "FedAvg", column) for split in splits for column in TESTED),
        {},
    )
    yield Claim(
        "2",
        "Robust's weights gain something beyond its optimiser",
        "Robust is above FedAvg and above equal weights, both with the same optimiser",
        tuple(
            rules.beats_all(table, split, ROBUST, column, [FEDAVG_SAME, EQUAL_SAME])
            for split in splits
            for column in TESTED
        ),
        {},
    )


def fig3(table: EvidenceTable) -> Iterator[Claim]:
    columns = ("train.accuracy.mean", "validation.accuracy.mean")

    def cases(kind: str, rule: Callable[[str, str, str], Case], measures: Sequence[str]) -> dict[str, tuple[Case, ...]]:
        """By method: ComFedL, and ours as far as there are runs."""
        found = {}
        for name, method, suffix in (
            ("", COMFEDL, ""),
            *((name, method, f"-{'robust' if method == ROBUST else 'safe'}") for name, method in OURS.items()),
        ):
            splits = _splits(table, f"{kind}-", suffix)
            if splits:
                found[name] = tuple(rule(f"{kind}-{s}{suffix}", method, m) for s in splits for m in measures)
        return found

    statements = [
        (
            "ComFedL gets good train and validation accuracy with different tau",
            f"all end within {rules.CLOSE:.0%} of one another after the same iterations",
            cases("tau", lambda group, method, column: rules.similar_ends(table, group, method, column), columns),
        ),
        (
            "ComFedL converges much faster when tau increases",
            "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
            cases(
                "tau",
                lambda group, method, per: rules.faster_with_tau(table, group, method, columns[1], per),
                ("round", "iteration"),
            ),
        ),
        (
            "ComFedL converges much faster with gamma 0.1 or 0.2 than with 2 or 5",
            "the mean of the accuracy curves of both small gammas is above that of both large ones",
            cases("gamma", lambda group, method, column: rules.small_gamma(table, group, method, column), columns),
        ),
    ]
    for statement, rule, found in statements:
        yield Claim("3", statement, rule, found.pop(""), found)


PERSONAL = (
    "test.personal_accuracy.mean",
    "test.personal_accuracy.worst",
    "test.personal_loss.mean",
    "validation.personal_accuracy.mean",
    "validation.personal_loss.mean",
)


def fig4(table: EvidenceTable) -> Iterator[Claim]:
    others, shown, ours = (
        ["TR-MAML", "FedMAML", "Ditto", FEDAVG],
        "validation.personal_accuracy.mean",
        {"Robust": ADAPTED},
    )
    yield Claim(
        "4",
        "ComFedL-DAMAML outperforms FedAvg, FedMAML, TR-MAML and Ditto in loss and accuracy",
        "better than every one of them",
        tuple(rules.beats_all(table, "main", DAMAML, column, others) for column in PERSONAL),
        _with_ours(
            table,
            "main",
            ours,
            lambda method: [rules.beats_all(table, "main", method, column, others) for column in PERSONAL],
        ),
    )
    yield Claim(
        "4",
        "FedAvg gets the worst loss and accuracy; FedMAML and Ditto do better",
        "each of the others is better than FedAvg",
        tuple(
            rules.leads(table, "main", name, FEDAVG, column, setting=name)
            for name in (DAMAML, *others[:-1])
            for column in (PERSONAL[0], PERSONAL[2])
        ),
        {},
    )
    yield Claim(
        "4",
        "The curves of FedMAML and Ditto are noisy, TR-MAML's is smoother",
        "its validation accuracy has smaller second differences over the second half",
        tuple(rules.smoother(table, "TR-MAML", rough, shown) for rough in ("FedMAML", "Ditto")),
        {},
    )
    yield Claim(
        "4",
        "ComFedL-DAMAML accelerates personalised federated learning",
        "it reaches 95 % of the other's final validation accuracy in fewer rounds",
        tuple(
            rules.faster(table, "main", DAMAML, name, shown, f"the comparison with {name}")
            for name in (FEDAVG, "FedMAML")
        ),
        _with_ours(
            table,
            "main",
            ours,
            lambda method: [
                rules.faster(table, "main", method, name, shown, f"the comparison with {name}")
                for name in (FEDAVG, "FedMAML")
            ],
        ),
    )


def fig4_questions(table: EvidenceTable) -> Iterator[Claim]:
    if not {ADAPTED, FEDMAML_SAME} <= {*table.methods("main")}:
        return
    yield Claim(
        "4",
        "Robust's optimiser alone improves FedMAML",
        "FedMAML with momentum and averaging at the server is above FedMAML",
        tuple(rules.leads(table, "main", FEDMAML_SAME, "FedMAML", column) for column in PERSONAL[:3]),
        {},
    )
    yield Claim(
        "4",
        "Robust weights gain something for personal models beyond that optimiser",
        "Robust with adaptation is above FedMAML with the same optimiser",
        tuple(rules.leads(table, "main", ADAPTED, FEDMAML_SAME, column) for column in PERSONAL[:3]),
        {},
    )


def fig5(table: EvidenceTable) -> Iterator[Claim]:
    column = "validation.personal_accuracy.mean"
    yield Claim(
        "5",
        "ComFedL-DAMAML converges much faster when tau increases",
        "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
        tuple(rules.faster_with_tau(table, "tau", DAMAML, column, per) for per in ("round", "iteration")),
        {},
    )
    yield Claim(
        "5",
        "ComFedL-DAMAML is robust to gamma",
        f"all gammas end within {rules.CLOSE:.0%} of one another",
        tuple(
            rules.similar_ends(table, "gamma", DAMAML, name) for name in (column, column.replace("validation", "test"))
        ),
        {},
    )


def fig6(table: EvidenceTable) -> Iterator[Claim]:
    found = rules.leads_over_points(table, "rho", DAMAML, FEDAVG, "test.personal_accuracy.mean")
    yield Claim(
        "6",
        "ComFedL-DAMAML outperforms FedAvg consistently over rho",
        "above FedAvg in test accuracy at every rho",
        found,
        {},
    )
    yield Claim(
        "6",
        "and especially if rho is large",
        "its lead is larger at the largest rho than at 0.28",
        (rules.lead_grows(table, "rho", DAMAML, FEDAVG, "test.personal_accuracy.mean", "0.28"),),
        {},
    )


Judge = Callable[[EvidenceTable], Iterator[Claim]]
FIGURES: dict[str, Judge] = {"fig2": fig2, "fig3": fig3, "fig4": fig4, "fig5": fig5, "fig6": fig6}
QUESTIONS: dict[str, Judge] = {"fig2": fig2_questions, "fig4": fig4_questions}


def judge(results: Path) -> Found:
    """All claims and questions about the figures in the folder."""
    tables = {name: EvidenceTable(results / name) for name in FIGURES if (results / name / "curves.csv").exists()}
    return Found(
        [claim for name, table in tables.items() for claim in FIGURES[name](table)],
        [claim for name, table in tables.items() if name in QUESTIONS for claim in QUESTIONS[name](table)],
    )
