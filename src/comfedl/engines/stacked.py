"""Many clients at once: learners whose parameters, batches and losses have the clients as first dimension.

The clients' losses share no parameter, so the gradient of their sum holds every client's gradient, and so do second
derivatives. Outside of the learner, a client step is elementwise, so it runs on stacked tensors unchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from comfedl.core.learner import CHUNK, Batch, Learner, Model, Params, split_by_kind
from comfedl.models.losses import LossFunction, per_sample_form
from comfedl.models.metrics import MetricFunction
from comfedl.models.outputs import is_of_library, logits
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

# Samples per forward pass if all clients share one model.
ROWS = 5000


@dataclass(frozen=True)
class Ragged:
    """The data of clients with different numbers of samples: flat, one client after another.

    It takes the place of a batch; steps only pass it on to the learner.
    """

    x: Tensor
    y: Tensor
    sizes: Tensor

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """x and y as [clients, max samples, ...], and a mask of the samples that are not padding.

        Padding repeats a client's last sample, so that it adds no NaN or infinity.
        """
        place = torch.arange(int(self.sizes.max()), device=self.sizes.device)
        start = self.sizes.cumsum(0) - self.sizes
        rows = start[:, None] + torch.minimum(place, self.sizes[:, None] - 1)
        x, y = (
            part.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *part.shape[1:]) for part in (self.x, self.y)
        )
        return x, y, place < self.sizes[:, None]

    def mean(self, each: Tensor) -> Tensor:
        """Each client's mean of one number per sample, summed in double precision."""
        owner = torch.repeat_interleave(self.sizes)
        sums = each.new_zeros(len(self.sizes), dtype=torch.float64).index_add_(0, owner, each.double())
        return (sums / self.sizes).to(each.dtype)


class Stacked(Learner):
    """Like ``Learner``, for many clients' models: every tensor has the clients as first dimension."""

    ragged = False
    """Whether it takes ``Ragged`` data: outputs, losses and metrics must be computed sample by sample."""

    def __init__(self, learner: Learner) -> None:
        self.call, self.loss_function, self.metrics = learner.call, learner.loss_function, learner.metrics
        self.attends = learner.attends

    def seed(self, noise: Callable[[int], int], clients: Sequence[int]) -> None:
        """Seed the noise of the next step: each client's generator with ``noise(client)``."""

    def clip(self, gradient: Params, most: float) -> Params:
        squares = [leaf.square().flatten(1).sum(dim=1) for leaf in gradient.values()]
        scale = (most / (torch.stack(squares).sum(dim=0).sqrt() + 1e-6)).clamp(max=1)  # one per client
        return {name: leaf * scale.view(-1, *(1,) * (leaf.ndim - 1)) for name, leaf in gradient.items()}

    @abstractmethod
    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Any, Params]:
        """The models' outputs on ``x``, [clients, samples, ...]."""

    def loss(self, params: Params, buffers: Params, batch: Batch, train: bool = True) -> tuple[Tensor, Params]:
        assert self.loss_function is not None
        x, y, mask = unpack(batch)
        output, after = self.output(params, buffers, x, train)
        return _mean(self.loss_function, output, y, mask), after

    def scores(self, model: Model, data: Batch) -> dict[str, Tensor]:
        """Like ``Learner.scores``, but undefined metrics are NaN, since all clients have the same names."""
        assert self.loss_function is not None
        return self.means(model, data, {"loss": self.loss_function, **self.metrics})

    def means(self, model: Model, data: Batch, functions: Mapping[str, MetricFunction]) -> dict[str, Tensor]:
        with torch.no_grad():
            if self.ragged and is_shared(model):
                return self._means_of_one(tree.map(lambda leaf: leaf[0], model), data, functions)
            plain, entire = split_by_kind(functions)
            whole = unpack(data)
            parts = math.ceil(whole[0].shape[1] / CHUNK) if whole[2] is None else 1
            totals: dict[str, Tensor] = {}
            outputs: list[Tensor] = []
            for x, y in zip(*(part.tensor_split(parts, dim=1) for part in whole[:2]), strict=True):
                output, _ = self.output(model["params"], model["buffers"], x, train=False)
                if entire and not isinstance(output, Tensor):
                    raise ConfigError(
                        f"The model returns a {type(output).__name__}, whose metrics are computed one client after "
                        'another; use vectorize = "serial".'
                    )
                if entire:
                    outputs.append(output)
                for name, function in plain.items():
                    mean = _mean(function, output, y, whole[2]) * (x.shape[1] / whole[0].shape[1])
                    totals[name] = totals[name] + mean if name in totals else mean
            if not entire:
                return totals
            output, y = torch.cat(outputs, dim=1), whole[1]
            if not isinstance(data, Ragged):  # a single sample was doubled
                output, y = output[:, : data[0].shape[1]], y[:, : data[0].shape[1]]
            rows = _rows(output, y, whole[2])
            return totals | {name: function(*rows) for name, function in entire.items()}

    def _means_of_one(self, model: Model, data: Batch, functions: Mapping[str, MetricFunction]) -> dict[str, Tensor]:
        """The means of one model that all clients share, with their samples in common batches."""
        mean: Callable[[Tensor], Tensor]
        plain, entire = split_by_kind(functions)
        if isinstance(data, Ragged):
            flat, mean, sizes = (data.x, data.y), data.mean, data.sizes
        else:
            flat, shape = (data[0].flatten(0, 1), data[1].flatten(0, 1)), data[0].shape[:2]
            mean, sizes = partial(_row_means, shape), _equal(shape, data[0])
        found: dict[str, list[Tensor]] = {name: [] for name in plain}
        outputs: list[Tensor] = []
        for x, y in zip(*(torch.split(part, ROWS) for part in flat), strict=True):
            output, _ = Learner.output(self, model["params"], model["buffers"], x, train=False)
            if entire:
                outputs.append(output)
            for name, function in plain.items():
                each = per_sample_form(function)
                assert each is not None
                found[name].append(each(output, y))
        means = {name: mean(torch.cat(each)) for name, each in found.items()}
        return means | {name: function(torch.cat(outputs), flat[1], sizes) for name, function in entire.items()}


class Vmapped(Stacked):
    """Any module, by torch.func.vmap over its forward pass; autograd differentiates outside of it."""

    def output(self, params: Params, buffers: Params, x: Tensor, train: bool) -> tuple[Any, Params]:
        assert self.call is not None
        one = self.call
        after = {name: buffer.clone() for name, buffer in buffers.items()} if train else buffers
        # What a loss of the library sees of a dict or dataclass; one of the user's own sees all of it.
        seen = logits if is_of_library(self.loss_function) else _same
        # vmap's noise would differ from that of one client at a time, each with its own seed: it is an error.
        call = vmap(lambda params, buffers, x: seen(one(x, train, params, buffers)), randomness="error")
        return call(params, after, x), after


def _same(output: Any) -> Any:
    return output


def is_shared(model: Tree) -> bool:
    """Whether all clients have the same model, as an expanded view."""
    return all(leaf.stride(0) == 0 for leaf in tree.leaves(model))


def unpack(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, y, and a mask of the samples that count (None: all). See ``double_single_sample``."""
    if isinstance(batch, Ragged):
        return batch.padded()
    x, y = batch
    return (torch.cat([x, x], dim=1), torch.cat([y, y], dim=1), None) if x.shape[1] == 1 else (x, y, None)


def _mean(function: LossFunction, output: Any, y: Tensor, mask: Tensor | None) -> Tensor:
    """Each client's mean of a function (output, y)."""
    per_sample = per_sample_form(function)
    if per_sample is None:
        means: Tensor = vmap(function)(output, y)
        return means
    each = per_sample(output.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
    return each.mean(dim=1) if mask is None else masked_mean(each, mask)


def _rows(output: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs and y of all clients, flat, and each client's number of samples."""
    if mask is None:
        return output.flatten(0, 1), y.flatten(0, 1), _equal(y.shape, y)
    return output[mask], y[mask], mask.sum(dim=1)


def _equal(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.full((shape[0],), shape[1], device=like.device)


def _row_means(shape: Sequence[int], each: Tensor) -> Tensor:
    return each.view(*shape).mean(dim=1)


def masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    """Each client's mean over the samples in the mask."""
    return torch.where(mask, each, 0).sum(dim=1) / mask.sum(dim=1)
