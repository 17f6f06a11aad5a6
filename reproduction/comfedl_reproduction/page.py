"""Fills docs/reproduction.md from the tables in results/: the verdicts, the pictures, the numbers and the runs.

    python -m comfedl_reproduction.page results docs/reproduction.md

writes between the markers of the page and leaves the rest of it alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from comfedl.config.schema import parse_config
from comfedl_reproduction.claims import FIGURES, Found, judge
from comfedl_reproduction.evidence import Claim, EvidenceTable, join, judged
from comfedl_reproduction.experiments import merged, read_figure

EARLIER = "short-runs.json"
"""The verdicts on the paper's methods and the lengths of the first runs, for comparison; see ``earlier``."""


class Made(NamedTuple):
    """What the runs of a figure are: iterations and batch size, order of the derivative, number of seeds."""

    iterations: tuple[int, ...]
    batches: tuple[int, ...]
    orders: tuple[str, ...]
    seeds: int

    def __str__(self) -> str:
        orders = {"first": "first-order derivatives", "exact": "exact derivatives"}
        parts = [f"{join(self.iterations)} iterations of batch {join(self.batches)}"]
        parts += [orders.get(order, order) for order in self.orders]
        return ", ".join([*parts, f"{self.seeds} seeds"])


def made(folder: Path) -> Made:
    """What the runs in a figure's folder are."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    # One curve of the first figure 4 had another order than the rest.
    orders = _commonest([json.loads(row["algorithm"]) for row in EvidenceTable(folder).summary])
    return Made(tuple(about["local_iterations"]), tuple(about["batch_sizes"]), orders, len(about["seeds"]))


def planned(name: str) -> Made:
    """What the runs of a figure are to be, by its settings."""
    figure = read_figure(name, "paper")
    settings = []
    for arm in figure.arms:
        if arm.like is None:
            settings.append(merged(arm.settings, arm.candidates[0]))
        else:
            source = read_figure(arm.like.split("/")[0], "paper").arm(arm.like)
            settings.append(merged(merged(source.settings, source.candidates[0]), arm.changes))
    iterations = {one["rounds"] * one["algorithm"]["local_steps"] for one in settings}
    batches = {one["algorithm"]["batch_size"] for one in settings}
    orders = _commonest([parse_config(one).resolved()["algorithm"] for one in settings])
    return Made(tuple(sorted(iterations)), tuple(sorted(batches)), orders, figure.seeds)


def _commonest(algorithms: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The order of the derivative that most methods have, of those that have one."""
    orders = [algorithm["order"] for algorithm in algorithms if "order" in algorithm]
    return (max(set(orders), key=orders.count),) if orders else ()


def pending(results: Path) -> dict[str, Made]:
    """The figures whose runs are shorter than their settings ask for, and what the runs are."""
    found = {}
    for name in _figures(results):
        now, then = made(results / name), planned(name)
        if now[:3] != then[:3] or now.seeds < then.seeds:
            found[name] = now
    return found


def lacking(results: Path) -> dict[str, list[str]]:
    """The series that a figure's settings have and its results do not."""
    found = {}
    for name in _figures(results):
        have = {(row["group"], row["method"]) for row in EvidenceTable(results / name).summary}
        arms = read_figure(name, "paper").arms
        found[name] = list(dict.fromkeys(arm.label for arm in arms if (arm.group, arm.label) not in have))
    return {name: labels for name, labels in found.items() if labels}


def _figures(results: Path) -> list[str]:
    return [name for name in FIGURES if (results / name / "curves.csv").exists()]


def earlier(results: Path) -> dict[str, Any]:
    """Verdicts and runs in the form of ``EARLIER``."""
    return {
        "verdicts": [judged(claim.cases) for claim in judge(results).claims],
        "figures": {name: made(results / name)._asdict() for name in _figures(results)},
    }


# What stands on the page.


def verdicts(found: Found, results: Path) -> str:
    """One row per claim: its verdict, the number that decides it, and whether the short runs said the same."""
    old, waiting = _earlier(results), _waiting(found, results)
    lines = [
        "| | figure | the paper says | verdict | the number that decides | in the short runs |",
        "|---|---|---|---|---|---|",
    ]
    for i, claim in enumerate(found.claims, 1):
        then = old["verdicts"][i - 1] if old is not None and len(old["verdicts"]) == len(found.claims) else ""
        then = "this row is from them" if i in waiting else "the same" if then == judged(claim.cases) else then
        lines.append(_row(i, claim.figure, claim.statement, f"**{claim.verdict}**", claim.decides, then))
    if found.questions:
        lines += ["", "Statements of ours, decided by the same kind of rule:", ""]
        lines += ["| | figure | statement | verdict | the number that decides |", "|---|---|---|---|---|"]
        for letter, claim in zip("ABCDEFGHIJ", found.questions, strict=False):
            lines.append(_row(letter, claim.figure, claim.statement, f"**{claim.verdict}**", claim.decides))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _earlier(results: Path) -> dict[str, Any] | None:
    path = results / EARLIER
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def _waiting(found: Found, results: Path) -> list[int]:
    """The numbers of the claims that rest on runs that are still to be made longer."""
    names = {name.removeprefix("fig") for name in pending(results)}
    return [i for i, claim in enumerate(found.claims, 1) if claim.figure in names]


def changes(found: Found, results: Path) -> str:
    """Which claims rest on older runs, and how the runs of each figure differ from the first ones."""
    old, late = _earlier(results), pending(results)
    lines = []
    if late:
        numbers = _waiting(found, results)
        whole = numbers == list(range(numbers[0], numbers[-1] + 1))
        span = f"{numbers[0]} to {numbers[-1]}" if whole else join(numbers)
        runs = "; ".join(f"figure {name.removeprefix('fig')}: {now}" for name, now in late.items())
        due = "; ".join(f"figure {name.removeprefix('fig')}: {planned(name)}" for name in late)
        lines += [
            f"**Claims {span} rest on older, shorter runs** ({runs}). What the settings in `experiments/` ask for "
            f"({due}) has not been put here yet, so the verdicts on these claims are those of the short runs.",
            "",
        ]
    for name in _figures(results):
        if old is None or name not in old["figures"]:
            continue
        told, now = old["figures"][name], made(results / name)
        before = Made(tuple(told["iterations"]), tuple(told["batches"]), tuple(told["orders"]), told["seeds"])
        if name not in late and before != now:
            lines.append(f"- Figure {name.removeprefix('fig')}: {now}, in place of {before}.")
    for name, labels in lacking(results).items():
        lines.append(
            f"- Figure {name.removeprefix('fig')} does not have these series of its settings yet: {'; '.join(labels)}."
        )
    return "\n".join(lines).rstrip() + "\n"


CAPTIONS = {
    "fig2": "Figure 2: MNIST, logistic regression, 10 clients",
    "fig3": "Figure 3: over the synchronisation gap tau and gamma, MNIST",
    "fig4": "Figure 4: CIFAR-10, personal models",
    "fig5": "Figure 5: over tau and gamma, CIFAR-10",
    "fig6": "Figure 6: over the heterogeneity rho, CIFAR-10",
}


def pictures(results: Path) -> str:
    """All pictures of the figures."""
    lines = []
    for name in _figures(results):
        lines += [f"**{CAPTIONS[name]}**", ""]
        for picture in sorted((results / name).glob("*.png"), key=lambda path: (path.name.count("-"), path.name)):
            lines += [f"![{CAPTIONS[name]}](../{results.name}/{name}/{picture.name})", ""]
    return "\n".join(lines).rstrip() + "\n"


def details(found: Found) -> str:
    """Each claim's rule and all its numbers, folded."""
    lines = []
    for number, claim in [*enumerate(found.claims, 1), *zip("ABCDEFGHIJ", found.questions, strict=False)]:
        lines += [
            '<details markdown="1">',
            f"<summary>{number}. {claim.statement}: {claim.verdict}</summary>",
            "",
            f"It holds if: {claim.rule}.",
            "",
            *_cases(claim),
            "",
            "</details>",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _cases(claim: Claim) -> list[str]:
    told = [("", claim.cases), *((f"{name}: ", cases) for name, cases in claim.ours.items())]
    return [
        f"- {own}{case.name} ({'yes' if case.holds else 'no'}): {case.numbers}" for own, cases in told for case in cases
    ]


def provenance(results: Path) -> str:
    """A table of the runs behind each figure."""
    lines = [
        "| figure | data | seeds | iterations, batch | runs (tuning / evaluation) | core seconds | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _figures(results):
        about = json.loads((results / name / "about.json").read_text(encoding="utf-8"))
        seeds, iterations, batches = (
            ", ".join(map(str, about[key])) for key in ("seeds", "local_iterations", "batch_sizes")
        )
        runs, spent = (f"{about[f'tuning_{key}']} / {about[key]}" for key in ("runs", "core_seconds"))
        commits = ", ".join(f"`{commit[:9]}`" for commit in about["commits"])
        lines.append(_row(name, about["data"], seeds, f"{iterations}, {batches}", runs, spent, commits))
    return "\n".join(lines) + "\n"


def fill(page: str, results: Path) -> str:
    """The page with what stands between its markers written anew."""
    from comfedl_reproduction.published import as_markdown

    found = judge(results)
    parts = {
        "claims": verdicts(found, results),
        "changes": changes(found, results),
        "pictures": pictures(results),
        "details": details(found),
        "tables": as_markdown(results / "tables"),
        "runs": provenance(results),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{text}{end}{after}"
    return page


def main(arguments: Sequence[str]) -> None:
    source, target = Path(arguments[0]), Path(arguments[1])
    target.write_text(fill(target.read_text(encoding="utf-8"), source), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
