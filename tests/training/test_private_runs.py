"""Private runs: their records, folder and resumes, on every engine, and from the command line."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import comfedl as cf
from comfedl.analysis.compare import run_comparison
from comfedl.analysis.read_runs import read_run
from comfedl.analysis.report_content import report_contents
from comfedl.cli.main import app
from comfedl.config.schema import parse_config, run_config
from comfedl.core.accounting import Accountant
from comfedl.core.privacy import NOT_COVERED
from comfedl.utils.errors import ConfigError, RunFolderError
from helpers.ranks import assert_close, forked
from helpers.stopped import StopAt, files

SETTINGS: dict[str, Any] = {
    "rounds": 8,
    "clients_per_round": 6,
    "eval_every": 2,
    "data": {"name": "digits", "partition": "dirichlet", "clients": 12, "alpha": 1.0},
    "algorithm": {"name": "robust", "gamma": 0.2, "cap": 3.0},
    "privacy": {"clip": 0.3, "noise_multiplier": 1.5, "delta": 0.01, "sampling": "poisson", "quantile": 0.5},
}


def federated(clients: int = 8) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(0)

    def client() -> tuple[Tensor, Tensor]:
        x = torch.randn(20, 6, generator=generator)
        return x, (x[:, 0] > 0).long()

    return cf.FederatedData({f"c{k}": client() for k in range(clients)}, {f"c{k}": client() for k in range(clients)})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def train(privacy: cf.DP | None, method: Any = None, **more: Any) -> cf.Result:
    method = method or cf.Robust(0.2, cap=3.0)
    return cf.fit(net(), federated(), method, privacy=privacy, **{"rounds": 8, "eval_every": 2, **more})


DP = cf.DP(0.3, 1.5, 0.01, sampling="poisson", quantile=0.5)


def test_the_records_say_what_each_round_has_used(tmp_path: Path) -> None:
    run = train(DP, clients_per_round=4, out=tmp_path / "run")
    accountant = Accountant(DP, 8, 4)
    assert [row["epsilon"] for row in run.rounds] == [accountant.epsilon(k) for k in (2, 4, 6, 8)]
    assert {row["delta"] for row in run.rounds} == {0.01}
    assert run.privacy is not None and run.privacy.epsilon == accountant.epsilon(8)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert summary == {"epsilon": accountant.epsilon(8), "delta": 0.01, "rounds": 8, "not_covered": NOT_COVERED}
    assert f"Not covered: {NOT_COVERED}" in run.notes()[-1]
    assert f"epsilon {run.privacy.epsilon:.3g} at delta 0.01" in repr(run)
    assert "epsilon" not in train(None).rounds[0] and train(None).privacy is None


def test_a_stopped_run_goes_on_with_the_same_noise(tmp_path: Path) -> None:
    """To the bit, though no seed gives the noise: the key is in the folder, for its owner's eyes."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(DP, clients_per_round=4, out=tmp_path / "one", callbacks=[StopAt(5, KeyboardInterrupt())])
    key = tmp_path / "one" / "comfedl-noise.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(bytes.fromhex(key.read_text())) == 32
    # Another run of this key, that is not stopped.
    with pytest.raises(KeyboardInterrupt):
        train(DP, clients_per_round=4, out=tmp_path / "two", callbacks=[StopAt(1, KeyboardInterrupt())])
    for path in (tmp_path / "two").glob("checkpoint/*/*"):
        path.unlink()
    for path in (tmp_path / "two").glob("checkpoint/*"):
        path.rmdir()
    (tmp_path / "two" / "comfedl-noise.key").write_text(key.read_text())
    for name in ("one", "two"):
        train(DP, clients_per_round=4, out=tmp_path / name, resume=True)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    for path in [*(tmp_path / "one").rglob("*")]:
        if path.is_file() and path != key:
            assert key.read_text().encode() not in path.read_bytes()


def test_without_its_key_a_run_cannot_go_on_and_a_new_run_has_a_new_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(DP, clients_per_round=4, out=out)
    key = (out / "comfedl-noise.key").read_text()
    train(DP, clients_per_round=4, out=out, force=True)
    assert (out / "comfedl-noise.key").read_text() != key
    (out / "comfedl-noise.key").unlink()
    with pytest.raises(RunFolderError, match="the key of this run's noise, cannot be read"):
        train(DP, clients_per_round=4, out=out, resume=True, rounds=10)


def test_a_run_that_was_killed_before_its_key_was_written_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(DP, clients_per_round=4, out=out, callbacks=[StopAt(1, KeyboardInterrupt())], checkpoint_every=100)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    (out / "comfedl-noise.key").unlink()
    train(DP, clients_per_round=4, out=out, resume=True, checkpoint_every=100)
    assert len(bytes.fromhex((out / "comfedl-noise.key").read_text())) == 32


def test_to_resume_a_plain_run_with_privacy_is_another_config(tmp_path: Path) -> None:
    train(None, out=tmp_path / "run")
    with pytest.raises(RunFolderError, match="holds a run with another config"):
        train(DP, out=tmp_path / "run", resume=True)


def test_a_folder_private_of_the_user_s_own_stays(tmp_path: Path) -> None:
    own = tmp_path / "run" / "private" / "notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    train(DP, clients_per_round=4, out=tmp_path / "run")  # such a folder is free
    train(DP, clients_per_round=4, out=tmp_path / "run", force=True)
    assert own.read_text() == "mine"
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["notes.txt"]


def test_more_rounds_cost_more_and_another_noise_is_another_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(DP, clients_per_round=4, out=out)
    longer = train(DP, clients_per_round=4, out=out, resume=True, rounds=12)
    assert first.privacy is not None and longer.privacy is not None
    assert longer.privacy.epsilon == Accountant(DP, 8, 4).epsilon(12) and longer.privacy.rounds == 12
    assert [row["epsilon"] for row in longer.rounds][:4] == [row["epsilon"] for row in first.rounds]
    with pytest.raises(RunFolderError, match=r"privacy.noise_multiplier = 1.5 in the folder"):
        louder = cf.DP(0.3, 0.5, 0.01, sampling="poisson", quantile=0.5)
        train(louder, clients_per_round=4, out=out, resume=True, rounds=14)


def test_a_run_that_stops_early_has_used_all_its_rounds() -> None:
    stop = cf.EarlyStopping("validation.accuracy.worst", patience=4)
    run = train(cf.DP(0.3, 50.0, 0.01, noise_seed=1), rounds=60, stop=stop)
    assert run.stopped is not None and run.privacy is not None and run.round < run.rounds[-1]["round"]
    assert run.privacy.rounds == run.rounds[-1]["round"]
    assert run.privacy.epsilon == run.rounds[-1]["epsilon"] != run.row["epsilon"]
    assert "the choice of the round by early stopping" in str(run.privacy)
    assert "noise_seed" in str(run.privacy)


def test_a_noise_seed_repeats_a_run() -> None:
    seeded = cf.DP(0.3, 1.5, 0.01, sampling="poisson", noise_seed=4)
    one, other = (train(seeded, clients_per_round=4) for _ in range(2))
    assert one.rounds == other.rounds and one.clients == other.clients
    free = train(cf.DP(0.3, 1.5, 0.01, sampling="poisson"), clients_per_round=4)
    assert free.params["weight"].tolist() != one.params["weight"].tolist()


def test_a_delta_that_allows_a_client_to_be_given_away_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="use a delta well below 0.12"):
        train(cf.DP(0.3, 1.5, 0.2))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_on_several_ranks_the_noise_is_added_once() -> None:
    method = cf.FedAvg(weighting="uniform")
    plain, alone = train(cf.DP(0.3, 0.0, 0.01), method, rounds=1), train(DP, clients_per_round=4)

    def rank(number: int) -> Any:
        seeded = [cf.DP(0.3, 1.5, 0.01, noise_seed=seed) for seed in range(12)]
        return [train(privacy, method, rounds=1, engine="distributed").params for privacy in seeded]

    def own_keys(number: int) -> Any:
        run = train(DP, clients_per_round=4, engine="distributed")
        assert [row["epsilon"] for row in run.rounds] == [row["epsilon"] for row in alone.rounds]
        return run.params

    # The noise itself is another than on one process, since the last bits of the sums are.
    runs, same = forked(2, rank)
    noise = torch.cat([(run[name] - part).reshape(-1) for run in runs for name, part in plain.params.items()])
    assert 0.8 < float(noise.std()) / (1.5 * 0.3 / 8) < 1.2  # twice would be 1.41
    assert all(torch.equal(run[name], again[name]) for run, again in zip(runs, same, strict=True) for name in run)
    one, other = forked(2, own_keys)  # the key is the first rank's
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_over_sites_the_server_adds_the_noise_and_sites_learn_nothing_of_it(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")
    from comfedl.flower.server import serve
    from helpers.in_process import grid_of

    seeded = {**SETTINGS["privacy"], "noise_seed": 987654321}
    settings = {**SETTINGS, "rounds": 3, "privacy": seeded, "model": {"name": "logistic"}}
    fed = parse_config(settings).make_data()
    # Its replies are added up one by one, as those of sites: in another order the sums' last bits, and so the noise,
    # would be others.
    embedded = run_config(parse_config({**settings, "embedded": {"vectorize": "serial"}}))
    data = {"name": "sites"}
    at_sites = {**settings, "engine": "flower", "data": data, "flower": {"outputs": 10}}
    grid = grid_of(fed, tmp_path / "states")
    served = serve(grid, parse_config(at_sites), tmp_path / "run")
    assert_close(dict(served.params), dict(embedded.params), 1e-3)
    assert served.privacy == embedded.privacy
    assert not any(b"987654321" in sent or b"noise_multiplier" in sent for sent in grid.sent)


# The command line.


def toml(tmp_path: Path, more: str = "", privacy: str = "") -> Path:
    path = tmp_path / "private.toml"
    table = privacy or '[privacy]\nclip = 0.3\nnoise_multiplier = 1.5\ndelta = 0.01\nsampling = "poisson"\n'
    path.write_text(
        f'rounds = 8\nclients_per_round = 6\n{more}\n[data]\nname = "digits"\npartition = "dirichlet"\nclients = 12\n'
        f'alpha = 1.0\n[algorithm]\nname = "fedavg"\nweighting = "uniform"\n{table}'
    )
    return path


def test_the_command_gives_the_noise_for_an_epsilon_and_a_run_keeps_to_it(tmp_path: Path) -> None:
    path = toml(tmp_path)
    said = CliRunner().invoke(app, ["privacy", str(path), "--epsilon", "3"], catch_exceptions=False).output
    noise = float(said.split("noise_multiplier = ")[1].split()[0])
    assert "keeps epsilon at 3 or less over 8 rounds" in said and f"Not covered: {NOT_COVERED}" in said
    assert "650 parameters" in said
    change = ["--set", f"privacy.noise_multiplier={noise}", "--out", str(tmp_path / "run")]
    printed = CliRunner().invoke(app, ["run", str(path), *change], catch_exceptions=False).output
    used = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["epsilon"]
    assert 2.9 < used <= 3
    assert f"{used:.3g} (delta 0.01)" in printed and "Not covered" in printed
    longer = CliRunner().invoke(app, ["privacy", str(path), "--rounds", "100"], catch_exceptions=False).output
    assert "100" in longer and "keeps" not in longer


@pytest.mark.parametrize(
    ("arguments", "privacy", "says"),
    [
        (["--epsilon", "0"], "", "--epsilon is 0.0"),
        (["--rounds", "0"], "", "--rounds is 0"),
        ([], "\n", "give --delta"),
        ([], "[privacy]\nnoise_multiplier = 0.0\ndelta = 0.01\nclip = 1.0\n", "give --epsilon"),
        ([], "[privacy]\nnoise = 1.0\n", "privacy.noise is not a key of dp"),
        ([], "[privacy]\nclip = 1.0\ndelta = 0.1\n", "privacy.noise_multiplier is missing"),
        ([], '[privacy]\nclip = "1"\nnoise_multiplier = 1.0\ndelta = 0.1\n', "privacy.clip is '1'"),
    ],
)
def test_the_command_refuses_in_a_sentence(tmp_path: Path, arguments: list[str], privacy: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(app, ["privacy", str(toml(tmp_path, privacy=privacy)), *arguments], catch_exceptions=False)


def test_a_comparison_and_a_report_show_epsilon_beside_the_results(tmp_path: Path) -> None:
    private = parse_config(SETTINGS)
    plain = parse_config({key: value for key, value in SETTINGS.items() if key != "privacy"})
    found = run_comparison({"private": private, "plain": plain}, 1, "validation", tmp_path, progress=False)
    epsilon = found.rows["private"][0]["epsilon"]
    assert isinstance(epsilon, float) and found.spent() == {"private": f"{epsilon:.3g} (delta 0.01)"}
    assert NOT_COVERED in found.notes()[-1]
    from comfedl.analysis.read_runs import Method
    from comfedl.cli.tables import show_comparison

    table, _ = show_comparison(found)
    assert table.columns[-1].header == "epsilon of a run" and [*table.columns[-1].cells][1] == "-"
    methods = [Method(name, [read_run(tmp_path / name / "seed-0")]) for name in ("private", "plain")]
    contents = report_contents(methods)
    assert contents["table"]["columns"][-1] == "epsilon"
    assert contents["table"]["rows"][0]["cells"][-1]["value"] == pytest.approx(epsilon, rel=1e-4)
    assert any(NOT_COVERED in said for said in contents["verdict"])
    again = run_comparison({"private": private, "plain": plain}, 1, "validation", tmp_path, resume=True, progress=False)
    assert again.rows["private"][0]["epsilon"] == epsilon


def test_a_config_s_table_is_written_and_read_back() -> None:
    config = parse_config(SETTINGS)
    assert config.resolved()["privacy"] == {
        **{"clip": 0.3, "noise_multiplier": 1.5, "delta": 0.01, "sampling": "poisson", "accountant": "pld"},
        **{"quantile": 0.5, "clip_lr": 0.2, "side_share": 0.0625},
    }
    assert parse_config(config.resolved()).make_privacy() == config.make_privacy()
