"""A config: what is right builds the run, what is wrong is one sentence that names it and what to write instead."""

from __future__ import annotations

import copy
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.config.schema import Config, parse_config, read_config, run_config
from comfedl.data.registry import SOURCES, RawData, Source
from comfedl.utils.toml import to_toml

# The config of the design, with digits in place of MNIST (which has no 5000 samples).
DESIGN = """
rounds = 200
seed = 0
clients_per_round = 10          # default: all
eval_every = 10
[data]
name = "digits"
partition = "imbalanced"        # its arguments follow as keys
clients = 10
large = 500
small = 20
[model]
name = "logistic"               # or "module:function"
[algorithm]
name = "comfedl"
lr = 0.1
local_steps = 5
batch_size = 50
outer = { name = "kl", gamma = 0.2 }
"""
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": "iid", "clients": 3, "samples": 8},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.1, "local_steps": 2, "batch_size": 4},
}


def small(*changes: str) -> Config:
    return parse_config(copy.deepcopy(SMALL), changes)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    """What the error says: one sentence or two on one line, without the words of the library below."""
    text = str(error.value)
    assert isinstance(error.value, cf.ComfedlError)
    assert "\n" not in text and text[-1] in ".?)"
    return text


# What is right.


def test_the_config_of_the_design() -> None:
    config = parse_config(tomllib.loads(DESIGN))
    assert (config.rounds, config.seed, config.clients_per_round, config.eval_every) == (200, 0, 10, 10)
    assert config.engine == "embedded"
    assert config.make_algorithm() == cf.ComFedL(lr=0.1, local_steps=5, batch_size=50, outer=cf.KL(0.2))
    assert config.data.make_partition() == cf.partition.Imbalanced(clients=10, large=500, small=20)
    fed = config.make_data()
    assert sorted(fed.train.sizes.tolist()) == [20] * 9 + [500]
    assert sum(part.numel() for part in config.make_model(fed).parameters()) == 650


def test_the_least_that_a_config_needs() -> None:
    config = parse_config({"data": {"name": "digits"}, "algorithm": {"name": "comfedl"}})
    assert (config.rounds, config.seed, config.clients_per_round, config.eval_every) == (200, 0, None, "auto")
    assert config.model.name == "logistic"
    assert config.make_algorithm() == cf.ComFedL()
    assert len(config.make_data()) == 10


@pytest.mark.parametrize(
    ("table", "method"),
    [
        ({"name": "fedavg", "weighting": "uniform"}, cf.FedAvg(weighting="uniform")),
        ({"name": "comfedl", "inner": {"lr": 0.05}}, cf.ComFedL(inner=cf.Adapt(lr=0.05))),
        (
            {"name": "comfedl", "inner": {"name": "adapt", "lr": 0.05, "order": "first", "steps": 2}},
            cf.ComFedL(inner=cf.Adapt(lr=0.05, order="first", steps=2)),
        ),
        ({"name": "comfedl", "outer": {"name": "identity"}}, cf.ComFedL(outer=cf.Identity())),
        ({"name": "comfedl", "outer": {"name": "exp", "gamma": 5}}, cf.ComFedL(outer=cf.Exp(5.0))),
        ({"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2, "cap": 3}}, cf.ComFedL(outer=cf.KL(0.2, cap=3.0))),
        ({"name": "comfedl", "outer_batch_size": "all"}, cf.ComFedL(outer_batch_size="all")),
        ({"name": "comfedl", "outer_batch_size": 7}, cf.ComFedL(outer_batch_size=7)),
        ({"name": "comfedl", "lr": 1}, cf.ComFedL(lr=1.0)),
    ],
)
def test_a_table_is_the_method_it_describes(table: dict[str, Any], method: object) -> None:
    assert parse_config({**SMALL, "algorithm": table}).make_algorithm() == method


@pytest.mark.parametrize(
    "partition",
    [
        {"partition": "iid", "clients": 3},
        {"partition": "imbalanced", "clients": 3, "large": 100, "small": 10},
        {"partition": "dominant-class", "clients": 3, "rho": 0.5},
        {"partition": "dirichlet", "clients": 3, "alpha": 0.3},
        {"partition": "shards", "clients": 3, "classes": 2},
    ],
)
def test_every_partition_splits_digits(partition: dict[str, Any]) -> None:
    fed = parse_config({**SMALL, "data": {"name": "digits", **partition}}).make_data()
    assert len(fed) == 3
    assert fed.validation is not None and fed.test is not None
    assert fed.train.sizes.min() > 0 and fed.validation.sizes.min() > 0 and fed.test.sizes.min() > 0


def test_the_splits_seed_is_the_runs_unless_it_has_its_own() -> None:
    def labels(*changes: str) -> list[int]:
        labels: list[int] = small(*changes).make_data().train["client-0"][1].tolist()
        return labels

    assert labels("seed=1") != labels("seed=2")
    assert labels("seed=1", "data.seed=5") == labels("seed=2", "data.seed=5") == labels("seed=5")


# --set.


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("rounds=7", "rounds", 7),
        (" rounds = 7 ", "rounds", 7),
        ("algorithm.lr=0.5", "algorithm.lr", 0.5),
        ("algorithm.lr=1e-3", "algorithm.lr", 1e-3),
        ("algorithm.weighting=uniform", "algorithm.weighting", "uniform"),
        ('algorithm.weighting="uniform"', "algorithm.weighting", "uniform"),
        ("algorithm.weighting='uniform'", "algorithm.weighting", "uniform"),
        ("data.seed=3", "data.seed", 3),
        ("clients_per_round=2", "clients_per_round", 2),
        ('algorithm={name = "comfedl", outer = {name = "kl", gamma = 0.3}}', "algorithm.outer.gamma", 0.3),
        ('algorithm={name="comfedl",outer={name="kl",gamma=0.3}}', "algorithm.lr", 0.1),
        ("model.name=mlp", "model.name", "mlp"),
    ],
)
def test_set_changes_one_value(change: str, key: str, value: object) -> None:
    found: Any = small(change).resolved()
    for part in key.split("."):
        found = found[part]
    assert found == value and type(found) is type(value)


def test_set_reaches_into_a_nested_table_and_leaves_the_rest() -> None:
    settings = tomllib.loads(DESIGN)
    before = copy.deepcopy(settings)
    config = parse_config(settings, ["algorithm.outer.gamma=0.5", "algorithm.outer.cap=2"])
    assert config.make_algorithm() == cf.ComFedL(lr=0.1, local_steps=5, batch_size=50, outer=cf.KL(gamma=0.5, cap=2.0))
    assert settings == before


def test_set_makes_tables_that_were_not_there() -> None:
    config = small("algorithm.name=comfedl", "algorithm.outer.name=kl", "algorithm.outer.gamma=0.5")
    assert config.algorithm.arguments["outer"] == {"name": "kl", "gamma": 0.5}


def test_a_later_set_wins() -> None:
    assert small("rounds=3", "rounds=4").rounds == 4


@pytest.mark.parametrize("change", ["", "rounds", "=5", "a..b=1", ".lr=1", "algorithm.=1", "rounds:5"])
def test_a_set_that_cannot_be_read_says_how_it_is_written(change: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        small(change)
    assert repr(change) in message(error) and "algorithm.lr=0.5" in message(error)


@pytest.mark.parametrize("change", ["rounds.x=1", "algorithm.lr.x=1"])
def test_a_set_into_what_is_no_table(change: str) -> None:
    with pytest.raises(cf.ConfigError, match="not a table"):
        small(change)


@pytest.mark.parametrize("change", ["lr=0.5", "algorithm.learning=0.5", "data.client=3", "new.key=1"])
def test_a_set_of_an_unknown_key_is_refused_like_any_other(change: str) -> None:
    with pytest.raises(cf.ConfigError, match="not a key") as error:
        small(change)
    assert change.split("=")[0].split(".")[0] in message(error)


# What is wrong: unknown keys and names.


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("round=5", "rounds"),
        ("sed=5", "seed"),
        ("eval_evry=5", "eval_every"),
        ("clients_in_round=5", "clients_per_round"),
        ("dataset={}", "data"),
        ("modle={}", "model"),
        ("method={}", "algorithm"),
        ("algorithm.learning_rate=0.5", "lr"),
        ("algorithm.eta=0.5", "lr"),
        ("algorithm.tau=5", "local_steps"),
        ("algorithm.epochs=5", "local_steps"),
        ("algorithm.local_step=5", "local_steps"),
        ("algorithm.bs=5", "batch_size"),
        ("algorithm.batchsize=5", "batch_size"),
        ("algorithm.wieghting=uniform", "weighting"),
        ("data.num_clients=5", "clients"),
        ("data.client=5", "clients"),
        ("data.sample=5", "samples"),
        ("data.validaton=0.1", "validation"),
        ("data.partitions=iid", "partition"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest(change: str, meant: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        small(change)
    assert f"did you mean '{meant}'?" in message(error)
    assert change.split("=")[0] in message(error)


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        ({"name": "kl", "gama": 0.2}, ["algorithm.outer.gama", "did you mean 'gamma'?"]),
        ({"name": "klx", "gamma": 0.2}, ["algorithm.outer.name", "'klx'", "did you mean 'kl'?"]),
        ({"name": "kl"}, ["algorithm.outer", "gamma or effective_clients", "neither"]),
        ({"name": "exp"}, ["algorithm.outer.gamma", "missing"]),
        ({"name": "kl", "gamma": 0}, ["algorithm.outer", "gamma", "0", "above 0"]),
        ({"name": "exp", "gamma": -1}, ["algorithm.outer", "gamma", "-1", "above 0"]),
        ({"name": "kl", "gamma": "small"}, ["algorithm.outer.gamma", "'small'", "number"]),
        ({"name": "kl", "gamma": True}, ["algorithm.outer.gamma", "True", "number"]),
        ({"name": "kl", "gamma": float("nan")}, ["gamma", "nan", "above 0"]),
        ({"name": "kl", "gamma": float("inf")}, ["gamma", "inf", "above 0"]),
        ({"name": "kl", "gamma": 0.2, "cap": 0.5}, ["algorithm.outer", "cap", "0.5", "1 or more"]),
        ({"gamma": 0.2}, ["algorithm.outer", '{ name = "kl"']),
        ({"name": 3}, ["algorithm.outer", '{ name = "kl"']),
        ("kl", ["algorithm.outer", "'kl'", '{ name = "kl"']),
        (0.2, ["algorithm.outer", "0.2", '{ name = "kl"']),
        ([{"name": "kl", "gamma": 0.2}], ["algorithm.outer", '{ name = "kl"']),
    ],
)
def test_an_outer_that_cannot_be_made(outer: object, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config({**SMALL, "algorithm": {"name": "comfedl", "outer": outer}})
    assert [word for word in words if word not in message(error)] == []


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({}, ["algorithm.inner.lr", "missing"]),
        ({"lr": -1}, ["lr", "-1", "0 or more"]),
        ({"lr": "a"}, ["algorithm.inner.lr", "'a'", "number"]),
        ({"lr": 0.1, "order": "exat"}, ["order", "'exat'", "did you mean 'exact'?"]),
        ({"lr": 0.1, "steps": 0}, ["steps", "0", "1 or more"]),
        ({"lr": 0.1, "step": 1}, ["algorithm.inner.step", "did you mean 'steps'?"]),
        ({"name": "maml", "lr": 0.1}, ["algorithm.inner.name", "'maml'", "adapt"]),
        (0.05, ["algorithm.inner", "0.05", '{ name = "adapt"']),
    ],
)
def test_an_inner_that_cannot_be_made(inner: object, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config({**SMALL, "algorithm": {"name": "comfedl", "inner": inner}})
    assert [word for word in words if word not in message(error)] == []


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("algorithm.name=fedavrg", "fedavg"),
        ("algorithm.name=comfdl", "comfedl"),
        ("algorithm.name=FedAvg", "fedavg"),
        ("algorithm.name=FEDAVG", "fedavg"),
        ("data.name=digit", "digits"),
        ("data.name=MNIST", "mnist"),
        ("data.name=fashion_mnist", "fashion-mnist"),
        ("data.partition=dirichelt", "dirichlet"),
        ("data.partition=dominant_class", "dominant-class"),
        ("data.partition=IID", "iid"),
        ("model.name=logstic", "logistic"),
        ("model.name=CNN4", "cnn4"),
        ("engine=embeded", "embedded"),
        ("algorithm.weighting=sample", "samples"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest(change: str, meant: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        run_config(small(change))
    assert f"did you mean '{meant}'?" in message(error)


def test_an_unknown_key_of_a_model_comes_with_the_nearest() -> None:
    with pytest.raises(cf.ConfigError) as error:
        run_config(small("model.name=cnn4", "model.filter=8"))
    assert "model.filter" in message(error) and "did you mean 'filters'?" in message(error)


def test_partition_arguments_without_a_partition_say_what_to_do() -> None:
    with pytest.raises(cf.ConfigError, match="name a partition") as error:
        parse_config({**SMALL, "data": {"name": "digits", "clients": 3}})
    assert "data.clients" in message(error)


# What is wrong: values.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("algorithm.lr=0", ["lr", "0", "above 0"]),
        ("algorithm.lr=-0.1", ["lr", "-0.1", "above 0"]),
        ("algorithm.lr=nan", ["lr", "nan", "above 0"]),
        ("algorithm.lr=inf", ["lr", "inf", "above 0"]),
        ("algorithm.lr=abc", ["algorithm.lr", "'abc'", "number"]),
        ('algorithm.lr="0.1"', ["algorithm.lr", "'0.1'", "number"]),
        ("algorithm.lr=true", ["algorithm.lr", "True", "number"]),
        ("algorithm.lr=[0.1]", ["algorithm.lr", "[0.1]", "number"]),
        ("algorithm.lr=", ["algorithm.lr", "''", "number"]),
        ("algorithm.local_steps=0", ["local_steps", "0", "1 or more"]),
        ("algorithm.local_steps=-2", ["local_steps", "-2", "1 or more"]),
        ("algorithm.local_steps=1.5", ["algorithm.local_steps", "1.5", "integer"]),
        ("algorithm.local_steps=true", ["algorithm.local_steps", "True", "integer"]),
        ("algorithm.batch_size=0", ["batch_size", "0", "1 or more"]),
        ("algorithm.batch_size=2.0", ["algorithm.batch_size", "2.0", "integer"]),
        ("rounds=0", ["rounds", "0", "1 or more"]),
        ("rounds=1.5", ["rounds", "1.5", "integer"]),
        ('rounds="5"', ["rounds", "'5'", "integer"]),
        ("rounds=true", ["rounds", "True", "integer"]),
        ("seed=-1", ["seed", "-1", "0 or more"]),
        ("seed=1.0", ["seed", "1.0", "integer"]),
        ("seed=true", ["seed", "True", "integer"]),
        ("seed=100000000000000000000", ["seed", "100000000000000000000"]),
        ("eval_every=0", ["eval_every", "0", "1 or more"]),
        ("clients_per_round=0", ["clients_per_round", "0", "1 or more"]),
        ("clients_per_round=4", ["clients_per_round", "4", "3 clients", "from 1 to 3"]),
        ("clients_per_round=true", ["clients_per_round", "True", "integer"]),
        ("engine=5", ["engine", "5", "string"]),
        ("data.clients=0", ["clients", "0", "1 or more"]),
        ("data.clients=2.5", ["data.clients", "2.5", "integer"]),
        ("data.clients=many", ["data.clients", "'many'", "integer"]),
        ("data.validation=1.5", ["validation", "1.5", "below 1"]),
        ("data.validation=-0.1", ["validation", "-0.1", "0 or more"]),
        ("data.validation=true", ["data.validation", "True", "number"]),
        ("data.seed=1.5", ["data.seed", "1.5", "integer"]),
        ("data.name=5", ["data.name", "5", "string"]),
        ("model.name=5", ["model.name", "5", "string"]),
        ("algorithm.name=5", ["algorithm.name", "5", "string"]),
        ("algorithm.weighting=5", ["algorithm.weighting", "5", "string"]),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_may_be(change: str, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        run_config(small(change))
    assert [word for word in words if word not in message(error)] == []


def test_more_samples_than_there_are() -> None:
    with pytest.raises(cf.DataError, match="5000"):
        run_config(small("data.samples=5000"))
    with pytest.raises(cf.ConfigError, match="keep some for training"):
        run_config(small("data.validation=0.6", "data.test=0.6"))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("data", ["data is missing", "[data]", "digits"]),
        ("algorithm", ["algorithm is missing", "[algorithm]", "comfedl"]),
        ("data.name", ["data.name is missing"]),
        ("algorithm.name", ["algorithm.name is missing"]),
        ("model.name", ["model.name is missing"]),
        ("data.clients", ["data.clients is missing"]),
    ],
)
def test_what_is_missing_is_named(missing: str, words: list[str]) -> None:
    settings = copy.deepcopy(SMALL)
    table, _, key = missing.partition(".")
    if key:
        del settings[table][key]
    else:
        del settings[table]
    with pytest.raises(cf.ConfigError) as error:
        parse_config(settings)
    assert [word for word in words if word not in message(error)] == []


@pytest.mark.parametrize("table", ["data", "model", "algorithm"])
def test_a_name_where_a_table_belongs_says_how_to_write_the_table(table: str) -> None:
    """``algorithm = "fedavg"`` is what many will write first."""
    with pytest.raises(cf.ConfigError) as error:
        small(f"{table}=logistic")
    assert f"[{table}]" in message(error) and "name" in message(error)
    assert "instance of" not in message(error)


@pytest.mark.parametrize(
    "settings", [{}, {"data": []}, {"data": [{"name": "digits"}]}, {"algorithm": {"name": "fedavg"}}]
)
def test_settings_that_are_no_config(settings: dict[str, Any]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config(settings)
    assert "data" in message(error)


@pytest.mark.parametrize(
    "change", ["rounds=0", "eval_every=0", "seed=-1", "clients_per_round=0", "engine=no", "model.nothing=1"]
)
def test_a_mistake_is_found_before_anything_is_fetched(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set may be 170 MB: what needs no data is checked first."""

    def decode(contents: object) -> RawData:
        raise AssertionError("the data set was read")

    monkeypatch.setitem(SOURCES, "heavy", Source("heavy", "for tests", 9, (1, 8, 8), 10, "much", decode))
    with pytest.raises(cf.ConfigError):
        run_config(small("data.name=heavy", change))


# Reading the file.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no config file"]),
        (b"rounds = = 3\n", ["not TOML", "line 1"]),
        (b"rounds = 1\nrounds = 2\n", ["not TOML", "line 2"]),
        (b"{ 'json': true }", ["not TOML"]),
        (bytes(range(256)), ["cannot be read", "TOML file"]),
        (b"\x00" * 50, ["not TOML"]),
        (DESIGN.encode("utf-16"), ["cannot be read", "TOML file"]),
    ],
    ids=["missing", "broken", "twice", "json", "binary", "zeros", "utf-16"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(cf.ConfigError) as error:
        read_config(path)
    assert [word for word in [path.name, *words] if word not in message(error)] == []


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match="cannot be read") as error:
        read_config(tmp_path)
    assert str(tmp_path) in message(error)


def test_an_empty_file_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(cf.ConfigError, match="data is missing"):
        read_config(tmp_path / "empty.toml")


def test_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_bytes(DESIGN.replace("\n", "\r\n").encode())
    assert read_config(tmp_path / "windows.toml") == parse_config(tomllib.loads(DESIGN))


# The resolved config is complete and gives the same run.

CONFIGS: dict[str, dict[str, Any]] = {
    "least": {"data": {"name": "digits"}, "algorithm": {"name": "comfedl"}},
    "design": tomllib.loads(DESIGN),
    "meta": {**SMALL, "algorithm": {"name": "comfedl", "inner": {"lr": 0.05}, "outer": {"name": "kl", "gamma": 1}}},
    "mlp": {**SMALL, "model": {"name": "mlp"}},
    "cnn4": {**SMALL, "model": {"name": "cnn4", "filters": 4}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_resolved_config_is_the_same_config(name: str) -> None:
    config = parse_config(CONFIGS[name])
    resolved = config.resolved()
    again = parse_config(tomllib.loads(to_toml(resolved)))
    assert again.resolved() == resolved
    assert again.make_algorithm() == config.make_algorithm()
    ours, theirs = config.make_data(), again.make_data()
    assert ours.names == theirs.names
    assert all(torch.equal(ours.train[client][0], theirs.train[client][0]) for client in ours.names)
    first, second = config.make_model(ours).state_dict(), again.make_model(theirs).state_dict()
    assert all(torch.equal(first[part], second[part]) for part in first)


def test_the_resolved_config_says_every_hyper_parameter() -> None:
    resolved = parse_config(CONFIGS["meta"]).resolved()
    assert {"rounds", "seed", "eval_every", "engine"} <= set(resolved)
    assert {"name", "partition", "clients", "samples", "validation", "test"} <= set(resolved["data"])
    assert {"name", "lr", "local_steps", "batch_size", "inner", "outer"} <= set(resolved["algorithm"])
    assert {"name", "lr", "steps", "order"} <= set(resolved["algorithm"]["inner"])
    assert resolved["algorithm"]["outer"] == {"name": "kl", "gamma": 1.0}


@pytest.mark.parametrize(
    ("name", "table", "values"),
    [
        ("mlp", "model", {"hidden": [80, 60]}),
        ("cnn4", "model", {"filters": 4, "norm": "batch"}),
        ("least", "data", {"partition": "iid", "clients": 10}),
    ],
)
def test_the_resolved_config_says_the_defaults_too(name: str, table: str, values: dict[str, Any]) -> None:
    """A default that changes in a later version must not change what an old run's config.toml says."""
    written = tomllib.loads(to_toml(parse_config(CONFIGS[name]).resolved()))[table]
    assert {key: written.get(key) for key in values} == values


# Weights from outer data, and offsets.


@pytest.mark.parametrize(
    ("table", "method"),
    [
        (
            'name = "comfedl", outer = { name = "kl", gamma = 0.2, on = "outer" }',
            cf.ComFedL(outer=cf.KL(0.2, on="outer")),
        ),
        ('name = "robust", on = "outer"', cf.Robust(on="outer")),
        (
            'name = "robust", offset = { name = "generalisation", c = 1.0 }',
            cf.Robust(offset=cf.offset.Generalisation(1.0)),
        ),
        ('name = "robust", offset = { name = "excess", steps = 50 }', cf.Robust(offset=cf.offset.Excess())),
        (
            'name = "comfedl", outer = { name = "kl", gamma = 1, offset = { name = "excess", lr = 0.5 } }',
            cf.ComFedL(outer=cf.KL(1.0, offset=cf.offset.Excess(lr=0.5))),
        ),
        (
            'name = "robust", offset = { name = "excess", baseline = { a = 0.3, "b. c" = 1 } }',
            cf.Robust(offset=cf.offset.Excess({"a": 0.3, "b. c": 1.0})),
        ),
    ],
)
def test_offsets_and_outer_weights_in_a_config(table: str, method: Algorithm) -> None:
    config = small(f"algorithm={{{table}}}", "outer_share=0.3")
    assert config.make_algorithm() == method
    written = to_toml(config.resolved())
    again = parse_config(tomllib.loads(written))
    assert again.make_algorithm() == method and again.resolved() == config.resolved()
    assert ("outer_share = 0.3" in written) == method.weighs_on_outer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["outer_share=1"], ["outer_share is 1.0", "above 0 and below 1"]),
        (["outer_share=nan"], ["outer_share is nan", "above 0 and below 1"]),
        (['algorithm={name="robust", on="test"}'], ["on is 'test'", "outer, train"]),
        (['algorithm={name="robust", offset="excess"}'], ["algorithm.offset", "must be a table with a name"]),
        (['algorithm={name="robust", offset={name="exces"}}'], ["algorithm.offset.name", "did you mean 'excess'"]),
        (['algorithm={name="robust", offset={name="generalisation"}}'], ["algorithm.offset.c is missing"]),
        (['algorithm={name="robust", offset={name="excess", baseline=3}}'], ["algorithm.offset.baseline is 3"]),
        (['algorithm={name="comfedl", on="outer"}'], ["algorithm.on", "did you mean 'algorithm.outer.on'"]),
    ],
)
def test_bad_offsets_and_outer_weights(changes: list[str], words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        small(*changes)
    assert all(word in str(error.value) for word in words), str(error.value)


# The user's code.


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code.py").write_text(
        "import functools\n"
        "from torch import nn\n"
        "import comfedl as cf\n"
        "NUMBER = 3\n"
        "def good(shape, classes, width=2):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))\n"
        "partial = functools.partial(good, width=3)\n"
        "def number(shape, classes):\n    return 5\n"
        "def nothing(shape, classes):\n    pass\n"
        "def raises(shape, classes):\n    raise ValueError('no such width')\n"
        "def needs_more(shape, classes, width):\n    return nn.Linear(2, 2)\n"
        "def three(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "def wrong_shape(shape, classes):\n    return nn.Linear(5, 3)\n"
        "def empty(shape, classes):\n    return nn.Flatten()\n"
        "problem = cf.Composition(lambda params, batch: (params['1.weight'] ** 2).sum(), lambda y, batch: y)\n"
    )
    (tmp_path / "broken_syntax.py").write_text("def make(:\n")
    (tmp_path / "broken_import.py").write_text("raise RuntimeError('the disk of models is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_code", "broken_syntax", "broken_import"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("changes", [("model.name=own_code:good", "model.width=3"), ("model.name=own_code:partial",)])
def test_a_model_of_the_user(changes: tuple[str, ...]) -> None:
    config = small(*changes)
    model = config.make_model(config.make_data())
    assert isinstance(model, nn.Module)
    assert sum(part.numel() for part in model.parameters()) == 64 * 3 + 3 + 3 * 10 + 10
    assert config.resolved()["model"]["name"] == changes[0].removeprefix("model.name=")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.name=no_such_module:f"], ["no_such_module"]),
        (["model.name=own_code:missing"], ["own_code:missing"]),
        (["model.name=own_code:NUMBER"], ["own_code:NUMBER"]),
        (["model.name=own_code:number"], ["int", "Module"]),
        (["model.name=own_code:nothing"], ["None", "Module"]),
        (["model.name=own_code:raises"], ["own_code:raises", "no such width"]),
        (["model.name=own_code:needs_more"], ["own_code:needs_more", "width"]),
        (["model.name=own_code:good", "model.depth=3"], ["own_code:good", "depth"]),
        (["model.name=own_code:partial", "model.depth=3"], ["own_code:partial", "depth"]),
        (["model.name=own_code:three"], ["label", "3 outputs", "0 to 2"]),
        (["model.name=own_code:wrong_shape"], ["cannot be applied", "(1, 8, 8)"]),
        (["model.name=own_code:empty"], ["no parameters"]),
        (["model.name=:f"], [":f"]),
        (["model.name=::"], ["::"]),
        (["model.name=own_code:"], ["own_code:"]),
        (["model.name=.own_code:good"], [".own_code:good"]),
        (["model.name=broken_syntax:make"], ["broken_syntax:make", "syntax"]),
        (["model.name=broken_import:make"], ["broken_import:make", "the disk of models is not there"]),
        (["algorithm={name='own_code:good'}"], ["algorithm.name", "own_code:good"]),
        (["algorithm={name='own_code:missing'}"], ["algorithm.name", "own_code:missing"]),
    ],
)
def test_a_model_of_the_user_that_does_not_work(changes: list[str], words: list[str]) -> None:
    with pytest.raises(cf.ComfedlError) as error:
        run_config(small(*changes))
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.usefixtures("own")
def test_a_problem_of_the_user_stays_as_it_was_written() -> None:
    config = small('algorithm={name="comfedl", problem="own_code:problem"}')
    assert config.resolved()["algorithm"]["problem"] == "own_code:problem"
    assert isinstance(config.make_algorithm().problem, cf.Composition)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("problem", ["own_code:good", "own_code:missing", "no_such_module:x", "own_code", ":x", "::"])
def test_a_problem_that_cannot_be_had(problem: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config({**SMALL, "algorithm": {"name": "comfedl", "problem": problem}})
    assert f"algorithm.problem is '{problem}'" in message(error)


# Numbers of numpy are numbers too: sweeps are made of them.


def test_numbers_of_numpy_are_taken_for_what_they_are(three_clients: cf.FederatedData) -> None:
    method = cf.FedAvg(lr=np.float32(0.5), local_steps=np.int64(2), batch_size=np.int64(3))  # type: ignore[arg-type]
    result = cf.fit(nn.Linear(4, 3).double(), three_clients, method, rounds=np.int64(1))  # type: ignore[arg-type]
    assert [row["round"] for row in result.rounds] == [1]


OTHERS = [{"name": "chi-square", "rho": 0.3}, {"name": "cvar", "level": 0.5}, {"name": "tilt", "t": -1.0}]


@pytest.mark.parametrize("outer", OTHERS, ids=lambda outer: outer["name"])
def test_every_outer_reads_back_from_a_resolved_config(outer: dict[str, Any]) -> None:
    config = parse_config({**SMALL, "algorithm": {"name": "comfedl", "outer": outer}})
    again = parse_config(tomllib.loads(to_toml(config.resolved())))
    assert again.make_algorithm() == config.make_algorithm()


TRAINING: list[dict[str, Any]] = [
    {"client_optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}},
    {"client_optimizer": {"name": "adam", "beta2": 0.99, "keep_state": True}, "clip_grad_norm": 1.0},
    {"client_optimizer": {"name": "adamw", "weight_decay": 0.1}},
    {"server_optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}},
    {"server_optimizer": {"name": "adam", "lr": 0.01, "bias_correction": True}},
    {"server_optimizer": {"name": "yogi"}, "lr_schedule": {"name": "constant"}},
    {"server_optimizer": {"name": "adagrad", "eps": 0.01}},
    {"lr_schedule": {"name": "cosine", "rounds": 200, "end": 0.1}},
    {"lr_schedule": {"name": "warmup", "rounds": 5, "then": {"name": "step", "every": 10, "factor": 0.5}}},
    {"lr_schedule": f"{__name__}:halving"},
]


def halving(round: int) -> float:
    return 0.5 ** (round - 1)


def stopping(round: int) -> float:
    return 1.0 if round < 3 else 1e-12


@pytest.mark.parametrize("training", TRAINING, ids=str)
def test_every_optimiser_and_schedule_reads_back_from_a_resolved_config(training: dict[str, Any]) -> None:
    config = parse_config({**SMALL, "algorithm": {"name": "fedavg", **training}})
    again = parse_config(tomllib.loads(to_toml(config.resolved())))
    assert again.make_algorithm() == config.make_algorithm() != cf.FedAvg()
    assert again.resolved() == config.resolved()


def test_a_schedule_in_a_config_is_used() -> None:
    """The third of three rounds at a vanishing learning rate: the model is that of two rounds."""
    two, three = (run_config(small(f"rounds={n}", f"algorithm.lr_schedule={__name__}:stopping")).params for n in (2, 3))
    plain = run_config(small("rounds=3")).params
    for name, part in two.items():
        torch.testing.assert_close(three[name], part, rtol=0, atol=1e-6)
    assert any(not torch.allclose(plain[name], part, atol=1e-3) for name, part in two.items())


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            {"client_optimizer": {"name": "sgd", "momentum": 1}},
            ["algorithm.client_optimizer", "momentum is 1", "below 1"],
        ),
        ({"client_optimizer": {"name": "yogi"}}, ["algorithm.client_optimizer.name", "'yogi'", "adamw"]),
        (
            {"server_optimizer": {"name": "adamw"}},
            ["algorithm.server_optimizer.name", "'adamw'", "did you mean 'adam'?"],
        ),
        ({"client_optimizer": "adam"}, ["algorithm.client_optimizer is 'adam'", '{ name = "sgd", momentum = 0.9 }']),
        ({"client_optimizer": {"name": "sgd", "momentun": 0.9}}, ["did you mean 'momentum'?"]),
        ({"client_optimizer": {"name": "sgd", "lr": 0.1}}, ["client_optimizer has lr = 0.1", "method's lr"]),
        ({"momentum": 0.9}, ["algorithm.momentum", "algorithm.client_optimizer.momentum"]),
        ({"lr_schedule": {"name": "cosin", "rounds": 2}}, ["algorithm.lr_schedule.name", "did you mean 'cosine'?"]),
        ({"lr_schedule": {"name": "cosine"}}, ["algorithm.lr_schedule.rounds is missing"]),
        ({"lr_schedule": "nowhere:function"}, ["algorithm.lr_schedule", "cannot be imported"]),
        ({"lr_schedule": {"name": "warmup", "rounds": 2, "then": 3}}, ["algorithm.lr_schedule.then is 3"]),
    ],
)
def test_an_optimiser_or_schedule_that_cannot_be_made(training: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config({**SMALL, "algorithm": {"name": "fedavg", **training}})
    assert [word for word in words if word not in message(error)] == []


# The engine's own table.


def test_the_embedded_engines_table() -> None:
    config = small("embedded.vectorize=serial", "embedded.memory_mb=100")
    assert config.resolved()["embedded"] == {
        "vectorize": "serial",
        "memory_mb": 100,
        "workers": "auto",
        "keep_memory": True,
    }
    assert "embedded" not in small().resolved()
    serial, auto = run_config(config), run_config(small())
    for name, part in serial.params.items():
        torch.testing.assert_close(part, auto.params[name])
    with pytest.raises(cf.ConfigError, match="Conv2d"):
        run_config(small("embedded.vectorize=stack", "model.name=cnn4"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("embedded.vectorize=stak", ["embedded.vectorize", "stack"]),
        ("embedded.vectorise=stack", ["vectorise", "vectorize"]),
        ("embedded.memory_mb=0", ["embedded.memory_mb", "above 0"]),
        ("embedded.workers=0", ["embedded.workers", "1 or more"]),
        ("embedded.workers=many", ["embedded.workers", "many"]),
        ("embedded=stack", ["embedded", "stack"]),
    ],
)
def test_a_mistake_in_the_embedded_engines_table(change: str, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        small(change)
    assert all(word in message(error) for word in words)
