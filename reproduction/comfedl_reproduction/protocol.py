"""The protocol of a fair comparison: tune on validation data with equal budgets, then evaluate on new seeds.

First, every candidate of every method runs on the tuning seeds, and the one with the best validation metric wins. Then
the winners run on seeds that tuning has not used: other data splits and other initial models. Test data are used only
for the final numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from comfedl_reproduction.experiments import FIRST_TUNING_SEED, Arm, Figure, Settings, merged
from comfedl_reproduction.runner import FigureRun, Record, Runner

LAST_EVALUATIONS = 3  # a candidate's score is their mean, since a single one is noisy


@dataclass(frozen=True)
class Trial:
    """A candidate of an arm with its score on the tuning seeds: minus infinity if it diverged."""

    arm: Arm
    candidate: Settings
    runs: tuple[FigureRun, ...]
    score: float = -math.inf
    core_seconds: float = 0.0


@dataclass(frozen=True)
class Curve:
    """An arm's runs on the evaluation seeds, and their records."""

    arm: Arm
    runs: tuple[FigureRun, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class FigureOutcome:
    """Everything that the tables and plots of a figure need."""

    figure: Figure
    trials: Sequence[Trial]
    winners: Mapping[str, Settings]
    curves: Sequence[Curve]


def run_figures(figures: Sequence[Figure], sources: Mapping[str, Figure], runner: Runner) -> dict[str, FigureOutcome]:
    """Tune, select and evaluate; ``sources`` has every figure that their arms refer to, and themselves."""
    needed = {arm.like.split("/")[0] for figure in figures for arm in figure.arms if arm.like is not None}
    tuned = [sources[name] for name in dict.fromkeys([*needed, *(figure.name for figure in figures)])]
    trials = [trial for figure in sorted(tuned, key=lambda figure: figure.name) for trial in _trials(figure)]
    records = runner.run(_by_seed([trial.runs for trial in trials]), "tuning")
    scored = [_score(trial, sources, records) for trial in trials]
    winners = {arm.name: _winner(arm, scored) for figure in tuned for arm in figure.arms if arm.like is None}
    planned = {
        arm.name: tuple(FigureRun({**_settings(arm, sources, winners), "seed": seed}) for seed in _seeds(figure, arm))
        for figure in figures
        for arm in figure.arms
    }
    records = runner.run(_by_seed(list(planned.values())), "figures")
    outcomes = {}
    for figure in figures:
        curves = [
            Curve(arm, planned[arm.name], tuple(records[run.key] for run in planned[arm.name])) for arm in figure.arms
        ]
        own = [trial for trial in scored if trial.arm in figure.arms]
        outcomes[figure.name] = FigureOutcome(figure, own, winners, curves)
    return outcomes


def _seeds(figure: Figure, arm: Arm) -> range:
    return range(figure.seeds if arm.seeds is None else min(figure.seeds, arm.seeds))


def _by_seed(groups: Sequence[Sequence[FigureRun]]) -> list[FigureRun]:
    """All runs, ordered by seed: runs on the same data follow one another, and an interruption leaves results for all
    methods."""
    longest = max((len(group) for group in groups), default=0)
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _trials(figure: Figure) -> list[Trial]:
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + figure.tuning_seeds)
    return [
        Trial(
            arm, one, tuple(FigureRun({**merged(merged(arm.settings, one), figure.tuning), "seed": s}) for s in seeds)
        )
        for arm in figure.arms
        if arm.tuned
        for one in arm.candidates
    ]


def _score(trial: Trial, sources: Mapping[str, Figure], records: Mapping[str, Record]) -> Trial:
    metric = sources[trial.arm.name.split("/")[0]].choose_by
    sign = -1 if metric.split(".")[1].endswith("loss") else 1
    found = [records[run.key] for run in trial.runs]
    trial = replace(trial, core_seconds=sum(record["core_seconds"] for record in found))
    if any(record["diverged"] for record in found):
        return trial
    score = sign * fmean(fmean(row[metric] for row in record["rounds"][-LAST_EVALUATIONS:]) for record in found)
    return replace(trial, score=score)


def _winner(arm: Arm, trials: Sequence[Trial]) -> Settings:
    """The best candidate; the first among equals, or if all diverged."""
    own = [trial for trial in trials if trial.arm.name == arm.name]
    return max(own, key=lambda trial: trial.score).candidate if own else arm.candidates[0]


def _settings(arm: Arm, sources: Mapping[str, Figure], winners: Mapping[str, Settings]) -> Settings:
    """The config that an arm is evaluated with."""
    if arm.like is None:
        return merged(arm.settings, winners[arm.name])
    source = sources[arm.like.split("/")[0]].arm(arm.like)
    return merged(_settings(source, sources, winners), arm.changes)
