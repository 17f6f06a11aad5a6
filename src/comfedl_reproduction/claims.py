"""Section 5's claims, one by one, each with a rule that says from the tables whether it holds.

The rules were written before the runs. A number is above another where the mean of the paired differences over seeds is
more than two of its standard errors above zero; anything less is noise, and noise does not carry a claim.

    python -m comfedl_reproduction.claims results docs/reproduction.md

puts the tables between the page's markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from comfedl_reproduction.evidence import Case, Claim, Number, Table, number, paired

CLOSE = 0.02  # "good with different values", "robust": the best and the worst are this near


def _best(table: Table, group: str, ours: str, column: str, others: Sequence[str], sign: int = 1) -> Case:
    """Whether a method is above all others in a column; ``sign`` is -1 where less is better."""
    own = table.over(group, ours, column)
    theirs = {name: found for name in others if (found := table.over(group, name, column))}
    gaps = {name: Number(tuple(sign * d for d in paired(own, found).values)) for name, found in theirs.items()}
    nearest = min(gaps, key=lambda name: gaps[name].mean)
    text = f"{ours} {number(own)}, best other {nearest} {number(theirs[nearest])}, difference {gaps[nearest]}"
    return Case(f"{group}, {column}", all(gap.above_zero for gap in gaps.values()), text)


def _first_reach(level: float) -> Callable[[dict[int, float]], float]:
    """The first evaluated round at which a curve is at a level; the round after its last where it never is."""
    return lambda curve: next((float(r) for r, value in curve.items() if value >= level), float(max(curve) + 1))


def _roughness(curve: dict[int, float]) -> float:
    """The mean size of a curve's second differences over its second half: 0 for a straight line."""
    values = list(curve.values())
    values = values[min(len(values) // 2, len(values) - 3) :]
    return fmean(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False))


def _mean_of_curve(curve: dict[int, float]) -> float:
    return fmean(curve.values())


SHOWN = ("test.accuracy.mean", "test.accuracy.worst", "validation.accuracy.mean", "validation.accuracy.worst")


def fig2(table: Table) -> Iterator[Claim]:
    literal = "ComFedL, literal exponent"
    seeds, diverged, message = table.message("published", literal)
    yield Claim(
        "fig2",
        "Algorithm 1 with the exponent of eq. (6), gamma 0.2 and learning rate 0.01 trains",
        "no seed leaves the finite numbers",
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
        "above every baseline (here and below ComFedL is eq. (5), the stable form)",
        tuple(_best(table, group, ours, column, others) for group in tried for column in SHOWN),
    )
    yield Claim(
        "fig2",
        "FedAvg, weighting by samples, serves clients with few images badly",
        "its worst client is below that of the best other method",
        tuple(_worst_of(table, group, "FedAvg", "test.accuracy.worst", 1) for group in tried),
    )
    yield Claim(
        "fig2",
        "ComFedL is simpler to train than DRFL's minimax problem",
        "it reaches 95 % of DRFL's final worst validation accuracy in fewer rounds",
        tuple(_sooner(table, group, ours, "DRFL", "validation.accuracy.worst") for group in tried),
    )
    if "lr-one" in table.groups():
        yield Claim(
            "section 5.3",
            "with learning rate 1 most methods diverge",
            "more than half of the methods diverge, or end with a mean validation accuracy below 0.5",
            (_learning_rate_one(table),),
        )


def _learning_rate_one(table: Table) -> Case:
    failed, numbers = [], []
    for method in table.methods("lr-one"):
        seeds, diverged, _ = table.message("lr-one", method)
        last = table.over("lr-one", method, "validation.accuracy.mean")
        numbers.append(f"{method} {number(last)}" if last else f"{method} diverged in {diverged} of {seeds}")
        if not last or number(last).mean < 0.5:
            failed.append(method)
    return Case("learning rate 1", 2 * len(failed) > len(numbers), ", ".join(numbers))


def _worst_of(table: Table, group: str, method: str, column: str, sign: int) -> Case:
    """Whether a method is below the best of the others."""
    own = table.over(group, method, column)
    others = {name: table.over(group, name, column) for name in table.methods(group) if name != method}
    best = max((name for name in others if others[name]), key=lambda name: sign * number(others[name]).mean)
    gap = Number(tuple(sign * d for d in paired(others[best], own).values))
    text = f"{method} {number(own)}, {best} {number(others[best])}, difference {gap}"
    return Case(f"{group}, {column}", gap.above_zero, text)


def _sooner(table: Table, group: str, ours: str, theirs: str, column: str) -> Case:
    level = 0.95 * number(table.over(group, theirs, column)).mean
    reach = _first_reach(level)
    own, other = (table.over(group, method, column, take=reach) for method in (ours, theirs))
    text = f"{column} {level:.3f} in rounds: {ours} {number(own).mean:.0f}, {theirs} {number(other).mean:.0f}"
    return Case(group, paired(other, own).above_zero, text)


def _sweep(table: Table, group: str, method: str, column: str) -> dict[str, Number]:
    return {point: number(table.over(group, method, column, point)) for point in table.points(group)}


def _alike(table: Table, group: str, method: str, column: str) -> Case:
    """Whether all points of a sweep end within ``CLOSE`` of each other."""
    ends = _sweep(table, group, method, column)
    means = [end.mean for end in ends.values()]
    return Case(f"{group}, {column}", max(means) - min(means) <= CLOSE, _listed(ends))


def _listed(numbers: Mapping[str, Number]) -> str:
    return ", ".join(f"{point}: {value}" for point, value in numbers.items())


def _faster(table: Table, group: str, method: str, column: str, per: str) -> Case:
    """Whether the largest tau is ahead of the smallest: at the last round that all have, or after all iterations.

    A curve that was not evaluated by that round gives its first evaluation, which is later and can only help it.
    """
    points = table.points(group)
    common = min(max(next(iter(table.curve(group, method, column, point).values()))) for point in points)

    def then(curve: dict[int, float]) -> float:
        return curve[max((r for r in curve if r <= common), default=min(curve))]

    take = then if per == "round" else None
    values = {point: table.over(group, method, column, point, take) for point in points}
    what = f"at round {common}, or first evaluated" if per == "round" else "after the same iterations"
    text = f"{what}, by tau: {_listed({point: number(found) for point, found in values.items()})}"
    return Case(f"{group}, per {per}", paired(values[points[-1]], values[points[0]]).above_zero, text)


def fig3(table: Table) -> Iterator[Claim]:
    splits = [split for split in ("independent", "skewed") if f"tau-{split}" in table.groups()]
    columns = ("train.accuracy.mean", "validation.accuracy.mean")
    yield Claim(
        "fig3",
        "ComFedL gets good train and validation accuracy with different tau",
        f"all end within {CLOSE:.0%} of each other after the same iterations",
        tuple(_alike(table, f"tau-{split}", "ComFedL", column) for split in splits for column in columns),
    )
    yield Claim(
        "fig3",
        "ComFedL converges much faster when tau increases",
        "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
        tuple(
            _faster(table, f"tau-{split}", "ComFedL", columns[1], per)
            for split in splits
            for per in ("round", "iteration")
        ),
    )
    yield Claim(
        "fig3",
        "ComFedL converges much faster with gamma 0.1 or 0.2 than with 2 or 5",
        "the mean of the accuracy curve over both small gammas is above that over both large ones",
        tuple(_small_gamma(table, f"gamma-{split}", column) for split in splits for column in columns),
    )


def _small_gamma(table: Table, group: str, column: str) -> Case:
    areas = {p: table.over(group, "ComFedL", column, p, _mean_of_curve) for p in table.points(group)}

    def both(a: str, b: str) -> dict[str, float]:
        return {seed: (areas[a][seed] + areas[b][seed]) / 2 for seed in areas[a] if seed in areas[b]}

    gap = paired(both("0.1", "0.2"), both("2", "5"))
    text = f"by gamma: {_listed({p: number(v) for p, v in areas.items()})}; difference {gap}"
    return Case(f"{group}, {column}", gap.above_zero, text)


FEDAVG = "FedAvg, one step at test"


def fig4(table: Table) -> Iterator[Claim]:
    ours, others = "ComFedL-DAMAML", ["TR-MAML", "FedMAML", "Ditto", FEDAVG]
    best = [("test.personal_accuracy.mean", 1), ("test.personal_accuracy.worst", 1), ("test.personal_loss.mean", -1)]
    best += [("validation.personal_accuracy.mean", 1), ("validation.personal_loss.mean", -1)]
    yield Claim(
        "fig4",
        "ComFedL-DAMAML outperforms FedAvg, FedMAML, TR-MAML and Ditto in loss and accuracy",
        "better than every one of them",
        tuple(_best(table, "main", ours, column, others, sign) for column, sign in best),
    )
    yield Claim(
        "fig4",
        "FedAvg gets the worst loss and accuracy; FedMAML and Ditto do better",
        "each of the others is better than FedAvg",
        tuple(
            _better(table, name, column, sign) for name in (ours, *others[:3]) for column, sign in (best[0], best[2])
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
        tuple(_sooner(table, "main", ours, name, "validation.personal_accuracy.mean") for name in (FEDAVG, "FedMAML")),
    )


def _better(table: Table, name: str, column: str, sign: int) -> Case:
    own, other = table.over("main", name, column), table.over("main", FEDAVG, column)
    gap = Number(tuple(sign * d for d in paired(own, other).values))
    return Case(f"{name}, {column}", gap.above_zero, f"{name} {number(own)}, FedAvg {number(other)}, better by {gap}")


def _smoother(table: Table, smooth: str, rough: str) -> Case:
    column = "validation.personal_accuracy.mean"
    a, b = (table.over("main", name, column, take=_roughness) for name in (smooth, rough))
    return Case(f"than {rough}", paired(b, a).above_zero, f"{smooth} {number(a)}, {rough} {number(b)}")


def fig5(table: Table) -> Iterator[Claim]:
    column, ours = "validation.personal_accuracy.mean", "ComFedL-DAMAML"
    yield Claim(
        "fig5",
        "ComFedL-DAMAML converges much faster when tau increases",
        "the largest tau is ahead of the smallest in validation accuracy: at the same round, and per iteration",
        tuple(_faster(table, "tau", ours, column, per) for per in ("round", "iteration")),
    )
    yield Claim(
        "fig5",
        "ComFedL-DAMAML is robust to gamma",
        f"all gammas end within {CLOSE:.0%} of each other",
        (_alike(table, "gamma", ours, column), _alike(table, "gamma", ours, column.replace("validation", "test"))),
    )


def fig6(table: Table) -> Iterator[Claim]:
    column = "test.personal_accuracy.mean"
    gaps = {
        point: paired(
            table.over("rho", "ComFedL-DAMAML", column, point),
            table.over("rho", FEDAVG, column, point),
        )
        for point in table.points("rho")
    }
    yield Claim(
        "fig6",
        "ComFedL-DAMAML outperforms FedAvg consistently over rho",
        "above it in test accuracy at every rho",
        tuple(Case(f"rho {p}", gap.above_zero, f"difference at rho {p}: {gap}") for p, gap in gaps.items()),
    )
    first, last = gaps["0.28"], gaps[table.points("rho")[-1]]
    growth = Number(tuple(b - a for a, b in zip(first.values, last.values, strict=False)))
    yield Claim(
        "fig6",
        "and especially where rho is large",
        "its lead at the largest rho is above that at 0.28",
        (Case("largest rho", growth.above_zero, f"the lead grows by {growth}"),),
    )


FIGURES: dict[str, Callable[[Table], Iterator[Claim]]] = {
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
}


def claims(results: Path) -> list[Claim]:
    """All claims whose figure is in the folder."""
    there = {name: results / name for name in FIGURES if (results / name / "curves.csv").exists()}
    return [claim for name, folder in there.items() for claim in FIGURES[name](Table(folder))]


def as_markdown(found: Sequence[Claim]) -> str:
    """A table with one row a claim, then the numbers of each."""
    lines = ["| | figure | the paper says | it holds where | found |", "|---|---|---|---|---|"]
    for i, claim in enumerate(found, 1):
        lines.append(f"| {i} | {claim.figure} | {claim.gist} | {claim.rule} | **{claim.word}** |")
    for i, claim in enumerate(found, 1):
        lines += ["", f"**{i}. {claim.gist}.** {claim.word[0].upper()}{claim.word[1:]}.", ""]
        lines += [f"- {case.where} ({'yes' if case.holds else 'no'}): {case.numbers}" for case in claim.cases]
    return "\n".join(lines) + "\n"


def provenance(results: Path) -> str:
    """A table of what each figure was made of, and its pictures."""
    lines = [
        "| figure | data | seeds | iterations, batch | runs (to choose / to judge) | core seconds | commit |",
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


def filled(page: str, results: Path) -> str:
    """The page with both tables between their markers."""
    for name, table in (("claims", as_markdown(claims(results))), ("runs", provenance(results))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}{end}{after}"
    return page


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(filled(target.read_text(encoding="utf-8"), source), encoding="utf-8")
