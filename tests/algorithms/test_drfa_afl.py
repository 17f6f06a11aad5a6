"""DRFA and AFL, sections 2 and 7bis: descent in w, ascent in the weights lambda on the simplex."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from scipy.stats import chisquare
from torch import Tensor

import comfedl as cf
from comfedl.algorithms.context import RoundContext
from comfedl.core import simplex
from comfedl.engines.embedded import LocalReplies
from helpers.reference import (
    NAMES,
    SIZES,
    Array,
    apart,
    by_hand_clients,
    close,
    gradient,
    linear,
    locally,
    loss,
    matrix,
    project,
    recorded,
    run,
    start,
    train_data,
)

N, LR, STEPS, ROUNDS = len(SIZES), 0.3, 3, 4
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}


# AFL.


def afl_by_hand(dual_lr: float, steps: int, rounds: int = ROUNDS) -> tuple[list[Array], list[Array]]:
    """The iterates w_0, w_1, ... and lambda_0, lambda_1, ...; both move from the same point."""
    clients, iterates, duals = by_hand_clients(), [start()], [np.full(N, 1 / N)]
    for _ in range(rounds):
        W, p = iterates[-1], duals[-1]
        ends = [locally(W, lambda V, c=c: gradient(V, c), LR, steps)[-1] for c in clients]
        iterates.append(sum(share * end for share, end in zip(p, ends, strict=True)))
        duals.append(project(p + dual_lr * np.array([loss(W, c) for c in clients])))
    return iterates, duals


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dual_lr", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("steps", [1, 3])
def test_afl_by_hand(average: bool, dual_lr: float, steps: int) -> None:
    iterates, duals = afl_by_hand(dual_lr, steps)
    result = run(cf.AFL(dual_lr=dual_lr, average=average, **{**FULL, "local_steps": steps}), ROUNDS)
    close(matrix(result.params), np.mean(iterates[1:], axis=0) if average else iterates[-1])
    np.testing.assert_allclose(recorded(result, "dual"), duals[:-1], atol=1e-9)
    np.testing.assert_allclose(recorded(result, "weight"), duals[:-1], atol=1e-9)


def test_the_dual_steps_of_the_test_above_reach_the_edge_of_the_simplex() -> None:
    assert np.ptp(afl_by_hand(0.05, 1)[1][-1]) > 0.02
    assert (afl_by_hand(0.5, 1)[1][-1] == 0).any()


def test_afl_takes_one_local_step_unless_told() -> None:
    assert cf.AFL().local_steps == 1 and cf.AFL().average


def test_afl_average_false_is_only_another_report() -> None:
    """Averaging changes what is reported, not the path: lambda is the same."""
    one, other = (run(cf.AFL(dual_lr=0.3, average=average, **FULL), ROUNDS) for average in (True, False))
    assert recorded(one, "dual")[-1].tolist() == recorded(other, "dual")[-1].tolist()
    assert apart(one, other) > 1e-2


def test_afl_w_and_lambda_see_the_same_batch() -> None:
    """With minibatches the loss that moves lambda is that of the first step's batch, at the model received."""
    seen: dict[str, list[list[float]]] = {}
    fed = {name: (x, np.arange(len(x)) + 100.0 * i) for i, (name, (x, _)) in enumerate(train_data().items())}

    def squares(output: Tensor, y: Tensor) -> Tensor:
        seen.setdefault("abcde"[int(y[0]) // 100], []).append(y.tolist())
        return (output[:, 0] - y / 500).square().mean()

    algorithm = cf.AFL(dual_lr=0.05, lr=0.1, batch_size=2, personal_steps=0)
    result = cf.fit(linear(), cf.FederatedData(fed), algorithm, rounds=2, loss=squares, eval_every=2)
    del seen["a"][0]  # the loss is tried on two samples of the first client before the first round
    W = start()
    losses = []
    for name in NAMES:
        labels = seen[name][0]  # the first thing that a client sees is its first batch
        x = np.array([fed[name][0][int(label) % 100] for label in labels])
        losses.append(np.mean((x @ W[0, :-1] + W[0, -1] - np.array(labels) / 500) ** 2))
    expected = project(1 / N + 0.05 * np.array(losses))
    np.testing.assert_allclose(recorded(result, "dual")[-1], expected, atol=1e-9)


def test_afl_asks_everybody() -> None:
    with pytest.raises(cf.ConfigError, match="clients_per_round"):
        run(cf.AFL(), clients_per_round=2)
    assert run(cf.AFL(), clients_per_round=N).rounds[-1]["participants"] == N


# DRFA.


class Scripted:
    """A generator with scripted draws that records its calls."""

    def __init__(self, purpose: str, clients: Sequence[int], snapshot: int, losses: Sequence[int]) -> None:
        self.purpose, self.draws = purpose, {"clients": clients, "losses": losses}
        self.snapshot = snapshot
        self.p: Array | None = None

    def choice(self, n: int, size: int, replace: bool = True, p: Array | None = None, shuffle: bool = True) -> Array:
        assert n == N and replace is (self.purpose == "clients")
        self.p = p
        drawn = np.array(self.draws[self.purpose])
        assert len(drawn) == size
        return drawn

    def integers(self, low: int, high: int) -> int:
        assert self.purpose == "snapshot" and low == 1 and low <= self.snapshot < high
        return self.snapshot


# Who trains (with repeats), after which step the snapshot is taken, who reports a loss.
SCRIPT = [([2, 0, 2], 1, [0, 3, 4]), ([1, 1, 1], 3, [1, 2, 3]), ([4, 3, 0], 2, [0, 1, 2]), ([2, 2, 4], 3, [2, 3, 4])]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Scripted]]:
    made: list[Scripted] = []

    def rng(self: RoundContext, purpose: str) -> Scripted:
        made.append(Scripted(purpose, *SCRIPT[self.number - 1]))
        return made[-1]

    monkeypatch.setattr(RoundContext, "rng", rng)
    yield made


def drfa_by_hand(
    script: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    dual_lr: float,
    floor: float = 0.0,
    baseline: bool = False,
    steps: int = STEPS,
) -> tuple[Array, list[Array]]:
    clients, W, duals = by_hand_clients(), start(), [np.full(N, 1 / N)]
    for drawn, t, seen in script:
        paths = [locally(W, lambda V, i=i: gradient(V, clients[i]), LR, steps) for i in drawn]
        snapshot = np.mean([path[t] for path in paths], axis=0)
        W = np.mean([path[-1] for path in paths], axis=0)
        losses = np.array([loss(snapshot, clients[i]) for i in seen])
        v = np.zeros(N)
        v[list(seen)] = N / len(seen) * (losses - (losses.mean() if baseline else 0.0))
        raised = np.maximum(project(duals[-1] + steps * dual_lr * v), floor)
        duals.append(raised / raised.sum())
    return W, duals


@pytest.mark.parametrize("options", [{}, {"floor": 0.05}, {"baseline": True}, {"whole_loss": True}])
@pytest.mark.parametrize("dual_lr", [0.0, 0.01, 0.08])
def test_drfa_by_hand(scripted: list[Scripted], dual_lr: float, options: dict[str, Any]) -> None:
    kept = {name: value for name, value in options.items() if name != "whole_loss"}
    W, duals = drfa_by_hand(SCRIPT, dual_lr, **kept)
    result = run(cf.DRFA(dual_lr=dual_lr, **options, **FULL), len(SCRIPT), clients_per_round=3)
    close(matrix(result.params), W)
    np.testing.assert_allclose(recorded(result, "dual"), duals[:-1], atol=1e-9)
    # Clients are drawn by lambda itself, with replacement.
    chances = [made.p for made in scripted if made.purpose == "clients"]
    np.testing.assert_allclose(chances, duals[:-1], atol=1e-9)
    # A client that is drawn twice weighs twice.
    for weights, (drawn, _, _) in zip(recorded(result, "weight"), SCRIPT, strict=True):
        np.testing.assert_allclose(weights, np.bincount(drawn, minlength=N) / 3, atol=1e-12)


def test_the_dual_step_of_the_test_above_reaches_the_edge_of_the_simplex() -> None:
    assert (drfa_by_hand(SCRIPT, 0.08)[1][-1] == 0).any()
    assert np.ptp(drfa_by_hand(SCRIPT, 0.01)[1][-1]) > 0.02


def test_drfa_with_its_own_draws_by_hand() -> None:
    """Nothing scripted: the draws are rebuilt from what the round asked of its clients."""
    asked: list[tuple[str, list[int], int | None]] = []
    ask = RoundContext.ask

    def spy(self: RoundContext, step: str, clients: Sequence[int], message: dict[str, Any]) -> Any:
        asked.append((step, list(clients), int(message["snapshot"]) if "snapshot" in message else None))
        return ask(self, step, clients, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundContext, "ask", spy)
        result = run(cf.DRFA(dual_lr=0.03, **FULL), 6, clients_per_round=3)
    script = [(drawn, t, seen) for (_, drawn, t), (_, seen, _) in zip(asked[::2], asked[1::2], strict=True)]
    assert [step for step, _, _ in asked] == ["train", "loss"] * 6
    assert all(len(drawn) == len(seen) == len({*seen}) == 3 for drawn, _, seen in script)
    W, duals = drfa_by_hand(script, 0.03)
    close(matrix(result.params), W)
    np.testing.assert_allclose(recorded(result, "dual"), duals[:-1], atol=1e-9)


class Silent:
    """Clients that do not train and report scripted losses: only the server's part is left."""

    names, sizes = tuple(NAMES), np.array(list(SIZES.values()))

    def __init__(self, losses: Sequence[float] = (0.0,) * N) -> None:
        self.losses = losses
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []

    def run(self, step: str, clients: Sequence[int], message: dict[str, Any], round: int) -> LocalReplies:
        self.asked.append((step, list(clients), message))
        replies = [
            {"model": message["model"], "snapshot": message["model"], "loss": torch.tensor(self.losses[i])}
            for i in clients
        ]
        return LocalReplies(clients, replies)


def served(algorithm: cf.DRFA, engine: Silent, state: dict[str, Any], round: int, m: int) -> dict[str, Any]:
    new, _ = algorithm.round(state, RoundContext(round, 0, m, engine))  # type: ignore[arg-type]
    return new


EMPTY: dict[str, Any] = {"params": {"w": torch.zeros(1)}, "buffers": {}}


def test_drfa_draws_as_it_says() -> None:
    """Trainers with the chances lambda, the snapshot evenly from 1 to tau, reporters evenly, all independent."""
    engine, lam = Silent(), np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    algorithm = cf.DRFA(dual_lr=0.0, local_steps=4)
    for number in range(1, 2001):
        served(algorithm, engine, {"model": EMPTY, "duals": torch.from_numpy(lam)}, number, 2)
    trainers, reporters = engine.asked[::2], engine.asked[1::2]
    drawn = np.bincount([i for _, clients, _ in trainers for i in clients], minlength=N)
    assert drawn[4] == 0 and chisquare(drawn[:4], 4000 * lam[:4]).pvalue > 1e-3
    twice = sum(clients[0] == clients[1] for _, clients, _ in trainers)
    assert abs(twice / 2000 - np.square(lam).sum()) < 4 * math.sqrt(0.3 * 0.7 / 2000)
    snapshots = np.bincount([int(message["snapshot"]) for _, _, message in trainers], minlength=5)
    assert snapshots[0] == 0 and chisquare(snapshots[1:]).pvalue > 1e-3
    assert chisquare(np.bincount([i for _, clients, _ in reporters for i in clients])).pvalue > 1e-3
    assert all(clients[0] < clients[1] for _, clients, _ in reporters)
    # Who reports does not depend on who trains, nor the snapshot on either.
    together = np.zeros((4, N))
    for (_, (first, _), _), (_, seen, _) in zip(trainers, reporters, strict=True):
        together[first, seen] += 1
    expected = np.outer(together.sum(axis=1), together.sum(axis=0)) / together.sum()
    assert ((together - expected) ** 2 / expected).sum() < 40  # 12 degrees of freedom


def test_drfa_survives_lambda_with_fewer_clients_than_it_draws() -> None:
    engine = Silent()
    state = {"model": EMPTY, "duals": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)}
    served(cf.DRFA(), engine, state, 1, 4)
    assert engine.asked[0][1] == [2, 2, 2, 2]


@pytest.mark.parametrize("large", [1e3, 1e9, 1e30])
def test_drfa_lambda_stays_on_the_simplex_whatever_the_losses(large: float) -> None:
    engine = Silent([0.1, large, 0.3, large, 0.2])
    state: dict[str, Any] = {"model": EMPTY, "duals": torch.full((N,), 1 / N, dtype=torch.float64)}
    for number in range(1, 30):
        state = served(cf.DRFA(dual_lr=0.08), engine, state, number, 3)
        assert float(state["duals"].sum()) == pytest.approx(1, abs=1e-12) and float(state["duals"].min()) >= 0


def test_drfa_a_common_constant_changes_nothing_with_everybody_or_with_the_baseline() -> None:
    """With some of the clients the absent ones get 0, so a constant matters, unless the baseline takes it out."""

    def moved(shift: float, m: int, **options: Any) -> Tensor:
        engine = Silent([0.1 + shift, 0.5 + shift, 0.2 + shift, 0.3 + shift, 0.15 + shift])
        state = {"model": EMPTY, "duals": torch.full((N,), 1 / N, dtype=torch.float64)}
        duals: Tensor = served(cf.DRFA(dual_lr=0.01, **options), engine, state, 1, m)["duals"]
        return duals

    torch.testing.assert_close(moved(0, N), moved(7, N))
    torch.testing.assert_close(moved(0, 3, baseline=True), moved(7, 3, baseline=True))
    assert float((moved(0, 3) - moved(7, 3)).abs().max()) > 0.01


# Invariant 5.


@pytest.mark.parametrize("batch_size", [None, 3])
def test_drfa_without_a_dual_step_is_sampled_averaging(scripted: list[Scripted], batch_size: int | None) -> None:
    """The same clients, drawn with repeats, the same batches, averaged evenly; lambda stays uniform."""
    options = {**FULL, "batch_size": batch_size}
    drfa = run(cf.DRFA(dual_lr=0.0, **options), len(SCRIPT), clients_per_round=3)

    class Sampled(cf.FedAvg):
        """Federated averaging over the scripted clients, repeats included."""

        def round(self, state: Any, here: RoundContext) -> Any:
            drawn = sorted(SCRIPT[here.number - 1][0])
            replies = here.ask("train", drawn, {"model": state["model"]})
            models = list(replies.each("model"))
            params = {name: sum(model["params"][name] for model in models) / 3 for name in state["model"]["params"]}
            used = type(super().round(state, here)[1])(drawn, torch.full((3,), 1 / 3, dtype=torch.float64))
            return {"model": {"params": params, "buffers": {}}}, used

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundContext, "sample", lambda self, purpose="clients": [0, 1, 2])
        sampled = run(Sampled(**options), len(SCRIPT), clients_per_round=3)
    assert apart(drfa, sampled) < 1e-12
    np.testing.assert_allclose(recorded(drfa, "dual"), 1 / N, atol=1e-15)


def test_drfa_with_one_local_step_is_an_afl_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody drawn once, lambda uniform: the model's step is AFL's; lambda's differs only in where it looks.

    AFL takes the losses at the model received, DRFA at the snapshot, which after one step of one is the new model.
    """
    everybody = list(range(N))
    monkeypatch.setattr(RoundContext, "rng", lambda self, purpose: Scripted(purpose, everybody, 1, everybody))
    options = {**FULL, "local_steps": 1}
    drfa = run(cf.DRFA(dual_lr=0.05, **options), 2)
    monkeypatch.undo()
    one, two = (run(cf.AFL(dual_lr=0.05, average=False, **options), rounds) for rounds in (1, 2))
    afl_duals = recorded(two, "dual")
    assert apart(run_one(options, everybody), one) < 1e-12
    clients = by_hand_clients()
    at_new = np.array([loss(matrix(one.params), c) for c in clients])
    at_old = np.array([loss(start(), c) for c in clients])
    np.testing.assert_allclose(recorded(drfa, "dual")[1], project(1 / N + 0.05 * at_new), atol=1e-9)
    np.testing.assert_allclose(afl_duals[1], project(1 / N + 0.05 * at_old), atol=1e-9)


def run_one(options: dict[str, Any], everybody: list[int]) -> cf.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundContext, "rng", lambda self, purpose: Scripted(purpose, everybody, 1, everybody))
        return run(cf.DRFA(dual_lr=0.05, **options), 1)


def test_the_worst_client_is_better_off() -> None:
    """Its purpose: a lower worst loss than plain averaging at the end of a run."""
    options = {"lr": 0.1, "local_steps": 3, "batch_size": None}
    plain, afl = (
        run(method, 40, eval_every=40).rounds[-1]["train.loss.worst"]
        for method in (cf.FedAvg(weighting="uniform", **options), cf.AFL(0.1, average=False, **options))
    )
    assert afl < 0.97 * plain


# Invariant 9.

quick = settings(max_examples=60, deadline=None, derandomize=True)
points = st.lists(st.floats(-5, 5) | st.sampled_from([0.0, 0.2, 1.0]), min_size=1, max_size=8)


@quick
@given(points, st.floats(-1e4, 1e4))
def test_projection(values: list[float], shift: float) -> None:
    p = simplex.project(torch.tensor(values, dtype=torch.float64))
    assert float(p.min()) >= 0 and float(p.sum()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(p, project(np.array(values)), atol=1e-12)
    np.testing.assert_allclose(simplex.project(p), p, atol=1e-15)
    np.testing.assert_allclose(simplex.project(torch.tensor(values, dtype=torch.float64) + shift), p, atol=1e-10)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=5))
def test_projection_is_the_quadratic_programme(values: list[float]) -> None:
    v = np.array(values)
    found = minimize(
        lambda p: np.square(p - v).sum(),
        np.full(len(v), 1 / len(v)),
        jac=lambda p: 2 * (p - v),
        bounds=[(0, 1)] * len(v),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(len(v))},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    p = simplex.project(torch.from_numpy(v)).numpy()
    assert np.square(p - v).sum() <= np.square(found.x - v).sum() + 1e-9
    np.testing.assert_allclose(p, found.x, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cf.DRFA(dual_lr=-0.1),
        lambda: cf.DRFA(floor=1.0),
        lambda: cf.DRFA(floor=-0.1),
        lambda: cf.AFL(dual_lr=-0.1),
        lambda: cf.AFL(dual_lr=math.inf),
    ],
)
def test_values_out_of_range(make: Any) -> None:
    with pytest.raises(cf.ConfigError):
        make()


@pytest.mark.parametrize("floor", [0.01, 0.1])
def test_drfa_nobody_falls_out_with_a_floor(floor: float) -> None:
    """Everybody is raised to the floor before lambda is scaled back to 1, as the public code does."""
    bare, floored = (run(cf.DRFA(dual_lr=0.3, floor=least, **FULL), 8, clients_per_round=3) for least in (0.0, floor))
    assert min(duals.min() for duals in recorded(bare, "dual")) == 0
    assert min(duals.min() for duals in recorded(floored, "dual")) >= floor / (1 + N * floor)
