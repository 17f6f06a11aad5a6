"""What ``comfedl init`` writes, from templates/: a small project with its own config, model and data."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic

TEMPLATES = resources.files("comfedl.cli") / "templates"
FILES = {
    name: (TEMPLATES / f"{name}.tmpl").read_text("utf-8")
    for name in ("config.toml", "my_model.py", "my_data.py", "README.md")
}


def write_project(folder: Path) -> None:
    """Write the project's files into a folder; on failure, nothing is left behind."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise RunFolderError(f"{folder} already has {', '.join(existing)}; give another folder.")
    written: list[Path] = []
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            write_atomic(folder / name, text.encode())
            written.append(folder / name)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        for path in created:
            if path.is_dir():
                path.rmdir()
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error
