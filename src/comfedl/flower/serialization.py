"""The content of messages: a JSON text, and one safetensors file with all tensors it names. Neither can execute code.

One file rather than one array per tensor: Flower sends every array separately, and a reply has many scalars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from comfedl.utils.errors import MalformedMessage
from comfedl.utils.files import SAFETENSORS_DTYPES
from comfedl.utils.tree import Tree

TENSORS, TEXT, KIND = "tensors", "text", "safetensors"
DEPTH = 32  # the most levels of a tree in a message
LONGEST = 300  # characters of a text from a site that are logged and recorded


class TensorPacker:
    """Collects the tensors of a message; ``add`` returns the names under which a tree's tensors are sent."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[Tensor] = []  # keeps the memory of added tensors from being reused, since it identifies them

    def add(self, part: Tree) -> Any:
        """Add a tree and return the same tree with names for tensors; a repeated tensor is sent only once."""
        if isinstance(part, dict):
            return {name: self.add(below) for name, below in part.items()}
        if not isinstance(part, Tensor):
            raise TypeError(f"A message holds a {type(part).__name__}; it may hold tensors and dicts of them.")
        identity = (part.data_ptr(), part.shape, part.stride(), part.dtype) if part.numel() else (id(part),)
        if identity not in self._names:
            self._names[identity] = str(len(self._names))
            self._alive.append(part)
            self._tensors[self._names[identity]] = part.detach().cpu().contiguous().clone()
        return self._names[identity]

    def record(self) -> ArrayRecord:
        """All tensors as one record."""
        content: bytes = save(self._tensors)
        return ArrayRecord({"all": Array("uint8", (len(content),), KIND, content)})


def unpack(names: Any, tensors: Mapping[str, Tensor], depth: int = DEPTH) -> Tree:
    """The inverse of ``TensorPacker.add``."""
    if isinstance(names, dict):
        if not depth:
            raise MalformedMessage(f"it is nested more than {DEPTH} deep")
        return {str(name): unpack(below, tensors, depth - 1) for name, below in names.items()}
    if not isinstance(names, str) or names not in tensors:
        given = repr(names[:60]) if isinstance(names, str) else f"({type(names).__name__})"
        raise MalformedMessage(f"it names a tensor {given} that it does not have")
    return tensors[names]


def shortened(text: Any) -> str:
    """A text from a site, on one line and cut: it is logged and recorded."""
    line = " ".join(text[: 2 * LONGEST].split()) if isinstance(text, str) else f"a {type(text).__name__}"
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def encode(body: Mapping[str, Any], tensors: ArrayRecord | None = None) -> RecordDict:
    """The content of a Flower message."""
    text = ConfigRecord({"json": json.dumps(body)})
    return RecordDict({TEXT: text} if tensors is None else {TEXT: text, TENSORS: tensors})


def decode(content: RecordDict, limit: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A message's body and tensors; ``limit`` is the most bytes that either may have.

    Raises:
        MalformedMessage: ``encode`` did not write it, or it is larger.
    """
    try:
        text = str(content.config_records[TEXT]["json"])
        data = content.array_records[TENSORS]["all"].data if TENSORS in content.array_records else b""
        for what, size in (("text", len(text)), ("tensors", len(data))):
            if limit is not None and size > limit:
                raise MalformedMessage(f"its {what} has {size:,} bytes, but what was asked for has at most {limit:,}")
        body, tensors = json.loads(text), load(data) if data else {}
    except MalformedMessage:
        raise
    except Exception as error:  # a site may send anything
        raise MalformedMessage(f"it cannot be read ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise MalformedMessage("its text is not an object")
    odd = next((tensor.dtype for tensor in tensors.values() if tensor.dtype not in SAFETENSORS_DTYPES), None)
    if odd is not None:
        raise MalformedMessage(f"it has numbers of the type {odd}, which no model has")
    return body, tensors
