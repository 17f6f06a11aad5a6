"""Runs' folders written by hand: what a report reads, without the training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfedl.core.client_statistics import effective_clients, summarise_columns
from comfedl.utils.toml import to_toml

ODD = ["north", "</script><script>window.broken=1</script>", 'a & "b" <i>$x$</i> {{title}}']


def value(client: int, number: int, lift: float, seed: int) -> float:
    """A client's accuracy: better with rounds, worse for later clients, and a little different by seed."""
    return round(0.9 - 0.07 * client / (1 + lift) - 0.4 / number + 0.004 * math.sin(seed * 7 + client), 6)


def rows_of(
    names: Sequence[str], number: int, lift: float, seed: int, metrics: Sequence[str], samples: int | None = None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    total = sum(1 + lift * i for i in range(len(names)))
    for i, name in enumerate(names):
        good = value(i, number, lift, seed)
        if samples is not None and good > 0:
            good = round(good * samples) / samples
        made = {"accuracy": good, "loss": 1 - good, "rmse": 2 * (1 - good), "r2": good - 0.2}
        scores = {f"{split}.{metric}": made[metric] for split in ("train", "validation") for metric in metrics}
        rows.append({"round": number, "client": name, **scores, "weight": (1 + lift * i) / total})
    return rows


def write_run(
    folder: Path,
    algorithm: str = "fedavg",
    lift: float = 0.0,
    seed: int = 0,
    clients: Sequence[str] = ("a", "b", "c"),
    rounds: Sequence[int] = (1, 2, 4),
    metrics: Sequence[str] = ("loss", "accuracy"),
    done: bool = True,
    samples: int | None = 400,
    **settings: Any,
) -> Path:
    """Write a run's folder; ``lift`` is how much its method looks after the worst-off.

    Every client has this number of validation samples, and accuracies that so many can give, unless it is None.
    """
    folder.mkdir(parents=True)
    data = {"name": "digits", "clients": len(clients)}
    told = {"rounds": 4, "seed": seed, "data": data, "algorithm": {"name": algorithm, "lr": 0.1}, **settings}
    (folder / "config.toml").write_text(to_toml(told), encoding="utf-8")
    lines, of_clients = [], []
    for number in rounds:
        found = rows_of(clients, number, lift, seed, metrics, samples)
        keys = [key for key in found[0] if "." in key]
        scores = summarise_clients([{key: row[key] for key in keys} for row in found])
        effective = effective_clients([row["weight"] for row in found])
        traffic = {"up_bytes": 1_000_000 * number, "down_bytes": 500_000 * number}
        lines.append({"round": number, **scores, "objective": 1.0, "effective_clients": effective, **traffic})
        of_clients += found
    for file, rows in (("rounds.jsonl", lines), ("clients.jsonl", of_clients)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if samples is not None:
        counts = {"train_samples": 4 * samples, "validation_samples": samples}
        table = [{"round": rounds[-1] if done else 0, "client": name, **counts} for name in clients]
        for row, own in zip(table, of_clients[-len(clients) :] if done else [], strict=False):
            if "loss" in metrics:
                row |= {"validation.loss_low": own["validation.loss"] - 0.1, "validation.loss_high": 9.0}
        (folder / "clients_table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    if done:
        (folder / "summary.json").write_text(json.dumps({"rounds": rounds[-1], "seconds": 2.5}))
    return folder


def summarise_clients(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summaries of every metric on every split, keyed like ``"validation.accuracy.worst"``."""
    names = dict.fromkeys(name for score in scores for name in score)
    return summarise_columns({name: [score[name] for score in scores if name in score] for name in names})
