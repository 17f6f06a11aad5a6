"""The plain sentence above a report: what the numbers say, and no more than that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from comfedl.analysis.read_runs import Method
from comfedl.analysis.stats import Difference, Measures, difference
from comfedl.utils.toml import flat

MOST = 6  # so many methods are spoken of; the table has them all
ALIKE = ("data", "model", "rounds", "clients_per_round", "eval_clients", "loss")


def verdict(methods: Sequence[Method], by: Measures) -> list[str]:
    """A sentence a method beside the first one, or beside FedAvg where it is there; then what to beware of."""
    base = next((method for method in methods if _algorithm(method) == "fedavg"), methods[0])
    others = [method for method in methods if method is not base]
    said = [_beside(base, other, by) for other in others[:MOST]] if others else [_alone(base, by)]
    if len(others) > MOST:
        said.append(f"The table has {len(others) - MOST} more.")
    return [*(sentence for sentence in said if sentence), *cautions(methods, by)]


def _algorithm(method: Method) -> str:
    return str(method.settings.get("algorithm", {}).get("name", ""))


def _alone(method: Method, by: Measures) -> str:
    worst, mean = method.numbers(f"{by.key}.worst"), method.numbers(f"{by.key}.mean")
    if not worst or not mean:
        return f"{method.name} has no {by.spoken} on {by.split} data."
    return (
        f"On {by.split} data, {method.name} gives the average client {_article(by.spoken)} of "
        f"{_show(fmean(mean.values()))} and the worst client {_show(fmean(worst.values()))}."
    )


def _beside(base: Method, other: Method, by: Measures) -> str:
    kinds = ("worst", "mean")
    numbers = [(base.numbers(f"{by.key}.{kind}"), other.numbers(f"{by.key}.{kind}")) for kind in kinds]
    if not all(one and two for one, two in numbers):
        return f"{other.name} and {base.name} cannot be compared by {by.key}."
    found = [difference(*pair) for pair in numbers]
    worst, mean = (_said(*pair, by.spoken, kind) for pair, kind in zip(numbers, kinds, strict=True))
    worths = [_worth(one) if _moved(*pair) else "" for one, pair in zip(found, numbers, strict=True)]
    if worths[0] == worths[1] and worths[0]:
        return f"On {by.split} data, beside {base.name}, {other.name} {worst}, and {mean} (both {worths[0]})."
    worst, mean = (f"{said} ({worth})" if worth else said for said, worth in zip((worst, mean), worths, strict=True))
    return f"On {by.split} data, beside {base.name}, {other.name} {worst}, and {mean}."


def _moved(one: Mapping[int, float], two: Mapping[int, float]) -> bool:
    """Whether there is a difference to be seen."""
    return _show(fmean(one.values())) != _show(fmean(two.values()))


def _said(one: Mapping[int, float], two: Mapping[int, float], metric: str, kind: str) -> str:
    before, after, found = fmean(one.values()), fmean(two.values()), difference(one, two)
    whose = f"the worst client's {metric}" if kind == "worst" else f"the average client's {metric}"
    if not _moved(one, two):
        return f"leaves {whose} at {_show(after)}"
    if found.noise:
        return f"has {whose} at {_show(after)} against {_show(before)}"
    if kind == "mean" and metric.endswith("accuracy"):
        return f"{'gains' if found.gap > 0 else 'costs'} {100 * abs(found.gap):.1f} points on average"
    return f"{'raises' if after > before else 'lowers'} {whose} from {_show(before)} to {_show(after)}"


def _worth(found: Difference) -> str:
    if found.noise is None:
        return ""
    seeds = f"{found.seeds} seeds"
    return f"within the noise of {seeds}" if found.noise else f"beyond twice the standard error over {seeds}"


def cautions(methods: Sequence[Method], by: Measures) -> list[str]:
    """Why these numbers may not say what they seem to."""
    out = []
    fewest = min(len(method.runs) for method in methods)
    if fewest == 1 and len(methods) > 1:
        out.append("This is one seed: a difference cannot be told from chance; run more seeds before relying on it.")
    elif fewest == 1:
        out.append("This is one seed; another may differ.")
    elif fewest == 2:
        out.append("Two seeds say little about the noise.")
    differ = [key for key in ALIKE if len({str(sorted(flat({key: m.settings.get(key)}).items())) for m in methods}) > 1]
    if differ:
        out.append(f"Beware: the runs differ in {' and '.join(differ)}, not in the method alone.")
    if len({frozenset(run.seed for run in method.runs) for method in methods}) > 1:
        out.append("The methods have different seeds, so differences are not paired.")
    for method in methods:
        for run in method.runs:
            if not run.done:
                at = f"is at round {run.rounds[-1]['round']}" if run.rounds else "has evaluated no round yet"
                of = run.settings.get("rounds", "?")
                out.append(f"{method.name} (seed {run.seed}) is unfinished: it {at} of {of}.")
    judged = {number for method in methods for run in method.runs if (number := run.number("eval_clients"))}
    if judged:
        out.append(f"Only a sample of {', '.join(f'{number:g}' for number in sorted(judged))} clients was evaluated.")
    return out


def _article(metric: str) -> str:
    return f"{'an' if metric[0] in 'aeiour' and metric != 'r2' else 'a'} {metric}"


def _show(number: float) -> str:
    """Three places, or three digits where that would show nothing."""
    return f"{number:.3f}" if number == 0 or 0.001 <= abs(number) < 1e4 else f"{number:.3g}"
