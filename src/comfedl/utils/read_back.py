"""Reads what an earlier run wrote, which may have been cut, edited or made up since.

Size, encoding, nesting and types are bounded, and whatever is wrong is one sentence with the file and the line.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from comfedl.utils.errors import ComfedlError, RunFolderError
from comfedl.utils.files import SAFETENSORS_DTYPES

MAX_TEXT = 1 << 26  # bytes of a text that is read whole
MAX_LINE = 1 << 22  # bytes of a line of records
MAX_DEPTH = 16  # levels of nested lists and objects
MAX_KEYS = 10_000  # values of a row
LARGEST = 2**63  # integers are below, as in the files that are written

Value = float | int | str | None
Row = dict[str, Value]


@contextmanager
def unreadable(path: Path, advice: str = "give another folder", what: str = "") -> Iterator[None]:
    """Turn any error in reading a file into a sentence that names it; ``what`` may say " as a model"."""
    try:
        yield
    except ComfedlError:
        raise
    except Exception as error:  # a damaged file may raise anything
        text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())[:200]
        raise RunFolderError(f"{path} cannot be read{what} ({text}); {advice}.") from None


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """The whole of a text file in UTF-8."""
    with unreadable(path):
        if not path.is_file():
            raise ValueError("it is not a file" if path.exists() else "there is no such file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        return data.decode("utf-8")


def read_toml(path: Path) -> dict[str, Any]:
    """A config, of plain values only."""
    text = read_text(path)
    with unreadable(path):
        settings = tomllib.loads(text.removeprefix("\ufeff"))
        check_plain(settings)
        return settings


def read_json(path: Path, limit: int = MAX_TEXT) -> Any:
    """A JSON file, of plain values only."""
    text = read_text(path, limit)
    with unreadable(path):
        return parse_json(text)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise RunFolderError(f"{path} cannot be read (it holds no JSON object); give another folder.")
    return found


def parse_json(text: str | bytes) -> Any:
    """A JSON text, of plain values only; raises a ValueError for any other."""
    try:
        found = _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    check_plain(found)
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of rounds.jsonl or clients.jsonl, without a last line that is still being written."""
    for number, line in read_lines(path):
        yield parse_row(path, number, line)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file, with their numbers."""
    with unreadable(path), path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise RunFolderError(f"{path}, line {number}, has more than {MAX_LINE:,} bytes; give another folder.")
            if not line.endswith(b"\n"):
                return
            yield number, line


def parse_row(path: Path, number: int | None, line: bytes) -> Row:
    """A line of records: numbers by name, among them the round, and in clients.jsonl the client's name.

    ``number`` is the line's, if it is known.
    """
    try:
        row = _DECODER.decode(line.decode("utf-8"))
        _check_row(row, path.name.startswith("clients"))
    except (ValueError, RecursionError) as error:
        where = str(path) if number is None else f"{path}, line {number},"
        text = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise RunFolderError(f"{where} cannot be read ({text}); restore the file, or give another folder.") from None
    found: Row = row
    return found


def _check_row(row: Any, of_client: bool) -> None:
    if not isinstance(row, dict) or len(row) > MAX_KEYS:
        raise ValueError("it is no object of numbers")
    for name, value in row.items():
        if not isinstance(value, int | float | None) and not (name == "client" and isinstance(value, str)):
            raise ValueError(f"its {name[:60]!r} is not a number")
    if not is_whole(row.get("round"), 0):
        raise ValueError("it has no round")
    if of_client and not isinstance(row.get("client"), str):
        raise ValueError("it has no client")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file."""
    with unreadable(path, "give a .safetensors file", " as a model"):
        tensors: dict[str, Tensor] = load_file(path)
        check_dtypes(tensors)
        return tensors


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers of a type that no model or state has."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name[:60]!r} has the type {tensor.dtype}")


def check_plain(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise a ValueError unless all of it are numbers, texts, lists and dicts, not too deep."""
    if isinstance(value, dict | list):
        if not depth:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        for part in value.values() if isinstance(value, dict) else value:
            check_plain(part, depth - 1)
    elif not isinstance(value, str | float | None) and not (isinstance(value, int) and abs(value) < LARGEST):
        raise ValueError(f"it has a {type(value).__name__} where only numbers and texts may be")


def is_whole(value: Any, least: int, most: int = LARGEST - 1) -> bool:
    """Whether a value is an integer within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _bounded_int(text: str) -> int:
    if len(text) > 20 or not -LARGEST <= int(text) < LARGEST:
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_bounded_int)
