"""Files and arrays that would be used in another way than they were meant, or fill the memory.

The rows are those of the attacks found by hand.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.core.simplex import project
from comfedl.data.from_folders import read_arrays

WORDS = ["-", "?", "unknown", "n.d."]


def table(folder: Path, cells: list[str]) -> Path:
    path = folder / "rows.csv"
    lines = [f"{'ab'[k % 2]};{cell};{'yes' if k % 3 else 'no'}" for k, cell in enumerate(cells)]
    path.write_text("\n".join(["site;dose;outcome", *lines]) + "\n")
    return path


def load(path: Path, **options: Any) -> cf.FederatedData:
    from comfedl.data.tabular import read_csv

    return cf.FederatedData.from_dataframe(read_csv(path), client="site", target="outcome", **options)


@pytest.mark.parametrize("word", WORDS)
def test_row_14_a_column_of_numbers_with_a_few_texts_is_refused(word: str, tmp_path: Path) -> None:
    """It became a category for every number, without a word."""
    cells = [f"{k / 7:.3f}" for k in range(60)]
    with pytest.raises(cf.DataError, match=r"'dose' of rows.csv has numbers in 59 of 60 rows, but .* in row 31"):
        load(table(tmp_path, [*cells[:30], word, *cells[31:]]))
    cells[30] = ""
    assert load(table(tmp_path, cells), missing="drop").train.x.shape[1] == 1


def test_row_14_decimal_commas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(cf.DataError, match=r"decimal commas such as '0,000'"):
        load(table(tmp_path, [f"{k},{k:03d}" for k in range(60)]))


def test_row_14_codes_may_still_be_categories(tmp_path: Path) -> None:
    fed = load(table(tmp_path, [*(["1", "2", "3"] * 19), "4b", "odd", "1"]))
    assert fed.encoding is not None and fed.encoding.columns[0].names == [*(f"dose={k}" for k in "123"), "dose=(other)"]
    assert load(table(tmp_path, [f"{k // 10}x" for k in range(60)])).train.x.shape[1] == 6


def test_row_15_an_image_bomb_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for name, side in (("large", 9_000), ("larger", 60_000)):
        header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
        data = zlib.compress(bytes((side // 8 + 1) * 10))
        image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
        for client in "ab":
            place = tmp_path / name / client / "ill"
            place.mkdir(parents=True)
            (place / "bomb.png").write_bytes(image)
        with pytest.raises(cf.DataError, match=r"too many; give a smaller image|An image cannot be read: .*bomb\.png"):
            cf.FederatedData.from_folder(tmp_path / name, size=8)


def test_row_15_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (300000000,), }"
        header += b" " * (118 - len(header) - 1) + b"\n"
        member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        block = bytes(1 << 24)
        for _ in range(72):
            member.write(block)
    with pytest.raises(cf.DataError, match=r"would unpack to 1\.21 GB"):
        read_arrays(path, ["x"])
    np.savez_compressed(tmp_path / "fine.npz", x=np.zeros((10, 3)), other=np.zeros(3))
    assert read_arrays(tmp_path / "fine.npz", ["x"])[0].shape == (10, 3)
    with pytest.raises(cf.DataError, match="has no array 'y'; it has x, other"):
        read_arrays(tmp_path / "fine.npz")


def test_row_15_dual_weights_of_infinite_steps_are_weights() -> None:
    """dual_lr = 1e308 ended in a raw IndexError."""
    for values in ([1.0, torch.inf, torch.inf], [0.0, 1e308, -1e308], [1e308, 1e308, 0.0], [-torch.inf, 0.0, 0.5]):
        found = project(torch.tensor(values, dtype=torch.float64))
        assert bool((found >= 0).all()) and float(found.sum()) == pytest.approx(1)
    assert project(torch.tensor([1.0, torch.inf, torch.inf], dtype=torch.float64)).tolist() == [0.0, 0.5, 0.5]


def test_row_16_masked_arrays_are_refused() -> None:
    """Their mask was lost, so that what was marked as missing was trained on."""
    x = np.ma.masked_equal(np.arange(12.0).reshape(6, 2), 3.0)
    y = np.array([0, 1] * 3)
    with pytest.raises(cf.DataError, match="x of client 'a' in train is a masked array with masked values"):
        cf.FederatedData({"a": (x, y)})
    with pytest.raises(cf.DataError, match="y of client 'a' in train is a masked array with masked values"):
        cf.FederatedData({"a": (x.data, np.ma.masked_equal(y, 1))})
    with pytest.raises(cf.DataError, match="x in train is a masked array with masked values"):
        cf.FederatedData.from_flat((x, y, [0, 6]))
    with pytest.raises(cf.DataError, match="Column 'dose' is a masked array"):
        columns = {"site": np.array(list("aabbab")), "dose": x[:, 1], "outcome": y}
        cf.FederatedData.from_dataframe(columns, client="site", target="outcome")
    assert cf.FederatedData({"a": (np.ma.array(x.data), y)}).train.x.shape == (6, 2)  # nothing is masked
