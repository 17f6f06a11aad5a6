"""Strategies for existing Flower apps: equal to a simulation, resumed to the bit, and safe from bad replies."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

import comfedl as cf
from comfedl.core.offset import Excess
from comfedl.flower import EqualStrategy, MethodStrategy, QFedAvgStrategy, RobustStrategy, messaging
from comfedl.flower.app_replies import Layout, StatisticsBySite
from comfedl.utils.errors import ConfigError, QuorumError, RunFolderError
from helpers.in_process import InProcess

NAMES = ["north", "south", "west"]
LR, STEPS, ROUNDS = 0.2, 3, 6


def federation() -> cf.FederatedData:
    generator = torch.Generator().manual_seed(3)

    def site(n: int, turn: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        return x, (x[:, 0] + turn * x[:, 1] > 0).long()

    return cf.FederatedData({name: site(n, turn) for name, n, turn in zip(NAMES, (40, 25, 9), (0, 1, -2), strict=True)})


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()


class Tied(nn.Module):
    """Its last layer's weight is the transpose's: one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def app_of(make: Callable[[], nn.Module], fed: cf.FederatedData, named: bool = True, batch: bool = False) -> ClientApp:
    """An app as people write them; ``batch`` measures the received model as the first training step does."""
    app = ClientApp()

    def received(message: Message, context: Context) -> tuple[nn.Module, Tensor, Tensor]:
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model, *fed.train[str(context.node_config["site"])]

    def reply(message: Message, context: Context, more: dict[str, Any], metrics: dict[str, float]) -> Message:
        parts: dict[str, Any] = {**more, "metrics": MetricRecord(metrics)}
        if named:
            parts["about"] = ConfigRecord({"site": str(context.node_config["site"])})
        return Message(RecordDict(parts), reply_to=message)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, train: bool = False) -> float:
        model.train(train)
        before = {name: part.clone() for name, part in model.state_dict().items()}
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        model.load_state_dict(before)
        return loss

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, x, y = received(message, context)
        loss = loss_of(model, x, y, train=batch)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        metrics = {"loss": loss, "num-examples": len(x)}
        return reply(message, context, {"arrays": ArrayRecord(model.state_dict())}, metrics)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, x, y = received(message, context)
        model.eval()
        accuracy = float((model(x).argmax(dim=1) == y).double().mean())
        return reply(
            message, context, {}, {"eval_loss": loss_of(model, x, y), "eval_acc": accuracy, "num-examples": len(x)}
        )

    return app


def grid_of(app: ClientApp, names: list[str] = NAMES) -> InProcess:
    return InProcess({(7919 * (k + 3)) % 101: (app, {"site": name}) for k, name in enumerate(names)})


def run(
    strategy: Strategy, make: Callable[[], nn.Module] = dense, grid: InProcess | None = None, **more: Any
) -> Result:
    grid = grid or grid_of(app_of(make, federation()))
    return strategy.start(grid, ArrayRecord(make().state_dict()), **{"num_rounds": ROUNDS, **more})


def common(**more: Any) -> dict[str, Any]:
    return {"lr": LR, "local_steps": STEPS, "batch_size": None, **more}


METHODS: dict[str, cf.Algorithm] = {
    "robust": cf.Robust(gamma=0.1, memory=None, **common()),
    "robust with memory": cf.Robust(gamma=0.1, **common()),
    "kl alone": cf.Robust(gamma=0.1, memory=None, server_optimizer=None, server_average=None, **common()),
    "algorithm 1": cf.ComFedL(outer=cf.KL(gamma=0.2), **common()),
    "safe": cf.ComFedL(outer=cf.KL(gamma=0.2), step="safe", **common()),
    "strong": cf.Robust(gamma=0.1, memory=None, defence="strong", **common()),
    "q-fedavg": cf.QFedAvg(q=1.0, **common()),
    "fedavg": cf.FedAvg(**common()),
    "equal": cf.FedAvg(weighting="uniform", server_optimizer=cf.optim.Yogi(lr=0.01), **common()),
}


@pytest.mark.parametrize("make", [dense, normalised, Tied], ids=["dense", "with buffers", "tied"])
@pytest.mark.parametrize("name", METHODS)
def test_a_strategy_ends_where_the_simulation_does(name: str, make: Callable[[], nn.Module]) -> None:
    method, fed = METHODS[name], federation()
    expected = cf.fit(make(), fed, method, rounds=ROUNDS, eval_every=ROUNDS)
    grid = grid_of(app_of(make, fed, batch=name == "robust with memory"))
    result = run(MethodStrategy(method, model=make()), make, grid)
    state = result.arrays.to_torch_state_dict()
    assert list(state) == list(make().state_dict())
    for key, part in expected.state_dict().items():
        torch.testing.assert_close(state[key], part, rtol=0, atol=1e-9)
    assert not torch.allclose(next(iter(state.values())), next(iter(make().state_dict().values())), atol=1e-3)
    weights = {row["client"]: row["weight"] for row in expected.clients if row["round"] == ROUNDS}
    metrics = result.train_metrics_clientapp[ROUNDS]
    assert {site: metrics[f"weight/{site}"] for site in NAMES} == pytest.approx(weights, abs=1e-9)


def test_the_short_forms_are_their_methods() -> None:
    strong = RobustStrategy(0.2, lr=0.3, local_steps=7, defence="strong", fraction_evaluate=0.5, quorum=0.9)
    assert strong.method == cf.Robust(0.2, lr=0.3, local_steps=7, memory=None, defence="strong")
    assert (strong.fraction_evaluate, strong.quorum) == (0.5, 0.9)
    assert QFedAvgStrategy(1.0, lr=0.3).method == cf.QFedAvg(1.0, lr=0.3)
    assert EqualStrategy(min_train_nodes=3).method == cf.FedAvg(weighting="uniform")


def test_the_worst_site_and_every_site_are_reported(tmp_path: Path) -> None:
    result = run(RobustStrategy(lr=LR, local_steps=STEPS, out=tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [(line["round"], line["phase"]) for line in lines] == [
        (k, phase) for k in range(1, ROUNDS + 1) for phase in ("train", "evaluate")
    ]
    last, fed = result.evaluate_metrics_clientapp[ROUNDS], federation()
    model = dense()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    found = {name: float((model(x).argmax(dim=1) == y).double().mean()) for name, (x, y) in fed.train.items()}
    assert {name: last[f"eval_acc/{name}"] for name in NAMES} == pytest.approx(found)
    assert last["eval_acc.worst"] == pytest.approx(min(found.values()))
    assert last["eval_acc.mean"] == pytest.approx(sum(found.values()) / 3)
    assert last["eval_loss.worst"] == max(float(str(last[f"eval_loss/{name}"])) for name in NAMES)
    sizes = {name: len(x) for name, (x, _) in fed.train.items()}
    pooled = sum(found[name] * sizes[name] for name in NAMES) / sum(sizes.values())
    assert last["eval_acc"] == pytest.approx(pooled)  # as Flower's FedAvg reports it
    assert lines[-1]["sites"]["west"]["eval_acc"] == pytest.approx(found["west"])
    assert sum(site["weight"] for site in lines[-2]["sites"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "small"),
    [("eval_loss", True), ("eval_acc", False), ("accuracy", False), ("val-error", True), ("eval_mae", True),
     ("auc", False), ("gloss", False), ("wait", True)],
)  # fmt: skip
def test_the_worst_is_the_largest_of_a_loss_and_the_smallest_of_others(name: str, small: bool) -> None:
    found = StatisticsBySite("n", frozenset({"wait"})).of({"a": {name: 1.0, "n": 1.0}, "b": {name: 3.0, "n": 3.0}})
    assert found[f"{name}.worst"] == found[f"{name}.worst10"] == (3.0 if small else 1.0)
    assert (found[name], found[f"{name}.mean"]) == (2.5, 2.0)


def test_own_functions_for_metrics_are_used() -> None:
    def own(contents: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"sites": len(contents), key: 7})

    result = run(RobustStrategy(lr=LR, local_steps=STEPS, evaluate_metrics_aggr_fn=own), num_rounds=1)
    last = result.evaluate_metrics_clientapp[1]
    assert (last["sites"], last["num-examples"]) == (3, 7)
    assert "eval_acc" not in last and "eval_acc.worst" in last


# Saved and resumed.


class Stopped(BaseException):
    pass


class Interrupted(InProcess):
    """A grid that ends the process, so to say, at one of its messages."""

    stop_at = 10**9

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        if messages and len(self.seen) + len(messages) > self.stop_at:
            raise Stopped
        return super().push_messages(messages)


def interrupted(fed: cf.FederatedData, make: Callable[[], nn.Module], stop_at: int, named: bool) -> Interrupted:
    grid = Interrupted(grid_of(app_of(make, fed, named)).sites)
    grid.stop_at = stop_at
    return grid


def assert_same(one: Result, other: Result) -> None:
    ours, theirs = one.arrays.to_torch_state_dict(), other.arrays.to_torch_state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(part, theirs[name]) for name, part in ours.items())
    for field in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        before, after = getattr(one, field), getattr(other, field)
        assert {k: dict(v) for k, v in before.items()} == {k: dict(v) for k, v in after.items()}, field


def central(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"norm": float(sum(part.double().norm() for part in arrays.to_torch_state_dict().values()))})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("stop_at", [0, 4, 6, 13, 16, 29])  # before and within a round, in its training or evaluation
def test_a_stopped_run_continues_to_the_bit(stop_at: int, named: bool, tmp_path: Path) -> None:
    fed = federation()

    def strategy(folder: str) -> RobustStrategy:
        out = tmp_path / folder
        return RobustStrategy(
            lr=LR, local_steps=STEPS, memory=0.98, model=normalised(), out=out, resume=True, fraction_train=0.7
        )

    def grid(stop: int) -> Interrupted:
        return interrupted(fed, normalised, stop, named)

    whole = run(strategy("whole"), normalised, grid(10**9), evaluate_fn=central)
    first, second = grid(stop_at), grid(10**9)
    with pytest.raises(Stopped):
        run(strategy("stopped"), normalised, first, evaluate_fn=central)
    again = run(strategy("stopped"), normalised, second, evaluate_fn=central)
    assert_same(whole, again)
    assert len(first.seen) + len(second.seen) == ROUNDS * (2 + 3)  # nothing that was done was asked for again
    histories = [(tmp_path / folder / "history.jsonl").read_text() for folder in ("whole", "stopped")]
    assert sorted(histories[0].splitlines()) == sorted(histories[1].splitlines())
    assert_same(whole, run(strategy("stopped"), normalised, grid(0), evaluate_fn=central))  # a finished run asks nobody


def test_more_rounds_are_those_of_the_longer_run(tmp_path: Path) -> None:
    def strategy(folder: str) -> RobustStrategy:
        return RobustStrategy(lr=LR, local_steps=STEPS, out=tmp_path / folder, resume=True)

    run(strategy("short"), num_rounds=2)
    assert_same(run(strategy("long")), run(strategy("short")))
    with pytest.raises(ConfigError, match=r"has 6 rounds already, and num_rounds is 2"):
        run(strategy("short"), num_rounds=2)


def test_a_history_line_that_was_cut_is_written_again(tmp_path: Path) -> None:
    def strategy() -> RobustStrategy:
        return RobustStrategy(lr=LR, local_steps=STEPS, out=tmp_path, resume=True)

    first = run(strategy(), num_rounds=3)
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = run(strategy(), num_rounds=3)
    assert path.read_bytes() == whole
    assert_same(first, again)


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(RobustStrategy(lr=LR, local_steps=STEPS, out=out), num_rounds=1)
    with pytest.raises(RunFolderError, match="has a run already; continue it with resume=True"):
        run(RobustStrategy(lr=LR, local_steps=STEPS, out=out), num_rounds=1)
    with pytest.raises(RunFolderError, match=r"has gamma = 0.1 and the strategy 0.2; give the same as before"):
        run(RobustStrategy(0.2, lr=LR, local_steps=STEPS, out=out, resume=True), num_rounds=2)
    with pytest.raises(RunFolderError, match=r"has 1\.weight = None and the strategy \(5,\) torch.float64"):
        run(RobustStrategy(lr=LR, local_steps=STEPS, model=normalised(), out=out, resume=True), normalised)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunFolderError, match="has files of something else"):
        run(RobustStrategy(lr=LR, local_steps=STEPS, out=tmp_path / "other", resume=True))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


# Replies that cannot be used.


def changed(change: Callable[[RecordDict], None]) -> Callable[[Message, Message], Message]:
    def tamper(message: Message, reply: Message) -> Message:
        if "arrays" in reply.content:
            change(reply.content)
        return reply

    return tamper


def put(name: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        arrays = content["arrays"]
        arrays[name] = value if isinstance(value, Array) else Array(value)  # type: ignore[index]

    return change


def metric(name: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        metrics = content["metrics"]
        if value is None:
            del metrics[name]  # type: ignore[attr-defined]
        else:
            metrics[name] = value  # type: ignore[index]

    return change


def add(name: str, record: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content[name] = record

    return change


def drop(content: RecordDict) -> None:
    del content["arrays"]["0.bias"]  # type: ignore[attr-defined]


BIAS = "0.bias"
OBJECTS = io.BytesIO()  # NumPy's format, with a pickle in it
np.save(OBJECTS, np.array([None] * 5, dtype=object), allow_pickle=True)
BAD: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "nan": (put(BIAS, np.full(5, np.nan)), "its model is not finite"),
    "shape": (put(BIAS, np.zeros(4)), r"its array '0.bias' is \(4,\) torch.float64 and not \(5,\) torch.float64"),
    "type": (put(BIAS, np.zeros(5, np.float32)), r"is \(5,\) torch.float32 and not"),
    "huge": (put(BIAS, np.zeros(10**6)), "has 8,000,128 bytes and not at most 4,136"),
    "junk": (put(BIAS, Array("float64", (5,), "numpy.ndarray", b"junk")), r"'0.bias' cannot be read \(\w+\)"),
    "pickle": (put(BIAS, Array("float64", (5,), "pickle", b"\x80")), r"'0.bias' cannot be read \(TypeError\)"),
    "objects": (put(BIAS, Array("object", (5,), "numpy.ndarray", OBJECTS.getvalue())), r"'0.bias' cannot be read"),
    "more": (put("extra", np.zeros(1)), "it has the array 'extra'"),
    "fewer": (drop, "it lacks the array '0.bias'"),
    "two records": (add("arrays 2", ArrayRecord([np.zeros(1)])), "it has 2 ArrayRecords and not one"),
    "two metrics": (add("metrics 2", MetricRecord({"loss": 1.0})), "it has 2 MetricRecords and not one"),
    "no loss": (metric("loss", None), "have no finite number 'loss', the loss of the received model"),
    "nan loss": (metric("loss", float("nan")), "have no finite number 'loss'"),
    "list": (metric("loss", [1.0]), "have no finite number 'loss'"),
    "huge integer": (metric("num-examples", -(2**60)), "have no positive number 'num-examples'"),
    "no samples": (metric("num-examples", None), "have no positive number 'num-examples'"),
    "name": (add("about", ConfigRecord({"site": "\n"})), "must be a printable text"),
    "number as name": (add("about", ConfigRecord({"site": 3})), "must be a printable text"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_left_out_and_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    change, said = BAD[kind]
    fed = federation()
    grid = grid_of(app_of(dense, fed))
    west = sorted(grid.sites)[[str(grid.sites[node][1]["site"]) for node in sorted(grid.sites)].index("west")]
    grid.tamper[west] = changed(change)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = run(RobustStrategy(lr=LR, local_steps=STEPS), grid=grid, num_rounds=2)
    logged = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"Round 1: the reply of node {west} is left out: ") for line in logged), logged
    assert any(re.search(said, line) for line in logged), logged
    weights = {name for name in result.train_metrics_clientapp[2] if str(name).startswith("weight/")}
    assert weights == {"weight/north", "weight/south"}
    two = cf.FederatedData({name: fed.train[name] for name in ("north", "south")})
    expected = run(
        RobustStrategy(lr=LR, local_steps=STEPS), grid=grid_of(app_of(dense, two), ["north", "south"]), num_rounds=2
    )
    for name, part in expected.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(result.arrays.to_torch_state_dict()[name], part, rtol=0, atol=1e-12)


def test_no_node_takes_another_site_s_name(caplog: pytest.LogCaptureFixture) -> None:
    fed = federation()
    grid = grid_of(app_of(dense, fed))
    nodes = {str(settings["site"]): node for node, (_, settings) in grid.sites.items()}
    strategy, arrays = RobustStrategy(lr=LR, local_steps=STEPS), ArrayRecord(dense().state_dict())

    def weighted(number: int, impostors: list[str]) -> set[str]:
        grid.tamper = {nodes[name]: changed(add("about", ConfigRecord({"site": "south"}))) for name in impostors}
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        _, metrics = strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert metrics is not None
        return {str(name)[7:] for name in metrics if str(name).startswith("weight/")}

    strategy.quorum = 0
    assert weighted(1, ["west"]) == {"north"}  # who of two newcomers is the site, nobody knows
    assert weighted(2, []) == {"north", "south", "west"}
    assert weighted(3, ["west", "north"]) == {"south"}
    said = [record.getMessage() for record in caplog.records]
    assert (
        f"Round 1: the reply of node {nodes['south']} is left out: several nodes state that they are site 'south'."
        in said
    )
    assert any(f"node {nodes['west']} is left out: it was site 'west' before and now states" in line for line in said)
    grid.sites[5000] = (app_of(dense, fed), {"site": "south"})
    assert weighted(4, []) == {"north", "south", "west"}
    assert "Round 4: the reply of node 5000 is left out: another node is site 'south'." in caplog.text


def test_too_few_good_replies_end_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    fed = federation()
    grid, good = grid_of(app_of(dense, fed)), grid_of(app_of(dense, fed))

    def strategy() -> RobustStrategy:
        return RobustStrategy(lr=LR, local_steps=STEPS, quorum=0.9, out=tmp_path / "run", resume=True)

    node = sorted(grid.sites)[0]
    grid.tamper[node] = lambda message, reply: (
        changed(put(BIAS, np.full(5, np.nan)))(message, reply) if len(grid.seen) > 6 else reply
    )
    with pytest.raises(QuorumError, match=rf"Round 2: only 2 of 3 replies can be used \(node {node}: .* and resume"):
        run(strategy(), grid=grid)
    whole = run(RobustStrategy(lr=LR, local_steps=STEPS), grid=good)
    assert_same(whole, run(strategy()))


def test_a_site_that_is_away_comes_back_and_a_new_one_is_welcome() -> None:
    fed = federation()
    grid = grid_of(app_of(dense, fed))
    nodes = {str(settings["site"]): node for node, (_, settings) in grid.sites.items()}
    everyone = dict(grid.sites)
    by_round: dict[int, list[str]] = {1: ["north", "south"], 2: NAMES, 3: ["north", "west"], 4: NAMES}
    strategy = RobustStrategy(lr=LR, local_steps=STEPS, memory=0.98)
    arrays = ArrayRecord(dense().state_dict())
    for number, present in by_round.items():
        grid.sites = {nodes[name]: everyone[nodes[name]] for name in present}
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        found, metrics = strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert found is not None and metrics is not None
        assert {str(name)[7:] for name in metrics if str(name).startswith("weight/")} == {*present}
    # A site whose SuperNode has another number now, without a key, is known by its name.
    del grid.sites[nodes["west"]]
    grid.sites[nodes["west"] + 1000] = everyone[nodes["west"]]
    messages = strategy.configure_train(5, arrays, ConfigRecord(), grid)
    _, metrics = strategy.aggregate_train(5, grid.send_and_receive(messages))
    assert metrics is not None and "weight/west" in metrics
    assert strategy._run is not None and strategy._run.sites == ["north", "south", "west"]


def test_replies_that_are_late_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then the grid is asked again and again; after that, the round goes on with the others."""
    grid = grid_of(app_of(dense, federation()))
    node, clock = sorted(grid.sites)[1], [0.0]
    pull, pulls = grid.pull_messages, []
    monkeypatch.setattr(messaging.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(messaging.time, "monotonic", lambda: clock[0])

    def late(names: Any) -> Any:
        pulls.append(len(list(names)))
        return pull(names) if clock[0] > 1 else []  # the replies take a second

    monkeypatch.setattr(grid, "pull_messages", late)
    grid.tamper[node] = lambda message, reply: None
    result = run(RobustStrategy(lr=LR, local_steps=STEPS), grid=grid, num_rounds=1, timeout=5.0)
    assert 10 < clock[0] < 12 and max(pulls) == 3 and pulls[-1] == 1  # 5 s each for training and evaluation
    assert sum(str(name).startswith("weight/") for name in result.train_metrics_clientapp[1]) == 2
    assert "Round 1: 1 of 3 nodes did not answer in time." in caplog.text


def test_a_fraction_of_the_sites_is_drawn_by_seed_and_round() -> None:
    def asked(seed: int) -> list[int]:
        grid = grid_of(app_of(dense, federation()))
        run(RobustStrategy(lr=LR, local_steps=STEPS, fraction_train=0.7, seed=seed), grid=grid)
        return [node for node, _ in grid.seen]

    assert asked(0) == asked(0) != asked(1)
    drawn = [frozenset(asked(0)[5 * k : 5 * k + 2]) for k in range(ROUNDS)]
    assert len(set(drawn)) > 1 and all(len(two) == 2 for two in drawn)


# What cannot be.


def test_what_a_strategy_cannot_do_is_said() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: MethodStrategy(cf.DRFA()), "is drfa, but it must be Robust, ComFedL, QFedAvg or FedAvg"),
        (lambda: MethodStrategy("robust"), "is 'robust', but it must be"),  # type: ignore[arg-type]
        (lambda: RobustStrategy(lr=0.1, local_steps=1, inner=cf.Adapt(0.1)), "clients must compute"),
        (lambda: RobustStrategy(lr=0.1, local_steps=1, offset=Excess()), "offset of robust is Excess"),
        (lambda: QFedAvgStrategy(lr=0.1, sampling="samples"), 'use sampling = "uniform"'),
        (
            lambda: RobustStrategy(lr=0.1, local_steps=1, fraction_fit=1.0),
            "no argument 'fraction_fit'; .*fraction_train",
        ),
        (lambda: RobustStrategy(lr=0.1, local_steps=1, resume=True), "out is None"),
        (lambda: RobustStrategy(lr=0.1, local_steps=1, quorum=1.5), "quorum is 1.5"),
        (lambda: run(RobustStrategy(lr=0.1, local_steps=1), normalised), "'1.running_mean' looks like a buffer"),
        (lambda: run(RobustStrategy(lr=0.1, local_steps=1, model=normalised())), "'1.bias' is only in one of them"),
        (lambda: run(RobustStrategy(lr=0.1, local_steps=1, model=["x"])), "names the buffer 'x', which is not among"),
        (lambda: RobustStrategy(lr=0.1, local_steps=1).start(grid_of(ClientApp()), ArrayRecord()), "is empty"),
        (lambda: RobustStrategy(lr=0.1, local_steps=1).aggregate_train(1, []), "has no model yet"),
    ]
    for case, said in cases:
        with pytest.raises(ConfigError, match=said):
            case()


def test_buffers_may_be_named() -> None:
    arrays = ArrayRecord(normalised().state_dict())
    named = Layout.of(arrays, ["1.running_mean", "1.running_var", "1.num_batches_tracked"])
    assert named == Layout.of(arrays, normalised())
