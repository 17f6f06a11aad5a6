"""Structured inputs and transforms at sites: the embedded engine's run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

from test_flower import assert_same

import comfedl as cf
from comfedl.config.schema import Config, parse_config
from comfedl.flower.registry import read_shape
from comfedl.flower.server import serve
from comfedl.flower.site_file import load_site, save_site
from comfedl.utils import samples, tree
from helpers.in_process import alone, grid_of
from helpers.inputs import CASES, MODELS, rolled

LOSSES = {"two outputs": {"loss": "helpers.inputs:both_losses", "metrics": ["helpers.inputs:hits"]}}
METHODS = {
    "robust": {"name": "robust", "gamma": 0.3},
    "adapt": {"name": "comfedl", "inner": {"lr": 0.05}, "outer": {"name": "kl", "gamma": 0.5}},
    "ditto": {"name": "ditto"},
}


def config(name: str, method: str, **more: Any) -> Config:
    return parse_config(
        {
            "rounds": 3,
            "seed": 3,
            "data": {"name": "sites", "classes": 3},
            "model": {"name": f"helpers.inputs:{MODELS[name]}"},
            "algorithm": {**METHODS[method], "batch_size": 4, "local_steps": 2, "lr": 0.1},
            "flower": {"deadline": 0.5, "patience": 1.0},
            "transform": "helpers.inputs:rolled",
            **LOSSES.get(name, {}),
            **more,
        }
    )


def embedded(settings: Config, fed: cf.FederatedData) -> cf.Result:
    return cf.fit(
        settings.make_model(fed),
        fed,
        settings.make_algorithm(),
        rounds=settings.rounds,
        seed=settings.seed,
        loss=settings.make_loss(),
        metrics=settings.make_metrics(),
        transform=rolled,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_sites_give_the_embedded_run(name: str, method: str, tmp_path: Path) -> None:
    settings, fed = config(name, method), CASES[name].data()
    assert_same(serve(grid_of(fed, tmp_path), settings), embedded(settings, fed), 1e-10)


def test_a_resumed_run_at_sites(tmp_path: Path) -> None:
    fed, out = CASES["dict"].data(), tmp_path / "run"
    grid = grid_of(fed, tmp_path / "states")
    serve(grid, config("dict", "ditto", rounds=2), out)
    sites = json.loads((out / "sites.json").read_text())
    assert sites["shape"] == {"ids": [6], "mask": [6], "numbers": [2]}
    assert 'transform = "helpers.inputs:rolled"' in (out / "config.toml").read_text()
    settings = config("dict", "ditto", rounds=4)
    assert_same(serve(grid, settings, out, resume=True), embedded(settings, fed), 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_data_of_a_local_trial(name: str, tmp_path: Path) -> None:
    fed = CASES[name].data()
    save_site(tmp_path / "site", fed, "b")
    found = load_site({"data": str(tmp_path / "site")})
    wanted = alone(fed, "b")
    for split in ("train", "validation"):
        pair, other = found.split(split), wanted.split(split)
        assert pair is not None and other is not None
        assert samples.structure(pair.x) == samples.structure(other.x)
        assert all(bool((a == b).all()) for a, b in zip(*(tree.leaves((s.x, s.y)) for s in (pair, other)), strict=True))


@pytest.mark.parametrize("shape", [(4,), (), ((3,), (2, 5)), {"ids": (6,), "mask": ()}])
def test_shapes_survive_json(shape: Any) -> None:
    assert read_shape(json.loads(json.dumps(shape))) == shape


@pytest.mark.parametrize(
    "bad",
    [
        *("4", None, 4, [1, "2"], [[1], 2], [[[1]]], [True], [2**31]),
        *({"a": 3}, {"a": [-1]}, {}, {"": [1]}, {"a\n": [1]}, {"a": [1] * 9}, {str(k): [1] for k in range(101)}),
    ],
)
def test_bad_shapes_from_a_site(bad: Any) -> None:
    with pytest.raises(ValueError):
        read_shape(bad)
