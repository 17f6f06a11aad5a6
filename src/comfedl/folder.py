"""A run's folder: config.toml, rounds.jsonl, clients.jsonl, summary.json and model.safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
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

# What a run writes, and so what may be moved aside or removed.
FILES = ("config.toml", "rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors", "personal", "checkpoint")


# With more clients than this their personal models are not written; ``Result.personal`` gives each when asked.
MOST_PERSONAL = 1000


def file_name(client: str) -> str:
    """A client's name as a file name: whatever a file system may not like is percent-encoded."""
    return quote(client, safe=" +=@,").replace(".", "%2E") if client.startswith(".") else quote(client, safe=" +=@,")


def _bytes(model: Model) -> bytes:
    tensors = {**model["params"], **model["buffers"]}
    content: bytes = save({name: part.contiguous() for name, part in tensors.items()})
    return content


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return any((path / name).exists() for name in ("config.toml", "rounds.jsonl", "summary.json"))


def check_free(path: Path, force: bool) -> None:
    """Refuse a folder that already holds a run, unless it may be replaced."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file, not a folder; give another --out.")
    if holds_run(path) and not force:
        raise RunFolderError(f"{path} already holds a run; give another folder, or force (--force) to replace it.")


class RunFolder(Callback):
    """Writes a run as it goes. A run that fails leaves nothing of its own; one that it was to replace comes back."""

    def __init__(self, path: Path, settings: Mapping[str, Any], force: bool = False) -> None:
        check_free(path, force)
        self.path, self._settings = path, settings
        self._streams: dict[str, IO[str]] = {}
        self._made: list[Path] = []
        self._aside: Path | None = None

    def started(self) -> None:
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            if holds_run(self.path):
                self._aside = Path(tempfile.mkdtemp(dir=self.path, prefix=".replaced-"))
                for name in FILES:
                    if (self.path / name).exists():
                        os.replace(self.path / name, self._aside / name)
            write_atomic(self.path / "config.toml", to_toml(self._settings).encode())
            for name in ("rounds.jsonl", "clients.jsonl"):
                self._streams[name] = (self.path / name).open("w", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written ({error.strerror}); give another --out.") from error

    def evaluated(self, row: Row, clients: list[Row]) -> None:
        for name, rows in (("rounds.jsonl", [row]), ("clients.jsonl", clients)):
            stream = self._streams[name]
            stream.writelines(json.dumps(each) + "\n" for each in rows)
            stream.flush()

    def finished(self, result: Result) -> None:
        self._close()
        write_atomic(self.path / "model.safetensors", _bytes(Model(params=result.params, buffers=result.buffers)))
        if len(result.names) <= MOST_PERSONAL:
            (self.path / "personal").mkdir()
            for name in result.names:
                write_atomic(
                    self.path / "personal" / f"{file_name(name)}.safetensors", _bytes(result.personal_model(name))
                )
        write_atomic(self.path / "summary.json", (json.dumps(result.summary(), indent=2) + "\n").encode())
        if self._aside is not None:
            shutil.rmtree(self._aside)

    def failed(self, error: BaseException) -> None:
        self._close()
        if not self._streams:
            return  # nothing was begun
        for name in FILES:
            target = self.path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        if self._aside is not None:
            for kept in self._aside.iterdir():
                os.replace(kept, self.path / kept.name)
            self._aside.rmdir()
        for folder in self._made:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def _close(self) -> None:
        for stream in self._streams.values():
            stream.close()
