"""The composition and its gradient: against dense Jacobians, plain autograd, and problems solved in closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

import comfedl as cf
from comfedl.core.learner import CHUNK, Batch, Learner, Model, Params
from comfedl.core.objectives import Adapted, CompositionObjective, LocalLoss, Objective, gradient

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Trees of tensors of the same structure, equal up to rounding."""
    ours, shape = pytree.tree_flatten(found)
    theirs, other = pytree.tree_flatten(expected)
    assert shape == other
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=tolerance)


def dense(inner: Callable[[Params], Any], outer: Callable[[Any], Tensor], params: Params) -> Params:
    """J^T grad g with the Jacobian formed in full."""
    slopes = pytree.tree_leaves(grad(outer)(inner(params)))
    blocks = jacrev(lambda p: pytree.tree_leaves(inner(p)))(params)
    return {
        name: sum(
            torch.tensordot(slope, block[name], dims=slope.ndim) for slope, block in zip(slopes, blocks, strict=True)
        )
        for name in params
    }


PARAMS = {"w": normal(3, seed=1), "b": normal(2, 2, seed=2)}
B, OTHER = (normal(8, 3, seed=3), normal(8, seed=4)), (normal(5, 2, seed=5), normal(5, seed=6))


def features(params: Params, batch: Batch) -> Tensor:
    """One scalar per sample."""
    return torch.tanh(batch[0] @ params["w"]) * params["b"].sum() + batch[1] * params["b"][0, 1] ** 2


class Moments(NamedTuple):
    mean: Tensor
    square: Tensor


INNERS: dict[str, tuple[Callable[[Params, Batch], Any], Callable[[Any, Batch], Tensor]]] = {
    "scalar": (
        lambda p, b: features(p, b).mean(),
        lambda y, b: (torch.exp(y * b[0].sum(dim=1)) + b[1]).mean(),
    ),
    "vector": (
        lambda p, b: torch.stack([features(p, b).mean(), (features(p, b) ** 2).mean()]),
        lambda y, b: ((b[0] @ y - b[1]) ** 2).mean(),
    ),
    "dict": (
        lambda p, b: {"mean": features(p, b).mean(), "matrix": p["b"] @ p["b"].T + p["w"][:2]},
        lambda y, b: (y["mean"] * (b[0] @ y["matrix"]).pow(2).sum(dim=1)).mean(),
    ),
    "tuple": (
        lambda p, b: (features(p, b).mean(), [p["w"].sin(), (p["b"] * b[1].mean(),)]),
        lambda y, b: (y[0] * y[1][0].sum() - (b[0] @ y[1][1][0]).tanh().sum(dim=1)).mean(),
    ),
    "named tuple": (
        lambda p, b: Moments(features(p, b).mean(), (features(p, b) ** 2).mean()),
        lambda y, b: (y.square - y.mean**2 + y.mean * b[0].sum(dim=1)).mean(),
    ),
}


@pytest.mark.parametrize("kind", INNERS)
def test_the_gradient_is_the_dense_product(kind: str) -> None:
    inner, outer = INNERS[kind]
    found = gradient(CompositionObjective(cf.Composition(inner, outer)), Model(params=PARAMS, buffers={}), B, OTHER)
    close(found.direction, dense(lambda p: inner(p, B), lambda y: outer(y, OTHER), PARAMS))
    close(found.value, outer(inner(PARAMS, B), OTHER))
    close(found.direction, grad(lambda p: outer(inner(p, B), OTHER))(PARAMS))
    assert not any(part.requires_grad for part in (*found.direction.values(), found.value))


@pytest.mark.parametrize("kind", INNERS)
def test_the_slope_on_top_scales_the_gradient(kind: str) -> None:
    inner, outer = INNERS[kind]
    composition = CompositionObjective(cf.Composition(inner, outer))
    found = gradient(composition, Model(params=PARAMS, buffers={}), B, OTHER, cf.Exp(3.0).slope)
    close(found.direction, grad(lambda p: torch.exp(outer(inner(p, B), OTHER) / 3))(PARAMS))
    close(found.weight, torch.exp(found.value / 3) / 3)


# nn.Module: the local loss and the adapted loss.


def network(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), norm or nn.Identity(), nn.Tanh(), nn.Linear(4, 3)).double()


def parts(module: nn.Module) -> Model:
    return Model(
        params={name: part.detach().clone() for name, part in module.named_parameters()},
        buffers={name: part.detach().clone() for name, part in module.named_buffers()},
    )


X, Y = normal(9, 3, seed=7), torch.arange(9) % 3
X2, Y2 = normal(6, 3, seed=8), (torch.arange(6) + 1) % 3


@pytest.mark.parametrize(
    "norm", [None, nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, momentum=None)]
)
def test_the_gradient_of_a_module_is_plain_autograd(norm: nn.Module | None) -> None:
    """Also through batch statistics; running statistics are updated as by the module itself."""
    module = network(norm)
    model = parts(module)
    kept = copy.deepcopy(model)
    found = gradient(LocalLoss(Learner(module, cross_entropy)), model, (X, Y), (X, Y))
    close(model, kept)  # the arguments are unchanged
    loss = cross_entropy(module.train()(X), Y)
    loss.backward()
    close(found.direction, {name: part.grad for name, part in module.named_parameters()})
    close(found.buffers, dict(module.named_buffers()))
    close(found.value, loss)


def adapted(module: nn.Module, params: Params, steps: int, lr: float) -> Params:
    """Gradient descent on (X, Y), differentiable."""
    for _ in range(steps):
        slope = grad(lambda p: cross_entropy(functional_call(module, p, (X,)), Y))(params)
        params = {name: params[name] - lr * slope[name] for name in params}
    return params


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(4, track_running_stats=False)])
def test_adapt_is_the_dense_product(norm: nn.Module | None, steps: int) -> None:
    module = network(norm).train()
    model, learner = parts(module), Learner(module, cross_entropy)

    def outer(params: Params) -> Tensor:
        return cross_entropy(functional_call(module, params, (X2,)), Y2)

    expected = dense(lambda p: adapted(module, p, steps, 0.3), outer, model["params"])
    found = gradient(Adapted(learner, cf.Adapt(0.3, steps)), model, (X, Y), (X2, Y2))
    close(found.direction, expected)
    close(found.value, outer(adapted(module, model["params"], steps, 0.3)))
    near = gradient(Adapted(learner, cf.Adapt(0.3, steps, "hessian-free", delta=1e-5)), model, (X, Y), (X2, Y2))
    close(near.direction, expected, 1e-6)
    first = gradient(Adapted(learner, cf.Adapt(0.3, steps, "first")), model, (X, Y), (X2, Y2))
    close(first.direction, grad(outer)(adapted(module, model["params"], steps, 0.3)))
    assert max(float((first.direction[n] - expected[n]).abs().max()) for n in expected) > 1e-3


@pytest.mark.parametrize(("order", "tolerance"), [("exact", 1e-10), ("hessian-free", 1e-6)])
def test_the_hessian_on_a_batch_of_its_own(order: str, tolerance: float) -> None:
    """Per-FedAvg: (I - a H(w; D'')) grad f(w - a grad f(w; D); D'); the buffers still move on D."""
    module = network(nn.BatchNorm1d(4))
    model, third = parts(module), (normal(7, 3, seed=10), torch.arange(7) % 3)

    def loss(params: Params, batch: Batch) -> Tensor:
        return cross_entropy(functional_call(copy.deepcopy(module).train(), params, (batch[0],)), batch[1])

    first, at = grad(loss)(model["params"], (X, Y)), model["params"]
    v = grad(loss)({name: at[name] - 0.3 * first[name] for name in at}, (X2, Y2))
    product = jvp(lambda p: grad(loss)(p, third), (at,), (v,))[1]
    adapt = cf.Adapt(0.3, order=order, delta=1e-5, hessian_batch="own")
    found = gradient(Adapted(Learner(module, cross_entropy), adapt), model, (X, Y), (X2, Y2), hessian_batch=third)
    close(found.direction, {name: v[name] - 0.3 * product[name] for name in v}, tolerance)
    module.train()(X)
    close(found.buffers, dict(module.named_buffers()))


@pytest.mark.parametrize("order", ["exact", "first", "hessian-free"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_buffers_move_once_a_step(order: str, steps: int) -> None:
    """In the pass at w on B, however many passes the step takes."""
    module = network(nn.BatchNorm1d(4))
    model = parts(module)
    found = gradient(Adapted(Learner(module, cross_entropy), cf.Adapt(0.3, steps, order)), model, (X, Y), (X2, Y2))
    module.train()(X)
    close(found.buffers, dict(module.named_buffers()))


def test_hessian_free_sees_one_function() -> None:
    """A difference of gradients under two different dropout masks is noise over delta."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double()
    model, learner = parts(module), Learner(module, cross_entropy)
    norms = []
    for delta in (1e-3, 1e-6):
        torch.manual_seed(1)
        adapt = cf.Adapt(0.1, order="hessian-free", delta=delta)
        found = gradient(Adapted(learner, adapt), model, (X, Y), (X2, Y2)).direction
        norms.append(max(float(part.abs().max()) for part in found.values()))
    assert max(norms) < 2, norms


@pytest.mark.parametrize("objective", [LocalLoss, lambda learner: Adapted(learner, cf.Adapt(0.3))])
def test_the_value_on_whole_data_is_not_cut(objective: Callable[[Learner], Objective]) -> None:
    """Data of more than one chunk, the last one smaller: the mean over samples, in evaluation mode."""
    n = 2 * CHUNK + 37
    x, y = normal(n, 3, seed=9), torch.arange(n) % 3
    module = network(nn.BatchNorm1d(4))
    model = parts(module)
    found = objective(Learner(module, cross_entropy)).value(model, (x, y), (x, y))
    params = model["params"]
    if objective is not LocalLoss:
        trained = copy.deepcopy(module).train()
        cross_entropy(trained(x), y).backward()
        params = {name: part.detach() - 0.3 * part.grad for name, part in trained.named_parameters()}
    module.eval()
    expected = cross_entropy(functional_call(module, (params, model["buffers"]), (x,)), y)
    close(found, expected)


def test_scores_are_means_over_samples() -> None:
    n = CHUNK + 3
    x, y = normal(n, 3, seed=9), torch.arange(n) % 3
    module = network()

    def right(output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(dim=1) == y).to(F64).mean()

    found = Learner(module, cross_entropy, {"accuracy": right}).scores(parts(module), (x, y))
    close(found, {"loss": cross_entropy(module(x), y), "accuracy": right(module(x), y)})


def test_batch_statistics_can_be_evaluated_on_any_number_of_samples() -> None:
    """One sample more than a multiple of the chunk size: a single sample has no batch statistics."""
    n = CHUNK + 1
    x, y = normal(n, 3, seed=9), torch.arange(n) % 3
    fed = cf.FederatedData({"a": (x, y)})
    result = cf.fit(network(nn.BatchNorm1d(4, track_running_stats=False)), fed, cf.FedAvg(), rounds=1)
    assert np.isfinite(result.rounds[-1]["train.loss.mean"])


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_statistics_of_a_client_with_one_sample(tracked: bool) -> None:
    """It trains and is evaluated like any other, also with all of its data as the batch."""
    fed = cf.FederatedData({"a": (X, Y), "b": (X2[:1], Y2[:1])}, validation={"a": (X2[:1], Y2[:1])})
    algorithm = cf.ComFedL(outer=cf.KL(0.5), batch_size=None)
    result = cf.fit(network(nn.BatchNorm1d(4, track_running_stats=tracked)), fed, algorithm, rounds=2)
    assert np.isfinite([row["train.loss"] for row in result.clients]).all()


def test_the_readers_module_is_copied() -> None:
    module = network(nn.BatchNorm1d(4)).eval()
    learner = Learner(module, cross_entropy)
    learner.loss(**parts(module), batch=(X, Y), train=True)
    assert not module.training and learner.module is not module
    with torch.no_grad():
        module[0].weight.zero_()
    assert bool((learner.module[0].weight != 0).any())


# A user-defined problem: a mean-variance portfolio.

RISK = 0.7


def returns(params: Params, batch: Batch) -> Tensor:
    """(mean return, mean squared return) of the portfolio w."""
    gained = batch[0] @ params["w"]
    return torch.stack([gained.mean(), (gained**2).mean()])


def aversion(y: Tensor, batch: Batch) -> Tensor:
    return -y[0] + RISK * (y[1] - y[0] ** 2)


PORTFOLIO = cf.Composition(returns, aversion)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(dim=0), torch.cov(x.T, correction=0)


def invest(fed: cf.FederatedData, **options: Any) -> cf.Result:
    algorithm = cf.ComFedL(problem=PORTFOLIO, lr=0.2, batch_size=None, **options)
    return cf.fit({"w": torch.zeros(4, dtype=F64)}, fed, algorithm, rounds=150)


def assets(n: int, seed: int) -> Tensor:
    return normal(n, 4, seed=seed) * torch.tensor([0.5, 0.8, 1.0, 0.6], dtype=F64) + 0.1 * torch.arange(4)


def test_one_client_finds_the_best_portfolio() -> None:
    """w = C^-1 m / (2 risk), with the objective -m' C^-1 m / (4 risk)."""
    x = assets(40, 1)
    result = invest(cf.FederatedData({"a": x}), local_steps=5)
    m, C = moments(x)
    best = torch.linalg.solve(C, m) / (2 * RISK)
    close(result.params, {"w": best}, 1e-8)
    value = -m @ torch.linalg.solve(C, m) / (4 * RISK)
    assert result.rounds[-1]["objective"] == pytest.approx(float(value), abs=1e-9)
    assert result.rounds[-1]["train.loss.mean"] == pytest.approx(float(value), abs=1e-9)


def test_clients_with_one_problem_find_its_solution() -> None:
    x = assets(40, 1)
    result = invest(cf.FederatedData({"a": x, "b": x.flip(0), "c": torch.cat([x, x])}), local_steps=5)
    m, C = moments(x)
    close(result.params, {"w": torch.linalg.solve(C, m) / (2 * RISK)}, 1e-8)


def test_clients_with_different_problems_find_the_best_on_average() -> None:
    """mean_i of the quadratics is a quadratic: w = (mean C_i)^-1 mean m_i / (2 risk), exact for one local step."""
    clients = {"a": assets(40, 1), "b": assets(11, 2), "c": assets(25, 3) + 0.3}
    result = invest(cf.FederatedData(clients), local_steps=1)
    means, spreads = zip(*(moments(x) for x in clients.values()), strict=True)
    best = torch.linalg.solve(sum(spreads) / 3, sum(means) / 3) / (2 * RISK)
    close(result.params, {"w": best}, 1e-6)


def test_the_readers_problem_under_kl() -> None:
    """The weights depend on its value, not on a loss: at the fixed point, sum_i r_i grad F_i = 0."""
    clients = {"a": assets(40, 1), "b": assets(11, 2), "c": assets(25, 3) + 0.3}
    result = invest(cf.FederatedData(clients), local_steps=1, outer=cf.KL(0.05))
    w = result.params["w"]
    values = torch.stack([aversion(returns({"w": w}, (x, x)), (x, x)) for x in clients.values()])
    r = torch.softmax(values / 0.05, dim=0)
    slopes = [2 * RISK * moments(x)[1] @ w - moments(x)[0] for x in clients.values()]
    close(sum(a * b for a, b in zip(r, slopes, strict=True)), torch.zeros(4, dtype=F64), 1e-6)
    assert result.rounds[-1]["objective"] == pytest.approx(
        float(0.05 * (torch.logsumexp(values / 0.05, 0) - np.log(3))), abs=1e-9
    )


@pytest.mark.parametrize("kind", INNERS)
def test_any_tree_as_inner_value_can_be_trained(kind: str) -> None:
    inner, outer = INNERS[kind]
    fed = cf.FederatedData({"a": B, "b": B}, outer={"a": OTHER, "b": OTHER})
    algorithm = cf.ComFedL(problem=cf.Composition(inner, outer), lr=0.01, local_steps=2, batch_size=None)
    result = cf.fit(PARAMS, fed, algorithm, rounds=2)
    expected = PARAMS
    for _ in range(4):
        slope = grad(lambda p: outer(inner(p, B), OTHER))(expected)
        expected = {name: expected[name] - 0.01 * slope[name] for name in expected}
    close(result.params, expected)
    assert result.rounds[-1]["objective"] == pytest.approx(float(outer(inner(expected, B), OTHER)), abs=1e-9)


# Outer data, with another shape than the train data.


def predict(params: Params, batch: Batch) -> Tensor:
    return (batch[0] @ params["w"]).mean()


def squared(y: Tensor, batch: Batch) -> Tensor:
    """mean (y - zeta)^2 over zeta = the sum of an outer sample."""
    return ((y - batch[0].sum(dim=(1, 2))) ** 2).mean()


OWN = {"a": normal(10, 3, seed=1), "b": normal(4, 3, seed=2) + 1}
SECOND = {"a": normal(7, 2, 2, seed=3) + 0.5, "b": normal(12, 2, 2, seed=4)}
TWO_LEVEL = cf.FederatedData(OWN, outer=SECOND)
START = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=F64)}


def two_level(**options: Any) -> cf.ComFedL:
    return cf.ComFedL(problem=cf.Composition(predict, squared), lr=0.05, local_steps=1, **options)


def full_step() -> Tensor:
    ends = []
    for name, x in OWN.items():
        y, target = x.mean(dim=0) @ START["w"], SECOND[name].sum(dim=(1, 2)).mean()
        ends.append(START["w"] - 0.05 * 2 * (y - target) * x.mean(dim=0))
    return sum(ends) / len(ends)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": None, "outer_batch_size": "all"}])
def test_a_step_with_all_the_outer_data_is_exact(options: dict[str, Any]) -> None:
    result = cf.fit(START, TWO_LEVEL, two_level(**options), rounds=1)
    close(result.params, {"w": full_step()})


def test_a_step_with_an_outer_batch_is_exact_in_expectation() -> None:
    """The outer gradient is linear in zeta: the mean over many seeds tends to the full step."""
    algorithm = two_level(batch_size=None, outer_batch_size=2)
    found = torch.stack([cf.fit(START, TWO_LEVEL, algorithm, rounds=1, seed=s).params["w"] for s in range(400)])
    error = found.std(dim=0) / len(found) ** 0.5
    assert bool((error > 0).all())
    assert bool(((found.mean(dim=0) - full_step()).abs() < 4 * error).all())


@pytest.mark.parametrize(("size", "seen"), [(3, 3), ("same", 5), ("all", None)])
def test_the_outer_batch_comes_from_the_outer_data(size: int | str, seen: int | None) -> None:
    batches: dict[str, list[Tensor]] = {"inner": [], "outer": []}

    def spy(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(y: Any, batch: Batch) -> Tensor:
            batches[name].append(batch[0])
            return function(y, batch)

        return watched

    problem = cf.Composition(spy("inner", predict), spy("outer", squared))
    fed = cf.FederatedData({"a": OWN["a"]}, outer={"a": SECOND["a"]})
    algorithm = cf.ComFedL(problem=problem, batch_size=5, outer_batch_size=size, local_steps=4)
    cf.fit(START, fed, algorithm, rounds=3, eval_every=3)
    assert len(batches["inner"]) == len(batches["outer"]) == 3 * 4 + 1
    for name, data, expected in (("inner", OWN["a"], 5), ("outer", SECOND["a"], seen or len(SECOND["a"]))):
        *trained, evaluated = batches[name]
        assert {len(batch) for batch in trained} == {expected}
        assert torch.equal(evaluated, data)
        rows = {tuple(row.flatten().tolist()) for row in data}
        assert all(tuple(row.flatten().tolist()) in rows for batch in trained for row in batch)
        if expected < len(data):
            assert len({tuple(batch.flatten().tolist()) for batch in trained}) > 6, "another batch every step"


def test_without_outer_data_the_two_batches_are_drawn_apart() -> None:
    """B and B~ of a step are independent draws from the train data."""
    pairs: list[tuple[Tensor, Tensor]] = []
    last: list[Tensor] = []

    def inner(params: Params, batch: Batch) -> Tensor:
        last.append(batch[0])
        return predict(params, batch)

    def outer(y: Tensor, batch: Batch) -> Tensor:
        pairs.append((last[-1], batch[0]))
        return y**2

    algorithm = cf.ComFedL(problem=cf.Composition(inner, outer), batch_size=3, local_steps=10)
    cf.fit(START, cf.FederatedData({"a": OWN["a"]}), algorithm, rounds=1)
    assert sum(torch.equal(a.sort(dim=0).values, b.sort(dim=0).values) for a, b in pairs[:-1]) <= 2


def test_outer_data_of_another_shape_beside_validation_data() -> None:
    """Validating means the inner map on the validation data, under the client's one outer function."""
    fed = cf.FederatedData(OWN, validation={"a": OWN["b"]}, outer=SECOND)
    result = cf.fit(START, fed, two_level(batch_size=None), rounds=1)
    expected = squared(predict(result.params, (OWN["b"], OWN["b"])), (SECOND["a"], SECOND["a"]))
    assert result.rounds[-1]["validation.loss.mean"] == pytest.approx(float(expected), abs=1e-9)


def test_adapt_takes_its_outer_batch_from_the_outer_data() -> None:
    """With an outer batch of its own labels, the meta-loss is seen at the adapted model on those."""
    module = network()
    fed = cf.FederatedData({"a": (X, Y)}, outer={"a": (X2, Y2)})
    algorithm = cf.ComFedL(inner=cf.Adapt(0.3), lr=0.2, local_steps=1, batch_size=None)
    result = cf.fit(module, fed, algorithm, rounds=1)
    params = parts(module)["params"]

    def meta(p: Params) -> Tensor:
        return cross_entropy(functional_call(module, adapted(module, p, 1, 0.3), (X2,)), Y2)

    slope = grad(meta)(params)
    close(result.params, {name: params[name] - 0.2 * slope[name] for name in params})


def test_the_readers_own_meta_learning_is_adapt() -> None:
    """A composition whose inner map takes a gradient itself."""
    module = network()
    params = parts(module)["params"]
    problem = cf.Composition(
        lambda p, b: adapted(module, p, 1, 0.3),
        lambda y, b: cross_entropy(functional_call(module, y, (b[0],)), b[1]),
    )
    fed = cf.FederatedData({"a": (X, Y)}, outer={"a": (X2, Y2)})
    common = {"lr": 0.2, "local_steps": 2, "batch_size": None, "outer": cf.KL(0.5)}
    own = cf.fit(params, fed, cf.ComFedL(problem=problem, **common), rounds=2)
    ours = cf.fit(module, fed, cf.ComFedL(inner=cf.Adapt(0.3), **common), rounds=2)
    close(own.params, ours.params)
    assert own.rounds[-1]["objective"] == pytest.approx(ours.rounds[-1]["objective"], abs=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cf.Adapt(-0.1),
        lambda: cf.Adapt(0.1, steps=0),
        lambda: cf.Adapt(0.1, order="second"),
        lambda: cf.Adapt(0.1, delta=0.0),
        lambda: cf.ComFedL(inner=cf.Adapt(0.1), problem=PORTFOLIO),
        lambda: cf.ComFedL(problem=PORTFOLIO, outer_batch_size=0),
        lambda: cf.ComFedL(problem=PORTFOLIO, outer_batch_size="some"),
        lambda: cf.ComFedL(problem=(returns, aversion)),
        lambda: cf.ComFedL(outer="kl"),
    ],
)
def test_values_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(cf.ConfigError):
        make()
