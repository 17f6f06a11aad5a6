"""Settings: whatever is written as TOML reads back as it was."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import comfedl as cf
from comfedl.utils.toml import describe, to_toml

# Every text that Python can encode; lone surrogates are no Unicode text, so TOML cannot hold them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BARE = st.text("abcdefghijklmnopqrstuvwxyz_-0123456789", min_size=1, max_size=8)
PLAIN = st.one_of(TEXT, st.booleans(), st.integers(), st.floats(allow_nan=False))
VALUES = st.recursive(
    PLAIN, lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(BARE, part, max_size=3)), max_leaves=6
)


def same(settings: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(settings)) == settings


@given(text=TEXT)
@example(text='a "quoted" word')
@example(text="C:\\runs\\new")
@example(text="two\nlines\r\n\tand a tab")
@example(text="größer, 数据, ∇f")
@example(text="\x00\x1f")
def test_a_text_reads_back(text: str) -> None:
    same({"text": text, "table": {"text": text, "deep": {"text": text}, "list": [text]}})


@pytest.mark.parametrize("text", ["🙂", "delete \x7f", "𐍈"])
def test_texts_that_json_writes_in_another_way_than_toml(text: str) -> None:
    same({"text": text})


@given(settings=st.dictionaries(BARE, VALUES, max_size=4))
def test_values_of_every_kind_read_back(settings: dict[str, Any]) -> None:
    same(settings)


@given(key=TEXT)
@example(key="two words")
@example(key="a.b")
@example(key="")
@example(key='"')
@example(key="größe")
@example(key="#")
def test_a_key_that_needs_quotes_reads_back(key: str) -> None:
    same({key: 1})
    same({"table": {key: 1, "inline": {key: 2}}})
    same({key: {"x": 1}})


@given(number=st.floats())
def test_a_number_keeps_every_bit(number: float) -> None:
    back = tomllib.loads(to_toml({"x": number, "t": {"x": number}}))
    for found in (back["x"], back["t"]["x"]):
        assert isinstance(found, float)
        assert math.isnan(found) if math.isnan(number) else found == number
        assert math.copysign(1, found) == math.copysign(1, number) or math.isnan(number)


@pytest.mark.parametrize("number", [np.float64(0.1), np.float64(1e-3)])
def test_a_number_from_a_sweep_over_a_numpy_array_reads_back(number: np.float64) -> None:
    """``for lr in np.logspace(-3, 0, 4)`` gives np.float64, which is a float with a repr of its own."""
    assert tomllib.loads(to_toml({"algorithm": describe(cf.FedAvg(lr=number))}))["algorithm"]["lr"] == float(number)


def test_true_is_not_one() -> None:
    assert tomllib.loads(to_toml({"a": True, "b": 1, "c": 1.0})) == {"a": True, "b": 1, "c": 1.0}
    assert [type(value) for value in tomllib.loads(to_toml({"a": True, "b": 1, "c": 1.0})).values()] == [
        bool,
        int,
        float,
    ]


def test_none_is_left_out_at_every_depth() -> None:
    settings = {"a": None, "b": 1, "t": {"a": None, "b": 2, "deep": {"a": None, "b": 3}}}
    assert tomllib.loads(to_toml(settings)) == {"b": 1, "t": {"b": 2, "deep": {"b": 3}}}


def test_plain_values_stand_before_tables_whatever_their_order() -> None:
    same({"table": {"x": 1}, "after": 2})


@given(settings=st.dictionaries(BARE, VALUES, max_size=4))
def test_the_same_settings_give_the_same_text(settings: dict[str, Any]) -> None:
    assert to_toml(settings) == to_toml(tomllib.loads(to_toml(settings)))


def test_describe_names_a_value_and_leaves_out_what_is_not_set() -> None:
    told = describe(cf.ComFedL(lr=0.5, batch_size=None, outer=cf.KL(0.2)))
    assert told["name"] == "comfedl"
    assert told["lr"] == 0.5
    assert told["outer"] == {"name": "kl", "gamma": 0.2}
    assert told["batch_size"] == "all"  # left out, it would be read back as the default
    assert "inner" not in told and "problem" not in told


def test_describe_of_lists_of_values_and_of_code() -> None:
    @dataclass(frozen=True)
    class Two:
        parts: tuple[Any, ...]
        code: Any

    told = describe(Two((cf.Identity(), 3), math.sqrt))
    assert told == {"name": "two", "parts": [{"name": "identity"}, 3], "code": "math:sqrt"}
    same({"two": told})
