"""What a release says of itself agrees: versions, dates, requirements, images. .ci/release.py tries the wheel."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import comfedl as cf

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))

# --- Versions ------------------------------------------------------------------------------------------


def test_the_changelog_begins_with_this_version_and_a_date() -> None:
    versions = re.findall(r"^## (\S+)(?: \((\S+)\))?$", CHANGELOG, re.MULTILINE)
    if versions[0][0] == "Unreleased":  # what comes after this version
        versions = versions[1:]
    assert versions[0][0] == cf.__version__
    assert date.fromisoformat(versions[0][1])
    numbers = [Version(number) for number, _ in versions]
    assert numbers == sorted(numbers, reverse=True)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (released,) = re.findall(rf"^## {re.escape(cf.__version__)} \((\S+)\)$", CHANGELOG, re.MULTILINE)
    assert (citation["version"], citation["date-released"]) == (cf.__version__, released)
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["cff-version"] == "1.2.0" and {"message", "title"} <= citation.keys()


def test_the_install_page_names_this_versions_wheel() -> None:
    named = set(re.findall(r"comfedl-([\d.]+)-py3-none-any\.whl", INSTALL))
    assert named == {cf.__version__}


# --- What it needs -------------------------------------------------------------------------------------


def test_the_pythons_are_the_same_everywhere() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["ci"]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert "Python " + ", ".join(PYTHONS[:-1]) + f" or {PYTHONS[-1]}" in INSTALL
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    """Otherwise pip cannot install with the constraints, or takes what nobody has tested."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in pins, f"{name} is pinned twice"
            pins[canonicalize_name(name)] = Version(version)
    for text in [*PROJECT["dependencies"], *(text for texts in EXTRAS.values() for text in texts)]:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_the_install_page_has_every_extra() -> None:
    rows = re.findall(r"^\| (`.*?) \|", INSTALL, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == EXTRAS.keys()


def test_the_issue_forms_are_forms() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form.keys() >= {"name", "description", "body"}
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 0
        assert all(field["attributes"]["label"] for field in fields)


# --- The images ----------------------------------------------------------------------------------------


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of the Dockerfile, stage by stage, each as its name and the rest."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found[rest.split()[2]] = []
        if word:
            found[list(found)[-1]].append((word, rest))
    return found


def instruction(stage: str, word: str) -> str:
    (rest,) = (rest for found, rest in stages()[stage] if found == word)
    return rest


def test_what_the_image_copies_exists_and_is_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [name for word, rest in stages()["build"] if word == "COPY" for name in rest.split()[:-1]]
    assert sorted(copied) == sorted(sent)
    assert all((ROOT / name).exists() for name in copied)
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    needed = [
        *targets["wheel"]["packages"],
        *targets["wheel"]["force-include"],
        PROJECT["readme"],
        *PROJECT["license-files"],
    ]
    for name in [*needed, "pyproject.toml", "constraints.txt"]:  # else the image's pip cannot build the wheel
        assert any(fnmatch(name, pattern) for copy in copied for pattern in (copy, f"{copy}/*")), name


def test_the_images_defaults_are_ours() -> None:
    arguments = dict(rest.split("=", 1) for stage in ("", "build") for word, rest in stages()[stage] if word == "ARG")
    assert arguments["PYTHON"] in PYTHONS
    assert set(arguments["EXTRAS"].split(",")) <= EXTRAS.keys()
    assert "-c constraints.txt" in instruction("build", "RUN")


def test_the_images_do_not_run_as_root() -> None:
    user, _, group = instruction("base", "USER").partition(":")
    assert int(user) > 0 and int(group) > 0
    assert f"--uid {user} " in instruction("base", "RUN")
    for stage in ("superlink", "supernode"):
        assert instruction(stage, "FROM").split()[0] == "base" and "USER" not in dict(stages()[stage])


@pytest.mark.parametrize("stage", ["superlink", "supernode"])
def test_flower_knows_the_options_of_the_image(stage: str) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")
    program, *given = json.loads(instruction(stage, "ENTRYPOINT"))
    shown = next(block for block in re.findall(r"docker run (?:.*\\\n)*.*", INSTALL) if f"comfedl-{stage}" in block)
    given += json.loads(instruction(stage, "CMD")) + shlex.split(
        shown.replace("\\\n", " ").partition(f"comfedl-{stage}")[2]
    )
    command = [Path(sys.executable).with_name(program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    known = set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    assert {word for word in given if word.startswith("--")} <= known


def test_the_images_find_the_keys_that_certs_makes(tmp_path: Path) -> None:
    certs = pytest.importorskip(
        "comfedl.flower.certs", reason="cryptography is not installed: pip install 'comfedl[flower]'"
    )
    made = {path.name for path in certs.make_certs(tmp_path / "keys", ["north"])}
    words = [
        word
        for stage in ("superlink", "supernode")
        for name in ("ENTRYPOINT", "CMD")
        for word in json.loads(instruction(stage, name))
    ]
    used = {Path(word).name for word in [*words, *re.findall(r"/keys/[\w.]+", INSTALL)] if word.startswith("/keys/")}
    assert used == {"ca.crt", "server.pem", "server.key", "north.key", "sites.json"}
    assert used <= made
