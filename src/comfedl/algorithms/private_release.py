"""What leaves a round under differential privacy: sums of bounded parts, one per client, with noise.

A client's part of a sum depends on its own data and on what earlier rounds released, never on other clients' data of
the same round. So its absence changes a sum by its own part alone, whose size is bounded. Whatever the server computes
from the noisy sums (its optimiser, averages, the weights' normaliser) is post-processing. docs/privacy.md has the
proofs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.aggregation import clip_factors, weighted_average
from comfedl.core.learner import Model, Params
from comfedl.core.outer_functions import KL
from comfedl.core.privacy import DP
from comfedl.core.protocol import Replies
from comfedl.core.secret_noise import SecretNoise
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

if TYPE_CHECKING:
    from comfedl.algorithms.base import Algorithm, State

PRIVACY = "privacy"  # the place of the clip and the normaliser in the server's state
SLACK = 1e-4  # some engines measure norms in float32: updates are clipped to this much less
GRID_BITS = 20  # noisy sums are rounded to multiples of about their noise's deviation over 2^20


class NoReplies(Replies):
    """The replies of a round in which nobody takes part, as Poisson sampling may draw it."""

    clients: Sequence[int] = ()

    def numbers(self, name: str) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def weighted_sum(self, name: str, weights: Tensor) -> Tree:
        raise AssertionError("an empty sum has no shape")

    def squared_distances(self, path: Sequence[str], origin: Tree) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def gram(
        self, path: Sequence[str], origin: Tree, other: Tree, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)

    def each(self, name: str) -> Iterator[Tree]:
        return iter(())

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        return {}

    def altered(self, change: Callable[[int, dict[str, Tree]], dict[str, Tree]], clients: Any) -> Replies:
        return self

    def without(self, clients: Any) -> Replies:
        return self

    def nbytes(self) -> int:
        return 0


class PrivateRelease:
    """The mechanism of one round.

    Args:
        privacy: what is asked for.
        clients: the number of all clients.
        participants: the fixed number that sums are divided by: the participants that are asked for, or expected.
        noise: the source of the noise and of the sample.
        sides: how many further sums a round releases, besides the update.
        round: the round.
    """

    def __init__(
        self, privacy: DP, clients: int, participants: int, noise: SecretNoise, sides: int, round: int = 0
    ) -> None:
        self.privacy, self.clients, self.participants = privacy, clients, participants
        self._noise, self._sides, self._round = noise, sides, round
        self._releases = 0  # of the updates, in this round
        if sides * privacy.side_share >= 1:
            raise ConfigError(f"side_share is {privacy.side_share:g}, but a round has {sides} side releases.")

    def at_round(self, number: int) -> PrivateRelease:
        return PrivateRelease(self.privacy, self.clients, self.participants, self._noise, self._sides, number)

    def initial(self) -> dict[str, Tensor]:
        """What the server's state keeps: the clip, and the normaliser of robust weights in units of the loss."""
        return {
            "clip": torch.tensor(self.privacy.clip or math.inf, dtype=torch.float64),
            "shift": torch.tensor(0.0, dtype=torch.float64),
        }

    def draws_sample(self) -> bool:
        """Whether the sample is drawn here: secretly if there is noise, since epsilon counts on nobody knowing it."""
        return self.privacy.sampling == "poisson" or self.privacy.noise_multiplier > 0

    def sample(self) -> list[int]:
        """The round's clients, in order."""
        if self.participants >= self.clients:
            return list(range(self.clients))
        drawn = self._noise.uniforms(self.clients, "sample", self._round)
        if self.privacy.sampling == "poisson":
            return [int(i) for i in np.flatnonzero(drawn <= self.participants / self.clients)]
        return sorted(np.argsort(drawn, kind="stable")[: self.participants].tolist())

    def equal_weights(self, count: int) -> Tensor:
        """Equal weights of the clients that replied: those of all who were asked for, whoever is absent."""
        return torch.full((count,), 1 / self.participants, dtype=torch.float64)

    def total(self, weights: Tensor, bound: float) -> float:
        """The noisy sum of the weights, none of which is above ``bound``."""
        return self._with_side_noise(float(weights.sum()), "weights", bound)

    def averaged(
        self, state: State, replies: Replies, weights: Tensor, bound: float | None = None, name: str = "model"
    ) -> tuple[State, Model]:
        """The model plus the noisy, weighted sum of the clipped updates; and the state with the next clip.

        ``bound`` is the largest weight that any client could have had, whatever its data; by default 1 over the
        participants.
        """
        self._releases += 1
        if self._releases > 1:
            raise ConfigError("privacy is given, but the round averages updates twice, and epsilon counts one release.")
        model, bound = state["model"], 1 / self.participants if bound is None else bound
        most = float(weights.abs().max()) if len(weights) else 0.0
        if most > bound * (1 + 1e-9):
            raise ConfigError(
                f"A client has the weight {most:.4g}, but under privacy none may have more than "
                f"{bound:.4g}; use weights that do not depend on who else replies (context.release.equal_weights)."
            )
        kept = state[PRIVACY]
        clip, params = float(kept["clip"]), model["params"]
        lengths = replies.squared_distances((name, "params"), params).sqrt()
        scale = clip_factors(lengths, clip * (1 - SLACK)) if math.isfinite(clip) else torch.ones_like(lengths)
        if self.privacy.noise_multiplier > 0:
            deviation = self.privacy.update_multiplier(self._sides) * clip * bound
            mixed = self._noisy(params, replies.weighted_updates((name, "params"), params, weights * scale), deviation)
        elif len(replies.clients):
            mixed = weighted_average(model, replies, weights * scale, name)["params"]
        else:
            mixed = params
        if self.privacy.quantile is not None:
            state = {**state, PRIVACY: {**kept, "clip": self._next_clip(clip, lengths)}}
        return state, Model(params=mixed, buffers=model["buffers"])

    def check_released(self, method: str) -> None:
        """Raise after a round that has not averaged updates here, so that its model has no noise."""
        if not self._releases:
            raise ConfigError(
                f"privacy is given, but {method}'s round does not average updates by self.advance(state, replies, "
                "weights), which adds the noise; do so, or leave privacy out."
            )

    def _noisy(self, origin: Params, exact: Params, deviation: float) -> Params:
        """The model plus the exact sum of updates, in double precision, with noise of this deviation, on a grid.

        On the grid the last bits of the sum and of the noise, which tell of the data (Mironov, 2012), are gone.
        """
        exact = tree.map(lambda part: part.cpu().contiguous(), exact)
        sums = [*tree.leaves(exact)]
        purpose = f"update/{_digest(*(part.numpy() for part in sums))}"
        drawn = torch.from_numpy(self._noise.normals(sum(part.numel() for part in sums), purpose, self._round))
        parts = iter(torch.split(drawn.mul_(deviation), [part.numel() for part in sums]))
        grid = 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)

        def add(start: Tensor, update: Tensor) -> Tensor:
            update = update + next(parts).view(start.shape)
            return (start.double() + (update / grid).round_().mul_(grid).to(start.device)).to(start.dtype)

        noisy: Params = tree.map(add, origin, exact)
        return noisy

    def _next_clip(self, clip: float, lengths: Tensor) -> Tensor:
        """The clip a step nearer to the quantile of the norms, by a noisy count (Andrew et al., Algorithm 1).

        A client adds 1/2 or -1/2 to the count, an absent one 0.
        """
        counted = self._with_side_noise(float((lengths <= clip).double().sub(0.5).sum()), "clip", 0.5)
        below = counted / self.participants + 0.5
        assert self.privacy.quantile is not None
        return torch.tensor(
            clip * math.exp(-self.privacy.clip_lr * (min(1.0, max(0.0, below)) - self.privacy.quantile)),
            dtype=torch.float64,
        )

    def _with_side_noise(self, total: float, purpose: str, bound: float) -> float:
        if self.privacy.noise_multiplier == 0:
            return total
        digest = _digest(np.array([total], dtype=np.float64))
        drawn = float(self._noise.normals(1, f"side/{purpose}/{digest}", self._round)[0])
        return total + self.privacy.side_multiplier * bound * drawn


def _digest(*parts: NDArray[np.float64]) -> str:
    """A digest of a sum, which its noise is derived from, besides the key.

    A round that is repeated after a kill has the same noise if its sum is the same. If it is another, as when a client
    is late, so is the noise: two sums with the same noise would give away their difference.
    """
    found = hashlib.blake2b(digest_size=32)
    for part in parts:
        found.update((part + 0.0).astype("<f8").tobytes())  # -0.0 is 0.0
    return found.hexdigest()


def private_weights(g: KL, state: State, losses: Tensor, release: PrivateRelease) -> tuple[State, Tensor, float]:
    """Capped KL weights whose normaliser is public, the state with the next normaliser, and the largest weight.

    ``capped_weights`` are ``min(exp((f_i - eta) / gamma), cap) / n``, with the eta at which they sum to 1. Here eta is
    the one that earlier rounds have come to, so that a client's weight depends on no other's loss. The noisy sum of the
    weights scales them, and moves eta to where their sum will be 1: gamma log(sum) further, at which it stays.
    """
    assert g.gamma is not None and g.cap is not None
    kept = state[PRIVACY]
    most = math.log(g.cap)
    losses = losses.nan_to_num(nan=-math.inf, posinf=math.inf)  # a client whose loss is not a number has no weight
    weights = torch.exp(((losses - kept["shift"]) / g.gamma).clamp(max=most)) / release.participants
    total = min(g.cap, max(1 / g.cap, release.total(weights, g.cap / release.participants)))
    state = {**state, PRIVACY: {**kept, "shift": kept["shift"] + g.gamma * math.log(total)}}
    return state, weights / total, g.cap / release.participants / total


def check_sums(method: Algorithm, model: Model, sampled: bool) -> None:
    """Raise if something else than a weighted sum of clipped updates leaves a round, whatever the weights.

    ``sampled`` is whether only some of the clients take part in a round.
    """
    if method.defended:
        raise ConfigError(
            "privacy is given, but clip_update_norm, aggregate or defence is as well; privacy clips each update to its "
            "own clip and needs the mean, so leave these out."
        )
    for name, part in tree.named_leaves(model["params"]):
        if part.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"privacy is given, but the model's {name} is {part.dtype}, in which sums are rounded by more than one "
                "client may change them; use float32 or float64."
            )
    if model["buffers"]:
        raise ConfigError(
            f"privacy is given, but the model has buffers ({next(iter(model['buffers']))}), which travel like "
            "BatchNorm's statistics and would not be private; use GroupNorm or LayerNorm."
        )
    if sampled and method.initial_client_state(model) is not None:
        raise ConfigError(
            "privacy is given and only some clients take part in a round, but clients keep a state from round to "
            "round, so the effect of sampling on epsilon is not known; use keep_state = false, or all clients."
        )
