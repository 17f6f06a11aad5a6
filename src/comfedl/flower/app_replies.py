"""Reads the replies of a ClientApp that we have not written: arrays as a model, numbers, and a site's name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from comfedl.core.client_statistics import smaller_is_better, summarise
from comfedl.core.learner import Model
from comfedl.utils.errors import ConfigError, MalformedMessage
from comfedl.utils.tree import Tree

HEADER = 1 << 12  # bytes that an array may have beyond its numbers
MAX_NAME, MAX_SAMPLES, MAX_METRICS = 200, 10**9, 1000
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # as torch's own layers call them


@dataclass(frozen=True)
class Layout:
    """Which arrays of a record are parameters and which are buffers.

    ``copies`` are names of parameters that the module also has under another name (tied ones): they travel, but count
    once.
    """

    names: Sequence[str]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    buffers: frozenset[str]
    copies: Mapping[str, str]

    @classmethod
    def of(cls, arrays: ArrayRecord, given: nn.Module | Collection[str] | None) -> Self:
        """The layout of the initial arrays; ``given`` is the module, or the names of the buffers."""
        tensors: dict[str, Tensor] = dict(arrays.to_torch_state_dict())
        if not tensors:
            raise ConfigError("initial_arrays is empty; give ArrayRecord(model.state_dict()).")
        copies: dict[str, str] = {}
        if isinstance(given, nn.Module):
            if list(given.state_dict()) != list(tensors):
                odd = sorted({*given.state_dict()} ^ {*tensors})
                what = f"{odd[0]!r} is only in one of them" if odd else "their order differs"
                raise ConfigError(
                    f"initial_arrays is not the state_dict of the strategy's model ({what}); give the module whose "
                    "state_dict is trained."
                )
            first = {id(part): name for name, part in given.named_parameters()}
            trained = {name: first[id(part)] for name, part in given.named_parameters(remove_duplicate=False)}
            copies = {name: own for name, own in trained.items() if name != own and name in tensors}
            buffers = frozenset(name for name in tensors if name not in trained)
        else:
            buffers = frozenset(given or ())
            unknown = sorted(buffers - tensors.keys())
            if unknown:
                raise ConfigError(f"model names the buffer {unknown[0]!r}, which is not among initial_arrays.")
        for name, part in tensors.items():
            if name not in buffers and (not part.is_floating_point() or name.rpartition(".")[2] in BUFFERS):
                raise ConfigError(
                    f"The array {name!r} looks like a buffer, which is averaged and not trained; give the strategy the "
                    "module (model=Net()) or a list of its buffers' names (model=[...])."
                )
        shapes = {name: (part.shape, part.dtype) for name, part in tensors.items()}
        return cls(list(tensors), shapes, buffers, copies)

    @property
    def signature(self) -> dict[str, str]:
        """The arrays as text, by which a run that is continued is recognised."""
        return {name: f"{tuple(shape)} {dtype}" for name, (shape, dtype) in self.shapes.items()}

    def model(self, arrays: ArrayRecord) -> Model:
        """The arrays as a model.

        Raises:
            MalformedMessage: they are not those of the model.
        """
        if arrays.keys() != self.shapes.keys():
            odd = sorted(arrays.keys() ^ self.shapes.keys())[0]
            raise MalformedMessage(f"it {'has' if odd in arrays else 'lacks'} the array {odd[:100]!r}")
        tensors: dict[str, Tensor] = {}
        for name in self.names:
            shape, dtype = self.shapes[name]
            given, most = arrays[name], shape.numel() * dtype.itemsize + HEADER
            if len(given.data) > most:
                raise MalformedMessage(f"its array {name!r} has {len(given.data):,} bytes and not at most {most:,}")
            try:
                part = torch.from_numpy(given.numpy())
            except Exception as error:  # a site may send anything
                raise MalformedMessage(f"its array {name!r} cannot be read ({type(error).__name__})") from None
            if (part.shape, part.dtype) != (shape, dtype):
                found, wanted = f"{tuple(part.shape)} {part.dtype}", f"{tuple(shape)} {dtype}"
                raise MalformedMessage(f"its array {name!r} is {found} and not {wanted}")
            tensors[name] = part
        return Model(
            params={
                name: part for name, part in tensors.items() if name not in self.buffers and name not in self.copies
            },
            buffers={name: part for name, part in tensors.items() if name in self.buffers},
        )

    def arrays(self, model: Model) -> ArrayRecord:
        """A model as arrays, in the order of the initial ones."""
        parts = {**model["params"], **model["buffers"]}
        return ArrayRecord({name: parts[self.copies.get(name, name)].detach().cpu() for name in self.names})


@dataclass(frozen=True)
class SiteReply:
    """A usable reply: what the method sees of it, and what is recorded."""

    site: str
    message: Message
    content: dict[str, Tree]
    metrics: Mapping[str, float]
    samples: int


def name_in(content: RecordDict, key: str) -> str | None:
    """The site's name, if the reply states one in a ConfigRecord.

    Raises:
        MalformedMessage: it is no name.
    """
    for record in content.config_records.values():
        if key in record:
            name = record[key]
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
                raise MalformedMessage(f"its {key!r} must be a printable text of at most {MAX_NAME} characters")
            return name
    return None


def read_reply(message: Message, site: str, layout: Layout, weighted_by: str, loss_key: str | None) -> SiteReply:
    """A reply to a round's training.

    Raises:
        MalformedMessage: what is wrong with it.
    """
    content = message.content
    if len(content.array_records) != 1:
        raise MalformedMessage(f"it has {len(content.array_records)} ArrayRecords and not one")
    metrics = read_metrics(content, weighted_by)
    parts: dict[str, Tree] = {"model": layout.model(next(iter(content.array_records.values())))}
    if loss_key is not None:
        if loss_key not in metrics:
            raise MalformedMessage(
                f"its metrics have no finite number {loss_key!r}, the loss of the received model before training"
            )
        parts["loss"] = torch.tensor(metrics[loss_key], dtype=torch.float64)
    samples = min(MAX_SAMPLES, max(1, round(metrics[weighted_by])))
    return SiteReply(site, message, parts, metrics, samples)


def read_metrics(content: RecordDict, weighted_by: str) -> dict[str, float]:
    """The finite numbers among a reply's metrics; lists and undefined ones are left out."""
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise MalformedMessage(f"it has {len(records)} MetricRecords and not one")
    if len(records[0]) > MAX_METRICS:
        raise MalformedMessage(f"it has {len(records[0])} metrics and not at most {MAX_METRICS}")
    found = {
        name: float(value)
        for name, value in records[0].items()
        if isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
    }
    if found.get(weighted_by, 0) <= 0:
        raise MalformedMessage(f"its metrics have no positive number {weighted_by!r}, its number of samples")
    return found


@dataclass(frozen=True)
class StatisticsBySite:
    """What is reported of the sites' metrics."""

    weighted_by: str
    smaller: frozenset[str]

    def of(self, table: Mapping[str, Mapping[str, float]], means: bool = True) -> dict[str, float]:
        """``loss`` weighted by samples, ``loss.mean``, ``.worst`` and ``.worst10`` over sites, and ``loss/SITE``."""
        names = list(dict.fromkeys(name for values in table.values() for name in values if name != self.weighted_by))
        found: dict[str, float] = {}
        for name in names:
            sites = [site for site, values in table.items() if name in values]
            values = [table[site][name] for site in sites]
            counts = [table[site][self.weighted_by] for site in sites]
            if means:
                total = sum(counts)
                found[name] = sum(value * (count / total) for value, count in zip(values, counts, strict=True))
            judged = "loss" if self.is_small(name) else "accuracy"
            statistics = summarise(judged, values)
            found |= {f"{name}.{what}": statistics[what] for what in ("mean", "worst", "worst10")}
            found |= {f"{name}/{site}": value for site, value in zip(sites, values, strict=True)}
        return found

    def is_small(self, name: str) -> bool:
        """Whether the worst site is the one with the largest value."""
        words = name.lower().replace("-", "_").split("_")
        return name in self.smaller or any(
            word in ("loss", "error", "err") or smaller_is_better(word) for word in (*words, name)
        )
