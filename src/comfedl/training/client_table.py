"""The table by client: samples, scores with their 95 % intervals, weights; and in words, who cannot be judged."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from comfedl.core.client_statistics import Row, smaller_is_better
from comfedl.core.intervals import wilson_of
from comfedl.utils.csv_cells import without_formulas

LOW, HIGH, SAMPLES, PERSONAL = "_low", "_high", "_samples", "personal_"
COUNTS = "accuracy_counts_samples"  # in a run's table by client; left out if true
SPLITS = ("train", "validation", "test")
MOST_IN_TABLE = 10_000  # clients; with more, no table is made unless it is asked for
MOST_LISTED = 10  # clients in a sentence
SHOWN = 30  # rows of the text

# When a metric of the registry is undefined, in words.
UNDEFINED = {
    "auc": "it needs samples of two classes",
    "auprc": "it needs samples of class 1",
    "f1": "it needs samples of class 1",
    "precision": "it needs samples of class 1",
    "sensitivity": "it needs samples of class 1",
    "recall": "it needs samples of class 1",
    "specificity": "it needs samples of another class than 1",
    "r2": "it needs different values of y",
}


class ClientTable(Sequence[Row]):
    """One row per client, as dicts; what is not known is left out.

    The columns are "client"; "train_samples", "validation_samples" and "test_samples" (for other data than a run's own
    just "samples"); each measure of the split, such
    as "accuracy", with the bounds of its 95 % interval, "accuracy_low" and "accuracy_high"; the same of the personal
    models, "personal_accuracy"; and "weight", the client's weight in the last round.

    Attributes:
        split: the split that the clients are judged on.
        rows: the rows, in the order of the names.
        measures: the measures of the global model, the most telling one first.
        scores: those and the personal models'.
        methods: how the intervals of each measure were found.
    """

    def __init__(self, split: str, rows: Iterable[Row], methods: Mapping[str, str] | None = None) -> None:
        self.split, self.rows, self.methods = split, list(rows), dict(methods or {})
        keys = dict.fromkeys(key for row in self.rows for key in row)
        counts = ["samples", *(f"{name}{SAMPLES}" for name in SPLITS)]
        bounds = {key + end for key in keys for end in (LOW, HIGH)}
        scores = [key for key in keys if key not in {"client", "weight", *counts, *bounds}]
        first = "accuracy" if "accuracy" in scores else next((name for name in scores if name != "loss"), "loss")
        self.measures = sorted(
            (k for k in scores if not k.startswith(PERSONAL)), key=lambda k: (k != first, k == "loss")
        )
        personal = [f"{PERSONAL}{name}" for name in self.measures if f"{PERSONAL}{name}" in scores]
        self.scores = [*self.measures, *personal]
        bounded = [key + end for key in self.scores for end in ("", LOW, HIGH)]
        self.columns = [key for key in ("client", *counts, *bounded, "weight") if key in keys]

    @classmethod
    def of(
        cls,
        split: str,
        recorded: Iterable[Row],
        samples: Mapping[str, Mapping[str, int]] | None = None,
        bounds: Mapping[str, Mapping[str, tuple[float, float, str]]] | None = None,
        counts_samples: bool = True,
    ) -> ClientTable:
        """From records of one round.

        Args:
            recorded: rows with keys such as "validation.accuracy".
            samples: split -> client -> the number of samples, as far as it is known.
            bounds: client -> measure -> interval; accuracy needs none where the number of samples is known.
            counts_samples: whether accuracy is a share of the samples; one's own or that of sequences is not.
        """
        rows, methods, samples = [], dict[str, set[str]](), samples or {}
        for record in recorded:
            client = str(record["client"])
            row: Row = {"client": client}
            row |= {f"{name}{SAMPLES}": counts[client] for name, counts in samples.items() if client in counts}
            own = (bounds or {}).get(client, {})
            for key, value in record.items():
                name = key.removeprefix(f"{split}.")
                if name == key or not isinstance(value, int | float):
                    continue
                row[name] = value
                interval = own.get(name)
                if interval is None and counts_samples:
                    interval = wilson_of(
                        name.removeprefix(PERSONAL), float(value), samples.get(split, {}).get(client, 0)
                    )
                if interval is not None:
                    row[name + LOW], row[name + HIGH] = interval[0], interval[1]
                    methods.setdefault(name.removeprefix(PERSONAL), set()).add(interval[2])
            if isinstance(record.get("weight"), int | float):
                row["weight"] = record["weight"]
            rows.append(row)
        return cls(split, rows, {name: " or ".join(sorted(found)) for name, found in methods.items()})

    @property
    def measure(self) -> str:
        """The measure that the worst client is found by, unless another one is named."""
        return self.measures[0] if self.measures else "loss"

    def worst(self, measure: str | None = None) -> Row | None:
        """The row of the worst client by a measure; None if no client has it."""
        name = measure or self.measure
        sign = -1 if smaller_is_better(name) else 1
        judged = [row for row in self.rows if isinstance(row.get(name), int | float) and row[name] == row[name]]
        return min(judged, key=lambda row: sign * float(row[name] or 0), default=None)

    def interval(self, row: Row, measure: str) -> tuple[float, float] | None:
        """The 95 % interval of a client's measure, if it has one."""
        low, high = row.get(measure + LOW), row.get(measure + HIGH)
        return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None

    def samples(self, row: Row) -> int | None:
        """The number of samples that a client is judged on, if it is known."""
        count = row.get(f"{self.split}{SAMPLES}", row.get("samples"))
        return count if isinstance(count, int) else None

    def overlapping(self, measure: str | None = None) -> tuple[int, int] | None:
        """How many of the other clients' intervals overlap with the worst client's, of how many; None without one."""
        name = measure or self.measure
        worst = self.worst(name)
        own = None if worst is None else self.interval(worst, name)
        if own is None:
            return None
        others = [found for row in self.rows if row is not worst and (found := self.interval(row, name)) is not None]
        return sum(low <= own[1] and own[0] <= high for low, high in others), len(others)

    def without_samples(self) -> list[str]:
        """The clients that have nothing to be judged on in this split."""
        if any(self.samples(row) is not None for row in self.rows):
            return [str(row["client"]) for row in self.rows if self.samples(row) == 0]
        if not self.measures:
            return []
        return [str(row["client"]) for row in self.rows if not any(name in row for name in self.measures)]

    def undefined(self) -> dict[str, list[str]]:
        """For each measure, the clients that have samples but not this measure."""
        empty = {*self.without_samples()}
        found = {
            name: [str(row["client"]) for row in self.rows if name not in row and row["client"] not in empty]
            for name in self.measures
        }
        return {name: clients for name, clients in found.items() if clients}

    def unjudged(self) -> list[str]:
        """Which clients cannot be judged, and why, in sentences; none if all can."""
        return unjudged(self.split, len(self.rows), self.without_samples(), self.undefined())

    def about_worst(self, measure: str | None = None) -> list[str]:
        """The worst client with its interval, and whether others may as well be the worst, in sentences."""
        name = measure or self.measure
        worst = self.worst(name)
        if worst is None or len(self.rows) < 2:
            return []
        own, count = self.interval(worst, name), self.samples(worst)
        notes = [] if own is None else [f"95 % interval {number(own[0])} to {number(own[1])}"]
        notes += [] if count is None else [plural(count, "sample")]
        measure = f"{self.split} {name.replace('_', ' ')}"
        value = number(float(worst[name] or 0)) + (f" ({', '.join(notes)})" if notes else "")
        return [
            f"Worst client by {measure}: {listed([str(worst['client'])])}, {value}.",
            *noise(self.overlapping(name)),
        ]

    def notes(self) -> list[str]:
        """What the numbers do not say: who cannot be judged, and how sure it is who is worst."""
        said, personal = [*self.unjudged(), *self.about_worst()], f"{PERSONAL}{self.measure}"
        mine, theirs = self.worst(), self.worst(personal)
        if mine is not None and theirs is not None and mine is not theirs:
            said += self.about_worst(personal)
        return said

    def to_csv(self) -> str:
        """The table as CSV."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(without_formulas(row.get(key, "") for key in self.columns) for row in self.rows)
        return out.getvalue()

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return self.rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        return self.rows == (other.rows if isinstance(other, ClientTable) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        bounds = {key + end for key in self.scores for end in (LOW, HIGH)}
        heads = [key for key in self.columns if key not in bounds]
        lines = [[head.replace("_", " ") for head in heads]]
        for row in self.rows[:SHOWN]:
            lines.append([self._cell(row, head) for head in heads])
        widths = [max(len(line[k]) for line in lines) for k in range(len(heads))]
        text = [
            "  ".join(
                cell.ljust(w) if not k else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        more = [f"and {len(self.rows) - SHOWN} more clients"] if len(self.rows) > SHOWN else []
        return "\n".join([f"Clients on their {self.split} data", *(line.rstrip() for line in text), *more])

    def _cell(self, row: Row, key: str) -> str:
        value = row.get(key)
        if not isinstance(value, int | float):
            return "-" if value is None else str(value)
        if key.endswith(SAMPLES):
            return str(value)
        found = self.interval(row, key)
        return number(float(value)) + ("" if found is None else f" ({number(found[0])} to {number(found[1])})")


def unjudged(split: str, total: int, empty: Sequence[str], undefined: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences on the clients without samples, and on those without a measure."""
    said = without_rows(split, total, empty)
    for name, clients in undefined.items():
        reason = f" ({UNDEFINED[name]})" if name in UNDEFINED else ""
        whose = f"{len(clients)} of {plural(total, 'client')}"
        said.append(f"{name.replace('_', ' ')} on {split} data is undefined for {whose}{reason}: {listed(clients)}.")
    return said


def without_rows(split: str, total: int, empty: Sequence[str], count: int | None = None) -> list[str]:
    """A sentence on the clients without samples, if there are any; ``count`` is their number if only some are given."""
    count = len(empty) if count is None else count
    if not count:
        return []
    have = "has" if count == 1 else "have"
    return [f"{count:,} of {plural(total, 'client')} {have} no {split} rows: {listed(empty, count=count)}."]


def noise(overlapping: tuple[int, int] | None) -> list[str]:
    """Whether it is certain who is worst, in a sentence; nothing if it is."""
    if overlapping is None or not overlapping[0]:
        return []
    some, others = overlapping
    whose = f"{'that' if some == 1 else 'those'} of {some:,} of the {others:,} other clients"
    if others == 1:
        whose = "that of the other client"
    if some == others > 1:
        whose = f"those of all {others:,} other clients"
    return [f"This interval overlaps {whose}, so which client is worst is within noise."]


def listed(names: Sequence[str], limit: int = MOST_LISTED, count: int | None = None) -> str:
    """Names in a sentence, some of them if there are many.

    >>> listed(["north", "south"])
    'north, south'
    """
    shown = [name if len(name) <= 60 else f"{name[:59]}…" for name in map(_printable, names[:limit])]
    more = (len(names) if count is None else count) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "sample"), plural(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number(value: float) -> str:
    """Three decimals, or three significant digits for very small and very large values."""
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1e4 else f"{value:.3g}"


def _printable(name: str) -> str:
    """A name without what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "�" for letter in name)


def samples_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """split -> client -> samples, from the rows of a run's table by client."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for split in SPLITS:
            count = row.get(f"{split}{SAMPLES}")
            if isinstance(count, int) and count >= 0:
                found.setdefault(split, {})[str(row["client"])] = count
    return found
