"""The examples and their gallery: docs/examples.md shows what each one prints, examples/README.md lists them.

``python tests/helpers/gallery.py`` runs the examples, or those that are named, and writes what they print into the page
and the list anew.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it is started from anywhere

from helpers.pages import Shown

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "examples.md"
README = EXAMPLES / "README.md"
NOTEBOOK = "tutorial.ipynb"
APP = "flower_quickstart/quickstart/server_app.py"
LINK = re.compile(r"^\[([^\]]+)\]\(\.\./examples/([\w./]+)\)$", re.MULTILINE)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
PRINTED = re.compile(r"^```console\n\$ python examples/(\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LIST_HEAD = """# Examples

Each is one short script that runs as it is, `python examples/NAME.py`, in under a minute (those over a real
network, `flower_local.py` and `sites_with_a_csv_each.py`, take about three, `lora.py` about two). What they print is on
[a page of the documentation](../docs/examples.md). `flower_quickstart` is a Flower app with a README of its own.

"""


def scripts() -> list[Path]:
    return sorted(EXAMPLES.glob("*.py"))


def summary(script: Path) -> str:
    """The first line of its docstring."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def printed_in(page: str) -> dict[str, Shown]:
    """What the page says that each script prints."""
    return {found[1]: Shown(found[2], "", found.start(2)) for found in PRINTED.finditer(page)}


def listing(page: str) -> str:
    """examples/README.md, from the links and headings of the page."""
    places = sorted([*HEADING.finditer(page), *LINK.finditer(page)], key=lambda found: found.start())
    lines = [
        f"- [{found[2]}]({found[2]}): {found[1]}" if found.re is LINK else f"\n## {found[1]}\n" for found in places
    ]
    return LIST_HEAD + "\n".join(lines) + "\n"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user would, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)


def rewrite(names: list[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, shown in reversed(printed_in(page).items()):
        if not names or name.removesuffix(".py") in names:
            ended = run(EXAMPLES / name)
            assert ended.returncode == 0, ended.stderr
            printed = "".join(f"{line.rstrip()}\n" for line in ended.stdout.rstrip().splitlines())
            page = page[: shown.start] + printed + page[shown.start + len(shown.written) :]
    PAGE.write_text(page, encoding="utf-8")
    README.write_text(listing(page), encoding="utf-8")


if __name__ == "__main__":
    rewrite([name.removesuffix(".py") for name in sys.argv[1:]])
