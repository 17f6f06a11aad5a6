"""What holds for the encoding of any table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import comfedl as cf
from comfedl.data.cell_format import CellFormat, make_format
from comfedl.data.table import Table
from comfedl.data.tabular import Encoding

CELLS: Mapping[str, st.SearchStrategy[str]] = {
    "number": st.floats(-1e6, 1e6).map(lambda value: f"{value:.3f}"),
    "count": st.integers(-5, 5).map(str),
    "flag": st.sampled_from(["true", "False"]),
    "word": st.sampled_from(["a", "b", "c", "d e", "ß"]),
    "date": st.dates().map(str),
    "constant": st.just("7"),
}
GAPS = ("", "NA", "?", "-99")


@st.composite
def tables(draw: st.DrawFn, gaps: bool = True) -> Table:
    """A table as it is read from a file: columns x0, x1, ... of any kind, a client and a label."""
    rows = draw(st.integers(12, 25))
    kinds = draw(st.lists(st.sampled_from([*CELLS]), min_size=1, max_size=4))
    columns = {"site": [["n", "s", "e"][k % 3] for k in range(rows)], "y": ["01"[k // 3 % 2] for k in range(rows)]}
    names = {}
    for i, kind in enumerate(kinds):
        cell = CELLS[kind]
        if gaps and draw(st.booleans()):
            cell = st.one_of(cell, cell, st.sampled_from(GAPS))
        columns[f"x{i}"] = draw(st.lists(cell, min_size=rows, max_size=rows))
        names[f"x{i}"] = kind
    format = make_format(na_values=["?", -99], dates=[name for name, kind in names.items() if kind == "date"])
    made = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return Table(made, "rows.csv", untyped=True, format=format)


OPTIONS = st.fixed_dictionaries({"impute": st.sampled_from(["median", "most-frequent"]), "scale": st.booleans()})


def load(table: Table, **options: Any) -> cf.FederatedData | None:
    """The data of a table; None if it says nothing, or is refused for looking like numbers."""
    try:
        return cf.FederatedData.from_dataframe(table, "site", "y", **options)
    except cf.DataError as error:
        known = ("no input column that differs", "has numbers in", "is missing most often", "has no value")
        assert any(text in str(error) for text in known), error
        return None


def reread(encoding: Encoding) -> Encoding:
    return Encoding.from_dict(json.loads(json.dumps({"version": 1, **encoding.to_dict()})))


@given(tables(), OPTIONS)
@settings(max_examples=150, deadline=None)
def test_rows_one_by_one_are_the_table(table: Table, options: dict[str, Any]) -> None:
    fed = load(table, **options)
    if fed is None or fed.encoding is None:
        return
    whole = fed.encoding.x(table)
    one_by_one = [fed.encoding.x(table.at(np.array([row]))) for row in range(len(table))]
    assert np.array_equal(np.concatenate(one_by_one), whole)
    order = np.random.default_rng(0).permutation(len(table))
    assert np.array_equal(fed.encoding.x(table.at(order)), whole[order])
    assert whole.shape[1:] == fed.encoding.shape and np.isfinite(whole).all()
    names = [name for column in fed.encoding.columns for name in column.names]
    assert len(names) == whole.shape[1]
    splits = [split for split in (fed.train, fed.validation, fed.test) if split is not None]
    made = np.concatenate([split.x.numpy() for split in splits])  # no row is lost, and each is as in the table
    assert sorted(map(tuple, made.tolist())) == sorted(map(tuple, whole.tolist()))


@given(tables(), OPTIONS)
@settings(max_examples=100, deadline=None)
def test_a_round_trip_through_json_predicts_the_same(table: Table, options: dict[str, Any]) -> None:
    fed = load(table, **options)
    if fed is None or fed.encoding is None:
        return
    again = reread(fed.encoding)
    assert again == fed.encoding
    assert np.array_equal(again.x(table), fed.encoding.x(table))
    assert np.array_equal(again.y(table), fed.encoding.y(table))


@given(tables(gaps=False), OPTIONS)
@settings(max_examples=100, deadline=None)
def test_filling_in_where_nothing_is_missing_changes_nothing(table: Table, options: dict[str, Any]) -> None:
    filled, plain = load(table, **options), load(table, scale=options["scale"])
    dropped = load(table, scale=options["scale"], missing="drop")
    assert (filled is None) == (plain is None) == (dropped is None)
    if filled is None or plain is None or dropped is None:
        return
    for other in (filled, dropped):
        assert torch.equal(other.train.x, plain.train.x) and torch.equal(other.train.y, plain.train.y)


@given(tables(), OPTIONS)
@settings(max_examples=60, deadline=None)
def test_what_is_learnt_does_not_depend_on_the_rows_order(table: Table, options: dict[str, Any]) -> None:
    """With the splits given: fills and categories are the same, means to rounding."""
    part = np.array([["train", "train", "validation", "test"][k % 4] for k in range(len(table))], dtype=object)
    table = replace(table, columns={**table.columns, "part": part})
    order = np.random.default_rng(1).permutation(len(table))
    one, other = load(table, split="part", **options), load(table.at(order), split="part", **options)
    assert (one is None) == (other is None)
    if one is None or other is None or one.encoding is None or other.encoding is None:
        return
    for mine, theirs in zip(one.encoding.columns, other.encoding.columns, strict=True):
        assert replace(mine, mean=0.0, scale=1.0) == replace(theirs, mean=0.0, scale=1.0)
        assert mine.mean == pytest.approx(theirs.mean) and mine.scale == pytest.approx(theirs.scale)


@given(tables())
@settings(max_examples=60, deadline=None)
def test_held_out_rows_teach_nothing(table: Table) -> None:
    """Their numbers may be anything: the encoding is that of the train rows."""
    part = np.array([["train", "train", "test"][k // 3 % 3] for k in range(len(table))], dtype=object)
    table = replace(table, columns={**table.columns, "part": part})
    changed = {name: values.copy() for name, values in table.columns.items()}
    for name in changed:
        kind = table.cells(name).kind
        if name.startswith("x") and kind == "number" and name not in table.format.dates:
            changed[name][part == "test"] = "123456"
    one = load(table, split="part", impute="median")
    other = load(replace(table, columns=changed), split="part", impute="median")
    if one is not None and other is not None:
        assert one.encoding == other.encoding and torch.equal(one.train.x, other.train.x)


# By hand.


def frame(**columns: list[Any]) -> dict[str, list[Any]]:
    rows = len(next(iter(columns.values())))
    base = {
        "site": ["n", "s"] * (rows // 2),
        "part": ["train"] * rows,
        "y": ["ill", "ill", "well", "well"] * (rows // 4),
    }
    return {**base, **columns}


def test_fills_and_indicators() -> None:
    data = frame(
        age=[1.0, None, 3.0, 5.0, None, 3.0, 4.0, 9.0],
        ward=["b", None, "a", "b", "b", "a", "a", None],
        ok=[True, True, None, False, True, True, False, False],
        dose=[None, 2, 2, 3, 4, 5, 6, 7],
    )
    data["part"] = ["train"] * 7 + ["test"]  # the 9 of the last row is not learnt from
    impute = {"age": "median", "ward": "unknown", "ok": "most-frequent", "dose": -1}
    fed = cf.FederatedData.from_dataframe(data, "site", "y", split="part", scale=False, impute=impute)
    assert fed.encoding is not None
    columns = {column.name: column for column in fed.encoding.columns}
    assert columns["age"].fill == 3 and columns["ok"].fill == 1 and columns["dose"].fill == -1
    assert [name for column in columns.values() for name in column.names] == [
        *("age", "age is missing", "ward=a", "ward=b", "ward=(other)", "ward is missing"),
        *("ok", "ok is missing", "dose", "dose is missing"),
    ]
    rows = fed.encoding.x(data)
    assert rows[1].tolist() == [3, 1, 0, 0, 1, 1, 1, 0, 2, 0]  # south alone has an unknown ward: an input for others
    assert rows[0].tolist() == [1, 0, 0, 1, 0, 0, 1, 0, -1, 1]
    assert rows[2].tolist() == [3, 0, 1, 0, 0, 0, 1, 1, 2, 0]
    new = {"age": [np.nan], "ward": ["z"], "ok": [None], "dose": [1]}
    assert fed.encoding.x(new)[0].tolist() == [3, 1, 0, 0, 1, 0, 1, 1, 1, 0]


def test_the_median_of_an_even_number_of_rows_and_the_first_of_equals() -> None:
    data = frame(age=[1.0, 2.0, 4.0, 9.0, None, None, None, None], ward=["b", "a", "b", "a", None, None, None, None])
    fed = cf.FederatedData.from_dataframe(data, "site", "y", split="part", impute="median", scale=False)
    assert fed.encoding is not None
    assert [column.fill for column in fed.encoding.columns] == [3, "a"]


@pytest.mark.parametrize("as_strings", [False, True])
@pytest.mark.parametrize(
    ("cells", "odd", "what"), [([1, 2], "high", "numbers"), ([True, False], "maybe", "true or false")]
)
def test_rows_held_out_do_not_decide_the_type_of_a_column(
    cells: list[Any], odd: str, what: str, as_strings: bool
) -> None:
    grade = [*cells, None, *cells * 2, odd]
    data = {name: np.array(values, dtype=object) for name, values in frame(grade=grade).items()}
    data["part"] = np.array(["train"] * 7 + ["test"], dtype=object)
    texts = {name: np.array(["" if v is None else str(v) for v in values]) for name, values in data.items()}
    table = Table(texts, "t.csv", untyped=True) if as_strings else data
    where = rf"'grade' of .* has {what} in all train rows, but '{odd}' in row 8 \(test\) \(s\); correct it"
    with pytest.raises(cf.DataError, match=where):
        cf.FederatedData.from_dataframe(table, "site", "y", split="part", impute="most-frequent")
    known = cf.FederatedData.from_dataframe(
        table, "site", "y", split="part", impute="most-frequent", na_values=[odd]
    ).encoding
    assert known is not None and [c.kind for c in known.columns if c.name == "grade"] != ["text"]


def test_a_label_without_a_train_row_has_an_output_and_is_named() -> None:
    labels = ["ill", "well"] * 3 + ["ill", "dead"]
    data = frame(age=[1, 2, 3, 4] * 2, y=labels, part=["train"] * 7 + ["test"])
    encoding = cf.FederatedData.from_dataframe(data, "site", "y", split="part").encoding
    assert encoding is not None and encoding.classes == ("dead", "ill", "well") and encoding.report is not None
    assert [note for note in encoding.report.notes if "'dead' occurs in no train row" in note]
    assert not [note for note in encoding.report.notes if "'ill'" in note]


@pytest.mark.parametrize(("rule", "value"), [("true", 1), ("False", 0), (True, 1), (False, 0), (0, 0), ("1", 1)])
def test_flags_are_filled_in_with_true_or_false(rule: Any, value: float) -> None:
    texts = {"ok": ["true", "false", "", "false"] * 2, "site": ["n", "s"] * 4, "y": ["ill", "ill", "well", "well"] * 2}
    table = Table({name: np.array(cells) for name, cells in texts.items()}, "t.csv", untyped=True)
    fed = cf.FederatedData.from_dataframe(table, "site", "y", impute={"ok": rule})
    assert fed.encoding is not None and fed.encoding.columns[0].fill == value
    with pytest.raises(cf.ConfigError, match=r"impute\.ok is 'maybe', but the column has true or false; give"):
        cf.FederatedData.from_dataframe(table, "site", "y", impute={"ok": "maybe"})


def test_a_category_called_as_the_input_for_others_keeps_its_name() -> None:
    wards = ["(other)", "(other)", "b", "b", "tent", "(other)", "b", "(other)"]  # only north has a tent
    encoding = cf.FederatedData.from_dataframe(frame(ward=wards), "site", "y", split="part").encoding
    assert encoding is not None
    assert encoding.columns[0].names == ["ward=(other)", "ward=b", "ward=((other))"]
    assert encoding.x({"ward": ["(other)", "tent"]}).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_rows_held_out_do_not_decide_which_categories_have_an_input(held_out: str) -> None:
    def names(site: str) -> list[str]:
        sites, wards = ["n"] * 4 + ["s"] * 4 + [site], ["p", "q", "r", "r", "p", "q", "q", "p", "r"]
        data = {"site": sites, "ward": wards, "y": [0, 1] * 4 + [1], "part": ["train"] * 8 + [held_out]}
        fed = cf.FederatedData.from_dataframe(data, "site", "y", split="part", task="classification")
        assert fed.encoding is not None
        return fed.encoding.columns[0].names

    assert names("n") == names("s") == ["ward=p", "ward=q", "ward=(other)"]  # in training, r occurs at n alone


def test_a_category_of_one_client_and_one_that_training_did_not_see() -> None:
    wards = ["a", "a", "b", "b", "tent", "a", "b", "a"]  # only north has a tent
    fed = cf.FederatedData.from_dataframe(frame(ward=wards), "site", "y", split="part")
    assert fed.encoding is not None and fed.encoding.columns[0].names == ["ward=a", "ward=b", "ward=(other)"]
    assert fed.encoding.x({"ward": ["tent", "never seen", "b"]}).tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 0]]
    # Without anything to learn an input for others from, an unknown ward is none of the known ones.
    plain = cf.FederatedData.from_dataframe(frame(ward=["a", "a", "b", "b"] * 2), "site", "y", split="part")
    assert plain.encoding is not None and plain.encoding.x({"ward": ["never seen"]}).tolist() == [[0, 0]]
    # One client alone has no others: its categories are its own.
    alone = frame(ward=wards) | {"site": ["n"] * 8}
    single = cf.FederatedData.from_dataframe(alone, "site", "y", split="part")
    assert single.encoding is not None and single.encoding.columns[0].categories == ("a", "b", "tent")


def test_constant_columns_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    data = frame(age=[1, 2, 3, 4, 5, 6, 7, 8], unit=["mg"] * 8, tenth=[0.1] * 8, all_gone=[None] * 8)
    fed = cf.FederatedData.from_dataframe(data, "site", "y", split="part", impute="median")
    assert fed.encoding is not None and [column.name for column in fed.encoding.columns] == ["age"]
    said = [record.getMessage() for record in caplog.records]
    assert "Column 'unit' is left out: it is 'mg' in all train rows." in said
    assert "Column 'tenth' is left out: it is 0.1 in all train rows." in said
    assert "Column 'all_gone' is left out: it has no value in all train rows." in said
    assert fed.encoding.x({"age": [3]}).shape == (1, 1)  # new rows need not have them
    with pytest.raises(cf.DataError, match="no input column that differs among the train rows"):
        cf.FederatedData.from_dataframe(frame(unit=["mg"] * 8), "site", "y", split="part")


def test_dropped_rows_are_counted_by_client(caplog: pytest.LogCaptureFixture) -> None:
    data = frame(age=[1, None, None, None, 5, 6, 7, 8], ward=["a", "b", None, "a", "b", "a", "a", "b"])
    fed = cf.FederatedData.from_dataframe(
        data, "site", "y", split="part", missing="drop", impute={"ward": "most-frequent"}
    )
    assert fed.encoding is not None and fed.encoding.report is not None
    assert fed.encoding.report.dropped == {"s": 2, "n": 1} and len(fed.train.y) == 5
    assert any("3 of 8 rows are left out, since they miss a value (s 2, n 1)" in text for text in caplog.messages)
    whole = {name: [*values, *values[:1]] for name, values in data.items()}
    whole["site"][-1], whole["age"][-1] = "tiny", None
    caplog.clear()
    fed = cf.FederatedData.from_dataframe(whole, "site", "y", split="part", missing="drop", impute={"ward": "median"})
    assert fed.names == ("n", "s") and "the table: no row remains of 1 client ('tiny')." in caplog.messages
    usable, notes = fed.encoding.usable({"age": [None, 3], "ward": ["a", None], "site": ["n", "n"]})
    assert len(usable) == 1 and usable.place(0) == 2 and "1 of 2 rows are left out" in notes[0]


@pytest.mark.parametrize(
    ("text", "decimal", "thousands", "number"),
    [
        ("3,5", ",", "", 3.5),
        ("3.5", ",", "", None),
        ("1.234,5", ",", ".", 1234.5),
        ("1.5", ",", ".", None),  # no group of three: not a thousand
        ("-12.345.678", ",", ".", -12345678.0),
        ("1,234.5", ".", ",", 1234.5),
        ("1 234,5", ",", " ", 1234.5),
        ("1\u202f234,5", ",", " ", 1234.5),
        ("1\u2019234.5", ".", "'", 1234.5),
        ("1234,5", ",", ".", 1234.5),
        (",5", ",", "", 0.5),
        ("1,5e3", ",", "", 1500.0),
        (",", ",", "", None),
        ("", ",", "", None),
        ("1_000", ",", "", None),
        ("nan", ".", "", None),
    ],
)
def test_numbers_are_read_as_they_are_written(text: str, decimal: str, thousands: str, number: float | None) -> None:
    assert make_format(decimal=decimal, thousands=thousands).number(text) == number


def test_dates_are_days_since_1970_in_utc() -> None:
    format = make_format(dates={"a": "iso", "b": "%d/%m/%Y %H:%M", "c": "%Y-%m-%dT%H:%M:%S%z"})
    assert format.days("a", "1970-01-02") == 1 and format.days("a", "1969-12-31T12:00") == -0.5
    assert format.days("b", "03/01/1970 06:00") == 2.25
    assert format.days("c", "1970-01-01T02:00:00+0200") == 0
    assert format.days("a", "1970-13-01") is None and format.days("b", "1970-01-01") is None
    stamps = np.array(["1970-01-11", "NaT"], dtype="datetime64[ns]")
    days, missing = Table({"a": stamps}, "t", format=format).numbers("a")
    assert days.tolist() == [10, 0] and missing.tolist() == [False, True]


def test_na_values_may_be_numbers_and_by_column() -> None:
    format = make_format(na_values={"age": [-99], "ward": ["?", "none"]})
    table = Table({"age": np.array(["-99.0", "3", "?"], dtype=object)}, "t", untyped=True, format=format)
    assert table.missing("age").tolist() == [True, False, False]
    typed = Table({"age": np.array([-99.0, 3.0]), "ward": np.array(["?", "none"], dtype=object)}, "t", format=format)
    assert typed.missing("age").tolist() == [True, False] and typed.missing("ward").all()


# Files of version 1, and what a file may not hold.

VERSION_1 = {
    "version": 1,
    "columns": [
        {"name": "age", "kind": "number", "mean": 50.0, "scale": 10.0, "categories": []},
        {"name": "smoker", "kind": "flag", "mean": 0.0, "scale": 1.0, "categories": []},
        {"name": "ward", "kind": "text", "mean": 0.0, "scale": 1.0, "categories": ["a", "b"]},
        {"name": "unit", "kind": "number", "mean": 7.0, "scale": 1.0, "categories": []},
    ],
    "target": "y",
    "client": "site",
    "classes": ["ill", "well"],
    "mean": 0.0,
    "scale": 1.0,
    "shape": [5],
    "image": None,
}


def test_an_encoding_of_version_1_encodes_as_it_did(tmp_path: Path) -> None:
    from comfedl.data.table_files import read_csv

    encoding = Encoding.from_dict(VERSION_1)
    assert {"version": 1, **encoding.to_dict()} == VERSION_1
    path = tmp_path / "new.csv"
    path.write_text("ward,age,smoker,unit,y\nb,60,true,7,well\na,45,False,9,ill\n")
    table = read_csv(path, encoding.format)
    assert encoding.x(table).tolist() == [[1, 1, 0, 1, 0], [-0.5, 0, 1, 0, 2]]
    assert encoding.y(table).tolist() == [1, 0]
    path.write_text("ward,age,smoker,unit\nc,60,true,7\n")
    with pytest.raises(cf.DataError, match=r"'ward' of new\.csv has the value 'c', which did not occur in training"):
        encoding.x(read_csv(path))
    path.write_text("ward,age,smoker,unit\na,,true,7\n")
    with pytest.raises(cf.DataError, match=r"'age' of new\.csv has 1 missing value .*trained without any there"):
        encoding.x(read_csv(path))


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"format": {"decimal": ";"}},
        {"format": {"secret": 1}},
        {"format": {"dates": {"age": "%d" * 100}}},
        {"format": {"dates": {"age": "("}}},
        {"format": {"dates": {"age": 3}}},
        {"format": {"na_values": {"age": [[]]}}},
        {"format": {"na_values": 3.5, "thousands": "x"}},
        {"format": {"encoding": "rot13"}},
        {"format": {"encoding": "a\0b"}},
        {"format": {"header": ["a"] * 2}},
        {"missing": "impute"},
        {"missing": None},
        {"columns": [{**VERSION_1["columns"][0], "fill": "x"}], "shape": [1]},
        {"columns": [{**VERSION_1["columns"][0], "fill": float("inf")}], "shape": [1]},
        {"columns": [{**VERSION_1["columns"][0], "fill": True}], "shape": [1]},
        {"columns": [{**VERSION_1["columns"][0], "indicator": 1}], "shape": [1]},
        {"columns": [{**VERSION_1["columns"][2], "unseen": "guess"}], "shape": [2]},
        {"columns": [{**VERSION_1["columns"][2], "unseen": []}], "shape": [2]},
        {"columns": [{**VERSION_1["columns"][2], "unseen": "other"}], "shape": [2]},  # three inputs
        {"columns": [{**VERSION_1["columns"][0], "indicator": True}], "shape": [1]},
        {"version": 3},
        {"version": [2]},
    ],
)
def test_what_no_run_has_written_is_refused(change: dict[str, Any]) -> None:
    written = {**VERSION_1, "version": 2, "format": {}, "missing": "error"}
    assert Encoding.from_dict(written).shape == (5,)
    with pytest.raises(ValueError):
        Encoding.from_dict(json.loads(json.dumps({**written, **change})))


def test_a_format_survives_json() -> None:
    format = make_format([-99, "?"], ",", ".", {"day": "%d.%m.%Y"}, ["a", "b"], "latin-1")
    assert CellFormat.from_dict(json.loads(json.dumps(format.to_dict()))) == format
    assert make_format().to_dict() == {} and CellFormat.from_dict({}) == CellFormat()
    assert CellFormat.from_dict({"header": False}).header is False


def test_missing_numbers_become_the_mean_of_those_that_train_has() -> None:
    """Unlike the median it does not move the column's mean; texts and flags get the most frequent value."""
    frame = {
        "client": ["a"] * 6 + ["b"] * 6,
        "split": (["train"] * 5 + ["test"]) * 2,
        "dose": np.array([1, 2, np.nan, 4, 10, 99, 3, np.nan, 5, 6, 1, 99]),
        "ward": np.array(["x", "y", "x", None, "x", "y", "y", "x", "x", "y", "x", "y"], dtype=object),
        "y": np.array([0, 1] * 6),
    }
    fed = cf.FederatedData.from_dataframe(frame, "client", "y", split="split", impute="mean")
    assert fed.encoding is not None
    dose, ward = fed.encoding.columns
    assert dose.fill == dose.mean == 4 and ward.fill == "x"
    x = torch.cat([fed.train[name][0] for name in fed.train])
    assert isinstance(x, torch.Tensor) and x[2, :2].tolist() == [0, 1]
