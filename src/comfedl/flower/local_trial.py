"""A trial on this machine: runs a config over a SuperLink and one SuperNode per site on loopback, then stops them."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from comfedl.config.schema import Config, FlowerTable, SitesConfig
from comfedl.data.table_files import TABLES
from comfedl.flower.scaffold import write_app
from comfedl.flower.server import ATTENDANCE, settings_at_sites
from comfedl.flower.site_file import load_site as load_site, save_site
from comfedl.flower.site_keys import SITES as SITE_KEYS, write_site_keys
from comfedl.flower.superlink import Network
from comfedl.training.run_folder import check_free
from comfedl.utils.errors import ConfigError, DaemonError, LocalTrialError
from comfedl.utils.process_pool import sigterm_as_interrupt
from comfedl.utils.toml import to_toml

STATES, LOG = "sites", "flower.log"  # in the run's folder: the clients' states, and the server's log
CLIENT = """\
from comfedl.flower import client_app
from comfedl.flower.site_file import (load_site)

app = client_app(load_site)
"""
CLIENT_WITH_TABLE = """\
from comfedl.flower import client_app, site_table

app = client_app(site_table)
"""
SERVER = "from comfedl.flower import server_app\n\napp = server_app()\n"


class LocalTrial(Network):
    """The network of a config: one site per client, with a file that holds only this client's data.

    ``tables`` is a folder with one table per site, named after it; NAME.toml beside NAME.csv are the site's settings.
    """

    def __init__(
        self,
        config: Config,
        sites: int | None,
        folder: Path,
        out: Path,
        client: str | None = None,
        tables: Path | None = None,
    ) -> None:
        self.out = out.resolve()
        at_sites = isinstance(config, SitesConfig) and config.data.has_tables
        if at_sites != (tables is not None):
            raise ConfigError(
                "The config has tables at sites; name the folder of their files with --tables."
                if at_sites
                else '--tables is for data at sites that have tables (data.name = "sites" with columns); leave it out.'
            )
        fed = None if tables is not None else config.make_data(progress=True)
        files = {} if tables is None else find_tables(tables)
        self.names: Sequence[str] = sorted(files) if fed is None else fed.names
        count = len(self.names)
        if sites is not None and sites != count:
            change = f", or change the number of clients (--set data.clients={sites})"
            raise ConfigError(
                f"--sites is {sites}, but the config's data have {count} clients and each is one site; give --sites "
                f"{count}{change if config.data.number_of_clients_is_free else ''}."
            )
        self.sites = [f"site-{k}" for k in range(count)]
        nodes: dict[str, dict[str, str]] = {}
        for site, name in zip(self.sites, self.names, strict=True):
            own = {"data": str(folder / f"{site}.safetensors")} if fed is not None else {"site": name, **files[name]}
            nodes[site] = {**own, "state": str(self.out / STATES), "key": str(folder / "keys" / f"{site}.key")}
        super().__init__(folder, nodes)
        keys = folder / "keys" / SITE_KEYS
        public = {site: (folder / "keys" / f"{site}.pub").read_text("utf-8") for site in self.sites}
        write_site_keys(keys, {name: public[site] for site, name in zip(self.sites, self.names, strict=True)})
        client = client or (CLIENT if fed is not None else CLIENT_WITH_TABLE)
        write_app(folder / "app", "comfedl-trial", {"PACKAGE/server.py": SERVER, "PACKAGE/client.py": client})
        expected: dict[str, Any] = {"sites": list(self.names), "keys": str(keys)}
        if fed is not None:
            for site, name in zip(self.sites, self.names, strict=True):
                save_site(folder / f"{site}.safetensors", fed, name)
            expected["outputs"] = config.data.outputs(fed, config.loss_name)
        options = (config.flower or FlowerTable()).model_copy(update=expected)
        settings = settings_at_sites(config) | {"flower": options.model_dump()}
        (folder / "trial.toml").write_text(to_toml(settings), encoding="utf-8")

    def submit(self, resume: bool = False, force: bool = False) -> subprocess.Popen[bytes]:
        """Submit the run; the returned process lasts as long as the run."""
        (self.folder / "report.json").unlink(missing_ok=True)
        paths = {"config": self.folder / "trial.toml", "out": self.out, "report": self.folder / "report.json"}
        options = " ".join(f"{name}={json.dumps(str(path))}" for name, path in paths.items())
        options += f" resume={str(resume).lower()} force={str(force).lower()}"
        return self.start_flwr("run", [["run", str(self.folder / "app"), "trial", "--stream", "-c", options]])

    def wait(
        self, process: subprocess.Popen[bytes], timeout: float | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the end of the run and raise its error, if any; ``poll`` is called twice a second."""
        report, end = self.folder / "report.json", None if timeout is None else time.monotonic() + timeout
        polls_after_exit = 0  # flwr may exit shortly before the server has written its report
        while not report.exists():
            poll()
            self.daemons.check("superlink")
            if process.poll() is not None:
                polls_after_exit += 1
                if process.returncode or polls_after_exit > 20:
                    tail = self.daemons.log_tail("run")
                    raise DaemonError(f"The run ended without a report; flwr's log ends with: {tail}")
            if end is not None and time.monotonic() > end:
                tail = self.daemons.log_tail("superlink")
                raise DaemonError(f"The run did not end in {timeout:g} seconds; the SuperLink's log ends with: {tail}")
            time.sleep(0.5)
        poll()
        outcome = json.loads(report.read_text("utf-8"))
        if "error" in outcome:
            raise LocalTrialError(outcome["error"])


def run_local(
    config: Config,
    out: Path,
    sites: int | None = None,
    force: bool = False,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    tables: Path | None = None,
) -> None:
    """Run a config over sites on this machine and stop all processes at the end; ``tell`` receives progress lines."""
    check_free(out, force, resume)
    was_there = (out / STATES).exists()  # then they are of an earlier run, or not ours at all
    with tempfile.TemporaryDirectory(prefix="comfedl-flower-") as scratch, sigterm_as_interrupt():
        trial = LocalTrial(config, sites, Path(scratch), out, tables=tables)
        attendance = _attendance_lines(trial.out / ATTENDANCE, config.rounds, resume, tell)
        try:
            with trial.daemons:
                tell(f"Starting a SuperLink and {len(trial.sites)} SuperNodes")
                trial.start_link()
                for site in trial.sites:
                    trial.start_node(site)
                trial.wait(trial.submit(resume, force), poll=attendance)
        finally:
            if (out / "config.toml").exists():
                with suppress(OSError):
                    shutil.copyfile(trial.daemons.log("run"), out / LOG)
            elif not was_there:  # the run left nothing behind: remove its clients' states too
                shutil.rmtree(out / STATES, ignore_errors=True)
                with suppress(OSError):
                    out.rmdir()


def _attendance_lines(path: Path, rounds: int, resume: bool, tell: Callable[[str], None]) -> Callable[[], None]:
    """A function that reports the lines added to ``sites.jsonl`` since its last call."""
    done = len(path.read_text("utf-8").splitlines()) if resume and path.exists() else 0
    replaced = path.stat().st_ino if path.exists() and not resume else None  # the file of a run that --force replaces

    def report_new() -> None:
        nonlocal done
        exists = path.exists() and path.stat().st_ino != replaced
        lines = path.read_text("utf-8").splitlines(keepends=True) if exists else []
        for line in lines[done:]:
            if not line.endswith("\n"):
                break
            done += 1
            row = json.loads(line)
            if row["step"] != "evaluate":
                absent = "".join(f"; {name}: {reason}" for name, reason in row["absent"].items())
                tell(f"round {row['round']} of {rounds}, {row['step']}: {len(row['answered'])} sites{absent}")

    return report_new


def find_tables(folder: Path) -> dict[str, dict[str, str]]:
    """By site, the node config that names its table, and its settings if there are some."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix.lower() in TABLES:
            if path.stem in found:
                raise ConfigError(f"{folder} has two tables of {path.stem!r}; keep one.")
            settings = path.with_suffix(".toml").resolve()
            found[path.stem] = {"table": str(path.resolve())} | (
                {"settings": str(settings)} if settings.exists() else {}
            )
    if not found:
        raise ConfigError(f"{folder} has no tables; give a folder with one CSV, Parquet or Arrow file per site.")
    return found
