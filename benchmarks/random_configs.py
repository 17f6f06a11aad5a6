"""Random configs: every method, optimiser, weighting, partition, loss and fault, drawn from the registries.

``draw_config(draw)`` is mostly sensible, and usually trains; with ``wild`` above 0 that share of the values is
nonsense (wrong types, negative and enormous numbers, names that do not exist), and a clear refusal is the answer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comfedl.algorithms import ALGORITHMS
from comfedl.core.offset import OFFSETS
from comfedl.core.optim import CLIENT_OPTIMIZERS, SERVER_OPTIMIZERS
from comfedl.core.outer_functions import OUTERS
from comfedl.core.robust_aggregation import RULES
from comfedl.core.schedule import SCHEDULES
from comfedl.data.partition import PARTITIONS
from comfedl.engines.faults import FAULTS

Table = dict[str, Any]
Draw = random.Random

NONSENSE: Sequence[Any] = (
    *(-1, 0, 1.5, -0.1, 1e-300, 1e308, float("inf"), float("nan"), 2**70, -(2**63), True, "", "no such name", "1"),
    *([], [1, "two"], {}, {"name": "kl"}, {"gamma": []}, "os:getcwd", "a:b", "\u202e", "x" * 3000),
)
# Large values of these are not nonsense but much work.
WORK = {"rounds", "local_steps", "personal_steps", "adapt_steps", "steps", "clients"}


def draw_config(draw: Draw, wild: float = 0.0, data: Callable[[Draw], tuple[Table, str]] | None = None) -> Table:
    """The settings of a run; ``data`` draws a [data] table and the loss that goes with it."""
    table, loss = (data or digits)(draw)
    config: Table = {
        "rounds": draw.randint(1, 4),
        "seed": draw.randrange(2**31),
        "data": table,
        "model": _model(draw, loss),
        "algorithm": _algorithm(draw, loss),
    }
    if loss != "cross_entropy" or draw.random() < 0.2:
        config["loss"] = _loss(draw, loss)
    most = table.get("clients", 4) if draw.random() < 0.95 else 9
    options: Mapping[str, Callable[[], Any]] = {
        "clients_per_round": lambda: draw.randint(1, most),
        "eval_every": lambda: draw.choice([1, 2, 5, "auto"]),
        "eval_clients": lambda: draw.randint(1, most),
        "checkpoint_every": lambda: draw.randint(1, 3),
        "quorum": lambda: draw.choice([0.0, 0.1, 0.5, 1.0]),
        "save_personal": lambda: draw.random() < 0.5,
        "outer_share": lambda: draw.choice([0.05, 0.2, 0.5]),
        "metrics": lambda: draw.sample(["f1", "balanced_accuracy", "brier"], draw.randint(0, 2)),
        "stop": lambda: {"metric": "train.loss.worst", "patience": draw.randint(1, 3)},
        "faults": lambda: [_fault(draw, most) for _ in range(draw.randint(1, 2))],
        "embedded": lambda: {
            "vectorize": draw.choice(["auto", "stack", "vmap", "serial"]),
            "workers": draw.choice([1, 2, "auto"]),
        },
    }
    for key, value in options.items():
        if draw.random() < (0.6 if key == "checkpoint_every" else 0.2):
            config[key] = value()
    return _spoil(draw, config, wild) if wild else config


def digits(draw: Draw) -> tuple[Table, str]:
    """The digits, parted in any way."""
    kind = draw.choice(sorted(PARTITIONS) if draw.random() < 0.1 else sorted({*PARTITIONS} - {"natural"}))
    table: Table = {"name": "digits", "partition": kind, "clients": draw.randint(1, 8)}
    table |= {
        "iid": {},
        "imbalanced": {"large": draw.randint(1, 400), "small": draw.randint(1, 60)},
        "dominant-class": {"rho": round(draw.random(), 3)},
        "dirichlet": {"alpha": draw.choice([0.05, 0.5, 5.0])},
        "shards": {"classes": draw.randint(1, 10)},
    }.get(kind, {})
    if kind == "natural":
        del table["clients"]
    if draw.random() < 0.2:
        kept = draw.sample(range(10), draw.randint(2, 6))
        table |= {"classes": kept} | ({"classes_per_client": draw.randint(1, 3)} if kind == "shards" else {})
    if draw.random() < 0.5:
        table |= {"validation": draw.choice([0.0, 0.2, 0.5]), "test": draw.choice([0.0, 0.2])}
    return table, "cross_entropy"


def _model(draw: Draw, loss: str) -> Table:
    if draw.random() < 0.1 and loss == "cross_entropy":
        return {
            "name": "cnn4",
            "filters": draw.randint(1, 4),
            "norm": draw.choice(["batch", "running", "group", "none"]),
        }
    if draw.random() < 0.4:
        return {"name": "mlp", "hidden": [draw.randint(1, 12) for _ in range(draw.randint(0, 3))]}
    return {"name": "logistic"}


def _loss(draw: Draw, loss: str) -> Any:
    if loss == "cross_entropy":
        more: Sequence[Table] = (
            {"name": "focal", "gamma": draw.choice([0.0, 2.0])},
            {"name": "cross_entropy", "class_weights": "balanced"},
            {"name": "cross_entropy", "label_smoothing": 0.1},
        )
        return draw.choice(["cross_entropy", *more])
    return loss


def _algorithm(draw: Draw, loss: str) -> Table:
    name = draw.choice(sorted(ALGORITHMS))
    table: Table = {
        "name": name,
        "lr": draw.choice([0.001, 0.03, 0.1, 0.5] if loss == "cross_entropy" else [0.001, 0.01]),
    }
    for field in dataclasses.fields(ALGORITHMS[name]):
        if field.name not in {"lr", "problem"} and draw.random() < _CHANCES.get(field.name, 0.25):
            values = _ALTERED.get((name, field.name), _VALUES[field.name])
            table[field.name] = values(draw)
    if name == "afl" and "server_average" in table and draw.random() < 0.9:
        table["average"] = False
    if draw.random() < 0.4:  # what stands in the way of most others
        for key in ("defence", "server_optimizer", "client_optimizer", "aggregate", "clip_update_norm"):
            table.pop(key, None)
    return table


def _adapt(draw: Draw) -> Table:
    order = draw.choice(["exact", "first", "hessian-free"])
    return {"lr": draw.choice([0.0, 0.01, 0.1]), "steps": draw.randint(1, 2), "order": order}


def _outer(draw: Draw) -> Table:
    name = draw.choice(sorted(OUTERS))
    table: Table = {"name": name}
    table |= {
        "exp": {"gamma": draw.choice([0.5, 2.0, 20.0])},
        "kl": {"gamma": draw.choice([0.03, 0.3, 3.0])},
        "tilt": {"t": draw.choice([-1.0, 0.5, 4.0])},
        "cvar": {"level": draw.choice([0.0, 0.5, 0.9])},
        "chi-square": {"rho": draw.choice([0.0, 0.5, 5.0])},
        "power": {"q": draw.choice([0.0, 0.5, 3.0])},
    }.get(name, {})
    if name == "kl":
        more = {"cap": 2.0, "memory": 0.9, "on": draw.choice(["train", "outer"]), "offset": _offset(draw)}
        table |= {key: value for key, value in more.items() if draw.random() < 0.25}
        if draw.random() < 0.2:
            table["effective_clients"] = draw.choice([1.5, 3.0])
            del table["gamma"]
    return table


def _offset(draw: Draw) -> Table:
    if draw.choice(sorted(OFFSETS)) == "generalisation":
        return {"name": "generalisation", "c": draw.choice([0.0, 1.0, 10.0])}
    return {"name": "excess", "steps": draw.randint(1, 4)}


def _client_optimizer(draw: Draw) -> Table:
    table = _optimizer(draw, CLIENT_OPTIMIZERS) | ({"keep_state": True} if draw.random() < 0.3 else {})
    if draw.random() < 0.9:
        table.pop("lr", None)  # a client's step size is the method's
    return table


def _optimizer(draw: Draw, kinds: Mapping[str, type]) -> Table:
    name = draw.choice(sorted(kinds))
    table: Table = {"name": name}
    if name == "sgd":
        table["momentum"] = draw.choice([0.0, 0.5, 0.9])
    elif draw.random() < 0.5:
        table["lr"] = draw.choice([0.001, 0.01])
    return table


def _schedule(draw: Draw) -> Table:
    name = draw.choice(sorted(SCHEDULES))
    return {"name": name} | {
        "step": {"every": draw.randint(1, 3), "factor": 0.5},
        "cosine": {"rounds": draw.randint(4, 9), "end": draw.choice([0.0, 0.1])},
        "warmup": {"rounds": draw.randint(1, 3)},
    }.get(name, {})


def _fault(draw: Draw, most: int) -> Table:
    name = draw.choice(sorted(FAULTS))
    table: Table = {
        "name": name,
        "clients": draw.sample([f"client-{k}" for k in range(most)], min(most, draw.randint(1, 2))),
    }
    table |= {
        "sign-flip": {"scale": draw.choice([1.0, 10.0, 1e15])},
        "noise": {"std": draw.choice([0.1, 1e6])},
        "scale": {"factor": draw.choice([0.0, 10.0, 1e15])},
        "dropout": {"probability": draw.choice([0.1, 0.9])},
        "straggler": {"probability": 0.5},
    }.get(name, {})
    return table


_CHANCES = {"outer": 0.8, "local_steps": 0.8, "level": 1.0, "lr": 1.0}
_VALUES: Mapping[str, Callable[[Draw], Any]] = {
    "local_steps": lambda draw: draw.randint(1, 3),
    "batch_size": lambda draw: draw.choice([1, 7, 64, "all"]),
    "loss_samples": lambda draw: draw.randint(1, 100),
    "personal_steps": lambda draw: draw.randint(0, 2),
    "clip_update_norm": lambda draw: draw.choice([0.01, 1.0]),
    "aggregate": lambda draw: draw.choice(RULES),
    "trim": lambda draw: draw.choice([0.0, 0.1, 0.4]),
    "client_optimizer": _client_optimizer,
    "defence": lambda draw: "strong",
    "server_optimizer": lambda draw: _optimizer(draw, SERVER_OPTIMIZERS),
    "server_average": lambda draw: draw.choice([0.5, 0.9]),
    "lr_schedule": _schedule,
    "clip_grad_norm": lambda draw: draw.choice([0.01, 1.0]),
    "weighting": lambda draw: draw.choice(["samples", "uniform"]),
    "max_weight": lambda draw: draw.choice([1.0, 2.0]),
    "gamma": lambda draw: draw.choice([0.01, 0.1, 1.0]),
    "inner": _adapt,
    "outer": _outer,
    "cap": lambda draw: draw.choice([1.25, 3.0]),
    "memory": lambda draw: draw.choice([0.5, 0.98]),
    "on": lambda draw: draw.choice(["train", "outer"]),
    "offset": _offset,
    "outer_batch_size": lambda draw: draw.choice(["same", "all", 4]),
    "step": lambda draw: draw.choice(["plain", "safe"]),
    "adapt_lr": lambda draw: draw.choice([0.01, 0.1]),
    "order": lambda draw: draw.choice(["exact", "first", "hessian-free"]),
    "adapt_steps": lambda draw: draw.randint(1, 2),
    "delta": lambda draw: 1e-3,
    "hessian_batch": lambda draw: draw.choice(["auto", "same", "own"]),
    "dual_lr": lambda draw: draw.choice([0.001, 0.1, 10.0]),
    "whole_loss": lambda draw: draw.random() < 0.5,
    "floor": lambda draw: draw.choice([0.0, 0.01]),
    "baseline": lambda draw: draw.random() < 0.5,
    "average": lambda draw: draw.random() < 0.5,
    "q": lambda draw: draw.choice([0.0, 0.2, 5.0]),
    "sampling": lambda draw: draw.choice(["uniform", "samples"]),
    "lam": lambda draw: draw.choice([0.0, 0.1, 1.0]),
    "mu": lambda draw: draw.choice([0.0, 0.1]),
    "t": lambda draw: draw.choice([-1.0, 0.5, 10.0]),
    "level": lambda draw: draw.choice([0.1, 0.5, 0.9]),
}

# Where two methods mean different things by a name.
_ALTERED: Mapping[tuple[str, str], Callable[[Draw], Any]] = {
    ("comfedl-damaml", "outer"): lambda draw: draw.choice(["kl", "exp"])
}


def _spoil(draw: Draw, value: Any, wild: float, key: str = "") -> Any:
    """Replace, drop and add values anywhere."""
    if draw.random() < wild / 4 and key:
        found = draw.choice(NONSENSE)
        return -1 if key in WORK and isinstance(found, (int, float)) and found > 100 else found
    if isinstance(value, dict):
        spoilt = {name: _spoil(draw, part, wild, name) for name, part in value.items() if draw.random() > wild / 30}
        if draw.random() < wild / 10:
            spoilt[draw.choice(["gama", "lr", "name", "x", "", "test.accuracy"])] = draw.choice(NONSENSE)
        return spoilt
    if isinstance(value, list):
        return [_spoil(draw, part, wild, key) for part in value]
    return value
