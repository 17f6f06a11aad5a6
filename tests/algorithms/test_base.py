"""What subclasses of a method inherit, and what the local loop does for all of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.algorithms.base import Algorithm
from helpers.reference import linear, train_data


@dataclass(frozen=True)
class Lighter(cf.FedAvg):
    """A method whose author forgot its name, and that changes the server alone."""

    def combined(self, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return values.max()


@dataclass(frozen=True)
class OwnStep(cf.FedAvg):
    def train(self, learner: Any, message: Any, state: Any, batches: Any) -> Any:
        return super().train(learner, message, state, batches)


def test_a_method_without_a_name_is_recorded_under_its_class(tmp_path: Path) -> None:
    assert (Lighter.name, cf.FedAvg.name) == ("lighter", "fedavg")
    cf.fit(linear(), cf.FederatedData(train_data()), Lighter(), rounds=1, out=tmp_path / "run")
    assert 'name = "lighter"' in (tmp_path / "run" / "config.toml").read_text()


def test_only_a_subclass_with_a_client_step_of_its_own_must_say_that_it_is_elementwise() -> None:
    assert Lighter.elementwise and not OwnStep.elementwise
    assert all(method.elementwise for method in (cf.ComFedL, cf.FedMAML, cf.DAMAML, cf.TERM, cf.Ditto, cf.DRFA))


@pytest.mark.parametrize("method", [cf.FedAvg, cf.ComFedL])
def test_plain_local_training_takes_the_fused_loop(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a gradient of its own per step is not taken at all."""
    from comfedl.algorithms import base

    def slow(*arguments: Any, **options: Any) -> None:
        raise AssertionError("one gradient at a time")

    monkeypatch.setattr(base, "gradient", slow)
    cf.fit(linear(), cf.FederatedData(train_data()), method(personal_steps=0), rounds=1)


def test_help_names_and_explains_all_arguments() -> None:
    """Those that all methods have were in the signature alone."""
    for method in ALGORITHMS.values():
        text = inspect.getdoc(method) or ""
        for field in fields(Algorithm):
            assert f"\n    {field.name}: " in text, (method.name, field.name)
        assert {field.name for field in fields(method)} <= {*inspect.signature(method).parameters}
        assert text.count("Arguments of all methods:") == 1
