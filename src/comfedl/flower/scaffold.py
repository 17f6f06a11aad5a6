"""Creates the folder of a Flower app from templates/, where PACKAGE and APP_NAME are placeholders."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from comfedl.utils.errors import ConfigError, RunFolderError

TEMPLATES = resources.files("comfedl.flower") / "templates"
NEW_APP = ("README.md", "PACKAGE/server.py", "PACKAGE/client.py", "PACKAGE/data.py", "PACKAGE/config.toml")


def new_app(folder: Path) -> None:
    """Write a complete app, named after its folder: what ``comfedl flower new`` does."""
    write_app(folder, folder.resolve().name, {name: _template(name) for name in NEW_APP})


def write_app(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Write an app with these files, besides those that Flower requires; the folder must be new or empty."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"The app's name is {name!r}, but it must consist of letters, digits, - and _ and start with a letter."
        )
    package = name.replace("-", "_").lower()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} already exists; give the name of a new folder.")
    required = {path: _template(path) for path in ("pyproject.toml", "LICENSE", ".gitignore")} | {
        "PACKAGE/__init__.py": ""
    }
    created = not folder.exists()
    try:
        (folder / package).mkdir(parents=True)
        for path, text in (required | dict(files)).items():
            text = text.replace("PACKAGE", package).replace("APP_NAME", name)
            (folder / path.replace("PACKAGE", package)).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder if created else folder / package, ignore_errors=True)
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error


def _template(name: str) -> str:
    return (TEMPLATES / f"{name}.tmpl").read_text("utf-8")
