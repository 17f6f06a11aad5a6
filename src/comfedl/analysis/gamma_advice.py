"""What each gamma would do to the clients' weights, from one pass over their losses.

The weights at a gamma are softmax(losses / gamma). They amount to ``1 / sum_i r_i^2`` equal clients. Where the
gradients of n clients have independent noise of one variance, the noise of their weighted mean is ``n sum_i r_i^2``
times that of the plain mean (Kish's design effect). As long as noise is what keeps training back, it takes about so
many times as many rounds, or samples a step, to come as near.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.algorithms.base import Algorithm, Renamed
from comfedl.algorithms.comfedl import ComFedL
from comfedl.algorithms.fedavg import FedAvg
from comfedl.config.schema import Config
from comfedl.core.client_statistics import effective_clients
from comfedl.core.objectives import Model
from comfedl.core.outer_functions import KL
from comfedl.core.simplex import ROUNDING, effective_gamma, softmax_weights
from comfedl.training.fit import fit
from comfedl.training.validation import check_fit, make_learner
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

GAMMAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WARMUP = 20
DRAWS = 200  # of participants, where not all take part


@dataclass(frozen=True)
class Option:
    """What one gamma would do.

    Attributes:
        weights: what each client weighs, in the mean over draws of the participants; they add up to 1.
        effective: ``1 / sum_i r_i^2`` among the participants.
        noise: ``m sum_i r_i^2`` with m participants: the variance of their weighted mean, in that of the plain one.
        loss: the weighted mean of the losses.
    """

    gamma: float
    weights: NDArray[np.float64]
    effective: float
    noise: float
    loss: float


@dataclass(frozen=True)
class Advice:
    """The clients' losses after a few rounds of plain averaging, and what each gamma would make of them."""

    names: Sequence[str]
    losses: NDArray[np.float64]
    participants: int
    warmup: int
    options: Sequence[Option]
    chosen: float | None
    """The gamma that the config has."""

    @property
    def equal(self) -> bool:
        """Whether the losses tell the clients apart at all."""
        return bool(np.ptp(self.losses) <= ROUNDING * np.abs(self.losses).max())

    def gamma_for(self, clients: float) -> float:
        """The gamma at which all clients together amount to so many."""
        return effective_gamma(torch.from_numpy(self.losses), clients)


def advise(config: Config, warmup: int = WARMUP, gammas: Sequence[float] = ()) -> Advice:
    """Train by plain averaging for a few rounds, take every client's loss, and work out the weights of each gamma.

    At the very start the losses of a model that knows nothing say little: those of a model that starts at zero are all
    the same.
    """
    checks.at_least("warmup", warmup, 0)
    for gamma in gammas:
        checks.positive("gamma", gamma)
    algorithm = config.make_algorithm()
    algorithm = algorithm.method if isinstance(algorithm, Renamed) else algorithm
    names, losses = _losses(config, algorithm, warmup)
    outer = algorithm.outer if isinstance(algorithm, ComFedL) else None
    chosen = getattr(outer, "gamma", None)
    if isinstance(outer, KL) and outer.effective_clients is not None:
        found = effective_gamma(torch.from_numpy(losses), outer.effective_clients)
        chosen = found if 0 < found < np.inf else None
    considered = sorted({*(gammas or GAMMAS), *([] if chosen is None else [float(chosen)])})
    participants = min(config.clients_per_round or len(names), len(names))
    options = [_option(gamma, losses, participants, config.seed) for gamma in considered]
    return Advice(names, losses, participants, warmup, options, chosen)


def _losses(config: Config, algorithm: Algorithm, warmup: int) -> tuple[Sequence[str], NDArray[np.float64]]:
    """Each client's value of the method's inner objective, over its whole train data."""
    fed = config.make_data()
    module = config.make_model(fed)
    learner, model, frozen = make_learner(module, config.loss, algorithm)
    first = next(iter(model["params"].values()))
    data = fed.to(first.dtype, first.device)
    check_fit(learner, model, data)
    if warmup:
        result = fit(
            module,
            fed,
            _plain(algorithm),
            warmup,
            config.seed,
            config.loss,
            config.clients_per_round,
            eval_every=warmup,
            eval_clients=1,
            engine_options=None if config.embedded is None else config.embedded.model_dump(),
        )
        trained = {name: part for name, part in result.params.items() if name not in frozen}
        model = Model(params=trained, buffers=result.buffers)
    objective, outer = algorithm.objective(learner), data.split("outer")
    assert outer is not None
    values = [float(objective.value(model, data.train.whole(i), outer.whole(i))) for i in range(len(data))]
    return data.names, np.array(values)


def _plain(algorithm: Algorithm) -> Algorithm:
    """Uniform averaging with the method's own local training."""
    if isinstance(algorithm, ComFedL):
        return replace(algorithm, outer=None)
    common: dict[str, Any] = {field.name: getattr(algorithm, field.name) for field in fields(Algorithm)}
    return FedAvg(weighting="uniform", **common)


def _option(gamma: float, losses: NDArray[np.float64], participants: int, seed: int) -> Option:
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
    return Option(gamma, weights, effective, noise, float(weights @ losses))


def draw(advice: Advice, path: Path) -> None:
    """A picture: effective clients and noise against gamma, and the clients' weights in the order of their losses."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("A picture needs matplotlib: pip install 'comfedl[plot]'; or leave --png out.") from None
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    left.semilogx([option.gamma for option in advice.options], [option.effective for option in advice.options], "o-")
    left.axhline(advice.participants, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="gamma", ylabel=f"effective clients, of {advice.participants} in a round", ylim=(0, None))
    if advice.chosen is not None:
        left.axvline(advice.chosen, color="tab:red", linewidth=0.8, label="the config's gamma")
        left.legend(loc="lower right")
    order = np.argsort(-advice.losses, kind="stable")
    for place, option in enumerate(advice.options):
        shade = colormaps["viridis"](place / max(1, len(advice.options) - 1))
        weights = len(order) * option.weights[order]
        right.plot(np.arange(1, len(order) + 1), weights, ".-", color=shade, label=f"{option.gamma:.3g}")
    right.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    right.set(xlabel="clients, the largest loss first", ylabel="weight, times uniform", yscale="log")
    right.set_ylim(1e-3, 1.5 * len(order))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(title="gamma", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(path, content.getvalue())
