"""The runs: which there are, what one measures, and a file to which they are added as they end."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import comfedl as cf
from benchmarks.quality.federations import FEDERATIONS
from benchmarks.quality.methods import METHODS
from comfedl.utils.process_pool import init_worker, process_pool

TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
MEASURES = ("accuracy.worst", "accuracy.worst10", "accuracy.mean", "loss.worst")

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run: what it is known by."""

    federation: str
    method: str
    lr: float
    value: float
    seed: int

    @property
    def tunes(self) -> bool:
        return self.seed >= TUNING_SEED


def applies(federation: str, method: str) -> bool:
    """Whether a method makes sense here: AFL needs all clients, and an offset by size needs sizes that differ."""
    plan, entry = FEDERATIONS[federation], METHODS[method]
    return (entry.can_sample or plan.clients_per_round is None) and not (entry.for_unequal_sizes and plan.equal_sizes)


Trial = list[Run]  # a setting's runs, one for each draw of the data


def trials(federation: str, method: str) -> list[Trial]:
    """The trials of a method: every learning rate with every value of its own parameter."""
    plan, entry = FEDERATIONS[federation], METHODS[method]
    seeds = range(TUNING_SEED, TUNING_SEED + plan.tuning_draws)
    return [[Run(federation, method, lr, v, s) for s in seeds] for lr in plan.lrs for v in entry.values[: plan.values]]


def tuning_runs(federation: str, method: str) -> list[Run]:
    """The runs of all trials."""
    return [run for trial in trials(federation, method) for run in trial]


def trial_score(rows: Mapping[Run, Row], trial: Trial, measure: str) -> float:
    """The mean over a trial's draws; below all others if one of them diverged."""
    values = [rows[run].get(measure) for run in trial]
    return -1.0 if None in values else float(np.mean(values))  # type: ignore[arg-type]


def judged_runs(rows: Mapping[Run, Row], federation: str, method: str) -> list[Run]:
    """The runs of the trial that was best on validation data, on new seeds; none before all trials have ended."""
    if not all(run in rows for run in tuning_runs(federation, method)):
        return []
    best = max(trials(federation, method), key=lambda t: trial_score(rows, t, "validation.accuracy.worst"))[0]
    return [Run(federation, method, best.lr, best.value, seed) for seed in SEEDS]


@lru_cache(maxsize=2)
def _data(federation: str, seed: int) -> cf.FederatedData:
    return FEDERATIONS[federation].make(seed)


def execute(run: Run) -> Row:
    """Train, and take the mean of the last three evaluations; a run that diverges has no values."""
    plan, entry = FEDERATIONS[run.federation], METHODS[run.method]
    fed = _data(run.federation, run.seed)
    rounds = round(plan.rounds * (plan.tuning if run.tunes else 1))
    x, y = fed.train.x, fed.train.y
    model = cf.models.build(plan.model, x.shape[1:], int(y.max()) + 1, run.seed, **plan.options)
    method = entry.make(
        run.value,
        lr=run.lr,
        local_steps=plan.local_steps,
        batch_size=plan.batch_size,
        personal_steps=0,
        loss_samples=plan.loss_samples,
    )
    every = max(1, rounds // plan.evaluations)
    row: Row = asdict(run) | {"rounds": rounds}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = cf.fit(
                model, fed, method, rounds, run.seed, clients_per_round=plan.clients_per_round, eval_every=every
            )
        except cf.Diverged as error:
            return row | {"diverged": str(error).splitlines()[0]}
    row["cycles"] = any("jump from client to client" in str(warning.message) for warning in caught)
    for split in ("validation", "test"):
        for measure in MEASURES:
            values = [float(found[f"{split}.{measure}"] or 0.0) for found in result.rounds]
            row[f"{split}.{measure}"] = round(float(np.mean(values[-3:])), 5)
    row["train.loss.worst"] = round(float(result.rounds[-1]["train.loss.worst"] or 0.0), 5)
    row["curve"] = {found["round"]: round(float(found["test.accuracy.worst"] or 0.0), 4) for found in result.rounds}
    row["seconds"] = round(result.seconds, 2)
    return row


def load(path: Path) -> dict[Run, Row]:
    """The runs that have ended."""
    found: dict[Run, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found[Run(**{name: row[name] for name in Run.__dataclass_fields__})] = row
    return found


def complete(federations: Iterable[str], methods: Iterable[str], path: Path, jobs: int) -> Iterator[Row]:
    """Execute what is missing, federation by federation, and add each run to the file as it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with process_pool(jobs, init_worker, (1, False)) as pool:
        for federation in federations:
            for phase in (tuning_runs, None):
                rows = load(path)
                wanted = [
                    run
                    for method in methods
                    if applies(federation, method)
                    for run in (phase(federation, method) if phase else judged_runs(rows, federation, method))
                    if run not in rows
                ]
                for row in pool.map(execute, wanted):
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    yield row
