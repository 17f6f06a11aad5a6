"""Tables as hospitals and public archives write them, from the config to the predictions."""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.cli.main import main
from comfedl.utils.toml import to_toml

Command = Callable[..., tuple[int, str]]
HEADER = ["age", "workclass", "education", "occupation", "sex", "gain", "country", "income"]


@pytest.fixture
def comfedl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs a command in this process, in a folder of its own; gives its exit code and what it said."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["comfedl", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), "".join(capsys.readouterr())

    return call


def write_config(data: dict[str, Any], loss: str = "bce", **more: Any) -> None:
    settings = {"rounds": 3, "loss": loss, "data": data, "algorithm": {"name": "robust", "lr": 0.1}, **more}
    Path("run.toml").write_text(to_toml(settings))


def predictions(name: str = "predictions.csv") -> list[dict[str, str]]:
    with Path(name).open(newline="") as file:
        return list(csv.DictReader(file))


def adult_lines(rows: int, seed: int, dot: str = "") -> list[str]:
    """Lines like those of the Adult census: no header, a space after each comma, "?" for what is missing."""
    draw = random.Random(seed)
    lines = []
    for _ in range(rows):
        age, education = draw.randint(17, 90), draw.choice(["HS-grad", "Bachelors", "Masters"])
        work = draw.choice(["Private", "State-gov", "?"])
        occupation = draw.choice(["Sales", "Tech-support", "Craft-repair"]) if work != "?" else "?"
        rich = age + 20 * (education == "Masters") + draw.gauss(0, 10) > 60
        cells = [age, work, education, occupation, draw.choice(["Male", "Female"]), draw.choice([0, 0, 2174])]
        country = draw.choice(["United-States"] * 20 + ["Cuba", "?"])
        lines.append(", ".join(map(str, [*cells, country, f"{'>50K' if rich else '<=50K'}{dot}"])))
    return lines


def test_the_adult_census_from_config_to_predictions(comfedl: Command) -> None:
    """Each message names what to write next; the files are not edited."""
    Path("adult.data").write_text("\n".join([*adult_lines(400, 0), "", ""]))
    Path("adult.test").write_text("\n".join(["|1x3 Cross validator", *adult_lines(100, 1, dot="."), ""]))
    data: dict[str, Any] = {"name": "csv", "path": "adult.data", "client": "occupation", "target": "income"}
    write_config(data)
    code, said = comfedl("data", "describe", "run.toml")
    assert code == 2 and "first line of adult.data looks like data" in said and "header = false" in said
    write_config(data := data | {"header": HEADER})
    code, said = comfedl("data", "describe", "run.toml")
    assert code == 0 and "'?' is taken for a client's name" in said and 'na_values = ["?"]' in said
    write_config(data := data | {"na_values": ["?"]})
    code, said = comfedl("data", "describe", "run.toml")
    assert code == 2 and "'occupation' of adult.data has" in said and 'missing = "drop"' in said
    write_config(data := data | {"missing": "drop"})
    gone = sum("?" in line for line in adult_lines(400, 0))
    code, said = comfedl("data", "describe", "run.toml")
    assert code == 0 and f"{gone} of 400 rows are left out" in said
    write_config(data | {"impute": "most-frequent"})
    gone = sum(line.split(", ")[3] == "?" for line in adult_lines(400, 0))
    code, said = comfedl("run", "run.toml", "--out", "run")
    assert code == 0 and f"{gone} of 400 rows are left out, since they miss a value (without a client {gone})" in said
    code, said = comfedl("predict", "run", "adult.test")
    assert code == 0 and "'|1x3 Cross validator'" in said and "100 predictions" in said
    rows = predictions()
    assert [row["income"] for row in rows] == [line.rpartition(", ")[2] for line in adult_lines(100, 1, dot=".")]
    assert {row["prediction"] for row in rows} <= {"<=50K", ">50K"}
    for row in rows:
        assert float(row["probability of <=50K"]) + float(row["probability of >50K"]) == pytest.approx(1, abs=2e-6)
    code, said = comfedl("evaluate", "run", "--data", "adult.test")
    assert code == 0 and "Craft-repair" in said and "of 100 rows are left out" in said
    assert comfedl("evaluate", "run")[0] == 0
    code, said = comfedl("personalise", "run", "--data", "adult.test", "--steps", "2")
    assert code == 0 and "rows are left out" in said
    assert comfedl("report", "run", "--out", "report.html")[0] == 0


def test_columns_without_names_have_numbers(comfedl: Command) -> None:
    Path("adult.data").write_text("\n".join(adult_lines(200, 0)))
    data = {"name": "csv", "path": "adult.data", "header": False, "na_values": ["?"], "missing": "drop", "drop": [7]}
    write_config(data | {"client": 4, "target": 8})
    code, said = comfedl("run", "run.toml", "--out", "run")
    assert code == 0, said
    encoding = cf.load_run("run").encoding
    assert encoding is not None and (encoding.client, encoding.target) == ("4", "8")
    assert [column.name for column in encoding.columns] == ["1", "2", "3", "5", "6"]
    assert comfedl("predict", "run", "adult.data")[0] == 0
    assert [*predictions()[0]][:5] == ["row", "4", "7", "8", "prediction"]


def german(number: float, digits: int = 1) -> str:
    return f"{number:,.{digits}f}".translate(str.maketrans(",.", ".,"))


def hospital(rows: int = 300) -> list[dict[str, Any]]:
    """Patients, as values."""
    draw = random.Random(3)
    found = []
    for _ in range(rows):
        age = round(draw.gauss(60, 12), 1)
        found.append(
            {
                "Klinik": draw.choice(["Köln", "München", "Bonn"]),
                "Alter": None if draw.random() < 0.05 else age,
                "Kosten": round(draw.lognormvariate(8, 1), 2),
                "Aufnahme": f"{draw.randint(2019, 2023)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
                "Station": draw.choice(["Chirurgie", "Innere", "Notfälle"]),
                "Entlassen": "ja" if age + draw.gauss(0, 8) < 60 else "nein",
            }
        )
    return found


def write_german(path: Path, encoding: str, rows: list[dict[str, Any]]) -> None:
    lines = ["Auszug vom 01.02.2024", "", ";".join(rows[0])]
    for row in rows:
        day = ".".join(reversed(row["Aufnahme"].split("-")))
        age = "k.A." if row["Alter"] is None else german(row["Alter"])
        cells = [row["Klinik"], age, german(row["Kosten"], 2), day, row["Station"], row["Entlassen"]]
        lines.append(";".join(cells))
    path.write_bytes("\r\n".join([*lines, ""]).encode(encoding))


GERMAN: dict[str, Any] = {
    "na_values": ["k.A."],
    "decimal": ",",
    "thousands": ".",
    "dates": {"Aufnahme": "%d.%m.%Y"},
    "impute": "median",
}


def test_a_european_file_from_config_to_predictions(comfedl: Command) -> None:
    write_german(Path("klinik.csv"), "cp1252", hospital())
    data: dict[str, Any] = {"name": "csv", "path": "klinik.csv", "client": "Klinik", "target": "Entlassen"}
    steps: list[tuple[str, Any, str]] = [
        ("encoding", "cp1252", r"it is not text in utf-8; .* encoding = .cp1252."),
        ("decimal", ",", r"'Alter' of klinik\.csv has decimal commas such as '[^']*'; set decimal = .,."),
        ("na_values", ["k.A."], r"has numbers in \d+ of 300 rows, but 'k\.A\.' in rows .* na_values = \[.k\.A\..\]"),
        ("impute", "median", r"'Alter' of klinik\.csv has \d+ missing values .*impute = .median."),
        ("thousands", ".", r"'Kosten' of klinik\.csv has numbers such as '[^']*' that .*; set thousands = .\.."),
        ("dates", GERMAN["dates"], r"has dates such as '\d\d\.\d\d\.\d{4}'; .* dates = { Aufnahme = .%d\.%m\.%Y. }"),
    ]
    for key, value, message in steps:
        write_config(data)
        code, said = comfedl("data", "describe", "run.toml")
        assert code == 2 and re.search(message, said), (key, said)
        data[key] = value
    write_config(data)
    code, said = comfedl("data", "describe", "run.toml")
    assert code == 0 and re.search(r"Aufnahme +│ date +│ 2019-\d\d-\d\d to 2023-\d\d-\d\d", said)
    assert re.search(r"Alter +│ number .* filled in with .* and an input that says where", " ".join(said.split()))
    assert comfedl("run", "run.toml", "--out", "run")[0] == 0
    code, said = comfedl("predict", "run", "klinik.csv", "--client-column", "Klinik")
    assert code == 0 and {row["model"] for row in predictions()} == {"Köln", "München", "Bonn"}


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-8", "utf-8-sig", "utf-16"])
def test_a_european_file_says_what_the_values_say(encoding: str, tmp_path: Path) -> None:
    """The same data, in the notation of the machine, give the same tensors."""
    from comfedl.data.from_tables import Shares, from_file

    write_german(tmp_path / "klinik.csv", encoding, hospital())
    named = {} if encoding in ("utf-8", "utf-8-sig", "utf-16") else {"encoding": encoding}  # the last two have marks
    fed = from_file(str(tmp_path / "klinik.csv"), "Klinik", "Entlassen", Shares(), **GERMAN, **named)
    values = hospital()
    frame = {name: [row[name] for row in values] for name in values[0]}
    plain = cf.FederatedData.from_dataframe(frame, "Klinik", "Entlassen", dates=["Aufnahme"], impute="median")
    assert fed.names == plain.names == ("Bonn", "Köln", "München")
    for split in ("train", "validation", "test"):
        one, other = fed.split(split), plain.split(split)
        assert one is not None and other is not None
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


def test_describe_lists_every_column_and_the_small_clients(comfedl: Command) -> None:
    draw = random.Random(0)
    lines = ["site,age,unit,code,note,ward,id,y"]
    for k in range(120):
        site = "tiny" if k < 4 else draw.choice(["north", "south"])
        age = "" if k % 10 == 5 else str(draw.randint(20, 90))
        label = "ill" if site == "tiny" else draw.choice(["ill", "well"])
        ward = "tent" if site == "tiny" else draw.choice(["a", "b"])
        lines.append(f"{site},{age},mg,{draw.choice(['x', 'y'])},{'seen' if k % 2 else ''},{ward},id{k},{label}")
    Path("rows.csv").write_text("\n".join(lines))
    data = {"name": "csv", "path": "rows.csv", "client": "site", "target": "y", "drop": ["code"], "missing": "drop"}
    write_config(data | {"impute": {"note": "most-frequent"}})
    code, said = comfedl("data", "describe", "run.toml")
    table = " ".join(said.split())
    assert code == 0
    for expected in [
        r"│ site │ text │ 3: north, south, tiny │ - │ the client",
        r"│ age │ number │ \d+ to \d+ │ 10\.0% │ scaled by mean",
        r"│ unit │ text │ 1: mg │ - │ left out: it is 'mg' in all train rows",
        r"│ code │ text │ 2: x, y │ - │ left out: dropped by the config",
        r"│ note │ text │ 1: seen │ 50\.0% │ only where it is missing",
        r"│ ward │ text │ 3: a, b, tent │ - │ one input for each of 2 values, one for 1 more that one client",
        r"│ id │ text │ 120: .* │ - │ left out: each of its values occurs at one client only",
        r"│ y │ text │ 2: ill, well │ - │ y",
        r"Fewer than 20 train rows: tiny [234]",
        r"One label only in train: tiny",
        r"rows\.csv: 12 of 120 rows are left out, since they miss a value",
        r"│ all │ 12 │",
    ]:
        assert re.search(expected, table), expected


@pytest.mark.parametrize(
    ("header", "row", "advice"),
    [
        (["39", "Private", "0.5", "ill"], ["40", "Private", "1.5", "well"], "looks like data"),
        (["0.5", "1.5"], ["2.5", "3.5"], "looks like data"),
        (["2019", "2020", "site", "y"], ["1", "2", "a", "b"], None),  # years are names
        (["y", "site"], ["y", "b"], None),
        (["7", "7", "a", "b"], ["1", "2", "c", "d"], "occurs twice"),
        (["a", "", "b", "c"], ["1", "2", "c", "d"], "is empty"),
    ],
)
def test_a_header_that_looks_like_data(header: list[str], row: list[str], advice: str | None, tmp_path: Path) -> None:
    from comfedl.data.cell_format import make_format
    from comfedl.data.table_files import read_csv

    path = tmp_path / "rows.csv"
    path.write_text("\n".join(",".join(cells) for cells in (header, row, row)))
    if advice is None:
        assert [*read_csv(path).columns] == header
    else:
        with pytest.raises(cf.DataError, match=advice) as refused:
            read_csv(path)
        assert "header = false" in str(refused.value)
    if advice == "looks like data":
        assert [*read_csv(path, make_format(header=True)).columns] == header
    assert [*read_csv(path, make_format(header=False)).columns] == [str(k + 1) for k in range(len(header))]
    named = [f"c{k}" for k in range(len(header))]
    assert len(read_csv(path, make_format(header=named))) == 3
    path.write_text("\n".join([",".join(named), path.read_text()]))  # the new rows come with their names
    assert len(read_csv(path, make_format(header=named))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decimal": ";"}, r'decimal is \';\', but it must be "\." or ","'),
        ({"decimal": ",", "thousands": ","}, r'thousands is \',\', but with decimal = ","'),
        ({"thousands": 3}, "thousands is 3"),
        ({"na_values": [True]}, r"na_values is \[True\], but it must be a list"),
        ({"na_values": {"agee": ["?"]}}, "na_values names the column 'agee', .* did you mean 'age'"),
        ({"dates": ["agee"]}, "dates names the column 'agee'"),
        ({"dates": {"age": "%d"}}, r"dates\.age is '%d', but it must be \"iso\""),
        ({"dates": {"age": "%Y %Y"}}, r"dates\.age is '%Y %Y'"),
        ({"dates": ["age"]}, "'age' of rows.csv has '30' in rows 1, 2, 3 and 57 more, but it is read as dates"),
        ({"header": ["a", "a"]}, "its names must be distinct"),
        ({"header": "age"}, "header is 'age', but it must be a list of column names, true or false"),
        ({"header": ["a", "b"]}, "Line 1 of .* has 4 cells, but the config names 2"),
        ({"encoding": "klingon"}, "encoding is 'klingon', but it must be the name of a text encoding"),
        ({"encoding": "zlib"}, "encoding is 'zlib'"),
        ({"impute": "average"}, "impute is 'average', but it must be \"median\""),
        ({"impute": {"agee": 3}}, "impute.agee is no column of rows.csv; did you mean 'age'"),
        ({"impute": {"site": "x"}}, "impute.site is no input column"),
        ({"impute": {"age": "old"}}, "impute.age is 'old', but the column has numbers"),
        ({"impute": {"age": [3]}}, r"impute.age is \[3\]"),
        ({"missing": "impute"}, "missing is 'impute'"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], message: str, comfedl: Command) -> None:
    rows = [f"{'ab'[k % 2]},{30 + k},{'uv'[k % 3 == 0]},{'01'[k % 5 == 0]}" for k in range(60)]
    Path("rows.csv").write_text("\n".join(["site,age,ward,y", *rows]))
    write_config({"name": "csv", "path": "rows.csv", "client": "site", "target": "y", **options})
    code, said = comfedl("run", "run.toml", "--out", "run")
    assert code == 2 and re.search(message, said) and said.count("error: ") == 1 and not Path("run").exists(), said


def test_old_settings_are_resolved_as_before(comfedl: Command) -> None:
    """So that runs from before these options are resumed."""
    Path("rows.csv").write_text("\n".join(["site,age,y", *(f"{'ab'[k % 2]},{k},{k % 3 == 0}" for k in range(60))]))
    write_config({"name": "csv", "path": "rows.csv", "client": "site", "target": "y"})
    assert comfedl("run", "run.toml", "--out", "run")[0] == 0
    text = Path("run/config.toml").read_text()
    for key in ("impute", "na_values", "decimal", "thousands", "dates", "header", "encoding"):
        assert key not in text
    assert json.loads(Path("run/data.json").read_text())["version"] == 1  # numbers alone need nothing new


# Parquet and Arrow.


def test_parquet_and_arrow_are_the_same_table(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    from comfedl.data.from_tables import Shares, from_file

    values = hospital()
    columns = {name: [row[name] for row in values] for name in values[0]}
    table = pa.table(columns)
    days = pa.array(columns["Aufnahme"]).cast(pa.date32())
    table = table.set_column(table.column_names.index("Aufnahme"), "Aufnahme", days)
    table = table.set_column(4, "Station", table.column("Station").dictionary_encode())
    parquet.write_table(table, tmp_path / "rows.parquet")
    feather.write_feather(table, tmp_path / "rows.feather")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    with (tmp_path / "rows.csv").open("w", newline="") as text:
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in values)
    options = {"dates": ["Aufnahme"], "impute": {"Alter": "median"}}
    made = [
        from_file(str(tmp_path / f"rows.{kind}"), "Klinik", "Entlassen", Shares(), **options)
        for kind in ("csv", "parquet", "feather", "arrow")
    ]
    for other in made[1:]:
        assert other.encoding == made[0].encoding
        assert torch.equal(other.train.x, made[0].train.x) and torch.equal(other.train.y, made[0].train.y)
    with pytest.raises(cf.DataError, match=r"the type datetime64.* dates = \[\"Aufnahme\"\]"):
        from_file(str(tmp_path / "rows.parquet"), "Klinik", "Entlassen", Shares(), impute={"Alter": "median"})
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-100])
    with pytest.raises(cf.DataError, match=r"broken\.parquet cannot be read"):
        from_file(str(tmp_path / "broken.parquet"), "Klinik", "Entlassen", Shares())


def test_whole_numbers_with_gaps_stay_whole(tmp_path: Path) -> None:
    """Parquet's nullable integers: a client 7 must not become 7.0."""
    import pyarrow as pa
    from pyarrow import parquet

    from comfedl.data.table_files import read_table

    parquet.write_table(pa.table({"site": [7, None, 8], "flag": [True, None, False]}), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    assert table.texts("site") == ["7", "", "8"] and table.missing("flag").tolist() == [False, True, False]
    assert table.numbers("flag")[0].tolist() == [1, 0, 0]


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfedl.data.table_files import read_table

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(cf.DataError, match="is read with pyarrow, which is not installed; run: pip install pyarrow"):
        read_table(tmp_path / "t.parquet")


def test_a_folder_of_european_files(tmp_path: Path) -> None:
    rows = hospital()
    for name in ("Köln", "München", "Bonn"):
        write_german(tmp_path / f"{name}.csv", "utf-8", [row for row in rows if row["Klinik"] == name])
    fed = cf.FederatedData.from_folder(tmp_path, target="Entlassen", drop=["Klinik"], **GERMAN)
    frame = {name: [row[name] for row in rows] for name in rows[0]}
    whole = cf.FederatedData.from_dataframe(frame, "Klinik", "Entlassen", dates=["Aufnahme"], impute="median")
    assert fed.names == whole.names and fed.encoding is not None
    assert torch.equal(fed.train["Bonn"][1], whole.train["Bonn"][1])
    assert np.allclose(fed.train["Bonn"][0], whole.train["Bonn"][0], atol=1e-5)
    assert fed.encoding.report is not None and len(fed.encoding.report.notes) == 3  # a title line in each file


# The real file.


@pytest.mark.download
def test_the_real_adult_files(comfedl: Command) -> None:
    from comfedl.data.download import cache_dir
    from comfedl.data.registry import fetch

    folder = fetch("adult")
    assert folder == cache_dir() / "adult"
    names = "age workclass fnlwgt education education_num marital_status occupation relationship race sex"
    header = [*names.split(), "capital_gain", "capital_loss", "hours", "country", "income"]
    data = {"name": "csv", "path": str(folder / "adult.data"), "client": "occupation", "target": "income"}
    write_config(data)
    assert "looks like data" in comfedl("run", "run.toml", "--out", "run")[1]
    more = {"header": header, "na_values": ["?"], "missing": "drop", "impute": "median", "drop": ["fnlwgt"]}
    write_config(data | more, rounds=20)
    code, said = comfedl("run", "run.toml", "--out", "run")
    assert code == 0 and "1843 of 32561 rows are left out" in said
    code, said = comfedl("predict", "run", str(folder / "adult.test"), "--client-column", "occupation")
    assert code == 0 and "966 of 16281 rows are not clients of this run" in said
    rows = predictions()
    right = np.mean([row["prediction"] == row["income"].rstrip(".") for row in rows])
    assert len(rows) == 16281 and right > 0.8
    assert comfedl("evaluate", "run", "--data", str(folder / "adult.test"))[0] == 0


@pytest.mark.parametrize(
    "values", [[1.5, 2.0, 3.0], [7, 8, 9], [True, False, True]], ids=["floats", "integers", "flags"]
)
def test_dates_in_a_typed_column_of_something_else_are_refused(values: list[Any]) -> None:
    """As in Parquet and Arrow files: reading the dates asked for the missing cells, and these for the dates."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"when": values * 8, "ward": ["a", "b", "c"] * 8, "y": ["no", "yes"] * 12})
    with pytest.raises(cf.DataError, match=r"'when' of the table has .*read as dates"):
        cf.FederatedData.from_dataframe(table, client="ward", target="y", dates={"when": "%d.%m.%Y"})


def write_csv(name: str, columns: dict[str, Any]) -> None:
    with Path(name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def wards(rows: int = 60, **more: Any) -> dict[str, Any]:
    draw = random.Random(0)
    ages = [draw.randint(20, 90) for _ in range(rows)]
    base = {"site": ["ab"[row % 2] for row in range(rows)], "age": ages, "ill": [int(age > 55) for age in ages]}
    return {**base, **more}


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        (list(range(1, 61)), "all 60 values are different whole numbers"),
        ([10_000_000 + 977 * row for row in range(60)], "all 60 values are different whole numbers"),
        ([*range(1, 59), 58, 58], "58 of 60 values are different whole numbers"),
        ([1 + row // 2 for row in range(60)], "it counts the rows of each client"),
        ([row + 0.5 for row in range(60)], ""),  # no whole numbers
        ([row % 30 for row in range(60)], ""),  # twice at a client
        ([row % 7 for row in range(60)], ""),
    ],
)
def test_an_identifier_that_becomes_an_input_is_named(
    values: list[Any], warned: str, comfedl: Command, caplog: pytest.LogCaptureFixture
) -> None:
    write_csv("wards.csv", wards(number=values))
    write_config({"name": "csv", "path": "wards.csv", "client": "site", "target": "ill"})
    for command in (["data", "describe", "run.toml"], ["run", "run.toml", "--force"]):
        caplog.clear()
        assert comfedl(*command)[0] == 0
        assert (f"Column 'number': {warned}" in caplog.text) if warned else "identifier" not in caplog.text
        assert not warned or 'drop = ["number"]' in caplog.text
    caplog.clear()
    assert comfedl("data", "describe", "run.toml", "--set", 'data.drop=["number"]')[0] == 0
    assert "identifier" not in caplog.text


def test_dates_and_few_rows_are_no_identifiers(comfedl: Command, caplog: pytest.LogCaptureFixture) -> None:
    data = {"name": "csv", "path": "wards.csv", "client": "site", "target": "ill"}
    days = [f"{1 + row % 28:02}.{1 + row // 28:02}.2024" for row in range(60)]
    write_csv("wards.csv", wards(day=days))
    write_config({**data, "dates": {"day": "%d.%m.%Y"}})
    assert comfedl("data", "describe", "run.toml")[0] == 0
    write_csv("wards.csv", wards(20, count=list(range(20))))
    write_config(data)
    assert comfedl("data", "describe", "run.toml")[0] == 0
    assert "identifier" not in caplog.text


def test_a_column_that_is_empty_in_every_new_row_is_named(comfedl: Command, caplog: pytest.LogCaptureFixture) -> None:
    blanks = ["" if row % 9 == 0 else "xyz"[row % 3] for row in range(60)]
    days = ["" if row == 5 else f"2024-0{1 + row % 3}-0{1 + row % 7}" for row in range(60)]
    write_csv("wards.csv", wards(kind=blanks, day=days))
    options = {"impute": {"age": "median", "kind": "most-frequent", "day": "2024-02-02"}, "dates": ["day"]}
    write_config({"name": "csv", "path": "wards.csv", "client": "site", "target": "ill", **options})
    assert comfedl("run", "run.toml")[0] == 0
    assert "identifier" not in caplog.text
    empty = [""] * 12
    write_csv("new.csv", {"age": empty, "kind": empty, "day": empty, "ill": [0, 1] * 6, "site": ["c"] * 12})
    for command in (["predict", "runs/run", "new.csv"], ["evaluate", "runs/run", "--data", "new.csv"]):
        caplog.clear()
        assert comfedl(*command)[0] == 0
        for column, fill in (("age", "[0-9.]+"), ("kind", "'[xyz]'"), ("day", "2024-02-02")):
            said = f"column '{column}' has no value in any of its 12 rows; all are filled in with {fill}, "
            assert re.search(said, caplog.text), caplog.text
    write_csv("new.csv", {"age": [50, *empty[1:]], "kind": ["x", *empty[1:]], "day": ["2024-01-01", *empty[1:]]})
    caplog.clear()
    assert comfedl("predict", "runs/run", "new.csv", "--force")[0] == 0
    assert caplog.text == ""
