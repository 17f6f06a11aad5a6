"""Runs under secure aggregation in this process: equal to plain ones up to quantisation, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'comfedl[secure]'")

import torch
from torch import nn

import comfedl as cf
from comfedl.algorithms.summed import Summed
from comfedl.config.schema import parse_config
from comfedl.core.simplex import capped_weights
from comfedl.core.sums import BySamples, Exponential, Uniform
from comfedl.engines.secured import Secured
from comfedl.engines.sums import Codec
from comfedl.training.fit import fit
from comfedl.training.options import RunOptions

SECURE = cf.SecureAggregation()
MOMENTUM = {"server_optimizer": cf.optim.SGD(momentum=0.9), "server_average": 0.9}


def federation(clients: int = 6, features: int = 5) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(1)

    def data(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, features, generator=generator, dtype=torch.float64) + 0.3 * k
        return x, (x[:, k % features] > 0.3 * k).long()

    train = {f"c{k}": data(k, 10 + 4 * k) for k in range(clients)}
    return cf.FederatedData(train, {f"c{k}": data(k, 8) for k in range(clients)})


def module(features: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def run(method: cf.FedAvg | Any, rounds: int = 6, **more: Any) -> cf.Result:
    return fit(module(), federation(), method, rounds, seed=2, eval_every=1, **more)


def assert_close(one: cf.Result, other: cf.Result, within: float) -> None:
    for name, part in one.params.items():
        torch.testing.assert_close(part, other.params[name], rtol=0, atol=within)


PAIRS: dict[str, tuple[Any, Any]] = {
    "fedavg": (cf.FedAvg(lr=0.3), None),
    "uniform": (cf.FedAvg(lr=0.3, weighting="uniform"), None),
    "clipped": (cf.FedAvg(lr=0.3, clip_update_norm=0.05), None),
    "fedprox": (cf.FedProx(lr=0.3), None),
    "ditto": (cf.Ditto(lr=0.3), None),
    "fedmaml": (cf.FedMAML(lr=0.3), None),
    "kl": (cf.ComFedL(lr=0.3, outer=cf.KL(gamma=0.1)), None),
    "kl with a small gamma": (cf.ComFedL(lr=0.3, outer=cf.KL(gamma=0.003)), None),
    "kl of losses after adapting": (cf.DAMAML(lr=0.3, gamma=0.1), None),
    "tilted down": (cf.TERM(lr=0.3, t=-2.0), None),
    "adam at the server": (cf.ComFedL(lr=0.3, outer=cf.KL(0.1), server_optimizer=cf.optim.Adam(lr=0.01)), None),
    # Robust keeps its momentum and its average, and leaves out memory and look-ahead.
    "robust": (cf.Robust(lr=0.3, gamma=0.1), cf.ComFedL(lr=0.3, outer=cf.KL(0.1), **MOMENTUM)),
    "robust on outer data": (
        cf.Robust(lr=0.3, gamma=0.1, on="outer"),
        cf.ComFedL(lr=0.3, outer=cf.KL(0.1, on="outer"), **MOMENTUM),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sums_are_the_plain_ones_up_to_quantisation(name: str) -> None:
    method, same = PAIRS[name]
    hidden, plain = run(method, secure=SECURE), run(same or method)
    assert_close(hidden, plain, 1e-6 if "small" in name else 1e-8)  # of small weights, rounding is larger
    open_sums = run(method, secure=replace(SECURE, masks=False))
    assert_close(hidden, open_sums, 0)  # masks change no bit
    for ours, theirs in zip(hidden.rounds, plain.rounds, strict=True):
        for key in ("validation.loss.mean", "validation.accuracy.mean", "train.loss.mean"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-7)
        if "robust" not in name and "objective" in ours:
            assert ours["objective"] == pytest.approx(theirs["objective"], abs=1e-6)
    assert any("objective" in row for row in hidden.rounds)
    assert not any(key.endswith((".worst", ".std")) for row in hidden.rounds for key in row)
    assert list(hidden.clients) == []


def test_batch_norm_s_buffers_are_summed_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    settings = {"rounds": 3, "seed": 2, "loss": "cross_entropy"}
    found = [fit(model, federation(), cf.FedAvg(lr=0.1), **settings, secure=secure) for secure in (SECURE, None)]
    for name, part in found[0].buffers.items():
        torch.testing.assert_close(part, found[1].buffers[name], rtol=0, atol=1e-8)
    assert found[0].buffers["1.num_batches_tracked"] == 15


def test_with_32_bits_the_error_is_that_of_32_bits() -> None:
    """Of n sites with weights up to 1, each word is off by half a unit at most."""
    method = cf.FedAvg(lr=0.3, weighting="uniform")
    codec = Codec(replace(SECURE, bits=32), Uniform(), method.steps(), [], None, 6)
    found, plain = run(method, 1, secure=replace(SECURE, bits=32)), run(method, 1)
    assert_close(found, plain, codec.tensors.unit / 2)
    assert max(float((found.params[name] - part).abs().max()) for name, part in plain.params.items()) > 0


def test_a_run_is_the_same_on_every_engine_option_and_when_resumed(tmp_path: Path) -> None:
    method = cf.Robust(lr=0.3, gamma=0.1)
    whole = run(method, out=tmp_path / "whole", secure=SECURE)
    run(method, 3, out=tmp_path / "stopped", secure=SECURE)
    resumed = run(method, out=tmp_path / "stopped", resume=True, secure=SECURE)  # a new session, with new keys
    assert_close(whole, resumed, 0)
    assert whole.rounds == resumed.rounds
    serial = run(method, secure=SECURE, engine_options={"vectorize": "serial"})
    assert_close(whole, serial, 1e-8)


# Weights.


def test_the_reference_settles_where_kl_s_cap_is() -> None:
    """With fixed losses, the weights min(exp(f/gamma - c), cap) / n tend to those of KL with this cap."""
    losses = torch.tensor([2.0, 1.0, 0.9, 0.8, 0.5], dtype=torch.float64)
    weight, reference = Exponential(gamma=0.2, cap=1.5), float(losses.mean()) / 0.2
    for _ in range(60):
        own = torch.tensor([weight.of(float(loss), 1, reference) for loss in losses])
        reference += float(own.mean().log())
    torch.testing.assert_close(own.double() / own.sum(), capped_weights(losses, 0.2, 1.5), atol=1e-6, rtol=0)


def test_the_reference_cancels() -> None:
    losses = [0.3, 0.9, 1.4]
    rows = []
    for reference in (0.0, 3.0, 6.0):
        own = torch.tensor([Exponential(0.5).of(loss, 1, reference) for loss in losses], dtype=torch.float64)
        rows.append(own / own.sum())
    for row in rows:
        torch.testing.assert_close(row, torch.softmax(torch.tensor(losses, dtype=torch.float64) / 0.5, 0))
    assert Exponential(1e-3).of(1e6, 1, 0.0) == Exponential(1e-3).bound  # no overflow
    assert [BySamples().of(0.0, n, 20.0) for n in (5, 20, 40)] == [0.25, 1.0, 1.0]


@pytest.mark.parametrize("gamma", [0.1, 0.0005])
def test_losses_that_jump_are_weighed_anew(gamma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round's losses leave the range of the last round's reference, the round looks for another one."""
    method = cf.ComFedL(lr=1.0, outer=cf.KL(gamma=gamma))
    sought, find = [], Summed.find_reference

    def watched(self: Summed, state: Any, context: Any, *more: Any, **named: Any) -> Any:
        sought.append(context.number)
        return find(self, state, context, *more, **named)

    monkeypatch.setattr(Summed, "find_reference", watched)
    assert_close(run(method, 6, secure=SECURE), run(method, 6), 1e-6)
    assert sought[0] == 1
    assert (len(sought) > 1) == (gamma < 0.01)


def jumping(monkeypatch: pytest.MonkeyPatch, drops: bool) -> list[tuple[int, str, list[str], bool]]:
    """A run whose losses jump, so that rounds ask again; ``drops``: one client is missing from what is asked again."""
    from comfedl.secure.server import SecureServer

    asked: list[tuple[int, str, list[str], bool]] = []
    plain, ask = SecureServer.sum, Summed._ask

    def watched(self: Any, sites: Any, what: str, task: bytes, like: Any, whole: bool = False) -> Any:
        kind = "evaluate" if len(like) == 1 else "train"
        asked.append((int(what.split()[1]), kind, [*sites], whole))
        return plain(self, sites, what, task, like, whole)

    monkeypatch.setattr(SecureServer, "sum", watched)
    if drops:

        def lose_later(
            self: Any, step: str, state: Any, context: Any, participants: Any, reference: float, whole: bool
        ) -> Any:
            context.engine._left_out = {"c5"} if whole else set()
            return ask(self, step, state, context, participants, reference, whole)

        encoded = Secured._encoded

        def without(self: Any, *given: Any) -> Any:
            left = getattr(self, "_left_out", set())
            return {name: own for name, own in encoded(self, *given).items() if name not in left}

        monkeypatch.setattr(Summed, "_ask", lose_later)
        monkeypatch.setattr(Secured, "_encoded", without)
    late = [cf.faults.Straggler(["c0"])]
    run(cf.ComFedL(lr=1.0, outer=cf.KL(gamma=0.0005)), 6, secure=SECURE, faults=late, quorum=0.1)
    return asked


def test_a_round_asks_again_over_exactly_the_same_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sum of a round may miss a site, here c0; those after it are over the sites of the first, and whole."""
    asked = jumping(monkeypatch, drops=False)
    before: dict[int, str] = {}
    again = 0
    for number, kind, sites, whole in asked:
        if whole:
            again += 1
            assert sites == ["c1", "c2", "c3", "c4", "c5"]
            assert number in before
        else:
            assert sites == [f"c{k}" for k in range(6)]
        before[number] = kind
    assert again > 2


def test_a_site_that_is_missing_when_a_round_asks_again_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cf.QuorumError, match=r"site 'c5' is missing .* the difference of the two would be its own"):
        jumping(monkeypatch, drops=True)


# Clients that are not there.


def test_a_third_may_drop_out_after_masking() -> None:
    """Those that leave early are in the sum, those that are late are not; neither ends the run."""
    method = cf.FedAvg(lr=0.3)
    early = [cf.faults.LeaveEarly(1.0, ["c0", "c4"])]
    assert_close(run(method, secure=SECURE, faults=early), run(method), 1e-8)
    late = [cf.faults.Straggler(["c0", "c4"])]
    assert_close(run(method, secure=SECURE, faults=late), run(method, faults=late), 1e-8)
    gone = [cf.faults.Dropout(0.5, ["c0", "c4"])]
    assert_close(run(method, secure=SECURE, faults=gone), run(method, faults=gone), 1e-8)


@pytest.mark.parametrize(
    "fault", [cf.faults.LeaveEarly(1.0, ["c0", "c1", "c4"]), cf.faults.Straggler(["c0", "c1", "c4"])]
)
def test_more_than_a_third_end_the_run_in_a_sentence(fault: cf.faults.Fault) -> None:
    with pytest.raises(cf.QuorumError, match=r"only 3 of 6 sites .* needs 4, so the sum stays hidden"):
        run(cf.FedAvg(lr=0.3), secure=SECURE, faults=[fault], quorum=0.1)


def test_a_client_whose_numbers_are_not_finite_sends_none() -> None:
    bad = [cf.faults.NotANumber(["c2"])]
    found = run(cf.FedAvg(lr=0.3), secure=SECURE, faults=bad)
    assert found.rounds[-1]["participants"] == 5
    assert all(bool(part.isfinite().all()) for part in found.params.values())


def test_numbers_beyond_the_clip_are_cut_and_said() -> None:
    with pytest.warns(UserWarning, match=r"Round 1: \d+ numbers of the sites' updates were too large and were cut"):
        found = run(cf.FedAvg(lr=0.3, weighting="uniform"), 1, secure=replace(SECURE, clip=0.01))
    start = module().state_dict()
    assert max(float((part - start[name]).abs().max()) for name, part in found.params.items()) <= 0.01 + 1e-9


# What is refused.

REFUSED: dict[str, Any] = {
    "drfa": cf.DRFA(),
    "afl": cf.AFL(),
    "q-fedavg": cf.QFedAvg(),
    "delta-fl": cf.DeltaFL(),
    "tr-maml": cf.TRMAML(),
    "scaffold": cf.Scaffold(),
    "median": cf.FedAvg(aggregate="median"),
    "strong": cf.Robust(defence="strong"),
    "max_weight": cf.FedAvg(max_weight=2.0),
    "safe": cf.ComFedL(outer=cf.KL(0.1), step="safe"),
    "CVaR": cf.ComFedL(outer=cf.CVaR(0.5)),
    "effective_clients": cf.ComFedL(outer=cf.KL(effective_clients=2)),
    "offset": cf.Robust(offset=cf.offset.Generalisation(1.0)),
    "keep_state": cf.ComFedL(outer=cf.KL(0.1), client_optimizer=cf.optim.Adam(keep_state=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_needs_each_reply_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(cf.ConfigError, match="under secure aggregation, which gives the server sums alone") as error:
        run(REFUSED[name], secure=SECURE)
    assert str(error.value).endswith(".") and ". " not in str(error.value)


def test_a_method_of_one_s_own_with_its_own_round_is_refused() -> None:
    class Own(cf.FedAvg):
        def round(self, state: Any, context: Any) -> Any:
            return super().round(state, context)

    class Weighing(cf.FedAvg):
        def site_weight(self) -> Uniform:
            return Uniform()

    with pytest.raises(cf.ConfigError, match=r"Own\.round is the method's own"):
        run(Own(), secure=SECURE)
    assert Summed.of(Weighing()).weight == Uniform()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "distributed"}, 'engine is "distributed"'),
        ({"stop": cf.EarlyStopping("validation.accuracy.worst")}, 'use "validation.accuracy.mean" or "objective"'),
        ({"clients_per_round": 2}, "3 sites or more"),
        ({"eval_clients": 2}, "3 sites or more"),
        ({"secure": True}, "secure is True"),
        ({"secure": None, "faults": [cf.faults.LeaveEarly(0.5)]}, "leave-early"),
    ],
)
def test_an_option_that_does_not_go_with_it_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(cf.ConfigError, match=sentence):
        run(cf.FedAvg(), **{"secure": SECURE, **options})


@pytest.mark.parametrize("name", ["clients_per_round", "eval_clients"])
def test_weights_that_follow_losses_leave_out_none_or_three(name: str) -> None:
    """Of one site left out, the sum over all of exponentials of losses less the one without it is its own."""
    robust, uniform = cf.ComFedL(lr=0.3, outer=cf.KL(0.1)), cf.FedAvg(lr=0.3)
    for count in (4, 5):
        with pytest.raises(cf.ConfigError, match=f"{name} is {count} of 6 sites, .* give 6 or at most 3"):
            run(robust, 1, secure=SECURE, **{name: count})
        run(uniform, 1, secure=SECURE, **{name: count})
    for count in (3, 6):
        run(robust, 1, secure=SECURE, **{name: count})


def test_differential_privacy_does_not_go_with_it_yet() -> None:
    privacy = cf.DP(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    RunOptions(privacy=privacy)
    with pytest.raises(cf.ConfigError, match="differential privacy are both asked for"):
        RunOptions(privacy=privacy, secure=SECURE)


@pytest.mark.parametrize("value", [{"bits": 16}, {"clip": 0.0}, {"masks": 1}, {"threshold": 0.2}])
def test_settings_out_of_range_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(cf.ConfigError, match=rf"{next(iter(value))} is"):
        cf.SecureAggregation(**value)


def settings(**more: Any) -> dict[str, Any]:
    data = {"name": "digits", "partition": "dirichlet", "clients": 4, "alpha": 1.0}
    return {"rounds": 2, "data": data, "algorithm": {"name": "robust"}, "secure_aggregation": {}, **more}


def test_a_config_is_checked_before_its_data_are_loaded() -> None:
    with pytest.raises(cf.ConfigError, match="drfa cannot run like this under secure aggregation"):
        parse_config(settings(algorithm={"name": "drfa"}))
    with pytest.raises(cf.ConfigError, match=r"secure_aggregation\.treshold is not a key"):
        parse_config(settings(secure_aggregation={"treshold": 0.7}))
    with pytest.raises(cf.ConfigError, match=r"threshold is 0\.2"):
        parse_config(settings(secure_aggregation={"threshold": 0.2}))
    again = parse_config(parse_config(settings(secure_aggregation={"bits": 32})).resolved())
    assert again.secure == cf.SecureAggregation(bits=32)


def test_the_commands_show_what_is_known(tmp_path: Path) -> None:
    from comfedl.utils.toml import to_toml

    (tmp_path / "c.toml").write_text(to_toml(settings()))

    def comfedl(*words: str) -> str:
        command = [sys.executable, "-m", "comfedl", *words]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "only means over them are known" in comfedl("run", "c.toml", "--out", "run")
    assert "the worst is not known, since secure aggregation" in comfedl("report", "run", "--out", "report.html")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation"]["accuracy"].keys() == {"mean"}
    comfedl("watch", "run")
    result = run(cf.FedAvg(), secure=SECURE)
    assert "for the average client" in repr(result) and "worst" not in repr(result)
    with pytest.raises(cf.ConfigError, match="no scores of single clients"):
        result.clients_table()


def test_without_cryptography_a_sentence_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "for name in ('', '.exceptions', '.hazmat'): sys.modules['cryptography' + name] = None\n"
        "import comfedl as cf, torch\n"
        "x = torch.randn(6, 2); train = {name: (x, (x[:, 0] > 0).long()) for name in 'abc'}\n"
        "model = torch.nn.Linear(2, 2)\n"
        "cf.fit(model, cf.FederatedData(train), cf.FedAvg(), 1)\n"
        "try: cf.fit(model, cf.FederatedData(train), cf.FedAvg(), 1, secure=cf.SecureAggregation())\n"
        "except cf.ConfigError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert "pip install 'comfedl[secure]'" in ended.stdout, ended.stderr


def test_a_search_judges_by_the_mean(tmp_path: Path) -> None:
    from comfedl.tuning.plan import make_plan
    from comfedl.utils.toml import to_toml

    (tmp_path / "c.toml").write_text(to_toml(settings(tune={"algorithm.lr": [0.1, 0.2]})))
    assert make_plan(tmp_path / "c.toml", trials=2).metric == "validation.accuracy.mean"
    with pytest.raises(cf.ConfigError, match=r"only means over the clients are known; use validation\.loss\.mean"):
        make_plan(tmp_path / "c.toml", metric="validation.loss.worst", trials=2)
