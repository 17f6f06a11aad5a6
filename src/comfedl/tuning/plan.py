"""A search, checked whole before anything starts: what is searched, how, and by which number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfedl.config.schema import Config, parse_config, read_settings, with_changes, with_value
from comfedl.core.client_statistics import smaller_is_better
from comfedl.models.losses import REGRESSIONS
from comfedl.tuning.paper_grids import paper_grid
from comfedl.tuning.space import EXAMPLE, Choices, Space, check_space, points, read_space
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import to_toml

SAMPLERS = ("grid", "tpe", "random")
PRUNERS = ("none", "median", "hyperband")
STATISTICS = ("mean", "worst", "worst10", "std")

# How many trials where nothing says so and the space has no end.
TRIALS = 50


@dataclass(frozen=True)
class Plan:
    """A search that has been checked; ``make_plan`` makes it."""

    settings: Mapping[str, Any]
    config: Config
    space: Space
    metric: str
    sampler: str
    pruner: str
    trials: int
    seeds: int

    @property
    def minimise(self) -> bool:
        """Whether less is better: losses and errors, and the spread over clients."""
        _, name, statistic = self.metric.split(".")
        return smaller_is_better(name) or statistic == "std"

    @property
    def steps(self) -> int:
        """The last step that a trial reports: seeds follow one another."""
        return self.config.rounds * self.seeds

    def at(self, sampled: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the trial with these parameters; what stands for a table in the study becomes the table."""
        settings = dict(self.settings)
        for path in sorted(sampled):  # a table before the keys in it
            part, value = self.space[path], sampled[path]
            value = part.labels[value] if isinstance(part, Choices) else value
            settings = with_value(settings, path, value, "The search")
        return settings

    def described(self) -> dict[str, Any]:
        """What makes two searches the same one, in plain values; how many trials is not part of it."""
        return {
            "config": to_toml(self.config.resolved()),
            "space": {path: self.space[path].written() for path in sorted(self.space)},
            "metric": self.metric,
            "sampler": self.sampler,
            "pruner": self.pruner,
            "seeds": self.seeds,
        }


def make_plan(
    path: Path,
    grid: str | None = None,
    space: Path | None = None,
    sampler: str | None = None,
    pruner: str = "none",
    trials: int | None = None,
    metric: str | None = None,
    seeds: int = 1,
    changes: Sequence[str] = (),
) -> Plan:
    """Read a config and what to search, and check all that needs no data.

    The space is ``grid`` ("paper" or a file), ``space`` (a file), or else the config's own table [tune]. The metric is
    by default the worst client's validation accuracy, or its RMSE in a regression.
    """
    settings = {**with_changes(read_settings(path), changes)}
    config = parse_config(settings)
    own = settings.pop("tune", None)
    metric = metric or f"validation.{'rmse' if config.loss in REGRESSIONS else 'accuracy'}.worst"
    _check_metric(metric)
    if sampler is not None:
        checks.one_of("sampler", sampler, SAMPLERS)
    checks.one_of("pruner", pruner, PRUNERS)
    checks.at_least("seeds", seeds, 1)
    if trials is not None:
        checks.at_least("trials", trials, 1)
    found, where = _find_space(config, own, grid, space, path)
    check_space(found, settings, where)
    sampler = sampler or ("tpe" if grid is None else "grid")
    size = points(found)
    if sampler == "grid" and size is None:
        ranged = next(name for name, part in found.items() if not isinstance(part, Choices))
        raise ConfigError(
            f"{where}: {ranged} is a range, but a grid needs lists; give one, or use --sampler tpe or random."
        )
    most = size if sampler == "grid" and size is not None else trials or TRIALS
    if pruner != "none" and config.eval_every * 2 > config.rounds:
        raise ConfigError(
            f"A pruner needs at least two evaluations in a run, but there are {config.rounds} rounds and eval_every is "
            f"{config.eval_every}; evaluate more often, or use --pruner none."
        )
    return Plan(settings, config, found, metric, sampler, pruner, min(most, trials or most), seeds)


def _find_space(
    config: Config, own: dict[str, Any] | None, grid: str | None, space: Path | None, path: Path
) -> tuple[Space, str]:
    """What to search, and where that was said."""
    if grid is not None and space is not None:
        raise ConfigError("--grid and --space are both given; give one of them.")
    if grid == "paper":
        return paper_grid(config), "The paper's grid"
    file = Path(grid) if grid is not None else space
    if file is not None:
        if grid is not None and not file.exists():
            raise ConfigError(f'--grid is {grid!r}, but it must be "paper" or a TOML file that exists.')
        return read_space(read_settings(file), str(file)), str(file)
    if own is None:
        raise ConfigError(
            f"There is nothing to search: give --grid paper, --grid FILE or --space FILE, or write a table [tune] in "
            f"{path} with lines such as {EXAMPLE}."
        )
    return read_space(own, "[tune]"), "[tune]"


def _check_metric(metric: str) -> None:
    """Only numbers that a choice may be made by, and that are better in one direction."""
    split, *rest = metric.split(".")
    if split == "test":
        raise ConfigError(
            f"--metric is {metric!r}, but test data are for judging what was chosen without them: a choice made on "
            "them says nothing of new data; use validation, such as validation.accuracy.worst."
        )
    if split not in ("validation", "train") or len(rest) != 2 or rest[1] not in STATISTICS:
        raise ConfigError(
            f"--metric is {metric!r}, but it must be like validation.accuracy.worst: validation or train, a metric of "
            f"the run's records (such as accuracy, rmse or personal_loss), and one of {', '.join(STATISTICS)}."
        )
