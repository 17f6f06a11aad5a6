"""Sites behind Flower, without a network: the embedded run's numbers, and what happens when a site fails."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from torch import nn

import comfedl as cf
from comfedl.config import Config, parse_config
from comfedl.engines.flower import wire
from comfedl.models import mlp
from comfedl.sites.server import serve

sys.path.insert(0, str(Path(__file__).parent))
from in_process import InProcess, alone, grid_of  # noqa: E402


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
    more = {"eval_every": settings.eval_every, "eval_clients": settings.eval_clients}
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
def test_the_embedded_numbers(
    method: str, model: str, within: float, three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    settings = config(method, model)
    grid = grid_of(three_clients, tmp_path)
    assert_same(serve(grid, settings), embedded(settings, three_clients), within)


def test_few_clients_a_round_and_few_evaluations(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    settings = config("ditto", rounds=5, clients_per_round=2, eval_every=2, eval_clients=2)
    assert_same(serve(grid_of(three_clients, tmp_path), settings), embedded(settings, three_clients), 1e-12)


def test_a_round_is_one_message(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path)
    serve(grid, config("comfedl-kl"))
    groups = [group for _, group in grid.seen]
    # The last round's scores have no training to ride on.
    assert {group: groups.count(group) for group in groups} == {
        "who": 3,
        **{f"round {k}": 3 for k in (1, 2, 3)},
        "round 4": 6,
    }


def test_no_sample_is_among_the_bytes(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    grid = grid_of(three_clients, tmp_path)
    serve(grid, config("ditto"))
    passed = b"".join(grid.bytes)
    assert len(passed) > 10_000
    for name in three_clients.names:
        for split in (three_clients.train, three_clients.validation):
            assert split is not None
            for value in split[name][0].flatten():
                for dtype in (torch.float64, torch.float32):
                    assert value.to(dtype).numpy().tobytes() not in passed
                assert repr(float(value)).encode() not in passed
    # The same search does find what travels.
    assert serve(grid, config()).params["1.weight"].numpy().tobytes() in b"".join(grid.bytes)
