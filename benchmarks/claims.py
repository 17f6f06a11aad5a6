"""Comparisons quoted in the documentation, all sides in one run: ``python benchmarks/claims.py NAME``.

demo: the demo's three methods on twenty seeds, 100 to 119. offset: six fresh draws of the odd sites, with settings that
were fixed before. participation: Robust with 10 of 60 and 10 of 200 clients a round, weighted among themselves, as it
does, or by their share among all clients (Fashion-MNIST, three seeds).
outvoted: what ``comfedl advise`` says of the thirteen federations of docs/quality.md at its defaults, three draws each.
optimizers: an MLP on digits after 30 rounds with momentum or Adam, and after 30 and 100 of plain SGD, once with the
default learning rate and once with the best of eight, chosen for 30 rounds (SGD: for 100) on seeds 100 and 101.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks.quality

import comfedl as cf
from benchmarks.quality.federations import FEDERATIONS
from comfedl.analysis.robust_advice import advise
from comfedl.cli import demo
from comfedl.config.schema import parse_config, run_config
from comfedl.core.learner import Model
from comfedl.core.protocol import Replies

SHARES = ("worst", "worst10", "mean")
METRICS = ("validation.accuracy.worst", "validation.accuracy.mean", "train.loss.worst", "train.accuracy.worst")


@dataclass(frozen=True)
class RobustByTable(cf.Robust):
    """Robust whose step is as long as the participants weigh among all clients: n / m times their share, at most 1.

    Clients that are absent count with the loss last seen, moved along with a drift that all have in common: a moving
    average of how far the participants' losses are from what the table has for them.
    """

    known: dict[str, Any] = field(default_factory=dict, compare=False)

    def weigh(self, model: Model, replies: Replies, losses: Tensor, updates: Any) -> tuple[Tensor, Any]:
        weights, shrink = super().weigh(model, replies, losses, updates)
        seen, drift = self.known.get("seen", {}), self.known.get("drift", 0.0)
        now = dict(zip(replies.clients, losses.tolist(), strict=True))
        gaps = [loss - seen[client] - drift for client, loss in now.items() if client in seen]
        everybody = {client: loss + drift for client, loss in seen.items()} | now
        shares = self.g.weights(torch.tensor(list(everybody.values()), dtype=torch.float64))  # type: ignore[attr-defined]
        present = sum(float(r) for client, r in zip(everybody, shares, strict=True) if client in now)
        drift += 0.3 * float(np.mean(gaps)) if gaps else 0.0
        self.known.update(seen=seen | {client: loss - drift for client, loss in now.items()}, drift=drift)
        return weights * min(1.0, present * len(everybody) / len(now)), shrink


def show(rows: dict[str, list[list[float]]]) -> None:
    for name, values in rows.items():
        numbers = np.array(values)
        error = numbers.std(axis=0, ddof=1) / len(numbers) ** 0.5
        text = ", ".join(f"{m} {a:.3f} ± {e:.3f}" for m, a, e in zip(METRICS, numbers.mean(axis=0), error, strict=True))
        print(f"{name:46} {text}   worst by seed: {numbers[:, 0].round(3).tolist()}")


def on_fresh_sites() -> None:
    rows: dict[str, list[list[float]]] = {name: [] for name in demo.METHODS}
    for seed in range(100, 120):
        for name, config in demo.configs(seed).items():
            last = run_config(config).rounds[-1]
            rows[name].append([float(last[metric] or 0) for metric in METRICS])
    show(rows)
    worst = {name: np.array(values)[:, 0] for name, values in rows.items()}
    others = np.maximum(worst["FedAvg"], worst["equal weights"])
    print(f"Robust is above both others in {int((worst['Robust'] > others).sum())} of {len(others)} seeds.")


def participation() -> None:
    same: dict[str, Any] = {"server_optimizer": cf.optim.SGD(momentum=0.9), "server_average": 0.9}
    for federation in ("10-of-60", "10-of-200"):
        plan, rows = FEDERATIONS[federation], {}
        for seed in range(5, 8):
            fed = plan.make(seed)
            for lr in (0.03, 0.1):
                common: dict[str, Any] = {"lr": lr, "batch_size": plan.batch_size, "personal_steps": 0}
                for name, method in (
                    ("equal weights, Robust's optimiser", cf.ComFedL(**common, **same)),
                    ("Robust, weights among participants", cf.Robust(**common)),
                    ("Robust, share by the table", RobustByTable(**common)),
                ):
                    model = cf.models.build(plan.model, fed.train.x.shape[1:], 10, seed)
                    every, some = plan.rounds, plan.clients_per_round
                    run = cf.fit(model, fed, method, plan.rounds, seed, clients_per_round=some, eval_every=every)
                    scores = [float(run.rounds[-1][f"test.accuracy.{measure}"] or 0) for measure in SHARES]
                    rows.setdefault(f"{federation}, lr {lr:g}: {name}", []).append(scores)
        for name, values in rows.items():
            means = np.mean(values, axis=0)
            print(
                name,
                ", ".join(f"{measure} {mean:.3f}" for measure, mean in zip(SHARES, means, strict=True)),
                flush=True,
            )


def offset() -> None:
    plan, rows = FEDERATIONS["odd-mlp"], {}
    common: dict[str, Any] = {"lr": 0.03, "batch_size": plan.batch_size, "personal_steps": 0}
    same: dict[str, Any] = {"server_optimizer": cf.optim.SGD(momentum=0.9), "server_average": 0.9}
    methods: dict[str, Any] = {
        "DRFA, dual lr 0.001": cf.DRFA(dual_lr=0.001, **common),
        "KL plain, gamma 0.03, lr 0.1": cf.ComFedL(outer=cf.KL(0.03), **{**common, "lr": 0.1}),
        "equal weights, Robust's optimiser": cf.ComFedL(**common, **same),
        **{
            f"Robust, c {c:g}": cf.Robust(offset=cf.offset.Generalisation(c) if c else None, **common)
            for c in (0, 3, 10, 30)
        },
    }
    for seed in range(30, 36):
        fed = plan.make(seed)
        for name, method in methods.items():
            model = cf.models.build(plan.model, fed.train.x.shape[1:], 10, seed)
            run = cf.fit(model, fed, method, plan.rounds, seed, eval_every=plan.rounds)
            rows.setdefault(name, []).append([float(run.rounds[-1][f"test.accuracy.{m}"] or 0) for m in SHARES])
    for name, values in rows.items():
        worst, mean = np.array(values)[:, 0], np.mean(values, axis=0)[2]
        print(
            f"{name}: worst {worst.mean():.3f} ± {worst.std(ddof=1) / len(worst) ** 0.5:.3f}, mean {mean:.3f}",
            flush=True,
        )


def drawn(seed: int) -> cf.FederatedData:
    """The data of the federation that ``outvoted`` has come to, as a config names them."""
    return FEDERATIONS[NOW["federation"]].make(seed)


NOW: dict[str, str] = {}


def outvoted() -> None:
    for federation, plan in FEDERATIONS.items():
        NOW["federation"] = federation
        for seed in range(5, 8):
            table: dict[str, Any] = {
                "seed": seed,
                "clients_per_round": plan.clients_per_round,
                "data": {"name": "__main__:drawn"},
                "model": {"name": plan.model, **plan.options},
                "algorithm": {"name": "robust", "batch_size": plan.batch_size},
            }
            found = advise(parse_config(table)).outvoted
            print(federation, seed, ", ".join(fit.client for fit in found) or "nobody", flush=True)


OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain SGD": (100, {}),
    "client momentum 0.9": (30, {"client_optimizer": cf.optim.SGD(momentum=0.9)}),
    "server momentum 0.9": (30, {"server_optimizer": cf.optim.SGD(momentum=0.9)}),
    "client Adam": (30, {"client_optimizer": cf.optim.Adam()}),
}
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DEFAULTS = {"client Adam": 0.01}  # 0.1 for the others, the default of every method


def trained(lr: float, seed: int, rounds: int, options: Mapping[str, Any]) -> dict[int, list[float]]:
    """The metrics after 30 rounds and after the last, by round."""
    fed = cf.load("digits", cf.partition.Dirichlet(clients=10, alpha=0.3), seed=seed)
    model = cf.models.build("mlp", (1, 8, 8), 10, seed=seed)
    run = cf.fit(model, fed, cf.FedAvg(lr=lr, **options), rounds=rounds, seed=seed, eval_every=10)
    return {int(row["round"]): [float(row[metric] or 0) for metric in METRICS] for row in run.rounds}  # type: ignore[arg-type]


def optimizers() -> None:
    rows: dict[str, list[list[float]]] = {}
    for name, (rounds, options) in OPTIMIZERS.items():
        tuned = max(RATES, key=lambda lr: sum(trained(lr, seed, rounds, options)[rounds][1] for seed in (100, 101)))
        for label, lr in (("default", DEFAULTS.get(name, 0.1)), ("tuned", tuned)):
            for seed in range(10):
                found = trained(lr, seed, rounds, options)
                for number in sorted({30, rounds}):
                    rows.setdefault(f"{name}, {label} lr {lr:g}, {number} rounds", []).append(found[number])
    show(rows)


if __name__ == "__main__":
    claims = {
        "demo": on_fresh_sites,
        "offset": offset,
        "outvoted": outvoted,
        "participation": participation,
        "optimizers": optimizers,
    }
    claims[sys.argv[1]]()
