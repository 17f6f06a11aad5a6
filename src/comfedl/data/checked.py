"""What is given for clients' data, checked and turned into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.data.client_names import NumberedNames
from comfedl.data.split import Batch, Split
from comfedl.utils import samples, tree
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples


def by_client(split: str, given: Any) -> Mapping[str, Any]:
    """What is given for a split, by client name; the clients of a list are numbered."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, list | tuple) and all(isinstance(value, list | tuple) for value in given):
        return dict(zip(NumberedNames(len(given)), given, strict=True))
    advice = (
        "use FederatedData.from_dataframe(df, client=..., target=...)"
        if _is_frame(given)
        else "give {name: (x, y)}, or a list with a pair (x, y) for each client"
    )
    raise DataError(f"{split} is a {type(given).__name__}, but it must be a dict by client name; {advice}.")


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _as_tensor(split: str, client: str | None, what: str, value: Any) -> Tensor:
    where = f"{what} in {split}" if client is None else f"{what} of client {client!r} in {split}"
    if np.ma.is_masked(value):
        raise DataError(
            f"{where} is a masked array with masked values, which would be used; fill them in, or drop them."
        )
    if hasattr(value, "to_numpy") and not isinstance(value, Tensor):  # columns of pandas or polars
        value = value.to_numpy()
        if value.dtype.kind not in "biuf":
            raise DataError(
                f"{where} has columns that are not numbers ({value.dtype}); give numbers, or let "
                "FederatedData.from_dataframe encode the table."
            )
    try:
        if isinstance(value, np.ndarray) and (not value.flags.writeable or any(step < 0 for step in value.strides)):
            value = value.copy()  # torch accepts neither
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        several = isinstance(value, list) and any(isinstance(part, Tensor | np.ndarray) for part in value)
        pairs = isinstance(value, list) and any(isinstance(part, tuple) for part in value)
        advice = (
            "several inputs go into a tuple, as ((first, second), y), or a dict"
            if several
            else "a list of samples (x, y) is read by FederatedData.from_datasets"
            if pairs
            else "give an array or a tensor, samples first"
        )
        raise DataError(f"{where} cannot be read as numbers ({_first_line(error)}); {advice}.") from None
    if tensor.is_complex():
        raise DataError(f"{where} is complex; give real numbers.")
    if tensor.ndim == 0:
        raise DataError(f"{where} is a single number; give an array, samples first.")
    return tensor.detach()


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _as_samples(split: str, client: str | None, what: str, value: Any) -> Samples:
    """A tensor, or a tuple or dict of tensors of equal length."""
    if not isinstance(value, tuple | Mapping):
        return _as_tensor(split, client, what, value)
    where = f"{what} in {split}" if client is None else f"{what} of client {client!r} in {split}"
    if not len(value):
        raise DataError(f"{where} is an empty {type(value).__name__}; give at least one tensor.")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{where} has the key {key!r}, but the keys are the model's keywords; give strings.")
    # Sorted, so that the order in which keys are given does not matter.
    pairs = sorted(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    for key, part in pairs:
        if isinstance(part, tuple | Mapping):
            raise DataError(f"{where} has a {type(part).__name__} at {key!r}; give tensors, without a further level.")
    parts = [_as_tensor(split, client, f"{what}[{key!r}]", part) for key, part in pairs]
    for (key, _), part in zip(pairs, parts, strict=True):
        if len(part) != len(parts[0]):
            raise DataError(
                f"{where} has {len(part)} samples at {key!r} but {len(parts[0])} at {pairs[0][0]!r}; give tensors of "
                "the same length."
            )
    return dict(zip((key for key, _ in pairs), parts, strict=True)) if isinstance(value, Mapping) else tuple(parts)


def as_pair(split: str, client: str | None, value: Any) -> Batch:
    """x and y of a client (None: of all) as tensors."""
    if _is_frame(value):
        raise DataError(
            f"Client {client!r} in {split} is a {type(value).__name__}; give (x, y), such as (df[inputs], df[target]), "
            "or one table of all clients to FederatedData.from_dataframe."
        )
    if isinstance(value, Mapping) and value.keys() == {"x", "y"}:
        raise DataError(
            f"Client {client!r} in {split} is a dict with x and y, which would be two inputs without a target; give "
            "the pair (x, y)."
        )
    is_pair = isinstance(value, tuple) or (isinstance(value, list) and any(hasattr(part, "shape") for part in value))
    if is_pair and len(value) != 2:
        more = "; several inputs go into x, as ((first, second), y)" if len(value) > 2 else ""
        raise DataError(f"Client {client!r} in {split} is a {type(value).__name__} of {len(value)}; give (x, y){more}.")
    if not is_pair or value[1] is None:
        return check_pair(split, client, value[0] if is_pair else value)
    return check_pair(split, client, *value)


def check_pair(split: str, client: str | None, *parts: Any) -> Batch:
    """x and y with equal lengths; a missing y becomes a tensor of shape [N, 0]."""
    x, *rest = (_as_samples(split, client, what, part) for what, part in zip("xy", parts, strict=False))
    size = samples.count(x)
    y = rest[0] if rest else _empty(x)
    who, where = (split, "") if client is None else (f"Client {client!r}", f" in {split}")
    if size != samples.count(y):
        raise DataError(f"{who} has {size} samples in x but {samples.count(y)} in y{where}; give one y for each x.")
    if size == 0:
        raise DataError(f"{who} has no samples{where}; give it some, or leave it out.")
    return x, tree.map(lambda part: part.long() if part.ndim == 1 and not part.is_floating_point() else part, y)


def _empty(x: Samples) -> Tensor:
    """No y at all; in floating point if there is such a tensor in x."""
    like = next((part for _, part in samples.named(x) if part.is_floating_point()), samples.first(x))
    return like.new_zeros((len(like), 0))


def check_same(what: str, ours: Samples, theirs: Samples, here: str, there: str) -> None:
    """Refuse samples of another structure or shape; ``here`` and ``there`` say where they are."""
    if samples.structure(ours) != samples.structure(theirs):
        raise DataError(
            f"{what} is {samples.structure(ours)} {here} but {samples.structure(theirs)} {there}; give the same in "
            "both."
        )
    for (key, one), (_, other) in zip(samples.named(ours), samples.named(theirs), strict=True):
        if one.shape[1:] != other.shape[1:]:
            raise DataError(
                f"{what}{key} has samples of shape {tuple(one.shape[1:])} {here} but {tuple(other.shape[1:])} {there}; "
                "give the same shape in both."
            )


def flatten(split: str, names: Sequence[str], clients: Mapping[str, Any]) -> Split:
    """The data of all clients as one split; ``names`` are those in train."""
    check_clients(split, names, clients)
    pairs = {name: as_pair(split, name, clients[name]) for name in names if name in clients}
    (first, (x0, y0)), *others = pairs.items()
    for name, (x, y) in others:
        check_alike(split, "x", first, x0, name, x)
        check_alike(split, "y", first, y0, name, y)
    sizes = [samples.count(pairs[name][0]) if name in pairs else 0 for name in names]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (samples.cat([pair[part] for pair in pairs.values()]) for part in (0, 1))
    flat = Split(x, y, names, offsets)
    check_finite(split, flat)
    return flat


def check_clients(split: str, names: Sequence[str], clients: Mapping[str, Any]) -> None:
    """Check whose data are given for a split; ``names`` are the clients in train."""
    unknown = sorted(set(clients) - set(names), key=str)
    if unknown:
        raise DataError(f"Client {unknown[0]!r} is in {split} but not in train; give it train data, or leave it out.")
    missing = [name for name in names if name not in clients]
    if split == "outer" and missing:
        raise DataError(f"Client {missing[0]!r} has no outer data; give outer data for every client, or for none.")
    if not clients:
        raise DataError(f"{split} has no clients; give some, or leave {split} out.")


def check_alike(split: str, what: str, first: str, ours: Samples, name: str, theirs: Samples) -> None:
    """Refuse a client's samples that are not like those of the first one."""
    if samples.structure(ours) != samples.structure(theirs):
        raise DataError(
            f"Client {name!r} has {what} as {samples.structure(theirs)} in {split} but client {first!r} as "
            f"{samples.structure(ours)}; give all clients the same."
        )
    for (key, one), (_, other) in zip(samples.named(ours), samples.named(theirs), strict=True):
        if one.shape[1:] != other.shape[1:]:
            raise DataError(
                f"Client {name!r} has {what}{key} samples of shape {tuple(other.shape[1:])} in {split} but client "
                f"{first!r} has {tuple(one.shape[1:])}; give all clients the same shape."
            )
        if one.is_floating_point() != other.is_floating_point():
            raise DataError(
                f"Client {name!r} has {what}{key} of type {other.dtype} in {split} but client {first!r} has "
                f"{one.dtype}; give all clients the same type."
            )


def check_flat(split: str, parts: Any, clients: int | None) -> tuple[Samples, Samples, NDArray[np.int64]]:
    """The checked x, y and offsets of a flat split; ``clients`` is the required number of clients."""
    check_parts(split, parts)
    x, y = check_pair(split, None, *(parts[:1] if parts[1] is None else parts[:2]))
    return x, y, check_offsets(split, parts[2], samples.count(x), clients)


def check_parts(split: str, parts: Any) -> None:
    """Check that a flat split is (x, y, offsets)."""
    if not isinstance(parts, tuple | list) or len(parts) != 3:
        found = f"{type(parts).__name__} of {len(parts)}" if hasattr(parts, "__len__") else type(parts).__name__
        raise DataError(f"{split} is a {found}, but it must be (x, y, offsets).")


def check_offsets(split: str, given: Any, size: int, clients: int | None) -> NDArray[np.int64]:
    """Where each client's samples begin, of ``size`` in all; ``clients`` is the required number of clients."""
    try:
        offsets = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The offsets of {split} cannot be read as numbers ({error}).") from None
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise DataError(
            f"The offsets of {split} are {offsets.dtype} of shape {offsets.shape}, but they must be a list of "
            "integers, one more than there are clients."
        )
    offsets = offsets.astype(np.int64)
    if clients is not None and len(offsets) != clients + 1:
        raise DataError(
            f"There are {len(offsets)} offsets in {split} but {clients + 1} in train; give one more than there are "
            "clients in both."
        )
    decreases = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0 or offsets[-1] != size or len(decreases):
        fault = f"decrease at index {decreases[0] + 1}" if len(decreases) else f"go from {offsets[0]} to {offsets[-1]}"
        raise DataError(
            f"The offsets of {split} {fault}, but they must increase from 0 to {size}, the number of samples."
        )
    return offsets


def check_finite(split: str, flat: Split) -> None:
    """Refuse NaN and infinity; the client is looked up only if there are any."""
    named = [(f"{what}{key}", part) for what, of in (("x", flat.x), ("y", flat.y)) for key, part in samples.named(of)]
    for what, values in named:
        # A finite sum has only finite terms and takes no memory; an infinite one may have overflowed.
        if not values.is_floating_point() or bool(values.sum().isfinite()):
            continue
        bad_per_row = (~torch.isfinite(values)).reshape(len(values), -1).sum(dim=1)
        bad = bad_per_row[: flat.offsets[-1]] if flat.rows is None else bad_per_row.index_select(0, flat.rows)
        positions = torch.nonzero(bad).flatten()
        if len(positions):
            i = int(np.searchsorted(flat.offsets, int(positions[0]), side="right")) - 1
            count = int(bad[flat.offsets[i] : flat.offsets[i + 1]].sum())
            raise DataError(
                f"Client {flat.names[i]!r} has {count} NaN or infinite value{'s' if count > 1 else ''} in {what} of "
                f"{split}; replace or drop those samples."
            )
