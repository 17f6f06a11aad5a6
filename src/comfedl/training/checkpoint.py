"""Checkpoints: everything needed to resume a run as if it had never stopped.

A checkpoint is a folder ``round-N`` with tensors in a safetensors file and everything else in JSON; nothing in it can
execute code. It is written under another name, synced and renamed, so it is either complete or absent. Both files have
a checksum; if one is damaged, the previous checkpoint is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from comfedl.core.learner import Model, Params
from comfedl.utils import tree
from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import TensorFile, TensorSpec, sync
from comfedl.utils.read_back import check_dtypes, is_whole, parse_json
from comfedl.utils.tree import Tree

VERSION = 2
SECONDS = "seconds.json"  # the file with how long the run took
MAX_META = 1 << 30  # bytes of meta.json, which lists the groups of clients
KEPT = 2  # so that one is left if the last is damaged


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds: the server's state, the clients' states (by position), and the bytes sent.

    ``offences`` counts each client's refused replies; ``model`` is the global model as it is reported; ``seconds`` is
    how long the run has taken, over all its starts.
    """

    round: int
    state: Tree
    clients: Callable[[], Mapping[int, Tree]]
    traffic: Mapping[str, int]
    offences: Mapping[int, int]
    model: Model
    seconds: float = 0.0


Records = Mapping[str, tuple[int, str]]
"""The size in bytes and the checksum of each record file."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint: the snapshot, and the records at that round.

    ``regular`` are the records without those that are there only because the round was the run's last.
    """

    snapshot: Snapshot
    records: Records
    regular: Records


def write(
    folder: Path, snapshot: Snapshot, records: Records, fingerprint: str, regular: Records, frozen: Params
) -> None:
    """Write a checkpoint, and delete all but the last few; ``frozen`` is the part of the model that is not trained."""
    tensors: dict[str, Tensor] = {}
    places: dict[tuple[Any, ...], str] = {}

    def keep(part: Tensor) -> str:
        """The name under which a tensor is saved; a tensor that occurs several times is saved once."""
        place = (part.data_ptr(), part.shape, part.stride(), part.dtype) if part.numel() else (id(part),)
        if place not in places:
            places[place] = str(len(places))
            tensors[places[place]] = part.detach().cpu().contiguous().clone()
        return places[place]

    state, groups = _map_to_text(keep, snapshot.state), _group_states(snapshot.clients())
    meta: dict[str, Any] = {
        "version": VERSION,
        "round": snapshot.round,
        "fingerprint": fingerprint,
        "traffic": dict(snapshot.traffic),
        "records": dict(records),
        "regular": dict(regular),
        "offences": {str(client): count for client, count in snapshot.offences.items()},
        "state": state,
        "model": _map_to_text(keep, {**snapshot.model["params"], **frozen, **snapshot.model["buffers"]}),
        "clients": [group.places for group in groups],
    }
    final, part = folder / f"round-{snapshot.round:09d}", folder / f".round-{snapshot.round:09d}.part"
    folder.mkdir(exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        with (part / "tensors.safetensors").open("w+b") as file:
            _write_tensors(file, tensors, groups)
            sync(file)
            file.seek(0)
            meta["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        with (part / "meta.json").open("wb") as description:
            description.write(_with_checksum(json.dumps(meta).encode()))
            sync(description)
        (part / SECONDS).write_text(f"{snapshot.seconds:.3f}\n")  # not in meta.json: equal runs have equal bytes there
        if final.exists():  # a damaged checkpoint of this round
            shutil.rmtree(final)
        os.replace(part, final)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    # Those of later rounds are damaged, or they would have been resumed from; they do not push out good ones.
    earlier = [path for path in _checkpoints(folder) if path.name <= final.name]
    for old in earlier[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def read(folder: Path, fingerprint: str, like: Tree, device: torch.device, cause: str = "") -> LoadedCheckpoint | None:
    """The newest undamaged checkpoint; None if there is no checkpoint.

    The server's tensors are moved to the devices of their counterparts in ``like``, the clients' to ``device``.
    ``cause`` says why the data may be others than those of the run, for the message that refuses them.

    Raises:
        RunFolderError: if it is of another run or version, or if all checkpoints are damaged.
    """
    found = _checkpoints(folder)
    for path in found:
        try:
            meta = _read_meta(path)
            version = meta["version"]
            if version != VERSION:
                raise RunFolderError(
                    f"{path} was written by another version of comfedl (format {version}; this one reads {VERSION}); "
                    "resume with that version, or start over with --force."
                )
            with (path / "tensors.safetensors").open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != meta["sha256"]:
                    raise ValueError("its checksum does not match")
            return _loaded(path, meta, fingerprint, like, device, cause)
        except RunFolderError:
            raise
        except Exception as error:  # a damaged file may raise anything
            warnings.warn(f"The checkpoint {path} is damaged ({error}); using the previous one.", stacklevel=2)
    if found:
        raise RunFolderError(f"All checkpoints in {folder} are damaged; start over with --force.")
    return None


def _read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    file = path / "meta.json"
    if file.stat().st_size > MAX_META:
        raise ValueError(f"its meta.json has more than {MAX_META:,} bytes")
    meta = parse_json(_verified(file.read_bytes()))
    if not isinstance(meta, dict):
        raise ValueError("its meta.json holds no object")
    return meta


def _loaded(
    path: Path, meta: Mapping[str, Any], fingerprint: str, like: Tree, device: torch.device, cause: str
) -> LoadedCheckpoint:
    """The checkpoint whose files are undamaged."""
    if meta["fingerprint"] != fingerprint:
        raise RunFolderError(
            f"{path} belongs to a run with other data or another initial model; use those, or start over with --force."
            f"{cause}"
        )
    tensors: dict[str, Tensor] = load_file(path / "tensors.safetensors")
    check_dtypes(tensors)

    def give(part: Any) -> Tree:
        return {name: give(below) for name, below in part.items()} if isinstance(part, dict) else tensors[part]

    kept: dict[int, Tree] = {}
    for number, group in enumerate(meta["clients"]):
        states = tree.map(lambda leaf: leaf.to(device), give(group))
        for row, client in enumerate(tensors[f"clients {number}"].tolist()):
            kept[client] = tree.map(lambda leaf, row=row: leaf[row], states)
    try:
        # Clones are aligned in memory like a run's tensors; alignment can change the last bit of a product.
        state = tree.map(lambda leaf, mate: leaf.clone().to(mate.device), give(meta["state"]), like)
        if _paths(state) != _paths(like):
            raise KeyError("its state has other parts")
    except (LookupError, TypeError, AttributeError) as error:  # the same run, with another state structure
        raise RunFolderError(
            f"{path} was written by another version of comfedl, with another state for this method; resume with "
            "that version, or start over with --force."
        ) from error
    traffic, offences = dict(meta["traffic"]), {int(client): count for client, count in meta["offences"].items()}
    numbers = [meta["round"], *traffic.values(), *offences.values()]
    if traffic.keys() != {"up_bytes", "down_bytes"} or not all(is_whole(number, 0) for number in numbers):
        raise ValueError("its meta.json has other numbers than a checkpoint")
    snapshot = Snapshot(meta["round"], state, kept.copy, traffic, offences, state["model"], _seconds(path / SECONDS))
    return LoadedCheckpoint(snapshot, _records(meta["records"]), _records(meta.get("regular", meta["records"])))


def _paths(state: Tree) -> dict[str, Any]:
    """The paths of a state's tensors; of the model's also the shapes, which no round changes."""
    paths = {path: None for path, _ in tree.named_leaves(state)}
    return {**paths, **{f"model/{path}": leaf.shape for path, leaf in tree.named_leaves(state["model"])}}


def _records(given: Mapping[str, Any]) -> Records:
    """The size and the checksum of each record file."""
    found = {str(name): (size, str(checksum)) for name, (size, checksum) in given.items()}
    if not all(is_whole(size, 0) for size, _ in found.values()):
        raise ValueError("its meta.json has other records than a checkpoint")
    return found


def read_model(folder: Path) -> tuple[int, Params] | None:
    """The round and the global model of the newest undamaged checkpoint, if there is one."""
    for path in _checkpoints(folder):
        try:
            meta = _read_meta(path)
            with safe_open(path / "tensors.safetensors", framework="pt") as file:
                model = {str(name): file.get_tensor(place) for name, place in meta["model"].items()}
            check_dtypes(model)
            return int(meta["round"]), model
        except Exception:  # a damaged file may raise anything
            continue
    return None


def _seconds(file: Path) -> float:
    """How long the run took; 0 if an earlier version, which did not say, wrote the checkpoint."""
    try:
        with file.open("rb") as stream:
            found = float(stream.read(40))
    except (OSError, ValueError):
        return 0.0
    return found if math.isfinite(found) and found >= 0 else 0.0


class _Group(NamedTuple):
    """Clients with states of the same structure; ``places`` is that structure with the names of the stacked tensors."""

    clients: list[int]
    states: list[list[Tensor]]
    names: list[str]
    places: Any


def _group_states(states: Mapping[int, Tree]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for client, state in states.items():
        form = repr(_map_to_text(lambda leaf: f"{tuple(leaf.shape)} {leaf.dtype}", state))
        if form not in groups:
            names = [f"clients {len(groups)}, {j}" for j, _ in enumerate(tree.leaves(state))]
            groups[form] = _Group([], [], names, _map_to_text(partial(_next, iter(names)), state))
        groups[form].clients.append(client)
        groups[form].states.append(list(tree.leaves(state)))
    return list(groups.values())


def _next(names: Iterator[str], leaf: Tensor) -> str:
    return next(names)


def _map_to_text(fn: Callable[[Tensor], str], part: Tree) -> Any:
    """A tree of tensors mapped to a tree of strings."""
    if isinstance(part, dict):
        return {name: _map_to_text(fn, below) for name, below in part.items()}
    if not isinstance(part, Tensor):
        raise TypeError(f"A state contains a {type(part).__name__}; it may only contain tensors and dicts of them.")
    return fn(part)


def _write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor], groups: Sequence[_Group]) -> None:
    """The server's tensors one by one, and the clients' with one row per client, without stacking them in memory."""
    whole = {**tensors, **{f"clients {k}": torch.tensor(group.clients) for k, group in enumerate(groups)}}
    shapes: dict[str, TensorSpec] = {name: (part.dtype, part.shape) for name, part in whole.items()}
    for group in groups:
        for name, leaf in zip(group.names, group.states[0], strict=True):
            shapes[name] = (leaf.dtype, (len(group.clients), *leaf.shape))
    out = TensorFile(file, shapes)
    for name, part in whole.items():
        out.write(name, part)
    for group in groups:
        for j, name in enumerate(group.names):
            for row, leaves in enumerate(group.states):
                out.write(name, leaves[j], row)


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint, undamaged or not."""
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints, newest first."""
    return sorted((path for path in folder.glob("round-*") if path.is_dir()), reverse=True) if folder.is_dir() else []


def _with_checksum(text: bytes) -> bytes:
    """A text with its checksum in the first line."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _verified(data: bytes) -> bytes:
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("its meta.json does not match its checksum")
    return text


def _sync_folder(folder: Path) -> None:
    """Sync a folder, where the system can, so that a rename in it survives a crash."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
