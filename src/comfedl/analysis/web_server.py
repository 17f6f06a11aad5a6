"""The report of runs that are still going on, served to this machine's own browser."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from comfedl.analysis.html_report import page, plotly_js
from comfedl.analysis.read_runs import find_runs, read_methods
from comfedl.analysis.report_data import Asked, contents
from comfedl.utils.errors import ComfedlError, ConfigError

WATCHED = ("config.toml", "rounds.jsonl", "clients.jsonl", "summary.json")


class Latest:
    """What the page shows of some folders, made anew when their files have changed, but not all the time."""

    def __init__(self, runs: Sequence[Path], asked: Asked | None = None) -> None:
        self._runs, self._asked = runs, asked
        self._lock = threading.Lock()
        self._stamp, self._due = "", 0.0
        self.shown = self._waiting()

    def get(self) -> dict[str, Any]:
        """The newest that there is."""
        with self._lock:
            begun = time.monotonic()
            if begun < self._due:
                return self.shown
            stamp = self._look()
            if stamp != self._stamp:
                try:
                    self.shown = {**contents(*read_methods(self._runs), self._asked), "version": stamp}
                    self._stamp = stamp
                except (ComfedlError, OSError, ValueError):
                    pass  # not there yet, or being replaced just now: what was shown stays
            # Reading takes the longer the more there is; the run that is being watched needs the time more.
            self._due = time.monotonic() + max(0.3, 5 * (time.monotonic() - begun))
            return self.shown

    def _look(self) -> str:
        """What tells the files of now from those of before."""
        try:
            files = [run / name for run in find_runs(self._runs) for name in WATCHED]
            stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
        except (ConfigError, OSError):
            return ""
        return hashlib.blake2b(json.dumps(stats).encode(), digest_size=8).hexdigest() if stats else ""

    def _waiting(self) -> dict[str, Any]:
        names = ", ".join(str(run) for run in self._runs)
        return {
            "title": names,
            "verdict": ["Waiting for the first evaluated round; this page shows it when it is there."],
            "waiting": True,
            "version": "waiting",
        }


def make_server(runs: Sequence[Path], host: str, port: int, asked: Asked | None = None) -> ThreadingHTTPServer:
    """A server of the page and its data, and of nothing else; port 0 takes one that is free."""
    plotly_js()  # said before anything is served
    latest, local = Latest(runs, asked), _is_loopback(host)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "comfedl", ""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if local and not _is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""):
                self._answer(HTTPStatus.FORBIDDEN)  # another site's name that was made to point here
            elif url.path == "/":
                self._answer(HTTPStatus.OK, page(latest.get(), live=True).encode(), "text/html; charset=utf-8")
            elif url.path == "/data.json":
                shown = latest.get()
                if parse_qs(url.query).get("seen") == [shown["version"]]:
                    self._answer(HTTPStatus.NO_CONTENT)
                else:
                    made = json.dumps({**shown, "live": True}, allow_nan=False).encode()
                    self._answer(HTTPStatus.OK, made, "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND)

        def _answer(self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain") -> None:
            self.send_response(status)
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Who asks for what is of no interest."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that has gone away in the middle is none."""

    try:
        return Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on ({error}); give another --port or --host.") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve(runs: Sequence[Path], host: str, port: int, say: Any) -> None:
    """Serve until Ctrl-C; ``say`` is told the address."""
    with make_server(runs, host, port) as server:
        found = server.server_address[1]
        say(f"Watching {', '.join(str(run) for run in runs)} at http://{host}:{found}/ (Ctrl-C ends)")
        server.serve_forever()
