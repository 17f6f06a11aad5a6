"""The site's side: runs the requested steps on its client, and stores the client's state in a folder.

Each request names the version of the state to start from. So when a round is repeated, after the server or a site
restarted, it starts from the same state as the first time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from comfedl.engines.embedded import Embedded, LocalReplies
from comfedl.flower import serialization
from comfedl.training.personal_models import file_name
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError, Diverged, MalformedMessage
from comfedl.utils.files import write_atomic
from comfedl.utils.tree import Tree

logger = logging.getLogger("comfedl")

LOCAL_STEPS = ("personal",)  # steps whose reply must not leave the site


def held_name(version: str) -> str:
    """The name of the state that a client holds within a round, after the step with this version."""
    return f"{version} held"


class StateStore:
    """The versions of a client's state in one run, each an atomically written file."""

    def __init__(self, folder: Path, client: str, run: str) -> None:
        self._folder = folder / _own_name(folder, client) / file_name(run)
        self.keys = self._folder.with_name(f"{file_name(run)}.keys.json")  # for secure aggregation

    def read(self, version: str) -> Tree | None:
        """The state of a version; None if it is missing."""
        path = self._path(version)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return serialization.unpack(json.loads(file.metadata()["tree"]), tensors)

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
        """Delete versions that the server can no longer request, and leftovers of interrupted writes."""
        kept = {self._path(version).name for version in versions}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, version: str) -> Path:
        return self._folder / f"{file_name(version)}.safetensors"


def _own_name(folder: Path, client: str) -> str:
    """The name of a client's folder, apart from others' also where the file system ignores case."""
    name = file_name(client)
    written_before = folder.is_dir() and name in os.listdir(folder)  # by a version without hashes
    has_capitals = any("A" <= letter <= "Z" for letter in client)
    return file_name(client, distinct=has_capitals and not written_before)


def run_steps(
    engine: Embedded, store: StateStore, body: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> RecordDict:
    """Run the steps that a message requests, one after another; a step that fails does not stop the others."""
    packer, answers, written = serialization.TensorPacker(), [], set()
    for request in body["asks"]:
        try:
            reply, notes = run_step(engine, store, request, serialization.unpack(request["message"], tensors))
            written |= {str(notes[name]) for name in ("kept", "held") if name in notes}
            answers.append({"reply": packer.add(reply), **notes})
        except Diverged as error:
            # As text, since NaN and infinity are not valid JSON.
            answers.append({"diverged": [error.step, repr(error.loss), repr(error.weight)]})
        except Exception as error:  # the details stay in the site's log
            logger.exception("Step %r of round %s failed.", request.get("step"), request.get("round"))
            answers.append({"error": public_message(error)})
    store.drop_all_but({*body["keep"], *written})
    return serialization.encode({"answers": answers}, packer.record())


def run_step(
    engine: Embedded, store: StateStore, request: Mapping[str, Any], message: Tree
) -> tuple[Tree, dict[str, Any]]:
    """A step's reply, and what the site keeps of it."""
    step, round, use, version = str(request["step"]), int(request["round"]), request["use"], str(request["version"])
    if step in LOCAL_STEPS:
        raise MalformedMessage(f"the result of step {step!r} must not leave the site")
    notes: dict[str, Any] = {}
    before = None if use is None else store.read(use)
    if use is not None and before is None:
        logger.warning("The state %s is missing; this client starts from its initial state.", use)
        notes["anew"] = True
    engine.restore({} if before is None else {0: before})
    held = None if request["hold"] is None else store.read(request["hold"])
    engine.hold(round, {} if held is None else {0: held})
    replies = engine.run(step, [0], message, round)
    assert isinstance(replies, LocalReplies)  # one client is never stacked
    reply = replies.whole()[0]
    engine.commit_round()
    after = engine.states().get(0)
    if after is not None and (before is None or not _equal(before, after)):
        store.write(version, after)
        notes["kept"] = version
    now = engine.held().get(0)
    if now is not None and now is not held:
        notes["held"] = held_name(version)
        store.write(notes["held"], now)
    return reply, notes


def _equal(one: Tree, other: Tree) -> bool:
    ours, theirs = dict(tree.named_leaves(one)), dict(tree.named_leaves(other))
    return ours.keys() == theirs.keys() and all(torch.equal(part, theirs[name]) for name, part in ours.items())


def public_message(error: BaseException) -> str:
    """What the server may learn about an error: its type, and messages by comfedl; others may quote data."""
    if isinstance(error, ConfigError | MalformedMessage):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__} (see the site's log)"
