"""Simulated faults: what each does, by hand; that runs with them are repeatable; and the defence against them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.config.schema import parse_config, run_config
from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBER, PARAMS
from comfedl.engines.faults import FAULTS, Fault, poisoned
from comfedl.engines.replies import LocalReplies, ReplyPart, StackedReplies

ORIGIN = Model(params={"w": torch.tensor([1.0, 2.0])}, buffers={"m": torch.tensor([0.5]), "n": torch.tensor(3)})
TRAINED = Model(params={"w": torch.tensor([2.0, 0.0])}, buffers={"m": torch.tensor([0.7]), "n": torch.tensor(4)})
BAD = ["a"]


@pytest.mark.parametrize(
    "fault, w, m, n, loss",
    [
        (cf.faults.SignFlip(BAD, scale=10.0), [-9.0, 22.0], 0.7, 4, 0.3),
        (cf.faults.Scale(BAD, 3.0), [4.0, -4.0], 0.7, 4, 0.3),
        (cf.faults.NoUpdate(BAD), [1.0, 2.0], 0.5, 3, 0.3),
        (cf.faults.BadBuffers(BAD, 1000.0), [2.0, 0.0], 1000.0, 1000, 0.3),
        (cf.faults.LossLie(BAD, 1e6), [2.0, 0.0], 0.7, 4, 1e6),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_arrives_by_hand(fault: Fault, w: list[float], m: float, n: int, loss: float) -> None:
    found = fault.spoil(TRAINED, MODEL, ORIGIN, 0)
    assert found["params"]["w"].tolist() == w
    assert float(found["buffers"]["m"]) == pytest.approx(m)
    assert int(found["buffers"]["n"]) == n
    assert float(fault.spoil(torch.tensor(0.3), NUMBER, None, 0)) == pytest.approx(loss)


def test_controls_are_changed_from_zero() -> None:
    control, zero = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.zeros(2)}
    assert cf.faults.SignFlip(BAD).spoil(control, PARAMS, zero, 0)["w"].tolist() == [-1, 2]
    assert cf.faults.NoUpdate(BAD).spoil(control, PARAMS, zero, 0)["w"].tolist() == [0, 0]


def test_noise_is_keyed_and_has_its_size() -> None:
    start = {"w": torch.zeros(10_000)}
    noise = cf.faults.Noise(BAD, 2.0)
    first, again, other = (noise.spoil(start, PARAMS, start, seed)["w"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.std()) == pytest.approx(2, rel=0.05)


def test_not_a_number() -> None:
    assert bool(cf.faults.NotANumber(BAD).spoil(TRAINED, MODEL, ORIGIN, 0)["params"]["w"].isnan().all())


def test_labels_are_flipped_in_training_alone(three_clients: cf.FederatedData) -> None:
    name = three_clients.names[1]
    found = poisoned(three_clients, [cf.faults.LabelFlip([name])])
    classes = int(three_clients.train.y.max()) + 1
    for each in three_clients.names:
        own, now = three_clients.train[each][1], found.train[each][1]
        assert torch.equal(now, classes - 1 - own if each == name else own)
    assert found.validation is not None and three_clients.validation is not None
    assert torch.equal(found.validation.y, three_clients.validation.y)


def test_stacked_and_single_replies_are_changed_alike() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    many = StackedReplies([2, 0, 1], [ReplyPart([0, 1, 2], {"x": rows})])
    single = LocalReplies([2, 0, 1], [{"x": rows[k]} for k in (2, 0, 1)])
    for replies in (many, single):
        found = replies.altered(lambda client, reply: {"x": reply["x"] + 10 * client}, [1, 2])
        assert [each.tolist() for each in found.each("x")] == [[24, 25], [0, 1], [12, 13]]


# In a run.


def clients(count: int = 10) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(0)
    names = "abcdefghij"[:count]

    def client(samples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
        return x, (x[:, 0] > 0).long() + (x.sum(dim=1) > 0).long()

    return cf.FederatedData({name: client(20 + 4 * k) for k, name in enumerate(names)}, {n: client(60) for n in names})


def model(buffers: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)] if buffers else [nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


ALL = [
    *(cf.faults.SignFlip(["a"], 2.0), cf.faults.Noise(["b"], 0.1), cf.faults.Scale(["c"], 2.0)),
    *(cf.faults.LabelFlip(["d"]), cf.faults.LossLie(["e"], 5.0), cf.faults.BadBuffers(["f"], 2.0)),
    *(cf.faults.NoUpdate(["g"]), cf.faults.Straggler(["h"], 0.5), cf.faults.Dropout(0.1)),
]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:With one client")
def test_every_method_runs_with_all_of_them_and_repeats(name: str) -> None:
    needed: dict[str, Any] = {"comfedl": {"outer": cf.KL(0.5)}}
    method = ALGORITHMS[name](lr=0.05, **needed.get(name, {}))
    first, again = (cf.fit(model(True), clients(), method, rounds=4, faults=ALL, quorum=0.1).params for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_no_faults_change_nothing() -> None:
    plain, none, idle = (
        cf.fit(model(), clients(), cf.Robust(0.1, lr=0.1), rounds=4, **given).params
        for given in ({}, {"faults": []}, {"faults": [cf.faults.Dropout(0.0), cf.faults.Straggler(["a"], 0.0)]})
    )
    for key in plain:
        assert torch.equal(plain[key], none[key])
        torch.testing.assert_close(plain[key], idle[key], rtol=0, atol=1e-12)


def test_who_drops_out_or_is_late_does_not_count() -> None:
    """A late or absent client for good is one that is not there; a lost update is no update."""
    fed = clients(3)
    late = cf.fit(model(), fed, cf.FedAvg(lr=0.1), rounds=3, faults=[cf.faults.Straggler(["c"])]).params
    absent = cf.fit(model(), fed, cf.FedAvg(lr=0.1), rounds=3, faults=[cf.faults.Dropout(1.0, ["c"])]).params
    without = cf.FederatedData({name: fed.train[name] for name in "ab"})
    alone = cf.fit(model(), without, cf.FedAvg(lr=0.1), rounds=3).params
    for key in alone:
        torch.testing.assert_close(late[key], alone[key])
        torch.testing.assert_close(absent[key], alone[key])
    with pytest.raises(cf.QuorumError):
        cf.fit(model(), fed, cf.FedAvg(lr=0.1), rounds=3, faults=[cf.faults.Dropout(1.0)])


def test_a_client_of_nan_is_refused_and_excluded() -> None:
    with pytest.warns(UserWarning, match="not finite") as caught:
        cf.fit(model(), clients(3), cf.FedAvg(), rounds=5, faults=[cf.faults.NotANumber(["b"])], quorum=0.5)
    assert len(caught) == 3


@pytest.mark.filterwarnings("ignore::comfedl.utils.errors.BadReply")
def test_a_resumed_run_with_faults_is_the_same(tmp_path: Path) -> None:
    def run(out: Path, rounds: int, resume: bool = False) -> cf.Result:
        faults = [*ALL, cf.faults.NotANumber(["i"])]
        return cf.fit(
            model(True),
            clients(),
            cf.Robust(0.1, lr=0.05, defence="strong"),
            rounds=rounds,
            faults=faults,
            out=out,
            resume=resume,
            quorum=0.1,
            checkpoint_every=1,
        )

    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 3)
    parts = run(tmp_path / "parts", 8, resume=True)
    assert all(torch.equal(whole.params[key], parts.params[key]) for key in whole.params)
    assert (tmp_path / "whole/clients.jsonl").read_bytes() == (tmp_path / "parts/clients.jsonl").read_bytes()
    assert "sign-flip" in (tmp_path / "whole/config.toml").read_text()


def test_faults_in_a_config_are_those_of_python(tmp_path: Path) -> None:
    settings = {
        "rounds": 3,
        "data": {"name": "digits", "partition": "iid", "clients": 4},
        "algorithm": {"name": "fedavg"},
        "faults": [
            {"name": "sign-flip", "clients": ["client-0", "client-1"], "scale": 0.5},
            {"name": "dropout", "probability": 0.1},
        ],
    }
    config = parse_config(settings)
    assert config.make_faults() == (cf.faults.SignFlip(["client-0", "client-1"], 0.5), cf.faults.Dropout(0.1))
    run_config(config, tmp_path / "run")
    recorded = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert parse_config(recorded).make_faults() == config.make_faults()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"faults": [{"name": "sign-flop", "clients": ["0"]}]}, "sign-flip"),
        ({"faults": [{"name": "sign-flip"}]}, "clients"),
        ({"faults": [{"name": "noise", "clients": ["0"], "std": -1.0}]}, "std"),
        ({"faults": [{"name": "sign-flip", "clients": ["0"]}], "engine": "flower"}, "only their own"),
    ],
)
def test_mistakes_are_one_sentence(change: dict[str, Any], words: str) -> None:
    base = {"data": {"name": "digits", "partition": "iid", "clients": 4}, "algorithm": {"name": "fedavg"}}
    with pytest.raises(cf.ConfigError, match=words):
        parse_config({**base, **change})


def test_unknown_clients_and_other_things_are_named() -> None:
    with pytest.raises(cf.ConfigError, match="names the client 'z', but the clients are 'a', 'b', 'c'"):
        cf.fit(model(), clients(3), cf.FedAvg(), faults=[cf.faults.SignFlip(["z"])])
    with pytest.raises(cf.ConfigError, match="list such as"):
        cf.fit(model(), clients(3), cf.FedAvg(), faults="sign-flip")  # type: ignore[arg-type]
    with pytest.raises(cf.ConfigError, match="list of names"):
        cf.faults.SignFlip("a")
    assert sorted(FAULTS) == sorted(
        [
            "sign-flip",
            "noise",
            "scale",
            "label-flip",
            "loss-lie",
            "bad-buffers",
            "not-a-number",
            "no-update",
            "dropout",
            "straggler",
            "leave-early",
        ]
    )


@pytest.mark.filterwarnings("ignore:The weights jump")
@pytest.mark.parametrize("scale", [1.0, 10.0, 1e15])
def test_row_8_the_strong_defence_holds_beside_robust_weights(scale: float) -> None:
    """Two of ten lie about their loss and flip their update; without the defence they win."""
    bad = ["a", "b"]
    faults = [cf.faults.SignFlip(bad, scale), cf.faults.LossLie(bad, 1e6)]

    def worst(method: cf.Robust, faults: list[Fault]) -> float:
        found = cf.fit(model(), clients(), method, rounds=40, eval_every=40, faults=faults).clients
        return min(row["validation.accuracy"] for row in found if row["round"] == 40 and row["client"] not in bad)

    strong = cf.Robust(0.1, lr=0.2, defence="strong")
    assert worst(strong, faults) > worst(cf.Robust(0.1, lr=0.2), []) - 0.1
    assert worst(cf.Robust(0.1, lr=0.2), faults) < 0.5
