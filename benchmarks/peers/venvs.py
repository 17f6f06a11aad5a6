"""One environment per peer, since their pinned versions conflict; created once, and continued if interrupted."""

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
    """An environment could not be created; the message ends with pip's last line."""


def interpreter(peer: str, folder: Path, torch: str) -> Path:
    """The Python of a peer: the driver's, or that of its environment, which is created if missing."""
    requires = PEERS[peer].requires
    if not requires:
        return Path(sys.executable)
    place = folder / peer
    python, stamp = place / "bin" / "python", place / STAMP
    # torch comes first and is repeated, so that all have the same version and nothing pulls in another build.
    steps = [[f"torch=={torch}", "numpy"], [*requires, f"torch=={torch}"]]
    wanted = hashlib.sha256(json.dumps([steps, sys.version]).encode()).hexdigest()
    if stamp.exists():
        if json.loads(stamp.read_text())["of"] == wanted:
            return python
        shutil.rmtree(place)
    print(f"{peer}: creating its environment in {place} (once, takes minutes)", file=sys.stderr, flush=True)
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
    """The packages of an environment, as ``name==version``."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    return [f"{package['name']}=={package['version']}" for package in json.loads(listed.stdout)]


def versions(peer: str, folder: Path) -> dict[str, str]:
    """The versions of the relevant packages in a peer's environment."""
    stamp = folder / peer / STAMP
    if not stamp.exists():
        return {}
    pairs = [package.split("==") for package in json.loads(stamp.read_text())["installed"]]
    own = {name.split("==")[0].split("[")[0] for name in PEERS[peer].requires}
    names = own | {"torch", "torchvision", "numpy", "ray"}
    return {name: version for name, version in pairs if name in names}
