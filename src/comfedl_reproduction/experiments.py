"""A figure's settings, read from experiments/FIGURE.toml: which runs it is made of.

A figure has groups (rows of panels) of arms (curves). An arm is a method under a config. One that has several
candidates for its hyper-parameters is tuned: the candidates run on seeds of their own and are chosen by validation.
Others take the winner of an arm that is tuned elsewhere and change something about it, as an ablation does.
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

# Runs that choose never share a seed, hence a split or an initial model, with those that judge.
FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class Arm:
    """A curve: a label and a config without its seed.

    Attributes:
        name: "figure/group/method" or "figure/group/method/point".
        candidates: changes to the config, one of which is chosen; a single one is taken as it is.
        like: the arm whose winner this one starts from, where it is not tuned itself.
        changes: what this arm then changes.
        seeds: how many seeds at most, for one that takes long.
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
    """All arms of a figure, and how many seeds choose and judge."""

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
    """Where the experiments are: beside the package's source, or inside the package where it is installed."""
    package = Path(__file__).parent
    places = (package / "experiments", package.parents[1] / "experiments")
    for place in places:
        if (place / "fig2.toml").exists():
            return place
    raise ConfigError("The experiments' settings (experiments/fig2.toml and so on) are not installed; use a clone.")


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Settings with changes put in, table by table. A table that names another thing replaces the old one.

    >>> merged({"a": 1, "outer": {"name": "kl", "gamma": 1}}, {"outer": {"gamma": 2}})
    {'a': 1, 'outer': {'name': 'kl', 'gamma': 2}}
    """
    out = dict(settings)
    for key, value in changes.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return out


def read_figure(name: str, preset: str, seeds: int | None = None, where: Path | None = None) -> Figure:
    """Read a figure's settings under a preset; ``seeds`` replaces the preset's own."""
    path = (where or folder()) / f"{name}.toml"
    whole = tomllib.loads(path.read_text(encoding="utf-8"))
    own = whole[preset]
    base, data = merged(whole.get("base", {}), own.get("set", {})), str(whole["data"])
    title, substitute = str(whole["title"]), own.get("without_data")
    if substitute is not None and not is_cached(data):
        title = f"digits in place of {data}, which is not in the cache; the paper: {title}"
        base, data = merged(base, substitute), "digits"
    arms = tuple(_arms(name, whole, base, own))
    sizes = {len(arm.candidates) for arm in arms if arm.tuned}
    if len(sizes) > 1:
        raise ConfigError(f"{path} gives its methods {sorted(sizes)} candidates; a fair comparison gives all the same.")
    figure = Figure(
        name,
        title,
        preset,
        arms,
        {key: group["title"] for key, group in whole["groups"].items() if key not in own.get("skip", ())},
        whole["metric"],
        whole["choose_by"],
        seeds or own["seeds"],
        own.get("tuning_seeds", 1),
        own.get("tuning", {}),
        data,
    )
    for arm in arms:
        if arm.like is None:
            for candidate in arm.candidates:
                parse_config(merged(arm.settings, candidate))
    return figure


def _arms(name: str, whole: Settings, base: Settings, own: Settings) -> Iterable[Arm]:
    for group, table in whole["groups"].items():
        if group in own.get("skip", ()):
            continue
        points = own.get("points", {}).get(group, table.get("points", [{}]))
        for method in table["methods"]:
            if method in own.get("skip", ()):
                continue
            for point in points:
                yield _arm(name, group, method, table, point, whole["methods"][method], base, own)


def _arm(
    figure: str, group: str, method: str, table: Settings, point: Settings, how: Settings, base: Settings, own: Settings
) -> Arm:
    """One curve: base, then group, then method, then the point that a sweep is at."""
    label = point.get("label")
    name = "/".join([figure, group, method, *([label] if label else [])])
    changes = merged(merged(table.get("set", {}), how.get("set", {})), point.get("set", {}))
    arm = Arm(name, group, method, how["label"], label, {}, seeds=how.get("seeds"))
    if "like" in how:
        return replace(arm, like=how["like"], changes=changes)
    arm = replace(arm, settings=merged(merged(base, {"algorithm": how["algorithm"]}), changes))
    if "published" in table:
        values = merged(how["published"], table["published"])
        return replace(arm, candidates=({"algorithm": values},))
    candidates = _candidates(how)[: own.get("candidates")]
    return replace(arm, candidates=tuple({"algorithm": one} for one in candidates))


def _candidates(how: Settings) -> Sequence[Settings]:
    """The candidates as listed, or all combinations of a grid; a dot in a key goes into a table."""
    if "candidates" in how:
        return [_nested(one) for one in how["candidates"]]
    grid = how.get("grid", {})
    return [_nested(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def _nested(flat: Mapping[str, Any]) -> Settings:
    """``{"outer.gamma": 1}`` as ``{"outer": {"gamma": 1}}``."""
    out: Settings = {}
    for key, value in flat.items():
        first, _, rest = key.partition(".")
        out = merged(out, {first: _nested({rest: value}) if rest else value})
    return out
