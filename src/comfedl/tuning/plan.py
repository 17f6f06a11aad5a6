"""The plan of a search, fully checked before anything starts: the space, the sampler and the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfedl.config.schema import Config, parse_config, read_settings, with_changes, with_value
from comfedl.core.client_statistics import smaller_is_better
from comfedl.models.losses import REGRESSIONS
from comfedl.training.secure_run import UNKNOWN
from comfedl.tuning.paper_grids import paper_grid
from comfedl.tuning.space import EXAMPLE, Choices, Space, check_space, grid_size, read_space
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.toml import to_toml

SAMPLERS = ("grid", "tpe", "random")
PRUNERS = ("none", "median", "hyperband")
STATISTICS = ("mean", "worst", "worst10", "std")

DEFAULT_TRIALS = 50  # for samplers that never run out of points


@dataclass(frozen=True)
class Plan:
    """A checked search; ``make_plan`` creates it."""

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
        """Whether smaller is better: losses, errors, and the spread over clients."""
        _, name, statistic = self.metric.split(".")
        return smaller_is_better(name) or statistic == "std"

    @property
    def steps(self) -> int:
        """The last step that a trial reports; steps count on from one seed to the next."""
        return self.config.rounds * self.seeds

    def settings_for(self, sampled: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a trial with these parameters; the label of a table becomes the table."""
        settings = dict(self.settings)
        for path in sorted(sampled):  # a table comes before its keys
            part, value = self.space[path], sampled[path]
            value = part.labels[value] if isinstance(part, Choices) else value
            settings = with_value(settings, path, value, "The search")
        return settings

    def identity(self) -> dict[str, Any]:
        """What two searches must share to be the same one, in plain values; the number of trials may differ."""
        return {
            "config": to_toml(self.config.resolved()),
            "space": {path: self.space[path].to_plain() for path in sorted(self.space)},
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
    """Read a config and its search space, and check everything that needs no data.

    The space is ``grid`` ("paper" or a file), ``space`` (a file), or else the table [tune] of the config. The default
    metric is the worst client's validation accuracy, or its RMSE in a regression; under secure aggregation the mean.
    """
    settings = {**with_changes(read_settings(path), changes)}
    config = parse_config(settings)
    tune_table = settings.pop("tune", None)
    statistic = "worst" if config.secure is None else "mean"
    metric = metric or f"validation.{'rmse' if config.loss_name in REGRESSIONS else 'accuracy'}.{statistic}"
    _check_metric(metric)
    if config.secure is not None and metric.rpartition(".")[2] in UNKNOWN:
        raise ConfigError(
            f"--metric is {metric!r}, but under secure aggregation only means over the clients are known; use "
            f"{metric.rpartition('.')[0]}.mean."
        )
    if sampler is not None:
        checks.one_of("sampler", sampler, SAMPLERS)
    checks.one_of("pruner", pruner, PRUNERS)
    checks.at_least("seeds", seeds, 1)
    if trials is not None:
        checks.at_least("trials", trials, 1)
    found, source = _find_space(config, tune_table, grid, space, path)
    check_space(found, settings, source)
    sampler = sampler or ("tpe" if grid is None else "grid")
    size = grid_size(found)
    if sampler == "grid" and size is None:
        ranged = next(name for name, part in found.items() if not isinstance(part, Choices))
        raise ConfigError(
            f"{source}: {ranged} is a range, but a grid needs lists; give a list, or use --sampler tpe or random."
        )
    most = size if sampler == "grid" and size is not None else trials or DEFAULT_TRIALS
    if pruner != "none" and isinstance(config.eval_every, int) and config.eval_every * 2 > config.rounds:
        raise ConfigError(
            f"A pruner needs at least two evaluations per run, but rounds is {config.rounds} and eval_every is "
            f"{config.eval_every}; evaluate more often, or use --pruner none."
        )
    return Plan(settings, config, found, metric, sampler, pruner, min(most, trials or most), seeds)


def _find_space(
    config: Config, tune_table: dict[str, Any] | None, grid: str | None, space: Path | None, path: Path
) -> tuple[Space, str]:
    """The search space, and where it was given."""
    if grid is not None and space is not None:
        raise ConfigError("--grid and --space are both given; give only one of them.")
    if grid == "paper":
        return paper_grid(config), "The paper's grid"
    file = Path(grid) if grid is not None else space
    if file is not None:
        if grid is not None and not file.exists():
            raise ConfigError(f'--grid is {grid!r}, but it must be "paper" or an existing TOML file.')
        return read_space(read_settings(file), str(file)), str(file)
    if tune_table is None:
        raise ConfigError(
            f"There is nothing to search: give --grid paper, --grid FILE or --space FILE, or add a table [tune] to "
            f"{path} with lines such as {EXAMPLE}."
        )
    return read_space(tune_table, "[tune]"), "[tune]"


def _check_metric(metric: str) -> None:
    """Allow only metrics that trials may be selected by and that have a better direction."""
    split, *rest = metric.split(".")
    if split == "test":
        raise ConfigError(
            f"--metric is {metric!r}, but test data must not select hyper-parameters: the score of a config that they "
            "selected says nothing about new data; use validation, such as validation.accuracy.worst."
        )
    if split not in ("validation", "train") or len(rest) != 2 or rest[1] not in STATISTICS:
        raise ConfigError(
            f"--metric is {metric!r}, but it must be like validation.accuracy.worst: validation or train, a metric "
            f"that the run records (such as accuracy, rmse or personal_loss), and one of {', '.join(STATISTICS)}."
        )
