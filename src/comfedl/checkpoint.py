"""Checkpoints: what is needed to go on with a run as if it had never stopped.

A checkpoint is a folder ``round-N`` with the tensors in a safetensors file and everything else in JSON; nothing in it
can execute. It is written under another name, synced and renamed, so that it is there whole or not at all; both files
carry a checksum, so that one that was damaged later is noticed, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from comfedl import tree
from comfedl.errors import RunFolderError
from comfedl.tree import Tree

VERSION = 1
KEPT = 2  # so that one is left where the last turns out to be damaged


@dataclass(frozen=True)
class Snapshot:
    """A run between two rounds: the server's state, what clients keep (by position), and what has been sent.

    ``offences`` counts the replies of each client that were refused.
    """

    round: int
    state: Tree
    clients: Callable[[], Mapping[int, Tree]]
    traffic: Mapping[str, int]
    offences: Mapping[int, int]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: the snapshot, and the records' lengths in bytes and checksums then."""

    snapshot: Snapshot
    records: Mapping[str, tuple[int, str]]


def write(folder: Path, snapshot: Snapshot, records: Mapping[str, tuple[int, str]], fingerprint: str) -> None:
    """Write a checkpoint and drop all but the last few."""
    tensors: dict[str, Tensor] = {}
    places: dict[tuple[Any, ...], str] = {}

    def keep(part: Tree) -> Any:
        """The tree with names of tensors for tensors; one that stands in several places is kept once."""
        if isinstance(part, dict):
            return {name: keep(below) for name, below in part.items()}
        if not isinstance(part, Tensor):
            raise TypeError(f"A state holds a {type(part).__name__}; it may hold tensors and dicts of them.")
        place = (part.data_ptr(), part.shape, part.stride(), part.dtype) if part.numel() else (id(part),)
        if place not in places:
            places[place] = str(len(places))
            tensors[places[place]] = part.detach().cpu().contiguous().clone()
        return places[place]

    meta = {
        "version": VERSION,
        "round": snapshot.round,
        "fingerprint": fingerprint,
        "traffic": dict(snapshot.traffic),
        "records": dict(records),
        "offences": {str(client): count for client, count in snapshot.offences.items()},
        "state": keep(snapshot.state),
        "clients": {str(client): keep(state) for client, state in snapshot.clients().items()},
    }
    content = save(tensors)
    meta["sha256"] = hashlib.sha256(content).hexdigest()
    text = json.dumps(meta).encode()
    final, part = folder / f"round-{snapshot.round:09d}", folder / f".round-{snapshot.round:09d}.part"
    folder.mkdir(exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        for name, data in (("tensors.safetensors", content), ("meta.json", _sealed(text))):
            with (part / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if final.exists():  # the same round once more, after a damaged one was passed over
            shutil.rmtree(final)
        os.replace(part, final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in _found(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def read(folder: Path, fingerprint: str, like: Tree, device: torch.device) -> Saved | None:
    """The newest checkpoint that is whole; None where there is none at all.

    The server's tensors go to the devices of their counterparts in ``like``, the clients' to ``device``.

    Raises:
        RunFolderError: the run is another one, was written by a later version, or no checkpoint is whole.
    """
    found = _found(folder)
    for path in found:
        try:
            meta = json.loads(_unsealed((path / "meta.json").read_bytes()))
            version = meta["version"]
            if version > VERSION:
                raise RunFolderError(
                    f"{path} was written by a later version of comfedl (format {version}; this one reads up to "
                    f"{VERSION}); go on with that version, or start anew with --force."
                )
            content = (path / "tensors.safetensors").read_bytes()
            if hashlib.sha256(content).hexdigest() != meta["sha256"]:
                raise ValueError("its checksum does not match")
            tensors = load(content)
        except RunFolderError:
            raise
        except Exception as error:  # whatever a damaged file makes the readers raise
            warnings.warn(f"The checkpoint {path} is damaged ({error}); the one before it is used.", stacklevel=2)
            continue
        if meta["fingerprint"] != fingerprint:
            raise RunFolderError(
                f"{path} belongs to a run with other data or another initial model; give those, or start anew with "
                "--force."
            )

        def give(part: Any, tensors: dict[str, Tensor] = tensors) -> Tree:
            return {name: give(below) for name, below in part.items()} if isinstance(part, dict) else tensors[part]

        kept = {int(client): give(state) for client, state in meta["clients"].items()}
        kept = {client: tree.map(lambda leaf: leaf.to(device), state) for client, state in kept.items()}
        state = tree.map(lambda leaf, mate: leaf.to(mate.device), give(meta["state"]), like)
        offences = {int(client): count for client, count in meta["offences"].items()}
        snapshot = Snapshot(meta["round"], state, kept.copy, meta["traffic"], offences)
        return Saved(snapshot, meta["records"])
    if found:
        raise RunFolderError(f"No checkpoint in {folder} is whole; start the run anew with --force.")
    return None


def _found(folder: Path) -> list[Path]:
    """The checkpoints, newest first."""
    return sorted((path for path in folder.glob("round-*") if path.is_dir()), reverse=True) if folder.is_dir() else []


def _sealed(text: bytes) -> bytes:
    """A text with its own checksum in front."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _unsealed(data: bytes) -> bytes:
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("its description does not match its checksum")
    return text


def _sync(folder: Path) -> None:
    """Make a rename last: the folder itself is synced, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def fingerprint(*parts: Any) -> str:
    """A digest of what a run depends on besides its settings: names, numbers and tensors."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()
