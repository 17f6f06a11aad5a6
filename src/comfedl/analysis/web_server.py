"""A live report on runs in progress, served over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from comfedl.analysis.read_runs import find_runs, read_methods
from comfedl.analysis.report_content import ReportOptions, report_contents
from comfedl.analysis.report_page import page, plotly_js
from comfedl.utils.errors import ComfedlError, ConfigError

MAX_CONNECTIONS = 32  # at once; a browser needs one or two
PATIENCE = 10.0  # seconds to wait for the rest of a request
WATCHED_FILES = ("config.toml", "rounds.jsonl", "clients.jsonl", "clients_table.jsonl", "summary.json")


class LiveContents:
    """The report contents of some runs, rebuilt when their files change, at a limited rate."""

    def __init__(self, runs: Sequence[Path], options: ReportOptions | None = None) -> None:
        self._runs, self._options = runs, options
        self._lock = threading.Lock()
        self._version, self._next_check = "", 0.0
        self._contents = self._waiting()

    def get(self) -> dict[str, Any]:
        """The latest contents."""
        with self._lock:
            begun = time.monotonic()
            if begun < self._next_check:
                return self._contents
            version = self._current_version()
            if version != self._version:
                try:
                    contents = report_contents(*read_methods(self._runs), self._options)
                    self._contents, self._version = {**contents, "version": version}, version
                except (ComfedlError, OSError, ValueError):
                    pass  # not written yet, or being replaced: keep the old contents
            # Reading large runs takes long; use at most a sixth of the time for it, the training needs the CPU.
            self._next_check = time.monotonic() + max(0.3, 5 * (time.monotonic() - begun))
            return self._contents

    def _current_version(self) -> str:
        """A hash of the files' sizes and times; empty if there are none."""
        try:
            files = [run / name for run in find_runs(self._runs) for name in WATCHED_FILES]
            stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
        except (ConfigError, OSError):
            return ""
        return hashlib.blake2b(json.dumps(stats).encode(), digest_size=8).hexdigest() if stats else ""

    def _waiting(self) -> dict[str, Any]:
        names = ", ".join(str(run) for run in self._runs)
        return {
            "title": names,
            "verdict": ["Waiting for the first evaluated round; this page updates itself."],
            "waiting": True,
            "version": "waiting",
        }


def make_server(runs: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """A server for the page and its data only; port 0 picks a free port."""
    plotly_js()  # fail before serving anything
    live, local = LiveContents(runs), _is_loopback(host)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "comfedl", ""
        timeout = PATIENCE

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if local and not _is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""):
                self._respond(HTTPStatus.FORBIDDEN)  # DNS rebinding: a foreign name that resolves to this machine
            elif url.path == "/":
                self._respond(HTTPStatus.OK, page(live.get(), live=True).encode(), "text/html; charset=utf-8")
            elif url.path == "/data.json":
                contents = live.get()
                if parse_qs(url.query).get("seen") == [contents["version"]]:
                    self._respond(HTTPStatus.NO_CONTENT)
                else:
                    body = json.dumps({**contents, "live": True}, allow_nan=False).encode()
                    self._respond(HTTPStatus.OK, body, "application/json")
            else:
                self._respond(HTTPStatus.NOT_FOUND)

        def _respond(self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain") -> None:
            self.send_response(status)
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        _free = threading.BoundedSemaphore(MAX_CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            if self._free.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)  # each connection takes a thread, also one that never asks anything

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore browsers that disconnect."""

    try:
        return Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on ({error}); give another --port or --host.") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve(runs: Sequence[Path], host: str, port: int, echo: Callable[[str], object]) -> None:
    """Serve until Ctrl-C; ``echo`` gets a line with the address."""
    with make_server(runs, host, port) as server:
        port = int(server.server_address[1])
        echo(f"Watching {', '.join(str(run) for run in runs)} at http://{host}:{port}/ (Ctrl-C to stop)")
        server.serve_forever()
