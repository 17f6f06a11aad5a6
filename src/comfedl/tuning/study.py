"""The study: points asked for and told to Optuna, kept in SQLite, so that a search goes on after a kill.

One process has the study; trials in other processes report to it. So no two writers meet in the file, no point is
asked for twice, and what is still marked as running when a search begins was left by a kill.
"""

from __future__ import annotations

import itertools
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
from comfedl.tuning.progress import Watch
from comfedl.tuning.run_trial import COMPLETE, DIVERGED, FAILED, INTERRUPTED, PRUNED, Ended, Outcome, Task
from comfedl.tuning.space import Choices, Range
from comfedl.utils import rng
from comfedl.utils.errors import RunFolderError

NAME = "tune"

# How a trial's end is told to Optuna. One that diverged is like a pruned one: TPE then learns to stay away from it.
STATES = {
    COMPLETE: TrialState.COMPLETE,
    PRUNED: TrialState.PRUNED,
    DIVERGED: TrialState.PRUNED,
    FAILED: TrialState.FAIL,
}


class Study:
    """A search's study, opened or begun."""

    def __init__(self, plan: Plan, out: Path, url: str, watch: Watch) -> None:
        self._plan, self._watch = plan, watch
        self._running: dict[int, optuna.Trial] = {}
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        storage.engine.dispose()
        event.listen(storage.engine, "connect", _quick_commits)
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
        self._check_same(out)
        self.put_back()
        self._show()

    def close(self) -> None:
        """Let go of the file."""
        self._close()

    # What there is.

    def ended(self) -> list[Ended]:
        """How every trial ended, the best first, then those that have no value to be judged by."""
        trials = self._trials()
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        rows = [
            Ended(
                number=trial.number,
                first=_first(trial, trials),
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
        return sorted(rows, key=self._order)

    def counted(self) -> int:
        """How many points have been tried to their end."""
        return sum(row.state != INTERRUPTED for row in self.ended())

    def _order(self, row: Ended) -> tuple[bool, float, int]:
        value = row.value or 0.0
        return row.value is None, value if self._plan.minimise else -value, row.first

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    # Asking and telling.

    def left(self) -> int:
        """How many more trials to begin."""
        return self._plan.trials - self.counted() - len(self._running)

    def next(self) -> Task | None:
        """The next trial to run; None where there are as many as were asked for."""
        if self.left() <= 0:
            return None
        trials = self._trials()
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        firsts = [trial.number for trial in trials if "retry_of" not in trial.user_attrs]
        point = firsts.index(_first(waiting[0], trials)) if waiting else len(firsts)
        if self._grid and not waiting:
            self._study.add_trial(self._create(self._grid[point]))
        self._study.sampler = self._sampler(point)
        trial = self._study.ask(self._distributions)
        self._running[trial.number] = trial
        return Task(trial.number, self._plan.at(trial.params), self._plan.seeds, self._plan.metric)

    def report(self, task: Task, step: int, value: float, said: str = "") -> bool:
        """Keep a value that a trial has on its way; gives whether it should stop, which its last one never does."""
        trial = self._running[task.number]
        trial.report(value, step)
        self._watch.moved(task.number, step, said)
        return step < self._plan.steps and trial.should_prune()

    def tell(self, task: Task, outcome: Outcome) -> None:
        """Keep how a trial ended."""
        trial = self._running.pop(task.number)
        trial.set_user_attr("ended", outcome.state)
        if outcome.reason:
            trial.set_user_attr("reason", outcome.reason)
        if len(outcome.values) > 1:
            trial.set_user_attr("values", list(outcome.values))
        self._study.tell(trial, fmean(outcome.values) if outcome.values else None, STATES[outcome.state])
        self._show(task.number)

    def _show(self, number: int | None = None) -> None:
        ended = self.ended()
        self._watch.ended(number, self.counted(), ended[0].value if ended else None)

    # Going on.

    def put_back(self) -> None:
        """Queue again what is marked as running, then mark it as failed; a kill in between loses nothing."""
        self._running.clear()
        trials = self._trials()
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        for trial in trials:
            if trial.state != TrialState.RUNNING:
                continue
            if trial.number not in retried:
                # A point that was killed while it was drawn is drawn again from its beginning, by its own seed.
                params = trial.params if trial.params.keys() == self._distributions.keys() else {}
                self._study.add_trial(self._create(params, retry_of=trial.number))
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _check_same(self, out: Path) -> None:
        here, there = self._plan.described(), self._study.user_attrs.get("plan")
        if there is None and not self._study.trials:
            self._study.set_user_attr("plan", here)
        elif there != here:
            odd = [key for key in here if there is None or there.get(key) != here[key]]
            self.close()
            raise RunFolderError(
                f"{out} holds a search with another {' and '.join(odd)}; repeat its command to go on with it, or "
                "give another --out."
            )

    def _create(self, params: dict[str, Any], **attributes: int) -> FrozenTrial:
        """A trial that waits for its turn, at a point or, where there are no params, at one that is drawn then."""
        distributions = self._distributions if params else {}
        return optuna.trial.create_trial(
            state=TrialState.WAITING, params=params, distributions=distributions, user_attrs=attributes
        )

    def _sampler(self, point: int) -> BaseSampler:
        """A sampler for one point alone, by the point's own seed: so a search that was stopped asks for the same
        points as one that was not."""
        seed = rng.key(self._plan.config.seed, "tune", point) % 2**32
        return TPESampler(seed=seed) if self._plan.sampler == "tpe" else RandomSampler(seed=seed)


def _quick_commits(connection: Any, record: object) -> None:
    """A commit does not wait for the disk: a kill loses nothing, a power cut at most the last values."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _first(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> int:
    """The number under which a trial's point was first tried."""
    while "retry_of" in trial.user_attrs:
        trial = trials[trial.user_attrs["retry_of"]]
    return trial.number


def _grid(plan: Plan) -> list[dict[str, Any]]:
    """Every point of a grid, in the order they are tried in: drawn once, so that the first few are a fair sample."""
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
        return HyperbandPruner(min_resource=plan.config.eval_every, max_resource=plan.steps)
    return NopPruner()


def _distribution(part: Choices | Range) -> BaseDistribution:
    if isinstance(part, Choices):
        return CategoricalDistribution(list(part.labels))
    if part.whole:
        return IntDistribution(int(part.low), int(part.high), log=part.log)
    return FloatDistribution(part.low, part.high, log=part.log)
