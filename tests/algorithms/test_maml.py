"""FedMAML, TR-MAML and DAMAML, sections 4, 5 and 7b: training for the loss after adapting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from helpers.reference import (
    CLASSES,
    FEATURES,
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
    hessian_times,
    linear,
    locally,
    loss,
    matrix,
    meta_gradient,
    meta_loss,
    project,
    recorded,
    run,
    same,
    start,
    taking_part,
    train_data,
)

N, LR, STEPS, ROUNDS, ALPHA = len(SIZES), 0.3, 2, 3, 0.4
FULL: dict[str, Any] = {"lr": LR, "local_steps": STEPS, "batch_size": None}
BATCHED: dict[str, Any] = {**FULL, "batch_size": 4}
ORDERS = ["exact", "first", "hessian-free"]


def meta_ends(W: Array, **how: Any) -> list[Array]:
    """Where every client's local meta-steps end."""
    return [
        locally(W, lambda V, c=c: meta_gradient(V, c, ALPHA, **how), LR, STEPS)[-1]  # type: ignore[misc]
        for c in by_hand_clients()
    ]


def by_hand(weights: Callable[[Array], Array] = lambda W: np.full(N, 1 / N), **how: Any) -> Array:
    W = start()
    for _ in range(ROUNDS):
        W = np.tensordot(weights(W), meta_ends(W, **how), axes=1)
    return W


def test_the_derivatives_by_hand_are_right() -> None:
    """The yardstick itself, against central differences."""
    rng, client, h = np.random.default_rng(0), by_hand_clients()[0], 1e-5
    W, V = rng.normal(size=(2, *start().shape))
    for steps in (1, 2):
        along = (meta_loss(W + h * V, client, ALPHA, steps) - meta_loss(W - h * V, client, ALPHA, steps)) / (2 * h)
        assert along == pytest.approx((meta_gradient(W, client, ALPHA, steps) * V).sum(), abs=1e-8)
    along = (loss(W + h * V, client) - loss(W - h * V, client)) / (2 * h)
    assert along == pytest.approx((gradient(W, client) * V).sum(), abs=1e-8)


# FedMAML.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 2])
def test_fedmaml_by_hand(order: str, steps: int) -> None:
    """Hessian-free is the central difference itself, at w and not at the adapted point, with a delta that shows."""
    found = run(cf.FedMAML(ALPHA, order, adapt_steps=steps, delta=0.1, **FULL), ROUNDS)
    close(matrix(found.params), by_hand(steps=steps, order=order, delta=0.1))
    np.testing.assert_allclose(recorded(found, "weight"), 1 / N, atol=1e-12)


def test_the_orders_of_the_test_above_are_different_methods() -> None:
    for steps in (1, 2):
        exact, first, free = (by_hand(steps=steps, order=order, delta=0.1) for order in ORDERS)
        assert np.abs(exact - first).max() > 1e-3 and np.abs(exact - free).max() > 1e-6


def test_hessian_free_tends_to_exact() -> None:
    exact = run(cf.FedMAML(ALPHA, **FULL))
    gaps = [apart(run(cf.FedMAML(ALPHA, "hessian-free", delta=delta, **FULL)), exact) for delta in (0.3, 0.03, 0.003)]
    assert 60 < gaps[0] / gaps[1] < 140 and 60 < gaps[1] / gaps[2] < 140


def flat(output: Tensor, y: Tensor) -> Tensor:
    """A loss that is linear in the parameters of a linear model: its Hessian is 0."""
    return (output * (1 + y[:, None])).mean()


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("order", ["exact", "hessian-free"])
def test_first_order_is_exact_where_there_is_no_hessian(batch_size: int | None, order: str) -> None:
    options = {**FULL, "batch_size": batch_size}
    first = run(cf.FedMAML(ALPHA, "first", **options), loss=flat)
    assert apart(run(cf.FedMAML(ALPHA, order, **options), loss=flat), first) < 1e-12
    assert apart(run(cf.FedMAML(ALPHA, order, **options)), run(cf.FedMAML(ALPHA, "first", **options))) > 1e-3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_adapting_by_nothing_is_uniform_averaging(order: str, steps: int) -> None:
    """Invariant 6, to the bit where both take their steps one by one; FedAvg on stacked clients takes a short cut."""
    for vectorize in ("serial", "auto"):
        plain, found = (
            run(method, engine_options={"vectorize": vectorize})
            for method in (cf.FedAvg(weighting="uniform", **FULL), cf.FedMAML(0.0, order, adapt_steps=steps, **FULL))
        )
        assert same(found, plain) if vectorize == "serial" else apart(found, plain) < 1e-14


class Seen:
    """Cross-entropy that remembers the samples it was called with: y is a sample's number, its rest by 3 the label."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls.append(tuple(y.long().tolist()))
        return nn.functional.cross_entropy(output, y.long() % CLASSES)


def numbered(samples: int) -> cf.FederatedData:
    """One client whose labels are the samples' numbers."""
    x = np.random.default_rng(1).normal(size=(samples, FEATURES))
    return cf.FederatedData({"a": (x, np.arange(samples) * 1.0)})


def chosen(fed: cf.FederatedData, batch: Sequence[int]) -> Client:
    x = fed.train["a"][0].numpy()[list(batch)]
    return Client(np.column_stack([x, np.ones(len(x))]), np.array(batch) % CLASSES)


class Until(cf.Callback):
    """Notes how often the loss had been called when a round was done."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.counts = seen, [0]

    def started(self) -> None:
        self.counts = [len(self.seen.calls)]  # a loss of the user's own is tried on two samples before the first round

    def round_done(self, number: int) -> None:
        self.counts.append(len(self.seen.calls))


def batches_of(algorithm: Algorithm, samples: int, rounds: int = 1) -> list[list[tuple[int, ...]]]:
    """The different batches of each local step, in the order in which they were first used."""
    seen = Seen()
    until = Until(seen)
    # One round more, so that the only evaluation comes after those that are looked at.
    cf.fit(linear(), numbered(samples), algorithm, rounds + 1, loss=seen, eval_every=rounds + 1, callbacks=[until])
    steps = []
    for first, last in zip(until.counts[:rounds], until.counts[1:], strict=False):
        per_step, rest = divmod(last - first, algorithm.local_steps)
        assert rest == 0
        steps += [seen.calls[at : at + per_step] for at in range(first, last, per_step)]
    return [list(dict.fromkeys(step)) for step in steps]


def test_adapting_by_nothing_leaves_the_first_batch_without_effect() -> None:
    """Invariant 6 with minibatches: what counts is D' alone, so it is plain training on one batch of each pair."""
    algorithm = cf.FedMAML(0.0, **{**BATCHED, "local_steps": 3})
    pairs, fed = batches_of(algorithm, samples=20), numbered(20)
    assert [len(pair) for pair in pairs] == [2, 2, 2]
    found = matrix(cf.fit(linear(), fed, algorithm, rounds=1, loss=Seen()).params)
    matches = []
    for choice in product(*pairs):
        W = start()
        for batch in choice:
            W = W - LR * gradient(W, chosen(fed, batch))
        matches.append(np.abs(W - found).max() < 1e-12)
    assert sum(matches) == 1
    others = [run(cf.FedMAML(0.0, order, hessian_batch=own, **BATCHED)) for order in ORDERS for own in ("same", "own")]
    assert all(same(one, others[0]) for one in others)


# D, D' and D''.


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({"order": "exact"}, 2),
        ({"order": "first"}, 2),
        ({"order": "exact", "hessian_batch": "own"}, 3),
        ({"order": "hessian-free"}, 3),
        ({"order": "hessian-free", "hessian_batch": "same"}, 2),
    ],
)
@pytest.mark.parametrize("make", [cf.FedMAML, cf.TRMAML])
def test_the_batches_of_a_local_step(make: Any, options: dict[str, str], roles: int) -> None:
    """(I - a H(w; D'')) grad f(w - a grad f(w; D); D') with two or three batches of its own: one reading fits."""
    algorithm = make(ALPHA, **options, lr=LR, local_steps=1, batch_size=6)
    (batches,), fed = batches_of(algorithm, samples=50), numbered(50)
    assert len(batches) == roles and all(len({*batch}) == 6 for batch in batches)
    found = matrix(cf.fit(linear(), fed, algorithm, rounds=1, loss=Seen()).params)
    matches = []
    for order in permutations(batches):
        D, D1, D2 = (chosen(fed, batch) for batch in (*order, order[0])[:3])
        W = start()
        v = gradient(W - ALPHA * gradient(W, D), D1)
        if options["order"] == "exact":
            v = v - ALPHA * hessian_times(W, D2, v)
        elif options["order"] == "hessian-free":
            v = v - ALPHA * (gradient(W + 1e-3 * v, D2) - gradient(W - 1e-3 * v, D2)) / 2e-3
        matches.append(np.abs(W - LR * v - found).max() < 1e-9)
    assert sum(matches) == 1


def test_the_three_batches_are_independent() -> None:
    """Over many steps two batches of 5 of 20 share 1.25 samples on average, no more and no less."""
    algorithm = cf.FedMAML(ALPHA, "hessian-free", lr=1e-4, local_steps=60, batch_size=5)
    D, D1, D2 = zip(*batches_of(algorithm, samples=20, rounds=5), strict=True)
    assert len(D) == 300
    for one, other in ((D, D1), (D, D2), (D1, D2), (D, D[1:]), (D1, D1[1:]), (D, D1[1:])):
        shared = [len({*a} & {*b}) for a, b in zip(one, other, strict=False)]
        assert abs(np.mean(shared) - 1.25) < 4 * 0.86 / np.sqrt(len(shared))
    for batches in (D, D1, D2):
        counts = np.bincount([i for batch in batches for i in batch], minlength=20)
        assert np.square(counts - 75).sum() / 75 < 45  # 19 degrees of freedom, less for being without replacement


METHODS = {
    "fedmaml": cf.FedMAML,
    "tr-maml": cf.TRMAML,
    "damaml": cf.DAMAML,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_client_with_few_samples_trains(name: str, samples: int, order: str) -> None:
    """Fewer samples than two batches, even a single one: it trains, on full batches of what it has."""
    algorithm = METHODS[name](0.1, order=order, lr=0.2, local_steps=3, batch_size=8)
    seen = Seen()
    result = cf.fit(linear(), numbered(samples), algorithm, rounds=4, loss=seen)
    assert sum(len(batch) == 8 for batch in seen.calls) >= 4 * 3 * 2
    before = loss(start(), chosen(numbered(samples), range(samples)))
    assert all(not torch.equal(result.params[key], part) for key, part in linear().named_parameters())
    assert result.rounds[-1]["train.loss.mean"] < before


@pytest.mark.parametrize("name", METHODS)
def test_a_small_client_moves_the_common_model(name: str) -> None:
    data = train_data()
    one, other = (
        cf.fit(linear(), cf.FederatedData({**data, "d": (data["d"][0] + shift, data["d"][1])}), algorithm, rounds=2)
        for shift in (0, 1)
        for algorithm in [METHODS[name](0.1, lr=0.2, local_steps=2, batch_size=16)]
    )
    assert apart(one, other) > 1e-3


# TR-MAML.


def trmaml_by_hand(dual_lr: float, sets: list[list[int]], **how: Any) -> tuple[Array, list[Array]]:
    """w + (n/m) sum p_i (w_i - w); p + eta_p (n/m) F_i for those present, projected. Both from (w, p) before."""
    clients, W, duals = by_hand_clients(), start(), [np.full(N, 1 / N)]
    for chosen in sets:
        p, scale = duals[-1], N / len(chosen)
        ends, F = meta_ends(W, **how), np.zeros(N)
        adapt_steps = how.get("steps", 1)
        F[chosen] = [scale * meta_loss(W, clients[i], ALPHA, adapt_steps) for i in chosen]
        W = W + scale * sum(p[i] * (ends[i] - W) for i in chosen)
        duals.append(project(p + dual_lr * F))
    return W, duals


@pytest.mark.parametrize("how", [{}, {"order": "first"}, {"steps": 2}, {"order": "hessian-free", "delta": 0.1}])
@pytest.mark.parametrize("dual_lr", [0.05, 0.4])
def test_trmaml_by_hand(dual_lr: float, how: dict[str, Any]) -> None:
    W, duals = trmaml_by_hand(dual_lr, [list(range(N))] * ROUNDS, **how)
    options = {"adapt_steps" if key == "steps" else key: value for key, value in how.items()}
    result = run(cf.TRMAML(ALPHA, dual_lr, **options, **FULL), ROUNDS)
    close(matrix(result.params), W)
    np.testing.assert_allclose(recorded(result, "dual"), duals[:-1], atol=1e-9)
    np.testing.assert_allclose(recorded(result, "weight"), duals[:-1], atol=1e-9)
    assert np.ptp(duals[-1]) > 0.01


def test_trmaml_by_hand_with_some_of_the_clients() -> None:
    sets = [[0, 3], [1, 2], [2, 4], [0, 1], [3, 4]]
    W, duals = trmaml_by_hand(0.05, sets)
    with taking_part(sets):
        result = run(cf.TRMAML(ALPHA, 0.05, **FULL), len(sets), clients_per_round=2)
    close(matrix(result.params), W)
    np.testing.assert_allclose(recorded(result, "dual"), duals[:-1], atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("options", "some"), [(FULL, None), (BATCHED, None), (BATCHED, 2)])
def test_trmaml_without_a_dual_step_is_fedmaml(order: str, options: dict[str, Any], some: int | None) -> None:
    """Invariant 7, also with minibatches and with some of the clients."""
    plain = run(cf.FedMAML(ALPHA, order, **options), clients_per_round=some)
    assert apart(run(cf.TRMAML(ALPHA, 0.0, order, **options), clients_per_round=some), plain) < 1e-12


def test_trmaml_records_the_worst_loss_after_adapting() -> None:
    result = run(cf.TRMAML(ALPHA, **FULL), 2)
    values = [meta_loss(matrix(result.params), c, ALPHA) for c in by_hand_clients()]
    assert result.rounds[-1]["objective"] == pytest.approx(max(values), abs=1e-12)


def test_trmaml_with_batch_norm_and_some_of_the_clients_keeps_its_variances() -> None:
    """The weights (n/m) p_i may add up to more than 1: parameters may go past the mixture, a variance may not.

    One client of eight is hard, so p moves to it; where it takes part the others' running variance must stay positive.
    """
    rng = np.random.default_rng(0)
    data = {name: (0.05 * rng.normal(size=(16, 4)), np.full(16, 2 if name == "h" else 0)) for name in "abcdefgh"}
    for sets in ([[0, 7]] * 8, [[7]] * 4):
        with taking_part(sets):
            result = cf.fit(
                Normed(),
                cf.FederatedData(data),
                cf.TRMAML(batch_size=8),
                rounds=len(sets),
                clients_per_round=len(sets[0]),
            )
        assert float(result.buffers["layers.1.running_var"].min()) > 0


# DAMAML.


@pytest.mark.parametrize("steps", [1, 2])
def test_damaml_with_kl_by_hand(steps: int) -> None:
    """The weights are the softmax of the losses after adapting, at the model received."""
    gamma, clients = 0.1, by_hand_clients()

    def weights(W: Array) -> Array:
        r = np.exp(np.array([meta_loss(W, c, ALPHA, steps) for c in clients]) / gamma)
        return r / r.sum()

    result = run(cf.DAMAML(ALPHA, gamma, adapt_steps=steps, **FULL), ROUNDS)
    close(matrix(result.params), by_hand(weights, steps=steps))
    values = np.array([meta_loss(matrix(result.params), c, ALPHA, steps) for c in clients])
    expected = gamma * np.log(np.exp(values / gamma).mean())
    assert result.rounds[-1]["objective"] == pytest.approx(expected, abs=1e-12)
    assert np.ptp(recorded(result, "weight")[0]) > 0.05


def test_damaml_with_exp_by_hand() -> None:
    """Eq. (10) to the letter: each step by exp(f(y) / gamma) / gamma, the plain mean at the server."""
    gamma, clients, W = 4.0, by_hand_clients(), start()

    def direction(V: Array, c: Client) -> Array:
        return np.exp(meta_loss(V, c, ALPHA) / gamma) / gamma * meta_gradient(V, c, ALPHA)

    for _ in range(ROUNDS):
        W = np.mean([locally(W, lambda V, c=c: direction(V, c), LR, STEPS)[-1] for c in clients], axis=0)
    result = run(cf.DAMAML(ALPHA, gamma, outer="exp", **FULL), ROUNDS)
    close(matrix(result.params), W)


def test_damaml_with_a_cap_by_hand() -> None:
    """No client above 1.2 times uniform: with gamma near 0 all but the last place are at the cap."""
    clients, W, cap = by_hand_clients(), start(), 1.2
    for _ in range(ROUNDS):
        order = np.argsort([-meta_loss(W, c, ALPHA) for c in clients])
        weights = np.zeros(N)
        weights[order[:4]], weights[order[4]] = cap / N, 1 - 4 * cap / N
        W = np.tensordot(weights, meta_ends(W), axes=1)
    close(matrix(run(cf.DAMAML(ALPHA, 1e-5, cap=cap, **FULL), ROUNDS).params), W)


# The same method under two names.


@pytest.mark.parametrize(("options", "some"), [(FULL, None), (BATCHED, 2)])
@pytest.mark.parametrize("how", [{}, {"order": "first"}, {"order": "hessian-free", "delta": 0.01}])
def test_the_same_method_under_two_names(how: dict[str, Any], options: dict[str, Any], some: int | None) -> None:
    adapt = cf.Adapt(ALPHA, steps=2, **how)
    pairs: list[tuple[Algorithm, Algorithm]] = [
        (cf.FedMAML(ALPHA, adapt_steps=2, **how, **options), cf.ComFedL(inner=adapt, **options)),
        (cf.DAMAML(ALPHA, 0.2, adapt_steps=2, **how, **options), cf.ComFedL(adapt, cf.KL(0.2), **options)),
        (
            cf.DAMAML(ALPHA, 0.2, cap=1.5, adapt_steps=2, **how, **options),
            cf.ComFedL(adapt, cf.KL(0.2, cap=1.5), **options),
        ),
        (
            cf.DAMAML(ALPHA, 4.0, outer="exp", adapt_steps=2, **how, **options),
            cf.ComFedL(adapt, cf.Exp(4.0), **options),
        ),
    ]
    for named, general in pairs:
        one, other = (run(method, 2, clients_per_round=some) for method in (named, general))
        assert same(one, other)
        assert one.rounds == other.rounds and one.clients == other.clients and one.traffic == other.traffic
        for name in NAMES:
            assert all(torch.equal(part, other.personal(name)[key]) for key, part in one.personal(name).items())


# BatchNorm: the running statistics move once a local step, in the pass at w.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", [cf.FedMAML, cf.TRMAML, cf.DAMAML])
def test_running_statistics_are_those_of_the_batch_at_w(make: Any, steps: int, order: str) -> None:
    """One step from the same model: mean and count as FedAvg's, whatever the order, however far it adapts."""
    options = {**FULL, "local_steps": 1}
    plain = cf.fit(Normed(), batchable(), cf.FedAvg(weighting="uniform", **options), rounds=1)
    extra = {"gamma": 1e9} if make is cf.DAMAML else {}
    found = cf.fit(Normed(), batchable(), make(ALPHA, order=order, adapt_steps=steps, **extra, **options), rounds=1)
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=0, atol=1e-8)
    assert int(found.buffers["layers.1.num_batches_tracked"]) == 1
    assert apart(found, plain) > 1e-4  # the parameters are another matter


@pytest.mark.parametrize("running", [True, False])
def test_exact_order_differentiates_through_batch_statistics(running: bool) -> None:
    """Against plain autograd through the two passes, for one client and one step."""
    x, y = (torch.as_tensor(part) for part in train_data()["a"])
    y = y.long()
    model = Normed(running)
    params = dict(model.named_parameters())

    def at(values: dict[str, Tensor]) -> Tensor:
        module = Normed(running)  # fresh buffers for each pass: batch statistics are what trains
        return nn.functional.cross_entropy(torch.func.functional_call(module, values, (x,)), y)

    slopes = torch.autograd.grad(at(params), list(params.values()), create_graph=True)
    moved = {name: part - ALPHA * slope for (name, part), slope in zip(params.items(), slopes, strict=True)}
    meta = torch.autograd.grad(at(moved), list(params.values()))
    found = cf.fit(
        model, cf.FederatedData({"a": (x, y)}), cf.FedMAML(ALPHA, lr=LR, local_steps=1, batch_size=None), rounds=1
    )
    for (name, part), slope in zip(params.items(), meta, strict=True):
        torch.testing.assert_close(found.params[name], (part - LR * slope).detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cf.FedMAML(-0.1),
        lambda: cf.FedMAML(order="second"),
        lambda: cf.FedMAML(adapt_steps=0),
        lambda: cf.FedMAML(delta=0.0),
        lambda: cf.FedMAML(lr=-1.0),
        lambda: cf.TRMAML(dual_lr=-0.1),
        lambda: cf.TRMAML(adapt_lr=-0.1),
        lambda: cf.TRMAML(order="second"),
        lambda: cf.DAMAML(gamma=0.0),
        lambda: cf.DAMAML(outer="softmax"),
        lambda: cf.DAMAML(cap=0.5),
    ],
)
def test_values_out_of_range(make: Callable[[], Any]) -> None:
    with pytest.raises(cf.ConfigError):
        make()
