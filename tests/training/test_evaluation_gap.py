"""``eval_every = "auto"``: which rounds are evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import comfedl as cf
from comfedl.training.options import RunOptions


def many(samples: int, clients: int = 4, held_out: int = 0) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3, generator=generator)
        return x, (x[:, 0] > 0).long()

    validation = {f"c{i}": part(held_out) for i in range(clients)} if held_out else None
    return cf.FederatedData({f"c{i}": part(samples) for i in range(clients)}, validation)


def evaluated(fed: cf.FederatedData, rounds: int, method: cf.FedAvg, **options: object) -> list[int]:
    result = cf.fit(torch.nn.Linear(3, 2), fed, method, rounds=rounds, **options)  # type: ignore[arg-type]
    return [int(row["round"]) for row in result.rounds]  # type: ignore[arg-type]


def test_the_gap_is_counted_in_samples() -> None:
    # A round takes 4 x 5 x 50 = 1,000 samples; an evaluation 2 x (4 x 300 + 4 x 100) + 4 x 50 = 3,400, so 17 rounds.
    method = cf.FedAvg(local_steps=5, batch_size=50)
    assert evaluated(many(300, held_out=100), 40, method) == [1, 2, 4, 8, 16, 17, 34, 40]


def test_steps_and_participants_count() -> None:
    # Half the participants with half the steps do a quarter of the work; half the evaluated clients cost half.
    method = cf.FedAvg(local_steps=10, batch_size=50)
    assert evaluated(many(300), 30, method) == [1, 2, 4, 7, 14, 21, 28, 30]
    quarter = cf.FedAvg(local_steps=5, batch_size=50)
    assert evaluated(many(300), 30, quarter, clients_per_round=2, eval_clients=2) == [1, 2, 4, 8, 13, 26, 30]


def test_without_personal_models_half_the_work() -> None:
    method = cf.FedAvg(local_steps=10, batch_size=50, personal_steps=0)
    assert evaluated(many(300), 10, method) == [1, 2, 3, 6, 9, 10]


def test_small_data_are_evaluated_every_round() -> None:
    assert evaluated(many(250), 6, cf.FedAvg(local_steps=1, batch_size=1)) == [1, 2, 3, 4, 5, 6]


def test_a_number_is_kept_to() -> None:
    assert evaluated(many(300), 7, cf.FedAvg(), eval_every=3) == [3, 6, 7]


def test_auto_changes_no_number() -> None:
    fed, method = many(300), cf.ComFedL(outer=cf.KL(0.2), local_steps=10, batch_size=50)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    auto, every = cf.fit(model, fed, method, rounds=12), cf.fit(model, fed, method, rounds=12, eval_every=1)
    chosen = [row["round"] for row in auto.rounds]
    assert len(chosen) < 12
    assert auto.rounds == [row for row in every.rounds if row["round"] in chosen]
    assert all(torch.equal(auto.params[name], every.params[name]) for name in auto.params)


def test_a_longer_run_is_evaluated_in_the_same_rounds(tmp_path: Path) -> None:
    fed, method = many(300), cf.FedAvg(local_steps=10, batch_size=50)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    cf.fit(model, fed, method, rounds=11, out=tmp_path / "longer")
    cf.fit(model, fed, method, rounds=25, out=tmp_path / "longer", resume=True)
    cf.fit(model, fed, method, rounds=25, out=tmp_path / "once")
    for name in ("rounds.jsonl", "clients.jsonl", "model.safetensors"):
        assert (tmp_path / "longer" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


@pytest.mark.parametrize("every", ["often", "1", 0])
def test_bad_values(every: object) -> None:
    with pytest.raises(cf.ConfigError, match="eval_every is"):
        RunOptions(eval_every=every)  # type: ignore[arg-type]
