"""The claims of section 5, each with a rule that decides from the tables whether it holds.

The rules were written before the runs. A method is above another if the mean of their paired differences over seeds is
more than two standard errors above zero; anything less counts as noise, which does not support a claim.

    python -m comfedl_reproduction.claims results docs/reproduction.md

writes the tables between the markers of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from comfedl_reproduction.evidence import Case, Claim, EvidenceTable, OverSeeds, over_seeds, paired

CLOSE = 0.02  # "good with different values", "robust": the largest allowed gap between the best and the worst


def _beats_all(table: EvidenceTable, group: str, ours: str, column: str, others: Sequence[str], sign: int = 1) -> Case:
    """Whether a method is above all others in a column; ``sign`` is -1 if smaller is better."""
    own = table.per_seed(group, ours, column)
    theirs = {name: found for name in others if (found := table.per_seed(group, name, column))}
    gaps = {name: OverSeeds(tuple(sign * d for d in paired(own, found).values)) for name, found in theirs.items()}
    nearest = min(gaps, key=lambda name: gaps[name].mean)
    text = f"{ours} {over_seeds(own)}, best other {nearest} {over_seeds(theirs[nearest])}, difference {gaps[nearest]}"
    return Case(f"{group}, {column}", all(gap.above_zero for gap in gaps.values()), text)


def _first_reach(level: float) -> Callable[[dict[int, float]], float]:
    """The first evaluated round in which a curve reaches a level; one past its last round if it never does."""
    return lambda curve: next((float(r) for r, value in curve.items() if value >= level), float(max(curve) + 1))


def _roughness(curve: dict[int, float]) -> float:
    """The mean absolute second difference over the second half of a curve: 0 for a straight line."""
    values = list(curve.values())
    values = values[min(len(values) // 2, len(values) - 3) :]
    return fmean(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False))


def _mean_of_curve(curve: dict[int, float]) -> float:
    return fmean(curve.values())


SHOWN = ("test.accuracy.mean", "test.accuracy.worst", "validation.accuracy.mean", "validation.accuracy.worst")


def fig2(table: EvidenceTable) -> Iterator[Claim]:
    literal = "ComFedL, literal exponent"
    seeds, diverged, message = table.message("published", literal)
    yield Claim(
        "fig2",
        "Algorithm 1 with the exponent of eq. (6), gamma 0.2 and learning rate 0.01 trains",
        "no seed diverges (NaN or infinity)",
        (
            Case(
                "as published", diverged == 0, f"{diverged} of {seeds} seeds diverge. {message.split('The literal')[0]}"
            ),
        ),
    )
    tried = [group for group in ("published", "independent", "skewed") if group in table.groups()]
    ours, others = "ComFedL", ["DRFL", "q-FedAvg", "FedAvg"]
    yield Claim(
        "fig2",
        "ComFedL significantly outperforms all baselines in average and in worst accuracy",
        "above every baseline (in this and all later rows ComFedL is eq. (5), the stable form)",
        tuple(_beats_all(table, group, ours, column, others) for group in tried for column in SHOWN),
    )
    yield Claim(
        "fig2",
        "FedAvg, which weights by samples, serves clients with few images poorly",
        "its worst client is below that of the best other method",
        tuple(_below_best(table, group, "FedAvg", "test.accuracy.worst", 1) for group in tried),
    )
    yield Claim(
        "fig2",
        "ComFedL is simpler to train than DRFL's minimax problem",
        "it reaches 95 % of DRFL's final worst validation accuracy in fewer rounds",
        tuple(_faster_to_level(table, group, ours, "DRFL", "validation.accuracy.worst") for group in tried),
    )
    if "lr-one" in table.groups():
        yield Claim(
            "section 5.3",
            "with learning rate 1 most methods diverge",
            "more than half of the methods diverge or end with a mean validation accuracy below 0.5",
            (_diverge_at_lr_one(table),),
        )


def _diverge_at_lr_one(table: EvidenceTable) -> Case:
    failed, numbers = [], []
    for method in table.methods("lr-one"):
        seeds, diverged, _ = table.message("lr-one", method)
        last = table.per_seed("lr-one", method, "validation.accuracy.mean")
        numbers.append(f"{method} {over_seeds(last)}" if last else f"{method} diverged in {diverged} of {seeds}")
        if not last or over_seeds(last).mean < 0.5:
            failed.append(method)
    return Case("learning rate 1", 2 * len(failed) > len(numbers), ", ".join(numbers))


def _below_best(table: EvidenceTable, group: str, method: str, column: str, sign: int) -> Case:
    """Whether a method is below the best other method."""
    own = table.per_seed(group, method, column)
    others = {name: table.per_seed(group, name, column) for name in table.methods(group) if name != method}
    best = max((name for name in others if others[name]), key=lambda name: sign * over_seeds(others[name]).mean)
    gap = OverSeeds(tuple(sign * d for d in paired(others[best], own).values))
    text = f"{method} {over_seeds(own)}, {best} {over_seeds(others[best])}, difference {gap}"
    return Case(f"{group}, {column}", gap.above_zero, text)


def _faster_to_level(table: EvidenceTable, group: str, ours: str, theirs: str, column: str) -> Case:
    level = 0.95 * over_seeds(table.per_seed(group, theirs, column)).mean
    reach = _first_reach(level)
    own, other = (table.per_seed(group, method, column, reduce=reach) for method in (ours, theirs))
    text = f"{column} {level:.3f} in rounds: {ours} {over_seeds(own).mean:.0f}, {theirs} {over_seeds(other).mean:.0f}"
    return Case(group, paired(other, own).above_zero, text)


def _sweep(table: EvidenceTable, group: str, method: str, column: str) -> dict[str, OverSeeds]:
    return {point: over_seeds(table.per_seed(group, method, column, point)) for point in table.points(group)}


def _similar_ends(table: EvidenceTable, group: str, method: str, column: str) -> Case:
    """Whether all points of a sweep end within ``CLOSE`` of one another."""
    ends = _sweep(table, group, method, column)
    means = [end.mean for end in ends.values()]
    return Case(f"{group}, {column}", max(means) - min(means) <= CLOSE, _list(ends))


def _list(numbers: Mapping[str, OverSeeds]) -> str:
    return ", ".join(f"{point}: {value}" for point, value in numbers.items())


def _faster_with_tau(table: EvidenceTable, group: str, method: str, column: str, per: str) -> Case:
    """Whether the largest tau is ahead of the smallest: in the last round that all have, or after all iterations.

    A curve that was not evaluated by that round counts with its first evaluation, which is later and can only help it.
    """
    points = table.points(group)
    common = min(max(next(iter(table.curve(group, method, column, point).values()))) for point in points)

    def then(curve: dict[int, float]) -> float:
        return curve[max((r for r in curve if r <= common), default=min(curve))]

    reduce = then if per == "round" else None
    values = {point: table.per_seed(group, method, column, point, reduce) for point in points}
    what = f"in round {common}, or first evaluated" if per == "round" else "after the same iterations"
    text = f"{what}, by tau: {_list({point: over_seeds(found) for point, found in values.items()})}"
    return Case(f"{group}, per {per}", paired(values[points[-1]], values[points[0]]).above_zero, text)


def fig3(table: EvidenceTable) -> Iterator[Claim]:
    splits = [split for split in ("independent", "skewed") if f"tau-{split}" in table.groups()]
    columns = ("train.accuracy.mean", "validation.accuracy.mean")
    yield Claim(
        "fig3",
        "ComFedL gets good train and validation accuracy with different tau",
        f"all end within {CLOSE:.0%} of one another after the same iterations",
        tuple(_similar_ends(table, f"tau-{split}", "ComFedL", column) for split in splits for column in columns),
    )
    yield Claim(
        "fig3",
        "ComFedL converges much faster when tau increases",
        "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
        tuple(
            _faster_with_tau(table, f"tau-{split}", "ComFedL", columns[1], per)
            for split in splits
            for per in ("round", "iteration")
        ),
    )
    yield Claim(
        "fig3",
        "ComFedL converges much faster with gamma 0.1 or 0.2 than with 2 or 5",
        "the mean of the accuracy curves of both small gammas is above that of both large ones",
        tuple(_small_gamma(table, f"gamma-{split}", column) for split in splits for column in columns),
    )


def _small_gamma(table: EvidenceTable, group: str, column: str) -> Case:
    areas = {p: table.per_seed(group, "ComFedL", column, p, _mean_of_curve) for p in table.points(group)}

    def both(a: str, b: str) -> dict[str, float]:
        return {seed: (areas[a][seed] + areas[b][seed]) / 2 for seed in areas[a] if seed in areas[b]}

    gap = paired(both("0.1", "0.2"), both("2", "5"))
    text = f"by gamma: {_list({p: over_seeds(v) for p, v in areas.items()})}; difference {gap}"
    return Case(f"{group}, {column}", gap.above_zero, text)


FEDAVG = "FedAvg, one step at test"


def fig4(table: EvidenceTable) -> Iterator[Claim]:
    ours, others = "ComFedL-DAMAML", ["TR-MAML", "FedMAML", "Ditto", FEDAVG]
    best = [("test.personal_accuracy.mean", 1), ("test.personal_accuracy.worst", 1), ("test.personal_loss.mean", -1)]
    best += [("validation.personal_accuracy.mean", 1), ("validation.personal_loss.mean", -1)]
    yield Claim(
        "fig4",
        "ComFedL-DAMAML outperforms FedAvg, FedMAML, TR-MAML and Ditto in loss and accuracy",
        "better than every one of them",
        tuple(_beats_all(table, "main", ours, column, others, sign) for column, sign in best),
    )
    yield Claim(
        "fig4",
        "FedAvg gets the worst loss and accuracy; FedMAML and Ditto do better",
        "each of the others is better than FedAvg",
        tuple(
            _beats_fedavg(table, name, column, sign)
            for name in (ours, *others[:3])
            for column, sign in (best[0], best[2])
        ),
    )
    yield Claim(
        "fig4",
        "the curves of FedMAML and Ditto are noisy, TR-MAML's is smoother",
        "its validation accuracy has smaller second differences over the second half",
        tuple(_smoother(table, "TR-MAML", name) for name in ("FedMAML", "Ditto")),
    )
    yield Claim(
        "fig4",
        "ComFedL-DAMAML accelerates personalised federated learning",
        "it reaches 95 % of the other's final validation accuracy in fewer rounds",
        tuple(
            _faster_to_level(table, "main", ours, name, "validation.personal_accuracy.mean")
            for name in (FEDAVG, "FedMAML")
        ),
    )


def _beats_fedavg(table: EvidenceTable, name: str, column: str, sign: int) -> Case:
    own, other = table.per_seed("main", name, column), table.per_seed("main", FEDAVG, column)
    gap = OverSeeds(tuple(sign * d for d in paired(own, other).values))
    return Case(
        f"{name}, {column}", gap.above_zero, f"{name} {over_seeds(own)}, FedAvg {over_seeds(other)}, better by {gap}"
    )


def _smoother(table: EvidenceTable, smooth: str, rough: str) -> Case:
    column = "validation.personal_accuracy.mean"
    a, b = (table.per_seed("main", name, column, reduce=_roughness) for name in (smooth, rough))
    return Case(f"than {rough}", paired(b, a).above_zero, f"{smooth} {over_seeds(a)}, {rough} {over_seeds(b)}")


def fig5(table: EvidenceTable) -> Iterator[Claim]:
    column, ours = "validation.personal_accuracy.mean", "ComFedL-DAMAML"
    yield Claim(
        "fig5",
        "ComFedL-DAMAML converges much faster when tau increases",
        "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
        tuple(_faster_with_tau(table, "tau", ours, column, per) for per in ("round", "iteration")),
    )
    yield Claim(
        "fig5",
        "ComFedL-DAMAML is robust to gamma",
        f"all gammas end within {CLOSE:.0%} of one another",
        (
            _similar_ends(table, "gamma", ours, column),
            _similar_ends(table, "gamma", ours, column.replace("validation", "test")),
        ),
    )


def fig6(table: EvidenceTable) -> Iterator[Claim]:
    column = "test.personal_accuracy.mean"
    gaps = {
        point: paired(
            table.per_seed("rho", "ComFedL-DAMAML", column, point),
            table.per_seed("rho", FEDAVG, column, point),
        )
        for point in table.points("rho")
    }
    yield Claim(
        "fig6",
        "ComFedL-DAMAML outperforms FedAvg consistently over rho",
        "above FedAvg in test accuracy at every rho",
        tuple(Case(f"rho {p}", gap.above_zero, f"difference at rho {p}: {gap}") for p, gap in gaps.items()),
    )
    first, last = gaps["0.28"], gaps[table.points("rho")[-1]]
    growth = OverSeeds(tuple(b - a for a, b in zip(first.values, last.values, strict=False)))
    yield Claim(
        "fig6",
        "and especially if rho is large",
        "its lead is larger at the largest rho than at 0.28",
        (Case("largest rho", growth.above_zero, f"the lead grows by {growth}"),),
    )


FIGURES: dict[str, Callable[[EvidenceTable], Iterator[Claim]]] = {
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
}


def claims(results: Path) -> list[Claim]:
    """All claims about the figures in the folder."""
    folders = {name: results / name for name in FIGURES if (results / name / "curves.csv").exists()}
    return [claim for name, folder in folders.items() for claim in FIGURES[name](EvidenceTable(folder))]


def as_markdown(found: Sequence[Claim]) -> str:
    """A table with one row per claim, then the numbers behind each."""
    lines = ["| | figure | the paper says | it holds if | result |", "|---|---|---|---|---|"]
    for i, claim in enumerate(found, 1):
        lines.append(f"| {i} | {claim.figure} | {claim.statement} | {claim.rule} | **{claim.verdict}** |")
    for i, claim in enumerate(found, 1):
        lines += ["", f"**{i}. {claim.statement}.** {claim.verdict[0].upper()}{claim.verdict[1:]}.", ""]
        lines += [f"- {case.setting} ({'yes' if case.holds else 'no'}): {case.numbers}" for case in claim.cases]
    return "\n".join(lines) + "\n"


def provenance(results: Path) -> str:
    """A table of the runs behind each figure, and its plots."""
    lines = [
        "| figure | data | seeds | iterations, batch | runs (tuning / evaluation) | core seconds | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = []
    for folder in sorted(path.parent for path in results.glob("fig*/about.json")):
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        seeds, iterations, batches = (
            ", ".join(map(str, about[key])) for key in ("seeds", "local_iterations", "batch_sizes")
        )
        runs, spent = (f"{about[f'tuning_{key}']} / {about[key]}" for key in ("runs", "core_seconds"))
        commits = ", ".join(f"`{commit[:9]}`" for commit in about["commits"])
        cells = (about["figure"], about["data"], seeds, f"{iterations}, {batches}", runs, spent, commits)
        lines.append(f"| {' | '.join(cells)} |")
        for picture in sorted(folder.glob("*.png")):
            shown += ["", f"![{about['title']}](../{results.name}/{folder.name}/{picture.name})"]
    return "\n".join([*lines, *shown]) + "\n"


def fill(page: str, results: Path) -> str:
    """Put both tables between the markers of the page."""
    for name, table in (("claims", as_markdown(claims(results))), ("runs", provenance(results))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}{end}{after}"
    return page


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(fill(target.read_text(encoding="utf-8"), source), encoding="utf-8")
