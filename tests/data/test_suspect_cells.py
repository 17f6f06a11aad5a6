"""Tables that can be read in two ways: each is named with its column, and what to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import comfedl as cf
from comfedl.analysis.load_run import load_run
from comfedl.analysis.predict import predict
from comfedl.config.schema import parse_config, run_config

OPTIONS: dict[str, Any] = {"client": "site", "target": "ill"}


def lines(rows: int = 40, **more: Any) -> list[str]:
    """A table of two sites with semicolons; ``more`` are functions from a row's number to a cell."""
    head = ["site", "age", *more, "ill"]
    cells = [
        ["ab"[row % 2], str(20 + row % 30), *(str(make(row)) for make in more.values()), "no" if row % 3 else "yes"]
        for row in range(rows)
    ]
    return [";".join(line) for line in [head, *cells]]


def read(given: list[str], tmp_path: Path, **options: Any) -> cf.FederatedData:
    (tmp_path / "wards.csv").write_text("\n".join(given) + "\n", encoding="utf-8")
    return cf.FederatedData.from_csv(tmp_path / "wards.csv", **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("cell", "warned"),
    [
        (lambda row: f"{1 + row % 9}.{100 + row}", True),  # 1.100 for one thousand and a hundred
        (lambda row: f"{1 + row % 9}.{100 + row}" if row % 2 else str(900 + row), True),
        (lambda row: f"0.{100 + row}", False),  # thousands do not begin with 0
        (lambda row: f"{1 + row % 9}.{100 + row}" if row % 2 else str(9000 + row), False),
        (lambda row: f"{1 + row % 9}.{10 + row}", False),
        (lambda row: str(row % 5), False),
    ],
)
def test_thousands_that_are_read_as_decimals_are_named(
    cell: Any, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(lines(count=cell), tmp_path)
    assert ("Column 'count' of wards.csv: '.' is read as the decimal mark" in caplog.text) == warned
    assert ('set thousands = "." and decimal = ","' in caplog.text) == warned
    caplog.clear()
    if warned:
        fed = read(lines(count=cell), tmp_path, thousands=".", decimal=",", scale=False)
        assert caplog.text == "" and fed.train["a"][0][:, 1].min() > 100


def test_new_rows_in_another_notation_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read(lines(dose=lambda row: f"{row},5"), tmp_path, decimal=",")
    data = {"name": "csv", "path": "wards.csv", **OPTIONS, "decimal": ","}
    run_config(parse_config({"rounds": 2, "data": data, "algorithm": {"name": "fedavg"}}), out=Path("run"))
    caplog.clear()
    Path("new.csv").write_text("\n".join(lines(dose=lambda row: f"{row}.5")))
    with pytest.raises(cf.DataError, match=r"'dose' of new.csv has '0.5' in rows 1, .* decimal = \",\"; write these"):
        predict(load_run("run"), Path("new.csv"))
    Path("new.csv").write_text("\n".join(lines(dose=lambda row: f"{row + 1},{100 + row}")))
    assert predict(load_run("run"), Path("new.csv"))
    assert "Column 'dose' of new.csv: ',' is read as the decimal mark, '1,100' as 1.1" in caplog.text


@pytest.mark.parametrize(
    ("day", "advice"),
    [
        (lambda row: f"{1 + row % 12}/{13 + row % 15}/2024", '{ day = "%m/%d/%Y" }, or'),
        (lambda row: f"{13 + row % 15}/{1 + row % 12}/2024", '{ day = "%d/%m/%Y" }, or'),
        (lambda row: f"{1 + row % 12}/{1 + row % 11}/2024", '{ day = "%d/%m/%Y" } (or "%m/%d/%Y", if the month'),
    ],
)
def test_the_order_of_day_and_month_is_that_of_the_cells(day: Any, advice: str, tmp_path: Path) -> None:
    with pytest.raises(cf.DataError) as refused:
        read(lines(day=day), tmp_path)
    assert f"dates = {advice}" in str(refused.value)


def test_keys_in_advice_are_toml(tmp_path: Path) -> None:
    def renamed(make: Any) -> list[str]:
        head, *rest = lines(x=make)
        return [head.replace(";x;", ";CRP (mg/l);"), *rest]

    with pytest.raises(cf.DataError, match=r'dates = { "CRP \(mg/l\)" = "%d\.%m\.%Y" }'):
        read(renamed(lambda row: f"{1 + row % 28}.{1 + row % 12}.2024"), tmp_path)
    with pytest.raises(cf.DataError, match=r'impute = { "CRP \(mg/l\)" = "most-frequent" }'):
        read(renamed(lambda row: "" if row == 3 else row), tmp_path)


def test_a_date_that_is_filled_in_is_shown_as_one(tmp_path: Path) -> None:
    day = lines(day=lambda row: "" if row == 4 else f"2024-01-{1 + row % 28:02}")
    fed = read(day, tmp_path, dates=["day"], impute={"day": "2024-01-15"})
    assert fed.encoding is not None and fed.encoding.report is not None
    (fate,) = (column.fate for column in fed.encoding.report.columns if column.name == "day")
    assert "1 filled in with 2024-01-15" in fate and "scaled by mean 2024-01-1" in fate


def test_names_that_are_the_same_but_for_how_they_are_written_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head, *rest = lines(ward=lambda row: ["ICU", "Icu", "icu ", "surgery"][row // 2 % 4])
    rest = [line.replace("b;", "North  A;", 1) if row % 4 == 1 else line for row, line in enumerate(rest)]
    rest = [line.replace("b;", "north a;", 1) if line.startswith("b") else line for line in rest]
    rest = [line + "." if line.endswith("yes") and row > 20 else line for row, line in enumerate(rest)]
    read([head, *rest], tmp_path)
    assert "Column 'site' of wards.csv has 'North  A' (10 rows) and 'north a' (10 rows), each of which is a client" in (
        caplog.text
    )
    assert "Column 'ill' of wards.csv has 'yes' (7 rows) and 'yes.' (7 rows), each of which is a label" in caplog.text
    assert "'ICU' (10 rows) and 'Icu' (10 rows) and 'icu' (10 rows), each of which is a value" in caplog.text
    caplog.clear()
    read(lines(grade=lambda row: f"{row % 3}."), tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize("mark", ["k.A.", "#NV", "n.a.", "#DIV/0!"])
def test_marks_of_missing_values_among_texts_are_named(
    mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(lines(smoker=lambda row: [mark, "yes", "no"][row % 3]), tmp_path)
    assert f"{mark!r} is taken for a value of the column 'smoker', in 14 of 40 rows" in caplog.text


def test_a_file_in_utf8_that_is_read_in_another_encoding_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    german = lines(ward=lambda row: ["Notfälle", "Innere"][row % 3 == 0])
    read(german, tmp_path, encoding="latin-1")
    assert "it looks like UTF-8: 'Ã¤' is probably 'ä'" in caplog.text and "byte order mark" in caplog.text
    pairs = [("latin-1", "latin-1"), ("utf-8", "utf-8"), ("latin-1", "utf-8-sig"), ("utf-16", "utf-16")]
    for encoding, written in pairs:
        caplog.clear()
        (tmp_path / "other.csv").write_text("\n".join(german), encoding=written)
        fed = cf.FederatedData.from_csv(tmp_path / "other.csv", **OPTIONS, encoding=encoding)
        assert fed.encoding is not None and fed.encoding.columns[1].categories == ("Innere", "Notfälle")
        assert caplog.text == ""


def test_a_delimiter_at_the_end_of_each_line_is_no_column(tmp_path: Path) -> None:
    plain = read(lines(), tmp_path)
    for header in (None, True):
        closed = read([f"{line};;" for line in lines()], tmp_path, header=header)
        assert closed.digest() == plain.digest()
    named = read([f"{line};" for line in lines()[1:]], tmp_path, header=["site", "age", "ill"])
    assert named.digest() == plain.digest()
    with pytest.raises(cf.DataError, match="of column 4 is empty"):
        read([lines()[0] + ";", *(f"{line};1" for line in lines()[1:])], tmp_path)
    kept = read([f"{line};" for line in lines()[1:]], tmp_path, header=["site", "age", "ill", "x"], drop=["x"])
    assert kept.digest() == plain.digest()


@pytest.mark.parametrize("word", ["-", "?", "n/a"])
def test_a_text_among_numbers_is_refused_with_column_row_and_client(word: str, tmp_path: Path) -> None:
    dose = lines(dose=lambda row: word if row in (7, 9) else row / 7)
    with pytest.raises(cf.DataError) as refused:
        read(dose, tmp_path)
    said = f"Column 'dose' of wards.csv has numbers in 38 of 40 rows, but {word!r} in rows 8, 10 (b); "
    assert str(refused.value).startswith(said) and f'na_values = ["{word}"]' in str(refused.value)


def test_a_text_held_out_is_refused_with_column_row_and_client(tmp_path: Path) -> None:
    head, *rest = lines(dose=lambda row: "odd" if row == 7 else row / 7)
    split = [f"{head};part", *(f"{line};{'test' if row == 7 else 'train'}" for row, line in enumerate(rest))]
    with pytest.raises(cf.DataError, match=r"'dose' of wards.csv has numbers in .*'odd' in row 8 .*\(b\)"):
        read(split, tmp_path, split="part")
