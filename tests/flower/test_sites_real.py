"""Tables and keys of sites behind a real SuperLink and real SuperNodes, with TLS; each test stops them all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

from comfedl.config.schema import run_config
from comfedl.flower.certs import rotate
from comfedl.flower.local_trial import LocalTrial
from comfedl.flower.site_keys import SITES, write_site_keys
from comfedl.flower.superlink import wait_for
from comfedl.utils.toml import to_toml
from flower.test_flower_real import LONG, assert_model, config, left_over, until
from flower.test_site_tables import joined_config, patients, site_config, tables, write

__all__ = ["tables"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")]


def test_tables_at_sites_train_over_a_real_network(tables: object, tmp_path: Path) -> None:
    """By the command, from a folder with a CSV per site; then its run predicts as any other."""
    (tmp_path / "data").mkdir()
    for path in [*tmp_path.glob("*.csv")]:
        if path.stem != "joined":
            path.rename(tmp_path / "data" / path.name)
    settings = site_config(flower={"deadline": 300.0, "patience": 300.0}).resolved()
    (tmp_path / "c.toml").write_text(to_toml(settings))
    comfedl = [sys.executable, "-m", "comfedl"]
    command = [*comfedl, "flower", "local", "c.toml", "--tables", "data", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    assert_model(tmp_path / "run", run_config(joined_config(tmp_path)))
    assert "The names of sites are not verified" not in (tmp_path / "run" / "flower.log").read_text()
    assert len((tmp_path / "run" / "sites" / "sent.jsonl").read_text().splitlines()) == 3
    write(tmp_path / "new.csv", patients("east", 5))
    done = subprocess.run(
        [*comfedl, "predict", "run", "new.csv"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 6


def node_ids(trial: LocalTrial) -> set[int]:
    """The nodes that are registered."""
    name = "list"
    trial.daemons.log(name).unlink(missing_ok=True)
    trial.run_flwr(name, [["supernode", "list", "trial", "--format", "json"]])
    text = trial.daemons.log(name).read_text()
    listed = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {int(node["node-id"]) for node in listed["nodes"] if node["status"] != "unregistered"}


def test_a_claimed_name_is_refused_and_a_rotated_key_is_another_node(tmp_path: Path) -> None:
    trial = LocalTrial(config(rounds=2), 3, tmp_path, tmp_path / "run")
    daemons, keys = trial.daemons, tmp_path / "keys"
    with daemons:
        trial.start_link()
        before = node_ids(trial)
        for site in trial.sites[:2]:
            trial.start_node(site)
        # The third site's node, with its registered key, says that it is the first site.
        own = trial.node_configs["site-2"]
        trial.node_configs["site-2"] = {**own, "data": trial.node_configs["site-0"]["data"]}
        impostor = trial.start_node("site-2")
        run = trial.submit()

        def said(words: str) -> None:
            log = daemons.log("run")
            wait_for(lambda: words in log.read_text(), LONG, f"the log does not say: {words}", daemons, "superlink")

        first = trial.names[0]
        said(f"claims to be site '{first}' and is refused: its signature is not by the key of '{first}'")

        # Its key is rotated: the old one is unregistered, the new one is another node.
        impostor.terminate()
        impostor.wait(LONG)
        # In a trial sites are called like clients, and their keys are not: so it is rotated in a copy of the folder.
        copy = shutil.copytree(keys, tmp_path / "copy")
        write_site_keys(copy / SITES, {site: (keys / f"{site}.pub").read_text() for site in trial.sites})
        for written in (*rotate(copy, "site-2")[:-1], copy / "site-2.key.old-1"):
            shutil.copy(written, keys / written.name)
        lines = {name: (keys / f"{site}.pub").read_text() for site, name in zip(trial.sites, trial.names, strict=True)}
        write_site_keys(keys / SITES, lines)
        refused = next(line for line in daemons.log("run").read_text().splitlines() if "claims to be site" in line)
        old = int(refused.split("Node ")[1].split(" ")[0])
        assert old in before
        trial.run_flwr("unregister", [["supernode", "unregister", str(old), "trial"]])
        trial.node_configs["site-2"] = own
        stale = trial.start_node("site-2", keys / "site-2.key.old-1")
        assert stale.wait(LONG) != 0  # the SuperLink does not know the old key any more
        trial.run_flwr("register-new", [["supernode", "register", str(keys / "site-2.pub"), "trial"]])
        trial.start_node("site-2")
        until(lambda: run.poll() is not None or (tmp_path / "run" / "summary.json").exists(), "the run does not end")
        trial.wait(run, LONG)
        assert node_ids(trial) & {old} == set()
    rows = [json.loads(line) for line in (tmp_path / "run" / "sites.jsonl").read_text().splitlines()]
    trained = {row["round"]: row["answered"] for row in rows if row["step"] == "train"}
    assert trained == {1: sorted(trial.names), 2: sorted(trial.names)}
    assert next(row for row in rows if row["step"] == "who")["absent"].keys() == {f"node {old}"}
    assert left_over(daemons.tag) == []
