"""Fuzzing: a random valid config trains or says clearly why not, and so does a damaged run folder."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import comfedl as cf
from comfedl.algorithms import ALGORITHMS
from comfedl.config.build import from_table
from comfedl.config.schema import parse_config, run_config
from comfedl.core.offset import OFFSETS
from comfedl.core.outer_functions import OUTERS
from comfedl.core.robust_aggregation import RULES
from comfedl.core.simplex import capped_weights, chi_square_weights, log_mean_exp, softmax_weights, top_weights

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
positive = st.floats(1e-3, 10)
counts = st.integers(1, 12)
outers = st.one_of(
    st.just({"name": "identity"}),
    st.builds(lambda gamma: {"name": "exp", "gamma": gamma}, st.floats(0.01, 20)),
    st.builds(lambda gamma: {"name": "kl", "gamma": gamma}, positive),
    st.builds(lambda gamma, cap: {"name": "kl", "gamma": gamma, "cap": cap}, positive, st.floats(1, 20)),
    st.builds(lambda t: {"name": "tilt", "t": t}, st.floats(-5, 5).filter(bool)),
    st.builds(lambda level: {"name": "cvar", "level": level}, st.floats(0, 0.99)),
    st.builds(lambda rho: {"name": "chi-square", "rho": rho}, st.floats(0, 10)),
    st.builds(lambda q: {"name": "power", "q": q}, st.floats(0, 5)),
)
offsets = st.one_of(
    st.builds(lambda c: {"name": "generalisation", "c": c}, st.floats(0, 10)),
    st.builds(lambda steps: {"name": "excess", "steps": steps}, st.integers(1, 4)),
    st.just({"name": "excess", "baseline": {"0": 0.1, "1": 0.2}}),
)
measures = st.fixed_dictionaries({}, optional={"on": st.sampled_from(["train", "outer"]), "offset": offsets})
partitions = st.one_of(
    st.builds(lambda n: {"partition": "iid", "clients": n}, st.integers(1, 12)),
    st.builds(lambda n, a: {"partition": "dirichlet", "clients": n, "alpha": a}, st.integers(1, 12), positive),
    st.builds(
        lambda n, r: {"partition": "dominant-class", "clients": n, "rho": r}, st.integers(1, 12), st.floats(0, 1)
    ),
    st.builds(lambda n, c: {"partition": "shards", "clients": n, "classes": c}, st.integers(1, 12), st.integers(1, 10)),
    st.builds(
        lambda n, a, b: {"partition": "imbalanced", "clients": n, "large": a, "small": b},
        st.integers(1, 12),
        st.integers(1, 900),
        st.integers(1, 60),
    ),
    st.just({"partition": "natural"}),
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(ALGORITHMS)))
    algorithm: dict[str, Any] = {
        "name": name,
        "lr": draw(st.floats(1e-4, 2)),
        "local_steps": draw(st.integers(1, 3)),
        "batch_size": draw(st.sampled_from([1, 7, 64, "all"])),
        "aggregate": draw(st.sampled_from(RULES)),
        "personal_steps": draw(st.integers(0, 2)),
    }
    if draw(st.booleans()):
        algorithm["clip_update_norm"] = draw(positive)
    if draw(st.booleans()):
        algorithm["defence"] = "strong"
    if name == "robust":
        algorithm |= draw(measures)
    if name == "comfedl":
        algorithm["outer"] = draw(outers)
        if algorithm["outer"]["name"] == "kl":
            algorithm["outer"] |= draw(measures)
        if draw(st.booleans()):
            order = draw(st.sampled_from(["exact", "first", "hessian-free"]))
            algorithm["inner"] = {"lr": draw(st.floats(0, 0.5)), "steps": draw(st.integers(1, 2)), "order": order}
    clients = draw(st.none() | st.integers(1, 12))
    return {
        "rounds": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "outer_share": draw(st.floats(0.01, 0.99)),
        "data": {"name": "digits", "validation": draw(st.floats(0, 0.5)), "test": 0.0, **draw(partitions)},
        "model": {"name": draw(st.sampled_from(["logistic", "mlp"]))},
        "algorithm": algorithm,
    } | ({} if clients is None else {"clients_per_round": clients})


@pytest.mark.filterwarnings("ignore:With one client per round", "ignore:aggregate = ")
@few
@given(configs())
def test_a_config_trains_or_says_why_not(settings: dict[str, Any]) -> None:
    try:
        result = run_config(parse_config(settings))
    except cf.ComfedlError as error:
        assert str(error).endswith((".", ")")) and len(str(error)) < 1200
        return
    assert all(bool(torch.isfinite(part).all()) for part in result.params.values())


@few
@given(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "delete", "grow"]))
def test_a_damaged_folder_resumes_or_says_why_not(
    tmp_path_factory: pytest.TempPathFactory, seed: int, how: str
) -> None:
    """Any one file of a stopped run, damaged in any way: the same result, or one clear error, and never a wrong one."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator), torch.randint(0, 2, (20,), generator=generator)
    fed = cf.FederatedData({"a": (x[:10], y[:10]), "b": (x[10:], y[10:])})
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    out = tmp_path_factory.mktemp("fuzz") / "run"
    options: dict[str, Any] = {"rounds": 5, "checkpoint_every": 1, "out": out}

    class Stop(cf.Callback):
        def settled(self, snapshot: Any) -> None:
            if snapshot.round == 3:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        cf.fit(net, fed, cf.Ditto(0.1), callbacks=[Stop()], **options)
    victim: Path = chance.choice(sorted(path for path in out.rglob("*") if path.is_file()))
    content = bytearray(victim.read_bytes())
    place = chance.randrange(max(1, len(content)))
    if how == "flip" and content:
        content[place] ^= 1 << chance.randrange(8)
    elif how == "cut":
        content = content[:place]
    elif how == "grow":
        content += chance.randbytes(10)
    victim.unlink() if how == "delete" else victim.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = cf.fit(net, fed, cf.Ditto(0.1), resume=True, **options)
        except cf.ComfedlError:
            return
    whole = cf.fit(net, fed, cf.Ditto(0.1), rounds=5)
    assert all(torch.equal(result.params[name], part) for name, part in whole.params.items())
    assert result.rounds == whole.rounds
    assert result.clients == whole.clients


losses = st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(losses, st.floats(1e-6, 1e6), st.floats(1, 20))
def test_weights_of_any_losses_are_weights(values: list[float], gamma: float, cap: float) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    for weights in (
        softmax_weights(vector, gamma),
        capped_weights(vector, gamma, cap),
        top_weights(vector, 0.7),
        chi_square_weights(vector, 0.3),
    ):
        assert bool(torch.isfinite(weights).all())
        assert bool((weights >= 0).all())
        assert float(weights.sum()) == pytest.approx(1)
    value = float(log_mean_exp(vector, gamma))
    assert min(values) * (1 - 1e-9) <= value <= max(values) * (1 + 1e-9)


@few
@given(
    st.dictionaries(
        st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=4
    )
)
@pytest.mark.parametrize(
    "kind", [*ALGORITHMS.values(), *OUTERS.values(), *OFFSETS.values()], ids=lambda kind: kind.__name__
)
def test_nonsense_is_refused_in_words(kind: type, table: dict[str, Any]) -> None:
    try:
        from_table(kind, table, "table")
    except cf.ConfigError as error:
        assert "table" in str(error)
