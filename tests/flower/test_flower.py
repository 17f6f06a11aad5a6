"""Sites behind Flower, without a network: the same results as the embedded engine, and handling of failures."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.app import Error, Message
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from torch import nn

import comfedl as cf
from comfedl.config.schema import Config, parse_config, read_config
from comfedl.flower import serialization
from comfedl.flower.apps import client_app
from comfedl.flower.certs import make_certs
from comfedl.flower.local_trial import run_local
from comfedl.flower.scaffold import new_app
from comfedl.flower.server import serve
from comfedl.models.zoo import mlp
from helpers.in_process import InProcess, alone, grid_of


def single(shape: Sequence[int], classes: int) -> nn.Module:
    return mlp(shape, classes, hidden=(6,))


def double(shape: Sequence[int], classes: int) -> nn.Module:
    return single(shape, classes).double()


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "comfedl-kl": {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}},
    "drfa": {"name": "drfa"},
    "damaml": {"name": "comfedl-damaml"},
    "ditto": {"name": "ditto"},
    "delta-fl": {"name": "delta-fl"},
    "scaffold": {"name": "scaffold", "lr_schedule": {"name": "step", "every": 2, "factor": 0.5}},
    "fedprox": {"name": "fedprox", "mu": 0.5},
    "kept adam": {"name": "fedavg", "lr": 0.01, "client_optimizer": {"name": "adam", "keep_state": True}},
    "client momentum": {"name": "fedavg", "client_optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.05}},
    "client adam": {"name": "fedavg", "lr": 0.01, "client_optimizer": {"name": "adam"}},
    "server momentum": {"name": "fedavg", "server_optimizer": {"name": "sgd", "momentum": 0.9}},
    "server adam": {"name": "fedavg", "server_optimizer": {"name": "adam", "lr": 0.05}},
    "weights from data set aside": {"name": "robust", "on": "outer"},
    "excess": {"name": "robust", "on": "outer", "offset": {"name": "excess", "steps": 4}},
    "generalisation": {
        "name": "comfedl",
        "outer": {"name": "kl", "gamma": 0.2, "on": "outer", "offset": {"name": "generalisation", "c": 0.5}},
    },
    "momentum": {
        "name": "comfedl",
        "outer": {"name": "kl", "gamma": 0.2},
        "client_optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        "server_optimizer": {"name": "sgd", "momentum": 0.9},
        "clip_grad_norm": 0.5,
    },
}


def config(method: str = "fedavg", model: str = "double", **more: Any) -> Config:
    settings = {
        "rounds": 4,
        "seed": 3,
        "data": {"name": "sites", "classes": 3},
        "model": {"name": f"{__name__}:{model}"},
        "algorithm": {**METHODS[method], "batch_size": 4, "local_steps": 3},
        "flower": {"deadline": 0.5, "patience": 1.0},
        **more,
    }
    return parse_config(settings)


def embedded(settings: Config, fed: cf.FederatedData) -> cf.Result:
    """The same run with all clients in this process."""
    loop = {"rounds": settings.rounds, "seed": settings.seed, "clients_per_round": settings.clients_per_round}
    more = {name: getattr(settings, name) for name in ("eval_every", "eval_clients", "outer_share")}
    return cf.fit(settings.make_model(fed), fed, settings.make_algorithm(), **loop, **more)


def assert_same(one: cf.Result, other: cf.Result, within: float) -> None:
    for name, part in one.params.items():
        torch.testing.assert_close(part, other.params[name], rtol=0, atol=within)
    assert [row["round"] for row in one.rounds] == [row["round"] for row in other.rounds]
    for ours, theirs in zip([*one.rounds, *one.clients], [*other.rounds, *other.clients], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, str):
                assert value == theirs[name]
            else:
                assert math.isclose(value, theirs[name], rel_tol=10 * within, abs_tol=10 * within), name


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sites.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model", "within"), [("single", 1e-6), ("double", 1e-12)])
def test_same_result_as_the_embedded_engine(
    method: str, model: str, within: float, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    settings = config(method, model)
    grid = grid_of(three_clients, tmp_path)
    assert_same(serve(grid, settings), embedded(settings, three_clients), within)


def test_another_loss(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(20, 4, generator=generator, dtype=torch.float64) for name in "abc"}
    fed = cf.FederatedData({name: (part, part.sum(dim=1)) for name, part in x.items()})
    settings = config("ditto", loss="mse", data={"name": "sites"})
    result = serve(grid_of(fed, tmp_path), settings)
    assert result.module is not None  # as it was at the start
    assert_same(result, cf.fit(result.module, fed, settings.make_algorithm(), rounds=4, seed=3, loss="mse"), 1e-12)
    assert "train.rmse.worst" in result.rounds[-1]
    with pytest.raises(cf.ConfigError, match=r"data\.classes is missing"):
        serve(grid_of(fed, tmp_path), config(data={"name": "sites"}))


def test_partial_participation_and_evaluation(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    settings = config("ditto", rounds=5, clients_per_round=2, eval_every=2, eval_clients=2)
    assert_same(serve(grid_of(three_clients, tmp_path), settings), embedded(settings, three_clients), 1e-12)


def test_sites_with_outer_data_of_their_own(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    assert three_clients.validation is not None
    fed = cf.FederatedData({**three_clients.train}, outer={**three_clients.validation})
    settings = config("excess", clients_per_round=2)
    assert_same(serve(grid_of(fed, tmp_path), settings), embedded(settings, fed), 1e-12)


def test_excess_baselines_of_other_sites(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    offset = {"name": "excess", "baseline": {"a": 0.1, "b": 0.2}}
    settings = config(algorithm={"name": "robust", "offset": offset})
    with pytest.raises(cf.ConfigError, match="The baseline of Excess lacks client 'c'"):
        serve(grid_of(three_clients, tmp_path), settings)


def test_a_site_of_one_sample_cannot_be_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has nothing left to train on, and is refused like a site without samples."""
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    fed = cf.FederatedData({"a": (x, y), "b": (x[:1], y[:1]), "c": (x, y)})
    result = serve(grid_of(fed, tmp_path), config("excess"))
    assert {row["client"] for row in result.clients} == {"a", "c"}
    assert "'b'" in caplog.text and "samples" in caplog.text


def test_a_run_with_data_set_aside_resumes(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    out, grid = tmp_path / "run", grid_of(three_clients, tmp_path / "states")
    settings = config("excess", clients_per_round=2, rounds=6, outer_share=0.3)
    serve(grid, config("excess", clients_per_round=2, rounds=2, outer_share=0.3), out)
    resumed = serve(grid, settings, out, resume=True)
    assert_same(resumed, embedded(settings, three_clients), 1e-12)
    assert "outer_share = 0.3" in (out / "config.toml").read_text()


def test_a_round_takes_one_message_per_site(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path)
    serve(grid, config("comfedl-kl"))
    groups = [group for _, group in grid.seen]
    # The evaluation of the last round has no later training message to share.
    assert {group: groups.count(group) for group in groups} == {
        "who": 3,
        **{f"round {k}": 3 for k in (1, 2, 3)},
        "round 4": 6,
    }


def samples_in(passed: bytes, fed: cf.FederatedData) -> list[tuple[str, int]]:
    """The samples of all clients that these bytes contain, as float32, float64 or text."""
    found = []
    for split in (fed.train, fed.validation):
        assert split is not None
        for name in fed.names:
            for place, row in enumerate(split[name][0]):
                forms = [row.to(dtype).numpy().tobytes() for dtype in (torch.float64, torch.float32)]
                forms += [repr(float(value)).encode() for value in row]
                found += [(name, place)] if any(form in passed for form in forms) else []
    return found


@pytest.mark.parametrize("method", METHODS)
def test_no_sample_is_sent(method: str, three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path)
    result = serve(grid, config(method))
    passed = b"".join(grid.bytes)
    assert samples_in(passed, three_clients) == []
    for name, part in result.params.items():  # the same search finds what is sent: the last evaluation's model
        assert part.numpy().tobytes() in passed, name


@pytest.mark.parametrize("nested", [False, True])
def test_a_site_is_not_told_of_the_others(nested: bool, tmp_path: Path) -> None:
    """Neither their names nor their baselines, which only the server uses."""
    generator = torch.Generator().manual_seed(0)
    names = ["a-hospital", "b-hospital"]
    clients = {name: (torch.randn(8, 4, generator=generator).double(), torch.arange(8) % 3) for name in names}
    fed = cf.FederatedData(clients, clients)
    offset = {"name": "excess", "baseline": {"a-hospital": 0.12345, "b-hospital": 0.2}}
    table = {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2, "offset": offset}}
    method = table if nested else {"name": "robust", "offset": offset}
    settings = config(algorithm=method, flower={"sites": names, "deadline": 0.5, "patience": 1.0})
    grid = grid_of(fed, tmp_path)
    result = serve(grid, settings)
    assert_same(result, embedded(settings, fed), 1e-12)
    sent = b"".join(grid.sent)
    assert b"deadline" not in sent and b"0.12345" not in sent
    for name in names:
        assert name.encode() not in sent


@pytest.mark.parametrize("width", [torch.float32, torch.float64])
def test_a_leaked_sample_is_detected(width: torch.dtype, three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """The search above would detect a client that leaks a sample."""

    def leak(message: Message, context: Any, call: Any) -> Message:
        body, tensors = serialization.decode(call(message, context).content)
        packer = serialization.TensorPacker()
        for part in body.get("answers", ()):
            part["reply"] = packer.add(serialization.unpack(part["reply"], tensors))
        body["more"] = packer.add(alone(three_clients, context.node_config["site"]).train.x[3:5].to(width))
        return Message(serialization.encode(body, packer.record()), reply_to=message)

    grid = grid_of(three_clients, tmp_path, mods=[leak])
    serve(grid, config())
    expected = [(name, place) for name in three_clients.names for place in (3, 4)]
    assert samples_in(b"".join(grid.bytes), three_clients) == expected


def test_reused_memory_is_another_tensor() -> None:
    """Freed memory is reused: a tensor added later may have the address of an earlier one."""
    packer = serialization.TensorPacker()
    names = [packer.add({"value": torch.full((64,), float(k))})["value"] for k in range(50)]
    both = torch.zeros(3)
    assert packer.add({"a": both, "b": both}) == {"a": "50", "b": "50"}  # the same tensor is sent once
    assert len(set(names)) == 50
    _, tensors = serialization.decode(serialization.encode({}, packer.record()))
    assert [float(tensors[name][0]) for name in names] == list(range(50))


# Faults.


def only(grid: InProcess, name: str) -> int:
    """The node of a site."""
    return next(node for node, (_, settings) in grid.sites.items() if settings["site"] == name)


def in_round(number: int, change: Any) -> Any:
    """Tamper only with the replies of one round."""

    def tamper(message: Message, reply: Message) -> Message | None:
        changed: Message | None = change(message, reply) if message.metadata.group_id == f"round {number}" else reply
        return changed

    return tamper


def nothing(message: Message, reply: Message) -> None:
    return None


def gone(message: Message, reply: Message) -> Message:
    return Message(Error(5, "gone"), reply_to=message)


def rubbish(message: Message, reply: Message) -> Message:
    return Message(serialization.encode({"answers": [{"reply": {"model": "99"}}, 3]}), reply_to=message)


def altered(change: Any) -> Any:
    """Change all models of a reply."""

    def tamper(message: Message, reply: Message) -> Message:
        body, tensors = serialization.decode(reply.content)
        packer = serialization.TensorPacker()
        for part in body["answers"]:
            tree = serialization.unpack(part["reply"], tensors)
            if "model" in tree:
                params = {name: change(leaf) for name, leaf in tree["model"]["params"].items()}
                tree = {**tree, "model": {**tree["model"], "params": params}}
            part["reply"] = packer.add(tree)
        return Message(serialization.encode(body, packer.record()), reply_to=message)

    return tamper


FAULTS = {
    "no reply in time": (nothing, None),
    "killed": (gone, None),
    "rubbish": (rubbish, "does not match the request"),
    "NaN": (altered(lambda leaf: leaf * torch.nan), "not finite"),
    "wrong shapes": (altered(lambda leaf: leaf[:1]), "and not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_site_is_left_out_and_comes_back(
    fault: str, three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(three_clients, tmp_path / "sites")
    tamper, refused = FAULTS[fault]
    grid.tamper[only(grid, "b")] = in_round(2, tamper)
    if refused is None:
        result = serve(grid, config(rounds=4), tmp_path / "run")
        assert "site 'b' is left out of 'train'" in caplog.text
        absent = {(row["round"], row["step"]) for row in rows(tmp_path / "run") if "b" in row["absent"]}
        assert absent == {(1, "evaluate"), (2, "train")}  # both were in the lost message
    else:
        with pytest.warns(UserWarning, match=f"refused the reply of client 'b': .*{refused}"):
            result = serve(grid, config(rounds=4), tmp_path / "run")
    weights = {(row["round"], row["client"]): row["weight"] for row in result.clients}
    assert weights[2, "b"] == 0
    assert weights[2, "a"] + weights[2, "c"] == pytest.approx(1)
    assert weights[3, "b"] > 0 and weights[4, "b"] > 0


def test_the_server_learns_only_the_type_of_an_error(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def load(node: Any) -> cf.FederatedData:
        calls.append(node["site"])
        if node["site"] == "b" and calls.count("b") == 3:
            raise ValueError("sample 3.14159 of patient 7 is odd")
        return alone(three_clients, node["site"])

    grid = grid_of(three_clients, tmp_path)
    app = client_app(load, tmp_path)
    grid.sites = {node: (app, settings) for node, (_, settings) in grid.sites.items()}
    result = serve(grid, config())
    assert b"patient 7" not in b"".join(grid.bytes)
    assert "site 'b' is left out of 'train': ValueError" in caplog.text
    assert {row["client"] for row in result.clients if row["round"] == 3} == {"a", "b", "c"}


def test_a_disconnected_site_rejoins(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path / "sites")
    node = only(grid, "c")
    site = grid.sites[node]

    class Cut(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 1:
                del grid.sites[node]
            if number == 3:
                grid.sites[5000] = site  # without a key, a SuperNode that reconnects gets a new id

    serve(grid, config(rounds=6), tmp_path / "run", callbacks=[Cut()])
    took_part = {row["round"]: row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"}
    # A round's callbacks run after the next round has been trained.
    assert took_part == {k: ["a", "b"] if k in (3, 4) else ["a", "b", "c"] for k in range(1, 7)}


def test_a_run_stops_below_the_quorum_and_resumes(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    settings = config("ditto", rounds=4, quorum=0.9)
    grid = grid_of(three_clients, tmp_path / "sites")
    grid.tamper[only(grid, "b")] = in_round(3, nothing)
    with pytest.raises(cf.QuorumError, match="only 2 of 3"):
        serve(grid, settings, tmp_path / "run")
    grid.tamper = {}
    result = serve(grid, settings, tmp_path / "run", resume=True)
    assert_same(result, embedded(settings, three_clients), 1e-12)


def test_a_round_below_the_quorum_keeps_the_previous_round(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """With one client per round, the sampled one is offline; the other two have answered the evaluation."""
    grid = grid_of(three_clients, tmp_path / "sites")
    grid.tamper[only(grid, "b")] = lambda message, reply: reply if message.metadata.group_id in EARLY else None
    with pytest.raises(cf.QuorumError, match="only 0 of 1") as caught:
        serve(grid, config(rounds=9, clients_per_round=1, flower={"deadline": 0.05}), tmp_path / "run")
    found = re.match(r"Round (\d+)", str(caught.value))
    assert found is not None and int(found[1]) > 1
    last = int(found[1]) - 1
    assert (tmp_path / "run" / "checkpoint" / f"round-{last:09d}").is_dir()
    records = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in records] == list(range(1, last + 1))


EARLY = ("who", "round 1")


class Stop(cf.Callback):
    """Stops a run after a round's checkpoint."""

    def __init__(self, after: int) -> None:
        self._after = after

    def settled(self, snapshot: Any) -> None:
        if snapshot.round == self._after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 2])
def test_a_stopped_server_resumes_and_so_do_its_sites(
    every: int, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """By then, Ditto's clients have trained one more round, which is repeated from their earlier state."""
    settings = config("ditto", rounds=6, checkpoint_every=every)
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(three_clients, tmp_path / "sites"), settings, tmp_path / "run", callbacks=[Stop(3)])
    result = serve(grid_of(three_clients, tmp_path / "sites"), settings, tmp_path / "run", resume=True)
    assert_same(result, embedded(settings, three_clients), 1e-12)
    files = [path.name for path in (tmp_path / "sites").rglob("*") if path.is_file()]
    assert 3 <= len(files) <= 3 * 5  # one state per site, and those that checkpoints still need


def test_a_lost_state_is_logged(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(three_clients, tmp_path / "sites")

    class Lose(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 2:
                for path in (tmp_path / "sites" / "b").rglob("*.safetensors"):
                    path.unlink()

    serve(grid, config("ditto"), callbacks=[Lose()])
    assert "Site 'b' lost its state" in caplog.text


def test_divergence_ends_the_run(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    settings = config(algorithm={"name": "fedavg", "lr": 1e200})
    with pytest.raises(cf.Diverged, match=r"client '[abc]'.*smaller lr"):
        serve(grid_of(three_clients, tmp_path), settings)


def test_two_sites_with_the_same_name_are_refused(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path)
    grid.sites[77] = grid.sites[only(grid, "a")]
    with pytest.raises(cf.ConfigError, match="Two sites are named 'a'"):
        serve(grid, config())


def test_missing_sites(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match=r"Only 3 of 4 sites .*a, b, c"):
        serve(grid_of(three_clients, tmp_path), config(flower={"sites": 4, "patience": 0.1}))


def test_an_unknown_site_is_refused(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = serve(grid_of(three_clients, tmp_path), config(flower={"sites": ["a", "b"], "patience": 0.1}))
    assert list(result.names) == ["a", "b"]
    assert "'c' and is refused: it is not one of this run's sites" in caplog.text


def test_a_run_resumes_without_an_offline_site(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, run = config("ditto", rounds=6, flower={"deadline": 0.5, "patience": 30.0}), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(three_clients, tmp_path / "sites"), settings, run, callbacks=[Stop(2)])
    grid = grid_of(three_clients, tmp_path / "sites")
    node = only(grid, "b")
    site = grid.sites.pop(node)

    class Back(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 4:
                grid.sites[node] = site

    result = serve(grid, settings, run, resume=True, callbacks=[Back()])
    assert "resumes with 2 of its 3 sites: a, c" in caplog.text
    assert list(result.names) == ["a", "b", "c"]
    took_part = {row["round"]: row["answered"] for row in rows(run) if row["step"] == "train"}
    assert took_part == {k: ["a", "c"] if k in (3, 4, 5) else ["a", "b", "c"] for k in range(1, 7)}
    assert "lost its state" not in caplog.text


def test_a_run_does_not_resume_below_the_quorum(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    settings, run = config(rounds=4, flower={"deadline": 0.1, "patience": 0.3}), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(three_clients, tmp_path / "sites"), settings, run, callbacks=[Stop(2)])
    grid = grid_of(three_clients, tmp_path / "sites")
    whole = dict(grid.sites)
    grid.sites = {only(grid, "a"): grid.sites[only(grid, "a")]}
    with pytest.raises(cf.ConfigError, match=r"Only 1 of 3 sites .*\(a\)"):
        serve(grid, settings, run, resume=True)
    grid.sites = whole
    assert_same(serve(grid, settings, run, resume=True), embedded(settings, three_clients), 1e-12)


def test_a_site_with_other_data_cannot_resume(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(three_clients, tmp_path / "sites"), config(), tmp_path / "run", callbacks=[Stop(2)])
    x, y = three_clients.train["b"]
    grid = grid_of(three_clients, tmp_path / "sites")
    other = client_app(lambda node: cf.FederatedData({"b": (x[:4], y[:4])}), tmp_path / "sites")
    grid.sites[only(grid, "b")] = other, {"site": "b"}
    with pytest.raises(cf.ConfigError, match="'b' had 5 samples when the run started and now has 4"):
        serve(grid, config(), tmp_path / "run", resume=True)


def test_a_failed_forced_run_keeps_the_old_one(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid, run = grid_of(three_clients, tmp_path / "sites"), tmp_path / "run"
    serve(grid, config(), run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(cf.Diverged):
        serve(grid, config(algorithm={"name": "fedavg", "lr": 1e200}), run, force=True)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert {"sites.json", "sites.jsonl"} <= before.keys()
    with pytest.raises(cf.Diverged):
        serve(grid, config(algorithm={"name": "fedavg", "lr": 1e200}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_duplicate_is_asked_again_only_once_the_other_is_gone(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    grid = grid_of(three_clients, tmp_path / "sites")
    node = only(grid, "c")
    site = grid.sites[node]

    class Duplicate(cf.Callback):
        def round_done(self, number: int) -> None:
            if number == 1:
                grid.sites[5000] = site
            if number == 4:
                del grid.sites[node]

    serve(grid, config(rounds=7), tmp_path / "run", callbacks=[Duplicate()])
    took_part = [row["answered"] for row in rows(tmp_path / "run") if row["step"] == "train"]
    assert took_part == [["a", "b", "c"]] * 7
    assert grid.seen.count((5000, "who")) == 2


def test_a_mod_that_returns_nothing(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower's SuperNode would wait forever."""

    def swallow(message: Message, context: Any, call: Any) -> Any:
        reply = call(message, context)
        return None if (message.metadata.group_id, context.node_config["site"]) == ("round 2", "b") else reply

    result = serve(grid_of(three_clients, tmp_path, [swallow]), config())
    assert "site 'b' is left out of 'train': ConfigError: A mod returned NoneType" in caplog.text
    assert {row["client"] for row in result.clients if row["round"] == 3} == {"a", "b", "c"}


def test_personal_models_stay_at_their_sites(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    result = serve(grid_of(three_clients, tmp_path), config("ditto"))
    with pytest.raises(cf.ConfigError, match="stay at their sites"):
        result.personal("a")


def test_the_engine_is_not_started_by_name(three_clients: cf.FederatedData) -> None:
    with pytest.raises(cf.ConfigError, match="comfedl flower local"):
        cf.fit(double([4], 3), three_clients, cf.FedAvg(), engine="flower")


def test_without_flower_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = "import importlib.util as u; found = u.find_spec; u.find_spec = lambda n: None if n == 'flwr' else found(n)"
    code += "; import sys; sys.argv[1:] = ['flower', 'new', 'x']; from comfedl.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {MISSING}\n")


MISSING = "Flower, which connects the sites, is not installed; install it with: pip install 'comfedl[flower]'."


# The commands.


def test_an_invalid_trial_starts_nothing(tmp_path: Path) -> None:
    settings = parse_config({
        "data": {"name": "digits", "partition": "iid", "clients": 3},
        "algorithm": {"name": "fedavg"},
    })  # fmt: skip
    with pytest.raises(
        cf.ConfigError, match=r"--sites is 4, but the config's data have 3 clients.*data\.clients=4\)\.$"
    ):
        run_local(settings, tmp_path / "run", sites=4)
    assert list(tmp_path.iterdir()) == []
    table = tmp_path / "rows.csv"  # the clients of a table are what they are
    table.write_text("\n".join(["site,x,y", *(f"{'abcd'[k % 4]},{k},{'uv'[k // 4 % 2]}" for k in range(40))]))
    own = {"name": "csv", "path": str(table), "client": "site", "target": "y"}
    with pytest.raises(cf.ConfigError, match=r"data have 4 clients and each is one site; give --sites 4\.$"):
        run_local(parse_config({"data": own, "algorithm": {"name": "fedavg"}}), tmp_path / "run", sites=3)
    table.unlink()
    (tmp_path / "config.toml").touch()
    with pytest.raises(cf.RunFolderError, match="already holds a run"):
        run_local(settings, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_processes_end_with_a_killed_command(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from comfedl.flower.processes import Daemons"
    code += "; d = Daemons(Path(sys.argv[1])); print(d.start('sleeper', ['sleep', '600']).pid, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path("/proc") / process.stdout.readline().strip()
        assert child.exists()
        process.kill()
    until = time.monotonic() + 60
    with contextlib.suppress(OSError):  # it is gone
        while " Z " not in (child / "stat").read_text():
            assert time.monotonic() < until, "it outlives its parent"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"deadline": 0}, "flower.deadline is 0"),
        ({"sites": 0}, "flower.sites is 0"),
        ({"sites": ["a", "a"]}, "a list of different names"),
        ({"site": 3}, "flower.site"),
    ],
)
def test_invalid_flower_tables(table: dict[str, Any], words: str) -> None:
    with pytest.raises(cf.ConfigError, match=words):
        config(flower=table)


def test_certs(tmp_path: Path) -> None:
    written = make_certs(tmp_path / "keys", ["north", "south"], ["server.example.org", "10.0.0.7"])
    assert {path.name for path in written} == {
        *("ca.crt", "ca.key", "server.pem", "server.key"),
        *("north.key", "north.pub", "south.key", "south.pub", "sites.json"),
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in written if path.suffix == ".key")
    ca, server = (x509.load_pem_x509_certificate((tmp_path / "keys" / name).read_bytes()) for name in CERTIFICATES)
    server.verify_directly_issued_by(ca)
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "server.example.org"} <= set(hosts.get_values_for_type(x509.DNSName))
    key = load_ssh_private_key((tmp_path / "keys" / "north.key").read_bytes(), None)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    assert (tmp_path / "keys" / "north.pub").read_bytes().startswith(public)
    with pytest.raises(cf.RunFolderError, match=r"already holds ca\.crt"):
        make_certs(tmp_path / "keys", ["north"])
    with pytest.raises(cf.ConfigError, match="a/b"):
        make_certs(tmp_path / "other", ["a/b"])
    assert not (tmp_path / "other").exists()


CERTIFICATES = ("ca.crt", "server.pem")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower itself
def test_a_new_app_is_a_valid_flower_app(tmp_path: Path, three_clients: cf.FederatedData) -> None:
    new_app(tmp_path / "our-study")
    _, warnings = load_and_validate(tmp_path / "our-study" / "pyproject.toml", check_module=False)
    assert warnings == []
    assert build_fab_from_disk(tmp_path / "our-study")
    settings = read_config(tmp_path / "our-study" / "our_study" / "config.toml", ["rounds=1", "data.classes=3"])
    assert serve(grid_of(three_clients, tmp_path / "sites"), settings).rounds[-1]["round"] == 1
    compile((tmp_path / "our-study" / "our_study" / "data.py").read_text(), "data.py", "exec")
    with pytest.raises(cf.RunFolderError, match="already exists"):
        new_app(tmp_path / "our-study")


def test_apps_written_by_version_0_1_still_find_their_names() -> None:
    import comfedl.flower as new
    from comfedl.engines import flower as old

    assert old.server_app is new.server_app and old.client_app is new.client_app and old.Sites is new.Sites
