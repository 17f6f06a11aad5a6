"""Training batches after the user's transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from comfedl.core.learner import Batch
from comfedl.data import transform
from comfedl.data.transform import TransformFunction
from comfedl.engines.made_batches import MadeBatches
from comfedl.engines.stacked import Ragged
from comfedl.utils import samples, tree
from comfedl.utils.errors import ComfedlError, ConfigError
from comfedl.utils.samples import Samples


@dataclass(frozen=True)
class Changes:
    """The transforms of one client's batches in one draw; ``seed`` maps the number of a batch to its seed."""

    transforms: Sequence[TransformFunction]
    round: int
    client: str
    seed: Callable[[int], int]

    def __call__(self, x: Samples, k: int) -> Samples:
        """The x of the k-th batch, transformed; x itself if nothing has changed."""
        try:
            changed = transform.apply(self.transforms, tree.map(torch.clone, x), self.seed(k))
        except ComfedlError:
            raise
        except Exception as error:  # the user's function may raise anything
            raise ConfigError(
                f"The transform of round {self.round}, client {self.client!r}, raised {type(error).__name__}: {error}"
            ) from error
        fault = _fault(x, changed)
        if fault:
            raise ConfigError(
                f"The transform of round {self.round}, client {self.client!r}, returned {fault}; it must return x with "
                "the same structure, dtype and number of samples."
            )
        # Not a copy of the same numbers: its alignment in memory could change the last bit of a product.
        if all(map(torch.equal, tree.leaves(changed), tree.leaves(x))):
            return x
        return tree.map(Tensor.detach, changed)


def _fault(x: Samples, changed: object) -> str | None:
    """What is wrong with the result of a transform."""
    if not isinstance(changed, Tensor | tuple | dict) or not all(isinstance(p, Tensor) for p in tree.leaves(changed)):
        return f"a {type(changed).__name__} for {samples.structure(x)}"
    if samples.structure(changed) != samples.structure(x):
        return f"{samples.structure(changed)} for {samples.structure(x)}"
    before = dict(samples.named(x))
    for key, part in samples.named(changed):
        old, where = before[key], f" at {key}" if key else ""
        if part.dtype != old.dtype:
            return f"{part.dtype} for {old.dtype}{where}"
        if part.ndim == 0 or len(part) != len(old):
            return f"{len(part) if part.ndim else 'a single number'} for {len(old)} samples{where}"
        if part.device != old.device:
            return f"a tensor on {part.device} for one on {old.device}{where}"
    return None


class TransformedBatches(MadeBatches):
    """Batches of one client, or of several that are stacked; each is transformed when it is accessed."""

    def __init__(self, batches: Sequence[Batch], changes: Sequence[Changes], stacked: bool) -> None:
        self._batches, self._changes, self._stacked = batches, changes, stacked

    def __len__(self) -> int:
        return len(self._batches)

    def _make(self, k: int) -> Batch:
        batch = self._batches[k]
        if not self._stacked:
            return self._changes[0](batch[0], k), batch[1]
        parts = torch.split(batch.x, batch.sizes.tolist()) if isinstance(batch, Ragged) else batch[0].unbind()
        found = self._of_each(parts, k)
        if all(new is old for new, old in zip(found, parts, strict=True)):
            return batch
        if isinstance(batch, Ragged):
            return cast(Batch, Ragged(torch.cat(found), batch.y, batch.sizes))
        return torch.stack(found), batch[1]

    def _of_each(self, parts: Sequence[Tensor], k: int) -> list[Tensor]:
        """Each client's x, before they are stacked again."""
        found = [change(part, k) for change, part in zip(self._changes, parts, strict=True)]
        odd = next((part.shape[1:] for part in found if part.shape[1:] != found[0].shape[1:]), None)
        if odd is not None:
            raise ConfigError(
                f"The transform of round {self._changes[0].round} returned samples of shape "
                f"{tuple(found[0].shape[1:])} and {tuple(odd)} for two clients that run at once; return one shape, or "
                'use vectorize = "serial".'
            )
        return found
