"""A site's data in one file, which opens at once: tensors in safetensors, mapped into memory and not copied."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from comfedl.data.federated import FederatedData
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

logger = logging.getLogger("comfedl")

Load = Callable[[Mapping[str, Any]], FederatedData]
FORMAT = "1"
MOST_FILES = 100_000


def save_site(path: Path, fed: FederatedData, name: str, sources: str = "") -> None:
    """Write one client's data to a file; ``sources`` says what they were read from."""
    tensors: dict[str, Tensor] = {}

    def keep(part: Tensor) -> str:
        tensors[str(len(tensors))] = part.contiguous().clone()
        return str(len(tensors) - 1)

    places: dict[str, Any] = {}  # the names of each split's tensors, in the structure of its samples
    for split in ("train", "validation", "test", "outer"):
        part = fed.split(split, instead="none")
        if part is not None and name in part:
            places[split] = tree.map(keep, part[name])
    about = {"site": name, "places": json.dumps(places), "sources": sources}
    write_atomic(path, save(tensors, about), private=True)


def load_site(node: Mapping[str, Any]) -> FederatedData:
    """The data in the file that the node config names as ``data``."""
    return _read(Path(str(node["data"])))[0]


def _read(path: Path) -> tuple[FederatedData, str]:
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def give(places: Any) -> Any:
        if isinstance(places, str):
            return tensors[places]
        if isinstance(places, dict):
            return {key: give(part) for key, part in places.items()}
        return tuple(map(give, places))

    splits = {split: {about["site"]: give(part)} for split, part in json.loads(about["places"]).items()}
    held_out = (splits.get(split) for split in ("validation", "test", "outer"))
    return FederatedData(splits["train"], *held_out), about.get("sources", "")


def keep_data(load: Load, *keys: str) -> Load:
    """A data function that reads a site's files once and not for every message.

    ``client_app(keep_data(load, "folder"))`` keeps what ``load`` returns in the site's own folder (``state`` in the
    node config), as a file that opens at once. The data are read anew when the node config, one of the files (by its
    size and time) or the module of ``load`` has changed. If other code that it uses changes, delete ``data-*`` there.

    Args:
        load: the data function.
        keys: the keys of the node config that name the files or folders that it reads.
    """
    if not keys:
        raise ConfigError('keep_data needs the keys of the node config that name the files, such as "folder".')

    def kept(node: Mapping[str, Any]) -> FederatedData:
        files = [_found(node, key) for key in keys]
        what = {"node": {**node}, "files": files, "code": _code(load), "format": FORMAT}
        sources = json.dumps(what, sort_keys=True)
        name = hashlib.blake2b(json.dumps({**node}, sort_keys=True).encode(), digest_size=8).hexdigest()
        path = Path(str(node.get("state") or "comfedl-site")) / f"data-{name}.safetensors"
        if path.exists():
            try:
                fed, before = _read(path)
                if before == sources:
                    return fed
            except Exception as error:  # a damaged file may raise anything
                logger.warning("%s cannot be read (%s); the data are read anew.", path, type(error).__name__)
        fed = load(node)
        if isinstance(fed, FederatedData) and len(fed) == 1 and fed.encoding is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_site(path, fed, fed.names[0], sources)
        return fed

    return kept


def _code(load: Load) -> str:
    """A digest of the module in which a data function is defined; an empty text if it has no file."""
    try:
        source = inspect.getsourcefile(load)
        return "" if source is None else hashlib.sha256(Path(source).read_bytes()).hexdigest()
    except (TypeError, OSError):  # of an object that can be called, or typed in
        return ""


def _found(node: Mapping[str, Any], key: str) -> list[tuple[str, int, int]]:
    """The files that a key of the node config names, with their sizes and times."""
    if key not in node:
        raise ConfigError(f"The node config has no {key!r}, which keep_data was told names the data; it has {[*node]}.")
    given = Path(str(node[key]))
    found = sorted(path for path in given.rglob("*") if path.is_file()) if given.is_dir() else [given]
    if len(found) > MOST_FILES or not found[0:1] or not found[0].exists():
        what = "does not exist" if not given.exists() else "has no files, or more than 100,000"
        raise ConfigError(f"{key} is {str(given)!r} in the node config, but it {what}; correct it.")
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]
