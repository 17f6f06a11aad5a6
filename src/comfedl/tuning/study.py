"""The Optuna study of a search, stored in SQLite so that a killed search can resume.

Only one process opens the study; workers report to it. So the file has a single writer, no point is sampled twice, and
a trial that is marked as running when a search starts was left by a kill.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event

from comfedl.tuning.plan import Plan
from comfedl.tuning.progress import SearchProgress
from comfedl.tuning.run_trial import COMPLETE, DIVERGED, FAILED, INTERRUPTED, PRUNED, FinishedTrial, Task, TrialOutcome
from comfedl.tuning.space import Choices, Range
from comfedl.utils import rng
from comfedl.utils.errors import RunFolderError

logger = logging.getLogger("comfedl")

NAME = "tune"

# Trial states for Optuna. A diverged trial counts as pruned, so that TPE learns to avoid its region.
STATES = {
    COMPLETE: TrialState.COMPLETE,
    PRUNED: TrialState.PRUNED,
    DIVERGED: TrialState.PRUNED,
    FAILED: TrialState.FAIL,
}


class Study:
    """The study of a search, created or reopened."""

    def __init__(self, plan: Plan, out: Path, url: str, progress: SearchProgress, digest: str) -> None:
        self._plan, self._progress = plan, progress
        self._running: dict[int, optuna.Trial] = {}
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        storage.engine.dispose()
        event.listen(storage.engine, "connect", _fast_commits)
        self._close = storage.engine.dispose
        self._study = optuna.create_study(
            storage=storage,
            study_name=NAME,
            direction="minimize" if plan.minimise else "maximize",
            pruner=_pruner(plan),
            load_if_exists=True,
        )
        self._distributions = {path: _distribution(part) for path, part in plan.space.items()}
        self._grid = _grid(plan)
        self._check_same_search(out)
        self._check_same_data(out, digest)
        self.requeue_running()
        self._show_progress()

    def close(self) -> None:
        """Close the database."""
        self._close()

    # Results.

    def finished(self) -> list[FinishedTrial]:
        """The finished trials, best first; those without a value come last."""
        trials = self._trials()
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        rows = [
            FinishedTrial(
                number=trial.number,
                first_number=_first_number(trial, trials),
                state=INTERRUPTED
                if trial.number in retried
                else trial.user_attrs.get("ended", trial.state.name.lower()),
                value=trial.value if trial.state == TrialState.COMPLETE else None,
                params=trial.params,
                seconds=None if trial.duration is None else trial.duration.total_seconds(),
                reason=trial.user_attrs.get("reason", ""),
            )
            for trial in trials
            if trial.state.is_finished()
        ]
        return sorted(rows, key=self._rank)

    def count_finished(self) -> int:
        """The number of finished trials, not counting interrupted ones."""
        return sum(row.state != INTERRUPTED for row in self.finished())

    def _rank(self, row: FinishedTrial) -> tuple[bool, float, int]:
        value = row.value or 0.0
        return row.value is None, value if self._plan.minimise else -value, row.first_number

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    # Ask and tell, as Optuna calls it.

    def remaining(self) -> int:
        """The number of trials still to start."""
        return self._plan.trials - self.count_finished() - len(self._running)

    def ask(self) -> Task | None:
        """The next trial to run; None once the planned number is reached."""
        if self.remaining() <= 0:
            return None
        trials = self._trials()
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        firsts = [trial.number for trial in trials if "retry_of" not in trial.user_attrs]
        point = firsts.index(_first_number(waiting[0], trials)) if waiting else len(firsts)
        if self._grid and not waiting:
            self._study.add_trial(self._waiting_trial(self._grid[point]))
        self._study.sampler = self._sampler(point)
        trial = self._study.ask(self._distributions)
        self._running[trial.number] = trial
        return Task(trial.number, self._plan.settings_for(trial.params), self._plan.seeds, self._plan.metric)

    def report(self, task: Task, step: int, value: float, status: str = "") -> bool:
        """Store an intermediate value and return whether to prune the trial; its last step is never pruned."""
        trial = self._running[task.number]
        trial.report(value, step)
        self._progress.step_done(task.number, step, status)
        return step < self._plan.steps and trial.should_prune()

    def tell(self, task: Task, outcome: TrialOutcome) -> None:
        """Store a trial's outcome."""
        trial = self._running.pop(task.number)
        trial.set_user_attr("ended", outcome.state)
        if outcome.reason:
            trial.set_user_attr("reason", outcome.reason)
        if len(outcome.values) > 1:
            trial.set_user_attr("values", list(outcome.values))
        self._study.tell(trial, fmean(outcome.values) if outcome.values else None, STATES[outcome.state])
        self._show_progress(task.number)

    def _show_progress(self, number: int | None = None) -> None:
        finished = self.finished()
        self._progress.trial_done(number, self.count_finished(), finished[0].value if finished else None)

    # Resuming.

    def requeue_running(self) -> None:
        """Queue trials marked as running again, then mark them as failed: in this order a kill in between is safe."""
        self._running.clear()
        trials = self._trials()
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        for trial in trials:
            if trial.state != TrialState.RUNNING:
                continue
            if trial.number not in retried:
                # A kill while the parameters were sampled leaves only some of them: then all are sampled again, from
                # the point's seed.
                params = trial.params if trial.params.keys() == self._distributions.keys() else {}
                self._study.add_trial(self._waiting_trial(params, retry_of=trial.number))
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _check_same_search(self, out: Path) -> None:
        ours, stored = self._plan.identity(), self._study.user_attrs.get("plan")
        if stored is None and not self._study.trials:
            self._study.set_user_attr("plan", ours)
        elif stored != ours:
            different = [key for key in ours if stored is None or stored.get(key) != ours[key]]
            self.close()
            raise RunFolderError(
                f"{out} holds a search with another {' and '.join(different)}; repeat its command to resume it, or "
                "give another --out."
            )

    def _check_same_data(self, out: Path, digest: str) -> None:
        """Refuse data with another digest than that of the trials so far, whose values could not be compared."""
        stored = self._study.user_attrs.get("data")
        if stored is None:
            if self._study.trials:  # of an earlier version
                logger.warning(
                    "The search in %s was begun by a version of comfedl that kept no digest of its data, so it cannot "
                    "be told whether they are still the same and encoded in the same way.",
                    out,
                )
            self._study.set_user_attr("data", digest)
        elif stored != digest:
            self.close()
            raise RunFolderError(
                f"{out} holds a search whose data were others, or were encoded by another version of comfedl in "
                "another way, so its trials could not be compared with new ones; restore the data, finish it with "
                "that version, or give another --out."
            )

    def _waiting_trial(self, params: dict[str, Any], **attributes: int) -> FrozenTrial:
        """A trial for the queue; without params they are sampled when it starts."""
        distributions = self._distributions if params else {}
        return optuna.trial.create_trial(
            state=TrialState.WAITING, params=params, distributions=distributions, user_attrs=attributes
        )

    def _sampler(self, point: int) -> BaseSampler:
        """A sampler for a single point, seeded by the point's index, so that a resumed search samples the same points
        as an uninterrupted one."""
        seed = rng.key(self._plan.config.seed, "tune", point) % 2**32
        return TPESampler(seed=seed) if self._plan.sampler == "tpe" else RandomSampler(seed=seed)


def _fast_commits(connection: Any, record: object) -> None:
    """Commit without waiting for the disk: a kill loses nothing, a power cut at most the last values."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _first_number(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> int:
    """The number of the trial that this one retries, directly or not."""
    while "retry_of" in trial.user_attrs:
        trial = trials[trial.user_attrs["retry_of"]]
    return trial.number


def _grid(plan: Plan) -> list[dict[str, Any]]:
    """All points of the grid in a fixed random order, so that the first few cover it fairly."""
    if plan.sampler != "grid":
        return []
    lists = [part.labels for part in plan.space.values() if isinstance(part, Choices)]
    points = [dict(zip(plan.space, values, strict=True)) for values in itertools.product(*lists)]
    random.Random(rng.key(plan.config.seed, "grid")).shuffle(points)
    return points


def _pruner(plan: Plan) -> BasePruner:
    if plan.pruner == "median":
        return MedianPruner(n_startup_trials=5, n_warmup_steps=plan.config.rounds // 5)
    if plan.pruner == "hyperband":
        every = plan.config.eval_every
        return HyperbandPruner(min_resource=every if isinstance(every, int) else 1, max_resource=plan.steps)
    return NopPruner()


def _distribution(part: Choices | Range) -> BaseDistribution:
    if isinstance(part, Choices):
        return CategoricalDistribution(list(part.labels))
    if part.is_integer:
        return IntDistribution(int(part.low), int(part.high), log=part.log)
    return FloatDistribution(part.low, part.high, log=part.log)
