"""The settings of a figure, read from experiments/FIGURE.toml: the runs it consists of.

A figure has groups (rows of panels) of arms (curves). An arm is a method with a config. An arm with several candidates
for its hyper-parameters is tuned: the candidates run on separate seeds and validation selects one. Other arms start
from the winner of a tuned arm and change something, as in an ablation.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comfedl.config.schema import parse_config
from comfedl.data.registry import is_cached
from comfedl.utils.errors import ConfigError

Settings = dict[str, Any]

PRESETS = ("quick", "paper")

# Tuning and evaluation runs never share a seed, and so neither a data split nor an initial model.
FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class Arm:
    """A curve: a label and a config without its seed.

    Attributes:
        name: "figure/group/method" or "figure/group/method/point".
        candidates: changes to the config, of which tuning selects one; a single candidate needs no tuning.
        like: the arm whose winner this arm starts from, if it is not tuned itself.
        changes: what this arm then changes.
        seeds: the largest number of seeds, for arms that take long.
    """

    name: str
    group: str
    method: str
    label: str
    point: str | None
    settings: Settings
    candidates: tuple[Settings, ...] = ({},)
    like: str | None = None
    changes: Settings = field(default_factory=dict)
    seeds: int | None = None

    @property
    def tuned(self) -> bool:
        return self.like is None and len(self.candidates) > 1


@dataclass(frozen=True)
class Figure:
    """All arms of a figure, and the numbers of seeds for tuning and evaluation."""

    name: str
    title: str
    preset: str
    arms: tuple[Arm, ...]
    groups: Mapping[str, str]
    metric: str
    choose_by: str
    seeds: int
    tuning_seeds: int
    tuning: Settings
    data: str

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def folder() -> Path:
    """The folder of the settings: inside the installed package, or at the root of a clone."""
    package = Path(__file__).parent
    for path in (package / "experiments", package.parents[1] / "experiments"):
        if (path / "fig2.toml").exists():
            return path
    raise ConfigError("The settings of the experiments (experiments/fig2.toml and others) are missing; use a clone.")


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Settings with changes merged in, table by table.

    >>> merged({"a": 1, "outer": {"name": "kl", "gamma": 1}}, {"outer": {"gamma": 2}})
    {'a': 1, 'outer': {'name': 'kl', 'gamma': 2}}
    """
    out = dict(settings)
    for key, value in changes.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return out


def read_figure(name: str, preset: str, seeds: int | None = None) -> Figure:
    """Read the settings of a figure for a preset; ``seeds`` overrides the preset's number of seeds."""
    path = folder() / f"{name}.toml"
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    options = file[preset]
    base, data = merged(file.get("base", {}), options.get("set", {})), str(file["data"])
    title, substitute = str(file["title"]), options.get("without_data")
    if substitute is not None and not is_cached(data):
        title = f"digits instead of {data}, which is not in the cache; the paper: {title}"
        base, data = merged(base, substitute), "digits"
    arms = tuple(_arms(name, file, base, options))
    sizes = {len(arm.candidates) for arm in arms if arm.tuned}
    if len(sizes) > 1:
        raise ConfigError(
            f"{path} gives its methods {sorted(sizes)} candidates; for a fair comparison, give all the same number."
        )
    figure = Figure(
        name,
        title,
        preset,
        arms,
        {key: group["title"] for key, group in file["groups"].items() if key not in options.get("skip", ())},
        file["metric"],
        file["choose_by"],
        seeds or options["seeds"],
        options.get("tuning_seeds", 1),
        options.get("tuning", {}),
        data,
    )
    for arm in arms:
        if arm.like is None:
            for candidate in arm.candidates:
                parse_config(merged(arm.settings, candidate))
    return figure


def _arms(figure: str, file: Settings, base: Settings, options: Settings) -> Iterable[Arm]:
    skip = options.get("skip", ())
    for group, table in file["groups"].items():
        points = options.get("points", {}).get(group, table.get("points", [{}]))
        for method, point in itertools.product(table["methods"], points):
            if group not in skip and method not in skip:
                arm = _arm(f"{figure}/{group}/{method}", table, point, file["methods"][method], base)
                yield replace(arm, candidates=arm.candidates[: options.get("candidates")])


def _arm(path: str, group: Settings, point: Settings, method: Settings, base: Settings) -> Arm:
    """One curve: the base settings, then those of the group, the method and the point of the sweep."""
    label = point.get("label")
    changes = merged(merged(group.get("set", {}), method.get("set", {})), point.get("set", {}))
    _, group_name, method_name = path.split("/")
    name = f"{path}/{label}" if label else path
    arm = Arm(name, group_name, method_name, method["label"], label, {}, seeds=method.get("seeds"))
    if "like" in method:
        return replace(arm, like=method["like"], changes=changes)
    arm = replace(arm, settings=merged(merged(base, {"algorithm": method["algorithm"]}), changes))
    if "published" in group:
        return replace(arm, candidates=({"algorithm": merged(method["published"], group["published"])},))
    return replace(arm, candidates=tuple({"algorithm": one} for one in _candidates(method)))


def _candidates(method: Settings) -> Sequence[Settings]:
    """The listed candidates, or all combinations of the grid; dotted keys become tables."""
    if "candidates" in method:
        return [_nested(one) for one in method["candidates"]]
    grid = method.get("grid", {})
    return [_nested(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def _nested(flat: Mapping[str, Any]) -> Settings:
    """``{"outer.gamma": 1}`` as ``{"outer": {"gamma": 1}}``."""
    out: Settings = {}
    for key, value in flat.items():
        first, _, rest = key.partition(".")
        out = merged(out, {first: _nested({rest: value}) if rest else value})
    return out
