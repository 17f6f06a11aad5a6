"""Weights from outer data, and offsets of the losses: references by hand, and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import comfedl as cf
from comfedl.algorithms import comfedl as compositional
from comfedl.algorithms.base import Algorithm
from comfedl.core.outer_functions import Coupled
from comfedl.data.outer_share import set_aside
from comfedl.engines import embedded
from comfedl.utils import tree

GAMMA, LR, TAU = 0.3, 0.2, 4
COMMON: dict[str, Any] = {"lr": LR, "local_steps": TAU, "batch_size": None}
SIZES = {"a": 12, "b": 5, "c": 30, "d": 7}
NAMES = list(SIZES)
GIVEN = {"a": 0.3, "b": 0.9, "c": 0.1, "d": 0.5}


def samples(seed: int, sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for shift, (name, n) in enumerate(sizes.items()):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + 0.4 * shift
        found[name] = x, (torch.randint(0, 2, (n,), generator=generator) + shift) % 3
    return found


TRAIN, OUTER = samples(1, SIZES), samples(2, {"a": 6, "b": 3, "c": 4, "d": 3})
FED = cf.FederatedData(TRAIN, validation=samples(3, SIZES), outer=OUTER)
PLAIN = cf.FederatedData(TRAIN)


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def flat(params: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([params["weight"], params["bias"][:, None]], dim=1)


def fit(method: Algorithm, rounds: int = 4, fed: cf.FederatedData = FED, **options: Any) -> cf.Result:
    return cf.fit(linear(), fed, method, **{"rounds": rounds, **options})


def trained(method: Algorithm, rounds: int = 4, fed: cf.FederatedData = FED, **options: Any) -> torch.Tensor:
    return flat(fit(method, rounds, fed, **options).params)


def equal_records(one: cf.Result, other: cf.Result, within: float = 0.0) -> None:
    for ours, theirs in zip([*one.rounds, *one.clients], [*other.rounds, *other.clients], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            close = isinstance(value, str) or within == 0
            assert value == (theirs[key] if close else pytest.approx(theirs[key], abs=within, rel=within)), key


# By hand.

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_and_gradient(w: torch.Tensor, batch: Batch) -> tuple[float, torch.Tensor]:
    """Of softmax regression with the bias as a last column."""
    x, y = batch
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    shares = torch.softmax(inputs @ w.T, dim=1)
    loss = -shares[torch.arange(len(y)), y].log().mean()
    shares[torch.arange(len(y)), y] -= 1
    return float(loss), shares.T @ inputs / len(y)


def descended(w: torch.Tensor, batch: Batch, steps: int = TAU, lr: float = LR) -> torch.Tensor:
    for _ in range(steps):
        w = w - lr * loss_and_gradient(w, batch)[1]
    return w


Reference = tuple[torch.Tensor, list[float], list[torch.Tensor]]


def by_hand(
    rounds: int,
    on: dict[str, Batch],
    offset: Callable[[torch.Tensor, list[int]], torch.Tensor],
    who: list[list[int]] | None = None,
) -> Reference:
    """KL's model, objectives and weights. ``offset`` gives those of some clients, at the received model."""
    w, objectives, weights = flat(dict(linear().state_dict())), [], []
    for number in range(rounds):
        chosen = list(range(len(NAMES))) if who is None else who[number]
        losses = torch.tensor([loss_and_gradient(w, on[NAMES[i]])[0] for i in chosen], dtype=torch.float64)
        r = torch.softmax((losses + offset(w, chosen)) / GAMMA, dim=0)
        updates = torch.stack([descended(w, TRAIN[NAMES[i]]) - w for i in chosen])
        w = w + (r[:, None, None] * updates).sum(dim=0)
        weights.append(r)
        everybody = list(range(len(NAMES)))
        after = torch.tensor([loss_and_gradient(w, on[name])[0] for name in NAMES], dtype=torch.float64)
        after = (after + offset(w, everybody)) / GAMMA
        objectives.append(float(GAMMA * (torch.logsumexp(after, 0) - math.log(len(NAMES)))))
    return w, objectives, weights


def none(w: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    return torch.zeros(len(chosen), dtype=torch.float64)


def generalisation(w: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    return torch.tensor([0.7 / math.sqrt(SIZES[NAMES[i]]) for i in chosen], dtype=torch.float64)


def given_excess(w: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    return torch.tensor([-GIVEN[NAMES[i]] for i in chosen], dtype=torch.float64)


def estimated(on: dict[str, Batch], steps: int, lr: float) -> Callable[[torch.Tensor, list[int]], torch.Tensor]:
    """Each client's best loss from the model that it receives first; of others the mean of those known."""
    known: dict[int, float] = {}

    def offset(w: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        if len(known) == 0 or len(chosen) < len(NAMES):
            for i in chosen:
                if i not in known:
                    known[i] = loss_and_gradient(descended(w, TRAIN[NAMES[i]], steps, lr), on[NAMES[i]])[0]
        mean = sum(known.values()) / len(known)
        return -torch.tensor([known.get(i, mean) for i in chosen], dtype=torch.float64)

    return offset


Case = tuple[dict[str, Any], dict[str, Batch], Callable[[], Callable[[torch.Tensor, list[int]], torch.Tensor]]]
CASES: dict[str, Case] = {
    "outer": ({"on": "outer"}, OUTER, lambda: none),
    "generalisation": ({"offset": cf.offset.Generalisation(0.7)}, TRAIN, lambda: generalisation),
    "both": ({"on": "outer", "offset": cf.offset.Generalisation(0.7)}, OUTER, lambda: generalisation),
    "given": ({"offset": cf.offset.Excess(GIVEN)}, TRAIN, lambda: given_excess),
    "estimated": ({"offset": cf.offset.Excess(steps=6)}, TRAIN, lambda: estimated(TRAIN, 6, LR)),
    "estimated on outer": (
        {"on": "outer", "offset": cf.offset.Excess(steps=6, lr=0.5)},
        OUTER,
        lambda: estimated(OUTER, 6, 0.5),
    ),
}


@pytest.mark.parametrize("path", ["auto", "serial", "vmap"])
@pytest.mark.parametrize("case", CASES)
def test_kl_by_hand(case: str, path: str) -> None:
    arguments, on, offset = CASES[case]
    w, objectives, weights = by_hand(4, on, offset())
    result = fit(cf.ComFedL(outer=cf.KL(GAMMA, **arguments), **COMMON), engine_options={"vectorize": path})
    torch.testing.assert_close(flat(result.params), w, rtol=0, atol=1e-9)
    assert [row["objective"] for row in result.rounds] == pytest.approx(objectives, abs=1e-9)
    found = [row["weight"] for row in result.clients]
    assert found == pytest.approx(torch.cat(weights).tolist(), abs=1e-9)
    assert [row["dual"] for row in result.clients] == pytest.approx(found, abs=1e-12)  # all take part


@pytest.mark.parametrize("case", CASES)
def test_some_of_the_clients_by_hand(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who = [[0, 2], [1, 2], [0, 3], [1, 3]]
    monkeypatch.setattr(compositional.RoundContext, "sample", lambda self: who[self.number - 1])
    arguments, on, offset = CASES[case]
    w, objectives, _ = by_hand(4, on, offset(), who)
    result = fit(cf.ComFedL(outer=cf.KL(GAMMA, **arguments), **COMMON), clients_per_round=2)
    torch.testing.assert_close(flat(result.params), w, rtol=0, atol=1e-9)
    assert [row["objective"] for row in result.rounds] == pytest.approx(objectives, abs=1e-9)


def robust_by_hand(
    rounds: int, on: dict[str, Batch], offset: Callable[[torch.Tensor, list[int]], torch.Tensor], memory: float | None
) -> torch.Tensor:
    """As in test_robust.py; the table keeps losses without their offsets."""
    w, reach = flat(dict(linear().state_dict())), LR * TAU
    moved, estimate, everybody = torch.zeros_like(w), None, list(range(len(NAMES)))
    for number in range(1, rounds + 1):
        losses = torch.tensor([loss_and_gradient(w, on[name])[0] for name in NAMES], dtype=torch.float64)
        updates = torch.stack([descended(w, TRAIN[name]) - w for name in NAMES])
        change = -(updates * moved).sum(dim=(1, 2)) / reach
        if memory is not None:
            share = max(1 - memory, 1 / number)
            estimate = losses if estimate is None else (1 - share) * (estimate + change) + share * losses
            losses = estimate
        coming = losses + offset(w, everybody) + 0.9 * change
        gram = torch.einsum("iab,jab->ij", updates, updates) / reach
        log_r = torch.log_softmax(coming / GAMMA, dim=0)
        for _ in range(4000):
            target = (coming - gram @ log_r.exp()) / GAMMA
            log_r = torch.log_softmax(log_r + 0.05 * (target - log_r), dim=0)
        moved = 0.9 * moved + (log_r.exp()[:, None, None] * updates).sum(dim=0)
        w = w + moved
    return w


@pytest.mark.parametrize("case", CASES)
def test_robust_by_hand(case: str) -> None:
    arguments, on, offset = CASES[case]
    memory = None if arguments.get("on") == "outer" else 0.98
    found = trained(cf.Robust(gamma=GAMMA, server_average=None, **arguments, **COMMON), 4)
    torch.testing.assert_close(found, robust_by_hand(4, on, offset(), memory), rtol=0, atol=1e-9)


# Limits.


def methods(**arguments: Any) -> list[Algorithm]:
    """KL plain, capped, with a memory and with the safe step, and Robust, with these arguments of KL."""
    mini = {**COMMON, "batch_size": 4}
    return [
        cf.ComFedL(outer=cf.KL(GAMMA, **arguments), **mini),
        cf.ComFedL(outer=cf.KL(GAMMA, cap=1.5, **arguments), step="safe", **mini),
        cf.ComFedL(outer=cf.KL(GAMMA, memory=0.9, **arguments), **mini),
        cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(GAMMA, **arguments), **mini),
        cf.Robust(gamma=GAMMA, **arguments, **mini),
    ]


NOTHING = {"c = 0": cf.offset.Generalisation(0.0), "b = 0": cf.offset.Excess(dict.fromkeys(NAMES, 0.0))}


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("offset", NOTHING.values(), ids=NOTHING)
def test_no_offset_to_the_bit(kind: int, m: int, offset: cf.offset.Offset) -> None:
    one, other = (fit(methods(offset=each)[kind], clients_per_round=m) for each in (None, offset))
    assert torch.equal(flat(one.params), flat(other.params))
    equal_records(one, other)
    assert one.traffic == other.traffic


@pytest.mark.parametrize("kind", range(5))
def test_the_same_offset_for_all_changes_no_weight(kind: int) -> None:
    equal = cf.FederatedData(samples(1, dict.fromkeys(NAMES, 9)), outer=OUTER)
    for offset in (cf.offset.Generalisation(3.0), cf.offset.Excess(dict.fromkeys(NAMES, 0.4))):
        one, other = (trained(methods(offset=each)[kind], fed=equal) for each in (None, offset))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 500).map(lambda k: k / 100), min_size=1, max_size=6),
    st.integers(-1000, 1000).map(lambda k: k / 100),
    st.sampled_from([cf.KL(0.3), cf.KL(0.3, cap=1.5), cf.KL(effective_clients=1.5)]),
)
def test_a_common_shift_moves_the_objective_alone(losses: list[float], shift: float, outer: Coupled) -> None:
    values = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(outer.weights(values + shift), outer.weights(values), rtol=0, atol=1e-6)
    assert float(outer.objective(values + shift)) == pytest.approx(float(outer.objective(values)) + shift, abs=1e-6)


@pytest.mark.parametrize("kind", range(5))
def test_outer_data_that_are_the_train_data(kind: int) -> None:
    fed = cf.FederatedData(TRAIN, outer=TRAIN)
    one, other = (methods(on=on)[kind] for on in ("train", "outer"))
    if kind == 4:
        one = cf.Robust(gamma=GAMMA, memory=None, **{**COMMON, "batch_size": 4})
    if kind == 2:
        one = cf.ComFedL(outer=cf.KL(GAMMA), **{**COMMON, "batch_size": 4})
    first, second = fit(one, fed=fed), fit(other, fed=fed)
    torch.testing.assert_close(flat(first.params), flat(second.params), rtol=0, atol=1e-12)
    equal_records(first, second, 1e-11)


@pytest.mark.parametrize("on", ["train", "outer"])
def test_baselines_that_are_the_losses_give_equal_weights(on: str) -> None:
    w, data = flat(dict(linear().state_dict())), TRAIN if on == "train" else OUTER
    excess = cf.offset.Excess({name: loss_and_gradient(w, data[name])[0] for name in NAMES})
    result = fit(cf.ComFedL(outer=cf.KL(0.01, on=on, offset=excess), **COMMON), 1)
    assert [row["weight"] for row in result.clients] == pytest.approx([0.25] * 4, abs=1e-9)


def test_a_small_client_and_one_with_a_hard_task() -> None:
    """What offsets are for: the small client takes weight, and the one that cannot do better gives it up."""
    twice = {name: samples(5, {"x": 40})["x"] for name in NAMES}
    small = cf.FederatedData({**twice, "a": tuple(part[:4] for part in twice["a"])})  # type: ignore[dict-item]
    weight = {}
    for offset in (None, cf.offset.Generalisation(1.0)):
        result = fit(cf.ComFedL(outer=cf.KL(GAMMA, offset=offset), **COMMON), 1, small)
        weight[offset] = result.clients[0]["weight"]
    assert weight[cf.offset.Generalisation(1.0)] > weight[None] + 0.1
    hard = cf.FederatedData({**twice, "a": (torch.zeros(40, 4, dtype=torch.float64), torch.arange(40) % 3)})
    found = []
    for excess in (None, cf.offset.Excess(steps=200)):
        result = fit(cf.ComFedL(outer=cf.KL(0.05, offset=excess), **COMMON), 60, hard)
        found.append(result.clients[-4]["weight"])
    assert found[0] > 0.7 and found[1] < 0.4, found


def test_memory_does_not_apply_to_outer_data() -> None:
    for memory in (0.98, None):
        method = cf.Robust(gamma=GAMMA, memory=memory, on="outer", lr=0.1, batch_size=4)
        assert method.remembered is None
        assert "measured" not in method.steps()
    one, other = (
        trained(cf.Robust(gamma=GAMMA, memory=memory, on="outer", lr=0.1, batch_size=4)) for memory in (0.98, None)
    )
    assert torch.equal(one, other)


def test_the_adapted_loss_is_already_judged_on_outer_data() -> None:
    one, other = (
        fit(cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(GAMMA, on=on), **COMMON)) for on in ("train", "outer")
    )
    assert torch.equal(flat(one.params), flat(other.params))
    equal_records(one, other)


def test_a_problem_of_your_own() -> None:
    problem = cf.Composition(
        lambda params, batch: (batch[0] @ params["w"]).mean(), lambda y, batch: (y - batch[1].double().mean()) ** 2
    )
    start = {"w": torch.full((4,), 0.1, dtype=torch.float64)}
    runs = []
    for on in ("train", "outer"):
        for steps in (None, 3):
            offset = None if steps is None else cf.offset.Excess(steps=steps)
            method = cf.ComFedL(problem=problem, outer=cf.KL(GAMMA, on=on, offset=offset), lr=0.05, batch_size=None)
            runs.append(cf.fit(start, FED, method, rounds=3).params["w"])
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[3])
    assert not torch.equal(runs[0], runs[1])


# Data set aside.


def contents(fed: cf.FederatedData, split: str, name: str) -> list[tuple[float, ...]]:
    part = fed.split(split, instead="none")
    assert part is not None
    return sorted((*x.tolist(), float(y)) for x, y in zip(*part[name], strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=5),
    st.floats(0.01, 0.99),
    st.integers(0, 1000),
    st.sampled_from(["classes", "two classes", "numbers"]),
)
def test_a_share_is_set_aside(sizes: list[int], share: float, seed: int, kind: str) -> None:
    generator = np.random.default_rng(seed)
    train = {}
    for i, n in enumerate(sizes):
        x = torch.from_numpy(generator.normal(size=(n, 2)))
        y = torch.from_numpy(generator.integers(0, 2 if kind == "two classes" else 4, n))
        train[f"c{i}"] = x, (y.double() if kind == "two classes" else x[:, 0] if kind == "numbers" else y)
    fed = cf.FederatedData(train)
    made = set_aside(fed, share, seed)
    for i, n in enumerate(sizes):
        name = f"c{i}"
        kept, held = contents(made, "train", name), contents(made, "outer", name)
        assert sorted(kept + held) == contents(fed, "train", name)
        assert len(held) == min(max(1, round(share * n)), n - 1)
        if kind != "numbers":
            labels = train[name][1]
            for label in labels.unique():
                quota = len(held) * float((labels == label).double().mean())
                assert abs(sum(row[-1] == float(label) for row in held) - quota) < 1 + 1e-9
        # The same for a client that is alone, as at its site.
        alone = set_aside(cf.FederatedData({name: train[name]}), share, seed)
        assert contents(alone, "outer", name) == held
    assert made.names == fed.names


def test_the_draw_depends_on_seed_and_name() -> None:
    one, again, other = (contents(set_aside(PLAIN, 0.3, seed), "outer", "c") for seed in (0, 0, 1))
    assert one == again != other


def test_fit_sets_aside_only_what_is_needed(tmp_path: Path) -> None:
    outer = cf.ComFedL(outer=cf.KL(GAMMA, on="outer"), **COMMON)
    ready = set_aside(PLAIN, 0.3, 5)
    one = fit(outer, fed=PLAIN, outer_share=0.3, seed=5)
    assert torch.equal(flat(one.params), trained(outer, fed=ready, seed=5))
    assert not torch.equal(flat(one.params), trained(outer, fed=PLAIN, seed=5))
    assert torch.equal(trained(outer, fed=FED), trained(outer, fed=FED, outer_share=0.5))  # it has its own
    for method in (cf.FedAvg(**COMMON), cf.ComFedL(outer=cf.KL(GAMMA), **COMMON)):
        assert torch.equal(trained(method, fed=PLAIN), trained(method, fed=PLAIN, outer_share=0.5))
    fit(outer, fed=PLAIN, outer_share=0.3, out=tmp_path / "outer")
    fit(cf.FedAvg(**COMMON), fed=PLAIN, out=tmp_path / "plain")
    assert "outer_share = 0.3\n" in (tmp_path / "outer/config.toml").read_text()
    assert "outer_share" not in (tmp_path / "plain/config.toml").read_text()


def test_the_objective_is_measured_on_the_data_of_the_weights() -> None:
    result = fit(cf.ComFedL(outer=cf.KL(GAMMA, on="outer"), **COMMON), 1)
    losses = torch.tensor(
        [loss_and_gradient(flat(result.params), OUTER[name])[0] for name in NAMES], dtype=torch.float64
    )
    expected = GAMMA * (torch.logsumexp(losses / GAMMA, 0) - math.log(4))
    assert result.rounds[0]["objective"] == pytest.approx(float(expected), abs=1e-9)
    assert result.clients[0]["train.loss"] == pytest.approx(
        loss_and_gradient(flat(result.params), TRAIN["a"])[0], abs=1e-9
    )


def test_a_client_of_one_sample_cannot_be_split() -> None:
    fed = cf.FederatedData({**TRAIN, "b": tuple(part[:1] for part in TRAIN["b"])})  # type: ignore[dict-item]
    with pytest.raises(cf.ConfigError, match=r"^Client 'b' has one train sample, of which .* set aside; give it outer"):
        fit(cf.Robust(on="outer"), fed=fed)
    fit(cf.Robust(), 1, fed)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), float("inf"), "half", True, None])
def test_bad_shares(share: Any) -> None:
    with pytest.raises(cf.ConfigError, match=r"outer_share is .*, but it must be a number above 0 and below 1\."):
        fit(cf.Robust(on="outer"), fed=PLAIN, outer_share=share)


# Estimated baselines in a run.


class Counting(embedded.Embedded):
    """Notes who is asked for what."""

    asked: list[tuple[int, str, list[int]]]

    def run(self, step: str, clients: Any, message: Any, round: int) -> Any:
        if step in ("train", "baseline", "measured"):
            self.asked.append((round, step, list(clients)))
        return super().run(step, clients, message, round)


@pytest.mark.parametrize("m", [4, 2])
def test_one_number_a_client_once(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Counting.asked = []
    monkeypatch.setattr("comfedl.engines.ENGINES", {"embedded": Counting})
    rounds, floats = 12, 15
    results = [
        fit(cf.Robust(gamma=GAMMA, offset=offset, **COMMON), rounds, clients_per_round=m)
        for offset in (None, cf.offset.Excess(steps=3))
    ]
    seen = [client for _, step, clients in Counting.asked if step == "baseline" for client in clients]
    assert sorted(seen) == [0, 1, 2, 3]
    plain, excess = (result.traffic for result in results)
    assert excess["up_bytes"] - plain["up_bytes"] == 4 * 8
    assert excess["down_bytes"] - plain["down_bytes"] == 4 * floats * 8  # the model, from which they train on


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("fed", [FED, PLAIN], ids=["outer", "share"])
def test_stopped_and_resumed(m: int, fed: cf.FederatedData, tmp_path: Path) -> None:
    method = cf.Robust(gamma=GAMMA, on="outer", offset=cf.offset.Excess(steps=3), lr=0.1, batch_size=4)
    options: dict[str, Any] = {"clients_per_round": m, "outer_share": 0.3, "fed": fed, "seed": 2}
    for rounds, out, resume in ((2, "run", False), (7, "run", True), (7, "once", False)):
        fit(method, rounds, out=tmp_path / out, resume=resume, **options)
    for name in ("rounds.jsonl", "clients.jsonl", "model.safetensors", "config.toml"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
    with pytest.raises(cf.RunFolderError, match=r"outer_share = 0\.3 in the folder, outer_share = 0\.4 given"):
        fit(method, 7, out=tmp_path / "run", resume=True, **{**options, "outer_share": 0.4})


@pytest.mark.parametrize("path", ["serial", "vmap", "stack"])
def test_the_paths_agree(path: str) -> None:
    for offset in (cf.offset.Excess(steps=5), cf.offset.Generalisation(0.5)):
        for inner in (None, cf.Adapt(0.1)):
            method = cf.Robust(gamma=GAMMA, inner=inner, on="outer", offset=offset, lr=0.1, batch_size=4)
            one, other = (
                fit(method, engine_options={"vectorize": each}, clients_per_round=3) for each in ("auto", path)
            )
            torch.testing.assert_close(flat(one.params), flat(other.params), rtol=0, atol=1e-10)
            equal_records(one, other, 1e-9)


@pytest.mark.parametrize(
    "optimizer", [cf.optim.SGD(momentum=0.9), cf.optim.SGD(momentum=0.5, keep_state=True)], ids=["fresh", "kept"]
)
def test_beside_schedules_and_optimisers_of_clients(optimizer: cf.optim.SGD) -> None:
    """The estimate takes the base learning rate, and leaves what clients keep as it is."""
    method = cf.Robust(
        gamma=GAMMA,
        offset=cf.offset.Excess(steps=3),
        client_optimizer=optimizer,
        lr_schedule=cf.schedule.Warmup(3),
        clip_grad_norm=1.0,
        **COMMON,
    )
    same = cf.Robust(
        gamma=GAMMA,
        offset=cf.offset.Excess(steps=3, lr=LR),
        client_optimizer=optimizer,
        lr_schedule=cf.schedule.Warmup(3),
        clip_grad_norm=1.0,
        **COMMON,
    )
    assert torch.equal(trained(method), trained(same))


def test_effective_clients_of_shifted_losses() -> None:
    outer = cf.KL(effective_clients=2, offset=cf.offset.Excess(GIVEN))
    result = fit(cf.ComFedL(outer=outer, **COMMON), 1)
    w = flat(dict(linear().state_dict()))
    shifted = torch.tensor([loss_and_gradient(w, TRAIN[name])[0] - GIVEN[name] for name in NAMES], dtype=torch.float64)
    expected = cf.KL(effective_clients=2).weights(shifted)
    assert [row["weight"] for row in result.clients] == pytest.approx(expected.tolist(), abs=1e-9)
    assert result.rounds[0]["effective_clients"] == pytest.approx(2)


def test_clients_whose_estimate_is_missing_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad estimate is refused, and asked for again; the others go on."""
    method = cf.ComFedL(outer=cf.KL(GAMMA, offset=cf.offset.Excess(steps=2)), **COMMON)
    run = embedded.Embedded.run

    def broken(self: Any, step: str, clients: Any, message: Any, round: int) -> Any:
        replies = run(self, step, clients, message, round)
        if step == "baseline" and round <= 1:
            return embedded.LocalReplies(
                replies.clients,
                [{"baseline": torch.tensor(math.nan if i == 1 else 0.5)} for i in replies.clients],
            )
        return replies

    monkeypatch.setattr(embedded.Embedded, "run", broken)
    with pytest.warns(UserWarning, match="refused the reply of client 'b': its baseline is not finite"):
        result = fit(method, 2)
    assert [row["weight"] == 0 for row in result.clients] == [False, True, *[False] * 6]
    assert math.isfinite(result.rounds[0]["objective"])  # type: ignore[arg-type]


def test_a_quorum_of_the_round_and_not_of_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new client that fails does not stop a round with enough others."""
    method = cf.ComFedL(outer=cf.KL(GAMMA, offset=cf.offset.Excess(steps=2)), **COMMON)
    run = embedded.Embedded.run

    def silent(self: Any, step: str, clients: Any, message: Any, round: int) -> Any:
        if step == "baseline":
            clients = [i for i in clients if i != 3]
            return run(self, step, clients, message, round) if clients else embedded.LocalReplies([], [])
        return run(self, step, clients, message, round)

    monkeypatch.setattr(embedded.Embedded, "run", silent)
    result = fit(method, 4)
    assert [row["weight"] > 0 for row in result.clients] == [True, True, True, False] * 4


def test_very_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than FEW clients the estimates are a log of updates."""
    method = cf.ComFedL(outer=cf.KL(GAMMA, offset=cf.offset.Excess(steps=2)), **COMMON)
    expected = trained(method, 6, clients_per_round=2)
    monkeypatch.setattr("comfedl.core.client_vector.FEW", 3)
    assert torch.equal(trained(method, 6, clients_per_round=2), expected)
    state = method.init({"params": dict(linear().state_dict()), "buffers": {}}, 4)
    assert {name for name, _ in tree.named_leaves(state["baselines"])} >= {"all", "clients"}


def test_methods_with_offsets_can_be_hashed_and_compared() -> None:
    one, other = (cf.Robust(offset=cf.offset.Excess({"a": value})) for value in (0.1, 0.2))
    assert one != other and len({one, other, cf.Robust(offset=cf.offset.Excess({"a": 0.1}))}) == 2


# Bad values.


def test_bad_values() -> None:
    Excess, Generalisation = cf.offset.Excess, cf.offset.Generalisation
    for make, message in (
        (lambda: cf.KL(0.2, on="validation"), r"on is 'validation', which is unknown; .*Allowed: outer, train"),
        (lambda: cf.KL(0.2, offset=3), "offset is 3, but it must be None or like"),
        (lambda: cf.Robust(offset="excess"), "offset is 'excess', but it must be None or like"),
        (lambda: Generalisation(-1), "c is -1, but it must be a number of 0 or more"),
        (lambda: Generalisation(math.nan), "c is nan"),
        (lambda: Excess(steps=0), "steps is 0, but it must be an integer of 1 or more"),
        (lambda: Excess(lr=0), "Excess's lr is 0, but it must be a number above 0"),
        (lambda: Excess({}), r"baseline is \{\}, but it must be a loss for every client"),
        (lambda: Excess(0.3), r"baseline is 0\.3, but it must be a loss for every client"),
        (lambda: Excess({"a": math.inf}), "The baseline of client 'a' is inf, but it must be a finite number"),
        (lambda: Excess({"a": "low"}), "The baseline of client 'a' is 'low', but it must be a finite number"),
    ):
        with pytest.raises(cf.ConfigError, match=message):
            make()  # type: ignore[no-untyped-call]


def test_baselines_of_other_clients() -> None:
    lacking = {name: 0.1 for name in NAMES if name != "c"}
    for baseline, message in (
        (lacking, "The baseline of Excess lacks client 'c'; give a number for every client, or leave baseline out"),
        ({**GIVEN, "x": 1.0}, "The baseline of Excess names 'x', which is not one of the 4 clients; correct the name"),
    ):
        for method in (
            cf.Robust(offset=cf.offset.Excess(baseline)),
            cf.ComFedL(outer=cf.KL(0.2, offset=cf.offset.Excess(baseline))),
        ):
            with pytest.raises(cf.ConfigError, match=message):
                fit(method)
