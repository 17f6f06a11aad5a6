"""After training: modules, predictions, scores, and models for new clients."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import comfedl as cf
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.personalize import personalize
from comfedl.analysis.predict import predict
from comfedl.cli.main import main
from comfedl.config.schema import parse_config, run_config
from comfedl.data.cell_format import CellFormat
from comfedl.data.from_tables import Shares
from comfedl.data.tabular import Encoding, read_csv
from comfedl.utils.toml import to_toml

METHOD = {"name": "comfedl", "lr": 0.2, "local_steps": 5, "outer": {"name": "kl", "gamma": 0.5}}
TABLE = {"name": "csv", "path": "patients.csv", "client": "hospital", "target": "outcome", "drop": ["days"]}


def patients(n: int, seed: int, hospitals: list[str]) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(hospitals, n),
            "age": rng.normal(60, 10, n).round(1),
            "ward": rng.choice(["a", "b"], n),
        }
    )
    frame["days"] = (frame.age / 10 + (frame.ward == "a") + rng.normal(0, 0.3, n)).round(3)
    frame["outcome"] = np.where(frame.days > 6.5, "ill", "well")
    return frame


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    patients(200, 0, ["north", "south", "east"]).to_csv("patients.csv", index=False)
    patients(40, 1, ["west"]).to_csv("west.csv", index=False)
    return tmp_path


def trained(
    loss: str = "cross_entropy", out: str = "run", trust: bool = False, **changes: Any
) -> tuple[cf.Result, SavedRun]:
    settings = {"rounds": 8, "loss": loss, "data": TABLE, "algorithm": METHOD, **changes}
    result = run_config(parse_config(settings), out=Path(out))
    return result, cf.load_run(out, trust=trust)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


# Modules.


def test_a_result_gives_back_a_module(three_clients: cf.FederatedData) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    model[0].weight.requires_grad_(False)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    result = cf.fit(model, three_clients, cf.FedAvg(lr=0.1), rounds=3)
    trained = result.to_module()
    assert not trained.training and trained is not model
    for name, part in result.state_dict().items():
        assert torch.equal(trained.state_dict()[name], part)
    own = result.to_module("b")
    assert torch.equal(own.state_dict()["3.bias"], result.personal("b")["3.bias"])
    assert not torch.equal(own.state_dict()["3.bias"], trained.state_dict()["3.bias"])
    x = three_clients.train["a"][0]
    assert torch.equal(trained(x), trained(x))  # no dropout, and no buffer moves
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    with pytest.raises(cf.ConfigError, match="not a client"):
        result.to_module("z")


def test_a_dict_of_tensors_gives_no_module(three_clients: cf.FederatedData) -> None:
    problem = cf.Composition(lambda params, batch: (params["w"] * batch[0]).mean(), lambda y, batch: y**2)
    start = {"w": torch.ones(4, dtype=torch.float64)}
    result = cf.fit(start, three_clients, cf.ComFedL(problem=problem, lr=0.1), rounds=1)
    with pytest.raises(cf.ConfigError, match="a dict of tensors"):
        result.to_module()


def test_a_run_is_read_back(here: Path) -> None:
    result, run = trained()
    x = torch.randn(5, 3)
    assert torch.equal(run.to_module()(x), result.to_module()(x))
    assert torch.equal(run.to_module("east")(x), result.to_module("east")(x))
    assert run.clients == ["east", "north", "south"]
    with pytest.raises(cf.ConfigError, match="did you mean 'south'"):
        run.to_module("sout")


def test_a_run_from_python_needs_its_model(here: Path, three_clients: cf.FederatedData) -> None:
    model = nn.Linear(4, 3).double()
    result = cf.fit(model, three_clients, cf.FedAvg(), rounds=1, out="bare")
    with pytest.raises(cf.ConfigError, match=r"load_run\(path, model="):
        cf.load_run("bare").to_module()
    again = cf.load_run("bare", model).to_module()
    assert torch.equal(again.weight, result.params["weight"])
    with pytest.raises(cf.RunFolderError, match="do not fit the model"):
        cf.load_run("bare", nn.Linear(4, 2).double()).to_module()


def test_what_is_no_finished_run_is_told(here: Path) -> None:
    with pytest.raises(cf.RunFolderError, match="is not a run folder"):
        cf.load_run("nowhere")
    trained()
    Path("run/model.safetensors").write_bytes(b"junk")
    with pytest.raises(cf.RunFolderError, match="cannot be read as a model"):
        cf.load_run("run")
    Path("run/summary.json").unlink()
    assert "has not finished" in str(cf.load_run("run").unfinished)
    shutil.rmtree("run/checkpoint")
    with pytest.raises(cf.RunFolderError, match="has not finished and has no checkpoint"):
        cf.load_run("run")


def test_half_of_the_personal_models_are_none(here: Path) -> None:
    """A run killed while it writes them, or made longer after its end, has a model from before or after them."""
    trained()
    whole = cf.load_run("run")
    assert whole.has_personal and "personal_loss.mean" in evaluate(whole).summary
    Path("run/summary.json").unlink()
    next(Path("run/personal").iterdir()).unlink()
    killed = cf.load_run("run")
    assert not killed.has_personal and "personal_loss.mean" not in evaluate(killed).summary
    with pytest.raises(cf.RunFolderError, match="has not finished, and personal models are saved at the end; continue"):
        killed.personal(killed.clients[0])
    with pytest.raises(cf.ConfigError, match="is not a client of this run"):
        killed.personal("nobody")


# Predictions.


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_predictions_are_the_models_with_the_names_of_labels(here: Path, loss: str) -> None:
    result, run = trained(loss)
    rows = rows_of(predict(run, Path("west.csv")))
    new = pd.read_csv("west.csv")
    assert run.encoding is not None and len(rows) == len(new)
    x = torch.from_numpy(run.encoding.x(read_csv(Path("west.csv"))))
    output = result.to_module()(x)
    ill = torch.sigmoid(-output[:, 0]) if loss == "bce" else torch.softmax(output, dim=1)[:, 0]
    for row, chance in zip(rows, ill.tolist(), strict=True):
        assert float(row["probability of ill"]) == pytest.approx(chance, abs=1e-5)
        assert row["prediction"] == ("ill" if chance > 0.5 else "well")
    assert np.mean([row["prediction"] == label for row, label in zip(rows, new.outcome, strict=True)]) > 0.75
    own = rows_of(predict(run, Path("west.csv"), client="north"))
    assert own != rows and [row["row"] for row in own] == [str(i + 1) for i in range(40)]


def test_a_regression_predicts_in_the_units_of_the_table(here: Path) -> None:
    data = {**TABLE, "target": "days", "drop": ["outcome"], "scale_target": True}
    _, run = trained("mse", data=data, rounds=40)
    found = np.array([float(row["prediction"]) for row in rows_of(predict(run, Path("west.csv")))])
    assert np.sqrt(np.mean((found - pd.read_csv("west.csv").days) ** 2)) < 0.5


def test_the_order_of_columns_does_not_matter_and_others_are_not_looked_at(here: Path) -> None:
    _, run = trained()
    frame = pd.read_csv("west.csv")
    frame.assign(id=range(40))[["ward", "id", "age"]].to_csv("turned.csv", index=False)
    turned, straight = (rows_of(predict(run, Path(name))) for name in ("turned.csv", "west.csv"))
    assert {*turned[0]} - {"id"} == {*straight[0]} - {"hospital", "days", "outcome"}
    for one, other in zip(turned, straight, strict=True):
        assert one["prediction"] == other["prediction"] and one["probability of ill"] == other["probability of ill"]
    frame.drop(columns="age").to_csv("lacking.csv", index=False)
    with pytest.raises(cf.DataError, match=r"lacking\.csv has no column 'age', which the model was trained on"):
        predict(run, Path("lacking.csv"))


def test_columns_that_the_model_does_not_use_are_carried_over(here: Path) -> None:
    _, run = trained()
    frame = pd.read_csv("west.csv").assign(prediction="mine", id=[f"=p{k}" for k in range(40)])
    frame.to_csv("new.csv", index=False)
    rows = rows_of(predict(run, Path("new.csv")))
    chances = ["probability of ill", "probability of well"]
    assert [*rows[0]] == ["row", "hospital", "days", "outcome", "input prediction", "id", "prediction", *chances]
    assert [row["id"] for row in rows] == [f"'=p{k}" for k in range(40)]  # no formula for a spreadsheet
    assert [float(row["days"]) for row in rows] == frame.days.tolist()
    assert {row["input prediction"] for row in rows} == {"mine"}
    some = rows_of(predict(run, Path("new.csv"), keep=["id", "age"]))
    assert [*some[0]] == ["row", "id", "age", "prediction", *chances]
    with pytest.raises(cf.ConfigError, match=r"--keep names 'idd', but new\.csv has no such column; did you mean 'id'"):
        predict(run, Path("new.csv"), keep=["idd"])


def test_each_row_gets_its_own_clients_model(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, run = trained(data=TABLE | {"missing": "drop"})
    frame = patients(60, 2, ["north", "south", "west", "nowhere"])
    frame.loc[3, "age"] = np.nan
    frame.to_csv("new.csv", index=False)
    rows = rows_of(predict(run, Path("new.csv"), client_column="hospital"))
    assert [int(row["row"]) for row in rows] == [k for k in range(1, 61) if k != 4]
    known = {"north", "south"}
    assert {row["model"] for row in rows} == known | {"global"}
    for name in (*known, None):
        own = {row["row"]: row for row in rows_of(predict(run, Path("new.csv"), client=name))}
        for row in rows:
            if row["hospital"] == name or (name is None and row["hospital"] not in known):
                assert row["model"] == (name or "global")
                assert row["probability of ill"] == own[row["row"]]["probability of ill"]
    strangers = (~frame.hospital.isin(known) & frame.age.notna()).sum()
    said = [text for text in caplog.messages if "not clients of this run" in text]
    assert len(said) == 1 and f"of {strangers} of 59 rows" in said[0] and "('nowhere', 'west')" in said[0]
    assert "new.csv: 1 of 60 rows are left out, since they miss a value (row 4)." in caplog.messages
    with pytest.raises(cf.DataError, match="no column 'hopsital'; did you mean 'hospital'"):
        predict(run, Path("new.csv"), client_column="hopsital")
    with pytest.raises(cf.ConfigError, match="--client and --client-column are both given"):
        predict(run, Path("new.csv"), client="north", client_column="hospital")
    _, bare = trained(out="bare", save_personal=False)
    with pytest.raises(cf.RunFolderError, match="has no personal models"):
        predict(bare, Path("patients.csv"), client_column="hospital")


def test_a_run_is_evaluated_and_made_longer_with_its_own_encoding(here: Path) -> None:
    """That of version 1 has inputs that would now be left out, or shared by a client's own categories."""
    frame = pd.read_csv("patients.csv").assign(unit=7)
    frame.loc[frame.hospital == "east", "ward"] = "tent"
    frame.to_csv("patients.csv", index=False)
    new = parse_config({"rounds": 2, "data": TABLE, "algorithm": METHOD})
    assert [*new.make_data().train.x.shape[1:]] == [4]  # age, ward=a, ward=b, ward=(other)
    text = [{"name": "ward", "kind": "text", "mean": 0.0, "scale": 1.0, "categories": ["a", "b", "tent"]}]
    numbers = [
        {"name": name, "kind": "number", "mean": 7.0, "scale": 1.0, "categories": []} for name in ("age", "unit")
    ]
    head = {"version": 1, "columns": [numbers[0], *text, numbers[1]], "target": "outcome", "client": "hospital"}
    described = {**head, "classes": ["ill", "well"], "mean": 0.0, "scale": 1.0, "shape": [5], "image": None}
    old = Encoding.from_dict(described)
    assert not old.columns[2].indicator and old.format == CellFormat()
    run_config(new, out=Path("old"), fed=new.make_data(encoding=old))
    assert json.loads(Path("old/data.json").read_text()) == described
    saved = cf.load_run("old")
    assert {row["client"] for row in evaluate(saved).rows} == {"north", "south", "east"}
    longer = parse_config({"rounds": 4, "data": TABLE, "algorithm": METHOD})
    Path("longer.toml").write_text(to_toml(longer.resolved()))
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["comfedl", "run", "longer.toml", "--out", "old", "--resume"])
        main()
    whole = run_config(longer, fed=longer.make_data(encoding=old))
    for name, part in load_file("old/model.safetensors").items():
        assert torch.equal(part, whole.params[name])


def test_arrays_are_predicted_where_there_were_no_columns(here: Path) -> None:
    result = run_config(
        parse_config({"rounds": 2, "data": {"name": "digits"}, "algorithm": METHOD}), out=Path("digits")
    )
    x = np.random.default_rng(0).random((6, 1, 8, 8))
    np.savez("new.npz", x=x)
    rows = rows_of(predict(cf.load_run("digits"), Path("new.npz")))
    expected = result.to_module()(torch.from_numpy(x).float()).argmax(dim=1)
    assert [int(row["prediction"]) for row in rows] == expected.tolist()
    with pytest.raises(cf.DataError, match=r"give an \.npz"):
        predict(cf.load_run("digits"), Path("west.csv"))
    np.savez("odd.npz", x=x[:, :, :3])
    with pytest.raises(cf.DataError, match="cannot be applied"):
        predict(cf.load_run("digits"), Path("odd.npz"))


# Scores.


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_scores_are_those_of_the_last_record(here: Path, loss: str) -> None:
    result, run = trained(loss)
    last = {row["client"]: row for row in result.clients if row["round"] == 8}
    for split in ("train", "validation", "test"):
        scores = evaluate(run, split)
        for row in scores.rows:
            for key in ("loss", "accuracy", "personal_loss", "personal_accuracy"):
                assert row[key] == pytest.approx(last[row["client"]][f"{split}.{key}"], rel=1e-5)
        assert scores.summary["loss.worst"] == pytest.approx(result.rounds[-1][f"{split}.loss.worst"], rel=1e-5)
    assert evaluate(run).split == "test"
    with pytest.raises(cf.ConfigError, match="did you mean 'test'"):
        evaluate(run, "tests")


def test_scores_on_other_rows(here: Path) -> None:
    _, run = trained()
    both = pd.concat([pd.read_csv("west.csv"), patients(30, 5, ["north"])])
    both.to_csv("both.csv", index=False)
    scores = {str(row["client"]): row for row in evaluate(run, data=Path("both.csv")).rows}
    assert scores.keys() == {"west", "north"}
    assert "personal_loss" in scores["north"] and "personal_loss" not in scores["west"]
    predicted = [row["prediction"] for row in rows_of(predict(run, Path("west.csv")))]
    assert scores["west"]["accuracy"] == pytest.approx(np.mean(predicted == pd.read_csv("west.csv").outcome))


# Integer inputs.

TOKENS = """
import numpy as np
import comfedl as cf
from torch import nn

def make_data(seed):
    x = np.random.default_rng(seed).integers(0, 6, (3, 40, 4))
    return cf.FederatedData({str(i): (tokens, (tokens[:, 0] > 2).astype(int)) for i, tokens in enumerate(x)})

def make_model(shape, outputs):
    return nn.Sequential(nn.Embedding(6, 5), nn.Flatten(), nn.Linear(5 * shape[0], outputs))
"""


@pytest.fixture
def token_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[cf.Result, SavedRun]:
    Path("tokens.py").write_text(TOKENS)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "tokens", raising=False)
    np.savez("new.npz", x=np.arange(24, dtype=np.uint8).reshape(6, 4) % 6, y=np.arange(6) % 2)
    return trained(data={"name": "tokens:make_data"}, model={"name": "tokens:make_model"}, trust=True)


def test_a_model_with_an_embedding_is_served(
    token_run: tuple[cf.Result, SavedRun], comfedl: Callable[..., tuple[int, str]]
) -> None:
    """Token indices must reach nn.Embedding as integers, in Python and from a file of another integer type."""
    result, run = token_run
    new = {name: torch.from_numpy(part).long() for name, part in np.load("new.npz").items()}
    output = run.to_module()(new["x"])
    predictions = [int(row["prediction"]) for row in rows_of(predict(run, Path("new.npz")))]
    assert predictions == output.argmax(dim=1).tolist() == result.to_module()(new["x"]).argmax(dim=1).tolist()
    (row,) = evaluate(run, data=Path("new.npz")).rows
    assert row["loss"] == pytest.approx(nn.functional.cross_entropy(output, new["y"]).item(), rel=1e-5)
    last = {row["client"]: row for row in result.clients if row["round"] == 8}
    assert all(row["loss"] == pytest.approx(last[row["client"]]["train.loss"]) for row in evaluate(run).rows)
    assert personalize(run, Path("new.npz"), Path("new.safetensors"), steps=2, held_out=0.5).held_out
    for command in (["predict", "run", "new.npz"], ["evaluate", "run", "--data", "new.npz"]):
        assert comfedl(*command, "--trust")[0] == 0


def test_inputs_that_an_embedding_cannot_take_are_refused(token_run: tuple[cf.Result, SavedRun]) -> None:
    np.savez("floats.npz", x=np.zeros((2, 4)), y=np.zeros(2, dtype=int))
    np.savez("large.npz", x=np.full((2, 4), 9), y=np.zeros(2, dtype=int))
    for file, message in (("floats.npz", "trained on int64"), ("large.npz", "cannot be applied")):
        for use in (predict, lambda run, data: evaluate(run, data=data)):
            with pytest.raises(cf.DataError, match=message):
                use(token_run[1], Path(file))


def test_integers_become_floats_for_a_model_trained_on_floats(here: Path) -> None:
    run_config(parse_config({"rounds": 1, "data": {"name": "digits"}, "algorithm": METHOD}), out=Path("digits"))
    x = np.random.default_rng(0).integers(0, 2, (5, 1, 8, 8))
    np.savez("integers.npz", x=x)
    np.savez("floats.npz", x=x.astype(np.float32))
    run = cf.load_run("digits")
    assert predict(run, Path("integers.npz")) == predict(run, Path("floats.npz"))


# New clients.


def test_adapting_is_gradient_descent_on_rows_that_are_not_judged(here: Path) -> None:
    result, run = trained(algorithm={**METHOD, "batch_size": "all"})
    found = personalize(run, Path("west.csv"), Path("west.safetensors"), steps=3, lr=0.1)
    assert found.adapted_on + found.held_out == 40 and found.held_out == 12
    written = load_file("west.safetensors")
    # By hand, on all rows but those: whichever they are, no other choice of 28 rows gives this model.
    model = result.to_module()
    assert run.encoding is not None
    table = read_csv(Path("west.csv"))
    x, y = torch.from_numpy(run.encoding.x(table)), torch.from_numpy(run.encoding.y(table))
    rows = Shares(0.3, 0.0, 0).split_rows("west", y.numpy())
    assert not {*rows["train"]} & {*rows["validation"]}
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x[rows["train"]]), y[rows["train"]])
        for part, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            part.data -= 0.1 * slope
    for name, part in model.named_parameters():
        torch.testing.assert_close(written[name], part.detach(), rtol=1e-5, atol=1e-6)
    held = nn.functional.cross_entropy(model(x[rows["validation"]]), y[rows["validation"]])
    assert found.after["loss"] == pytest.approx(held.item(), rel=1e-5)
    own = rows_of(predict(run, Path("west.csv"), model=Path("west.safetensors")))
    assert own != rows_of(predict(run, Path("west.csv")))


def test_a_new_client_of_the_other_kind_gains(here: Path) -> None:
    """Where a new client's labels are turned round, adapting helps, and the file says so on rows held out."""
    _, run = trained()
    frame = pd.read_csv("west.csv")
    frame.assign(outcome=np.where(frame.outcome == "ill", "well", "ill")).to_csv("turned.csv", index=False)
    found = personalize(run, Path("turned.csv"), Path("turned.safetensors"), steps=200, lr=0.3)
    assert found.after["accuracy"] > 0.6 > 0.4 > found.before["accuracy"]
    assert found.after["loss"] < found.before["loss"]


def test_steps_are_the_methods_own(here: Path) -> None:
    method = {"name": "fedmaml", "adapt_lr": 0.07, "lr": 0.1}
    _, run = trained(algorithm=method)
    found = personalize(run, Path("west.csv"), Path("west.safetensors"))
    assert (found.lr, found.steps) == (0.07, 1)


def test_bad_values_leave_nothing(here: Path) -> None:
    _, run = trained()
    pd.read_csv("west.csv").head(1).to_csv("one.csv", index=False)
    for arguments, said in (
        ({"lr": 0.0}, "lr is 0.0"),
        ({"steps": 0}, "steps is 0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"data": Path("one.csv")}, "too few to hold some out"),
    ):
        with pytest.raises(cf.ComfedlError, match=said):
            personalize(run, **{"data": Path("west.csv"), "out": Path("x.safetensors"), **arguments})
    _, run = trained(
        "mse", "numbers", data={**TABLE, "target": "days", "drop": ["outcome"]}, algorithm={"name": "fedavg"}
    )
    with pytest.raises(cf.DataError, match="diverged"):
        personalize(run, Path("west.csv"), Path("x.safetensors"), steps=30, lr=1e20)
    assert not Path("x.safetensors").exists()


def test_arrays_and_images_of_a_new_client(here: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for site, shade in (("a", 60), ("b", 90), ("new", 200)):
        for place, label in enumerate(("cat", "dog")):
            folder = here / ("sites" if site != "new" else "") / site / label
            folder.mkdir(parents=True)
            for i in range(12):
                pixels = rng.integers(0, shade, (4, 4, 3)) + place * 50
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    _, run = trained(data={"name": "folder", "path": "sites"})
    found = personalize(run, Path("new"), Path("new.safetensors"), steps=30, lr=0.5)
    assert found.adapted_on + found.held_out == 24 and found.after["loss"] < found.before["loss"]
    (row,) = evaluate(run, data=Path("new")).rows
    rows = rows_of(predict(run, Path("new/dog")))
    assert [row["row"] for row in rows][:2] == ["0.png", "1.png"]
    cats = rows_of(predict(run, Path("new/cat")))
    hits = [each["prediction"] == "dog" for each in rows] + [each["prediction"] == "cat" for each in cats]
    assert row["accuracy"] == pytest.approx(np.mean(hits))
    result = run_config(
        parse_config({"rounds": 2, "data": {"name": "digits"}, "algorithm": METHOD}), out=Path("digits")
    )
    x, y = rng.random((20, 1, 8, 8)), np.arange(20) % 10
    np.savez("new.npz", x=x, y=y)
    digits = cf.load_run("digits")
    (row,) = evaluate(digits, data=Path("new.npz")).rows
    expected = nn.functional.cross_entropy(result.to_module()(torch.from_numpy(x).float()), torch.from_numpy(y))
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert personalize(digits, Path("new.npz"), Path("d.safetensors"), steps=2).held_out == 10


# From the command line.


@pytest.fixture
def comfedl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process; gives its exit code and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["comfedl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return run


def test_the_commands(here: Path, comfedl: Callable[..., tuple[int, str]]) -> None:
    _, run = trained()
    code, said = comfedl("predict", "run", "west.csv", "--client", "north", "--out", "p.csv")
    assert code == 0 and "40 predictions" in said
    assert Path("p.csv").read_text() == predict(run, Path("west.csv"), client="north")
    code, said = comfedl("predict", "run", "west.csv", "--out", "p.csv")
    assert code == 2 and "p.csv exists" in said
    code, said = comfedl("evaluate", "run", "--out", "scores.csv")
    assert code == 0 and "worst client" in said and "north" in said
    assert {row["client"] for row in rows_of(Path("scores.csv").read_text())} == {"north", "south", "east"}
    code, said = comfedl("personalise", "run", "--data", "west.csv", "--steps", "20")
    assert code == 0 and "held-out" in said and Path("west.safetensors").exists()
    code, said = comfedl("predict", "run", "nowhere.csv")
    assert code == 2 and said == "error: There is no file nowhere.csv; check the name.\n"


def test_how_rows_became_numbers_is_kept(here: Path) -> None:
    trained()
    kept = json.loads(Path("run/data.json").read_text())
    assert kept["classes"] == ["ill", "well"] and [column["name"] for column in kept["columns"]] == ["age", "ward"]
    Path("patients.csv").unlink()  # predictions need neither the data nor their split
    assert len(rows_of(predict(cf.load_run("run"), Path("west.csv")))) == 40
