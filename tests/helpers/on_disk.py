"""The same federation in memory and on disk, in every form that can be read when asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import comfedl as cf

NAMES = ("ann", "bob", "cid", "dee", "eva", "fay")
SIZES = (31, 12, 57, 20, 44, 9)
WIDTH, CLASSES = 5, 3

Made = tuple[cf.FederatedData, cf.FederatedData]
"""In memory, and on disk."""


class Stored(Dataset[Any]):
    """A Dataset that counts how often a sample is asked for."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.asked = x, y, 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> Any:
        self.asked += 1
        x = {key: part[k] for key, part in self.x.items()} if isinstance(self.x, dict) else self.x[k]
        return x, self.y[k]


def arrays(seed: int = 0) -> dict[str, tuple[Any, Any]]:
    """x and y of each client; the labels can be learnt."""
    rng, found = np.random.default_rng(seed), {}
    weights = np.random.default_rng(9).normal(size=(WIDTH, CLASSES))
    for name, size in zip(NAMES, SIZES, strict=True):
        x = rng.normal(size=(size, WIDTH)).astype(np.float32)
        found[name] = x, (x @ weights + rng.normal(size=(size, CLASSES))).argmax(axis=1)
    return found


def mapped(folder: Path, name: str, array: Any) -> Any:
    """The array in a file, mapped into memory."""
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def flat_arrays(folder: Path, mb: float) -> Made:
    """One file of x and one of y for all clients."""
    splits, stored = {}, {}
    for split, seed in (("train", 0), ("validation", 1)):
        own = arrays(seed)
        x, y = (np.concatenate([own[name][k] for name in NAMES]) for k in (0, 1))
        offsets = np.concatenate([[0], np.cumsum(SIZES)])
        splits[split] = x, y, offsets
        stored[split] = mapped(folder, f"{split}-x", x), mapped(folder, f"{split}-y", y), offsets
    make = cf.FederatedData.from_flat
    return make(**splits, names=NAMES), make(**stored, names=NAMES, lazy=True, memory_mb=mb)


def dict_arrays(folder: Path, mb: float) -> Made:
    """Files of each client, and a dict as x of which one part is in memory."""
    splits: list[Any] = [{}, {}]
    stored: list[Any] = [{}, {}]
    for k in (0, 1):
        for name, (x, y) in arrays(k).items():
            ids = np.arange(len(x) * 2, dtype=np.int32).reshape(-1, 2)
            splits[k][name] = {"x": x, "ids": ids}, y
            stored[k][name] = {"x": mapped(folder, f"{k}-{name}", x), "ids": ids}, y
    return cf.FederatedData(*splits), cf.FederatedData(*stored, lazy=True, memory_mb=mb)


def npz(folder: Path, mb: float) -> Made:
    """A folder of .npz files, of whose samples shares are held out."""
    for name, (x, y) in arrays().items():
        np.savez(folder / f"{name}.npz", x=x.astype(np.float64), y=y)
    return _folder(folder, mb)


def packed_npz(folder: Path, mb: float) -> Made:
    """Compressed .npz files, which have to be unpacked whole, with files for each split."""
    for split, seed in (("train", 0), ("validation", 1), ("test", 2)):
        for name, (x, y) in arrays(seed).items():
            (folder / name).mkdir(exist_ok=True)
            np.savez_compressed(folder / name / f"{split}.npz", x=x, y=y)
    return _folder(folder, mb)


def safetensors(folder: Path, mb: float) -> Made:
    """A folder of .safetensors files."""
    from safetensors.numpy import save_file

    for name, (x, y) in arrays().items():
        save_file({"x": x, "y": y}, folder / f"{name}.safetensors")
    return _folder(folder, mb)


def images(folder: Path, mb: float) -> Made:
    """A folder of images by client and class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, (_, y) in arrays().items():
        for k, label in enumerate(y):
            path = folder / name / f"class-{label}"
            path.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(rng.normal(60 + 40 * label, 30, size=(4, 5, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(path / f"{k:03d}.png")
    return _folder(folder, mb)


def _folder(folder: Path, mb: float, **options: Any) -> Made:
    make = cf.FederatedData.from_folder
    return make(folder, **options), make(folder, lazy=True, memory_mb=mb, **options)


def table(seed: int = 0) -> dict[str, Any]:
    """Columns of all clients' samples, one client after another."""
    own, rng = arrays(seed), np.random.default_rng(3)
    columns: dict[str, Any] = {f"x{k}": np.concatenate([own[n][0][:, k] for n in NAMES]) for k in range(WIDTH)}
    count = sum(SIZES)
    return {
        "site": np.repeat(NAMES, SIZES),
        **columns,
        "age": rng.integers(20, 90, count),
        "ward": rng.choice(["a", "b", "c"], count),
        "smokes": rng.random(count) < 0.3,
        "y": np.concatenate([own[name][1] for name in NAMES]),
    }


def parquet(folder: Path, mb: float) -> Made:
    """A Parquet file with a row group for each client, and gaps that are filled in."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    columns = table()
    holes = np.random.default_rng(4).random(len(columns["age"])) < 0.1
    ages = [None if hole else int(age) for age, hole in zip(columns["age"], holes, strict=True)]
    whole = pa.table({**columns, "age": ages})
    with pq.ParquetWriter(folder / "all.parquet", whole.schema) as writer:
        start = 0
        for size in SIZES:
            writer.write_table(whole.slice(start, size))
            start += size
    make, path = cf.FederatedData.from_csv, folder / "all.parquet"
    options: dict[str, Any] = {"client": "site", "target": "y", "impute": "median"}
    return make(path, **options), make(path, lazy=True, memory_mb=mb, **options)


def parquet_folder(folder: Path, mb: float) -> Made:
    """A Parquet file for each client, of several row groups; rows that miss a value are left out."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    columns, start = table(), 0
    for name, size in zip(NAMES, SIZES, strict=True):
        own = {key: values[start : start + size].tolist() for key, values in columns.items() if key != "site"}
        own["age"][2] = None
        pq.write_table(pa.table(own), folder / f"{name}.parquet", row_group_size=13)
        start += size
    return _folder(folder, mb, target="y", missing="drop")


def datasets(folder: Path, mb: float) -> Made:
    """Torch Datasets, of whose samples shares are held out."""
    own = {name: Stored(torch.from_numpy(x), y) for name, (x, y) in arrays().items()}
    make = cf.FederatedData.from_datasets
    return make(own), make(own, lazy=True, memory_mb=mb)


def dict_datasets(folder: Path, mb: float) -> Made:
    """Torch Datasets with a dict as x, and others for validation, of some clients."""
    made = [
        {name: Stored({"x": torch.from_numpy(x), "ids": torch.arange(2 * len(x)).view(-1, 2)}, y) for name, (x, y) in
         arrays(seed).items()}
        for seed in (0, 1)
    ]  # fmt: skip
    del made[1]["cid"]
    make = cf.FederatedData.from_datasets
    return make(*made, None), make(*made, None, lazy=True, memory_mb=mb)


FORMS: dict[str, Callable[[Path, float], Made]] = {
    form.__name__: form
    for form in (
        *(flat_arrays, dict_arrays, npz, packed_npz, safetensors, images, parquet, parquet_folder),
        *(datasets, dict_datasets),
    )
}
