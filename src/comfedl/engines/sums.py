"""A site's reply as words to be summed, and the sums of words as what the server knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBERS, Step
from comfedl.core.sums import REFERENCE, SiteWeight, SummedReplies
from comfedl.secure.ring import FEWEST_BITS, Ring, Words
from comfedl.secure.settings import SecureAggregation
from comfedl.utils import tree
from comfedl.utils.tree import Tree

LARGEST = 2.0**20  # the largest magnitude of a score, a weight or a count
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Codec:
    """How the sites of a run write their replies, and how the server reads the sums.

    Attributes:
        settings: the bits of a number, and the clip of an update.
        weight: the weight that a site gives itself.
        steps: the method's steps, which declare what they send.
        metrics: the names of the metrics that sites are scored by, besides the loss.
        clip_update_norm: the largest norm of a site's update, which is clipped before it is weighed.
        sites: the most sites in a sum.
    """

    settings: SecureAggregation
    weight: SiteWeight
    steps: Mapping[str, Step]
    metrics: Sequence[str]
    clip_update_norm: float | None
    sites: int

    def __post_init__(self) -> None:
        self.tensors, self.numbers  # noqa: B018 - check that sums fit

    @cached_property
    def tensors(self) -> Ring:
        """The ring of updates times weights."""
        return Ring(self.settings.bits, self.settings.clip * self.weight.bound, self.sites)

    @cached_property
    def numbers(self) -> Ring:
        """The ring of weights, counts and scores, which are few: always of 64 bits."""
        return Ring(64, LARGEST, self.sites)

    @cached_property
    def score_names(self) -> list[str]:
        """All scores that a site may have, in the order in which they are sent."""
        own = ["loss", *sorted({*self.metrics} - {"loss"})]
        return [f"{split}.{kind}{name}" for split in SPLITS for kind in ("", "personal_") for name in own]

    def like(self, step: str, model: Model) -> list[tuple[np.dtype[Any], int]]:
        """The type and length of each vector of words of a step's reply."""
        sends = self.steps[step].sends.values()
        if NUMBERS in sends:
            return [(self.numbers.dtype, 4 + 2 * len(self.score_names))]
        assert MODEL in sends
        return [(self.tensors.dtype, sum(leaf.numel() for leaf in tree.leaves(dict(model)))), (self.numbers.dtype, 3)]

    def encode(self, step: str, reply: Mapping[str, Tree], message: Mapping[str, Tree], samples: int) -> list[Words]:
        """A site's reply, weighed by the site, as words.

        Raises:
            ValueError: it is not finite, so the site must not send it.
        """
        reference = float(message[REFERENCE])
        if NUMBERS in self.steps[step].sends.values():
            return [self._encode_scores(reply, samples, reference)]
        loss = float(reply["loss"]) if self.weight.follows_losses else math.nan
        weight = self.weight.of(loss, samples, reference)
        update = self._update(reply["model"], message["model"])
        if not (np.isfinite(update).all() and math.isfinite(weight)):
            raise ValueError("its reply is not finite")
        clip = self.settings.clip
        clipped = int(np.count_nonzero(np.abs(update) > clip))
        words, _ = self.tensors.encode(weight * update.clip(-clip, clip))
        numbers = [weight, float(weight >= self.weight.bound), min(clipped, LARGEST)]
        return [words, self.numbers.encode(np.array(numbers))[0]]

    def _update(self, model: Tree, origin: Tree) -> NDArray[np.float64]:
        """What training changed, of the parameters (clipped to a norm) and then of the buffers."""
        params, buffers = (
            [(dict(tree.named_leaves(model[kind]))[name] - start).double() for name, start in tree.named_leaves(part)]
            for kind, part in (("params", origin["params"]), ("buffers", origin["buffers"]))
        )
        if self.clip_update_norm is not None:
            length = math.sqrt(sum(float(part.square().sum()) for part in params))
            if length > self.clip_update_norm:
                params = [part * (self.clip_update_norm / length) for part in params]
        flat = [part.reshape(-1).cpu() for part in (*params, *buffers)]
        found: NDArray[np.float64] = torch.cat(flat).numpy()
        return found

    def _encode_scores(self, reply: Mapping[str, Tree], samples: int, reference: float) -> Words:
        value = float(reply["value"])
        weight = self.weight.of(value, samples, reference)
        if not (math.isfinite(value) and math.isfinite(weight)):
            raise ValueError("its value is not finite")
        bounded = float(not math.isnan(reference) and weight >= self.weight.bound)
        numbers = [weight, bounded, value, self.weight.part(value, samples, reference)]
        for name in self.score_names:
            score = float(reply["scores"].get(name, math.nan))
            numbers += [1.0, score] if math.isfinite(score) else [0.0, 0.0]
        return self.numbers.encode(np.array(numbers))[0]

    def decode(
        self, step: str, words: Sequence[Words], message: Mapping[str, Tree], clients: Sequence[int], sent: int
    ) -> SummedReplies:
        """What the server knows of the replies of these clients, from the sums of their words."""
        finest = 2.0 ** -max(2, min(20, self.tensors.fraction - FEWEST_BITS))
        if NUMBERS in self.steps[step].sends.values():
            weight, bounded, value, part, *scores = self.numbers.decode(words[0]).tolist()
            pairs = zip(self.score_names, scores[::2], scores[1::2], strict=True)
            return SummedReplies(
                clients=clients,
                weight=weight,
                bounded=round(bounded),
                finest=finest,
                value=value / len(clients),
                objective=self.weight.objective(
                    part / len(clients), weight / len(clients), float(message[REFERENCE]), len(clients)
                ),
                scores_by_name={name: (round(count), total) for name, count, total in pairs if round(count)},
                sent=sent,
            )
        update, numbers = self.tensors.decode(words[0]), self.numbers.decode(words[1]).tolist()
        model = _moved(message["model"], torch.from_numpy(update / numbers[0])) if numbers[0] > 0 else None
        return SummedReplies(
            clients=clients,
            weight=numbers[0],
            bounded=round(numbers[1]),
            clipped=round(numbers[2]),
            finest=finest,
            model=model,
            sent=sent,
        )


def _moved(model: Model, update: Tensor) -> Model:
    """The model plus an update in one piece; whole numbers, such as counters, stay whole."""
    start = 0

    def part(leaf: Tensor) -> Tensor:
        nonlocal start
        change = update[start : start + leaf.numel()].reshape(leaf.shape).to(leaf.device)
        start += leaf.numel()
        return (leaf.double() + (change if leaf.is_floating_point() else change.round())).to(leaf.dtype)

    return Model(params=tree.map(part, model["params"]), buffers=tree.map(part, model["buffers"]))
