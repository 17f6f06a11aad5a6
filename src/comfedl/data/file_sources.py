"""Clients whose samples are in files of their own: arrays, or images by class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfedl.data.sources import IntArray, Source
from comfedl.data.split import Batch
from comfedl.data.stored_array import FileState, StoredArray, of_npz, of_safetensors
from comfedl.utils.errors import DataError
from comfedl.utils.samples import Samples

Reader = Callable[[Path, Sequence[str]], list[Tensor]]
"""Reads arrays of a file by their names, whole."""


class FileSource(Source):
    """One .npz or .safetensors file per client, with arrays x and y; None for a client without one."""

    def __init__(self, files: Sequence[Path | None], read: Reader) -> None:
        self._files = [None if file is None else FileState.of(file) for file in files]
        self._read = read
        self._stored = [None if file is None else _stored(file) for file in files]
        self.by_sample = all(found is not None for found, file in zip(self._stored, files, strict=True) if file)
        sizes = [
            0 if file is None else self._size(file, found) for file, found in zip(files, self._stored, strict=True)
        ]
        self.sizes = np.array(sizes, dtype=np.int64)

    def _size(self, file: Path, found: dict[str, StoredArray] | None) -> int:
        """The number of samples, from the headers; of y alone if the file has to be unpacked."""
        if found is None:
            return len(self._read(file, ("y",))[0])
        if len(found["x"]) != len(found["y"]):
            raise DataError(
                f"{file} has {len(found['x'])} samples in x but {len(found['y'])} in y; give one y for each x."
            )
        return len(found["x"])

    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        x, y = self._arrays(i, ("x", "y"), rows, who)
        return x if x.is_floating_point() else x.float(), y

    def read_y(self, i: int, who: str) -> Samples:
        return self._arrays(i, ("y",), np.arange(self.sizes[i]), who)[0]

    def _arrays(self, i: int, names: Sequence[str], rows: IntArray, who: str) -> list[Tensor]:
        file, stored = self._files[i], self._stored[i]
        assert file is not None
        if stored is not None:
            found = [stored[name].read(0, rows, who) for name in names]
        else:
            file.check(who)
            try:
                found = self._read(file.path, names)
            except DataError as error:
                raise DataError(f"{who} cannot be read: {error}") from None
            if len(rows) < self.sizes[i]:
                found = [part.index_select(0, torch.from_numpy(rows)) for part in found]
        return [part.float() if part.dtype == torch.float64 else part for part in found]

    def identity(self, times: bool) -> Iterator[Any]:
        for file, stored in zip(self._files, self._stored, strict=True):
            yield None if file is None else file.identity(times)
            for name, part in sorted((stored or {}).items()):
                yield name, str(part.dtype), part.shape


def _stored(file: Path) -> dict[str, StoredArray] | None:
    """Where x and y are in the file; None if that takes more than reading bytes, or if something is wrong with it."""
    try:
        found = of_npz(file, ("x", "y")) if file.suffix.lower() == ".npz" else of_safetensors(file)
    except Exception:  # reading it whole says in a sentence what is wrong
        return None
    return found if found is not None and all(name in found and found[name].shape for name in "xy") else None


class ImageSource(Source):
    """One image per sample; each is decoded when it is read."""

    def __init__(self, files: Sequence[Sequence[Path]], labels: Sequence[Tensor], read: Callable[[Path], Any]) -> None:
        self._files, self._labels, self._read = [[FileState.of(file) for file in own] for own in files], labels, read
        self.sizes = np.array([len(own) for own in files], dtype=np.int64)

    def read(self, i: int, rows: IntArray, who: str) -> Batch:
        images = []
        for row in rows.tolist():
            self._files[i][row].check(who)
            try:
                images.append(self._read(self._files[i][row].path))
            except DataError as error:
                raise DataError(f"{who} cannot be read: {error}") from None
        return torch.from_numpy(np.stack(images)), self._labels[i].index_select(0, torch.from_numpy(rows))

    def read_y(self, i: int, who: str) -> Samples:
        return self._labels[i]

    def identity(self, times: bool) -> Iterator[Any]:
        for own, labels in zip(self._files, self._labels, strict=True):
            yield [file.identity(times) for file in own]
            yield labels
