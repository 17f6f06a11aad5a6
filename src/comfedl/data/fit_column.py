"""How a column is encoded, decided from what is known of its train rows: from the rows, or from what sites say of them.

The same rules for a table in this process (``fit_table``) and for tables at sites (``site_summary``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from comfedl.data.table import TEXT
from comfedl.data.tabular import GAP, OTHER, ZEROS, Column, sort_labels
from comfedl.utils.errors import DataError

MAX_CATEGORIES = 1000
NOTHING = "nothing"


@dataclass(frozen=True)
class Fitted:
    """How a column is encoded, None if it is left out; why, in words; and what a user should know."""

    column: Column | None
    fate: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filling:
    """What stands in for missing values, in how many rows, and whether an input says where."""

    value: float | str | None = None
    rows: int = 0
    indicator: bool = False


def number_column(
    name: str,
    kind: str,
    constant: float | None,
    scaling: tuple[float, float] | None,
    filling: Filling,
    shown: Callable[[float], str] = "{:.6g}".format,
) -> Fitted:
    """A column of numbers or flags.

    Args:
        constant: the value of all train rows, NaN if none has a value; None if they differ.
        scaling: the mean and the standard deviation of the train rows, None to use the values as they are.
        shown: how a number is written in words: a date as a date.
    """
    if constant is not None:
        return constant_column(name, NOTHING if constant != constant else shown(constant), filling.indicator)
    mean, std = scaling or (0.0, 1.0)
    fate = "as it is" if scaling is None else f"scaled by mean {shown(mean)} and std {std:.6g}"
    if filling.value is not None and filling.rows:
        fate += f", {filling.rows} filled in with {shown(float(filling.value))}"
    fate += ", and an input that says where" if filling.indicator else ""
    return Fitted(Column(name, kind, mean, std, fill=filling.value, indicator=filling.indicator), fate)


def text_column(
    name: str, source: str, owners: Mapping[str, int], several: bool, filling: Filling, unnamed: bool = False
) -> Fitted:
    """A column of texts.

    Args:
        owners: by text, how many clients have it in train.
        several: whether there are several clients; then a text that one of them alone has goes to the input for others.
        unnamed: whether some train rows have texts that are in nobody's ``owners``.
    """
    own = {text for text, clients in owners.items() if several and clients == 1}
    categories = sort_labels([*(owners.keys() - own)])
    if len(categories) > MAX_CATEGORIES:
        raise DataError(
            f"Column {name!r} of {source} has {len(categories)} distinct strings; leave it out (drop), or "
            f"group them into {MAX_CATEGORIES} or fewer."
        )
    others = bool(own) or unnamed
    if len(categories) + others < 2:
        if others:
            why = "each of its values occurs at one client only" if own else "no site names a value of it"
            return Fitted(None, f"left out: {why}", (f"Column {name!r} is left out: {why}.",))
        return constant_column(name, repr(categories[0]) if categories else NOTHING, filling.indicator)
    unseen = OTHER if others else ZEROS
    column = Column(name, TEXT, categories=categories, unseen=unseen, fill=filling.value, indicator=filling.indicator)
    fate, notes = f"one input for each of {len(categories)} values", []
    if own:
        shown = ", ".join(repr(text) for text in sorted(own)[:3]) + (", ..." if len(own) > 3 else "")
        fate += f", one for {len(own)} more that one client alone has ({shown})"
        notes.append(
            f"Column {name!r}: {len(own)} value{'s' if len(own) > 1 else ''} that one client alone has ({shown}) "
            f"{'share' if len(own) > 1 else 'goes to'} the input {column.names[len(categories)]!r}."
        )
    elif unnamed:
        fate += ", one for all others"
    if filling.rows:
        fate += f", {filling.rows} filled in with {filling.value!r}"
        fate += ", and an input that says where" if filling.indicator else ""
    return Fitted(column, fate, tuple(notes))


def constant_column(name: str, value: str, has_gaps: bool) -> Fitted:
    """A column that does not differ among the train rows; where it is missing may still say something."""
    what = "has no value" if value == NOTHING else f"is {value}"
    if has_gaps:
        note = f"Column {name!r} {what} in all train rows that have one: only where it is missing is used."
        return Fitted(Column(name, GAP), f"only where it is missing: it {what} elsewhere in train", (note,))
    return Fitted(
        None, f"left out: it {what} in all train rows", (f"Column {name!r} is left out: it {what} in all train rows.",)
    )


def most_frequent(counts: Mapping[str, int]) -> str | None:
    """The most frequent text, the first by name of several; None if there is none."""
    return min(counts, key=lambda text: (-counts[text], text), default=None)
