"""Decoders of the data sets' file formats: idx, PNG, and pickled arrays without running code from the pickle."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.utils.errors import DataError


def from_idx(data: bytes, dimensions: int) -> NDArray[np.uint8]:
    """Decode an idx file of bytes: 0, 0, 8, the number of dimensions, the big-endian shape, the data."""
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    if data[:4] != bytes((0, 0, 8, dimensions)) or len(data) - start != np.prod(shape):
        raise DataError(f"This is not an idx file of bytes in {dimensions} dimensions.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def to_idx(array: NDArray[np.uint8]) -> bytes:
    """Encode an array of bytes as an idx file."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


# Enough of PNG for CIFAR-10, instead of a dependency on Pillow.

_PNG_LIMIT = 64 << 20


def from_png(data: bytes) -> NDArray[np.uint8]:
    """Decode a non-interlaced 8-bit RGB or RGBA PNG to [height, width, channels]."""
    header, packed = _png_chunks(data)
    width, height, depth, colour, *methods = struct.unpack(">IIBBBBB", header)
    channels = {2: 3, 6: 4}.get(colour, 0)
    if depth != 8 or not channels or methods != [0, 0, 0]:
        raise DataError("This PNG is not 8-bit RGB or RGBA without interlacing.")
    stride = 1 + width * channels  # the first byte of a row is its filter type
    if not 0 < height * stride <= _PNG_LIMIT:
        raise DataError(f"A PNG of {width} x {height} pixels is empty or larger than {_PNG_LIMIT:,} bytes.")
    raw = zlib.decompressobj().decompress(packed, height * stride + 1)
    if len(raw) != height * stride:
        raise DataError(f"The PNG's data do not decode to {height} rows of {width} pixels.")
    rows = np.frombuffer(raw, np.uint8).reshape(height, stride)
    image = rows[:, 1:].copy()
    above = np.zeros(stride - 1, np.uint8)
    for kind, row in zip(rows[:, 0].tolist(), image, strict=True):
        if kind == 1:  # Sub: the difference to the left pixel, modulo 256
            row[:] = np.cumsum(row.reshape(width, channels), axis=0, dtype=np.uint8).ravel()
        elif kind == 2:  # Up: the difference to the pixel above
            row += above
        elif kind in (3, 4):
            row[:] = np.frombuffer(_unfilter(row.tolist(), above.tolist(), channels, kind == 4), np.uint8)
        elif kind != 0:
            raise DataError(f"The PNG has the filter {kind}, but only 0 to 4 exist.")
        above = row
    return image.reshape(height, width, channels)


def _png_chunks(data: bytes) -> tuple[bytes, bytes]:
    """The header and the concatenated data of a PNG; checks the checksum of each chunk."""
    at, header, packed = 8, b"", []
    while data[:8] == b"\x89PNG\r\n\x1a\n" and at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body, end = data[at + 4 : at + 8], data[at + 8 : at + 8 + length], at + 12 + length
        if end > len(data) or zlib.crc32(kind + body) != struct.unpack_from(">I", data, end - 4)[0]:
            raise DataError("The PNG is truncated or damaged.")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed.append(body)
        elif kind == b"IEND":
            break
        at = end
    if len(header) != 13:
        raise DataError("This is not a PNG.")
    return header, b"".join(packed)


def _unfilter(row: list[int], above: list[int], channels: int, paeth: bool) -> bytes:
    """Undo the Average or Paeth filter: each byte depends on the one before, so this is a plain loop."""
    out = [0] * channels  # the pixel left of the row
    corner = [0] * channels + above
    for value, up, upper_left in zip(row, above, corner, strict=False):
        left = out[-channels]
        guess = (left + up) // 2
        if paeth:
            estimate = left + up - upper_left
            guess = min(left, up, upper_left, key=lambda near: abs(estimate - near))
        out.append((value + guess) & 255)
    return bytes(out[channels:])


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise DataError(f"The pickle asks for the codec {encoding!r}, but a pickled array needs only latin1.")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays in plain containers and refuses any other class or function."""

    # Taken from an array, since numpy 1 and 2 name its module differently.
    _RECONSTRUCT = np.empty(0).__reduce__()[0]
    _ALLOWED: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # Protocol 2 writes bytes this way. The original function would accept any codec.
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise DataError(f"The pickle asks for {module}.{name}, which no array needs, so it is refused.")
        return self._ALLOWED[module, name]


def unpickle_npy(data: bytes) -> Any:
    """The single object in a .npy file, without ``np.load(allow_pickle=True)``, which would run code from the file."""
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise DataError("This .npy file is not of version 1.0.")
        np.lib.format.read_array_header_1_0(stream)
        return _ArrayUnpickler(stream).load().item()
    except DataError:
        raise
    except Exception as error:  # a broken pickle may raise almost anything
        raise DataError(f"This is not a .npy file with one pickled object: {error}") from error
