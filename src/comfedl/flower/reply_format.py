"""What a site's reply may hold, known before it arrives: how large it is, its parts, and the names of its scores."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from comfedl.core.learner import Model
from comfedl.core.protocol import MODEL, NUMBERS, PARAMS, Step
from comfedl.utils import tree
from comfedl.utils.errors import MalformedMessage
from comfedl.utils.tree import Tree

MARGIN = 1 << 20  # bytes that a reply may have beyond its tensors, for names and the safetensors header
PER_TENSOR = 1 << 10  # and for each of its tensors
SCORE = re.compile(r"(train|validation|test)\.(personal_)?(.+)", re.DOTALL)


@dataclass(frozen=True)
class ReplyFormat:
    """The format of the replies of a run's steps.

    Attributes:
        steps: the method's client steps, which declare what they send.
        model: the initial model; models in replies are like it.
        metrics: the names of the metrics that clients are scored by, besides the loss.
    """

    steps: Mapping[str, Step]
    model: Model
    metrics: Collection[str] = field(default_factory=frozenset)

    def limit(self, steps: Iterable[str]) -> int:
        """The most bytes that the replies to these steps may have together."""
        return MARGIN + sum(self._size(step) for step in steps)

    def _size(self, step: str) -> int:
        whole = tree.nbytes(dict(self.model)) + PER_TENSOR * len(tree.leaves(dict(self.model)))
        sends = self.steps[step].sends if step in self.steps else {}
        if not sends:  # of a method that does not declare it
            return 4 * whole
        return sum(whole if kind in (MODEL, PARAMS) else PER_TENSOR * 8 for kind in sends.values())

    def accepted(self, step: str, reply: Tree) -> dict[str, Tree]:
        """The reply, with its parts in the order of the model's.

        Raises:
            MalformedMessage: it has parts that nobody asked for, or scores under other names than those of the run.
        """
        if not isinstance(reply, dict):
            raise MalformedMessage("it is not a dict")
        sends = self.steps[step].sends if step in self.steps else {}
        if sends and reply.keys() != sends.keys():
            odd = sorted(reply.keys() ^ sends.keys())[0]
            raise MalformedMessage(f"it {'has' if odd in reply else 'lacks'} the part {odd[:60]!r}")
        for part, kind in sends.items():
            if kind == NUMBERS:
                self._check_scores(part, reply[part])
        like: dict[str, Any] = {MODEL: dict(self.model), PARAMS: self.model["params"]}
        return {part: _in_order(reply[part], like.get(sends.get(part, ""))) for part in sends or reply}

    def _check_scores(self, part: str, scores: Tree) -> None:
        if not isinstance(scores, dict):
            raise MalformedMessage(f"its {part} is not a dict")
        for name in scores:
            found = SCORE.fullmatch(name)
            if found is None or found[3] not in {"loss", *self.metrics}:
                raise MalformedMessage(f"its {part} has the name {name[:60]!r}, which is no score of this run")


def _in_order(part: Tree, like: Any) -> Tree:
    """A tree with the keys in the order of another one that has the same; sums and distances go by that order."""
    if not isinstance(part, dict) or isinstance(like, Tensor | None) or part.keys() != like.keys():
        return part
    return {name: _in_order(part[name], below) for name, below in like.items()}
