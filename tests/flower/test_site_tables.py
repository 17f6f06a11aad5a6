"""Sites with a table each: the encoding and the model are those of the joined table; no more is said than asked."""

from __future__ import annotations

import csv
import json
import logging
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import numpy as np
import torch
from flwr.app import Message

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.personalize import personalize
from comfedl.analysis.predict import predict
from comfedl.config.schema import Config, parse_config, run_config
from comfedl.data.site_columns import TableSpec
from comfedl.data.site_summary import Numbers, Summary, encoding_from, find_absurd, read_summary, weighted
from comfedl.data.site_table import SiteTable
from comfedl.data.tabular import Encoding
from comfedl.flower import serialization
from comfedl.flower.apps import client_app
from comfedl.flower.local_trial import find_tables, run_local
from comfedl.flower.server import serve
from comfedl.flower.site_tables import site_table
from comfedl.utils.errors import MalformedMessage
from flower.test_flower import rows
from helpers.in_process import InProcess

SITES = ("north", "south", "west")
COLUMNS = {"age": "number", "dose": "number", "smoker": "flag", "ward": "category", "seen": "date", "same": "number"}
Row = dict[str, str]


def patients(site: str, count: int, seed: int = 0) -> list[Row]:
    """Rows of a site: with gaps, a ward that it alone has, and numbers whose mean is large beside their spread."""
    draw = random.Random(f"{site} {seed}")
    shift = SITES.index(site) if site in SITES else 1
    found = []
    for _ in range(count):
        age = 50 + 10 * shift + draw.gauss(0, 9.7)
        ill = draw.random() < 1 / (1 + math.exp(-(age - 60) / 8))
        found.append({
            "age": "" if draw.random() < 0.15 else f"{age:.4f}",
            "dose": f"{1e6 + 3 * shift + draw.gauss(0, 0.7):.5f}",
            "smoker": draw.choice(["true", "false", "false"]),
            "ward": draw.choice(["A", "B", "C", f"only {site}"]) if draw.random() < 0.9 else "",
            "seen": f"20{10 + draw.randrange(9)}-0{1 + draw.randrange(9)}-1{draw.randrange(9)}",
            "same": "7",
            "stay": f"{age / 7 + draw.gauss(0, 1):.4f}",
            "ill": "yes" if ill else "no",
        })  # fmt: skip
    return found


def write(path: Path, table: Sequence[Row], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)
    return path


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, list[Row]]:
    found = {site: patients(site, 60 + 25 * k) for k, site in enumerate(SITES)}
    for site, own in found.items():
        write(tmp_path / f"{site}.csv", own)
    joined = [{"hospital": site, **row} for site, own in found.items() for row in own]
    random.Random(1).shuffle(joined)
    # Within a site the order must stay: the split is drawn by position.
    places = {site: iter(own) for site, own in found.items()}
    write(tmp_path / "joined.csv", [{"hospital": row["hospital"], **next(places[row["hospital"]])} for row in joined])
    return found


IMPUTE = {"age": "mean", "ward": "most-frequent"}
TASKS: dict[str, dict[str, Any]] = {
    "classification": {"target": "ill"},
    "regression": {"target": "stay", "scale_target": True},
}


def site_config(task: str = "classification", data: Mapping[str, Any] | None = None, **more: Any) -> Config:
    own = {**TASKS[task], **({"classes": ["no", "yes"]} if task == "classification" else {})}
    table = {"name": "sites", "columns": COLUMNS, "min_count": 1, "impute": IMPUTE, **own, **(data or {})}
    return parse_config({
        "rounds": 4,
        "seed": 5,
        "data": {key: value for key, value in table.items() if value is not None},
        "loss": "cross_entropy" if task == "classification" else "mse",
        "algorithm": {"name": "robust", "gamma": 0.2, "lr": 0.1, "batch_size": 8, "local_steps": 3},
        "flower": {"deadline": 5.0, "patience": 1.0},
        **more,
    })  # fmt: skip


def test_tables_do_not_go_with_secure_aggregation() -> None:
    with pytest.raises(cf.ConfigError, match=r"secure_aggregation is asked for, but data\.columns is as well"):
        site_config(secure_aggregation={})


def joined_config(folder: Path, task: str = "classification", **more: Any) -> Config:
    other = "stay" if task == "classification" else "ill"
    data = {"name": "csv", "path": str(folder / "joined.csv"), "client": "hospital", **TASKS[task]}
    settings = site_config(task).resolved()
    del settings["flower"]
    table = {**data, "drop": [other], "impute": IMPUTE, "dates": ["seen"]}
    return parse_config({**settings, "data": table, **more})


def grid_of_tables(folder: Path, nodes: Mapping[str, Mapping[str, Any]] | None = None) -> InProcess:
    app = client_app(site_table, folder / "state")
    found = {}
    for k, site in enumerate(SITES):
        node = {"site": site, "table": str(folder / f"{site}.csv"), **(nodes or {}).get(site, {})}
        found[(7919 * (k + 3)) % 101] = app, {key: value for key, value in node.items() if value is not None}
    return InProcess(found)


def node_of(grid: InProcess, site: str) -> int:
    return next(node for node, (_, settings) in grid.sites.items() if settings["site"] == site)


def encoding_in(folder: Path) -> Encoding:
    return Encoding.from_dict(json.loads((folder / "data.json").read_text()))


def assert_same_encoding(one: Encoding, other: Encoding, within: float = 1e-12) -> None:
    for ours, theirs in zip(one.columns, other.columns, strict=True):
        assert math.isclose(ours.mean, theirs.mean, rel_tol=within) and math.isclose(
            ours.scale, theirs.scale, rel_tol=1e-9
        )
        fills = [column.fill for column in (ours, theirs)]
        if isinstance(fills[0], float) and isinstance(fills[1], float):
            assert math.isclose(fills[0], fills[1], rel_tol=within)
            fills = [0.0, 0.0]
        plain = [
            replace(column, mean=0.0, scale=1.0, fill=fill) for column, fill in zip((ours, theirs), fills, strict=True)
        ]
        assert plain[0] == plain[1]
    assert (one.target, one.classes, one.shape) == (other.target, other.classes, other.shape)
    assert math.isclose(one.mean, other.mean, rel_tol=within) and math.isclose(one.scale, other.scale, rel_tol=1e-9)


@pytest.mark.parametrize("task", TASKS)
def test_sites_train_to_the_model_of_the_joined_table(task: str, tables: dict[str, list[Row]], tmp_path: Path) -> None:
    result = serve(grid_of_tables(tmp_path), site_config(task), tmp_path / "run")
    expected = run_config(joined_config(tmp_path, task), out=tmp_path / "embedded")
    for name, part in expected.params.items():
        torch.testing.assert_close(result.params[name], part, rtol=0, atol=1e-6)
    for ours, theirs in zip(result.clients, expected.clients, strict=True):
        assert ours.keys() == theirs.keys() and ours["client"] == theirs["client"]
        for key in ours.keys() - {"client"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6)
    found, joined = encoding_in(tmp_path / "run"), encoding_in(tmp_path / "embedded")
    assert_same_encoding(found, replace(joined, client=None))
    kinds = {column.name: column.kind for column in found.columns}
    assert kinds.keys() == COLUMNS.keys() - {"same"}
    ward = next(column for column in found.columns if column.name == "ward")
    assert ward.categories == ("A", "B", "C") and ward.unseen == "other" and ward.indicator


@pytest.mark.parametrize("more", [{"algorithm": {"name": "robust", "on": "outer"}}, {"loss": "bce"}], ids=str)
def test_also_with_data_set_aside_and_with_one_output(
    more: dict[str, Any], tables: dict[str, list[Row]], tmp_path: Path
) -> None:
    result = serve(grid_of_tables(tmp_path), site_config(**more), tmp_path / "run")
    expected = run_config(joined_config(tmp_path, **more))
    for name, part in expected.params.items():
        torch.testing.assert_close(result.params[name], part, rtol=0, atol=1e-6)
    assert len(predict(cf.load_run(tmp_path / "run"), tmp_path / "north.csv").splitlines()) == 61


def test_a_site_weighs_as_much_in_the_encoding_as_in_training(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    flower = {"deadline": 5.0, "patience": 1.0, "max_share": 0.34}
    serve(grid_of_tables(tmp_path), site_config(flower=flower, rounds=1), tmp_path / "run")
    spec = site_config().table_spec()  # type: ignore[attr-defined]
    own = [SiteTable.of({"site": site, "table": str(tmp_path / f"{site}.csv")}).rows(spec).summary() for site in SITES]
    means = [summary.columns["dose"].mean for summary in own]
    found = next(column for column in encoding_in(tmp_path / "run").columns if column.name == "dose")
    assert found.mean == pytest.approx(sum(means) / 3, abs=0.1)  # about a third each
    assert abs(encoding_from(own, spec)[0].columns[1].mean - found.mean) > 0.3


def test_files_may_be_written_differently_at_every_site(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    """Decimal commas, semicolons, marks for missing values, other dates, other names, and no header line."""
    same = serve(grid_of_tables(tmp_path), site_config())
    south = [{**row, **{key: row[key].replace(".", ",") for key in ("age", "dose", "stay")}} for row in tables["south"]]
    south = [{**row, "age": row["age"] or "-99", "ward": row["ward"] or "?"} for row in south]
    south = [{**row, "seen": "{2}.{1}.{0}".format(*row["seen"].split("-"))} for row in south]
    south = [{{"age": "alter", "ill": "krank"}.get(key, key): text for key, text in row.items()} for row in south]
    write(tmp_path / "south.csv", south, ";")
    (tmp_path / "south.toml").write_text(
        'decimal = ","\nna_values = ["-99", "?"]\ndates = { seen = "%d.%m.%Y" }\n'
        'rename = { alter = "age", krank = "ill" }\n'
    )
    lines = (tmp_path / "west.csv").read_text().splitlines(keepends=True)
    (tmp_path / "west.csv").write_text("".join(lines[1:]))
    (tmp_path / "west.toml").write_text(f"header = {json.dumps(lines[0].strip().split(','))}\n")
    settings = {site: {"settings": str(tmp_path / f"{site}.toml")} for site in ("south", "west")}
    other = serve(grid_of_tables(tmp_path, settings), site_config())
    for name, part in same.params.items():
        assert torch.equal(other.params[name], part)
    simple = {"south": {"decimal": ",", "na_values": "-99 ?", "settings": str(tmp_path / "south.toml")}}
    spec = TableSpec.of(
        {"columns": COLUMNS, "target": "ill", "classes": ["no", "yes"], "impute": IMPUTE}, 5, "classification"
    )
    node = {"site": "south", "table": str(tmp_path / "south.csv"), **simple["south"]}
    assert SiteTable.of(node).rows(spec).samples == 51


def test_the_run_s_folder_is_used_like_any_other(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    serve(grid_of_tables(tmp_path), site_config(data={"client": "hospital"}), tmp_path / "run")
    run_config(joined_config(tmp_path), out=tmp_path / "embedded")
    run, embedded = cf.load_run(tmp_path / "run"), cf.load_run(tmp_path / "embedded")
    new = write(tmp_path / "new.csv", patients("east", 30))
    lines, expected = (list(csv.DictReader(predict(each, new).splitlines())) for each in (run, embedded))
    assert len(lines) == 30 and [line["prediction"] for line in lines] == [line["prediction"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert float(line["probability of yes"]) == pytest.approx(float(other["probability of yes"]), abs=2e-6)
    labelled = write(
        tmp_path / "labelled.csv", [{"hospital": f"h{k % 2}", **row} for k, row in enumerate(patients("east", 40))]
    )
    scores = evaluate(run, data=labelled)
    assert [row["client"] for row in scores.rows] == ["h0", "h1"]
    adapted = personalize(run, labelled, tmp_path / "own.safetensors", steps=5, lr=0.1)
    assert (tmp_path / "own.safetensors").exists() and adapted.after["loss"] < adapted.before["loss"] + 1
    with pytest.raises(cf.ConfigError, match="the data are at the sites"):
        evaluate(run)


def test_a_run_resumes_with_its_encoding(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    whole = serve(grid_of_tables(tmp_path), site_config(rounds=6))
    serve(grid_of_tables(tmp_path), site_config(rounds=3), tmp_path / "run")
    before = (tmp_path / "run" / "data.json").read_text()
    grid = grid_of_tables(tmp_path)
    resumed = serve(grid, site_config(rounds=6), tmp_path / "run", resume=True)
    assert "table" not in {group for _, group in grid.seen}  # nobody is asked again
    assert (tmp_path / "run" / "data.json").read_text() == before
    for name, part in whole.params.items():
        assert torch.equal(resumed.params[name], part)


# What travels.


def cells_in(passed: bytes, tables: Mapping[str, Sequence[Row]], columns: Sequence[str]) -> list[tuple[str, int, str]]:
    """The cells of these columns that the bytes have, as text or as numbers."""
    found = []
    for site, own in tables.items():
        for place, row in enumerate(own):
            for name in columns:
                forms = [row[name].encode()]
                if name != "ward":
                    number = float(row[name] or "nan")
                    forms += [repr(number).encode(), *(np.array(number, kind).tobytes() for kind in ("f4", "f8"))]
                found += [(site, place, name)] if row[name] and any(form in passed for form in forms) else []
    return found


@pytest.mark.parametrize("task", TASKS)
def test_no_cell_and_no_encoded_row_is_sent(task: str, tables: dict[str, list[Row]], tmp_path: Path) -> None:
    grid = grid_of_tables(tmp_path)
    serve(grid, site_config(task, {"min_count": 5}), tmp_path / "run")
    passed, encoding = b"".join(grid.bytes), encoding_in(tmp_path / "run")
    assert cells_in(passed, tables, ["age", "dose", "stay"]) == []
    assert b'"A": ' in passed or b'\\"A\\": ' in passed  # the same search finds what is named
    for site in SITES:
        spec = site_config(task).table_spec()  # type: ignore[attr-defined]
        own = SiteTable.of({"site": site, "table": str(tmp_path / f"{site}.csv")}).rows(spec)
        x = own.federated(encoding).train.x
        assert isinstance(x, torch.Tensor)
        for row in x:
            assert row.numpy().tobytes() not in passed and row.double().numpy().tobytes() not in passed


def test_the_search_would_find_a_cell(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    """With a single row a mean is a cell: what the minimum count is for."""
    one = {"north": tables["north"][:1]}
    text = json.dumps(Numbers.of(np.array([float(one["north"][0]["dose"])])).__dict__).encode()
    assert cells_in(text, one, ["dose"]) == [("north", 0, "dose")]


def summary_of(site: str, folder: Path, node: Mapping[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    spec = site_config(data=data).table_spec()  # type: ignore[attr-defined]
    return (
        SiteTable.of({"site": site, "table": str(folder / f"{site}.csv"), **(node or {})})
        .rows(spec)
        .summary()
        .to_dict()
    )


def test_the_rare_is_not_named(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    rare = [{**row, "ward": "rare" if k < 12 else row["ward"]} for k, row in enumerate(tables["north"])]
    rare = [{**row, "smoker": "true" if k == 3 else "false", "age": row["age"] or "50"} for k, row in enumerate(rare)]
    rare[7]["age"] = rare[9]["age"] = ""
    write(tmp_path / "north.csv", rare)
    everything = summary_of("north", tmp_path)["columns"]
    assert everything["ward"]["counts"]["rare"] >= 4 and everything["age"]["missing"] in (1, 2)
    few = everything["ward"]["counts"]["rare"]
    said = summary_of("north", tmp_path, min_count=few + 1)["columns"]
    assert "rare" not in said["ward"]["counts"] and said["ward"]["others"]
    assert said["smoker"]["counts"].keys() == {"false"} and said["smoker"]["others"]
    assert said["age"]["missing"] == 0  # two gaps are rare as well
    assert summary_of("north", tmp_path, min_count=few)["columns"]["ward"]["counts"]["rare"] == few
    nothing = summary_of("north", tmp_path, min_count=1000)["columns"]
    assert nothing["age"] == {"count": 0, "mean": 0.0, "variance": 0.0, "constant": None, "missing": 0}
    assert nothing["ward"] == {"counts": {}, "others": True, "missing": 0}


def test_a_site_has_the_last_word(
    tables: dict[str, list[Row]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert summary_of("north", tmp_path, {"min_count": 1000})["columns"]["ward"]["counts"] == {}
    assert summary_of("north", tmp_path, {"min_count": 1}, min_count=1000)["columns"]["ward"]["counts"] == {}
    assert summary_of("north", tmp_path, {"categories": "none"})["columns"]["ward"] == {
        "counts": {}, "others": True, "missing": summary_of("north", tmp_path)["columns"]["ward"]["missing"],
    }  # fmt: skip
    assert summary_of("north", tmp_path, {"categories": "listed"})["columns"]["ward"]["counts"] == {}
    listed = {"columns": {**COLUMNS, "ward": ["A", "Z"]}}
    assert summary_of("north", tmp_path, {"categories": "listed"}, **listed)["columns"]["ward"]["counts"].keys() == {
        "A"
    }
    grid = grid_of_tables(tmp_path, {"north": {"categories": "none"}})
    with caplog.at_level(logging.INFO, "comfedl"):
        serve(grid, site_config(), tmp_path / "run")
    assert "Site 'north' sends of its table: 36 rows; age: count" in caplog.text
    sent = [json.loads(line) for line in (tmp_path / "state" / "sent.jsonl").read_text().splitlines()]
    assert {line["site"] for line in sent} == {*SITES}
    assert next(line for line in sent if line["site"] == "north")["columns"]["ward"]["counts"] == {}
    # What a site does not name, others may: it then has an input all the same.
    ward = next(column for column in encoding_in(tmp_path / "run").columns if column.name == "ward")
    assert ward.categories == ("A", "B", "C")


# Mistakes.


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"impute": "median"}, 'data.impute.age is \'median\', but it does not follow .*; give "mean" or a constant'),
        ({"impute": {"age": "most-frequent"}}, "data.impute.age is 'most-frequent', but it does not follow"),
        ({"impute": {"ages": 3}}, "data.impute.ages is no input column; did you mean 'age'"),
        ({"impute": {"age": "old"}}, "data.impute.age is 'old', but the column has numbers or dates"),
        ({"impute": {"smoker": "maybe"}}, "data.impute.smoker is 'maybe', but the column has true or false"),
        ({"classes": None}, "data.classes is None, but for tables at sites it must be the list of the labels"),
        ({"classes": 2}, "data.classes is 2, but for tables"),
        ({"target": None}, "data.target is missing"),
        ({"target": "age"}, "Column 'age' is target and has another role too"),
        ({"columns": {}}, "data.columns is {}, but it must be a table of the input columns"),
        ({"columns": {"age": "nummer"}, "impute": None}, "data.columns.age is 'nummer', which is unknown"),
        ({"columns": {"age": [3, 1]}, "impute": None}, "data.columns.age is \\[3, 1\\], but it must be"),
        ({"columns": {"age": ["a", "a"]}, "impute": None}, "names a category twice"),
        ({"dates": {"age": "iso"}}, "data.dates names 'age', which data.columns does not"),
        ({"min_count": 0}, "data.min_count is 0"),
        ({"validation": 0.9, "test": 0.3}, "validation and test hold out 1.2"),
        ({"colums": {}}, "data.colums is not a key of tables at sites; did you mean 'columns'"),
        ({"partition": "iid"}, "data.partition is not a key of tables at sites"),
        ({"decimal": "x"}, "decimal is 'x'"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_sentence(data: dict[str, Any], match: str) -> None:
    with pytest.raises(cf.ConfigError, match=match) as caught:
        site_config(data=data)
    assert "\n" not in str(caught.value)


def test_keys_of_tables_need_columns() -> None:
    for data in ({"target": "ill"}, {"min_count": 3}):
        with pytest.raises(cf.ConfigError, match=r"is of tables at sites, but data\.columns is missing"):
            parse_config({"data": {"name": "sites", **data}, "algorithm": {"name": "fedavg"}})


def test_the_config_is_kept_as_it_was(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    settings = site_config(data={"seed": 9, "client": "hospital", "columns": {**COLUMNS, "age": [0, 130]}})
    assert parse_config(settings.resolved()).resolved() == settings.resolved()
    serve(grid_of_tables(tmp_path), settings, tmp_path / "run")
    run = cf.load_run(tmp_path / "run")
    assert run.settings.resolved()["data"] == settings.resolved()["data"] and run.outputs == 2


@pytest.mark.parametrize(
    ("site", "change", "said"),
    [
        ("north", {"age": "12 years"}, "has '12 years' in row 1, but it must have numbers"),
        ("north", {"smoker": "7"}, "has 7 in row 1, but the server's config says that it has true or false"),
        ("north", {"ill": "perhaps"}, "has the label 'perhaps', which is unknown"),
        ("north", {"dose": ""}, "has 1 missing value .*the server's config fills in"),
        ("north", {"dose": "inf"}, "has infinite values"),
        ("north", {"age": "150"}, "has 150 in row 1, but the server's config says that it is from 0 to 130"),
    ],
)  # fmt: skip
def test_what_a_site_cannot_send_is_in_its_own_log(
    site: str, change: Row, said: str, tables: dict[str, list[Row]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server learns only that there was an error: the text may quote data. The others go on."""
    write(tmp_path / f"{site}.csv", [{**tables[site][0], **change}, *tables[site][1:]])
    grid = grid_of_tables(tmp_path)
    serve(grid, site_config(data={"columns": {**COLUMNS, "age": [0, 130]}}), tmp_path / "run")
    assert "Site 'north' has no part in the encoding of the tables: DataError (see the site's log)." in caplog.text
    assert re.search(said, caplog.text)
    assert b"perhaps" not in b"".join(grid.bytes)
    row = next(row for row in rows(tmp_path / "run") if row["step"] == "table")
    assert row["answered"] == ["south", "west"] and row["absent"] == {"north": "DataError (see the site's log)"}


def test_sites_and_the_server_must_agree_that_there_are_tables(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    plain = {"name": "sites", "columns": None, "classes": 2, "target": None, "impute": None, "min_count": None}
    with pytest.raises(cf.ConfigError, match="Only 0 of 1 sites connected"):
        serve(grid_of_tables(tmp_path), site_config(data=plain, flower={"deadline": 0.2, "patience": 0.2}))
    grid = grid_of_tables(tmp_path)
    x = torch.randn(20, 4)
    app = client_app(lambda node: cf.FederatedData({node["site"]: (x, torch.arange(20) % 2)}), tmp_path / "state")
    grid.sites = {node: (app, settings) for node, (_, settings) in grid.sites.items()}
    with pytest.raises(cf.ConfigError, match="Only 0 of 1 sites connected"):
        serve(grid, site_config(flower={"deadline": 0.2, "patience": 0.2}))
    assert b"use comfedl.flower.site_table" in b"".join(grid.bytes)


@pytest.mark.parametrize(
    ("node", "match"),
    [
        ({"site": "a"}, "The node config lacks table"),
        ({"table": "a.csv"}, "The node config lacks site"),
        ({"site": "a", "table": "a.csv", "categories": "some"}, "categories is 'some', which is unknown"),
        ({"site": "a", "table": "a.csv", "min_count": 0}, "min_count is 0"),
        ({"site": "a", "table": "a.csv", "settings": "nowhere.toml"}, "settings nowhere.toml cannot be read"),
    ],
)
def test_a_bad_node_config_is_one_sentence(node: dict[str, Any], match: str) -> None:
    with pytest.raises((cf.ConfigError, cf.DataError), match=match):
        site_table(node)


def test_a_trial_needs_the_folder_of_the_tables(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(cf.ConfigError, match="name the folder of their files with --tables"):
        run_local(site_config(), tmp_path / "run")
    with pytest.raises(cf.ConfigError, match="--tables is for data at sites that have tables"):
        digits = parse_config({"data": {"name": "digits"}, "algorithm": {"name": "fedavg"}})
        run_local(digits, tmp_path / "run", tables=tmp_path)
    with pytest.raises(cf.ConfigError, match="has no tables; give a folder"):
        run_local(site_config(), tmp_path / "run", tables=tmp_path / "nowhere")
    (tmp_path / "data").mkdir()
    for name in ("b.csv", "a.parquet", "a.toml", "notes.txt"):
        (tmp_path / "data" / name).write_text("x\n")
    found = find_tables(tmp_path / "data")
    folder = tmp_path / "data"
    assert found == {
        "a": {"table": str(folder / "a.parquet"), "settings": str(folder / "a.toml")},
        "b": {"table": str(folder / "b.csv")},
    }
    (tmp_path / "data" / "a.csv").write_text("x\n")
    with pytest.raises(cf.ConfigError, match="has two tables of 'a'; keep one"):
        find_tables(tmp_path / "data")
    assert not (tmp_path / "run").exists()


# Sites that lie.


Lie = Callable[[dict[str, Any]], Any]


def lying(change: Lie) -> Any:
    def tamper(message: Message, reply: Message) -> Message:
        body, _ = serialization.decode(reply.content)
        if "summary" not in body:
            return reply
        body["summary"] = change(body["summary"]) or body["summary"]
        return Message(serialization.encode(body), reply_to=message)

    return tamper


def put(*path: str, to: Any) -> Lie:
    def change(summary: dict[str, Any]) -> None:
        part = summary
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = to

    return change


LIES: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda summary: [1], "its summary is no object"),
    "more rows than it has": (put("rows", to=10**6), "its summary must be of 1 to"),
    "no rows": (put("rows", to=0), "its summary must be of 1 to"),
    "a column more": (put("columns", "income", to={}), "has other columns than were asked for"),
    "NaN": (put("columns", "age", "mean", to=math.nan), "something else than finite numbers"),
    "infinity": (put("columns", "age", "variance", to=math.inf), "something else than finite numbers"),
    "a text": (put("columns", "age", "mean", to="1"), "something else than finite numbers"),
    "a negative variance": (put("columns", "age", "variance", to=-1.0), "a variance below 0"),
    "huge": (put("columns", "age", "mean", to=1e300), "too large"),
    "more values than rows": (put("columns", "age", "count", to=10**6), "more values than rows"),
    "a fraction": (put("columns", "age", "count", to=2.5), "more values than rows"),
    "out of bounds": (put("columns", "age", "mean", to=131.0), "is not of values from 0 to 130"),
    "too wide for its bounds": (put("columns", "age", "variance", to=5000.0), "is not of values from 0 to 130"),
    "a constant that varies": (put("columns", "dose", "constant", to=1e6), "are the same, and then that they are not"),
    "absurd": (put("columns", "dose", "mean", to=1e12), "a thousand times what other sites have"),
    "absurdly wide": (put("columns", "dose", "variance", to=1e20), "a thousand times what other sites have"),
    "counts above its rows": (put("columns", "ward", "counts", to={"A": 10**6}), "that cannot be"),
    "counts that add up to more": (put("columns", "ward", "counts", to={"A": 30, "B": 30}), "more values than rows"),
    "a count of nothing": (put("columns", "ward", "counts", to={"A": 0}), "that cannot be"),
    "too many categories": (put("columns", "ward", "counts", to={str(k): 1 for k in range(2000)}), "more than 1000"),
    "an endless category": (put("columns", "ward", "counts", to={"A" * 10**4: 1}), "that cannot be"),
    "a line break": (put("columns", "ward", "counts", to={"A\nWARNING": 1}), "that cannot be"),
    "a flag of another kind": (put("columns", "smoker", "counts", to={"often": 1}), "which was not asked for"),
    "not listed": (put("columns", "ward", "counts", to={"Z": 1}), "which was not asked for"),
    "others that are a number": (put("columns", "ward", "others", to=3), "or nothing of the kind"),
    "no categories": (put("columns", "ward", to=[]), "is not counts, others and missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_site_has_no_part_in_the_encoding(
    lie: str, tables: dict[str, list[Row]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {**COLUMNS, "age": [0, 130], "ward": ["A", "B", "C"]}
    grid, (change, why) = grid_of_tables(tmp_path), LIES[lie]
    grid.tamper[node_of(grid, "north")] = lying(change)
    serve(grid, site_config(data={"columns": columns}, rounds=1), tmp_path / "run")
    assert "Site 'north' has no part in the encoding of the tables: refused: " in caplog.text
    assert why in caplog.text and max(map(len, caplog.messages)) < 1500
    honest = [
        SiteTable.of({"site": site, "table": str(tmp_path / f"{site}.csv")})
        .rows(site_config(data={"columns": columns}).table_spec())  # type: ignore[attr-defined]
        .summary()
        for site in ("south", "west")
    ]
    expected, _ = encoding_from(honest, site_config(data={"columns": columns}).table_spec())  # type: ignore[attr-defined]
    assert encoding_in(tmp_path / "run") == replace(expected, report=None)


def test_without_a_quorum_of_summaries_the_run_does_not_begin(tables: dict[str, list[Row]], tmp_path: Path) -> None:
    grid = grid_of_tables(tmp_path)
    for site in ("north", "south"):
        grid.tamper[node_of(grid, site)] = lying(put("rows", to=0))
    with pytest.raises(cf.DataError, match=r"Only 1 of 3 sites gave a summary of their tables \(north: refused"):
        serve(grid, site_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def numbers_of(values: Any) -> Summary:
    part = Numbers.of(np.asarray(values, dtype=float))
    return Summary(part.count, {"a": part})


SPEC = TableSpec.of({"columns": {"a": "number"}, "target": "y", "classes": ["0", "1"]}, 0, "classification")


def test_the_merged_numbers_are_those_of_all_values() -> None:
    """For any partition of the values, even where sums of squares would lose all digits."""
    generator = np.random.default_rng(0)
    for _ in range(100):
        centre, width = 10 ** generator.uniform(-3, 9), 10 ** generator.uniform(-2, 3)
        values = centre + width * generator.standard_normal(int(generator.integers(3, 400)))
        cuts = np.sort(generator.integers(0, len(values), size=generator.integers(0, 5)))
        parts = [numbers_of(part) for part in np.split(values, cuts) if len(part)]
        column = encoding_from(parts, SPEC)[0].columns[0]
        assert math.isclose(column.mean, values.mean(), rel_tol=1e-13)
        assert math.isclose(column.scale, values.std(), rel_tol=1e-6 * max(1, centre / width * 1e-6))
    with pytest.raises(cf.DataError, match=r"no input column that differs .*a: left out: it is 3 in all train rows"):
        encoding_from([numbers_of([3, 3]), numbers_of([3])], SPEC)
    assert encoding_from([numbers_of([3, 3]), numbers_of([4])], SPEC)[0].columns


def test_a_bounded_site_moves_the_encoding_by_its_share_at_most() -> None:
    spec = TableSpec.of({"columns": {"a": [0, 100]}, "target": "y", "classes": ["0", "1"]}, 0, "classification")
    honest = numbers_of(np.linspace(40, 60, 90))
    for mean in (0.0, 100.0):
        liar = {
            "rows": 10,
            "columns": {"a": {"count": 10, "mean": mean, "variance": 0.0, "constant": mean, "missing": 0}},
        }
        column = encoding_from([honest, read_summary({**liar, "y": None}, spec, 10)], spec)[0].columns[0]
        assert abs(column.mean - 50) <= 0.1 * 100
        lighter = encoding_from([honest, weighted(read_summary({**liar, "y": None}, spec, 10), 0.1)], spec)[0].columns[
            0
        ]
        assert abs(lighter.mean - 50) <= 100 / 91 + 1e-9
    with pytest.raises(MalformedMessage, match="must be of 1 to 9 rows"):
        read_summary({**liar, "y": None}, spec, 9)


def test_who_is_absurd() -> None:
    usual = {name: numbers_of([k, k + 1.0, k + 2.0]) for k, name in enumerate("abc")}
    assert find_absurd(usual) == {}
    assert find_absurd({**usual, "d": numbers_of([30.0, 50.0])}) == {}  # unlike the others, as sites may be
    assert find_absurd({**usual, "d": numbers_of([1e7, 1e7 + 1])}).keys() == {"d"}
    assert find_absurd({**usual, "d": numbers_of([-1e7, 1e7])}).keys() == {"d"}
    assert find_absurd({"a": numbers_of([0, 1]), "d": numbers_of([1e7, 2e7])}) == {}  # one of two: nobody knows which
    same = {name: numbers_of([5, 5]) for name in "abc"}
    assert find_absurd({**same, "d": numbers_of([6, 7])}) == {}
