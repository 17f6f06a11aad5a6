"""The rules that decide claims: each turns a figure's tables into a case.

A method is above another if the mean of their paired differences over seeds is more than two standard errors above
zero; anything less counts as noise, which supports no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from comfedl_reproduction.evidence import Case, EvidenceTable, OverSeeds, over_seeds, paired

CLOSE = 0.02  # "good with different values", "robust": the largest allowed gap between the best and the worst
SETTINGS = {
    "published": "the paper's values",
    "independent": "independent draws",
    "skewed": "2 digits per small client",
    "main": "",
    "tau": "",
    "gamma": "",
}


def where(group: str) -> str:
    """A group of curves in words; those of a sweep are named by their split."""
    return next((SETTINGS[word] for word in group.split("-") if SETTINGS.get(word)), "")


def what(column: str) -> str:
    """A column of the tables in words: "test.accuracy.worst" is "worst client's test accuracy"."""
    split, metric, kind = column.split(".")
    return (
        f"{'worst client' + chr(39) + 's' if kind == 'worst' else 'average'} {split} {metric.removeprefix('personal_')}"
    )


def sign(column: str) -> int:
    """1 if larger is better, -1 if smaller is."""
    return -1 if "loss" in column else 1


def leads(table: EvidenceTable, group: str, ours: str, other: str, column: str, setting: str = "") -> Case:
    """Whether a method is above another in a column."""
    own, theirs = table.per_seed(group, ours, column), table.per_seed(group, other, column)
    gap = _lead(own, theirs, column)
    text = f"{ours} {over_seeds(own)}, {other} {over_seeds(theirs)}, better by {gap}"
    return Case(setting or where(group), what(column), gap.above_zero, f"{gap} against {other}", text)


def _lead(own: Mapping[str, float], theirs: Mapping[str, float], column: str) -> OverSeeds:
    return OverSeeds(tuple(sign(column) * d for d in paired(own, theirs).values))


def beats_all(table: EvidenceTable, group: str, ours: str, column: str, others: Sequence[str]) -> Case:
    """Whether a method is above all others in a column."""
    own = table.per_seed(group, ours, column)
    theirs = {name: found for name in others if (found := table.per_seed(group, name, column))}
    gaps = {name: _lead(own, found, column) for name, found in theirs.items()}
    nearest = min(gaps, key=lambda name: gaps[name].mean)
    text = f"{ours} {over_seeds(own)}, best other {nearest} {over_seeds(theirs[nearest])}, better by {gaps[nearest]}"
    holds = all(gap.above_zero for gap in gaps.values())
    return Case(where(group), what(column), holds, f"{gaps[nearest]} against {nearest}", text)


def below_best(table: EvidenceTable, group: str, method: str, column: str, others: Sequence[str]) -> Case:
    """Whether a method is below the best of the others."""
    own = table.per_seed(group, method, column)
    found = {name: values for name in others if (values := table.per_seed(group, name, column))}
    best = max(found, key=lambda name: sign(column) * over_seeds(found[name]).mean)
    gap = _lead(found[best], own, column)
    text = f"{method} {over_seeds(own)}, {best} {over_seeds(found[best])}, difference {gap}"
    return Case(where(group), what(column), gap.above_zero, f"{gap} of {best} against {method}", text)


def faster(table: EvidenceTable, group: str, ours: str, theirs: str, column: str, setting: str = "") -> Case:
    """Whether a method reaches 95 % of the other's final value in fewer rounds."""
    level = 0.95 * over_seeds(table.per_seed(group, theirs, column)).mean
    reach = _first_reach(level)
    own, other = (table.per_seed(group, method, column, reduce=reach) for method in (ours, theirs))
    rounds = f"{over_seeds(own).mean:.0f} rounds against {over_seeds(other).mean:.0f} of {theirs}"
    text = f"to {what(column)} {level:.3f}: {ours} {rounds}"
    return Case(setting or where(group), "", paired(other, own).above_zero, rounds, text)


def _first_reach(level: float) -> Callable[[dict[int, float]], float]:
    """The first evaluated round in which a curve reaches a level; one past its last round if it never does."""
    return lambda curve: next((float(r) for r, value in curve.items() if value >= level), float(max(curve) + 1))


def runs(table: EvidenceTable, group: str, method: str, setting: str) -> Case:
    """Whether no seed of a method diverges."""
    seeds, diverged, message = table.message(group, method)
    text = f"{diverged} of {seeds} seeds diverge"
    reason = f". {message.split('The literal')[0].strip()}" if diverged else ""
    return Case(setting, "", diverged == 0, text, text + reason)


def not_behind(table: EvidenceTable, group: str, ours: str, other: str, column: str, setting: str) -> Case:
    """Whether a method's mean is at most ``CLOSE`` below another's; not if it has none, since it diverged."""
    own, theirs = table.per_seed(group, ours, column), table.per_seed(group, other, column)
    if not own:
        return Case(setting, what(column), False, "all seeds diverge", f"{ours} diverges with all seeds")
    gap = _lead(own, theirs, column)
    text = f"{ours} {over_seeds(own)}, {other} {over_seeds(theirs)}, better by {gap}"
    return Case(setting, what(column), gap.mean >= -CLOSE, f"{gap} against {other}", text)


def diverge_at_lr_one(table: EvidenceTable) -> Case:
    """Whether more than half of the methods diverge or end with a mean validation accuracy below 0.5."""
    failed, numbers = [], []
    for method in table.methods("lr-one"):
        seeds, diverged, _ = table.message("lr-one", method)
        last = table.per_seed("lr-one", method, "validation.accuracy.mean")
        numbers.append(f"{method} {over_seeds(last)}" if last else f"{method} diverged in {diverged} of {seeds}")
        if not last or over_seeds(last).mean < 0.5:
            failed.append(method)
    decides = f"{len(failed)} of {len(numbers)} methods do"
    return Case("learning rate 1", "", 2 * len(failed) > len(numbers), decides, ", ".join(numbers))


# Sweeps over tau, gamma and rho.


def similar_ends(table: EvidenceTable, group: str, method: str, column: str) -> Case:
    """Whether all points of a sweep end within ``CLOSE`` of one another."""
    ends = {point: over_seeds(table.per_seed(group, method, column, point)) for point in table.points(group)}
    means = [end.mean for end in ends.values()]
    spread = max(means) - min(means)
    return Case(where(group), what(column), spread <= CLOSE, f"they differ by {spread:.3f}", _list(ends))


def _list(numbers: Mapping[str, OverSeeds]) -> str:
    return ", ".join(f"{point}: {value}" for point, value in numbers.items())


def faster_with_tau(table: EvidenceTable, group: str, method: str, column: str, per: str) -> Case:
    """Whether the largest tau is ahead of the smallest: in the last round that all have, or after all iterations.

    A curve that was not evaluated by that round counts with its first evaluation, which is later and can only help it.
    """
    points = table.points(group)
    common = min(max(next(iter(table.curve(group, method, column, point).values()))) for point in points)

    def then(curve: dict[int, float]) -> float:
        return curve[max((r for r in curve if r <= common), default=min(curve))]

    reduce = then if per == "round" else None
    values = {point: table.per_seed(group, method, column, point, reduce) for point in points}
    gap = paired(values[points[-1]], values[points[0]])
    moment = f"in round {common}, or first evaluated" if per == "round" else "after the same iterations"
    text = f"{moment}, by tau: {_list({point: over_seeds(found) for point, found in values.items()})}"
    decides = f"{gap} of tau {points[-1]} against tau {points[0]}"
    return Case(where(group), f"the comparison per {per}", gap.above_zero, decides, text)


def small_gamma(table: EvidenceTable, group: str, method: str, column: str) -> Case:
    """Whether the mean of the curves of gamma 0.1 and 0.2 is above that of 2 and 5."""
    areas = {
        p: table.per_seed(group, method, column, p, lambda curve: fmean(curve.values())) for p in table.points(group)
    }

    def both(a: str, b: str) -> dict[str, float]:
        return {seed: (areas[a][seed] + areas[b][seed]) / 2 for seed in areas[a] if seed in areas[b]}

    gap = paired(both("0.1", "0.2"), both("2", "5"))
    text = f"by gamma: {_list({p: over_seeds(v) for p, v in areas.items()})}; difference {gap}"
    return Case(where(group), what(column), gap.above_zero, f"{gap} of the small gammas against the large ones", text)


def smoother(table: EvidenceTable, smooth: str, rough: str, column: str) -> Case:
    """Whether a method's curve has smaller second differences than another's over its second half."""
    a, b = (table.per_seed("main", name, column, reduce=roughness) for name in (smooth, rough))
    text = f"{smooth} {over_seeds(a)}, {rough} {over_seeds(b)}"
    return Case(rough, "", paired(b, a).above_zero, text, text)


def roughness(curve: dict[int, float]) -> float:
    """The mean absolute second difference over the second half of a curve: 0 for a straight line."""
    values = list(curve.values())
    values = values[min(len(values) // 2, len(values) - 3) :]
    return fmean(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False))


def leads_over_points(table: EvidenceTable, group: str, ours: str, other: str, column: str) -> tuple[Case, ...]:
    """Whether a method is above another at each point of a sweep."""
    cases = []
    for point in table.points(group):
        gap = paired(*(table.per_seed(group, name, column, point) for name in (ours, other)))
        cases.append(Case(f"{group} {point}", "", gap.above_zero, f"{gap} against {other}", f"better by {gap}"))
    return tuple(cases)


def lead_grows(table: EvidenceTable, group: str, ours: str, other: str, column: str, first: str) -> Case:
    """Whether a method's lead over another is larger at the last point of a sweep than at ``first``."""
    last = table.points(group)[-1]
    ahead = [
        paired(*(table.per_seed(group, name, column, point) for name in (ours, other))).values
        for point in (first, last)
    ]
    growth = OverSeeds(tuple(b - a for a, b in zip(*ahead, strict=False)))
    text = f"from {first} to {last} the lead changes by {growth}"
    return Case(f"{group} {last}", "", growth.above_zero, text, text)
