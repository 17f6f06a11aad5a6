"""Atomic file writes, and safetensors files that are written a few rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
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
TensorSpec = tuple[torch.dtype, Sequence[int]]


def sync(file: IO[bytes] | IO[str]) -> None:
    """Flush a file to disk, past the buffers of Python and of the system."""
    file.flush()
    os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new one. Only the owner can read a private one."""
    temporary = path.with_name(f"{_partial_prefix(path.name)}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
            sync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_partial_files(folder: Path, names: Collection[str]) -> None:
    """Remove what killed processes left of ``write_atomic`` to these files; no other process may be writing them."""
    prefixes = {_partial_prefix(name) for name in names}
    for path in folder.iterdir():
        if path.name.rstrip("0123456789") in prefixes:
            path.unlink(missing_ok=True)


def _partial_prefix(name: str) -> str:
    return f".{name[:60]}."


class TensorFile:
    """Writes tensors of known dtypes and shapes to an open file in the safetensors format, rows in any order.

    So only the rows that are being written need to be in memory.
    """

    def __init__(self, file: IO[bytes], specs: Mapping[str, TensorSpec]) -> None:
        self._file, self._specs = file, specs
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {}
        end = 0
        # The widest dtypes first, so that every number is aligned.
        for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._starts[name], end = end, end + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        self._base = self._position = 8 + len(text)

    def write(self, name: str, part: Tensor, row: int = 0) -> None:
        """Write a tensor, or some of its rows, starting at ``row``."""
        dtype, shape = self._specs[name]
        place = self._base + self._starts[name] + row * dtype.itemsize * torch.Size(shape[1:]).numel()
        if place != self._position:
            self._file.seek(place)
        data = part.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        self._position = place + data.nbytes
