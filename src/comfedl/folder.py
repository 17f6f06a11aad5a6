"""A run's folder: config.toml, rounds.jsonl, clients.jsonl, summary.json, model.safetensors and personal/."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from safetensors.torch import save

from comfedl.callbacks import Callback
from comfedl.errors import RunFolderError
from comfedl.metrics import Row
from comfedl.problem import Model
from comfedl.result import Result
from comfedl.settings import to_toml

# What a run writes. A folder that holds any of these is not free, since they would be replaced.
FILES = ("config.toml", "rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors", "personal", "checkpoint")
RECORDS = ("rounds.jsonl", "clients.jsonl")

# With more clients than this their personal models are not written; ``Result.personal`` gives each when asked.
MOST_PERSONAL = 1000


def file_name(client: str) -> str:
    """A client's name as the name of a file: what a file system may not like is percent-encoded, and a long one cut."""
    safe = quote(client, safe=" +=@,")
    safe = safe.replace(".", "%2E") if safe.strip(".") == "" or safe.startswith(".") else safe
    if len(safe) <= 200:
        return safe
    return (
        f"{safe[:180].rpartition('%')[0] or safe[:180]}~{hashlib.blake2b(client.encode(), digest_size=8).hexdigest()}"
    )


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def model_bytes(model: Model) -> bytes:
    """A model's parameters and buffers as a safetensors file."""
    tensors = {**model["params"], **model["buffers"]}
    content: bytes = save({name: part.contiguous() for name, part in tensors.items()})
    return content


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say what could not be written, and what to do, where the system only says why."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written ({error.strerror}); make room, or give another --out."
        ) from error


def check_free(path: Path, force: bool) -> None:
    """Refuse a folder that already holds a run, or files that a run would replace, unless it may be."""
    with _readable(path):
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a folder; give another --out.")
        there = [name for name in FILES if (path / name).exists()]
    if there and not force:
        raise RunFolderError(
            f"{path} already holds a run ({', '.join(there)}); give another folder, or force (--force) to replace it."
        )


class RunFolder(Callback):
    """Writes a run as it goes. A run that fails leaves nothing of its own; one that it was to replace comes back."""

    def __init__(self, path: Path, settings: Mapping[str, Any], force: bool = False) -> None:
        check_free(path, force)
        self.path, self._settings = path, settings
        self._streams: dict[str, IO[str]] = {}
        self._made: list[Path] = []
        self._aside: Path | None = None
        self._begun = self._moved = self._done = False

    def started(self) -> None:
        with _readable(self.path):
            self._begun = True
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            old = [name for name in FILES if (self.path / name).exists()]
            if old:
                self._aside = Path(tempfile.mkdtemp(dir=self.path, prefix=".replaced-"))
                for name in old:
                    os.replace(self.path / name, self._aside / name)
            self._moved = True
            write_atomic(self.path / "config.toml", to_toml(self._settings).encode())
            for name in RECORDS:
                self._streams[name] = (self.path / name).open("w", encoding="utf-8")

    def evaluated(self, row: Row, clients: list[Row]) -> None:
        with _readable(self.path):
            for name, rows in zip(RECORDS, ([row], clients), strict=True):
                self._streams[name].writelines(json.dumps(each) + "\n" for each in rows)
                self._streams[name].flush()

    def finished(self, result: Result) -> None:
        with _readable(self.path):
            self._close()
            whole = Model(params=result.params, buffers=result.buffers)
            write_atomic(self.path / "model.safetensors", model_bytes(whole))
            if len(result.names) <= MOST_PERSONAL:
                (self.path / "personal").mkdir()
                for name in result.names:
                    file = self.path / "personal" / f"{file_name(name)}.safetensors"
                    write_atomic(file, model_bytes(result.personal_model(name)))
            write_atomic(self.path / "summary.json", (json.dumps(result.summary(), indent=2) + "\n").encode())
            self._done = True
            if self._aside is not None:
                shutil.rmtree(self._aside)

    def failed(self, error: BaseException) -> None:
        if not self._begun or self._done:
            return
        with contextlib.suppress(OSError):
            self._close()
        if not os.path.isdir(self.path):
            self._remove_made()
            return
        for name in FILES if self._moved else ():  # until the old run was out of the way, these are its files
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        if self._aside is not None:
            for kept in self._aside.iterdir():
                os.replace(kept, self.path / kept.name)
            self._aside.rmdir()
        self._remove_made()

    def _remove_made(self) -> None:
        """Take away the folders that this run made, where nothing else is in them."""
        for folder in self._made:
            if os.path.isdir(folder) and not any(folder.iterdir()):
                folder.rmdir()

    def _close(self) -> None:
        """Close both streams, also where the first one fails."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.callback(stream.close)
