"""comfedl advise: what each gamma would do, from one pass over the clients' losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.analysis.gamma_advice import advise, draw
from comfedl.cli.main import main
from comfedl.config.schema import parse_config, run_config
from comfedl.utils.toml import to_toml

DATA = {"name": "digits", "partition": "dirichlet", "clients": 6, "alpha": 0.2}
METHOD = {"name": "comfedl", "lr": 0.3, "outer": {"name": "kl", "gamma": 0.3}}


def settings(**changes: Any) -> dict[str, Any]:
    return {"rounds": 5, "data": DATA, "algorithm": METHOD, **changes}


def test_the_losses_are_those_after_plain_averaging() -> None:
    found = advise(parse_config(settings()), warmup=3)
    plain = run_config(parse_config(settings(rounds=3, algorithm={"name": "comfedl", "lr": 0.3})))
    last = [row["train.loss"] for row in plain.clients if row["round"] == 3]
    assert found.losses == pytest.approx(last, rel=1e-5)
    assert list(found.names) == list(plain.names)
    # The same for a method that has no outer function: what KL would do in its place.
    other = advise(parse_config(settings(algorithm={"name": "fedavg", "lr": 0.3})), warmup=3)
    assert other.losses == pytest.approx(last, rel=1e-5) and other.chosen is None


def test_each_gamma_is_what_kl_would_do() -> None:
    found = advise(parse_config(settings()), warmup=3)
    losses = torch.from_numpy(found.losses)
    assert [option.gamma for option in found.options] == sorted({0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0})
    for option in found.options:
        r = cf.KL(option.gamma).weights(losses).numpy()
        assert option.weights == pytest.approx(r)
        assert option.effective == pytest.approx(1 / (r**2).sum())
        assert option.noise == pytest.approx(6 * (r**2).sum())
        assert option.loss == pytest.approx(float(r @ found.losses))
    numbers = [option.effective for option in found.options]
    assert numbers == sorted(numbers)
    gamma = found.gamma_for(3)
    assert 1 / (cf.KL(gamma).weights(losses) ** 2).sum() == pytest.approx(3)


def test_the_noise_is_the_variance_of_a_weighted_mean() -> None:
    """The formula against draws: means of independent numbers of variance 1, weighted and not."""
    option = advise(parse_config(settings()), warmup=3, gammas=[0.5]).options[-1]
    draws = np.random.default_rng(0).normal(size=(200_000, 6))
    ratio = (draws @ option.weights).var() / draws.mean(axis=1).var()
    assert ratio == pytest.approx(option.noise, rel=0.02)


def test_some_of_the_clients() -> None:
    found = advise(parse_config(settings(clients_per_round=2)), warmup=2, gammas=[1e-6, 1e6])
    sharp, flat = found.options[0], found.options[-1]
    assert flat.effective == pytest.approx(2) and flat.noise == pytest.approx(1)
    # With two of six, the worse of the two takes all: noise doubles, and the best client never has a weight.
    assert sharp.effective == pytest.approx(1) and sharp.noise == pytest.approx(2)
    assert sharp.weights[found.losses.argmin()] == pytest.approx(0)
    assert sharp.weights[found.losses.argmax()] == pytest.approx(1 / 3, abs=0.08)
    assert sharp.weights.sum() == pytest.approx(1)


def test_equal_losses_are_told() -> None:
    found = advise(parse_config(settings()), warmup=0)
    assert found.equal and found.losses == pytest.approx([np.log(10)] * 6)
    assert all(option.effective == pytest.approx(6) for option in found.options)


def test_a_wanted_number_shows_its_gamma() -> None:
    method = {"name": "comfedl", "lr": 0.3, "outer": {"name": "kl", "effective_clients": 2.5}}
    found = advise(parse_config(settings(algorithm=method)), warmup=3)
    chosen = next(option for option in found.options if option.gamma == found.chosen)
    assert chosen.effective == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["comfedl-damaml", "drfa", "q-fedavg"])
def test_other_methods(name: str) -> None:
    arguments = {"adapt_lr": 0.1, "gamma": 0.5} if name == "comfedl-damaml" else {}
    found = advise(parse_config(settings(algorithm={"name": name, "lr": 0.2, **arguments})), warmup=1)
    assert np.isfinite(found.losses).all() and not found.equal


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(to_toml(settings()))
    monkeypatch.setattr("sys.argv", ["comfedl", "advise", "config.toml", "--warmup", "2", "--png", "gamma.png"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert not ended.value.code and "0.3 (config)" in said and "effective_clients = 3" in said
    assert Path("gamma.png").read_bytes()[:4] == b"\x89PNG"
    for option, value in (("--warmup", "-1"), ("--gamma", "0")):
        monkeypatch.setattr("sys.argv", ["comfedl", "advise", "config.toml", option, value])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2


def test_a_picture_of_many_clients(tmp_path: Path) -> None:
    found = advise(parse_config(settings()), warmup=1, gammas=[0.1])
    draw(found, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
