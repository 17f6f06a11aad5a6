"""Whether anybody is outvoted, and how each gamma would weight the clients.

After some rounds of plain averaging with equal weights, a client is *outvoted* if its loss is above the clients' mean
and a short fit on its own data, from the averaged model, lowers it by a fifth or more: it needs another model than the
average, and more weight can give it one. Where its own fit does not help, the task is hard or the data are few, and
more weight would be taken from the others for little. Losses are on held-out data where there are any.

For a given gamma the weights are r = softmax(losses / gamma), which is worth ``1 / sum_i r_i^2`` effective clients. If
the gradients of n clients have independent noise of equal variance, the variance of their weighted mean is
``n sum_i r_i^2`` times that of the plain mean (Kish's design effect). When noise limits convergence, expect about this
factor more rounds, or more samples per step.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import ComFedL, Compositional
from comfedl.algorithms.fedavg import FedAvg
from comfedl.config.schema import Config
from comfedl.core.client_statistics import effective_clients
from comfedl.core.learner import Model
from comfedl.core.objectives import LocalLoss
from comfedl.core.outer_functions import KL
from comfedl.core.simplex import ROUNDING, effective_gamma, softmax_weights
from comfedl.training.arguments import check_fit, make_learner
from comfedl.training.client_table import ClientTable
from comfedl.training.fit import fit
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

GAMMAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WARMUP = 20
DRAWS = 200  # of participants, under partial participation
OWN_STEPS = 50  # of a client's own fit
FALL = 0.2  # of the loss: what its own fit must gain for a client to be outvoted


@dataclass(frozen=True)
class GammaEffect:
    """The effect of one gamma.

    Attributes:
        weights: the weight per client, averaged over draws of the participants; they sum to 1.
        effective: effective clients, ``1 / sum_i r_i^2`` over the participants.
        noise: ``m sum_i r_i^2`` with m participants: the variance of the weighted mean over that of the plain mean.
        loss: the weighted mean of the losses.
    """

    gamma: float
    weights: NDArray[np.float64]
    effective: float
    noise: float
    loss: float


@dataclass(frozen=True)
class Fit:
    """A client under plain averaging: its loss with the averaged model, and after a short fit of its own.

    ``judged_on`` is the number of samples of these losses, ``interval`` the 95 % interval of the averaged model's.
    """

    client: str
    samples: int
    loss: float
    own: float
    judged_on: int | None = None
    interval: tuple[float, float] | None = None

    def is_outvoted(self, mean: float) -> bool:
        """Whether the client does worse than the mean, and would not with a model of its own."""
        return self.loss > mean and self.own <= (1 - FALL) * self.loss


@dataclass(frozen=True)
class Advice:
    """The client losses after a few rounds of plain averaging, and the effect of each gamma.

    ``fits`` is empty where nobody can be said to be outvoted: after no rounds, or if the objective is not the local
    loss. ``split`` names the data that its losses are on, and ``about_worst`` says how sure it is who is worst.
    """

    names: Sequence[str]
    losses: NDArray[np.float64]
    participants: int
    warmup: int
    effects: Sequence[GammaEffect]
    config_gamma: float | None
    fits: Sequence[Fit] = ()
    split: str = "train"
    about_worst: Sequence[str] = ()

    @property
    def outvoted(self) -> list[Fit]:
        """The clients that plain averaging outvotes, the worst first."""
        mean = sum(fit.loss for fit in self.fits) / max(1, len(self.fits))
        return sorted((fit for fit in self.fits if fit.is_outvoted(mean)), key=lambda fit: -fit.loss)

    @property
    def equal_losses(self) -> bool:
        """Whether all clients have the same loss, so that gamma has no effect."""
        return bool(np.ptp(self.losses) <= ROUNDING * np.abs(self.losses).max())


def advise(config: Config, warmup: int = WARMUP, gammas: Sequence[float] = ()) -> Advice:
    """Train with plain averaging for ``warmup`` rounds, then compute the effect of each gamma from the losses.

    The warm-up is needed because an untrained model's losses say little; if it starts at zero, they are equal.
    """
    checks.at_least("warmup", warmup, 0)
    for gamma in gammas:
        checks.positive("gamma", gamma)
    algorithm = config.make_algorithm()
    names, losses, split, fits, about_worst = _client_losses(config, algorithm, warmup)
    outer = algorithm.g if isinstance(algorithm, Compositional) else None
    config_gamma = getattr(outer, "gamma", None)
    if isinstance(outer, KL) and outer.effective_clients is not None:
        gamma = effective_gamma(torch.from_numpy(losses), outer.effective_clients)
        config_gamma = gamma if 0 < gamma < np.inf else None
    considered = sorted({*(gammas or GAMMAS), *([] if config_gamma is None else [float(config_gamma)])})
    participants = min(config.clients_per_round or len(names), len(names))
    effects = [_effect(gamma, losses, participants, config.seed) for gamma in considered]
    return Advice(names, losses, participants, warmup, effects, config_gamma, fits, split, about_worst)


def _client_losses(
    config: Config, algorithm: Algorithm, warmup: int
) -> tuple[Sequence[str], NDArray[np.float64], str, list[Fit], Sequence[str]]:
    """The method's inner objective per client, on its training data after the warm-up; and the clients' own fits."""
    fed = config.make_data()
    module = config.make_model(fed)
    learner, model, frozen = make_learner(module, config.make_loss(), algorithm)
    first = next(iter(model["params"].values()))
    data = fed.to(first.dtype, first.device)
    check_fit(learner, model, data)
    split, fits = "validation" if data.validation is not None else "train", list[Fit]()
    about_worst: Sequence[str] = ()
    if warmup:
        result = fit(
            module,
            fed,
            _plain_averaging(algorithm),
            warmup,
            config.seed,
            config.make_loss(),
            config.clients_per_round,
            eval_every=warmup,
            engine_options=None if config.embedded is None else config.embedded.model_dump(),
        )
        trained = {name: part for name, part in result.params.items() if name not in frozen}
        model = Model(params=trained, buffers=result.buffers)
        if isinstance(algorithm.objective(learner), LocalLoss):
            sizes = dict(zip(data.names, data.train.sizes.tolist(), strict=True))
            table = result.table_at_end(split)
            fits, about_worst = _fits(result.clients, sizes, split, table), table.about_worst("loss")
    objective, outer = algorithm.objective(learner), data.split("outer")
    assert outer is not None
    values = [float(objective.value(model, data.train.samples_of(i), outer.samples_of(i))) for i in range(len(data))]
    return data.names, np.array(values), split, fits, about_worst


def _fits(rows: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], split: str, table: ClientTable) -> list[Fit]:
    """The clients' losses in the last evaluated round; clients without held-out data are left out."""
    loss, own = f"{split}.loss", f"{split}.personal_loss"
    last = max(row["round"] for row in rows)
    known = {row["client"]: row for row in table}
    counts = {name: table.samples(row) for name, row in known.items()}
    intervals = {name: table.interval(row, "loss") for name, row in known.items()}
    return [
        Fit(name, sizes[name], row[loss], row[own], counts.get(name), intervals.get(name))
        for row in rows
        for name in [row["client"]]
        if row["round"] == last and row.get(loss) is not None and row.get(own) is not None
    ]


def _plain_averaging(algorithm: Algorithm) -> Algorithm:
    """Uniform averaging with the method's local training; a personal model is a client's own fit."""
    common: dict[str, Any] = {field.name: getattr(algorithm, field.name) for field in fields(Algorithm)}
    if not isinstance(algorithm, Compositional) or (algorithm.adapt is None and algorithm.composition is None):
        common["personal_steps"] = OWN_STEPS
    if isinstance(algorithm, ComFedL):
        return replace(algorithm, outer=None, step="plain", personal_steps=common["personal_steps"])
    if isinstance(algorithm, Compositional):
        return ComFedL(inner=algorithm.adapt, **common)
    return FedAvg(weighting="uniform", **common)


def _effect(gamma: float, losses: NDArray[np.float64], participants: int, seed: int) -> GammaEffect:
    n = len(losses)
    draws = [np.arange(n)]
    if participants < n:
        generator = rng.generator(seed, "advise")  # the same draws for every gamma
        draws = [generator.choice(n, size=participants, replace=False) for _ in range(DRAWS)]
    weights, effective, noise = np.zeros(n), 0.0, 0.0
    for drawn in draws:
        r = softmax_weights(torch.from_numpy(losses[drawn]), gamma).numpy()
        weights[drawn] += r / len(draws)
        effective += effective_clients(r.tolist()) / len(draws)
        noise += participants * float((r**2).sum()) / len(draws)
    return GammaEffect(gamma, weights, effective, noise, float(weights @ losses))


def plot_advice(advice: Advice, path: Path) -> None:
    """Write a PNG: effective clients against gamma, and the clients' weights ordered by loss."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'comfedl[plot]', or leave it out.") from None
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    left.semilogx([effect.gamma for effect in advice.effects], [effect.effective for effect in advice.effects], "o-")
    left.axhline(advice.participants, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="gamma", ylabel=f"effective clients, of {advice.participants} per round", ylim=(0, None))
    if advice.config_gamma is not None:
        left.axvline(advice.config_gamma, color="tab:red", linewidth=0.8, label="the config's gamma")
        left.legend(loc="lower right")
    order = np.argsort(-advice.losses, kind="stable")
    for i, effect in enumerate(advice.effects):
        shade = colormaps["viridis"](i / max(1, len(advice.effects) - 1))
        weights = len(order) * effect.weights[order]
        right.plot(np.arange(1, len(order) + 1), weights, ".-", color=shade, label=f"{effect.gamma:.3g}")
    right.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    right.set(xlabel="clients, largest loss first", ylabel="weight relative to uniform", yscale="log")
    right.set_ylim(1e-3, 1.5 * len(order))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(title="gamma", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(path, content.getvalue())
