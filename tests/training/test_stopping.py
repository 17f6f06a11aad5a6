"""Early stopping: where a run ends, which model it returns, and that a stop changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import comfedl as cf
from comfedl.config.schema import parse_config, run_config
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.stopping import EarlyStopping
from helpers.in_process import grid_of
from helpers.reference import same

METRIC = "validation.loss.worst"


def fed() -> cf.FederatedData:
    """Few noisy samples, so that training overfits: the validation loss has its smallest value on the way."""
    rng = np.random.default_rng(0)

    def client(n: int, shift: float) -> tuple[Any, Any]:
        x = rng.normal(size=(n, 6)) + shift
        return x, ((x[:, 0] - shift + rng.normal(size=n)) > 0).astype(int)

    names = {"a": 0.0, "b": 0.5, "c": -0.5}
    train = {name: client(12, shift) for name, shift in names.items()}
    return cf.FederatedData(train, {name: client(40, shift) for name, shift in names.items()})


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


METHOD = cf.ComFedL(outer=cf.KL(0.5), lr=0.3, batch_size=None)


def run(rounds: int = 200, method: Any = METHOD, **options: Any) -> cf.Result:
    return cf.fit(net(), fed(), method, rounds, **options)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("patience", [1, 10])
def test_it_stops_where_the_records_say_and_returns_that_model(every: int, patience: int) -> None:
    whole = run(eval_every=every)
    values = {int(row["round"]): float(row[METRIC]) for row in whole.rounds}  # type: ignore[arg-type]
    best, end = 0, 0
    for number, value in values.items():
        best, end = (number if not best or value < values[best] else best), number
        if number - best >= patience:
            break
    stopped = run(eval_every=every, stop=EarlyStopping(METRIC, patience))
    assert stopped.best_round == best == stopped.round
    assert stopped.stopped is not None and f"Stopped after round {end}" in stopped.stopped
    assert same(stopped, run(best, eval_every=every))
    assert stopped.rounds == [row for row in whole.rounds if row["round"] <= end]  # type: ignore[operator]
    assert stopped.last is not None
    assert all(torch.equal(part, run(end).params[name]) for name, part in stopped.last["params"].items())


def test_a_run_that_goes_on_improving_is_not_changed() -> None:
    plain, watched = run(30), run(30, stop=EarlyStopping("train.loss.mean", 20))
    assert watched.stopped is None and watched.best_round == 30 == plain.best_round
    assert same(plain, watched) and plain.rounds == watched.rounds


def test_the_last_model_where_it_is_asked_for() -> None:
    kept = run(stop=EarlyStopping(METRIC, 10, restore_best=False))
    assert kept.best_round + 10 == kept.round
    assert same(kept, run(kept.round))


def test_the_direction_follows_from_the_measure() -> None:
    small = ("validation.loss.worst", "train.personal_loss.mean", "objective", "validation.accuracy.std")
    small += ("validation.rmse.worst", "test.mae.mean")
    large = ("validation.accuracy.worst", "test.auc.mean", "validation.r2.worst10", "effective_clients")
    assert all(EarlyStopping(metric).minimise for metric in small)
    assert not any(EarlyStopping(metric).minimise for metric in large)


def test_personal_models_are_of_the_best_round() -> None:
    stopped = run(stop=EarlyStopping(METRIC, 10))
    best = run(stopped.best_round)
    assert all(torch.equal(part, best.personal("b")[name]) for name, part in stopped.personal("b").items())


# The run's folder.


def test_the_best_and_the_last_model_are_saved(tmp_path: Path) -> None:
    stopped = run(out=tmp_path / "run", stop=EarlyStopping(METRIC, 10))
    best, last = (load_file(tmp_path / "run" / f"{name}.safetensors") for name in ("model", "last"))
    assert stopped.last is not None
    assert all(torch.equal(best[name], part) for name, part in stopped.params.items())
    assert all(torch.equal(last[name], part) for name, part in stopped.last["params"].items())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    at_best = next(row for row in stopped.rounds if row["round"] == stopped.best_round)
    assert summary["validation"]["loss"]["worst"] == at_best[METRIC]
    assert (summary["rounds"], summary["best_round"]) == (stopped.best_round + 10, stopped.best_round)
    assert summary["stopped"] == stopped.stopped
    module = cf.load_run(tmp_path / "run", net()).to_module()
    assert all(torch.equal(part, stopped.params[name]) for name, part in module.named_parameters())


class Fails(Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def settled(self, snapshot: Snapshot) -> None:
        if snapshot.round == self.number:
            raise RuntimeError("a bug")


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_resumed_run_remembers_its_best_round(tmp_path: Path, at: str) -> None:
    stop = EarlyStopping(METRIC, 10)
    whole = run(out=tmp_path / "whole", stop=stop)
    number = whole.best_round + (-2 if at == "before" else 3)
    with pytest.raises(RuntimeError, match="a bug"):
        run(out=tmp_path / "cut", stop=stop, callbacks=[Fails(number)])
    again = run(out=tmp_path / "cut", stop=stop, resume=True)
    assert same(again, whole) and again.rounds == whole.rounds and again.stopped == whole.stopped
    for name in ("model.safetensors", "last.safetensors", "rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("rounds", [5, 6, 7, 9, 10, 11])
def test_a_longer_run_does_not_know_where_the_short_one_ended(tmp_path: Path, rounds: int) -> None:
    """The short run's last round is evaluated only as the last, and may have been its best."""
    # Momentum at the server makes the train loss rise and fall.
    method = cf.FedAvg(lr=1.0, batch_size=None, server_optimizer=cf.optim.SGD(momentum=0.95))
    options: dict[str, Any] = {"method": method, "eval_every": 4, "stop": EarlyStopping("train.loss.mean", 12)}
    long = run(out=tmp_path / "long", **options)
    short = run(rounds, out=tmp_path / "run", **options)
    again = run(rounds, out=tmp_path / "run", resume=True, **options)
    assert short.best_round == again.best_round and same(short, again)
    longer = run(out=tmp_path / "run", resume=True, **options)
    assert same(longer, long) and longer.rounds == long.rounds and longer.best_round == long.best_round


def test_a_stopped_run_goes_on_with_more_patience(tmp_path: Path) -> None:
    patient = run(out=tmp_path / "patient", stop=EarlyStopping(METRIC, 30))
    first = run(out=tmp_path / "run", stop=EarlyStopping(METRIC, 5))
    again = run(out=tmp_path / "run", stop=EarlyStopping(METRIC, 5), resume=True)
    assert same(first, again) and again.stopped == first.stopped
    longer = run(out=tmp_path / "run", stop=EarlyStopping(METRIC, 30), resume=True)
    assert same(longer, patient) and longer.rounds == patient.rounds
    with pytest.raises(cf.RunFolderError, match="another config"):
        run(out=tmp_path / "run", stop=EarlyStopping("train.loss.mean", 30), resume=True)


# Configs and other engines.


def config(**more: Any) -> dict[str, Any]:
    return {
        "rounds": 80,
        "eval_every": 3,
        "data": {"name": "digits", "partition": "dirichlet", "clients": 4, "alpha": 0.3},
        "algorithm": {"name": "fedavg", "lr": 2.0},
        **more,
    }


def test_a_config_stops_like_python(tmp_path: Path) -> None:
    settings = parse_config(config(stop={"metric": "validation.loss.worst", "patience": 6}))
    assert settings.resolved()["stop"] == {"metric": "validation.loss.worst", "patience": 6, "restore_best": True}
    found = run_config(settings, out=tmp_path / "run")
    data = settings.make_data()
    stop = EarlyStopping("validation.loss.worst", 6)
    wanted = cf.fit(settings.make_model(data), data, settings.make_algorithm(), 80, eval_every=3, stop=stop)
    assert found.stopped == wanted.stopped is not None and same(found, wanted)


def test_sites_stop_in_the_same_round(tmp_path: Path) -> None:
    """Over Flower scores arrive a round late: the round that was trained meanwhile is discarded."""
    from comfedl.flower.server import serve

    settings = {
        "rounds": 200,
        "data": {"name": "sites", "classes": 2},
        "model": {"name": f"{__name__}:build"},
        "algorithm": {"name": "comfedl", "lr": 0.3, "batch_size": "all", "outer": {"name": "kl", "gamma": 0.5}},
        "flower": {"deadline": 5.0, "patience": 5.0},
        "stop": {"metric": METRIC, "patience": 5},
    }
    found, wanted = serve(grid_of(fed(), tmp_path), parse_config(settings)), run(stop=EarlyStopping(METRIC, 5))
    assert (found.best_round, found.stopped) == (wanted.best_round, wanted.stopped)
    for name, part in wanted.params.items():
        torch.testing.assert_close(found.params[name], part, rtol=0, atol=1e-9)
    assert found.traffic == wanted.traffic and len(found.rounds) == len(wanted.rounds)


def build(shape: Any, classes: int) -> nn.Module:
    return net()


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("validation.accuracy.worst", 0), "stop.patience is 0, but it must be an integer of 1 or more"),
        (("validation.accuracy.worst", 2.5), "stop.patience is 2.5"),
        (("validation.accuracy.worst", 5, "yes"), "stop.restore_best is 'yes'"),
        ((3,), "stop.metric is 3"),
    ],
)
def test_a_stop_that_cannot_be_made(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(cf.ConfigError, match=words):
        EarlyStopping(*arguments)


@pytest.mark.parametrize("metric", ["validation.acuracy.worst", "test.accuracy.worst", "validation.auc.worst"])
def test_a_measure_that_nobody_has(tmp_path: Path, metric: str) -> None:
    with pytest.raises(cf.ConfigError, match=f"stop.metric is '{metric}', which no client has in round 1; .*accuracy"):
        run(out=tmp_path / "run", stop=EarlyStopping(metric))
    assert not list(tmp_path.iterdir())


def test_a_stop_of_another_kind() -> None:
    with pytest.raises(cf.ConfigError, match="stop is 20, but it must be None or an EarlyStopping"):
        run(stop=20)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"patience": 3}, ["stop.metric", "missing"]),
        ({"metric": "validation.loss.worst", "patience": 0}, ["stop.patience is 0"]),
        ({"metric": "validation.loss.worst", "patiense": 3}, ["patiense", "patience"]),
    ],
)
def test_a_stop_in_a_config_that_cannot_be_made(stop: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config(config(stop=stop))
    assert all(word in str(error.value) for word in words), str(error.value)
