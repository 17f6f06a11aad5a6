"""Secure aggregation over Flower's messages, without a network."""

from __future__ import annotations

import json
import stat
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch
from flwr.app import Context, Message, RecordDict
from torch import nn

import comfedl as cf
from comfedl.config.schema import Config, parse_config
from comfedl.flower import serialization
from comfedl.flower.apps import client_app
from comfedl.flower.server import serve
from comfedl.models.zoo import mlp
from comfedl.utils.lock import SUPPORTED, take_lock
from helpers.in_process import Change, InProcess, alone, grid_of

SITES = 5
KL = {"name": "comfedl", "outer": {"name": "kl", "gamma": 0.2}}


def double(shape: Sequence[int], classes: int) -> nn.Module:
    return mlp(shape, classes, hidden=(6,)).double()


def config(algorithm: dict[str, Any] = KL, secure: dict[str, Any] | None = None, **more: Any) -> Config:
    return parse_config({
        "rounds": 3,
        "seed": 3,
        "data": {"name": "sites", "classes": 3},
        "model": {"name": f"{__name__}:double"},
        "algorithm": {**algorithm, "batch_size": 4, "local_steps": 3},
        "flower": {"deadline": 0.3, "patience": 1.0},
        "secure_aggregation": {} if secure is None else secure,
        **more,
    })  # fmt: skip


@pytest.fixture
def fed() -> cf.FederatedData:
    generator = torch.Generator().manual_seed(0)

    def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        return x, torch.randint(3, (n,), generator=generator)

    names = [f"site-{k}" for k in range(SITES)]
    return cf.FederatedData({name: data(8 + 3 * k) for k, name in enumerate(names)}, {name: data(5) for name in names})


def simulated(settings: Config, fed: cf.FederatedData) -> cf.Result:
    model = settings.make_model(fed)
    rounds = {"rounds": settings.rounds, "seed": settings.seed, "eval_every": settings.eval_every}
    return cf.fit(model, fed, settings.make_algorithm(), **rounds, secure=settings.secure)


def assert_same(one: cf.Result, other: cf.Result) -> None:
    for name, part in one.params.items():
        torch.testing.assert_close(part, other.params[name], rtol=0, atol=1e-10)
    assert [row.keys() for row in one.rounds] == [row.keys() for row in other.rounds]
    for ours, theirs in zip(one.rounds, other.rounds, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def stage_of(message: Message) -> str:
    body, _ = serialization.decode(message.content)
    return str(body["secure"]["stage"]) if "secure" in body else "none"


def silent(stage: str, group: str) -> Change:
    """A site that does not answer this stage in a round."""

    def change(message: Message, reply: Message) -> Message | None:
        return None if (stage_of(message), message.metadata.group_id) == (stage, group) else reply

    return change


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "fedavg"}, KL, {"name": "robust"}, {"name": "ditto"}, {"name": "fedavg", "clip_update_norm": 0.1}],
    ids=["fedavg", "kl", "robust", "ditto", "clipped"],
)
def test_sites_end_where_a_simulation_does(algorithm: dict[str, Any], fed: cf.FederatedData, tmp_path: Path) -> None:
    settings = config(algorithm)
    assert_same(serve(grid_of(fed, tmp_path), settings), simulated(settings, fed))


def test_a_round_takes_two_messages_at_each_site(fed: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(fed, tmp_path)
    stages: list[tuple[int, str, str]] = []
    for node in grid.sites:
        grid.tamper[node] = lambda message, reply, node=node: (
            stages.append((node, message.metadata.group_id, stage_of(message))) or reply
        )
    serve(grid, config({"name": "fedavg"}))
    first = next(iter(grid.sites))
    count = Counter((group, stage) for node, group, stage in stages if node == first and stage != "none")
    # The evaluation of the third round's model is an exchange of its own at the end.
    assert count == {
        **{("round 1", stage): 1 for stage in ("keys", "share")},
        **{(f"round {k}", stage): 1 for k in (1, 2) for stage in ("mask", "unmask")},
        **{("round 3", stage): 2 for stage in ("mask", "unmask")},
    }


def test_sites_that_drop_out_at_any_stage_are_left_out_and_come_back(fed: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(fed, tmp_path / "states")
    one, two, three, *_ = grid.sites
    grid.tamper = {one: silent("share", "round 1"), two: silent("mask", "round 2"), three: silent("unmask", "round 3")}
    # Of five sites four are needed: two thirds, rounded up.
    result = serve(grid, config({"name": "fedavg"}, rounds=4), tmp_path / "run")
    assert [row["participants"] for row in result.rounds] == [4, 4, 5, 5]
    rows = [json.loads(line) for line in (tmp_path / "run" / "sites.jsonl").read_text().splitlines()]
    missing = {row["round"]: [*row["absent"]] for row in rows if row["step"] == "train"}
    assert missing == {1: [grid.sites[one][1]["site"]], 2: [grid.sites[two][1]["site"]], 3: [], 4: []}


def test_too_few_sites_end_the_run_in_a_sentence_and_it_resumes(fed: cf.FederatedData, tmp_path: Path) -> None:
    out, grid = tmp_path / "run", grid_of(fed, tmp_path / "states")
    one, two, *_ = grid.sites
    grid.tamper = {one: silent("mask", "round 2"), two: silent("unmask", "round 2")}
    settings = config({"name": "fedavg"})
    with pytest.raises(cf.QuorumError, match=r"Round 2: only 3 of 5 sites helped to remove the masks .* needs 4"):
        serve(grid, settings, out)
    grid.tamper = {}
    resumed = serve(grid, settings, out, resume=True)  # from round 1, with new keys
    assert_same(resumed, simulated(settings, fed))


def test_no_site_s_words_travel_without_masks(fed: cf.FederatedData, tmp_path: Path) -> None:
    """With masks off the words are what the codec writes; with masks on none of them is on the wire."""
    from comfedl.flower import secure_client

    plain: list[bytes] = []
    before = secure_client.SecureSite.mask

    def watched(self: Any, ask: Any, task: bytes, parts: Any, *more: Any) -> Any:
        plain.extend(part.tobytes()[8 * k : 8 * k + 16] for part in parts[:1] for k in range(0, len(part) - 2, 5))
        return before(self, ask, task, parts, *more)

    grid = grid_of(fed, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_client.SecureSite, "mask", watched)
        serve(grid, config({"name": "fedavg"}))
    telling = [words for words in plain if len({*words}) > 8]  # not a few zeros, which are anywhere
    assert len(telling) > 30
    assert not any(words in carried for words in telling for carried in grid.bytes)


def test_private_keys_are_the_site_s_alone(fed: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(fed, tmp_path)
    serve(grid, config({"name": "fedavg"}))
    kept = sorted(tmp_path.glob("*/*.keys.json"))
    assert len(kept) == SITES
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        state = json.loads(path.read_text())
        secrets = [state["secret"], *(own[key] for own in state["exchanges"].values() for key in own if key == "seed")]
        assert secrets
        assert not any(secret.encode() in carried for secret in secrets for carried in grid.bytes)


def test_a_site_can_insist_on_secure_aggregation(fed: cf.FederatedData, tmp_path: Path) -> None:
    app = client_app(lambda node: alone(fed, node["site"]), tmp_path, only_sums=True)
    grid = InProcess({k: (app, {"site": name}) for k, name in enumerate(fed.names, start=1)})
    plain = config({"name": "fedavg"}).model_copy(update={"secure_aggregation": None})
    with pytest.raises(cf.QuorumError):
        serve(grid, plain)
    serve(grid, config({"name": "fedavg"}))


def test_a_server_that_tells_sites_different_things_gets_noise(fed: cf.FederatedData, tmp_path: Path) -> None:
    """Here one site is told of another number of samples to weigh by, and the sum is of no use."""
    grid = grid_of(fed, tmp_path)
    app, settings = grid.sites[next(iter(grid.sites))]

    class Misled:
        def __call__(self, message: Message, context: Any) -> Message:
            if stage_of(message) == "mask":
                body, tensors = serialization.decode(message.content)
                packer = serialization.TensorPacker()
                for request in body["asks"]:
                    tree = serialization.unpack(request["message"], tensors)
                    request["message"] = packer.add({**tree, "reference": tree["reference"] * 1000})
                changed = serialization.encode(body, packer.record())
                message.content.update(changed)
            return app(message, context)

    grid.sites[next(iter(grid.sites))] = (Misled(), settings)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = serve(grid, config({"name": "fedavg"}, rounds=1))
        except cf.ConfigError as error:  # by chance in half of the runs
            assert "weights do not add up to a number above 0" in str(error)
            return
    assert said  # of numbers of clipped values that no honest sum has
    honest = simulated(config({"name": "fedavg"}, rounds=1), fed)
    assert max(float((result.params[name] - part).abs().max()) for name, part in honest.params.items()) > 1e-3


def test_masks_cannot_be_left_out_at_real_sites(fed: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match="masks is false"):
        serve(grid_of(fed, tmp_path), config(secure={"masks": False}))
    with pytest.raises(cf.ConfigError, match="3 sites or more"):
        serve(grid_of(fed, tmp_path), config(clients_per_round=2))


def test_a_server_cannot_leave_out_one_or_two_sites_of_a_robust_run(fed: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match=r"clients_per_round is 4 of 5 sites, .* give 5 or at most 2"):
        serve(grid_of(fed, tmp_path), config(clients_per_round=4))


@pytest.mark.skipif(not SUPPORTED, reason="this system has no locks")
def test_a_site_works_on_one_message_at_a_time(fed: cf.FederatedData, tmp_path: Path) -> None:
    """What comes while it computes would read the state of before, and answer the same stage twice."""
    grid = grid_of(fed, tmp_path)
    node = next(iter(grid.sites))
    app, settings = grid.sites[node]
    name, said = settings["site"], []

    def work(message: Message, reply: Message) -> Message:
        if stage_of(message) == "mask" and not said:
            stored = next(path for path in tmp_path.glob("*/*.keys.json") if path.parent.name.startswith(name))
            with take_lock(stored.parent, f"{stored.stem}.lock") or nullcontext():
                context = Context(1, node, dict(settings), RecordDict(), {})
                body, _ = serialization.decode(app(message, context).content)
            said.append(str(body["error"]))
        return reply

    grid.tamper[node] = work
    serve(grid, config({"name": "fedavg"}, rounds=1))
    assert "still at work on another message" in said[0]


def test_a_retry_over_flower_is_over_the_same_sites(fed: cf.FederatedData, tmp_path: Path) -> None:
    """The first sum of a robust run, of losses, misses a site; the training after it must not have it either."""
    grid = grid_of(fed, tmp_path / "states")
    first, second, *_ = grid.sites
    calls: dict[str, int] = {}

    def late(message: Message, reply: Message) -> Message | None:
        calls["first"] = calls.get("first", 0) + (stage_of(message) == "mask")
        return None if stage_of(message) == "mask" and calls["first"] == 1 else reply

    grid.tamper = {first: late}
    serve(grid, config(rounds=1), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "sites.jsonl").read_text().splitlines()]
    name = grid.sites[first][1]["site"]
    steps = [(row["step"], name in row["answered"], len(row["answered"])) for row in rows if row["round"] == 1]
    assert steps[:2] == [("evaluate", False, 4), ("train", False, 4)]

    def gone(message: Message, reply: Message) -> Message | None:
        calls["second"] = calls.get("second", 0) + (stage_of(message) == "mask")
        return None if stage_of(message) == "mask" and calls["second"] == 2 else reply

    grid = grid_of(fed, tmp_path / "others")
    grid.tamper = {second: gone}
    with pytest.raises(cf.QuorumError, match=r"is missing .* exactly the sites of the one before"):
        serve(grid, config({**KL, "outer": {**KL["outer"], "cap": 2.0}}, rounds=1))  # type: ignore[dict-item]
