"""The table by client: of a result and of a folder, who cannot be judged, and how sure it is who is worst."""

from __future__ import annotations

import copy
import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.analysis.client_tables import client_table
from comfedl.analysis.read_runs import read_run
from comfedl.core.intervals import wilson
from comfedl.training import client_scorer, result as result_module
from comfedl.training.client_table import ClientTable, listed, noise

METHOD = cf.FedAvg(lr=0.3, batch_size=8)


def client(n: int, seed: int, labels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, (
        (x[:, 0] + 0.5 * torch.randn(n, generator=generator) > 0).long() if labels == 2 else torch.ones(n).long()
    )


def federation() -> cf.FederatedData:
    """Big and small clients; "empty" has no validation data, and "single" has only one label there."""
    train = {name: client(30, k) for k, name in enumerate(("big", "empty", "single", "small"))}
    validation = {"big": client(300, 10), "single": client(20, 11, labels=1), "small": client(5, 12)}
    return cf.FederatedData(train, validation, {"big": client(9, 13)})


def fitted(**options: Any) -> cf.Result:
    torch.manual_seed(0)
    return cf.fit(
        nn.Linear(4, 2), federation(), METHOD, **{"rounds": 3, "eval_every": 1, "metrics": ["auc"], **options}
    )


@pytest.fixture(scope="module")
def result() -> cf.Result:
    return fitted()


def test_the_table_has_what_the_records_have(result: cf.Result) -> None:
    table = result.clients_table()
    assert table.split == "validation" and [row["client"] for row in table] == ["big", "empty", "single", "small"]
    last = {row["client"]: row for row in result.clients if row["round"] == 3}
    for row in table:
        for name in ("loss", "accuracy", "auc", "personal_accuracy"):
            assert row.get(name) == last[row["client"]].get(f"validation.{name}")
        assert row["weight"] == last[row["client"]]["weight"]
    assert [row["train_samples"] for row in table] == [30] * 4
    assert [row["validation_samples"] for row in table] == [300, 0, 20, 5]
    assert [row["test_samples"] for row in table] == [9, 0, 0, 0]
    assert [row["client"] for row in result.clients_table("test") if "accuracy" in row] == ["big"]


def test_accuracy_has_wilsons_interval(result: cf.Result) -> None:
    for row in result.clients_table():
        if "accuracy" in row:
            n = int(row["validation_samples"])  # type: ignore[arg-type]
            low, high, _ = wilson(round(float(row["accuracy"] or 0) * n), n)
            assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx((low, high), abs=1e-6)
    assert result.clients_table().methods["accuracy"] == "Wilson"


def test_the_same_run_has_the_same_table(result: cf.Result) -> None:
    assert fitted().clients_table() == result.clients_table()
    assert fitted(engine_options={"vectorize": "serial"}).clients_table()[0]["auc_low"] == pytest.approx(
        result.clients_table()[0]["auc_low"], abs=1e-5
    )
    assert "auc_low" in result.clients_table()[0]


def test_who_cannot_be_judged_is_named(result: cf.Result) -> None:
    said = result.notes()
    assert said[0] == "1 of 4 clients has no validation rows: empty."
    assert (
        said[1] == "auc on validation data is undefined for 1 of 4 clients (it needs samples of two classes): single."
    )
    assert said[-1] == "3 of 4 clients have no test rows: empty, single, small."


def test_without_counts_the_records_say_who_has_no_rows() -> None:
    """As in folders that were written before there was a table, and for clients at real sites."""
    rows = [
        {"round": 1, "client": "a", "validation.loss": 0.5, "validation.accuracy": 0.9},
        {"round": 1, "client": "b"},
    ]
    table = ClientTable.of("validation", rows)
    assert table.unjudged() == ["1 of 2 clients has no validation rows: b."]
    assert table.about_worst() == ["Worst client by validation accuracy: a, 0.900."]


def hits(**right: int) -> ClientTable:
    rows = [{"client": name, "validation.accuracy": count / 100} for name, count in right.items()]
    return ClientTable.of("validation", rows, {"validation": dict.fromkeys(right, 100)})


def test_the_worst_client_comes_with_its_interval() -> None:
    assert hits(a=90, b=95, c=30).about_worst() == [
        "Worst client by validation accuracy: c, 0.300 (95 % interval 0.219 to 0.396, 100 samples)."
    ]
    assert hits(a=90, b=84, c=30, d=35).about_worst()[1] == (
        "This interval overlaps that of 1 of the 3 other clients, so which client is worst is within noise."
    )
    assert "overlaps those of all 2 other clients" in hits(a=30, b=31, c=32).about_worst()[1]
    assert "overlaps that of the other client" in hits(a=30, b=31).about_worst()[1]
    assert noise((0, 5)) == noise(None) == hits(a=5).about_worst() == []


def test_the_worst_by_an_error_is_the_largest() -> None:
    rows = [{"client": name, "test.rmse": value} for name, value in (("a", 1.0), ("b", float("nan")), ("c", 2.0))]
    worst = ClientTable.of("test", rows).worst("rmse")
    assert worst is not None and worst["client"] == "c"


def test_the_text_and_the_csv(result: cf.Result) -> None:
    table = result.clients_table()
    lines = repr(table).splitlines()
    assert lines[0] == "Clients on their validation data" and len(lines) == 6
    assert lines[1].split()[:5] == ["client", "train", "samples", "validation", "samples"]
    assert f"{table[0]['accuracy']:.3f} ({table[0]['accuracy_low']:.3f} to" in lines[2]
    found = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["client"] for row in found] == ["big", "empty", "single", "small"]
    assert float(found[0]["accuracy_high"]) == table[0]["accuracy_high"] and found[1]["accuracy"] == ""
    assert list(found[0])[:4] == ["client", "train_samples", "validation_samples", "test_samples"]
    assert list(found[0])[4:7] == ["accuracy", "accuracy_low", "accuracy_high"]
    assert ClientTable("test", [{"client": "=1+1", "samples": 1}]).to_csv() == "client,samples\n'=1+1,1\n"
    assert len(repr(ClientTable("test", [{"client": str(k)} for k in range(99)])).splitlines()) < 40


def test_an_own_metric_may_be_named_like_a_bound() -> None:
    own = {"margin_low": lambda output, y: output.min(), "spread_samples": lambda output, y: output.std()}
    table = fitted(metrics=own).clients_table(with_own=False)
    assert {"margin_low", "spread_samples"} <= {*table.measures} and "margin_low" in table[0]
    assert table.without_samples() == ["empty"]


@pytest.mark.parametrize("name", ["weight", "samples", "train_samples", "client", "round", "accuracy_low", "f_high"])
def test_a_metric_named_like_another_column_is_refused(name: str) -> None:
    own = {"f": lambda output, y: 0.5, name: lambda output, y: 0.5}
    with pytest.raises(cf.ConfigError, match=f"named '{name}', but the table by client has another column"):
        fitted(metrics=own)


def test_long_lists_and_odd_names_stay_readable() -> None:
    assert listed([str(k) for k in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert listed(["a\x1b[2Jb"]) == "a�[2Jb"
    assert len(listed(["x" * 500])) == 60


def test_a_split_that_is_none_is_refused(result: cf.Result) -> None:
    with pytest.raises(cf.ConfigError, match="split is 'tset', which is unknown; did you mean 'test'"):
        result.clients_table("tset")


def test_a_sample_of_the_clients_is_the_table() -> None:
    found = fitted(eval_clients=2)
    assert len(found.clients_table()) == 2 and "of 2 clients" in " ".join(found.notes())


def test_many_clients_cost_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_module, "MOST_SCORED", 3)
    monkeypatch.setattr(client_scorer.ClientScorer, "intervals", None)
    found = fitted()
    assert "accuracy_low" in found.clients_table()[0] and "loss_low" not in found.clients_table()[0]
    assert found.notes() == [
        "1 of 4 clients has no validation rows: empty.",
        "3 of 4 clients have no test rows: empty, single, small.",
    ]


def test_intervals_are_of_the_data_that_the_scores_are_of() -> None:
    fed = cf.FederatedData({name: client(60, k) for k, name in enumerate("abc")})
    found = cf.fit(nn.Linear(4, 2), fed, METHOD, rounds=5, faults=[cf.faults.LabelFlip(["a"])])
    rows = found.clients_table()
    assert rows[0]["accuracy"] < 0.5 < rows[1]["accuracy"]
    for row in rows:
        for name in ("loss", "accuracy"):
            assert row[f"{name}_low"] < row[name] < row[f"{name}_high"], (row["client"], name)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("kind", ["sequences", "own"])
def test_only_a_share_of_the_samples_has_wilsons_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scored: bool
) -> None:
    if not scored:
        monkeypatch.setattr(result_module, "MOST_SCORED", 1)
    generator = torch.Generator().manual_seed(0)
    if kind == "sequences":  # which it learns: 40/40 tokens, not 10/10 samples
        model, own = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)), None
        x = torch.randint(5, (10, 4), generator=generator)
        y = x.clone()
    else:
        model, own = nn.Sequential(nn.Linear(4, 2)), {"accuracy": lambda output, y: 0.5}
        x, y = client(10, 0)
    fed = cf.FederatedData({"a": (x, y), "b": (x.clone(), y.clone())})
    found = cf.fit(model, fed, cf.FedAvg(lr=1.0, local_steps=30), rounds=9, out=tmp_path / "run", metrics=own)
    row = found.clients_table(with_own=False)[0]
    assert row["accuracy"] == (1.0 if kind == "sequences" else 0.5) and row["train_samples"] == 10
    for table in (found.clients_table(with_own=False), cf.load_run(tmp_path / "run").clients_table("train")):
        assert not any("accuracy_low" in key for key in table.columns)


# In a folder.


def test_a_folder_has_the_same_table(tmp_path: Path) -> None:
    found = fitted(out=tmp_path / "run")
    table, read = found.clients_table("validation"), client_table(read_run(tmp_path / "run"), "validation")
    assert read == table and read.methods.keys() == table.methods.keys() and read.notes() == table.notes()
    assert cf.load_run(tmp_path / "run").clients_table() == table  # also without model=
    lines = [json.loads(line) for line in (tmp_path / "run" / "clients_table.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [3] * 4


def test_a_folder_is_judged_on_the_same_split(tmp_path: Path) -> None:
    fed = cf.FederatedData({name: client(20, k) for k, name in enumerate("abc")})
    found = cf.fit(nn.Linear(4, 2), fed, METHOD, rounds=1, out=tmp_path / "run")
    saved = cf.load_run(tmp_path / "run")
    assert saved.clients_table() == found.clients_table() and saved.clients_table().split == "train"
    for wrong in ("validation", "tset"):
        with pytest.raises(cf.ConfigError, match=f"split is '{wrong}', which is unknown"):
            saved.clients_table(wrong)


def test_a_run_that_goes_on_has_counts_and_wilsons_intervals(tmp_path: Path) -> None:
    class Look(cf.Callback):
        def evaluated(self, row: Any, clients: Any) -> None:
            if row["round"] == 2:
                seen.append(client_table(read_run(tmp_path / "run"), "validation"))

    seen: list[ClientTable] = []
    fitted(out=tmp_path / "run", callbacks=[Look()])
    assert [row.get("validation_samples") for row in seen[0]] == [300, 0, 20, 5]
    assert "accuracy_low" in seen[0][0] and "auc" in seen[0][0] and "auc_low" not in seen[0][0]


def test_a_longer_run_has_a_new_table(tmp_path: Path) -> None:
    fitted(out=tmp_path / "run")
    longer = fitted(out=tmp_path / "run", rounds=5, resume=True)
    fitted(out=tmp_path / "whole", rounds=5)
    assert client_table(read_run(tmp_path / "run"), "validation") == longer.clients_table()
    assert (tmp_path / "run/clients_table.jsonl").read_bytes() == (tmp_path / "whole/clients_table.jsonl").read_bytes()


def test_a_split_that_no_evaluated_client_has_does_not_stop_a_run(tmp_path: Path) -> None:
    train = {f"c{k:02d}": client(10, k) for k in range(20)}
    fed = cf.FederatedData(train, {"c00": train["c00"]})
    found = cf.fit(nn.Linear(4, 2), fed, METHOD, rounds=2, eval_clients=2, out=tmp_path / "run")
    assert found.splits == ["train"] and (tmp_path / "run/summary.json").exists()
    assert cf.load_run(tmp_path / "run").clients_table("train")[0]["loss_low"] == found.clients_table()[0]["loss_low"]


def test_a_run_finishes_without_intervals_if_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_scorer.ClientScorer, "intervals", None)
    with pytest.warns(UserWarning, match="has no confidence intervals"):
        fitted(out=tmp_path / "run")
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize("room", [0, -1])
def test_a_run_bootstraps_at_its_end_only_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Over all splits and clients: auc draws every sample 1000 times, of two outputs each."""
    monkeypatch.setattr(result_module, "MOST_DRAWN", 2 * 1000 * (300 + 20 + 5 + 9) + room)
    found = fitted(out=tmp_path / "run")
    said = found.notes()
    saved = cf.load_run(tmp_path / "run").clients_table("validation")
    assert ("auc_low" in saved[0]) == (room == 0)
    assert {"loss_low", "accuracy_low"} <= saved[0].keys()
    assert "auc_low" in found.clients_table()[0] and found.notes() == said


def test_the_budget_of_the_end_counts_metrics_samples_and_draws() -> None:
    one = fitted(eval_clients=None, metrics=["auc", "f1"]).scorer
    assert one is not None
    model = {"params": {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, "buffers": {}}
    assert one.bootstrap_work(model, [0, 1], "validation") == 2 * 2 * 1000 * 300  # type: ignore[arg-type]
    assert one.bootstrap_work(model, [1], "validation") == 0  # type: ignore[arg-type]
    plain = fitted(metrics=["brier"]).scorer
    assert plain is not None and plain.bootstrap_work(model, [0], "validation") == 0  # type: ignore[arg-type]


# The result itself.


def test_a_result_shows_what_came_out(result: cf.Result) -> None:
    text = repr(result)
    assert len(text) < 250 and "\n" not in text
    assert text.startswith("<Result: 3 rounds; validation accuracy ") and "4 clients; 10 parameters" in text
    mean, worst = (result.rounds[-1][f"validation.accuracy.{name}"] for name in ("mean", "worst"))
    assert f"{mean:.3f} for the average client, {worst:.3f} for the worst" in text


def test_a_result_of_an_early_round_says_so() -> None:
    found = fitted(stop=cf.EarlyStopping("validation.loss.mean", patience=2), rounds=200)
    assert found.round < found.rounds[-1]["round"] and f"; model of round {found.round}; " in repr(found)
    last = {row["client"]: row for row in found.clients if row["round"] == found.round}
    assert found.clients_table()[0]["loss"] == last["big"]["validation.loss"]


def test_a_result_can_be_pickled_and_copied(result: cf.Result) -> None:
    result.clients_table()
    again = pickle.loads(pickle.dumps(result))
    assert again.rounds == result.rounds and again.clients == result.clients and repr(again) == repr(result)
    assert all(torch.equal(again.params[name], part) for name, part in result.params.items())
    assert again.clients_table() == result.clients_table() and again.notes() == result.notes()
    x = client(7, 3)[0]
    assert torch.equal(again.to_module()(x), result.to_module()(x))
    with pytest.raises(cf.ConfigError, match="pickled, without the clients' personal models"):
        again.personal("big")
    for copied in (copy.copy(result), copy.deepcopy(result)):
        assert torch.equal(copied.personal("big")["weight"], result.personal("big")["weight"])


def test_a_module_that_cannot_be_pickled_stays_behind() -> None:
    class Local(nn.Linear):
        pass

    found = cf.fit(Local(4, 2), federation(), METHOD, rounds=1)
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.params["weight"].numpy(), found.params["weight"].numpy())
    with pytest.raises(cf.ConfigError, match=r"could not be pickled.*result\.params"):
        again.to_module()
