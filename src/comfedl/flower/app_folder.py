"""An app's folder as Flower wants it, written from a few texts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from comfedl.utils.errors import ConfigError, RunFolderError

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Federated learning over our sites with comfedl."
license = {{ file = "LICENSE" }}
requires-python = ">=3.11"
dependencies = ["comfedl[flower]", "flwr>=1.41,<1.43"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "{package}"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# What "flwr run -c" may change. An empty text is the default of server_app.
[tool.flwr.app.config]
config = ""
out = ""
resume = false
force = false
report = ""
"""
LICENSE = "All rights reserved. Replace this text by the licence of your app.\n"


def write_app(folder: Path, name: str, files: dict[str, str]) -> None:
    """Write an app whose package has these files; a folder that holds anything is left alone."""
    package = package_of(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is there already; give the name of a folder that is not.")
    texts = {"pyproject.toml": PYPROJECT.format(name=name, package=package), "LICENSE": LICENSE, **files}
    made = not folder.exists()
    try:
        (folder / package).mkdir(parents=True)
        for path, text in texts.items():
            (folder / path.replace("PACKAGE", package)).write_text(text.replace("PACKAGE", package), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder if made else folder / package, ignore_errors=True)
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error


def package_of(name: str) -> str:
    """An app's name as that of a Python package."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ConfigError(f"The app's name is {name!r}, but it must be letters, digits, - and _, a letter first.")
    return name.replace("-", "_").lower()
