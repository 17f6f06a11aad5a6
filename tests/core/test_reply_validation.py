"""Bad clients: their replies are refused, the round continues, and a lying client's weight is bounded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comfedl as cf
from comfedl.engines.embedded import Embedded, LocalReplies
from comfedl.utils.errors import BadReply

Corrupt = Callable[[dict[str, Any]], dict[str, Any]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def corrupted(
    monkeypatch: pytest.MonkeyPatch, bad: dict[str, Corrupt], rounds: Sequence[int] = range(1000)
) -> list[Any]:
    """Corrupt the replies of these clients, as a broken or lying client would."""
    asked: list[Any] = []
    honest = Embedded.run

    def run(self: Embedded, step: str, clients: Sequence[int], message: Any, round: int) -> Any:
        replies = honest(self, step, clients, message, round)
        if step not in ("train", "loss"):
            return replies
        asked.append((round, [self.names[i] for i in clients]))
        parts = self._steps[step].sends
        honestly = [
            dict(zip(parts, row, strict=True)) for row in zip(*(replies.each(part) for part in parts), strict=True)
        ]
        sent = [
            bad[self.names[i]](reply) if self.names[i] in bad and round in rounds else reply
            for i, reply in zip(clients, honestly, strict=True)
        ]
        return LocalReplies(clients, sent)

    monkeypatch.setattr(Embedded, "run", run)
    return asked


def change(part: Callable[[torch.Tensor], torch.Tensor]) -> Corrupt:
    def corrupt(reply: dict[str, Any]) -> dict[str, Any]:
        params = {name: part(value) for name, value in reply["model"]["params"].items()}
        return {**reply, "model": {**reply["model"], "params": params}}

    return corrupt


FAULTS: dict[str, tuple[Corrupt, str]] = {
    "NaN": (change(lambda part: part * torch.nan), "not finite"),
    "infinite": (change(lambda part: part + torch.inf), "not finite"),
    "shape": (change(lambda part: part[:1]), r"\(1, 4\) torch.float64 and not \(3, 4\) torch.float64"),
    "dtype": (change(lambda part: part.float()), "torch.float32 and not"),
    "names": (
        lambda reply: {**reply, "model": {"params": {"other": torch.zeros(3)}, "buffers": {}}},
        "has other tensors than the model",
    ),
    "no model": (lambda reply: {**reply, "model": torch.tensor(1.0)}, "has other tensors than the model"),
    "nothing": (lambda reply: {}, "it consists of nothing and not of"),
    "too much": (lambda reply: {**reply, "more": torch.zeros(10_000_000)}, "it consists of .*more.* and not of"),
}
LOSSES: dict[str, tuple[Corrupt, str]] = {
    "NaN": (lambda reply: {**reply, "loss": torch.tensor(torch.nan)}, "its loss is not finite"),
    "a vector": (lambda reply: {**reply, "loss": torch.zeros(10_000_000)}, "its loss is not a number"),
    "a model": (lambda reply: {**reply, "loss": reply["model"]}, "its loss is not a number"),
    "missing": (lambda reply: {"model": reply["model"]}, "it consists of model and not of loss, model"),
}


@pytest.mark.parametrize(
    ("method", "corrupt", "reason"),
    [
        *[(cf.FedAvg(), *fault) for fault in FAULTS.values()],
        *[(cf.ComFedL(outer=cf.KL(0.3)), *fault) for fault in (FAULTS | LOSSES).values()],
    ],
)
def test_a_bad_reply_is_refused_and_the_round_goes_on(
    three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch, method: Any, corrupt: Corrupt, reason: str
) -> None:
    without = cf.FederatedData({name: three_clients.train[name] for name in ("a", "c")})
    alone = cf.fit(model(), without, method, rounds=1)
    corrupted(monkeypatch, {"b": corrupt})
    with pytest.warns(BadReply, match=rf"Round 1: refused the reply of client 'b': .*{reason}"):
        result = cf.fit(model(), three_clients, method, rounds=1)
    for name, part in alone.params.items():
        torch.testing.assert_close(result.params[name], part, rtol=0, atol=1e-12)
    assert [row["weight"] for row in result.clients if row["client"] == "b"] == [0.0]
    assert result.rounds[-1]["participants"] == 2


@pytest.mark.parametrize(
    "method",
    [cf.DRFA(0.05), cf.AFL(0.05), cf.QFedAvg(0.3), cf.FedMAML(0.05), cf.TRMAML(0.05), cf.Ditto(0.1), cf.DeltaFL(0.2)],
    ids=lambda method: method.name,
)
def test_every_method_goes_on(three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    spoil = change(lambda part: part * torch.nan)
    corrupted(monkeypatch, {"b": lambda reply: spoil(reply) if "model" in reply else reply})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadReply)
        result = cf.fit(model(), three_clients, method, rounds=6, quorum=0.1)
    assert all(bool(torch.isfinite(part).all()) for part in result.params.values())


def test_three_bad_replies_are_enough(three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = corrupted(monkeypatch, {"b": FAULTS["NaN"][0]})
    with pytest.warns(BadReply) as told:
        cf.fit(model(), three_clients, cf.FedAvg(), rounds=6)
    assert [names for _, names in asked] == [["a", "b", "c"]] * 3 + [["a", "c"]] * 3
    assert len(told) == 3
    assert "not asked again" in str(told[-1].message)
    assert "not asked again" not in str(told[0].message)


def test_quarantine_survives_a_resume(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(cf.Callback):
        def settled(self, snapshot: Any) -> None:
            if snapshot.round == 4:
                raise RuntimeError

    asked = corrupted(monkeypatch, {"b": FAULTS["NaN"][0]})
    options: dict[str, Any] = {"rounds": 6, "out": tmp_path / "run", "checkpoint_every": 1}
    with pytest.warns(BadReply), pytest.raises(RuntimeError):
        cf.fit(model(), three_clients, cf.FedAvg(), callbacks=[Stop()], **options)
    cf.fit(model(), three_clients, cf.FedAvg(), resume=True, **options)
    assert [names for number, names in asked if number > 3] == [["a", "c"]] * 3


def test_under_the_quorum_the_run_stops_with_its_state_saved(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replies one by one, like the corrupted ones: stacked, their sum may be rounded differently.
    serial: dict[str, Any] = {"rounds": 6, "engine_options": {"vectorize": "serial"}}
    whole = cf.fit(model(), three_clients, cf.Ditto(0.1), **serial)
    options = {**serial, "out": tmp_path / "run"}
    with monkeypatch.context() as patched:
        corrupted(patched, {"a": FAULTS["NaN"][0], "b": FAULTS["shape"][0]}, rounds=[4])
        with (
            pytest.warns(BadReply),
            pytest.raises(cf.QuorumError, match=r"Round 4: only 1 of 3 clients.*quorum is 0.5"),
        ):
            cf.fit(model(), three_clients, cf.Ditto(0.1), **options)
    result = cf.fit(model(), three_clients, cf.Ditto(0.1), resume=True, **options)
    assert result.rounds == whole.rounds
    for name in ("a", "b", "c"):
        assert all(torch.equal(result.personal(name)[part], whole.personal(name)[part]) for part in whole.params)


def test_a_client_that_diverges_by_itself_still_ends_the_run(three_clients: cf.FederatedData) -> None:
    """Divergence is a bad setting, not a bad client; dropping the worst client would hide it."""
    with pytest.raises(cf.Diverged):
        cf.fit(model(), three_clients, cf.FedAvg(lr=1e308), rounds=2)


@pytest.mark.parametrize("part", ["scores", "value"])
def test_a_bad_evaluation_is_refused_too(
    three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    honest = Embedded.run

    def run(self: Embedded, step: str, clients: Sequence[int], message: Any, round: int) -> Any:
        replies = honest(self, step, clients, message, round)
        if step != "evaluate":
            return replies
        pairs = zip(replies.each("scores"), replies.each("value"), strict=True)
        rows = [{"scores": scores, "value": value} for scores, value in pairs]
        rows[1][part] = torch.zeros(3)
        return LocalReplies(clients, rows)

    monkeypatch.setattr(Embedded, "run", run)
    with pytest.warns(BadReply, match=f"client 'b': its {part} is not a"):
        result = cf.fit(model(), three_clients, cf.FedAvg(), rounds=1)
    assert [row["client"] for row in result.clients] == ["a", "c"]


def test_clients_that_do_not_answer_count_against_the_quorum(
    three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Embedded.run
    monkeypatch.setattr(
        Embedded,
        "run",
        lambda self, step, clients, message, round: honest(
            self, step, list(clients)[:1] if step == "train" else clients, message, round
        ),
    )
    with pytest.raises(cf.QuorumError, match="only 1 of 3 clients"):
        cf.fit(model(), three_clients, cf.FedAvg(), rounds=1)


@pytest.mark.parametrize("method", [cf.DRFA(0.0), cf.QFedAvg(0.1, sampling="samples")])
def test_clients_in_quarantine_are_not_drawn(
    three_clients: cf.FederatedData, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    spoil = FAULTS["NaN"][0]
    asked = corrupted(monkeypatch, {"c": lambda reply: spoil(reply) if "model" in reply else reply})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadReply)
        cf.fit(model(), three_clients, method, rounds=30, clients_per_round=2, quorum=0.0)
    offences = [names for _, names in asked if "c" in names]
    assert len(offences) > 0
    assert "c" not in asked[-1][1] and "c" not in asked[-2][1]


# A client that lies about its loss to take the model over.


def test_a_liar_is_bounded_by_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten clients, with two digits only, reports a loss of a million to take over the model."""
    fed = cf.load("digits", cf.partition.IID(clients=10), seed=0, validation=0.5, test=0.0)
    x, y = (torch.cat(parts) for parts in zip(*fed.train.values(), strict=True))
    train = {**fed.train, "client-0": (x[y < 2], y[y < 2])}
    assert fed.validation is not None
    data = cf.FederatedData(train, dict(fed.validation))
    net = cf.models.build("logistic", (1, 8, 8), 10, seed=0)

    def worst(outer: cf.KL) -> float:
        method = cf.ComFedL(outer=outer, lr=0.5, batch_size=16)
        rows = cf.fit(net, data, method, rounds=40, eval_every=40).clients
        honest = [row["validation.accuracy"] for row in rows if row["client"] != "client-0"]
        return float(min(honest))  # type: ignore[type-var]

    capped, free = cf.KL(0.2, cap=1.5), cf.KL(0.2)
    honest = worst(capped), worst(free)
    corrupted(monkeypatch, {"client-0": lambda reply: {**reply, "loss": torch.tensor(1e6)}})
    lied = worst(capped), worst(free)
    assert lied[0] >= honest[0] - 0.02, (honest, lied)
    assert lied[1] < honest[1] - 0.3, (honest, lied)
