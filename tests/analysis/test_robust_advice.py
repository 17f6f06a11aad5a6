"""comfedl advise: the effect of each gamma, computed from the client losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.analysis.robust_advice import advise, plot_advice
from comfedl.cli.main import main
from comfedl.config.schema import parse_config, run_config
from comfedl.core.simplex import effective_gamma
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
    assert other.losses == pytest.approx(last, rel=1e-5) and other.config_gamma is None


def test_each_gamma_is_what_kl_would_do() -> None:
    found = advise(parse_config(settings()), warmup=3)
    losses = torch.from_numpy(found.losses)
    assert [effect.gamma for effect in found.effects] == sorted({0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0})
    for effect in found.effects:
        r = cf.KL(effect.gamma).weights(losses).numpy()
        assert effect.weights == pytest.approx(r)
        assert effect.effective == pytest.approx(1 / (r**2).sum())
        assert effect.noise == pytest.approx(6 * (r**2).sum())
        assert effect.loss == pytest.approx(float(r @ found.losses))
    numbers = [effect.effective for effect in found.effects]
    assert numbers == sorted(numbers)
    gamma = effective_gamma(torch.from_numpy(found.losses), 3)
    assert 1 / (cf.KL(gamma).weights(losses) ** 2).sum() == pytest.approx(3)


def test_the_noise_is_the_variance_of_a_weighted_mean() -> None:
    """The formula against draws: means of independent numbers of variance 1, weighted and not."""
    effect = advise(parse_config(settings()), warmup=3, gammas=[0.5]).effects[-1]
    draws = np.random.default_rng(0).normal(size=(200_000, 6))
    ratio = (draws @ effect.weights).var() / draws.mean(axis=1).var()
    assert ratio == pytest.approx(effect.noise, rel=0.02)


def test_some_of_the_clients() -> None:
    found = advise(parse_config(settings(clients_per_round=2)), warmup=2, gammas=[1e-6, 1e6])
    sharp, flat = found.effects[0], found.effects[-1]
    assert flat.effective == pytest.approx(2) and flat.noise == pytest.approx(1)
    # With two of six, the worse of the two takes all: noise doubles, and the best client never has a weight.
    assert sharp.effective == pytest.approx(1) and sharp.noise == pytest.approx(2)
    assert sharp.weights[found.losses.argmin()] == pytest.approx(0)
    assert sharp.weights[found.losses.argmax()] == pytest.approx(1 / 3, abs=0.08)
    assert sharp.weights.sum() == pytest.approx(1)


def test_equal_losses_are_told() -> None:
    found = advise(parse_config(settings()), warmup=0)
    assert found.equal_losses and found.losses == pytest.approx([np.log(10)] * 6)
    assert all(effect.effective == pytest.approx(6) for effect in found.effects)


def test_a_wanted_number_shows_its_gamma() -> None:
    method = {"name": "comfedl", "lr": 0.3, "outer": {"name": "kl", "effective_clients": 2.5}}
    found = advise(parse_config(settings(algorithm=method)), warmup=3)
    chosen = next(effect for effect in found.effects if effect.gamma == found.config_gamma)
    assert chosen.effective == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["comfedl-damaml", "drfa", "q-fedavg"])
def test_other_methods(name: str) -> None:
    arguments = {"adapt_lr": 0.1, "gamma": 0.5} if name == "comfedl-damaml" else {}
    found = advise(parse_config(settings(algorithm={"name": name, "lr": 0.2, **arguments})), warmup=1)
    assert np.isfinite(found.losses).all() and not found.equal_losses


def turned() -> cf.FederatedData:
    """Three alike sites and one whose labels mean something else."""
    generator = torch.Generator().manual_seed(0)

    def site(flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(200, 4, generator=generator)
        return x, ((x[:, 0] > 0) ^ flip).long()

    kinds = {"a": False, "b": False, "c": False, "other": True}
    return cf.FederatedData(*({name: site(flip) for name, flip in kinds.items()} for _ in range(2)))


def noisy() -> cf.FederatedData:
    """Four sites of one kind, at one of which half of the labels are guesses: hard, and not outvoted."""
    generator = torch.Generator().manual_seed(0)

    def site(hard: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(200, 4, generator=generator)
        guess = torch.rand(200, generator=generator) < 0.5
        y = (x[:, 0] > 0).long()
        return x, torch.where(guess, torch.randint(0, 2, (200,), generator=generator), y) if hard else y

    kinds = {"a": False, "b": False, "c": False, "hard": True}
    return cf.FederatedData(*({name: site(hard) for name, hard in kinds.items()} for _ in range(2)))


@pytest.mark.parametrize(("data", "expected"), [("turned", ["other"]), ("noisy", [])])
def test_who_is_outvoted(data: str, expected: list[str]) -> None:
    config = parse_config(settings(data={"name": f"{__name__}:fed_{data}"}))
    found = advise(config, warmup=20, gammas=[0.1])
    assert [fit.client for fit in found.outvoted] == expected
    assert found.split == "validation" and {fit.samples for fit in found.fits} == {200}
    worst = max(found.fits, key=lambda fit: fit.loss)
    assert worst.client == ("other" if expected else "hard")


def fed_turned(seed: int) -> cf.FederatedData:
    return turned()


def fed_noisy(seed: int) -> cf.FederatedData:
    return noisy()


def test_the_losses_say_on_how_many_samples_they_are_and_how_sure_they_are() -> None:
    """As the same run's own table by client says."""
    data = {**DATA, "validation": 0.25, "test": 0.0}
    found = advise(parse_config(settings(data=data)), warmup=3)
    plain = run_config(parse_config(settings(rounds=3, data=data, algorithm={"name": "comfedl", "lr": 0.3})))
    table = plain.clients_table("validation")
    for fit, row in zip(found.fits, table, strict=True):
        assert fit.judged_on == row["validation_samples"]
        assert fit.interval == pytest.approx(table.interval(row, "loss"), rel=1e-5)
        assert fit.interval is not None and fit.interval[0] < fit.loss < fit.interval[1]
    assert list(found.about_worst) == table.about_worst("loss")
    assert "95 % interval" in found.about_worst[0] and "samples" in found.about_worst[0]


def test_nobody_can_be_said_to_be_outvoted() -> None:
    """Before any round, or with an objective that adapts to each client already."""
    assert not advise(parse_config(settings()), warmup=0).fits
    adapted = {"name": "comfedl", "lr": 0.3, "inner": {"name": "adapt", "lr": 0.1}}
    assert not advise(parse_config(settings(algorithm=adapted)), warmup=2).fits


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(to_toml(settings()))
    monkeypatch.setattr("sys.argv", ["comfedl", "advise", "config.toml", "--warmup", "2", "--png", "gamma.png"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert not ended.value.code and "0.3 (config)" in said and "Outvoted: " in said
    assert "validation samples" in said and "Worst client by validation loss: " in said
    assert Path("gamma.png").read_bytes()[:4] == b"\x89PNG"
    for option, value in (("--warmup", "-1"), ("--gamma", "0")):
        monkeypatch.setattr("sys.argv", ["comfedl", "advise", "config.toml", option, value])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2


def test_a_picture_of_many_clients(tmp_path: Path) -> None:
    found = advise(parse_config(settings()), warmup=1, gammas=[0.1])
    plot_advice(found, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
