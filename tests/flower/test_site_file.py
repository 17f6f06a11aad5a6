"""A site's data are read once, and again when the files change."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch

import comfedl as cf
from comfedl.flower import keep_data
from comfedl.utils.errors import ConfigError


class Counted:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, node: Mapping[str, Any]) -> cf.FederatedData:
        self.times += 1
        rows = torch.tensor(
            [[float(word) for word in line.split()] for line in Path(node["file"]).read_text().split("\n")]
        )
        x, y = {"a": rows[:, :2], "b": rows[:, 2:]}, rows[:, 0].long()
        return cf.FederatedData({node["site"]: (x, y)}, {node["site"]: (x, y)})


def same(one: cf.FederatedData, other: cf.FederatedData) -> bool:
    parts = [fed.validation["north"] for fed in (one, other) if fed.validation is not None]
    (x, y), (x2, y2) = parts
    return all(torch.equal(x[key], x2[key]) for key in ("a", "b")) and torch.equal(y, y2) and one.names == other.names


def test_data_are_read_again_only_when_something_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("1 2 3\n4 5 6")
    node = {"site": "north", "file": str(file), "state": str(tmp_path / "state")}
    load = Counted()
    first = keep_data(load, "file")(node)
    again = keep_data(load, "file")(node)
    assert load.times == 1 and same(first, again)
    file.write_text("1 2 3\n4 5 7")  # of the same length
    os.utime(file, ns=(1, 1))
    assert not same(keep_data(load, "file")(node), first) and load.times == 2
    keep_data(load, "file")({**node, "scale": 2})  # another setting, another file
    assert load.times == 3
    keep_data(load, "file")(node)
    assert load.times == 3
    for kept in (tmp_path / "state").glob("data-*"):
        kept.write_bytes(kept.read_bytes()[:50])
    keep_data(load, "file")(node)
    assert load.times == 4 and "the data are read anew" in caplog.text
    keep_data(load, "file")(node)
    assert load.times == 4


def test_a_folder_is_watched_with_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "rows.txt").write_text("1 2 3")
    node = {"site": "n", "file": str(folder / "deep" / "rows.txt"), "folder": str(folder), "state": str(tmp_path / "s")}
    load = Counted()
    for _ in range(2):
        keep_data(load, "folder")(node)
    assert load.times == 1
    (folder / "new.txt").write_text("")
    keep_data(load, "folder")(node)
    assert load.times == 2


def test_data_are_read_again_when_the_code_has_changed(tmp_path: Path) -> None:
    code = """
import torch, comfedl as cf

def load(node):
    return cf.FederatedData({"north": (torch.full((3, 2), VALUE), torch.zeros(3))})
"""
    (tmp_path / "rows.txt").write_text("1")
    node = {"file": str(tmp_path / "rows.txt"), "state": str(tmp_path / "state")}
    found = []
    for value in ("1.0", "1.0", "2.0"):
        (tmp_path / "own_reader.py").write_text(code.replace("VALUE", value))
        module = types.ModuleType("own_reader")
        text = compile((tmp_path / "own_reader.py").read_text(), str(tmp_path / "own_reader.py"), "exec")
        exec(text, module.__dict__)
        found.append(float(keep_data(module.load, "file")(node).train["north"][0].sum()))
        assert len(list((tmp_path / "state").iterdir())) == 1
    assert found == [6, 6, 12]


def test_what_names_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="needs the keys of the node config"):
        keep_data(Counted())
    with pytest.raises(ConfigError, match="has no 'folder', which keep_data was told"):
        keep_data(Counted(), "folder")({"site": "north"})
    with pytest.raises(ConfigError, match="does not exist; correct it"):
        keep_data(Counted(), "folder")({"folder": str(tmp_path / "x")})
    with pytest.raises(ConfigError, match="has no files"):
        keep_data(Counted(), "folder")({"folder": str(tmp_path / "empty")})
