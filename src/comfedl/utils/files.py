"""Files that are written whole or not at all, and tensors that are written a few rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Shape = tuple[torch.dtype, Sequence[int]]


def sync(file: IO[bytes] | IO[str]) -> None:
    """Have what was written on the disk, not only under way to it."""
    file.flush()
    os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{_stem(path.name)}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            sync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sweep(folder: Path, names: Collection[str]) -> None:
    """Take away what a kill left of writing these files; nobody else may be writing them."""
    stems = {_stem(name) for name in names}
    for path in folder.iterdir():
        if path.name.rstrip("0123456789") in stems:
            path.unlink(missing_ok=True)


def _stem(name: str) -> str:
    return f".{name[:60]}."


class TensorFile:
    """Writes tensors of known types and shapes to an open file, as safetensors, in any order of their rows.

    So no more of them than one writes at a time need be in memory.
    """

    def __init__(self, file: IO[bytes], shapes: Mapping[str, Shape]) -> None:
        self._file, self._shapes = file, shapes
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {}
        at = 0
        # The widest first, so that each number lies at a multiple of its size.
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            self._starts[name], at = at, at + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        self._base = self._at = 8 + len(text)

    def write(self, name: str, part: Tensor, row: int = 0) -> None:
        """Write a tensor, or some of its rows from this one on."""
        dtype, shape = self._shapes[name]
        place = self._base + self._starts[name] + row * dtype.itemsize * torch.Size(shape[1:]).numel()
        if place != self._at:
            self._file.seek(place)
        data = part.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        self._at = place + data.nbytes
