"""Sites that lie: whatever one of them sends costs it its place, never the run. Rows of the attacks found by hand."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict

import comfedl as cf
from comfedl.config.schema import Config, parse_config
from comfedl.flower import serialization
from comfedl.flower.local_trial import LocalTrial, run_local
from comfedl.flower.registry import capped
from comfedl.flower.server import serve
from comfedl.utils.errors import BadReply
from flower.test_flower import altered, config, in_round, only, rows
from helpers.in_process import grid_of

Change = Callable[[dict[str, Any], dict[str, torch.Tensor], serialization.TensorPacker], None]


def forged(change: Change) -> Any:
    """Change the reply to the training step; ``change`` gets its part of the answer and may add tensors."""

    def tamper(message: Message, reply: Message) -> Message:
        body, tensors = serialization.decode(reply.content)
        packer = serialization.TensorPacker()
        for part in body["answers"]:
            part["reply"] = packer.add(serialization.unpack(part["reply"], tensors))
        change(body["answers"][-1], tensors, packer)
        return Message(serialization.encode(body, packer.record()), reply_to=message)

    return tamper


def diverges(message: Message, reply: Message) -> Message:
    count = len(serialization.decode(reply.content)[0]["answers"])
    return Message(serialization.encode({"answers": [{"diverged": [2, "nan", "1.0"]}] * count}), reply_to=message)


def attacked(fed: cf.FederatedData, folder: Path, settings: Config, attack: Any, reason: str) -> cf.Result:
    """Site b attacks in every round: it is refused three times, then not asked again, and the run goes on."""
    grid = grid_of(fed, folder / "sites")
    grid.tamper[only(grid, "b")] = lambda message, reply: (
        reply if message.metadata.group_id == "who" else attack(message, reply)
    )
    with pytest.warns(BadReply, match=f"refused the reply of client 'b': .*{reason}"):
        result = serve(grid, settings, folder / "run")
    assert result.rounds[-1]["round"] == settings.rounds
    assert all(bool(part.isfinite().all()) for part in result.params.values())
    asked = [{*row["answered"], *row["absent"]} for row in rows(folder / "run") if row["step"] == "train"]
    assert "b" in asked[0] and "b" not in asked[-1]
    lines = (folder / "run" / "clients.jsonl").read_text().splitlines()
    assert {json.loads(line)["client"] for line in lines} <= {"a", "b", "c"}
    return result


def test_row_1_a_site_that_says_it_diverged_is_left_out(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """It ended the run, and its folder was deleted."""
    attacked(three_clients, tmp_path, config(rounds=6), diverges, "its training diverged at local step 2")


def test_row_1_then_the_quorum_decides_and_the_checkpoint_stays(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    grid, settings = grid_of(three_clients, tmp_path / "sites"), config(rounds=6, quorum=0.9)
    in_training = forged(lambda part, tensors, packer: part.update(diverged=[2, "nan", "1.0"]))
    grid.tamper[only(grid, "b")] = in_round(4, in_training)
    with pytest.warns(BadReply, match="diverged"), pytest.raises(cf.QuorumError, match="only 2 of 3 clients"):
        serve(grid, settings, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "round-000000003").is_dir()
    grid.tamper = {}
    assert serve(grid, settings, tmp_path / "run", resume=True).rounds[-1]["round"] == 6


@pytest.mark.parametrize("samples", [-100, 0, 10**15, 10**30, 3.5, "7", True, None, math.nan])
def test_row_2_a_site_with_an_impossible_number_of_samples_is_refused(
    samples: Any, three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights were 3, -5 and 3, or 1 for that site alone, or a raw OverflowError."""
    grid = grid_of(three_clients, tmp_path)
    body = {"name": "b", "samples": samples, "shape": [4]}
    grid.tamper[only(grid, "b")] = lambda message, reply: Message(serialization.encode(body), reply_to=message)
    result = serve(grid, config(rounds=1))
    assert list(result.names) == ["a", "c"]
    assert "is refused: site 'b' must have a whole number of samples from 1 to 1,000,000,000" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        {"name": "b" * 10_000, "samples": 5, "shape": [4]},
        {"name": ["b"], "samples": 5, "shape": [4]},
        {"name": "b\n", "samples": 5, "shape": [4]},
        {"name": "b", "samples": 5, "shape": [4] * 1000},
        {"name": "b", "samples": 5, "shape": [10**30]},
        {"name": "b", "samples": 5, "shape": "4"},
        {"name": "b" * 100_000, "samples": 5, "shape": [4]},
    ],
)
def test_row_2_nor_one_with_another_impossible_answer(
    body: dict[str, Any], three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(three_clients, tmp_path)
    grid.tamper[only(grid, "b")] = lambda message, reply: Message(serialization.encode(body), reply_to=message)
    assert list(serve(grid, config(rounds=1)).names) == ["a", "c"]
    assert max(map(len, caplog.messages)) < 1000


def test_row_2_max_share_bounds_what_a_site_counts(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(**table: Any) -> dict[str, float]:
        grid = grid_of(three_clients, tmp_path)
        body = {"name": "b", "samples": 10**9, "shape": list(three_clients.train.x.shape[1:])}
        grid.tamper[only(grid, "b")] = lambda message, reply: (
            Message(serialization.encode(body), reply_to=message) if message.metadata.group_id == "who" else reply
        )
        result = serve(grid, config(rounds=1, flower={"deadline": 0.5, "patience": 1.0, **table}))
        return {str(row["client"]): float(row["weight"] or 0) for row in result.clients}

    assert weights()["b"] > 0.999 and "bound it with flower.max_share" in caplog.text
    assert weights(max_share=0.5)["b"] <= 0.5
    with pytest.raises(cf.ConfigError, match=r"flower\.max_share"):
        config(flower={"max_share": 1.5})


def test_row_2_capped_sizes_keep_to_the_share() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        sizes = generator.integers(1, 10 ** generator.integers(1, 9), size=generator.integers(1, 12))
        share = float(generator.uniform(0.01, 1))
        found = capped(sizes, share)
        assert (found >= 1).all() and (found <= sizes).all()
        if share * len(sizes) >= 1 and sizes.min() > 100:
            assert found.max() <= share * found.sum() * 1.05


def nested(part: dict[str, Any], tensors: dict[str, torch.Tensor], packer: serialization.TensorPacker) -> None:
    tree: Any = packer.add(torch.zeros(()))
    for _ in range(600):
        tree = {"a": tree}
    part["reply"] = tree


def scored(name: str) -> Change:
    """A reply to the evaluation, with one more score."""

    def change(part: dict[str, Any], tensors: Any, packer: serialization.TensorPacker) -> None:
        part["reply"]["scores"] = {**part["reply"]["scores"], name: packer.add(torch.tensor(0.5))}

    return change


def in_evaluation(change: Change) -> Any:
    """Change the reply to the evaluation, which comes first where both are in one message."""

    def tamper(message: Message, reply: Message) -> Message:
        body, tensors = serialization.decode(reply.content)
        packer = serialization.TensorPacker()
        for part in body["answers"]:
            part["reply"] = packer.add(serialization.unpack(part["reply"], tensors))
            if "scores" in part["reply"]:
                change(part, tensors, packer)
        return Message(serialization.encode(body, packer.record()), reply_to=message)

    return tamper


def replaced(part: str, value: Any) -> Change:
    def change(answer: dict[str, Any], tensors: Any, packer: serialization.TensorPacker) -> None:
        if part in answer["reply"]:
            answer["reply"][part] = packer.add(value)

    return change


def with_params(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def apply(answer: dict[str, Any], tensors: Any, packer: serialization.TensorPacker) -> None:
        if "model" in answer["reply"]:
            answer["reply"]["model"] = change(answer["reply"]["model"])

    return apply


ATTACKS: dict[str, tuple[Any, str]] = {
    "nested 600 deep": (forged(nested), "it is nested more than 32 deep"),
    "complex loss": (forged(replaced("loss", torch.tensor(1j))), "numbers of the type torch.complex64"),
    "float8": (forged(replaced("loss", torch.tensor(1.0).to(torch.float8_e5m2))), "numbers of the type torch.float8"),
    "a part that nobody asked for": (
        forged(lambda part, tensors, packer: part["reply"].update(more=packer.add(torch.zeros(3)))),
        "it has the part 'more'",
    ),
    "a missing part": (forged(lambda part, tensors, packer: part["reply"].clear()), "it lacks the part"),
    "an empty dict too many": (
        forged(with_params(lambda model: {**model, "more": {}})),
        "other tensors than the model",
    ),
    "a path as a name": (
        forged(with_params(lambda model: {f"params/{name}": leaf for name, leaf in model["params"].items()})),
        "other tensors than the model",
    ),
    "a dict as the loss": (forged(replaced("loss", {"a": torch.zeros(())})), "its loss is not a number"),
    "not a dict": (forged(lambda part, tensors, packer: part.update(reply="0")), "it is not a dict"),
    "no reply": (forged(lambda part, tensors, packer: part.pop("reply")), "it cannot be read"),
    "text for divergence": (
        forged(lambda part, tensors, packer: part.update(diverged="ever so far")),
        "it cannot be read",
    ),
    "300 MB of tensors": (
        forged(lambda part, tensors, packer: packer.add(torch.zeros(3_000_000))),
        "its tensors has .* but what was asked for has at most",
    ),
    "a 20 MB text": (
        forged(lambda part, tensors, packer: part.update(anew="x" * 20_000_000)),
        "its text has .* but what was asked for has at most",
    ),
    **{
        f"a score named {name[:20]}": (in_evaluation(scored(name)), "which is no score of this run")
        for name in ("client", "round", "weight", "train.made_up", "train.loss.mean", "x" * 5000)
    },
    "a score that is a dict": (
        in_evaluation(lambda part, tensors, packer: part["reply"].update(scores={"train.loss": {"a": "0"}})),
        "its scores is not a dict of numbers",
    ),
    "many scores": (
        in_evaluation(
            lambda part, tensors, packer: part["reply"].update(
                scores={f"train.made up {k}": packer.add(torch.tensor(0.5)) for k in range(2_000)}
            )
        ),
        "which is no score of this run",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_rows_9_and_13_a_site_that_sends_anything_is_left_out(
    attack: str, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """The server ended with a raw exception, or recorded what made a resume fail, or held hundreds of megabytes."""
    tamper, reason = ATTACKS[attack]
    attacked(three_clients, tmp_path, config("comfedl-kl", rounds=6), tamper, reason)
    assert all(len(line) < 10_000 for line in (tmp_path / "run" / "sites.jsonl").read_text().splitlines())
    serve(grid_of(three_clients, tmp_path / "sites"), config("comfedl-kl", rounds=7), tmp_path / "run", resume=True)


def test_row_13_an_error_text_is_cut(
    three_clients: cf.FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text of 20 MB was written twice."""

    def shouts(message: Message, reply: Message) -> Message:
        return Message(serialization.encode({"error": "no\x1b[31m\n" * 50_000}), reply_to=message)

    grid = grid_of(three_clients, tmp_path / "sites")
    grid.tamper[only(grid, "b")] = in_round(2, shouts)
    serve(grid, config(), tmp_path / "run")
    assert max(map(len, caplog.messages)) < 1000 and "\x1b" not in caplog.text
    assert (tmp_path / "run" / "sites.jsonl").stat().st_size < 10_000


def test_row_9_the_order_of_names_does_not_matter(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    """Distances and sums go through the tensors in order, so a site could mix them up."""

    def reversed_names(message: Message, reply: Message) -> Message:
        return forged(
            with_params(lambda model: {part: dict(reversed(model[part].items())) for part in reversed(model)})
        )(message, reply)

    settings = config(algorithm={"name": "fedavg", "aggregate": "geometric-median", "clip_update_norm": 0.01})
    plain = serve(grid_of(three_clients, tmp_path / "one"), settings)
    grid = grid_of(three_clients, tmp_path / "two")
    grid.tamper[only(grid, "b")] = lambda message, reply: (
        reply if message.metadata.group_id == "who" else reversed_names(message, reply)
    )
    result = serve(grid, settings)
    assert all(torch.equal(part, plain.params[name]) for name, part in result.params.items())


def test_row_13_a_header_that_promises_too_much_is_refused() -> None:
    header = json.dumps({"0": {"dtype": "F64", "shape": [2**50], "data_offsets": [0, 2**53]}}).encode()
    content = struct.pack("<Q", len(header)) + header
    record = ArrayRecord({"all": Array("uint8", (len(content),), serialization.KIND, content)})
    encoded: RecordDict = serialization.encode({}, record)
    with pytest.raises(cf.utils.errors.MalformedMessage, match="it cannot be read"):
        serialization.decode(encoded, 1000)


def test_row_9_models_that_are_not_finite_are_still_refused(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    attacked(three_clients, tmp_path, config(rounds=6), altered(lambda leaf: leaf * math.inf), "not finite")


def test_a_trial_that_fails_leaves_a_folder_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One called like that of the clients' states was removed with all that was in it."""

    def fail(self: LocalTrial) -> None:
        raise cf.ConfigError("no link")

    monkeypatch.setattr(LocalTrial, "start_link", fail)
    (tmp_path / "out" / "sites").mkdir(parents=True)
    (tmp_path / "out" / "sites" / "mine.txt").write_text("mine")
    data = {"name": "digits", "partition": "iid", "clients": 2}
    with pytest.raises(cf.ConfigError, match="no link"):
        run_local(parse_config({"data": data, "algorithm": {"name": "fedavg"}}), tmp_path / "out")
    assert (tmp_path / "out" / "sites" / "mine.txt").read_text() == "mine"
