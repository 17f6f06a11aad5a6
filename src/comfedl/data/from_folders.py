"""A folder with a file or a folder for each client: CSV files, arrays, or images in a folder for each class."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from comfedl.data.federated import Batch, FederatedData
from comfedl.data.from_tables import SPLITS, Shares, divided, federated, file_at, from_table, grouped
from comfedl.data.tabular import Encoding, Table, read_csv
from comfedl.utils.errors import ConfigError, DataError

CLIENT, SPLIT = " client", " split"  # columns of our own, beside those of the files
ARRAYS = (".npz", ".safetensors")
IMAGES = (".png", ".jpg", ".jpeg")

# (client, split or None where it is to be drawn, file)
Found = list[tuple[str, str | None, Path]]


def from_folder(
    path: Any,
    shares: Shares,
    target: str | None = None,
    size: int | Sequence[int] | None = None,
    **options: Any,
) -> FederatedData:
    """See ``FederatedData.from_folder``."""
    folder = file_at(path)
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}; give one with a file or a folder for each client.")
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    classes = sorted({sub.name for entry in entries if entry.is_dir() for sub in entry.iterdir() if sub.is_dir()})
    if classes:
        _refuse("images", {"target": target, **options})
        return _images(folder, entries, classes, size, shares)
    files = [found for entry in entries for found in _files(entry)]
    kinds = {file.suffix.lower() for _, _, file in files}
    if kinds == {".csv"}:
        _refuse("CSV files", {"size": size})
        if target is None:
            raise ConfigError('target is missing; say which column is to be predicted, such as target = "outcome".')
        return _tables(folder, files, target, shares, options)
    if kinds and kinds <= {*ARRAYS}:
        _refuse("arrays", {"target": target, "size": size, **options})
        return _arrays(files, shares)
    given = f"files of the kinds {', '.join(sorted(kinds))}" if kinds else "nothing of that kind"
    raise DataError(
        f"{folder} holds {given}, but it must hold for each client a CSV file, an .npz or .safetensors file with x and "
        "y, or a folder with such files or with a folder of images (PNG, JPEG) for each class; one kind for all."
    )


def _refuse(what: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} is given, but the folder holds {what}, which have no use for it; leave it out.")


def _files(entry: Path) -> Found:
    """A client's files: the one that has its name, or those in its folder."""
    if entry.is_file():
        return [(entry.stem, None, entry)]
    inside = [file for file in sorted(entry.iterdir()) if file.is_file() and not file.name.startswith(".")]
    told = bool(inside) and {file.stem for file in inside} <= {*SPLITS}
    return [(entry.name, file.stem if told else None, file) for file in inside]


def _splits(files: Found) -> bool:
    """Whether the files say which split they are."""
    told = {split is not None for _, split, _ in files}
    if len(told) > 1:
        client = next(client for client, split, _ in files if split is None)
        raise DataError(
            f"Some clients have files train, validation and test, but {client!r} has not; do the same for all."
        )
    return True in told


def _tables(folder: Path, files: Found, target: str, shares: Shares, options: dict[str, Any]) -> FederatedData:
    tables = [read_csv(file) for _, _, file in files]
    names = list(tables[0].columns)
    for table, (client, _, file) in zip(tables, files, strict=True):
        if {*table.columns} != {*names}:
            odd = sorted({*table.columns} ^ {*names})[0]
            raise DataError(
                f"{file.name} of client {client!r} and {files[0][2].name} differ in the column {odd!r}; give all files "
                "the same columns."
            )
    sizes = [len(table) for table in tables]
    columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in names}
    columns[CLIENT] = np.repeat(np.array([client for client, _, _ in files], dtype=object), sizes)
    split = SPLIT if _splits(files) else None
    if split is not None:
        columns[split] = np.repeat(np.array([part for _, part, _ in files], dtype=object), sizes)
    table = Table(columns, str(folder), written=True)
    fed = from_table(table, CLIENT, target, shares, split=split, **options)
    assert fed.encoding is not None
    fed.encoding = replace(fed.encoding, client=None)
    return fed


def read_arrays(file: Path, needed: Sequence[str] = ("x", "y")) -> list[Tensor]:
    """The arrays x and y of a file; nothing in it is executed."""
    try:
        if file.suffix.lower() == ".npz":
            with np.load(file, allow_pickle=False) as stored:
                held = {name: torch.from_numpy(np.ascontiguousarray(stored[name])) for name in stored.files}
        else:
            held = load_file(file)
    except (OSError, ValueError, TypeError, SafetensorError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}); give an .npz or .safetensors file with x and y.") from None
    for name in needed:
        if name not in held:
            raise DataError(f"{file} has no array {name!r}; it has {', '.join(held) or 'none'}.")
    return [held[name].float() if held[name].dtype == torch.float64 else held[name] for name in needed]


def _arrays(files: Found, shares: Shares) -> FederatedData:
    told = _splits(files)
    found: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
    for client, split, file in files:
        x, y = read_arrays(file)
        x = x if x.is_floating_point() else x.float()
        part = found[split or "train"]
        if client in part:
            raise DataError(f"Client {client!r} has two files ({file.name} is the second); put its samples in one.")
        if len(x) != len(y):
            raise DataError(f"{file} has {len(x)} samples in x but {len(y)} in y; give one y for each x.")
        part[client] = (x, y)
    return federated(found) if told else divided(found["train"], shares)


def _images(folder: Path, entries: list[Path], classes: list[str], size: Any, shares: Shares) -> FederatedData:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("Images are read with Pillow, which is not installed; run: pip install pillow") from None
    files = [
        (entry.name, classes.index(sub.name), file)
        for entry in entries
        if entry.is_dir()
        for sub in sorted(entry.iterdir())
        if sub.is_dir()
        for file in sorted(sub.iterdir())
        if file.suffix.lower() in IMAGES
    ]
    if not files:
        raise DataError(f"{folder} has folders for classes, but no images (PNG, JPEG) in them.")
    try:
        with Image.open(files[0][2]) as first:
            shape = first.size[::-1] if size is None else _size(size)
        modes = set()
        for _, _, file in files:
            with Image.open(file) as image:
                modes.add(image.mode)
        mode = "L" if modes <= {"L", "1", "I;16", "LA"} else "RGB"
        read = [read_image(file, mode, shape, resize=size is not None) for _, _, file in files]
    except OSError as error:
        raise DataError(f"An image in {folder} cannot be read ({error}); replace it or take it away.") from None
    x = torch.from_numpy(np.stack(read))
    owner, y = np.array([name for name, _, _ in files], dtype=object), torch.tensor([label for _, label, _ in files])
    encoding = Encoding(classes=tuple(classes), shape=tuple(x.shape[1:]), image=(mode, *shape))
    return divided({name: (x[own], y[own]) for name, own in grouped(owner).items()}, shares, encoding)


def _size(size: Any) -> tuple[int, int]:
    pair = [size, size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, int) and part > 0 and not isinstance(part, bool) for part in pair):
        raise ConfigError(f"size is {size!r}, but it must be a whole number of pixels, or [height, width].")
    return pair[0], pair[1]


def read_image(file: Path, mode: str, shape: tuple[int, int], resize: bool) -> Any:
    """An image as float32 [channels, height, width] from 0 to 1."""
    from PIL import Image

    with Image.open(file) as image:
        if image.size[::-1] != tuple(shape):
            if not resize:
                raise DataError(
                    f"{file} has {image.size[1]} x {image.size[0]} pixels, but the first image has {shape[0]} x "
                    f"{shape[1]}; give size = [height, width], to which all are resized."
                )
            image = image.resize((shape[1], shape[0]))  # type: ignore[assignment]
        pixels = np.asarray(image.convert(mode), dtype=np.float32) / np.float32(255)
    return pixels[None] if mode == "L" else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
