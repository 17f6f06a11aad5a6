"""The embedded engine: bit-identical reruns, no side effects on the user's objects, correct buffers."""

from __future__ import annotations

import copy
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import comfedl as cf
from comfedl.algorithms.base import Algorithm
from comfedl.core.learner import Learner
from comfedl.core.protocol import Draw, Outcome, Step
from comfedl.engines.client_states import ClientStates
from comfedl.engines.embedded import Embedded, LocalReplies
from comfedl.utils import tree

F64 = torch.float64


def clients() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def client(samples: int, shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 4, generator=generator, dtype=F64) + shift
        return x, (x.sum(dim=1) > 4 * shift).long() + (x[:, 0] > shift).long()

    return {"a": client(12, 0.0), "b": client(5, 1.0), "c": client(30, -0.5), "d": client(9, 2.0)}


def dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).double()


def linear(dtype: torch.dtype = F64) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3).to(dtype)


def run(module: nn.Module, algorithm: Algorithm | None = None, **options: Any) -> cf.Result:
    data = options.pop("data", clients())
    algorithm = algorithm or cf.ComFedL(outer=cf.KL(0.2), batch_size=4)
    return cf.fit(module, cf.FederatedData(data), algorithm, **{"rounds": 4, **options})


def same(one: cf.Result, other: cf.Result) -> bool:
    """To the bit: parameters, buffers and everything recorded."""
    parts = zip((one.params, one.buffers), (other.params, other.buffers), strict=True)
    return (
        all(torch.equal(a[name], b[name]) for a, b in parts for name in (*a, *b))
        and one.rounds == other.rounds
        and one.clients == other.clients
    )


METHODS = [
    cf.FedAvg(batch_size=4),
    cf.ComFedL(outer=cf.KL(0.2), batch_size=4),
    cf.ComFedL(outer=cf.KL(0.2), batch_size=4, loss_samples=6),
    cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(0.2, cap=2), batch_size=4),
]


# The same seed, the same run.


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("module", [linear, dropout])
def test_a_seed_decides_everything(module: Any, algorithm: Algorithm) -> None:
    made = module()
    one = run(made, algorithm, seed=5, clients_per_round=3)
    torch.manual_seed(99)  # whatever the global generators are at
    np.random.seed(99)
    random.seed(99)
    assert same(one, run(made, algorithm, seed=5, clients_per_round=3))
    assert not same(one, run(made, algorithm, seed=6, clients_per_round=3))


def test_the_file_is_the_same_to_the_byte(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        run(dropout(), seed=seed, out=tmp_path / name)
    one, two, three = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three
    lines = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("one", "two", "three")]
    assert lines[0] == lines[1] != lines[2]


@pytest.mark.parametrize("algorithm", METHODS)
def test_the_order_in_which_clients_are_given_does_not_matter(algorithm: Algorithm) -> None:
    data = clients()
    turned = dict(reversed(list(data.items())))
    assert list(turned) != list(data)
    assert same(
        run(dropout(), algorithm, clients_per_round=3), run(dropout(), algorithm, data=turned, clients_per_round=3)
    )


def test_evaluating_less_often_changes_no_model() -> None:
    one, other = run(dropout(), eval_every=1), run(dropout(), eval_every=3)
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    assert [row["round"] for row in other.rounds] == [3, 4]
    assert other.rounds == [row for row in one.rounds if row["round"] in (3, 4)]


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    assert run(dropout(), rounds=2).rounds == run(dropout(), rounds=4).rounds[:2]


def test_a_clients_training_does_not_depend_on_who_else_there_is() -> None:
    """Alone or beside others, a client draws the same batches and the same dropout."""
    data = clients()
    alone = run(dropout(), cf.FedAvg(batch_size=4), data={"c": data["c"]}, rounds=1)
    beside = {name: (x, y) for name, (x, y) in data.items() if name in "ac"}
    weighted = run(dropout(), cf.FedAvg(batch_size=4), data={"a": data["a"]}, rounds=1)
    both = run(dropout(), cf.FedAvg(batch_size=4), data=beside, rounds=1)
    for name in both.params:
        expected = (12 * weighted.params[name] + 30 * alone.params[name]) / 42
        torch.testing.assert_close(both.params[name], expected, rtol=0, atol=1e-12)


def test_batches_change_with_the_round_the_client_and_the_step() -> None:
    """What a step is handed: new batches every round, for every client and every draw."""
    x = torch.arange(1000, dtype=F64)
    fed = cf.FederatedData({"a": x, "b": x})
    seen: list[tuple[float, ...]] = []

    def look(learner: Learner, message: Any, state: Any, batches: Any) -> Outcome:
        for draw in ("one", "two"):
            seen.extend(tuple(batch[0].tolist()) for batch in batches[draw])
        return Outcome({"n": torch.tensor(len(seen))})

    draws = {"one": Draw("train", 5, 3), "two": Draw("train", 5, 3)}
    engine = Embedded(fed, Learner(), {"look": Step(look, draws), "other": Step(look, draws)}, seed=0)
    for step in ("look", "other"):
        for round in (1, 2):
            engine.run(step, [0, 1], {}, round)
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("size", "bounded", "expected"),
    [(None, False, 8), (3, False, 3), (20, False, 20), (3, True, 3), (8, True, 8), (20, True, 8)],
)
def test_draws(size: int | None, bounded: bool, expected: int) -> None:
    got: list[Any] = []

    def look(learner: Learner, message: Any, state: Any, batches: Any) -> Outcome:
        got.append(batches)
        return Outcome({"n": torch.tensor(0)})

    fed = cf.FederatedData({"a": torch.arange(8.0)})
    draws = {"d": Draw("train", size, 2, bounded), "none": Draw("test", size)}
    Embedded(fed, Learner(), {"look": Step(look, draws)}, seed=0).run("look", [0], {}, 1)
    (batches,) = got
    assert [len(x) for x, _ in batches["d"]] == [expected] * 2
    for x, _ in batches["d"]:
        assert expected > 8 or len(set(x.tolist())) == expected
    assert len(batches["none"]) == 0


def test_draws_of_one_purpose_are_the_same_in_every_step() -> None:
    seen: dict[str, list[float]] = {}

    def look(learner: Learner, message: Any, state: Any, batches: Any) -> Outcome:
        seen[f"{len(seen)}"] = [x.tolist() for x, _ in batches["d"]]
        return Outcome({"n": torch.tensor(0)})

    shared, own = Draw("train", 5, 2, purpose="shared"), Draw("train", 5, 2)
    steps = {"one": Step(look, {"d": shared}), "two": Step(look, {"d": shared}), "three": Step(look, {"d": own})}
    engine = Embedded(cf.FederatedData({"a": torch.arange(1000.0)}), Learner(), steps, seed=0)
    for step in steps:
        engine.run(step, [0], {}, 1)
    assert seen["0"] == seen["1"] != seen["2"]


@pytest.mark.parametrize("module", [linear, dropout])
@pytest.mark.parametrize("algorithm", [cf.FedAvg(batch_size=4), cf.ComFedL(inner=cf.Adapt(0.3), batch_size=4)])
def test_the_personal_model_is_the_one_that_was_evaluated(algorithm: Algorithm, module: Any) -> None:
    """``result.personal`` gives the model whose scores the last round recorded, and always the same."""
    result, data, judge = run(module(), algorithm), clients(), module().eval()
    for row in result.clients[-len(data) :]:
        mine = result.personal(row["client"])
        again = result.personal(row["client"])
        assert all(torch.equal(mine[name], again[name]) and (mine[name] != result.params[name]).any() for name in mine)
        judge.load_state_dict(mine)
        x, y = data[row["client"]]
        assert row["train.personal_loss"] == pytest.approx(cross_entropy(judge(x), y).item(), abs=1e-12)


def test_the_embedded_engine_keeps_a_clients_state() -> None:
    """A client that was not asked keeps what it had; one never asked starts with the initial state."""

    def count(learner: Learner, message: Any, state: Any, batches: Any) -> Outcome:
        return Outcome({"before": state["n"]}, state={"n": state["n"] + 1})

    fed = cf.FederatedData({"a": torch.arange(8.0), "b": torch.arange(3.0)})
    engine = Embedded(fed, Learner(), {"count": Step(count)}, 0, {"n": torch.tensor(10.0)})
    found = [engine.run("count", who, {}, 1).numbers("before").tolist() for who in ([0], [0, 1], [1], [0])]
    assert found == [[10], [11, 10], [11], [12]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_is_put_away_before_the_next_clients_run(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the states of all clients would be in memory twice at the end of the step."""
    handed: list[weakref.ref[Tensor]] = []
    most: list[int] = []
    put = ClientStates.put

    def watched(self: ClientStates, who: list[int], state: Any) -> None:
        most.append(sum(ref() is not None for ref in handed))
        handed.append(weakref.ref(tree.leaves(state)[0]))
        put(self, who, state)

    monkeypatch.setattr(ClientStates, "put", watched)
    monkeypatch.setattr("comfedl.engines.embedded.MAX_STACKED", 2)
    fed = cf.FederatedData.from_flat((torch.randn(40, 3), torch.arange(40) % 2, np.arange(21) * 2))
    cf.fit(nn.Linear(3, 2), fed, cf.Ditto(batch_size=2), rounds=8, engine_options={"workers": workers})
    assert len(most) == 8 * 10 and max(most) <= workers


def test_replies() -> None:
    replies = LocalReplies(
        [2, 0],
        [
            {"m": {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}},
            {"m": {"w": -torch.ones(2), "n": torch.tensor(5)}},
        ],
    )
    total = replies.weighted_sum("m", torch.tensor([0.25, 0.5], dtype=F64))
    assert total["w"].tolist() == [-0.25, 0.0] and int(total["n"]) == 5
    assert replies.nbytes() == 2 * (8 + 8)
    assert [int(reply["n"]) for reply in replies.each("m")] == [3, 5]


# The user's objects are unchanged.


def test_global_generators_are_left_alone() -> None:
    module = dropout()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    run(module, cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(0.2)), clients_per_round=2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    module = dropout()
    one = run(module, cf.FedAvg(batch_size=None), rounds=1)
    for part in module:
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    other = run(module, cf.FedAvg(batch_size=None), rounds=1)
    assert not same(one, other)
    module.load_state_dict(one.params)
    x, y = clients()["a"]
    assert one.clients[0]["train.loss"] == pytest.approx(cross_entropy(module(x), y).item(), abs=1e-12)


def test_the_readers_model_and_data_are_not_changed() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    before, data = copy.deepcopy(module.state_dict()), clients()
    kept = copy.deepcopy(data)
    result = run(module, data=data)
    assert all(torch.equal(before[name], part) for name, part in module.state_dict().items())
    assert not module.training and all(part.grad is None and part.requires_grad for part in module.parameters())
    assert all(torch.equal(u, v) for name in data for u, v in zip(data[name], kept[name], strict=True))
    for part in result.params.values():
        part.zero_()
    assert all(torch.equal(before[name], part) for name, part in module.state_dict().items())


def test_frozen_parameters_stay() -> None:
    """Parameters frozen by the user are used, but neither trained nor sent."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    module[0].requires_grad_(False)
    data = {"a": clients()["a"]}
    result = run(module, cf.FedAvg(lr=0.2, local_steps=3, batch_size=None), data=data, rounds=2)
    expected = copy.deepcopy(module)
    optimiser = torch.optim.SGD(expected[2].parameters(), lr=0.2)
    for _ in range(6):
        optimiser.zero_grad()
        cross_entropy(expected(data["a"][0]), data["a"][1]).backward()
        optimiser.step()
    assert set(result.params) == set(module.state_dict())
    for name, part in expected.state_dict().items():
        torch.testing.assert_close(result.params[name], part, rtol=0, atol=1e-10)
    assert set(result.personal("a")) == set(result.params)
    assert result.traffic["up_bytes"] == 2 * 18 * 8


def test_tied_parameters_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    module = Tied().double()
    x, y = clients()["a"]
    result = run(module, cf.FedAvg(lr=0.1, local_steps=1, batch_size=None), data={"a": (x, y)}, rounds=1)
    cross_entropy(module(x), y).backward()
    assert sorted(result.params) == sorted(name for name, _ in module.named_parameters())
    for name, part in module.named_parameters():
        torch.testing.assert_close(result.params[name], part.detach() - 0.1 * part.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_models_dtype(dtype: torch.dtype) -> None:
    """The model's dtype counts, not the data's float64; results agree up to rounding."""
    result = run(linear(dtype))
    assert {part.dtype for part in result.params.values()} == {dtype}
    assert list(result.params) == ["weight", "bias"]
    assert not any(part.requires_grad for part in result.params.values())
    reference = run(linear(F64) if dtype == torch.float32 else linear(torch.float32))
    torch.testing.assert_close(result.params["weight"].double(), reference.params["weight"].double(), rtol=0, atol=1e-4)


# BatchNorm: running statistics get the weights of the parameters, counters their maximum.


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def by_hand(start: nn.Module, gamma: float | None, rounds: int, steps: int, lr: float) -> nn.Module:
    """Full-batch rounds with plain torch modules: KL weights from evaluation mode, or by samples."""
    server, data = copy.deepcopy(start), clients()
    for _ in range(rounds):
        losses, locals_ = [], []
        for x, y in data.values():
            losses.append(cross_entropy(copy.deepcopy(server).eval()(x), y).detach())
            local = copy.deepcopy(server).train()
            optimiser = torch.optim.SGD(local.parameters(), lr=lr)
            for _ in range(steps):
                optimiser.zero_grad()
                cross_entropy(local(x), y).backward()
                optimiser.step()
            locals_.append(local.state_dict())
        if gamma is None:
            r = torch.tensor([len(y) for _, y in data.values()], dtype=F64)
            r = r / r.sum()
        else:
            r = torch.softmax(torch.stack(losses) / gamma, dim=0)
        mixed = {
            name: sum(share * local[name] for share, local in zip(r, locals_, strict=True))
            if part.is_floating_point()
            else torch.stack([local[name] for local in locals_]).amax(dim=0)
            for name, part in server.state_dict().items()
        }
        server.load_state_dict(mixed)
    return server


@pytest.mark.parametrize("gamma", [None, 0.3])
def test_running_statistics_are_averaged_like_the_parameters(gamma: float | None) -> None:
    algorithm: Algorithm = cf.FedAvg(lr=0.2, local_steps=3, batch_size=None)
    if gamma is not None:
        algorithm = cf.ComFedL(outer=cf.KL(gamma), lr=0.2, local_steps=3, batch_size=None)
    result = run(normed(), algorithm, rounds=3)
    expected = by_hand(normed(), gamma, 3, 3, 0.2).state_dict()
    assert set(expected) == {*result.params, *result.buffers}
    for name, part in {**result.params, **result.buffers}.items():
        torch.testing.assert_close(part, expected[name], rtol=0, atol=1e-9)
    assert int(result.buffers["1.num_batches_tracked"]) == 9


@pytest.mark.parametrize("order", ["exact", "first", "hessian-free"])
@pytest.mark.parametrize("adapt_steps", [1, 2])
def test_running_statistics_move_once_a_local_step_under_adapt(order: str, adapt_steps: int) -> None:
    """BatchNorm on the input sees the same mean at every step, so its running mean has a closed form."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    adapt = cf.Adapt(0.1, adapt_steps, order)
    result = run(module, cf.ComFedL(inner=adapt, local_steps=3, batch_size=None), rounds=2)
    assert int(result.buffers["0.num_batches_tracked"]) == 6
    means = torch.stack([x.mean(dim=0) for x, _ in clients().values()]).mean(dim=0)
    spreads = torch.stack([x.var(dim=0) for x, _ in clients().values()]).mean(dim=0)
    torch.testing.assert_close(result.buffers["0.running_mean"], (1 - 0.9**6) * means)
    torch.testing.assert_close(result.buffers["0.running_var"], 0.9**6 + (1 - 0.9**6) * spreads)


def test_running_statistics_under_partial_participation() -> None:
    """Weights that add up to less than 1 leave the rest to the old statistics, as they do for the parameters."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    algorithm = cf.QFedAvg(2.0, local_steps=2, batch_size=None)  # its step size is its own
    result = run(module, algorithm, rounds=6, clients_per_round=2)
    expected, short = torch.zeros(4, dtype=F64), False
    for number in range(1, 7):
        weights = {row["client"]: row["weight"] for row in result.clients if row["round"] == number}
        short |= sum(weights.values()) < 0.99
        step = sum(r * (0.81 * expected + 0.19 * clients()[n][0].mean(dim=0) - expected) for n, r in weights.items())
        expected = expected + step
    assert short, "a round in which the weights do not add up to 1"
    torch.testing.assert_close(result.buffers["0.running_mean"], expected)
    assert int(result.buffers["0.num_batches_tracked"]) == 12


@pytest.mark.parametrize("inner", [None, cf.Adapt(0.1), cf.Adapt(0.1, 2, "hessian-free")])
def test_batch_norm_without_running_statistics(inner: cf.Adapt | None) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).double()
    result = run(module, cf.ComFedL(inner=inner, outer=cf.KL(0.2)), rounds=8)
    assert result.buffers == {}
    assert result.rounds[-1]["train.loss.mean"] < result.rounds[0]["train.loss.mean"]


def test_buffers_travel_and_are_counted(tmp_path: Path) -> None:
    module = normed()
    result = run(module, cf.FedAvg(), rounds=2, out=tmp_path)
    size = sum(part.numel() * part.element_size() for part in module.state_dict().values())
    assert result.traffic == {"up_bytes": 2 * 4 * size, "down_bytes": 2 * 4 * size}
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))  # every key, nothing else
