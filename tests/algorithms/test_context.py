"""Sampling of participants: without touching all clients, and with unchanged draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import comfedl as cf
from comfedl.algorithms.context import RoundContext
from comfedl.core import client_vector
from comfedl.core.reply_validation import QUARANTINE, ReplyValidator
from comfedl.data.client_names import NumberedNames
from comfedl.utils import rng


class Somewhere:
    """The part of an engine that sampling needs."""

    def __init__(self, clients: int) -> None:
        self.names, self.sizes = NumberedNames(clients), np.arange(clients) + 1


def here(clients: int, participants: int, barred: set[int], number: int = 1) -> RoundContext:
    validator = ReplyValidator({"params": {}, "buffers": {}}, NumberedNames(clients), quorum=0.0)
    validator.offences = dict.fromkeys(barred, QUARANTINE) | {
        i: 1 for i in range(clients) if i % 3 == 0 and i not in barred
    }
    return RoundContext(number, 5, participants, Somewhere(clients), validator=validator)  # type: ignore[arg-type]


@settings(deadline=None)
@given(data=st.data(), clients=st.integers(2, 60))
def test_the_draw_is_from_a_list_of_all_who_may_be_asked(data: st.DataObject, clients: int) -> None:
    barred = data.draw(st.sets(st.integers(0, clients - 1), max_size=clients - 1))
    participants = data.draw(st.integers(1, clients))
    everybody = [i for i in range(clients) if i not in barred]
    if participants < len(everybody):
        generator = rng.generator(5, "clients", 1)
        places = generator.choice(len(everybody), size=participants, replace=False, shuffle=False)
        expected = sorted(everybody[i] for i in places)
    else:
        expected = everybody
    drawn = here(clients, participants, barred).sample()
    assert drawn == expected and all(type(i) is int for i in drawn)


def test_drawing_by_weights() -> None:
    """In proportion to the weights, and never a client that has no weight or is excluded."""
    weights, counts = np.array([0.0, 1.0, 2.0, 5.0, 1.0, 0.0]), np.zeros(6)
    for number in range(1, 1001):
        for i in here(6, 4, {4}, number).sample_by(weights, replace=True):
            counts[i] += 1
    assert counts[[0, 4, 5]].tolist() == [0, 0, 0]
    np.testing.assert_allclose(counts[[1, 2, 3]] / 4000, np.array([1, 2, 5]) / 8, atol=0.03)
    assert weights.tolist() == [0.0, 1.0, 2.0, 5.0, 1.0, 0.0]
    none = here(6, 4, {1, 2, 3, 4}).sample_by(weights, replace=True)
    assert set(none) <= {0, 5}


def test_without_replacement_by_weights_nobody_comes_twice() -> None:
    drawn = here(6, 5, {4}).sample_by(np.array([0.0, 1.0, 2.0, 5.0, 1.0, 0.0]))
    assert drawn == [1, 2, 3]


def test_weights_of_all_are_worked_out_where_they_are_recorded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[int] = []
    weights = cf.KL.weights

    def watched(self: cf.KL, values: torch.Tensor) -> torch.Tensor:
        weighed.append(len(values))
        return weights(self, values)

    monkeypatch.setattr(cf.KL, "weights", watched)
    monkeypatch.setattr(client_vector, "FEW", 4)  # so that the losses are kept as a list of changes
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    fed = cf.FederatedData.from_flat((x, (x[:, 0] > 0).long(), np.arange(7) * 10))
    method = cf.ComFedL(outer=cf.KL(0.3), lr=0.1)
    found = cf.fit(torch.nn.Linear(2, 2), fed, method, rounds=4, clients_per_round=2, eval_every=4)
    seen = sum(row["dual"] > 0 for row in found.clients if row["round"] == 4)
    assert weighed[:5] == [2, 2, 2, 2, seen] and seen > 2  # what follows is the evaluation


METHODS = [cf.FedAvg(), cf.ComFedL(outer=cf.KL(0.3)), cf.Ditto(), cf.QFedAvg(), cf.DRFA(1e-6), cf.DeltaFL()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_nobody_walks_over_all_clients(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on 200,000 clients makes the names of those that take part or are evaluated, and no others."""
    clients, made, name = 200_000, set[int](), NumberedNames.__getitem__

    def watched(self: NumberedNames, place: Any) -> Any:
        made.add(place)
        return name(self, place)

    x = torch.randn(clients, 2, generator=torch.Generator().manual_seed(0))
    fed = cf.FederatedData.from_flat((x, (x[:, 0] > 0).long(), np.arange(clients + 1)))
    monkeypatch.setattr(NumberedNames, "__getitem__", watched)
    result = cf.fit(torch.nn.Linear(2, 2), fed, method, rounds=2, clients_per_round=5, eval_clients=4)
    assert len(result.clients) == 8 and 0 < len(made) <= 2 * 2 * 5 + 4
