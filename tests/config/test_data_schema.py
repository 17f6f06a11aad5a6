"""The user's data in a config: csv, folder and module:function, with the losses that go with them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import comfedl as cf
from comfedl.analysis.compare import run_comparison
from comfedl.cli import tables
from comfedl.config.schema import parse_config, read_data, run_config
from comfedl.data import loading
from comfedl.data.registry import RawData
from comfedl.tuning.plan import make_plan
from comfedl.tuning.search import tune as search
from comfedl.utils.toml import to_toml

METHOD = {"name": "comfedl", "lr": 0.2, "outer": {"name": "kl", "gamma": 0.5}}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """A CSV file in the working folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    n = 120
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(["north", "south", "east"], n),
            "age": rng.normal(60, 10, n).round(1),
            "ward": rng.choice(["a", "b"], n),
        }
    )
    frame["days"] = (frame.age / 10 + (frame.ward == "a") + rng.normal(0, 0.3, n)).round(3)
    frame["outcome"] = np.where(frame.days > 6.5, "ill", "well")
    frame.to_csv("patients.csv", index=False)
    return frame


def settings(**changes: Any) -> dict[str, Any]:
    table = {"name": "csv", "path": "patients.csv", "client": "hospital", "target": "outcome", "drop": ["days"]}
    return {"rounds": 3, "data": {**table, **changes.pop("data", {})}, "algorithm": METHOD, **changes}


@pytest.mark.parametrize(
    ("loss", "data", "metric"),
    [
        ("cross_entropy", {}, "accuracy"),
        ("bce", {}, "auc"),
        ("mse", {"target": "days", "drop": ["outcome"]}, "rmse"),
        ("huber", {"target": "days", "drop": ["outcome"], "scale_target": True}, "r2"),
    ],
)
def test_a_csv_file_is_trained_on(patients: pd.DataFrame, loss: str, data: dict[str, Any], metric: str) -> None:
    config = parse_config(settings(loss=loss, data=data))
    result = run_config(config, out=Path("run"))
    assert f"validation.{metric}.worst" in result.rounds[-1]
    assert set(result.names) == {"north", "south", "east"}
    # The config that was written gives the same run again.
    again = run_config(parse_config(tomllib.loads(Path("run/config.toml").read_text())))
    assert again.rounds == result.rounds


def test_the_config_of_classification_is_as_it_was() -> None:
    """Runs of before, whose config has no loss, can still be resumed."""
    config = parse_config({"data": {"name": "digits"}, "algorithm": METHOD})
    assert "loss" not in config.resolved()


def test_a_folder_is_trained_on(patients: pd.DataFrame) -> None:
    Path("sites").mkdir()
    for name, rows in patients.groupby("hospital"):
        rows.drop(columns=["hospital", "days"]).to_csv(f"sites/{name}.csv", index=False)
    folder = parse_config({**settings(), "data": {"name": "folder", "path": "sites", "target": "outcome"}})
    table = parse_config(settings())
    assert run_config(folder).rounds == run_config(table).rounds


FUNCTION = """
import numpy as np
import comfedl as cf

def make(seed, clients=3):
    rng = np.random.default_rng(seed)
    x = {str(i): rng.normal(size=(20, 2)) for i in range(clients)}
    return cf.FederatedData({name: (part, (part[:, 0] > 0).astype(int) * 2) for name, part in x.items()})

def wrong(seed):
    return 7

def raises(seed):
    raise KeyError("patients")

def shared(seed, validation):
    return make(int(validation * 10))
"""


def test_a_function_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites_of_mine.py").write_text(FUNCTION)
    base = {"rounds": 2, "algorithm": METHOD, "model": {"name": "mlp", "hidden": [3]}}
    config = parse_config({**base, "data": {"name": "sites_of_mine:make", "clients": 4}})
    assert config.resolved()["data"] == {"name": "sites_of_mine:make", "clients": 4}
    fed = config.make_data()
    assert len(fed) == 4
    assert config.make_model(fed)[-1].out_features == 3
    assert run_config(config).rounds[-1]["round"] == 2
    for name, said in (
        ("sites_of_mine:wrong", "returned int, not a FederatedData"),
        ("sites_of_mine:raises", "KeyError: 'patients'"),
        ("sites_of_mine:FUNCTION", "cannot be imported"),
        ("sites_of_mine:shared", "validation is missing"),
    ):
        with pytest.raises(cf.ConfigError, match=said):
            parse_config({**base, "data": {"name": name}}).make_data()
    with pytest.raises(cf.ConfigError, match=r"data\.validation is not a key"):
        parse_config({**base, "data": {"name": "sites_of_mine:make", "validation": 0.1}})
    assert len(parse_config({**base, "data": {"name": "sites_of_mine:shared", "validation": 0.3}}).make_data()) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "nowhere.csv"}, r"There is no file nowhere\.csv"),
        ({"client": "site"}, "no column 'site'"),
        ({"traget": "x"}, "did you mean 'target'"),
        ({"partition": "iid"}, "partition is not a key"),
        ({"path": 3}, "must be the path of a file"),
        ({"scale": "yes"}, "must be true or false"),
        ({"missing": "ignore"}, "missing is 'ignore'"),
    ],
)
def test_mistakes_are_told(patients: pd.DataFrame, change: dict[str, Any], said: str) -> None:
    with pytest.raises(cf.ComfedlError, match=said):
        parse_config(settings(data=change)).make_data()


def test_a_key_that_is_missing_or_a_loss_that_is_unknown(patients: pd.DataFrame) -> None:
    data = settings()["data"]
    for key in ("path", "client", "target"):
        with pytest.raises(cf.ConfigError, match=rf"data\.{key} is missing"):
            parse_config({**settings(), "data": {k: v for k, v in data.items() if k != key}})
    with pytest.raises(cf.ConfigError, match="did you mean 'mse'"):
        parse_config(settings(loss="rmse"))
    with pytest.raises(cf.DataError, match='predict them with loss = "mse"'):
        run_config(parse_config(settings(data={"target": "days", "drop": ["outcome"]})))
    three = {"target": "ward", "drop": ["days", "outcome"]}
    patients.assign(ward=["a", "b", "c"] * 40).to_csv("patients.csv", index=False)
    with pytest.raises(cf.DataError, match="labels that are 0 or 1"):
        run_config(parse_config(settings(loss="bce", data=three)))


def test_what_each_client_holds_is_shown(patients: pd.DataFrame) -> None:
    Path("config.toml").write_text(to_toml(settings()))
    table = tables.clients(read_data(Path("config.toml")))
    assert "ill:" in str(list(table.columns[-1].cells))
    Path("config.toml").write_text(to_toml(settings(loss="mse", data={"target": "days", "drop": ["outcome"]})))
    table = tables.clients(read_data(Path("config.toml")))
    assert "mean" in str(table.columns[-1].header)


def test_a_search_makes_errors_small(patients: pd.DataFrame) -> None:
    base = settings(loss="mse", data={"target": "days", "drop": ["outcome"]}, tune={"algorithm.lr": [1e-9, 0.1]})
    Path("mine.toml").write_text(to_toml(base))
    plan = make_plan(Path("mine.toml"), sampler="grid")
    assert plan.metric == "validation.rmse.worst" and plan.minimise
    tuned = search(plan, Path("study"), jobs=1)
    assert tuned.trials[0].params["algorithm.lr"] == 0.1 and tuned.trials[0].value < tuned.trials[1].value
    for metric, small in (("r2", False), ("auc", False), ("personal_mae", True), ("loss", True), ("accuracy", False)):
        assert make_plan(Path("mine.toml"), metric=f"validation.{metric}.mean").minimise == small
    labels = settings(tune={"algorithm.lr": [0.1]})
    Path("labels.toml").write_text(to_toml(labels))
    assert make_plan(Path("labels.toml")).metric == "validation.accuracy.worst"


def test_a_comparison_marks_the_smallest_error(patients: pd.DataFrame) -> None:
    data = {"target": "days", "drop": ["outcome"]}
    slow = parse_config(settings(loss="mse", data=data, algorithm={"name": "fedavg", "lr": 1e-9}))
    quick = parse_config(settings(loss="mse", data=data, algorithm={"name": "fedavg", "lr": 0.1}))
    found = run_comparison({"slow": slow, "quick": quick}, 2, "validation", Path("compared"), progress=False)
    assert found.metric == "rmse"
    for cells in found.columns().values():
        assert cells["quick"].best and cells["quick"].mean < cells["slow"].mean
    other = parse_config(settings(loss="mae", data=data, algorithm={"name": "fedavg", "lr": 0.1}))
    with pytest.raises(cf.ConfigError, match="differ in loss"):
        run_comparison({"a": quick, "b": other}, 1, "validation", Path("no"), progress=False)


# Registered data sets: natural groupings, and some of the classes.


def registered(**data: Any) -> dict[str, Any]:
    return {"rounds": 2, "data": data, "model": {"name": "logistic"}, "algorithm": METHOD}


def adult() -> RawData:
    """A data set like "adult", with two groupings."""
    x = np.random.default_rng(0).normal(size=(60, 108)).astype(np.float32)
    y, groups = np.arange(60) % 2, {"occupation": np.repeat(["a", "b", "c"], 20), "phd": np.repeat(["d", "e"], 30)}
    return RawData(x, y, 2, x[:12], y[:12], groups, {by: group[::5] for by, group in groups.items()})


def test_a_grouping_in_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "read", lambda name, progress=False: adult())
    for model in ("logistic", "mlp"):
        settings = registered(name="adult", partition="natural", by="phd") | {"model": {"name": model}}
        config = parse_config(settings)
        fed = config.make_data()
        assert fed.names == ("d", "e") and config.resolved()["data"]["by"] == "phd"
        assert "test.accuracy.worst" in run_config(config).rounds[-1]
    plain = parse_config(registered(name="adult"))
    assert plain.make_data().names == ("a", "b", "c") and "by" not in plain.resolved()["data"]
    assert parse_config(registered(name="flights")).data.make_partition() == cf.partition.Natural()


def test_classes_in_a_config() -> None:
    data = {"name": "digits", "classes": [7, 2, 4], "partition": "shards", "clients": 3, "classes_per_client": 1}
    config = parse_config(registered(**data))
    fed = config.make_data()
    whole = cf.load("digits", cf.partition.Shards(clients=3, classes=1), classes=[7, 2, 4])
    assert torch.equal(fed.train.x, whole.train.x) and fed.train.sizes.tolist() == whole.train.sizes.tolist()
    assert {int(split["client-0"][1].max()) for split in (fed.train, fed.validation, fed.test)} <= {0, 1, 2}
    assert config.make_model(fed)(fed.train.x[:5]).shape == (5, 3)
    written = config.resolved()["data"]
    assert written["classes"] == [7, 2, 4] and written["classes_per_client"] == 1
    assert parse_config(config.resolved()).make_data().train.sizes.tolist() == fed.train.sizes.tolist()
    assert len(parse_config(registered(name="digits", classes=[0, 1])).make_data()) == 10
    iid = parse_config(registered(name="digits", classes=[0, 1], partition="iid", clients=2))
    assert set(iid.make_data().train.y.tolist()) == {0, 1} and iid.resolved()["data"]["classes"] == [0, 1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"name": "adult", "partition": "natural", "by": "pdh"},
            "`by` is 'pdh', which is no grouping of 'adult'; .*phd",
        ),
        ({"name": "watch", "partition": "natural", "by": "phd"}, "'watch' has only the grouping 'person'"),
        ({"name": "digits", "partition": "natural"}, "needs data with groups, but 'digits' has none"),
        ({"name": "adult", "partition": "natural", "by": 3}, r"data\.by is 3"),
        ({"name": "adult", "by": "phd"}, "name a partition that has it"),
        ({"name": "digits", "classes": [0, 10]}, "the labels of 'digits' are 0 to 9"),
        ({"name": "digits", "classes": 3}, "name a partition that has it"),
        ({"name": "digits", "classes": [0, 1], "partition": "shards", "clients": 2}, "classes_per_client is missing"),
        (
            {"name": "digits", "partition": "iid", "clients": 2, "classes_per_client": 1},
            "classes_per_client is not a key",
        ),
    ],
)
def test_mistakes_of_groupings_and_classes_are_told_before_a_download(data: dict[str, Any], said: str) -> None:
    with pytest.raises(cf.ComfedlError, match=said):
        parse_config(registered(**data))
