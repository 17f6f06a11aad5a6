"""Run folders from somebody else, or damaged: nothing in them is executed, and each fault is one sentence.

The rows are those of the attacks found by hand.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import comfedl as cf
from comfedl.analysis.compare import rows_to_csv
from comfedl.analysis.evaluate import evaluate
from comfedl.analysis.read_runs import last_rows, read_run
from comfedl.analysis.web_server import MAX_CONNECTIONS, make_server
from comfedl.cli import main
from comfedl.config.build import without_imports
from comfedl.config.schema import parse_config, run_config
from comfedl.data.tabular import Encoding
from comfedl.training.personal_models import file_name, file_names
from comfedl.utils.csv_cells import without_formulas
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.read_back import parse_json, read_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is run from the root and is not installed

from benchmarks import mutations

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run of a table, in the working folder, with the table beside it."""
    monkeypatch.chdir(tmp_path)
    mutations.make_run(tmp_path)
    return Path("whole")


@pytest.fixture
def comfedl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["comfedl", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main.main()
        return int(end.value.code or 0), "".join(capsys.readouterr())

    return call


def edited(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


# Row 5: code that a folder names.

PLACES: dict[str, tuple[str, str]] = {
    "model": ('[model]\nname = "mlp"\nhidden = [4]', '[model]\nname = "spy:run"'),
    "data": ('name = "csv"', 'name = "spy:run"'),
    "loss": ("rounds = 4", 'rounds = 4\nloss = "spy:run"'),
    "loss table": ("rounds = 4", 'rounds = 4\nloss = { name = "spy:run" }'),
    "metrics": ("rounds = 4", 'rounds = 4\nmetrics = ["spy:run"]'),
    "algorithm": ('name = "ditto"', 'name = "spy:run"'),
    "schedule": ('name = "ditto"', 'name = "ditto"\nlr_schedule = "spy:run"'),
    "problem": ("[algorithm]", '[algorithm]\nname = "comfedl"\nproblem = "spy:run"\n[tune]'),
}
COMMANDS = {
    "predict": ("predict", "whole", "rows.csv"),
    "evaluate": ("evaluate", "whole"),
    "personalise": ("personalise", "whole", "--data", "rows.csv"),
    "report": ("report", "whole"),
    "resume": ("run", "run.toml", "--out", "whole", "--resume"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_row_5_code_that_a_folder_names_is_not_imported(place: str, command: str, run: Path, comfedl: Command) -> None:
    """A copy of a run could execute any command: model name "subprocess:run", and a shape as its arguments."""
    Path("spy.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\ndef run(*a, **k): raise SystemExit\n"
    )
    edited(run / "config.toml", *PLACES[place])
    code, said = comfedl(*COMMANDS[command])
    assert not Path("imported").exists()
    if command in ("predict", "evaluate", "personalise"):
        assert code == 2 and len(said.strip().splitlines()) == 1
        assert "'spy:run', code that would be imported and run" in said and "--trust" in said
        with pytest.raises(cf.ConfigError, match="trust=True"):
            cf.load_run(run)


def test_row_5_with_trust_it_is(run: Path, comfedl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a user writes and runs is theirs."""
    Path("mine.py").write_text(
        "from comfedl.models.zoo import mlp\ndef net(shape, classes): return mlp(shape, classes)"
    )
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    edited(Path("run.toml"), 'name = "mlp"\nhidden = [4]', 'name = "mine:net"')
    assert comfedl("run", "run.toml", "--out", "own")[0] == 0
    assert comfedl("run", "run.toml", "--out", "own", "--resume", "--set", "rounds=5")[0] == 0
    assert comfedl("evaluate", "own")[0] == 2
    for command in (("evaluate", "own"), ("predict", "own", "rows.csv"), ("personalise", "own", "--data", "rows.csv")):
        assert comfedl(*command, "--trust") == (0, comfedl(*command, "--trust", "--force")[1])
        for file in ("predictions.csv", "rows.safetensors"):
            Path(file).unlink(missing_ok=True)
    assert cf.load_run("own", trust=True).to_module()


def test_row_5_the_refusal_ends_with_the_reading(tmp_path: Path) -> None:
    with without_imports(tmp_path), pytest.raises(ConfigError, match="--trust"):
        parse_config({"data": {"name": "os:getcwd"}, "algorithm": {"name": "fedavg"}})
    with pytest.raises(ConfigError, match="cannot be imported"):
        parse_config({"data": {"name": "no_such_module:run"}, "algorithm": {"name": "fedavg"}})


ENCODING = {
    "version": 1,
    "columns": [{"name": "age", "kind": "number", "mean": 60.0, "scale": 10.0, "categories": []}],
    "target": "outcome",
    "client": "site",
    "classes": ["ill", "well"],
    "mean": 0.0,
    "scale": 1.0,
    "shape": [1],
    "image": None,
}


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"shape": shape, "columns": []}
            for shape in (["touch", "x"], [-1], [1.5], [True], [2**40], "x", None, [[1]])
        ),
        {"shape": [2]},
        {"columns": 3},
        {"columns": [3]},
        {"columns": [{"name": "age", "kind": "number", "mean": "x", "scale": 1.0, "categories": []}]},
        {"columns": [{"name": "age", "kind": "number", "mean": 0.0, "scale": 0.0, "categories": []}]},
        {"columns": [{"name": "age", "kind": "odd", "mean": 0.0, "scale": 1.0, "categories": []}]},
        {"columns": [{"name": "age", "kind": "text", "mean": 0.0, "scale": 1.0, "categories": [1]}]},
        {"classes": ["ill", "ill"]},
        {"image": ["L", 10**9, 10**9]},
        {"image": ["P", 8, 8]},
        {"scale": float("nan")},
        {"target": 3},
        {"version": 2},
    ],
)
def test_row_5_sizes_and_columns_are_checked(change: Mapping[str, Any], run: Path) -> None:
    assert Encoding.from_dict(ENCODING).shape == (1,)
    with pytest.raises(ValueError):
        Encoding.from_dict({**ENCODING, **change})
    (run / "data.json").write_text(json.dumps({**ENCODING, **change}))
    with pytest.raises(RunFolderError, match=r"data\.json cannot be read"):
        cf.load_run(run)


def test_row_5_a_model_of_another_size_is_refused_before_it_takes_memory(run: Path) -> None:
    edited(run / "config.toml", "hidden = [4]", "hidden = [2000000, 2000000]")
    with pytest.raises(RunFolderError, match="do not fit the model"):
        cf.load_run(run).to_module()


# Rows 10 and 12: names of clients.


def test_row_10_names_that_differ_in_case_have_files_of_their_own(tmp_path: Path) -> None:
    """On a file system that ignores case, one personal model stood for three clients."""
    names = ["WARD", "Ward", "north", "ward"]
    found = file_names(names)
    assert len({name.casefold() for name in found}) == len(names)
    assert found[2] == "north" == file_name("north")
    x = {name: (torch.randn(6, 4), torch.tensor([0, 1] * 3)) for name in names}
    model = torch.nn.Linear(4, 2)
    result = cf.fit(model, cf.FederatedData(x), cf.Ditto(lam=0.1), rounds=2, out=tmp_path / "run")
    saved = cf.load_run(tmp_path / "run", model)
    for name in names:
        assert torch.equal(saved.personal(name)["weight"], result.personal(name)["weight"])
    with pytest.raises(ConfigError, match="'North' is not a client"):
        saved.personal("North")


def test_row_12_a_client_may_be_called_models(tmp_path: Path) -> None:
    """Its file was taken for the one with all clients' models, and evaluate failed for all."""
    settings = {
        "rounds": 2,
        "data": {"name": "csv", "path": str(tmp_path / "rows.csv"), "client": "site", "target": "y"},
        "algorithm": {"name": "ditto"},
    }
    rows = [f"{site},{k % 7},{k % 2}" for k in range(40) for site in ("clients", "models", "z")]
    (tmp_path / "rows.csv").write_text("\n".join(["site,a,y", *rows]) + "\n")
    result = run_config(parse_config(settings), out=tmp_path / "run")
    saved = cf.load_run(tmp_path / "run")
    assert [row["client"] for row in evaluate(saved).rows] == ["clients", "models", "z"]
    assert torch.equal(saved.personal("models")["1.weight"], result.personal("models")["1.weight"])


# Row 15: damage.


def test_row_15_damaged_folders_end_in_one_sentence() -> None:
    """Some forty places gave a raw traceback; the whole number is run with python -m benchmarks.mutations."""
    assert list(mutations.failures(60)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", r"clients\.jsonl, line 2, cannot be read"),
        ("[1]", "line 2, .*it is no object of numbers"),
        ('{"round": 1}', "line 2, .*it has no client"),
        ('{"client": "a"}', "line 2, .*it has no round"),
        ('{"round": 1, "client": 3}', "line 2, .*its 'client' is not a number|line 2, .*no client"),
        ('{"round": 1, "client": "a", "train.loss": "x"}', "line 2, .*'train.loss' is not a number"),
        ('{"round": 1, "client": "a", "train.loss": [[]]}', "line 2, .*'train.loss' is not a number"),
        ('{"round": 1%s, "client": "a"}' % ("0" * 5000), "line 2, .*too large"),
        ("[" * 100_000, "line 2, .*nested too deep"),
        ("\udcff", "line 2, .*decode"),
    ],
)
def test_row_15_a_bad_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "clients.jsonl"
    path.write_bytes(b'{"round": 1, "client": "a"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(RunFolderError, match=words):
        list(read_rows(path))
    with pytest.raises(RunFolderError, match=r"clients\.jsonl"):
        last_rows(path)


def test_row_15_sizes_and_nesting_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfedl.utils.read_back.MAX_LINE", 100)
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "x": ' + " " * 200 + "1}\n")
    with pytest.raises(RunFolderError, match=r"line 1, has more than 100 bytes"):
        list(read_rows(tmp_path / "rounds.jsonl"))
    for text, words in (("[" * 100 + "]" * 100, "nested"), ("[" * 10**6, "nested"), ("1" * 30, "too large")):
        with pytest.raises(ValueError, match=words):
            parse_json(text)
    if hasattr(os, "mkfifo"):
        (tmp_path / "run").mkdir()
        os.mkfifo(tmp_path / "run" / "config.toml")
        with pytest.raises(RunFolderError, match="it is not a file"):  # and nobody waits for it
            read_run(tmp_path / "run")


def test_row_15_an_unexpected_error_is_one_sentence(
    run: Path, comfedl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort: the details are in a file that the sentence names."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("nobody\nforesaw this")

    monkeypatch.setattr("comfedl.analysis.predict.predict", fail)
    monkeypatch.delenv(main.DEBUG, raising=False)
    code, said = comfedl("predict", "whole", "rows.csv")
    assert code == 1 and len(said.strip().splitlines()) == 1
    assert said.startswith("error: an unexpected error (ZeroDivisionError: nobody foresaw this); the details are in ")
    file = Path(said.partition(" are in ")[2].partition(", and ")[0])
    assert "Traceback" in file.read_text() and "nobody" in file.read_text()
    file.unlink()
    monkeypatch.setenv(main.DEBUG, "1")
    monkeypatch.setattr(sys, "argv", ["comfedl", "predict", "whole", "rows.csv"])
    with pytest.raises(ZeroDivisionError):
        main.main()


# Row 16.


def test_row_16_a_model_of_nan_predicts_nothing(run: Path, comfedl: Command) -> None:
    """It predicted the first class for all and exited with 0."""
    tensors = load_file(run / "model.safetensors")
    save_file({name: part * torch.nan for name, part in tensors.items()}, run / "model.safetensors")
    for command in ("predict", "evaluate", "personalise"):
        code, said = comfedl(*COMMANDS[command])
        assert code == 2 and "The model has NaN or infinity in" in said


def test_row_16_an_output_that_is_not_finite_is_named(run: Path, comfedl: Command) -> None:
    shutil.copy("rows.csv", "new.csv")
    edited(Path("new.csv"), "\na,", "\na,1e300,x,ill\na,")
    code, said = comfedl("predict", "whole", "new.csv")
    assert code == 2 and "The model's output for '1' of new.csv is NaN or infinite" in said


def test_row_16_texts_in_csv_are_no_formulas() -> None:
    row = ["=1+1", "+x", "-x", "@x", "\tx", "-3", -3, "plain", "a=b"]
    assert without_formulas(row) == ["'=1+1", "'+x", "'-x", "'@x", "'\tx", "-3", -3, "plain", "a=b"]
    text = rows_to_csv([{"client": "=HYPERLINK(1)", "loss": -0.5}, {"client": "b", "=m": 1.0}])
    assert list(csv.reader(io.StringIO(text))) == [
        ["client", "loss", "'=m"],
        ["'=HYPERLINK(1)", "-0.5", ""],
        ["b", "", "1.0"],
    ]


def test_row_16_metric_names_are_escaped_where_plotly_would_read_html() -> None:
    """A metric called <a href=...> became a live link in the title of an axis."""
    script = resources.files("comfedl.analysis").joinpath("page.js").read_text("utf-8")
    titles = re.findall(r"title: \{ text: (`[^`]*`)", script)
    assert titles
    inserted = [value for title in titles for value in re.findall(r"\$\{(.*?)\}", title)]
    assert inserted and all(value.startswith("escaped(") for value in inserted)


def test_row_16_the_live_server_bounds_its_connections(run: Path) -> None:
    """600 half-open requests took 602 threads and 707 MB."""
    pytest.importorskip("plotly")
    before = threading.active_count()
    with make_server([run], "127.0.0.1", 0) as server:
        address = ("127.0.0.1", int(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        held = [socket.create_connection(address, timeout=10) for _ in range(100)]
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET / HT")
        time.sleep(0.5)
        assert threading.active_count() - before <= MAX_CONNECTIONS + 2
        for connection in held:
            connection.close()
        until = time.monotonic() + 10
        while True:  # and serves again
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/data.json", timeout=10) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
        server.shutdown()
