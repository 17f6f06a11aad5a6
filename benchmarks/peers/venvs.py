"""An environment for each peer, since their pins clash; made once, and gone on with where making it was interrupted."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.roster import PEERS

STAMP = "built.json"


class NotBuilt(Exception):
    """An environment could not be made: says what pip said last."""


def interpreter(peer: str, folder: Path, torch: str) -> Path:
    """The Python of a peer: the driver's own, or that of its environment, which is made where it is not there yet."""
    requires = PEERS[peer].requires
    if not requires:
        return Path(sys.executable)
    place = folder / peer
    python, stamp = place / "bin" / "python", place / STAMP
    # torch comes first and is named again: the same version for all, and nothing may pull in another build of it.
    steps = [[f"torch=={torch}", "numpy"], [*requires, f"torch=={torch}"]]
    wanted = hashlib.sha256(json.dumps([steps, sys.version]).encode()).hexdigest()
    if stamp.exists():
        if json.loads(stamp.read_text())["of"] == wanted:
            return python
        shutil.rmtree(place)
    print(f"{peer}: making its environment in {place} (once, some minutes)", file=sys.stderr, flush=True)
    if not python.exists():
        venv.create(place, with_pip=True, clear=True)
    for step in steps:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-input", *step], capture_output=True, text=True
        )
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if "WARNING" not in line][-1:] or ["no message"]
            raise NotBuilt(f"pip install {' '.join(step)} failed: {last[0]}")
    stamp.write_text(json.dumps({"of": wanted, "steps": steps, "installed": installed(python)}, indent=1))
    return python


def installed(python: Path) -> list[str]:
    """What an environment holds, as ``name==version``."""
    told = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    return [f"{package['name']}=={package['version']}" for package in json.loads(told.stdout)]


def versions(peer: str, folder: Path) -> dict[str, str]:
    """The versions in a peer's environment of what matters here."""
    stamp = folder / peer / STAMP
    if not stamp.exists():
        return {}
    pairs = [package.split("==") for package in json.loads(stamp.read_text())["installed"]]
    own = {name.split("==")[0].split("[")[0] for name in PEERS[peer].requires}
    names = own | {"torch", "torchvision", "numpy", "ray"}
    return {name: version for name, version in pairs if name in names}
