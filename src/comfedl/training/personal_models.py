"""Personal models on disk: one file per client or, for many clients, one file with a row per client in every tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import torch
from safetensors import safe_open
from safetensors.torch import save

from comfedl.core.learner import Model, Params
from comfedl.data.client_names import find
from comfedl.training.result import Result
from comfedl.utils import tree
from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import TensorFile, sync, write_atomic
from comfedl.utils.read_back import read_json, unreadable

MOST_FILES = 1000  # with more clients, their models go to one file
BATCH = 2**25  # approximate bytes of models that are computed and written at a time
MODELS, NAMES = "models.safetensors", "clients.json"
MAX_NAMES = 1 << 30  # bytes of the file with the names


def file_name(client: str, distinct: bool = False) -> str:
    """A file name for a client: unsafe characters are percent-encoded, long names are cut and get a hash.

    With ``distinct`` every name gets one, so that file systems that ignore case keep "Ward" and "ward" apart.
    """
    safe = quote(client, safe=" +=@,")
    safe = safe.replace(".", "%2E") if safe.startswith(".") else safe
    if len(safe) <= 200 and not distinct:
        return safe
    cut = safe if len(safe) <= 180 else safe[:180].rpartition("%")[0] or safe[:180]
    return f"{cut}~{hashlib.blake2b(client.encode(), digest_size=8).hexdigest()}"


def file_names(clients: Sequence[str]) -> list[str]:
    """A file name for each client; those that differ only in case from another one's get a hash."""
    plain = [file_name(client) for client in clients]
    alike = Counter(name.casefold() for name in plain)
    return [file_name(client, distinct=alike[name.casefold()] > 1) for client, name in zip(clients, plain, strict=True)]


def model_bytes(model: Model, left_out: Collection[str] = ()) -> bytes:
    """A model's parameters and buffers, but for some, in safetensors format."""
    tensors = {**model["params"], **model["buffers"]}
    content: bytes = save({name: part.contiguous() for name, part in tensors.items() if name not in left_out})
    return content


def write_personal(folder: Path, result: Result, left_out: Collection[str] = ()) -> None:
    """Write every client's personal model; if they are in one file, ``result`` then reads them from it.

    The parameters ``left_out`` are the same in all of them, and not written.
    """
    folder.mkdir(exist_ok=True)
    if len(result.names) <= MOST_FILES:
        names = file_names(result.names)
        for (client,) in client_batches(result):
            model = next(iter(result.ask_personal([client])))
            write_atomic(folder / f"{names[client]}.safetensors", model_bytes(model, left_out))
        return
    paths = {name: folder / f".{name}.part" for name in (MODELS, NAMES)}
    try:
        with paths[MODELS].open("wb") as file:
            _write_rows(file, result, left_out)
            sync(file)
        with paths[NAMES].open("w", encoding="utf-8") as listing:
            for k, name in enumerate(result.names):
                listing.write(f"{',' if k else '['}\n{json.dumps(name)}")
            listing.write("\n]\n")
            sync(listing)
        for name, path in paths.items():
            os.replace(path, folder / name)
    except BaseException:
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    stored, params, buffers = PersonalModels(folder, result.names), tuple(result.params), tuple(result.buffers)

    def read(clients: Sequence[int]) -> Iterator[Model]:
        for client in clients:
            row = {**{name: result.params[name] for name in left_out}, **stored.row(client)}
            yield Model(params={name: row[name] for name in params}, buffers={name: row[name] for name in buffers})

    result.ask_personal = read


def _write_rows(file: IO[bytes], result: Result, left_out: Collection[str]) -> None:
    """Write all clients' models, in the order of their names."""
    like, count = {**result.params, **result.buffers}, len(result.names)
    like = {name: part for name, part in like.items() if name not in left_out}
    rows = TensorFile(file, {name: (part.dtype, (count, *part.shape)) for name, part in like.items()})
    for clients in client_batches(result):
        models = list(result.ask_personal(clients))
        for kind in ("params", "buffers"):
            for name in models[0][kind]:
                if name not in left_out:
                    rows.write(name, torch.stack([model[kind][name] for model in models]), clients[0])


def client_batches(result: Result) -> Iterator[range]:
    """Ranges of clients whose models are computed together when all are written."""
    count = len(result.names)
    batch = 1
    if count > MOST_FILES:
        batch = max(1, min(MOST_FILES, BATCH // tree.nbytes({**result.params, **result.buffers})))
    return (range(start, min(start + batch, count)) for start in range(0, count, batch))


class PersonalModels(Mapping[str, Params]):
    """The personal models in a run folder, read from the file on access.

    Args:
        folder: the folder ``personal`` of a run with more than a thousand clients.
        names: the clients' names; by default they are read from the folder.
    """

    def __init__(self, folder: Path, names: Sequence[str] | None = None) -> None:
        self._path = folder / MODELS
        with unreadable(folder):
            self.names = _read_names(folder / NAMES) if names is None else names
            self._file()

    def __getitem__(self, client: str) -> Params:
        row = find(self.names, client)
        if row is None:
            raise KeyError(client)
        return self.row(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def row(self, place: int) -> Params:
        """The model of the client at this position."""
        with unreadable(self._path), self._file() as file:
            return {name: file.get_slice(name)[place : place + 1][0].clone() for name in file.keys()}  # noqa: SIM118

    def _file(self) -> safe_open:
        return safe_open(self._path, framework="pt")


def _read_names(path: Path) -> Sequence[str]:
    """The names of the clients, in order."""
    names = read_json(path, MAX_NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or names != sorted(names):
        raise RunFolderError(f"{path} cannot be read (it is no sorted list of names); give another folder.")
    return names
