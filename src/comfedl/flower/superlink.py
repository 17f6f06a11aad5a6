"""A SuperLink and SuperNodes on loopback, with TLS and authentication keys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from comfedl.flower.certs import make_certs
from comfedl.flower.processes import Daemons, free_ports, listening
from comfedl.utils.errors import DaemonError

START_TIMEOUT = 600.0  # seconds for the SuperLink to start, and for flwr to answer


class Network:
    """One SuperLink and a SuperNode per site; use it inside ``with network.daemons``, which stops them all.

    Args:
        folder: for keys, logs and Flower's own files.
        sites: the --node-config of each SuperNode, by the name of the site's key.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Mapping[str, str]]) -> None:
        self.folder, self.node_configs, self.daemons = folder, dict(sites), Daemons(folder)
        self.port, *ports = free_ports(len(sites) + 1)
        self._ports = dict(zip(sites, ports, strict=True))
        make_certs(folder / "keys", list(sites))
        connection = f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "127.0.0.1:{self.port}"\n'
        connection += f"root-certificates = {json.dumps(str(folder / 'keys' / 'ca.crt'))}\n"
        (folder / "flwr" / "config.toml").write_text(connection, encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink and register the sites' public keys."""
        keys = self.folder / "keys"
        files = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        options += [word for name, file in files.items() for word in (f"--ssl-{name}", str(keys / file))]
        options += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.daemons.start("superlink", ["flower-superlink", *options])
        message = "The SuperLink does not listen"
        wait_for(lambda: listening(self.port), START_TIMEOUT, message, self.daemons, "superlink")
        self.run_flwr(
            "register", [["supernode", "register", str(keys / f"{site}.pub"), "trial"] for site in self.node_configs]
        )

    def start_node(self, site: str, key: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a site, with its own key or another."""
        keys, node_config = self.folder / "keys", self.node_configs[site]
        options = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(keys / "ca.crt")]
        options += ["--auth-supernode-private-key", str(key or keys / f"{site}.key")]
        options += ["--host", "127.0.0.1", "--port", str(self._ports[site])]
        options += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in node_config.items())]
        return self.daemons.start(site, ["flower-supernode", *options])

    def run_flwr(self, name: str, commands: list[list[str]], timeout: float = START_TIMEOUT) -> None:
        """Run ``flwr`` commands and wait until they are done."""
        process = self.start_flwr(name, commands)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"flwr did not answer in {timeout:g} seconds: {self.daemons.log_tail(name)}") from None
        if code:
            raise DaemonError(f"flwr ended with code {code}: {self.daemons.log_tail(name)}")

    def start_flwr(self, name: str, commands: list[list[str]]) -> subprocess.Popen[bytes]:
        """Start ``flwr`` commands in the background."""
        return self.daemons.start(name, [sys.executable, "-m", "comfedl.flower.flwr_cli", json.dumps(commands)])


def wait_for(condition: Callable[[], bool], seconds: float, message: str, daemons: Daemons, *names: str) -> None:
    """Wait until a condition holds, as long as these processes are alive."""
    end = time.monotonic() + seconds
    while not condition():
        daemons.check(*names)
        if time.monotonic() > end:
            tail = f"; its log ends with: {daemons.log_tail(names[0])}" if names else ""
            raise DaemonError(f"{message} after {seconds:g} seconds{tail}")
        time.sleep(0.2)
