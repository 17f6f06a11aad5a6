"""The text at the top of a report: how the methods compare, and what limits the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from comfedl.analysis.read_runs import Method
from comfedl.analysis.stats import Difference, MetricChoice, difference
from comfedl.core.privacy import ABOUT_EPSILON, spent_text
from comfedl.utils.toml import flat

MAX_SENTENCES = 6  # the table shows all methods
MUST_MATCH = ("data", "model", "rounds", "clients_per_round", "eval_clients", "loss")
STATISTICS = {"worst client": "worst", "average client": "mean"}


def verdict(methods: Sequence[Method], choice: MetricChoice, about_clients: Sequence[str] = ()) -> list[str]:
    """One sentence per method compared with FedAvg (or else with the first method), what is to be said of single
    clients, then the cautions."""
    base = next((method for method in methods if _algorithm(method) == "fedavg"), methods[0])
    others = [method for method in methods if method is not base]
    said = [_compared(base, other, choice) for other in others[:MAX_SENTENCES]] if others else [_alone(base, choice)]
    if len(others) > MAX_SENTENCES:
        said.append(f"The table has {len(others) - MAX_SENTENCES} more.")
    return [*said, *about_clients, *cautions(methods)]


def _algorithm(method: Method) -> str:
    return str(method.settings.get("algorithm", {}).get("name", ""))


def _metric(choice: MetricChoice) -> str:
    return f"{choice.split.capitalize()} {choice.label}"


def _alone(method: Method, choice: MetricChoice) -> str:
    worst, mean = method.final_values(f"{choice.key}.worst"), method.final_values(f"{choice.key}.mean")
    if not mean:
        return f"{method.name} has no {choice.split} {choice.label}."
    if not worst:
        found = f"{_metric(choice)} with {method.name}: {_format(fmean(mean.values()))} for the average client"
        return f"{found}; the worst is not known, since secure aggregation gives sums alone."
    worst_mean, mean_mean = _format(fmean(worst.values())), _format(fmean(mean.values()))
    seeds = f" (means over {len(worst)} seeds)" if len(worst) > 1 else ""
    return (
        f"{_metric(choice)} with {method.name}: {mean_mean} for the average client, {worst_mean} for the worst{seeds}."
    )


def _compared(base: Method, other: Method, choice: MetricChoice) -> str:
    keys = {label: f"{choice.key}.{statistic}" for label, statistic in STATISTICS.items()}
    values = {label: (base.final_values(key), other.final_values(key)) for label, key in keys.items()}
    if all(values["average client"]) and not all(values["worst client"]):  # only sums are known
        del values["worst client"]
    if not all(ours and theirs for ours, theirs in values.values()):
        return f"{other.name} and {base.name} cannot be compared by {choice.key}."
    parts, notes = [], []
    for label, (ours, theirs) in values.items():
        before, after = _format(fmean(ours.values())), _format(fmean(theirs.values()))
        same = before == after
        parts.append(
            f"of the {label}: {after} with " + ("both" if same else f"{other.name}, {before} with {base.name}")
        )
        notes.append("" if same else _noise_note(difference(ours, theirs)))
    if len(notes) == 2 and notes[0] and notes[0] == notes[1]:
        notes = ["", f"both {notes[0]}"]
    text = "; ".join(f"{part} ({note})" if note else part for part, note in zip(parts, notes, strict=True))
    return f"{_metric(choice)} {text}."


def _noise_note(found: Difference) -> str:
    if found.within_noise is None:
        return ""
    size = "within noise" if found.within_noise else "more than two standard errors apart"
    return f"{size} over {found.seeds} seeds"


def cautions(methods: Sequence[Method]) -> list[str]:
    """Why these results may mislead."""
    out = []
    fewest = min(len(method.runs) for method in methods)
    if fewest == 1 and len(methods) > 1:
        out.append("One seed only: differences may be chance; run more seeds before relying on them.")
    elif fewest == 1:
        out.append("One seed only: another seed may give other results.")
    elif fewest == 2:
        out.append("Two seeds give only a rough estimate of the noise.")
    differ = [
        key for key in MUST_MATCH if len({str(sorted(flat({key: m.settings.get(key)}).items())) for m in methods}) > 1
    ]
    if differ:
        out.append(f"Caution: the runs differ in {' and '.join(differ)}, not only in the method.")
    if len({frozenset(run.seed for run in method.runs) for method in methods}) > 1:
        out.append("The methods have different seeds, so differences are not paired.")
    for method in methods:
        for run in method.runs:
            if not run.done:
                total = run.settings.get("rounds", "?")
                at = f"round {run.rounds[-1]['round']} of {total}" if run.rounds else "no round evaluated yet"
                out.append(f"{method.name} (seed {run.seed}) has not finished: {at}.")
            if run.stopped is not None:
                out.append(f"{method.name} (seed {run.seed}): {run.stopped}")
    sampled = {count for method in methods for run in method.runs if (count := run.final_value("eval_clients"))}
    if sampled:
        out.append(f"Only a sample of {', '.join(f'{count:g}' for count in sorted(sampled))} clients was evaluated.")
    last = {method.name: row for method in methods for run in method.runs for row in run.rounds[-1:]}
    spent = [f"{name}: epsilon {spent_text(row)}" for name, row in last.items() if "epsilon" in row]
    if spent:
        out += [f"{'; '.join(spent)}.", ABOUT_EPSILON]
    return out


def _format(value: float) -> str:
    """Three decimals, or three significant digits for very small and very large values."""
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1e4 else f"{value:.3g}"
