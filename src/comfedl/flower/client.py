"""A site's part: it does the steps that it is asked for on its own client, and keeps that client's state in a folder.

The server says with each step which version of the state to start from, so a round that is done again, after a server
or a site came back, starts from what it started from the first time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from comfedl.core.protocol import Diverged
from comfedl.engines.embedded import Embedded, LocalReplies
from comfedl.flower import serialization
from comfedl.training.personal_models import file_name
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic
from comfedl.utils.tree import Tree

logger = logging.getLogger("comfedl")

PRIVATE = ("personal",)  # steps whose reply is for the site alone


class Store:
    """The versions of a client's state in one run, each a file that is there whole or not at all."""

    def __init__(self, folder: Path, client: str, run: str) -> None:
        self._folder = folder / file_name(client) / file_name(run)

    def read(self, version: str) -> Tree | None:
        """A version; None where it is not there."""
        path = self._path(version)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return serialization.unpacked(json.loads(file.metadata()["tree"]), tensors)

    def write(self, version: str, state: Tree) -> None:
        tensors: dict[str, Tensor] = {}

        def named(part: Tree) -> Any:
            if isinstance(part, dict):
                return {name: named(below) for name, below in part.items()}
            tensors[str(len(tensors))] = part.detach().cpu().contiguous().clone()
            return str(len(tensors) - 1)

        text = json.dumps(named(state))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(version), save(tensors, {"tree": text}))

    def drop_all_but(self, versions: Collection[str]) -> None:
        """Drop what the server cannot ask for any more, and what a write that was cut short has left."""
        kept = {self._path(version).name for version in versions}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, version: str) -> Path:
        return self._folder / f"{file_name(version)}.safetensors"


def answer(engine: Embedded, store: Store, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RecordDict:
    """Do what a message asks for, one step after another; a step that fails does not keep the others from theirs."""
    packed, told, written = serialization.Packed(), [], set()
    for ask in body["asks"]:
        try:
            reply, notes = _do(engine, store, ask, serialization.unpacked(ask["message"], tensors))
            written |= {str(notes[name]) for name in ("kept", "held") if name in notes}
            told.append({"reply": packed.put(reply), **notes})
        except Diverged as error:
            # JSON has no NaN that every reader knows: they travel as texts.
            told.append({"diverged": [error.step, repr(error.loss), repr(error.weight)]})
        except Exception as error:  # whatever a step raises is the site's own to see
            logger.exception("The step %r of round %s has failed.", ask.get("step"), ask.get("round"))
            told.append({"error": said(error)})
    store.drop_all_but({*body["keep"], *written})
    return serialization.content({"answers": told}, packed.record())


def _do(engine: Embedded, store: Store, ask: Mapping[str, Any], message: Tree) -> tuple[Tree, dict[str, Any]]:
    step, round, use, version = str(ask["step"]), int(ask["round"]), ask["use"], str(ask["version"])
    if step in PRIVATE:
        raise serialization.Unreadable(f"the step {step!r} is for the site alone")
    notes: dict[str, Any] = {}
    before = None if use is None else store.read(use)
    if use is not None and before is None:
        logger.warning("The state %s is not there any more; this client starts anew.", use)
        notes["anew"] = True
    engine.restore({} if before is None else {0: before})
    held = None if ask["hold"] is None else store.read(ask["hold"])
    engine.hold(round, {} if held is None else {0: held})
    replies = engine.run(step, [0], message, round)
    assert isinstance(replies, LocalReplies)  # one client is never stacked
    reply = replies.whole()[0]
    engine.settle()
    after = engine.states().get(0)
    if after is not None and (before is None or not same(before, after)):
        store.write(version, after)
        notes["kept"] = version
    now = engine.held().get(0)
    if now is not None and now is not held:
        store.write(f"{version} held", now)
        notes["held"] = f"{version} held"
    return reply, notes


def same(one: Tree, other: Tree) -> bool:
    """Whether two states are equal to the bit."""
    ours, theirs = dict(tree.named_leaves(one)), dict(tree.named_leaves(other))
    return ours.keys() == theirs.keys() and all(torch.equal(part, theirs[name]) for name, part in ours.items())


def said(error: BaseException) -> str:
    """What a server may know of an error: our own sentences, and of others the kind alone; they may quote data."""
    if isinstance(error, ConfigError | serialization.Unreadable):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__} (the site's own log has the rest)"
