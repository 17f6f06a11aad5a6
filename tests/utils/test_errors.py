"""Messages: one sentence, and never pages of it."""

from __future__ import annotations

import pytest

import comfedl as cf
from comfedl.config.schema import parse_config
from comfedl.utils.errors import LONGEST, DataError, RunFolderError, nearest


@pytest.mark.parametrize("kind", [DataError, RunFolderError])
def test_the_middle_of_a_very_long_message_is_left_out(kind: type[Exception]) -> None:
    text = f"There is no column 'y'; Allowed: {', '.join(f'column {k}' for k in range(10_000))}; check the name."
    said = str(kind(text))
    assert len(said) < LONGEST and said[:40] == text[:40] and said.endswith("; check the name.")
    kept = len(said) - len(said[said.index("[") : said.index("]") + 1]) - 2
    assert f"[{len(text) - kept:,} characters left out]" in said
    assert str(kind(text[:LONGEST])) == text[:LONGEST]


def test_a_long_value_does_not_fill_the_screen() -> None:
    with pytest.raises(cf.ConfigError, match=r"seed is .*characters left out") as caught:
        parse_config({"seed": "x" * 100_000, "data": {"name": "digits"}, "algorithm": {"name": "fedavg"}})
    assert len(str(caught.value)) < LONGEST


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("hospital", None),
        ("device", None),
        ("learning", None),
        ("", None),
        ("Nroth", "north"),
        ("lr_schedul", "lr_schedule"),
        ("steps", "local_steps"),
        ("LOSS", "capital_loss"),
        ("engin", "engine"),
        ("some", "same"),
    ],
)
def test_only_what_is_really_near_is_suggested(given: str, meant: str | None) -> None:
    """A column "hospital" that is missing was taken for a misspelt "capital_loss"."""
    names = ["age", "capital_loss", "engine", "local_steps", "lr_schedule", "north", "same"]
    assert (f"did you mean {meant!r}? " if meant else "") + f"Allowed: {', '.join(names)}" == nearest(given, names)
