"""Build the wheel and the source distribution, look into them, and use the wheel as somebody does who has no clone.

    .venv/bin/python .ci/release.py     # needs the packages build and hatchling: the extra dev

Everything happens in a temporary folder. The wheel is installed into an environment of its own, in which nothing of the
clone can be imported; so a file that is missing in the wheel is noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_WHEEL = {  # where the files of the clone are in the wheel
    "src/comfedl/": "comfedl/",
    "reproduction/comfedl_reproduction/": "comfedl_reproduction/",
    "experiments/": "comfedl_reproduction/experiments/",
}
NOT_IN_SDIST = ("results/", ".github/", ".ci/", ".gitignore", ".pre-commit-config.yaml")
ADDED_TO_SDIST = {"PKG-INFO", ".gitignore"}  # by hatchling
NEEDED = ("comfedl/py.typed", "comfedl/analysis/page.js", "comfedl/analysis/page.css", "comfedl/analysis/page.html")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; if it fails, print that and stop."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nThis failed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(message)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, from which an equal wheel must be built."""
    tool = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*tool, folder / "through-sdist", ROOT)  # the source distribution, and the wheel made of it
    run(*tool, folder / "direct", "--wheel", ROOT)
    (wheel,), (sdist,) = (folder / "direct").glob("*.whl"), (folder / "through-sdist").glob("*.tar.gz")
    other = contents(folder / "through-sdist" / wheel.name)
    require(contents(wheel) == other, "The source distribution gives another wheel than the clone.")
    return wheel, sdist


def check_wheel(wheel: Path, tracked: list[str]) -> None:
    """The wheel has the files of the packages and the experiments as they are in the clone, and its metadata."""
    found = contents(wheel)
    expected = {
        there + name.removeprefix(here): (ROOT / name).read_bytes()
        for name in tracked
        for here, there in IN_WHEEL.items()
        if name.startswith(here)
    }
    metadata = {name: data for name, data in found.items() if ".dist-info/" in name}
    differs = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
    differs -= metadata.keys()
    require(not differs, f"{wheel.name} differs from the clone in: {', '.join(sorted(differs))}")
    needed = {*NEEDED, next(name for name in found if name.startswith("comfedl/flower/templates/PACKAGE/"))}
    require(needed <= found.keys(), f"{wheel.name} lacks {', '.join(sorted(needed - found.keys()))}")
    licence = (ROOT / "LICENSE").read_bytes()
    require(
        any(data == licence for name, data in metadata.items() if name.endswith("LICENSE")), "The licence is missing."
    )


def check_sdist(sdist: Path, tracked: list[str]) -> None:
    """The source distribution has all of the clone but results and the machinery around it."""
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    expected = {name for name in tracked if not name.startswith(NOT_IN_SDIST)}
    differs = (found ^ expected) - ADDED_TO_SDIST
    require(not differs, f"{sdist.name} differs from the clone in: {', '.join(sorted(differs))}")


def install(wheel: Path, folder: Path, extra: str = "") -> Path:
    """An environment with the wheel in the tested versions; returns its bin."""
    place = folder / "environment"
    if not place.exists():
        run(sys.executable, "-m", "venv", place)
    pip = (place / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt")
    run(*pip, f"{wheel}{extra}")
    return place / "bin"


def try_core(bin: Path, empty: Path, version: str) -> None:
    """Without any extra: the version, the demo, a new project that is run, and the settings of the paper's figures."""
    comfedl = bin / "comfedl"
    where = run(
        bin / "python",
        "-c",
        "import comfedl, comfedl_reproduction as r; print(comfedl.__file__, r.__file__)",
        cwd=empty,
    )
    require(str(ROOT / "src") not in where and where.count(str(bin.parent)) == 2, f"Imported from elsewhere: {where}")
    require(run(comfedl, "--version", cwd=empty).strip() == version, "comfedl --version gives another version.")
    require("worst site" in run(comfedl, "demo", cwd=empty), "The demo does not name the worst site.")
    run(comfedl, "init", "mine", cwd=empty)
    run(comfedl, "run", "config.toml", "--out", "run", cwd=empty / "mine")
    require((empty / "mine/run/model.safetensors").exists(), "The project of `comfedl init` left no model.")
    figures = "from comfedl_reproduction.experiments import read_figure\n"
    figures += "for number in range(2, 7):\n    print(read_figure(f'fig{number}', 'quick').title)"
    require(len(run(bin / "python", "-c", figures, cwd=empty).splitlines()) == 5, "A figure's settings are missing.")


def try_report(bin: Path, empty: Path) -> None:
    """With the extra plot: a report of the runs, with its script and its styles inside."""
    run(bin / "comfedl", "report", "comfedl-demo/fedavg", "comfedl-demo/robust", "--out", "report.html", cwd=empty)
    page = (empty / "report.html").read_text(encoding="utf-8")
    for name in ("page.js", "page.css"):
        text = (ROOT / "src/comfedl/analysis" / name).read_text(encoding="utf-8").strip()
        require(text[:200] in page, f"The report does not contain {name}.")


def check_types(bin: Path, empty: Path) -> None:
    """What mypy sees of the installed package: ``typed_user.py`` uses it, and none of its expressions may be Any."""
    shutil.copy(ROOT / ".ci" / "typed_user.py", empty)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", bin / "python")
    run(
        *mypy,
        "--disallow-any-expr",
        "--disallow-any-explicit",
        "--cache-dir",
        empty / "cache",
        "typed_user.py",
        cwd=empty,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Copy the wheel and the source distribution here.")
    keep: Path | None = parser.parse_args().keep
    tracked = run("git", "ls-files").splitlines()
    with tempfile.TemporaryDirectory() as name:
        folder, empty = Path(name), Path(name) / "empty"
        empty.mkdir()
        with step("build and contents"):
            wheel, sdist = build(folder)
            check_wheel(wheel, tracked)
            check_sdist(sdist, tracked)
        with step("install"):
            bin = install(wheel, folder)
        with step("commands"):
            try_core(bin, empty, wheel.name.split("-")[1])
        with step("report"):
            install(wheel, folder, "[plot]")
            try_report(bin, empty)
        with step("types"):
            check_types(bin, empty)
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            for file in (wheel, sdist):
                shutil.copy(file, keep)
        print(f"{wheel.name} and {sdist.name} are fit for release.")


if __name__ == "__main__":
    main()
