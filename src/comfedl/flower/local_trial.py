"""A trial on this machine: a config over a SuperLink and a SuperNode a site on loopback, started and stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
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

from comfedl.config.schema import Config, FlowerTable
from comfedl.data.federated import FederatedData
from comfedl.flower.app_folder import write_app
from comfedl.flower.processes import DaemonError
from comfedl.flower.server import RECORD, settings_at_sites
from comfedl.flower.superlink import Network
from comfedl.training.run_folder import check_free
from comfedl.utils.errors import ComfedlError, ConfigError
from comfedl.utils.toml import to_toml

STATES, LOG = "sites", "flower.log"  # in the run's folder: what clients keep, and what the server has said
CLIENT = """\
from comfedl.flower import client_app
from comfedl.flower.local_trial import share

app = client_app(share)
"""
SERVER = "from comfedl.flower import server_app\n\napp = server_app()\n"


class Trial(Network):
    """A network for a config: a site for each of its clients, with a file of its own data alone."""

    def __init__(self, config: Config, sites: int | None, folder: Path, out: Path, client: str = CLIENT) -> None:
        fed = config.make_data(progress=True)
        if sites is not None and sites != len(fed):
            raise ConfigError(
                f"--sites is {sites}, but the config's data have {len(fed)} clients, one for each site; give --sites "
                f"{len(fed)}, or another number of clients (--set data.clients={sites})."
            )
        self.names, self.out = fed.names, out.resolve()
        self.sites = [f"site-{k}" for k in range(len(fed))]
        states = str(self.out / STATES)
        super().__init__(
            folder, {site: {"data": str(folder / f"{site}.safetensors"), "state": states} for site in self.sites}
        )
        files = {"PACKAGE/__init__.py": "", "PACKAGE/server.py": SERVER, "PACKAGE/client.py": client}
        write_app(folder / "app", "comfedl-trial", files)
        for site, name in zip(self.sites, self.names, strict=True):
            _save(folder / f"{site}.safetensors", fed, name)
        known = {"sites": list(self.names), "outputs": config.data.outputs(fed, config.loss)}
        options = (config.flower or FlowerTable()).model_copy(update=known)
        settings = settings_at_sites(config) | {"flower": options.model_dump()}
        (folder / "trial.toml").write_text(to_toml(settings), encoding="utf-8")

    def submit(self, resume: bool = False, force: bool = False) -> subprocess.Popen[bytes]:
        """Start the run; what is given back ends with it."""
        (self.folder / "report.json").unlink(missing_ok=True)
        words = {"config": self.folder / "trial.toml", "out": self.out, "report": self.folder / "report.json"}
        options = " ".join(f"{name}={json.dumps(str(path))}" for name, path in words.items())
        options += f" resume={str(resume).lower()} force={str(force).lower()}"
        return self.begin("run", [["run", str(self.folder / "app"), "trial", "--stream", "-c", options]])

    def finish(
        self, process: subprocess.Popen[bytes], timeout: float | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the run's end; what went wrong is raised. ``look`` is called now and then."""
        report, until = self.folder / "report.json", None if timeout is None else time.monotonic() + timeout
        grace = 0
        while not report.exists():
            look()
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
        look()
        said = json.loads(report.read_text("utf-8"))
        if "error" in said:
            raise TrialError(said["error"])


class TrialError(ComfedlError, RuntimeError):
    """What the server of a trial has raised."""


def run_local(
    config: Config,
    out: Path,
    sites: int | None = None,
    force: bool = False,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a config over sites on this machine, and end all processes that it took; ``tell`` hears how it goes."""
    check_free(out, force, resume)
    with tempfile.TemporaryDirectory(prefix="comfedl-flower-") as scratch, _terminable():
        trial = Trial(config, sites, Path(scratch), out)
        attendance = _told(trial.out / RECORD, config.rounds, resume, tell)
        try:
            with trial.daemons:
                tell(f"Starting a SuperLink and {len(trial.sites)} SuperNodes")
                trial.start_link()
                for site in trial.sites:
                    trial.start_node(site)
                trial.finish(trial.submit(resume, force), look=attendance)
        finally:
            if (out / "config.toml").exists():
                with suppress(OSError):
                    shutil.copyfile(trial.daemons.log("run"), out / LOG)
            else:  # a run that leaves nothing: its clients' states neither
                shutil.rmtree(out / STATES, ignore_errors=True)
                with suppress(OSError):
                    out.rmdir()


def _told(path: Path, rounds: int, resume: bool, tell: Callable[[str], None]) -> Callable[[], None]:
    """A function that tells of what has been added to the record of who took part."""
    seen = len(path.read_text("utf-8").splitlines()) if resume and path.exists() else 0
    old = path.stat().st_ino if path.exists() and not resume else None  # of a run that is replaced

    def look() -> None:
        nonlocal seen
        there = path.exists() and path.stat().st_ino != old
        lines = path.read_text("utf-8").splitlines(keepends=True) if there else []
        for line in lines[seen:]:
            if not line.endswith("\n"):
                break
            seen += 1
            row = json.loads(line)
            if row["step"] != "evaluate":
                away = "".join(f"; {name}: {reason}" for name, reason in row["absent"].items())
                tell(f"round {row['round']} of {rounds}, {row['step']}: {len(row['answered'])} sites{away}")

    return look


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
