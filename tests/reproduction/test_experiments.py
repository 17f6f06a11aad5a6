"""The settings of the figures: the paper's values where published, equal budgets, separate seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfedl.config.schema import parse_config
from comfedl.utils.errors import ConfigError
from comfedl_reproduction import FIGURES, experiments
from comfedl_reproduction.experiments import Figure, merged, read_figure

LEAST_SEEDS = {"fig2": 3, "fig3": 3, "fig4": 3, "fig5": 2, "fig6": 2}


def paper(name: str) -> Figure:
    return read_figure(name, "paper")


@pytest.mark.parametrize("name", FIGURES)
def test_shipped_figures_are_complete(name: str) -> None:
    figure = paper(name)
    assert figure.seeds >= LEAST_SEEDS[name]
    assert figure.seeds <= experiments.FIRST_TUNING_SEED
    assert len({arm.name for arm in figure.arms}) == len(figure.arms)
    assert {arm.group for arm in figure.arms} == set(figure.groups)
    for arm in figure.arms:
        if arm.like is not None:
            source = paper(arm.like.split("/")[0]).arm(arm.like)
            parse_config(merged(merged(source.settings, source.candidates[0]), arm.changes))


@pytest.mark.parametrize("name", FIGURES)
def test_quick_preset_needs_no_download(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "is_cached", lambda data: False)
    figure = read_figure(name, "quick")
    # The title says which data the plot really shows.
    assert figure.title.startswith("digits instead of") == (figure.data != paper(name).data)
    for arm in figure.arms:
        source = arm if arm.like is None else read_figure(arm.like.split("/")[0], "quick").arm(arm.like)
        config = parse_config(merged(merged(source.settings, source.candidates[0]), arm.changes))
        assert config.data.name == "digits"
        assert len(config.make_data()) == 10
    assert read_figure(name, "paper").data != "digits"


def test_published_values() -> None:
    fig2, fig4 = paper("fig2"), paper("fig4")
    published = {arm.method: parse_config(merged(arm.settings, arm.candidates[0])) for arm in fig2.arms[:5]}
    assert [arm.group for arm in fig2.arms[:5]] == ["published"] * 5
    for method, config in published.items():
        resolved = config.resolved()
        assert resolved["data"]["clients"] == 10
        assert (resolved["data"]["large"], resolved["data"]["small"]) == (5000, 20)
        assert (resolved["algorithm"]["lr"], resolved["algorithm"]["local_steps"]) == (0.01, 5)
        own = {"comfedl": ("outer", {"name": "kl", "gamma": 0.2}), "literal": ("outer", {"name": "exp", "gamma": 0.2})}
        own |= {"drfa": ("dual_lr", 0.08), "q-fedavg": ("q", 0.2), "fedavg": ("lr", 0.01)}
        key, value = own[method]
        assert resolved["algorithm"][key] == value
    firsts = {arm.method: arm.candidates[0]["algorithm"] for arm in fig4.arms if arm.tuned}
    ours = {"robust", "fedmaml-momentum"}  # series that are not in the paper
    assert {method: values for method, values in firsts.items() if method not in ours} == {
        "fedavg": {"lr": 0.1},
        "fedmaml": {"lr": 0.1, "adapt_lr": 0.1},
        "tr-maml": {"lr": 0.1, "adapt_lr": 0.05, "dual_lr": 0.08},
        "ditto": {"lr": 0.2, "lam": 0.1},
        "damaml": {"lr": 0.1, "adapt_lr": 0.05, "gamma": 0.5},
    }
    assert all(arm.settings["data"]["rho"] == 0.28 for arm in fig4.arms if arm.tuned)


def test_unequal_budgets_are_refused(small: Path) -> None:
    path = small / "fig2.toml"
    path.write_text(
        path.read_text().replace("[{ lr = 0.001 }, { lr = 0.5 }]", "[{ lr = 0.1 }, { lr = 0.2 }, { lr = 1.0 }]")
    )
    with pytest.raises(ConfigError, match=r"2, 3.* the same"):
        read_figure("fig2", "quick")


def test_settings_are_checked_before_anything_runs(small: Path) -> None:
    path = small / "fig2.toml"
    path.write_text(path.read_text().replace("{ lr = 0.5 }", "{ lrr = 0.5 }"))
    with pytest.raises(ConfigError, match="lrr"):
        read_figure("fig2", "quick")


def test_preset_skips_groups_and_methods(small: Path) -> None:
    path = small / "fig2.toml"
    path.write_text(path.read_text().replace("seeds = 2\n", 'seeds = 2\nskip = ["published", "fedavg"]\n'))
    assert [arm.name for arm in read_figure("fig2", "quick").arms] == ["fig2/independent/comfedl"]
