"""Settings: whatever is written as TOML reads back unchanged."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import comfedl as cf
from comfedl.utils.toml import describe, to_toml

# All of Unicode except surrogates, which TOML cannot represent.
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
def test_strings_that_json_and_toml_write_differently(text: str) -> None:
    same({"text": text})


@given(settings=st.dictionaries(BARE, VALUES, max_size=4))
def test_values_of_every_type_read_back(settings: dict[str, Any]) -> None:
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
    """``for lr in np.logspace(-3, 0, 4)`` yields np.float64, a float with a different repr."""
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


def test_plain_values_are_written_before_tables() -> None:
    same({"table": {"x": 1}, "after": 2})


@given(settings=st.dictionaries(BARE, VALUES, max_size=4))
def test_the_same_settings_give_the_same_text(settings: dict[str, Any]) -> None:
    assert to_toml(settings) == to_toml(tomllib.loads(to_toml(settings)))


def test_describe_has_the_name_and_omits_what_is_not_set() -> None:
    described = describe(cf.ComFedL(lr=0.5, batch_size=None, outer=cf.KL(0.2)))
    assert described["name"] == "comfedl"
    assert described["lr"] == 0.5
    assert described["outer"] == {"name": "kl", "gamma": 0.2}
    assert described["batch_size"] == "all"  # omitted, it would be read back as the default
    assert "inner" not in described and "problem" not in described


def test_describe_of_lists_of_values_and_of_code() -> None:
    @dataclass(frozen=True)
    class Two:
        parts: tuple[Any, ...]
        code: Any

    described = describe(Two((cf.Identity(), 3), math.sqrt))
    assert described == {"name": "two", "parts": [{"name": "identity"}, 3], "code": "math:sqrt"}
    same({"two": described})
