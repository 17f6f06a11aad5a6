"""Client and server optimisers, schedules, clipping, FedProx and SCAFFOLD: by hand, and by torch's own optimisers.

The gradient is that of softmax regression by hand (``helpers.reference``), clients use all of their data in every step,
and torch.optim takes the clients' steps. Every path of the embedded engine must agree to 1e-9.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import comfedl as cf
from comfedl.algorithms.aggregation import weighted_average
from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.core.learner import Learner, Model
from comfedl.core.protocol import Batches, Outcome
from comfedl.engines import make_engine
from comfedl.models.losses import LOSSES
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree
from helpers.reference import (
    NAMES,
    SIZES,
    Array,
    Client,
    Normed,
    apart,
    batchable,
    by_hand_clients,
    close,
    gradient,
    linear,
    matrix,
    run,
    same,
    start,
    taking_part,
    train_data,
)

LR, STEPS, ROUNDS = 0.1, 4, 4
COMMON: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
PATHS = ("stack", "vmap", "serial")
# Clients of equal size can be stacked with all of their data; the others show that nothing depends on it.
WHO = [[0, 2], [1, 2, 4], [0, 1, 2, 3, 4], [2, 3]]

Maker = Callable[[list[torch.Tensor], float], torch.optim.Optimizer]
TORCH: dict[str, tuple[Any, Maker]] = {
    "momentum and weight decay": (
        cf.optim.SGD(momentum=0.9, weight_decay=0.05),
        lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9, weight_decay=0.05),
    ),
    "weight decay": (cf.optim.SGD(weight_decay=0.3), lambda w, lr: torch.optim.SGD(w, lr, weight_decay=0.3)),
    "nesterov": (
        cf.optim.SGD(momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda w, lr: torch.optim.SGD(w, lr, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (cf.optim.Adam(), lambda w, lr: torch.optim.Adam(w, lr)),
    "adam, coupled": (
        cf.optim.Adam(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1),
        lambda w, lr: torch.optim.Adam(w, lr, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": (cf.optim.AdamW(weight_decay=0.2), lambda w, lr: torch.optim.AdamW(w, lr, weight_decay=0.2)),
}


class Local:
    """A client's local training by one of torch's optimisers, which it may keep."""

    def __init__(self, client: Client, make: Maker) -> None:
        self.client, self.make = client, make
        self.kept: tuple[torch.Tensor, torch.optim.Optimizer] | None = None

    def __call__(self, W: Array, lr: float, keep: bool, clip: float | None = None) -> Array:
        if self.kept is None or not keep:
            w = torch.zeros(W.shape, dtype=torch.float64, requires_grad=True)
            self.kept = w, self.make([w], lr)
        w, optimizer = self.kept
        for group in optimizer.param_groups:
            group["lr"] = lr
        w.data = torch.from_numpy(W.copy())
        for _ in range(STEPS):
            w.grad = torch.from_numpy(gradient(w.detach().numpy(), self.client))
            if clip is not None:
                nn.utils.clip_grad_norm_([w], clip)
            optimizer.step()
        return w.detach().numpy().copy()


def averaging(
    make: Maker,
    keep: bool = False,
    clip: float | None = None,
    factor: Callable[[int], float] = lambda number: 1.0,
    server: Callable[[Array, Array], Array] = lambda W, D: W + D,
) -> Array:
    """FedAvg by hand with the participants of ``WHO``."""
    locals_ = [Local(client, make) for client in by_hand_clients()]
    W = start()
    for number, who in enumerate(WHO, start=1):
        sizes = np.array([SIZES[NAMES[i]] for i in who], dtype=np.float64)
        ends = [locals_[i](W, LR * factor(number), keep, clip) for i in who]
        D = sum(n * (end - W) for n, end in zip(sizes / sizes.sum(), ends, strict=True))
        W = server(W, np.asarray(D))
    return W


def found(path: str = "stack", method: type[Algorithm] = cf.FedAvg, **options: Any) -> Array:
    with taking_part(WHO):
        return matrix(run(method(**COMMON, **options), ROUNDS, engine_options={"vectorize": path}).params)


def plain_torch(w: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(w, lr)


# Clients.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", TORCH)
def test_client_optimisers_are_those_of_torch(name: str, path: str) -> None:
    ours, theirs = TORCH[name]
    close(found(path, client_optimizer=ours), averaging(theirs))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (cf.optim.SGD(momentum=0.9, keep_state=True), lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9)),
        (cf.optim.Adam(keep_state=True), lambda w, lr: torch.optim.Adam(w, lr)),
        (cf.optim.AdamW(keep_state=True), lambda w, lr: torch.optim.AdamW(w, lr)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_a_kept_state_goes_on_in_the_clients_next_round(ours: Any, theirs: Maker, path: str) -> None:
    """Clients take part in different rounds, so that their counts of steps differ."""
    kept = averaging(theirs, keep=True)
    close(found(path, client_optimizer=ours), kept)
    assert np.abs(kept - averaging(theirs)).max() > 1e-3, "keeping must matter"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["momentum and weight decay", "nesterov", "adam", "adamw"])
def test_client_optimisers_of_a_cnn_in_channels_last_layout(name: str, keep: bool) -> None:
    """Its parameters and the optimiser's state lie in memory in another order than torch's."""
    generator = torch.Generator().manual_seed(4)
    data = {
        client: (torch.rand(n, 2, 8, 8, generator=generator, dtype=torch.float64), torch.arange(n) % 3)
        for client, n in (("a", 9), ("b", 14))
    }
    module = cf.models.build("cnn4", (2, 8, 8), 3, seed=0, filters=4, norm="none").double()
    ours, theirs = TORCH[name]
    method = cf.FedAvg(client_optimizer=replace(ours, keep_state=keep), **COMMON)
    result = cf.fit(module, cf.FederatedData(data), method, rounds=3)
    locals_ = {client: copy.deepcopy(module) for client in data}
    optimizers = {client: theirs(list(local.parameters()), LR) for client, local in locals_.items()}
    expected = module.state_dict()
    for _ in range(3):
        for client, (x, y) in data.items():
            locals_[client].load_state_dict(expected)
            if not keep:
                optimizers[client] = theirs(list(locals_[client].parameters()), LR)
            for _ in range(STEPS):
                optimizers[client].zero_grad()
                nn.functional.cross_entropy(locals_[client](x), y).backward()
                optimizers[client].step()
        ends = [locals_[client].state_dict() for client in data]
        expected = {key: (9 * ends[0][key] + 14 * ends[1][key]) / 23 for key in expected}
    for key, part in expected.items():
        torch.testing.assert_close(result.params[key], part, rtol=0, atol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("path", PATHS)
def test_decoupled_weight_decay_shrinks_the_weights_alone(momentum: float, path: str) -> None:
    decay = 0.3

    def local(W: Array, client: Client) -> Array:
        v = np.zeros_like(W)
        for _ in range(STEPS):
            v = momentum * v + gradient(W, client)
            W = (1 - LR * decay) * W - LR * v
        return W

    clients, W = by_hand_clients(), start()
    for who in WHO:
        sizes = np.array([SIZES[NAMES[i]] for i in who], dtype=np.float64)
        W = sum(n * local(W, clients[i]) for n, i in zip(sizes / sizes.sum(), who, strict=True))
    optimizer = cf.optim.SGD(momentum=momentum, weight_decay=decay, decoupled=True)
    close(found(path, client_optimizer=optimizer), W)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("clip", [0.05, 0.4])
def test_clipping_is_per_client_and_per_step(clip: float, path: str) -> None:
    clipped = averaging(plain_torch, clip=clip)
    close(found(path, clip_grad_norm=clip), clipped)
    assert np.abs(clipped - averaging(plain_torch)).max() > 1e-3, "clipping must matter"


@pytest.mark.parametrize("path", PATHS)
def test_clipping_comes_before_the_optimiser(path: str) -> None:
    ours, theirs = TORCH["momentum and weight decay"]
    close(found(path, client_optimizer=ours, clip_grad_norm=0.2), averaging(theirs, clip=0.2))


# Schedules.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (cf.schedule.Step(every=2, factor=0.5), (1, 1, 0.5, 0.5)),
        (cf.schedule.Cosine(rounds=4, end=0.5), tuple(0.5 + 0.25 * (1 + np.cos(np.pi * t / 4)) for t in range(4))),
        (cf.schedule.Warmup(2, then=cf.schedule.Step(1, 0.1)), (0.5, 1, 1, 0.1)),
        (lambda number: 1 / number, (1, 1 / 2, 1 / 3, 1 / 4)),
    ],
    ids=["step", "cosine", "warm-up", "function"],
)
def test_schedules_scale_the_learning_rate_of_a_round(schedule: Any, factors: tuple[float, ...], path: str) -> None:
    wanted = averaging(plain_torch, factor=lambda number: float(factors[number - 1]))
    close(found(path, lr_schedule=schedule), wanted)


def test_personal_models_take_steps_of_the_base_learning_rate() -> None:
    """A cosine that has come down to nearly nothing must not make personal models equal to the global one."""
    result = run(cf.FedAvg(lr_schedule=cf.schedule.Cosine(3, end=1e-6), **COMMON), 3)
    clients = by_hand_clients()
    W = matrix(result.params)
    np.testing.assert_allclose(matrix(result.personal("c")), W - LR * gradient(W, clients[2]), rtol=0, atol=1e-12)


def test_q_fedavg_knows_the_learning_rate_of_the_round() -> None:
    """Its Lipschitz estimate is 1 / lr: a schedule must act like that learning rate from the start."""
    halved = run(cf.QFedAvg(0.5, lr_schedule=lambda number: 0.5, **COMMON))
    assert same(halved, run(cf.QFedAvg(0.5, **{**COMMON, "lr": LR / 2})))


# The server.


class Momentum:
    def __init__(self, beta: float, lr: float = 1.0, nesterov: bool = False) -> None:
        self.beta, self.lr, self.nesterov, self.m = beta, lr, nesterov, 0.0

    def __call__(self, W: Array, D: Array) -> Array:
        self.m = self.beta * self.m + D
        return W + self.lr * (D + self.beta * self.m if self.nesterov else self.m)


class Adaptive:
    """Algorithm 2 of Reddi et al.; with ``corrected``, Adam's bias correction, and v from 0."""

    def __init__(self, rule: str, lr: float, tau: float = 1e-3, corrected: bool = False) -> None:
        self.rule, self.lr, self.tau, self.corrected = rule, lr, tau, corrected
        self.m, self.v, self.t = 0.0, 0.0 if corrected else tau**2, 0

    def __call__(self, W: Array, D: Array) -> Array:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * D
        if self.rule == "adam":
            self.v = 0.99 * self.v + 0.01 * D**2
        elif self.rule == "yogi":
            self.v = self.v - 0.01 * D**2 * np.sign(self.v - D**2)
        else:
            self.v = self.v + D**2
        m, v = (self.m / (1 - 0.9**self.t), self.v / (1 - 0.99**self.t)) if self.corrected else (self.m, self.v)
        return W + self.lr * m / (np.sqrt(v) + self.tau)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (cf.optim.SGD(momentum=0.9), lambda: Momentum(0.9)),
        (cf.optim.SGD(lr=0.5, momentum=0.5), lambda: Momentum(0.5, 0.5)),
        (cf.optim.SGD(momentum=0.7, nesterov=True), lambda: Momentum(0.7, nesterov=True)),
        (cf.optim.SGD(lr=2.0), lambda: lambda W, D: W + 2 * D),
        (cf.optim.Adam(lr=0.05), lambda: Adaptive("adam", 0.05)),
        (cf.optim.Adam(lr=0.05, bias_correction=True), lambda: Adaptive("adam", 0.05, corrected=True)),
        (cf.optim.Adam(), lambda: Adaptive("adam", 0.01)),
        (cf.optim.Yogi(lr=0.05), lambda: Adaptive("yogi", 0.05)),
        (cf.optim.Adagrad(lr=0.05, eps=1e-2), lambda: Adaptive("adagrad", 0.05, 1e-2)),
    ],
    ids=lambda value: repr(value) if not callable(value) else "",
)
def test_server_optimisers(ours: Any, theirs: Callable[[], Any]) -> None:
    close(found(server_optimizer=ours), averaging(plain_torch, server=theirs()))


def test_both_sides_at_once() -> None:
    client, theirs = TORCH["adam"]
    both = found(client_optimizer=client, server_optimizer=cf.optim.SGD(momentum=0.9))
    close(both, averaging(theirs, server=Momentum(0.9)))


@pytest.mark.parametrize(
    "method",
    [
        cf.ComFedL(outer=cf.KL(0.5), **COMMON),
        cf.QFedAvg(0.5, **COMMON),
        cf.DRFA(0.05, **COMMON),
        cf.DAMAML(0.05, **COMMON),
        cf.FedAvg(aggregate="geometric-median", **COMMON),
        cf.FedAvg(aggregate="trimmed-mean", trim=0.2, clip_update_norm=0.3, **COMMON),
        cf.TRMAML(0.05, **COMMON),
        cf.DeltaFL(0.4, **COMMON),
        cf.AFL(average=False, **COMMON),
        cf.Ditto(**COMMON),
        cf.FedProx(**COMMON),
        cf.Scaffold(**COMMON),
    ],
    ids=lambda method: f"{method.name} {method.aggregate}",
)
def test_a_server_optimiser_follows_any_methods_update(method: Algorithm) -> None:
    """One round of a server with lr 0.5 goes half the way; the second has half of the first update on top."""
    whole = matrix(run(method, 1).params) - start()
    half = replace(method, server_optimizer=cf.optim.SGD(lr=0.5, momentum=0.5))
    one, two = (matrix(run(half, rounds).params) for rounds in (1, 2))
    close(one, start() + 0.5 * whole, 1e-12)
    assert np.abs(two - one - 0.25 * whole).max() > 1e-4, "the second round has an update of its own"


def test_buffers_are_never_touched_by_a_server_optimiser() -> None:
    def buffers(**options: Any) -> cf.Result:
        return cf.fit(Normed(), batchable(), cf.FedAvg(lr=0.05, **options), 1)

    plain, far = buffers(), buffers(server_optimizer=cf.optim.SGD(lr=5.0))
    assert all(torch.equal(part, far.buffers[name]) for name, part in plain.buffers.items())
    assert apart(plain, far) > 1e-2


# Limits.


LIMITS: dict[str, dict[str, Any]] = {
    "client momentum 0": {"client_optimizer": cf.optim.SGD()},
    "client state kept of plain SGD": {"client_optimizer": cf.optim.SGD(keep_state=True)},
    "a constant schedule": {"lr_schedule": cf.schedule.Constant()},
    "a warm-up of one round": {"lr_schedule": cf.schedule.Warmup(1)},
    "a clip that is never reached": {"clip_grad_norm": 1e9},
    "server SGD": {"server_optimizer": cf.optim.SGD()},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_plain_training(name: str, path: str) -> None:
    np.testing.assert_allclose(found(path, **LIMITS[name]), found(path), rtol=0, atol=1e-12)


def test_momentum_close_to_none_is_close_to_none() -> None:
    nearly = found(client_optimizer=cf.optim.SGD(momentum=1e-9))
    assert 0 < np.abs(nearly - found()).max() < 1e-7


# FedProx.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mu", [0.5, 3.0])
def test_fedprox_by_hand(mu: float, path: str) -> None:
    clients, W = by_hand_clients(), start()
    for who in WHO:
        sizes = np.array([SIZES[NAMES[i]] for i in who], dtype=np.float64)
        ends = []
        for i in who:
            V = W
            for _ in range(STEPS):
                V = V - LR * (gradient(V, clients[i]) + mu * (V - W))
            ends.append(V)
        W = sum(n * end for n, end in zip(sizes / sizes.sum(), ends, strict=True))
    close(found(path, cf.FedProx, mu=mu), W)


def test_fedprox_with_mu_0_is_fedavg_to_the_bit() -> None:
    assert same(run(cf.FedProx(mu=0, lr=LR)), run(cf.FedAvg(lr=LR)))


# SCAFFOLD.


def scaffold(factor: Callable[[int], float] = lambda number: 1.0, server: float = 1.0) -> Array:
    clients, n = by_hand_clients(), len(NAMES)
    W, c, own = start(), np.zeros_like(start()), [np.zeros_like(start()) for _ in NAMES]
    for number, who in enumerate(WHO, start=1):
        lr, updates, changes = LR * factor(number), [], []
        for i in who:
            V = W
            for _ in range(STEPS):
                V = V - lr * (gradient(V, clients[i]) - own[i] + c)
            new = own[i] - c + (W - V) / (STEPS * lr)
            updates.append(V - W)
            changes.append(new - own[i])
            own[i] = new
        W = W + server * np.mean(updates, axis=0)
        c = c + len(who) / n * np.mean(changes, axis=0)
    return W


@pytest.mark.parametrize("path", PATHS)
def test_scaffold_by_hand(path: str) -> None:
    close(found(path, cf.Scaffold), scaffold())


def test_scaffold_with_a_schedule_and_a_server_step() -> None:
    schedule, server = cf.schedule.Step(1, 0.5), cf.optim.SGD(lr=0.7)
    options: dict[str, Any] = {"lr_schedule": schedule, "server_optimizer": server}
    close(found("stack", cf.Scaffold, **options), scaffold(lambda number: 0.5 ** (number - 1), 0.7))


def test_scaffold_of_identical_clients_is_fedavg() -> None:
    """All control variates are the same, so nothing is corrected."""
    alike = cf.FederatedData(dict.fromkeys(NAMES, train_data()["c"]))

    def ran(method: Algorithm) -> cf.Result:
        return cf.fit(linear(), alike, method, 5)

    scaffold, fedavg = ran(cf.Scaffold(**COMMON)), ran(cf.FedAvg(**COMMON))
    assert apart(scaffold, fedavg) < 1e-12
    assert apart(fedavg, cf.fit(linear(), alike, cf.FedAvg(**COMMON), 1)) > 1e-2, "the run must have moved"


def test_scaffold_ends_at_the_optimum_where_fedavg_drifts() -> None:
    """With many full-batch local steps FedAvg's fixed point is not a stationary point; SCAFFOLD's is."""
    clients = by_hand_clients()
    names = [name for name in NAMES if SIZES[name] > 1]  # a single sample has no finite optimum
    data = {name: part for name, part in train_data().items() if name in names}
    decay = 0.1

    def slope(method: type[Algorithm]) -> float:
        optimizer = cf.optim.SGD(weight_decay=decay)
        options = {"lr": 0.3, "local_steps": 8, "batch_size": None, "client_optimizer": optimizer, "personal_steps": 0}
        more = {"weighting": "uniform"} if method is cf.FedAvg else {}
        result = cf.fit(linear(), cf.FederatedData(data), method(**options, **more), 300, eval_every=300)
        W = matrix(result.params)
        own = [client for name, client in zip(NAMES, clients, strict=True) if name in names]
        return float(np.abs(np.mean([gradient(W, client) for client in own], axis=0) + decay * W).max())

    assert slope(cf.Scaffold) < 1e-8 < 1e-3 < slope(cf.FedAvg)


def test_a_client_never_seen_has_no_control_variate() -> None:
    method = cf.Scaffold(**COMMON)
    model = Model(params={name: part.detach() for name, part in linear().named_parameters()}, buffers={})
    learner = Learner(linear(), *LOSSES["cross_entropy"])
    data = cf.FederatedData(train_data()).to(torch.float64, torch.device("cpu"))
    engine = make_engine("embedded", data, learner, method.steps(), 0, method.initial_client_state(model))
    with taking_part([[1, 3]]):
        method.round(method.initial_state(model, 5), RoundContext(1, 0, 2, engine))
    engine.commit_round()
    assert sorted(engine.states()) == [1, 3]


# Every method keeps what its clients' optimisers keep.


@pytest.mark.parametrize(
    "method",
    [
        cf.ComFedL(outer=cf.KL(0.5), **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.QFedAvg(0.5, **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.DRFA(0.05, **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.DAMAML(0.05, **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.TRMAML(0.05, **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.DeltaFL(0.4, **COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.Ditto(**COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.FedProx(**COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
        cf.AFL(**COMMON, client_optimizer=cf.optim.Adam(keep_state=True)),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.filterwarnings("ignore:q-FedAvg's step size")
def test_every_method_keeps_its_optimisers_state(method: Algorithm) -> None:
    """The first round is that of a fresh state, the third is not; stacked and one by one agree."""
    fresh = replace(method, client_optimizer=cf.optim.Adam())
    assert apart(run(method, 1), run(fresh, 1)) < 1e-12
    assert apart(run(method, 3), run(fresh, 3)) > 1e-4
    assert apart(run(method, 3), run(method, 3, engine_options={"vectorize": "serial"})) < 1e-12


def test_the_two_parts_of_drfas_local_training_share_one_state() -> None:
    """With a dual step of 0 and all clients drawn once, DRFA is uniform averaging, wherever its snapshot is."""
    optimizer = cf.optim.Adam()
    wanted = run(cf.FedAvg(weighting="uniform", client_optimizer=optimizer, **COMMON))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundContext, "sample_by_duals", lambda self, weights: list(range(self.clients)))
        assert apart(run(cf.DRFA(0.0, client_optimizer=optimizer, **COMMON)), wanted) < 1e-12


@pytest.mark.parametrize("optimizer", [cf.optim.SGD(momentum=0.9), cf.optim.Adam()], ids=["momentum", "adam"])
def test_q_fedavg_warns_of_steps_with_a_memory(optimizer: Any) -> None:
    with pytest.warns(UserWarning, match="q-FedAvg's step size assumes plain gradient steps"):
        run(cf.QFedAvg(0.5, client_optimizer=optimizer, **COMMON), 1)
    run(cf.QFedAvg(0.5, client_optimizer=cf.optim.SGD(weight_decay=0.1), **COMMON), 1)


# Methods of one's own.


@dataclass(frozen=True)
class Older(cf.FedAvg):
    """A method that was written before optimisers: its local training takes what ``descend`` gives."""

    name: ClassVar[str] = "older"

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        trained = self.descend(learner, message["model"], batches)
        return Outcome({"model": trained.model}, watched=trained.watched)


def test_a_method_of_ones_own_uses_the_optimiser_too() -> None:
    adam = {"client_optimizer": cf.optim.Adam(), "lr_schedule": cf.schedule.Step(1, 0.5), "clip_grad_norm": 0.1}
    assert apart(run(Older(**COMMON, **adam)), run(cf.FedAvg(**COMMON, **adam))) < 1e-12
    with pytest.raises(ConfigError, match="older's local training does not pass on the client's state"):
        run(Older(**COMMON, client_optimizer=cf.optim.Adam(keep_state=True)))


@dataclass(frozen=True)
class Stubborn(cf.FedAvg):
    """A method that averages by itself."""

    name: ClassVar[str] = "stubborn"

    def round(self, state: State, context: RoundContext) -> tuple[State, Participation]:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        weights = torch.full((len(replies.clients),), 1 / len(replies.clients), dtype=torch.float64)
        model = weighted_average(state["model"], replies, weights)
        return {**state, "model": model}, Participation(replies.clients, weights)


def test_a_server_optimiser_is_never_ignored_in_silence() -> None:
    run(Stubborn(**COMMON))
    with pytest.raises(ConfigError, match="stubborn's round does not use it"):
        run(Stubborn(**COMMON, server_optimizer=cf.optim.SGD(momentum=0.9)))


# Bad input.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cf.optim.SGD(momentum=1), "momentum is 1, but it must be a number of 0 or more and below 1"),
        (lambda: cf.optim.SGD(momentum=-0.1), "momentum is -0.1"),
        (lambda: cf.optim.SGD(weight_decay=-1), "weight_decay is -1"),
        (lambda: cf.optim.SGD(nesterov=True), "nesterov is true and momentum is 0"),
        (lambda: cf.optim.SGD(momentum=0.9, nesterov=1), "nesterov is 1"),  # type: ignore[arg-type]
        (lambda: cf.optim.Adam(beta2=1.0), "beta2 is 1.0"),
        (lambda: cf.optim.Yogi(lr=0), "lr is 0"),
        (lambda: cf.optim.Adagrad(eps=0), "eps is 0"),
        (lambda: cf.FedAvg(client_optimizer=cf.optim.Yogi()), "client_optimizer is yogi, but .* SGD, Adam, AdamW"),  # type: ignore[arg-type]
        (lambda: cf.FedAvg(server_optimizer=cf.optim.AdamW()), "server_optimizer is adamw"),
        (lambda: cf.FedAvg(client_optimizer=torch.optim.SGD), "client_optimizer is <class"),  # type: ignore[arg-type]
        (lambda: cf.FedAvg(client_optimizer="adam"), "client_optimizer is 'adam'"),  # type: ignore[arg-type]
        (lambda: cf.FedAvg(client_optimizer=cf.optim.SGD(lr=0.1)), "client_optimizer has lr = 0.1"),
        (lambda: cf.FedAvg(client_optimizer=cf.optim.Adam(bias_correction=True)), "bias_correction is for a server"),
        (lambda: cf.FedAvg(server_optimizer=cf.optim.SGD(keep_state=True)), "keep_state is for a client"),
        (lambda: cf.FedAvg(server_optimizer=cf.optim.Adam(weight_decay=0.1)), "only at clients"),
        (lambda: cf.FedAvg(clip_grad_norm=0), "clip_grad_norm is 0"),
        (lambda: cf.FedAvg(lr_schedule=0.5), "lr_schedule is 0.5"),  # type: ignore[arg-type]
        (lambda: cf.FedAvg(lr_schedule=cf.schedule.Cosine), "lr_schedule is <class"),
        (lambda: cf.schedule.Step(0), "every is 0"),
        (lambda: cf.schedule.Cosine(10, end=-1), "end is -1"),
        (lambda: cf.schedule.Warmup(3, then=2), "then is 2"),  # type: ignore[arg-type]
        (lambda: cf.FedProx(mu=-1), "mu is -1"),
        (lambda: cf.Scaffold(client_optimizer=cf.optim.SGD(momentum=0.5)), "sgd with momentum, but SCAFFOLD"),
        (lambda: cf.Scaffold(client_optimizer=cf.optim.Adam()), "client_optimizer is adam, but SCAFFOLD"),
        (lambda: cf.Scaffold(clip_grad_norm=1.0), "clip_grad_norm is given, but SCAFFOLD"),
        (lambda: run(cf.FedAvg(lr_schedule=cf.schedule.Cosine(2)), 5), "lr_schedule is 0 at round 3"),
        (lambda: run(cf.FedAvg(lr_schedule=lambda s: float("nan"))), "lr_schedule is nan at round 1"),
        (lambda: run(cf.FedAvg(lr_schedule=lambda s: 1 / (2 - s))), "lr_schedule raised an error at round 2"),
    ],
)
def test_bad_input_is_one_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("optimizer", [cf.optim.SGD(momentum=0.9), cf.optim.Adam(), cf.optim.AdamW()], ids=repr)
def test_gradients_that_share_memory(optimizer: Any) -> None:
    """Autograd may return one tensor, or an expanded one, as the gradient of several parameters."""
    start = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    problem = cf.Composition(lambda w, batch: w["a"] + w["b"] - batch[0].mean(dim=0), lambda y, batch: (y**2).sum())
    fed = cf.FederatedData({"one": (np.array([[1.0, 2.0, 3.0]]), np.zeros(1))})
    method = cf.ComFedL(problem=problem, lr=0.05, local_steps=4, client_optimizer=optimizer)
    found = cf.fit(start, fed, method, 1).params
    theirs = {
        "sgd": lambda w: torch.optim.SGD(w, 0.05, momentum=0.9),
        "adam": lambda w: torch.optim.Adam(w, 0.05),
        "adamw": lambda w: torch.optim.AdamW(w, 0.05),
    }
    pair = [torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    by_torch = theirs[optimizer.name](pair)
    for _ in range(4):
        by_torch.zero_grad()
        ((pair[0] + pair[1] - torch.tensor([1.0, 2.0, 3.0])) ** 2).sum().backward()
        by_torch.step()
    for name, part in zip("ab", pair, strict=True):
        torch.testing.assert_close(found[name], part.detach(), rtol=0, atol=1e-9)
