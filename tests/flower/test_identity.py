"""A site's name is bound to its key: who claims another's name, or speaks in its place, is refused and named."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from typer.testing import CliRunner

import comfedl as cf
from comfedl.cli.main import app as command_line
from comfedl.flower import serialization
from comfedl.flower.certs import add_sites, make_certs, revoke, rotate
from comfedl.flower.server import serve
from comfedl.flower.site_keys import SIGNATURE, read_private, read_site_keys, sign
from flower.test_flower import altered, assert_same, config, in_round, only, rows
from helpers.in_process import InProcess, grid_of


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_certs(tmp_path / "keys", ["a", "b", "c"])
    return tmp_path / "keys"


def settings(keys: Path, **more: Any) -> Any:
    return config(rounds=4, flower={"deadline": 0.5, "patience": 1.0, "keys": str(keys / "sites.json"), **more})


def signing(fed: cf.FederatedData, folder: Path, keys: Path, **others: str | None) -> InProcess:
    """Sites that sign with their own keys, except for ``others``: with another one's, or with none."""
    grid = grid_of(fed, folder / "sites")
    for node, (app, node_config) in grid.sites.items():
        name = others.get(node_config["site"], node_config["site"])
        grid.sites[node] = app, {**node_config, **({} if name is None else {"key": str(keys / f"{name}.key")})}
    return grid


def refusals(folder: Path) -> dict[str, str]:
    return {name: why for row in rows(folder) if row["step"] == "who" for name, why in row["absent"].items()}


def test_sites_that_sign_train_as_before(three_clients: cf.FederatedData, tmp_path: Path, keys: Path) -> None:
    grid = signing(three_clients, tmp_path, keys)
    result = serve(grid, settings(keys), tmp_path / "run")
    assert_same(result, serve(grid_of(three_clients, tmp_path / "other"), config(rounds=4)), 1e-12)
    assert refusals(tmp_path / "run") == {}
    for name in "abc":  # no private key travels
        assert (keys / f"{name}.key").read_bytes().split(b"\n")[2] not in b"".join(grid.bytes)


@pytest.mark.parametrize(
    ("key", "why"),
    [("c", "its signature is not by the key of 'b'"), (None, "it has no signature; name the site's private key")],
)
def test_a_node_that_claims_another_s_name_is_refused_and_named(
    key: str | None,
    why: str,
    three_clients: cf.FederatedData,
    tmp_path: Path,
    keys: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = signing(three_clients, tmp_path, keys, b=key)
    result = serve(grid, settings(keys), tmp_path / "run")
    node = only(grid, "b")
    assert list(result.names) == ["a", "c"]
    assert f"Node {node} claims to be site 'b' and is refused: {why}" in caplog.text
    found = refusals(tmp_path / "run")
    assert found.keys() == {f"node {node}"} and found[f"node {node}"].startswith(
        f"refused: it claims to be 'b', but {why}"
    )
    assert [group for number, group in grid.seen if number == node] == ["who"]  # it gets no model, and is asked once


def test_the_real_site_takes_part_beside_an_impostor(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path
) -> None:
    """Two nodes with one name end a run without keys; with keys the one that can sign is the site."""
    grid = signing(three_clients, tmp_path, keys)
    app, node_config = grid.sites[only(grid, "b")]
    for number in (1, 5000):  # registered before and after it
        grid.sites[number] = app, {**node_config, "key": str(keys / "c.key")}
    result = serve(grid, settings(keys), tmp_path / "run")
    assert list(result.names) == ["a", "b", "c"] and refusals(tmp_path / "run").keys() == {"node 1", "node 5000"}
    with pytest.raises(cf.ConfigError, match="Two sites are named 'b'"):
        serve(grid, config())


def test_a_site_that_is_unknown_is_refused(three_clients: cf.FederatedData, tmp_path: Path, keys: Path) -> None:
    revoke(keys, "b")
    grid = signing(three_clients, tmp_path, keys, b="c")
    assert list(serve(grid, settings(keys), tmp_path / "run").names) == ["a", "c"]
    assert "there is no key for 'b' in sites.json" in refusals(tmp_path / "run")[f"node {only(grid, 'b')}"]


Tamper = Callable[[Message, Message], Message]


def replayed() -> Tamper:
    """Answer with the first round's reply, signature and all, to every later question."""
    kept: list[Any] = []

    def tamper(message: Message, reply: Message) -> Message:
        kept.append(reply.content)
        return Message(kept[0], reply_to=message)

    return tamper


def resigned(key: Path) -> Tamper:
    """A reply by somebody else, with a signature by somebody else's key."""

    def tamper(message: Message, reply: Message) -> Message:
        sign(key, message.metadata.dst_node_id, message.content, reply.content)
        return reply

    return tamper


@pytest.mark.parametrize("attack", ["altered", "garbled", "replayed", "resigned", "unsigned"])
def test_every_reply_is_signed(
    attack: str, three_clients: cf.FederatedData, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can push replies in another node's name still cannot sign them; the site is absent, not at fault."""

    def unsigned(message: Message, reply: Message) -> Message:
        del reply.content[SIGNATURE]
        return reply

    def changed(message: Message, reply: Message) -> Message:
        signature = reply.content[SIGNATURE]
        forged = altered(lambda leaf: leaf + 1)(message, reply)
        forged.content[SIGNATURE] = signature
        return forged

    def garbled(message: Message, reply: Message) -> Message:
        reply.content[serialization.TEXT] = ConfigRecord({"json": '{"answers": '})
        return reply

    tampers = {
        "altered": changed,
        "garbled": garbled,
        "replayed": replayed(),
        "resigned": resigned(keys / "c.key"),
        "unsigned": unsigned,
    }
    grid = signing(three_clients, tmp_path, keys)
    if attack == "replayed":
        tamper = tampers["replayed"]
        grid.tamper[only(grid, "b")] = lambda message, reply: (
            reply if message.metadata.group_id == "who" else tamper(message, reply)
        )
    else:
        grid.tamper[only(grid, "b")] = in_round(2, tampers[attack])
    result = serve(grid, settings(keys), tmp_path / "run")
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    comes_back = ["a", "c"] if attack == "replayed" else ["a", "b", "c"]  # its own replies count
    assert took_part == {1: ["a", "b", "c"], 2: ["a", "c"], 3: comes_back, 4: comes_back}
    reasons = [row["absent"]["b"] for row in rows(tmp_path / "run") if "b" in row["absent"]]
    expected = "it has no signature" if attack == "unsigned" else "its signature is not by the key of 'b'"
    assert reasons and all(expected in reason and "refused" not in reason for reason in reasons)
    assert all(bool(part.isfinite().all()) for part in result.params.values())


def test_a_question_cannot_be_handed_on_to_the_site(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path
) -> None:
    """An impostor that has the real site answer its question gets a signature for another node."""
    grid = signing(three_clients, tmp_path, keys)
    real, node_config = grid.sites[only(grid, "b")]

    def relay(message: Message, context: Context) -> Message:
        return real(message, Context(1, only(grid, "b"), dict(node_config), RecordDict(), {}))

    grid.sites[5000] = relay, {"site": "impostor"}  # type: ignore[assignment]
    result = serve(grid, settings(keys), tmp_path / "run")
    assert list(result.names) == ["a", "b", "c"]
    assert refusals(tmp_path / "run").keys() == {"node 5000"}


class At(cf.Callback):
    """Does something after a round, which is while the next one has been trained."""

    def __init__(self, round: int, does: Callable[[], Any]) -> None:
        self._round, self._does = round, does

    def round_done(self, number: int) -> None:
        if number == self._round:
            self._does()


def test_a_revoked_site_leaves_a_run_that_is_going_on(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = signing(three_clients, tmp_path, keys)
    held = (keys / "b.key").read_bytes()

    def take_away() -> None:
        revoke(keys, "b")
        (keys / "b.key").write_bytes(held)  # the site still has it

    serve(grid, settings(keys), tmp_path / "run", callbacks=[At(1, take_away)])
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    assert took_part == {1: ["a", "b", "c"], 2: ["a", "b", "c"], 3: ["a", "c"], 4: ["a", "c"]}
    assert "there is no key for 'b' in sites.json" in refusals(tmp_path / "run")[f"node {only(grid, 'b')}"]


def test_a_rotated_site_comes_back_with_its_new_key(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = signing(three_clients, tmp_path, keys)
    old = only(grid, "b")
    app, node_config = grid.sites[old]

    def change() -> None:
        rotate(keys, "b")
        grid.sites[old] = app, {**node_config, "key": str(keys / "b.key.old-1")}  # the old SuperNode goes on
        grid.sites[5000] = app, node_config  # another key is another node for Flower

    result = serve(grid, settings(keys), tmp_path / "run", callbacks=[At(1, change)])
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    assert took_part == {number: ["a", "b", "c"] for number in range(1, 5)}
    assert {number for number, group in grid.seen if group == "round 4" and number in (old, 5000)} == {5000}
    assert refusals(tmp_path / "run").keys() == {f"node {old}"}
    assert_same(result, serve(grid_of(three_clients, tmp_path / "other"), config(rounds=4)), 1e-12)


def test_a_site_whose_key_was_registered_late_gets_in(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path
) -> None:
    """It was refused before; a change of sites.json is a reason to ask again."""
    text, held = (keys / "sites.json").read_text(), (keys / "b.key").read_bytes()
    grid = signing(three_clients, tmp_path, keys)
    serve(grid, settings(keys), tmp_path / "run")
    revoke(keys, "b")
    (keys / "b.key").write_bytes(held)
    longer = config(rounds=10, flower=settings(keys).flower.model_dump())
    enters = At(6, lambda: (keys / "sites.json").write_text(text))
    serve(grid, longer, tmp_path / "run", resume=True, callbacks=[enters])
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    assert took_part[5] == took_part[6] == ["a", "c"] and took_part[10] == ["a", "b", "c"]


def test_a_site_that_is_started_again_with_its_key_gets_in(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path
) -> None:
    """A SuperNode keeps its number when it is started again, so its refusal must not be for ever."""
    grid = signing(three_clients, tmp_path, keys)
    serve(grid, settings(keys), tmp_path / "run")
    node = only(grid, "b")
    app, node_config = grid.sites[node]
    grid.sites[node] = app, {name: value for name, value in node_config.items() if name != "key"}
    stops, starts = At(5, lambda: grid.sites.pop(node)), At(6, lambda: grid.sites.update({node: (app, node_config)}))
    longer = config(rounds=10, flower=settings(keys).flower.model_dump())
    serve(grid, longer, tmp_path / "run", resume=True, callbacks=[stops, starts])
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    assert took_part[5] == took_part[6] == ["a", "c"] and took_part[10] == ["a", "b", "c"]


def test_a_damaged_file_of_keys_changes_nothing_in_a_run(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = signing(three_clients, tmp_path, keys)
    damage = At(1, lambda: (keys / "sites.json").write_text('{"a": '))
    result = serve(grid, settings(keys), tmp_path / "run", callbacks=[damage])
    assert {row["client"] for row in result.clients if row["round"] == 4} == {"a", "b", "c"}
    assert "The keys of the sites stay as they were" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such file"),
        ("[]", "it holds no JSON object"),
        ('{"a": "ssh-rsa AAAA"}', "no usable key for 'a'"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(
    text: str | None, words: str, three_clients: cf.FederatedData, tmp_path: Path, keys: Path
) -> None:
    (keys / "sites.json").unlink() if text is None else (keys / "sites.json").write_text(text)
    with pytest.raises(cf.ConfigError, match=rf"flower\.keys: .*{words}"):
        serve(signing(three_clients, tmp_path, keys), settings(keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_site_without_its_key_file_says_so(
    three_clients: cf.FederatedData, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = signing(three_clients, tmp_path, keys)
    (keys / "b.key").unlink()
    assert list(serve(grid, settings(keys), tmp_path / "run").names) == ["a", "c"]
    assert "The site's key cannot be read (No such file or directory); correct key in the node config" in caplog.text
    assert str(keys) not in b"".join(grid.bytes).decode("utf-8", "replace")


def test_without_keys_the_log_says_that_names_are_believed(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "comfedl"):
        serve(grid_of(three_clients, tmp_path), config(rounds=1))
    assert "The names of sites are not verified: bind them to keys with flower.keys" in caplog.text


# The keys themselves.


def test_rotation_keeps_the_rest_and_overwrites_nothing(keys: Path) -> None:
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    rotate(keys, "b")
    rotate(keys, "b")
    after = {path.name: path.read_bytes() for path in keys.iterdir()}
    assert after["b.key.old-1"] == before["b.key"] and after["b.pub.old-1"] == before["b.pub"]
    assert len({after["b.key"], after["b.key.old-1"], after["b.key.old-2"]}) == 3
    assert {name: after[name] for name in before if name[0] != "b" and name != "sites.json"} == {
        name: text for name, text in before.items() if name[0] != "b" and name != "sites.json"
    }
    entries = {name: json.loads(text["sites.json"]) for name, text in (("before", before), ("after", after))}
    assert entries["before"].keys() == entries["after"].keys() == {"a", "b", "c"}
    assert [name for name in "abc" if entries["before"][name] != entries["after"][name]] == ["b"]
    assert after["b.pub"].decode().startswith(entries["after"]["b"])
    public = read_site_keys(keys / "sites.json")["b"].public_numbers()
    assert read_private(keys / "b.key").public_key().public_numbers() == public
    private = [path for path in keys.iterdir() if ".key" in path.name]
    assert len(private) == 7 and all(path.stat().st_mode & 0o777 == 0o600 for path in private)


def test_revoked_sites_can_be_added_again_with_a_new_key(keys: Path) -> None:
    revoke(keys, "b")
    assert json.loads((keys / "sites.json").read_text()).keys() == {"a", "c"}
    assert not (keys / "b.key").exists() and (keys / "b.key.old-1").exists()
    add_sites(keys, ["b", "d"])
    assert json.loads((keys / "sites.json").read_text()).keys() == {"a", "b", "c", "d"}
    assert (keys / "b.key").read_bytes() != (keys / "b.key.old-1").read_bytes()
    with pytest.raises(cf.ConfigError, match=r"'d' is already in .*sites\.json; give it a new key with --rotate d"):
        add_sites(keys, ["d"])
    for change in (rotate, revoke):
        with pytest.raises(cf.ConfigError, match=r"'e' is not in .*sites\.json"):
            change(keys, "e")
        with pytest.raises(cf.RunFolderError, match=r"has no sites\.json; make keys first"):
            change(keys / "nowhere", "a")


def test_keys_of_an_earlier_version_are_taken_over(keys: Path) -> None:
    before = json.loads((keys / "sites.json").read_text())
    (keys / "sites.json").unlink()
    rotate(keys, "a")
    after = json.loads((keys / "sites.json").read_text())
    assert {name: after[name] for name in "bc"} == {name: before[name] for name in "bc"} and after["a"] != before["a"]


def test_a_rotation_that_fails_leaves_the_old_key(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in keys.iterdir()}

    def fails(*arguments: Any) -> None:
        raise cf.RunFolderError("the disk is full")

    monkeypatch.setattr("comfedl.flower.certs.write_site_keys", fails)
    for change in (rotate, revoke):
        with pytest.raises(cf.RunFolderError, match="the disk is full"):
            change(keys, "b")
        assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


def test_the_command_says_what_to_tell_flower(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")

    def certs(*words: str) -> str:
        return CliRunner().invoke(command_line, ["flower", "certs", folder, *words]).output

    assert "sites.json" in certs("--sites", "north,south")
    rotated = certs("--rotate", "north")
    assert "flwr supernode unregister NODE-ID LINK" in rotated and f"register {folder}/north.pub LINK" in rotated
    revoked = certs("--revoke", "south")
    assert "flwr supernode unregister NODE-ID LINK" in revoked and "register " not in revoked.replace("unregister", "")
    assert f"register {folder}/east.pub LINK" in certs("--add", "east")
    assert json.loads((tmp_path / "keys" / "sites.json").read_text()).keys() == {"north", "east"}
    for words in ((), ("--sites", "a", "--rotate", "b"), ("--rotate", "north", "--hosts", "x")):
        assert CliRunner().invoke(command_line, ["flower", "certs", folder, *words]).exit_code != 0


def test_a_key_made_by_ssh_keygen_will_do(tmp_path: Path, three_clients: cf.FederatedData) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    for name in "abc":
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-f", str(tmp_path / f"{name}.key"), "-N", ""]
        subprocess.run(command, check=True)
    lines = {name: (tmp_path / f"{name}.key.pub").read_text() for name in "abc"}
    (tmp_path / "sites.json").write_text(json.dumps(lines))
    grid = signing(three_clients, tmp_path, tmp_path)
    assert list(serve(grid, settings(tmp_path), tmp_path / "run").names) == ["a", "b", "c"]
