"""FederatedData from a folder with one file or subfolder per client: CSV files, arrays, or images by class."""

from __future__ import annotations

import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from comfedl.data.cell_format import make_format
from comfedl.data.checked import check_clients
from comfedl.data.client_cache import ClientCache, cache_if_lazy
from comfedl.data.federated import Batch, FederatedData
from comfedl.data.file_sources import FileSource, ImageSource
from comfedl.data.from_tables import (
    FORMAT_KEYS,
    SPLITS,
    Shares,
    from_batches,
    from_table,
    rows_by_name,
    split_clients,
    user_path,
)
from comfedl.data.lazy_data import drawn_rows, lazy_data
from comfedl.data.lazy_tables import from_parquet
from comfedl.data.table_files import TABLES, read_table
from comfedl.data.tabular import Encoding
from comfedl.utils.errors import ConfigError, DataError

CLIENT, SPLIT = " client", " split"  # added columns; the space avoids a clash with those of the files
ARRAYS = (".npz", ".safetensors")
IMAGES = (".png", ".jpg", ".jpeg")
MAX_PIXELS = 1 << 26
MAX_UNPACKED, MAX_RATIO = 1 << 30, 100  # an archive of arrays may unpack to a gigabyte, or to so many times its size
BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error)

# (client, split or None if it is to be drawn, file)
ClientFiles = list[tuple[str, str | None, Path]]


def from_folder(
    path: Any,
    shares: Shares,
    target: str | None = None,
    size: int | Sequence[int] | None = None,
    lazy: bool = False,
    memory_mb: float | None = None,
    **options: Any,
) -> FederatedData:
    """See ``FederatedData.from_folder``."""
    cache = cache_if_lazy(lazy, memory_mb)
    folder = user_path(path)
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}; give one with a file or a subfolder per client.")
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    classes = sorted({sub.name for entry in entries if entry.is_dir() for sub in entry.iterdir() if sub.is_dir()})
    if classes:
        _reject_options("images", {"target": target, **options})
        return _from_images(folder, entries, classes, size, shares, cache)
    files = [found for entry in entries for found in _files(entry)]
    kinds = {file.suffix.lower() for _, _, file in files}
    if len(kinds) == 1 and kinds <= {*TABLES}:
        _reject_options("tables", {"size": size})
        if target is None:
            raise ConfigError('target is missing; name the column to predict, such as target = "outcome".')
        return _from_tables(folder, files, target, shares, options, cache)
    if kinds and kinds <= {*ARRAYS}:
        _reject_options("arrays", {"target": target, "size": size, **options})
        return _from_arrays(files, shares) if cache is None else _lazy_arrays(files, shares, cache)
    given = f"{', '.join(sorted(kinds))} files" if kinds else "no files"
    raise DataError(
        f"{folder} has {given}, but it must have per client a table (CSV, Parquet or Arrow), an .npz or "
        ".safetensors file with x and y, or a folder with such files or with one folder of images (PNG, JPEG) per "
        "class; use one kind for all clients."
    )


def _reject_options(what: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} is given, but it does not apply to a folder of {what}; leave it out.")


def _files(entry: Path) -> ClientFiles:
    """A client's files: the file itself, or those in its folder."""
    if entry.is_file():
        return [(entry.stem, None, entry)]
    inside = [file for file in sorted(entry.iterdir()) if file.is_file() and not file.name.startswith(".")]
    has_splits = bool(inside) and {file.stem for file in inside} <= {*SPLITS}
    return [(entry.name, file.stem if has_splits else None, file) for file in inside]


def _have_splits(files: ClientFiles) -> bool:
    """Whether the files are named after splits."""
    have_splits = {split is not None for _, split, _ in files}
    if len(have_splits) > 1:
        client = next(client for client, split, _ in files if split is None)
        raise DataError(
            f"Some clients have files named train, validation and test, but {client!r} does not; treat all alike."
        )
    return True in have_splits


def _from_tables(
    folder: Path,
    files: ClientFiles,
    target: str,
    shares: Shares,
    options: dict[str, Any],
    cache: ClientCache | None,
) -> FederatedData:
    format = make_format(**{key: options.pop(key, None) for key in FORMAT_KEYS})
    split = SPLIT if _have_splits(files) else None
    owners: dict[str, list[Any]] = {CLIENT: [client for client, _, _ in files]}
    if split is not None:
        owners[split] = [part for _, part, _ in files]
    if cache is not None:
        paths = [file for _, _, file in files]
        fed = from_parquet(paths, str(folder), CLIENT, target, shares, format, cache, owners, split=split, **options)
        assert fed.encoding is not None
        fed.encoding = replace(fed.encoding, client=None)
        return fed
    tables = [read_table(file, format) for _, _, file in files]
    names = list(tables[0].columns)
    for table, (client, _, file) in zip(tables, files, strict=True):
        if {*table.columns} != {*names}:
            odd = sorted({*table.columns} ^ {*names})[0]
            raise DataError(
                f"{file.name} of client {client!r} and {files[0][2].name} differ in the column {odd!r}; give all "
                "files the same columns."
            )
    sizes = [len(table) for table in tables]
    columns = {}
    for name in names:
        kinds = {"n" if (kind := table.columns[name].dtype.kind) in "biuf" else kind for table in tables}
        if len(kinds) > 1 and "M" in kinds:
            raise DataError(f"Column {name!r} has dates in some files of {folder} only; give all the same type.")
        columns[name] = np.concatenate([table.columns[name] for table in tables])
    columns |= {name: np.repeat(np.array(values, dtype=object), sizes) for name, values in owners.items()}
    notes = tuple(note for table in tables for note in table.notes)
    added = frozenset({CLIENT, SPLIT})
    table = replace(tables[0], columns=columns, source=str(folder), notes=notes, added=added)
    fed = from_table(table, CLIENT, target, shares, split=split, **options)
    assert fed.encoding is not None
    fed.encoding = replace(fed.encoding, client=None)
    return fed


def read_arrays(file: Path, needed: Sequence[str] = ("x", "y")) -> list[Tensor]:
    """The arrays x and y of a file, without unpickling anything."""
    try:
        if file.suffix.lower() == ".npz":
            _refuse_bomb(file)
            with np.load(file, allow_pickle=False) as stored:
                available = list(stored.files)
                found = {name: np.ascontiguousarray(stored[name]) for name in needed if name in available}
                arrays = {name: torch.from_numpy(array) for name, array in found.items()}
        else:
            arrays = load_file(file)
            available = list(arrays)
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{file} is too large for this machine's memory; give fewer samples.") from None
    except (OSError, ValueError, TypeError, LookupError, SafetensorError, *BROKEN_ZIP) as error:
        raise DataError(f"{file} cannot be read ({error}); give an .npz or .safetensors file with x and y.") from None
    for name in needed:
        if name not in arrays:
            raise DataError(f"{file} has no array {name!r}; it has {', '.join(available) or 'none'}.")
    return [arrays[name].float() if arrays[name].dtype == torch.float64 else arrays[name] for name in needed]


def _refuse_bomb(file: Path) -> None:
    """Refuse an archive that would unpack to far more than it takes."""
    with zipfile.ZipFile(file) as archive:
        whole = sum(member.file_size for member in archive.infolist())
    if whole > max(MAX_UNPACKED, MAX_RATIO * file.stat().st_size):
        raise DataError(f"{file} would unpack to {whole / 1e9:.3g} GB; store its arrays without compression.")


def _from_arrays(files: ClientFiles, shares: Shares) -> FederatedData:
    have_splits = _have_splits(files)
    found: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
    for client, split, file in files:
        x, y = read_arrays(file)
        x = x if x.is_floating_point() else x.float()
        batches = found[split or "train"]
        if client in batches:
            raise DataError(f"Client {client!r} has two files ({file.name} is the second); put its samples in one.")
        if len(x) != len(y):
            raise DataError(f"{file} has {len(x)} samples in x but {len(y)} in y; give one y for each x.")
        batches[client] = (x, y)
    return from_batches(found) if have_splits else split_clients(found["train"], shares)


def _lazy_arrays(files: ClientFiles, shares: Shares, cache: ClientCache) -> FederatedData:
    have_splits = _have_splits(files)
    found: dict[str, dict[str, Path]] = {split: {} for split in SPLITS}
    for client, split, file in files:
        own = found[split or "train"]
        if client in own:
            raise DataError(f"Client {client!r} has two files ({file.name} is the second); put its samples in one.")
        own[client] = file
    names = tuple(sorted(found["train"]))
    for split, own in found.items():
        if own:
            check_clients(split, names, own)
    sources = {split: FileSource([own.get(name) for name in names], read_arrays) for split, own in found.items() if own}
    given = {split: (source, None) for split, source in sources.items()}
    return lazy_data(names, given if have_splits else drawn_rows(names, sources["train"], shares), cache)


def _from_images(
    folder: Path, entries: list[Path], classes: list[str], size: Any, shares: Shares, cache: ClientCache | None
) -> FederatedData:
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
        raise DataError(f"{folder} has class folders, but no images (PNG, JPEG) in them.")
    with _opened(files[0][2]) as first:
        shape = first.size[::-1] if size is None else _parse_size(size)
    modes = set()
    for _, _, file in files:
        with _opened(file) as image:
            modes.add(image.mode)
    mode = "L" if modes <= {"L", "1", "I;16", "LA"} else "RGB"
    read = partial(read_image, mode=mode, shape=shape, resize=size is not None)
    if cache is not None:
        own: dict[str, list[tuple[int, Path]]] = {}
        for client, label, file in files:
            own.setdefault(client, []).append((label, file))
        names = tuple(sorted(own))
        labels = [torch.tensor([label for label, _ in own[name]]) for name in names]
        source = ImageSource([[file for _, file in own[name]] for name in names], labels, read)
        sample = (1, *shape) if mode == "L" else (3, *shape)
        encoding = Encoding(classes=tuple(classes), shape=sample, image=(mode, *shape))
        return lazy_data(names, drawn_rows(names, source, shares), cache, encoding)
    images = [read(file) for _, _, file in files]
    x = torch.from_numpy(np.stack(images))
    clients, y = np.array([name for name, _, _ in files], dtype=object), torch.tensor([label for _, label, _ in files])
    encoding = Encoding(classes=tuple(classes), shape=tuple(x.shape[1:]), image=(mode, *shape))
    batches = {name: (x[rows], y[rows]) for name, rows in rows_by_name(clients).items()}
    return split_clients(batches, shares, encoding)


def _parse_size(size: Any) -> tuple[int, int]:
    pair = [size, size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, int) and part > 0 and not isinstance(part, bool) for part in pair):
        raise ConfigError(f"size is {size!r}, but it must be a number of pixels, or [height, width].")
    return pair[0], pair[1]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An image whose header has been read; one that would take too much memory is refused before its pixels are."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("Images are read with Pillow, which is not installed; run: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file)
        with image:
            if image.size[0] * image.size[1] > MAX_PIXELS:
                raise DataError(f"{file} has {image.size[1]} x {image.size[0]} pixels, too many; give a smaller image.")
            yield image
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"An image cannot be read: {file} ({error}); replace or remove it.") from None


def read_image(file: Path, mode: str, shape: tuple[int, int], resize: bool) -> Any:
    """An image as float32 [channels, height, width] in [0, 1]."""
    with _opened(file) as image:
        if image.size[::-1] != tuple(shape):
            if not resize:
                raise DataError(
                    f"{file} has {image.size[1]} x {image.size[0]} pixels, but the first image has {shape[0]} x "
                    f"{shape[1]}; give size = [height, width] to resize all of them."
                )
            image = image.resize((shape[1], shape[0]))
        pixels = np.asarray(image.convert(mode), dtype=np.float32) / np.float32(255)
    return pixels[None] if mode == "L" else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
