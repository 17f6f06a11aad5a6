"""How the server aggregates updates: by their weighted mean or a robust rule, clipped, and with bounded weights.

docs/attacks.md measures what each part holds against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from comfedl.core.learner import Model, Params
from comfedl.core.protocol import Replies
from comfedl.core.robust_aggregation import bad_clients, median_of, robust_buffers, robust_mean
from comfedl.core.simplex import limited_weights
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

DEFENCES = ("strong",)
STRONG_CAP = 1.25  # the largest weight under the strong defence, as a multiple of uniform


def weighted_average(model: Model, replies: Replies, weights: Tensor, name: str = "model") -> Model:
    """``w + sum_i r_i (w_i - w)``; buffers are averaged with the same weights, counters take their maximum.

    If the weights sum to more than 1, buffers take them scaled to sum 1: an extrapolated variance may be negative.
    """
    mixed: Model = replies.weighted_sum(name, weights)
    total = float(weights.sum())
    if abs(1 - total) < 1e-12:
        return mixed

    def param(new: Tensor, old: Tensor) -> Tensor:
        return new + (1 - total) * old if new.is_floating_point() else new

    def buffer(new: Tensor, old: Tensor) -> Tensor:
        return param(new, old) if total < 1 or not new.is_floating_point() else new / total

    return Model(
        params=tree.map(param, mixed["params"], model["params"]),
        buffers=tree.map(buffer, mixed["buffers"], model["buffers"]),
    )


def clip_factors(lengths: Tensor, most: float | None, reach: float = 1.0) -> Tensor:
    """The factors that clip updates of these lengths to ``reach`` times ``most``, or times their median for None."""
    bound = median_of(lengths, torch.ones_like(lengths)) if most is None else most
    return torch.where(lengths > 0, (reach * bound / lengths).clamp(max=1), 1.0).nan_to_num(0.0)


def _stack(trees: Sequence[Tree]) -> Tree:
    return tree.map(lambda *parts: torch.stack(parts), *trees)


class Aggregation:
    """The part of an algorithm that aggregates updates; its arguments are described at ``Algorithm``."""

    clip_update_norm: float | None
    aggregate: str
    trim: float
    defence: str | None

    def check_aggregate(self, participants: int) -> None:
        """Raise or warn if the robust mean cannot hold with this number of participants."""
        if self.rule in ("krum", "multi-krum"):
            bad = bad_clients(self.trim, participants)
            if participants < 2 * bad + 3:
                raise ConfigError(
                    f"{self.aggregate} withstands {bad} bad clients (trim = {self.trim:g}) among {2 * bad + 3} or "
                    f"more; {participants} take part in a round, so use more, a smaller trim, or a median."
                )

    def averaged(self, model: Model, replies: Replies, weights: Tensor, name: str = "model") -> Model:
        """The model plus the aggregated updates of the clients, clipped and robust if so configured.

        With either, buffers are robust as well: a client's parameters say nothing about its statistics.
        """
        if not self.defended:
            return weighted_average(model, replies, weights, name)
        weights = self.limited(weights, replies.clients)
        total = float(weights.sum())
        if total <= 0:  # no participant has any weight
            return model
        params, buffers = model["params"], model["buffers"]
        scale = self.shortening(replies, (name, "params"), params)
        if self.rule == "mean":
            params = weighted_average(model, replies, weights * scale, name)["params"]
        else:
            params = self.pooled([reply["params"] for reply in replies.each(name)], params, weights, scale)
        if buffers:
            stacked = _stack([reply["buffers"] for reply in replies.each(name)])
            centre = robust_buffers(self.rule, stacked, weights / total, self.trim)
            share = min(1.0, total)  # an extrapolated variance may be negative
            buffers = tree.map(
                lambda start, end: start + share * (end - start) if end.is_floating_point() else end, buffers, centre
            )
        return Model(params=params, buffers=buffers)

    def pooled(self, parts: Sequence[Params], origin: Params, weights: Tensor, scale: Tensor) -> Params:
        """``origin`` plus the aggregate, by the rule, of the clients' differences from it, scaled by ``scale``."""
        total = float(weights.sum())
        clipped = [
            tree.map(lambda part, start, s=s: start + s * (part - start), own, origin)
            for own, s in zip(parts, scale.tolist(), strict=True)
        ]
        centre = robust_mean(self.rule, _stack(clipped), weights / total, self.trim)
        moved: Params = tree.map(lambda start, end: start + total * (end - start), origin, centre)
        return moved

    @property
    def rule(self) -> str:
        """The rule that aggregates updates."""
        return "geometric-median" if self.defence is not None and self.aggregate == "mean" else self.aggregate

    @property
    def clips(self) -> bool:
        """Whether updates are clipped."""
        return self.clip_update_norm is not None or self.defence is not None

    @property
    def defended(self) -> bool:
        """Whether the server aggregates otherwise than by the weighted mean."""
        return self.clips or self.rule != "mean"

    @property
    def weight_cap(self) -> float | None:
        """The largest weight of a client, as a multiple of uniform; None is no limit."""
        return None if self.defence is None else STRONG_CAP

    def limited(self, weights: Tensor, clients: Sequence[int]) -> Tensor:
        """The participants' weights within ``weight_cap``; a client that counts several times is one."""
        if self.weight_cap is None:
            return weights
        who, places, times = np.unique(np.asarray(clients), return_inverse=True, return_counts=True)
        if len(who) == len(weights):
            return limited_weights(weights, self.weight_cap)
        place = torch.from_numpy(places)
        each = torch.zeros(len(who), dtype=weights.dtype).index_add_(0, place, weights)
        return torch.take(limited_weights(each, self.weight_cap) / torch.from_numpy(times), place)

    def shortening(self, replies: Replies, path: Sequence[str], origin: Params, reach: float = 1.0) -> Tensor:
        """The factors that scale the clients' updates down to ``reach`` times the clip, 1 where they are shorter.

        An update so long that its square overflows gets 0.
        """
        if not self.clips:
            return torch.ones(len(replies.clients), dtype=torch.float64)
        lengths = replies.squared_distances(path, origin).sqrt()
        return clip_factors(lengths, self.clip_update_norm, reach)
