"""Arrays in files, read by their place in the file: what is not asked for is neither read nor mapped into memory."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.utils.errors import DataError

# About as many bytes are copied in the time of one more call.
CALL = 8192
SAFETENSORS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


KNOWN_BY = (
    " Files of data on disk (lazy) are known by their size and time of change, so a copy or a touched file counts as "
    "other data; cp -p and rsync -a keep the times."
)
"""What to add when such data are refused as others."""


class FileState(NamedTuple):
    """A file as it was when the run began; another size or time of change means other data."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns)

    def identity(self, times: bool) -> tuple[str | int, ...]:
        """What identifies the file's content, wherever its folder is; with ``times``, also when it was changed."""
        return (self.path.name, self.size, self.mtime_ns) if times else (self.path.name, self.size)

    def check(self, who: str, found: os.stat_result | None = None) -> None:
        """Raise DataError if the file is not as it was."""
        try:
            found = found or os.stat(self.path)
        except OSError as error:
            raise unreadable(who, self.path, error) from None
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            raise changed(who, self.path)


def unreadable(who: str, path: Path, error: OSError) -> DataError:
    """The error about a file that was there when the run began."""
    return DataError(
        f"{who} cannot be read any more: {path}: {error.strerror or error}; leave the files in place while a run reads "
        "from them, then continue it with resume."
    )


def changed(who: str, path: Path) -> DataError:
    """The error about a file that is not as it was."""
    return DataError(
        f"{who} cannot be read: {path} has changed since the data were opened; leave the files as they are while a run "
        "reads from them, or begin a new run."
    )


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a file: its rows follow one another from ``offset`` on."""

    file: FileState
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample."""
        return self.like().nbytes

    def like(self) -> Tensor:
        """One row without its numbers, with the shape and dtype."""
        return torch.empty((1, *self.shape[1:]), dtype=self.dtype, device="meta")

    def read(self, start: int, rows: NDArray[np.int64], who: str) -> Tensor:
        """These rows, counted from the row ``start``; ``who`` names the client in errors."""
        out = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        width = out[:1].nbytes
        if not len(rows) or not width:
            return out
        try:
            file = os.open(self.file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise unreadable(who, self.file.path, error) from None
        try:
            self.file.check(who, os.fstat(file))
            first = int(rows.min())
            span = int(rows.max()) - first + 1
            runs = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1, [len(rows)]]).tolist()
            if len(runs) > 2 and span * width <= (len(runs) - 1) * CALL:
                whole = torch.empty((span, *self.shape[1:]), dtype=self.dtype)
                self._fill(file, whole, start + first, who)
                torch.index_select(whole, 0, torch.from_numpy(rows - first), out=out)
            else:
                for begin, end in pairwise(runs):
                    self._fill(file, out[begin:end], start + int(rows[begin]), who)
        finally:
            os.close(file)
        return out

    def _fill(self, file: int, out: Tensor, row: int, who: str) -> None:
        """Fill a tensor with the rows from this one on."""
        left = memoryview(out.view(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        place = self.offset + row * (out.nbytes // len(out))
        while left:
            try:
                count = os.preadv(file, [left], place)
            except OSError as error:
                raise unreadable(who, self.file.path, error) from None
            if not count:
                raise changed(who, self.file.path)
            left, place = left[count:], place + count


def of_memmap(where: str, array: NDArray[Any]) -> StoredArray | None:
    """The place in its file of a memory-mapped array; None for one in memory."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    if root.mode == "c":
        raise DataError(
            f"{where} is mapped copy-on-write, so what is in memory may differ from the file that is read; open it "
            'with mmap_mode="r".'
        )
    dtype = _torch_dtype(array.dtype)
    if dtype is None or not array.flags.c_contiguous:
        raise DataError(
            f"{where} is a view of a file that skips parts of it, or in another byte order; give whole rows of "
            "an array in C order with the machine's own byte order."
        )
    inside = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return StoredArray(FileState.of(Path(root.filename)), int(root.offset) + inside, dtype, array.shape)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
    except (TypeError, ValueError):
        return None


def of_npz(path: Path, names: Sequence[str]) -> dict[str, StoredArray] | None:
    """Where these arrays are in an .npz file; None if it has to be unpacked, as of ``savez_compressed``."""
    state, found = FileState.of(path), {}
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        for name in names:
            member = members.get(f"{name}.npy")
            if member is None or member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                return None
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                if version not in ((1, 0), (2, 0)):
                    return None
                if version == (1, 0):
                    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
                else:
                    shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
                header = stream.tell()
            torch_dtype = _torch_dtype(dtype)
            if torch_dtype is None or (fortran and len(shape) > 1) or not shape:
                return None
            with path.open("rb") as file:  # the name and the extra field stand between the zip header and the member
                file.seek(member.header_offset + 26)
                name_length, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            offset = member.header_offset + 30 + name_length + extra
            found[name] = StoredArray(state, offset + header, torch_dtype, tuple(shape))
    return found


def of_safetensors(path: Path) -> dict[str, StoredArray]:
    """Where the arrays are in a .safetensors file whose header has been checked."""
    state = FileState.of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        described: Mapping[str, Any] = json.loads(file.read(length))
    return {
        name: StoredArray(state, 8 + length + int(of["data_offsets"][0]), SAFETENSORS[of["dtype"]], tuple(of["shape"]))
        for name, of in described.items()
        if name != "__metadata__" and of["dtype"] in SAFETENSORS
    }
