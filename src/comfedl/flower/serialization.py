"""What travels: a JSON text, and all tensors that it names in one safetensors file. Nothing in either can execute.

One file and not an array each, since Flower sends every array by itself, and a reply has many single numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from comfedl.utils.errors import ComfedlError
from comfedl.utils.tree import Tree

TENSORS, TEXT, KIND = "tensors", "text", "safetensors"


class Unreadable(ComfedlError, ValueError):
    """A message that is not what this version writes."""


class Packed:
    """Trees of tensors on their way: ``put`` gives what stands for one in the text."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[tuple[Any, ...], str] = {}
        self._seen: list[Tensor] = []  # kept, so that no other tensor takes the place of one that has gone

    def put(self, part: Tree) -> Any:
        """A tree as one of names; a tensor that stands in several places travels once."""
        if isinstance(part, dict):
            return {name: self.put(below) for name, below in part.items()}
        if not isinstance(part, Tensor):
            raise TypeError(f"A message holds a {type(part).__name__}; it may hold tensors and dicts of them.")
        place = (part.data_ptr(), part.shape, part.stride(), part.dtype) if part.numel() else (id(part),)
        if place not in self._places:
            self._places[place] = str(len(self._places))
            self._seen.append(part)
            self._tensors[self._places[place]] = part.detach().cpu().contiguous().clone()
        return self._places[place]

    def record(self) -> ArrayRecord:
        """All tensors as one record."""
        content: bytes = save(self._tensors)
        return ArrayRecord({"all": Array("uint8", (len(content),), KIND, content)})


def unpacked(part: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that ``put`` gave this for."""
    if isinstance(part, dict):
        return {str(name): unpacked(below, tensors) for name, below in part.items()}
    if not isinstance(part, str) or part not in tensors:
        raise Unreadable(f"it names a tensor {part!r} that it does not have")
    return tensors[part]


def content(body: Mapping[str, Any], tensors: ArrayRecord | None = None) -> RecordDict:
    """A message's content."""
    text = ConfigRecord({"json": json.dumps(body)})
    return RecordDict({TEXT: text} if tensors is None else {TEXT: text, TENSORS: tensors})


def opened(found: RecordDict) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A message's text and tensors.

    Raises:
        Unreadable: it is not what ``content`` gives.
    """
    try:
        body = json.loads(str(found.config_records[TEXT]["json"]))
        tensors = load(found.array_records[TENSORS]["all"].data) if TENSORS in found.array_records else {}
    except Exception as error:  # a site may send anything
        raise Unreadable(f"it cannot be read ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise Unreadable("its text is not an object")
    return body, tensors
