"""A SuperLink and SuperNodes on loopback, with TLS and keys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from comfedl.flower.certs import make_certs
from comfedl.flower.processes import DaemonError, Daemons, free_ports, listening

START = 600.0  # seconds that the SuperLink has to start, and flwr to answer


class Network:
    """One SuperLink and a SuperNode for each site; to be used in a ``with`` block of its daemons, which ends them all.

    Args:
        folder: for keys, logs and Flower's own files.
        sites: what each SuperNode is told with --node-config, by the name of the site's key.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Mapping[str, str]]) -> None:
        self.folder, self._settings, self.daemons = folder, sites, Daemons(folder)
        self.port, *ports = free_ports(len(sites) + 1)
        self._ports = dict(zip(sites, ports, strict=True))
        make_certs(folder / "keys", list(sites))
        connection = f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "127.0.0.1:{self.port}"\n'
        connection += f"root-certificates = {json.dumps(str(folder / 'keys' / 'ca.crt'))}\n"
        (folder / "flwr" / "config.toml").write_text(connection, encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink, and tell it the sites' public keys."""
        keys = self.folder / "keys"
        files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        words += [word for name, file in files.items() for word in (f"--ssl-{name}", str(keys / file))]
        words += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.daemons.start("superlink", ["flower-superlink", *words])
        wait_for(lambda: listening(self.port), START, "The SuperLink does not listen", self.daemons, "superlink")
        self.control(
            "register", [["supernode", "register", str(keys / f"{site}.pub"), "trial"] for site in self._settings]
        )

    def start_node(self, site: str, key: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a site, with its own key or another."""
        keys, settings = self.folder / "keys", self._settings[site]
        words = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(keys / "ca.crt")]
        words += ["--auth-supernode-private-key", str(key or keys / f"{site}.key")]
        words += ["--host", "127.0.0.1", "--port", str(self._ports[site])]
        words += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())]
        return self.daemons.start(site, ["flower-supernode", *words])

    def control(self, name: str, commands: list[list[str]], timeout: float = START) -> None:
        """Run commands of ``flwr`` to their end."""
        process = self.begin(name, commands)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DaemonError(
                f"flwr has not answered in {timeout:g} seconds: {self.daemons.last_words(name)}"
            ) from None
        if code:
            raise DaemonError(f"flwr has ended with code {code}: {self.daemons.last_words(name)}")

    def begin(self, name: str, commands: list[list[str]]) -> subprocess.Popen[bytes]:
        """Start commands of ``flwr``."""
        return self.daemons.start(name, [sys.executable, "-m", "comfedl.flower.flwr_cli", json.dumps(commands)])


def wait_for(what: Callable[[], bool], seconds: float, complaint: str, daemons: Daemons, *names: str) -> None:
    """Wait until something is so, while these processes live."""
    until = time.monotonic() + seconds
    while not what():
        daemons.check(*names)
        if time.monotonic() > until:
            words = f"; its last words: {daemons.last_words(names[0])}" if names else ""
            raise DaemonError(f"{complaint} after {seconds:g} seconds{words}")
        time.sleep(0.2)
