"""A trial on this machine: a SuperLink and a SuperNode a site on loopback, with TLS and keys, started and stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from comfedl.config import Config, FlowerTable
from comfedl.data.federated import FederatedData
from comfedl.errors import ComfedlError, ConfigError
from comfedl.folder import check_free
from comfedl.settings import to_toml
from comfedl.sites.app import write_app
from comfedl.sites.certs import make_certs
from comfedl.sites.daemons import DaemonError, Daemons, free_ports, listening
from comfedl.sites.server import settings_at_sites

STATES = "sites"  # the folder in the run's for what clients keep
START = 600.0  # seconds that the SuperLink has to start, and flwr to answer
CLIENT = (
    "from comfedl.engines.flower import client_app\nfrom comfedl.sites.local import share\n\napp = client_app(share)\n"
)
SERVER = "from comfedl.engines.flower import server_app\n\napp = server_app()\n"


class Trial:
    """A SuperLink and SuperNodes on loopback for a config; to be used in a ``with`` block, which ends them all."""

    def __init__(self, config: Config, sites: int | None, folder: Path, out: Path, client: str = CLIENT) -> None:
        fed = config.make_data(progress=True)
        if sites is not None and sites != len(fed):
            raise ConfigError(
                f"--sites is {sites}, but the config's data have {len(fed)} clients, one for each site; give --sites "
                f"{len(fed)}, or another number of clients (--set data.clients={sites})."
            )
        self.names, self.folder, self.out = fed.names, folder, out.resolve()
        self.sites = [f"site-{k}" for k in range(len(fed))]
        self.daemons = Daemons(folder)
        self._port, *self._ports = free_ports(len(fed) + 1)
        make_certs(folder / "keys", self.sites)
        write_app(
            folder / "app",
            "comfedl-trial",
            {
                "PACKAGE/__init__.py": "",
                "PACKAGE/server.py": SERVER,
                "PACKAGE/client.py": client,
            },
        )
        for site, name in zip(self.sites, self.names, strict=True):
            _save(folder / f"{site}.safetensors", fed, name)
        options = (config.flower or FlowerTable()).model_copy(update={"sites": list(self.names)})
        settings = settings_at_sites(config) | {"flower": options.model_dump()}
        (folder / "trial.toml").write_text(to_toml(settings), encoding="utf-8")
        connection = f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "127.0.0.1:{self._port}"\n'
        connection += f'root-certificates = "{folder / "keys" / "ca.crt"}"\n'
        (folder / "flwr" / "config.toml").write_text(connection, encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink, and tell it the sites' public keys."""
        keys = self.folder / "keys"
        self.daemons.start(
            "superlink",
            [
                "flower-superlink",
                "--host",
                "127.0.0.1",
                "--port",
                str(self._port),
                "--ssl-ca-certfile",
                str(keys / "ca.crt"),
                "--ssl-certfile",
                str(keys / "server.pem"),
                "--ssl-keyfile",
                str(keys / "server.key"),
                "--enable-supernode-auth",
                "--database",
                str(self.folder / "superlink.db"),
                "--disable-runtime-dependency-installation",
            ],
        )
        wait_for(lambda: listening(self._port), START, "The SuperLink does not listen", self.daemons, "superlink")
        self.control("register", [["supernode", "register", str(keys / f"{site}.pub"), "trial"] for site in self.sites])

    def start_node(self, place: int, key: str | None = None, name: str | None = None) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a site, with its own key and under its own name or with others."""
        site, keys = self.sites[place], self.folder / "keys"
        port = self._ports[place] if name is None else free_ports(1)[0]
        words = {"data": self.folder / f"{site}.safetensors", "state": self.out / STATES}
        settings = " ".join(f"{name}={json.dumps(str(path))}" for name, path in words.items())
        return self.daemons.start(
            name or site,
            [
                "flower-supernode",
                "--superlink",
                f"127.0.0.1:{self._port}",
                "--root-certificates",
                str(keys / "ca.crt"),
                "--auth-supernode-private-key",
                str(keys / f"{key or site}.key"),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--node-config",
                settings,
            ],
        )

    def control(self, name: str, commands: list[list[str]], timeout: float = START) -> None:
        """Run commands of ``flwr`` to their end."""
        process = self._control(name, commands)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DaemonError(
                f"flwr has not answered in {timeout:g} seconds: {self.daemons.last_words(name)}"
            ) from None
        if code:
            raise DaemonError(f"flwr has ended with code {code}: {self.daemons.last_words(name)}")

    def _control(self, name: str, commands: list[list[str]]) -> subprocess.Popen[bytes]:
        return self.daemons.start(name, [sys.executable, "-m", "comfedl.sites.control", json.dumps(commands)])

    def submit(self, resume: bool = False, force: bool = False) -> subprocess.Popen[bytes]:
        """Start the run; what is given back ends with it."""
        (self.folder / "report.json").unlink(missing_ok=True)
        words = {"config": self.folder / "trial.toml", "out": self.out, "report": self.folder / "report.json"}
        options = " ".join(f"{name}={json.dumps(str(path))}" for name, path in words.items())
        options += f" resume={str(resume).lower()} force={str(force).lower()}"
        return self._control("run", [["run", str(self.folder / "app"), "trial", "--stream", "-c", options]])

    def finish(self, process: subprocess.Popen[bytes], timeout: float | None = None) -> None:
        """Wait for the run's end; what went wrong is raised."""
        report, until = self.folder / "report.json", None if timeout is None else time.monotonic() + timeout
        grace = 0
        while not report.exists():
            self.daemons.check("superlink")
            if process.poll() is not None:
                grace += 1
                if process.returncode or grace > 20:
                    raise DaemonError(
                        f"The run has ended without a word; flwr's last: {self.daemons.last_words('run')}"
                    )
            if until is not None and time.monotonic() > until:
                raise DaemonError(
                    f"The run has not ended in {timeout:g} seconds; {self.daemons.last_words('superlink')}"
                )
            time.sleep(0.5)
        said = json.loads(report.read_text("utf-8"))
        if "error" in said:
            raise TrialError(said["error"])


class TrialError(ComfedlError, RuntimeError):
    """What the server of a trial has raised."""


def run_local(config: Config, out: Path, sites: int | None = None, force: bool = False, resume: bool = False) -> None:
    """Run a config over sites on this machine, and end all processes that it took."""
    check_free(out, force, resume)
    with tempfile.TemporaryDirectory(prefix="comfedl-flower-") as scratch, _terminable():
        trial = Trial(config, sites, Path(scratch), out)
        try:
            with trial.daemons:
                trial.start_link()
                for place in range(len(trial.sites)):
                    trial.start_node(place)
                trial.finish(trial.submit(resume, force))
        finally:
            if not (out / "config.toml").exists():  # a run that leaves nothing: its clients' states neither
                shutil.rmtree(out / STATES, ignore_errors=True)
                with suppress(OSError):
                    out.rmdir()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is like Ctrl-C, so that what was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for(what: Callable[[], bool], seconds: float, complaint: str, daemons: Daemons, *names: str) -> None:
    """Wait until something is so, while these processes live."""
    until = time.monotonic() + seconds
    while not what():
        daemons.check(*names)
        if time.monotonic() > until:
            words = f"; its last words: {daemons.last_words(names[0])}" if names else ""
            raise DaemonError(f"{complaint} after {seconds:g} seconds{words}")
        time.sleep(0.2)


def _save(path: Path, fed: FederatedData, name: str) -> None:
    """One client's data as a file: a site of a trial has no others'."""
    tensors: dict[str, Tensor] = {}
    for split in ("train", "validation", "test", "outer"):
        part = fed.split(split, instead="none")
        if part is not None and name in part:
            x, y = part[name]
            tensors |= {f"{split}.x": x.contiguous().clone(), f"{split}.y": y.contiguous().clone()}
    save_file(tensors, path, {"site": name})


def share(node: Mapping[str, Any]) -> FederatedData:
    """The data of a trial's site."""
    with safe_open(str(node["data"]), framework="pt") as file:
        name = file.metadata()["site"]
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    splits = {key.partition(".")[0] for key in found}
    return FederatedData(**{split: {name: (found[f"{split}.x"], found[f"{split}.y"])} for split in splits})
