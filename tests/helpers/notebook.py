"""The tutorial as a notebook: examples/tutorial.ipynb is made from docs/tutorial.md and carried out.

``python tests/helpers/notebook.py`` makes it anew. Blocks with a title become cells that write a file, commands become
cells of the shell, and in place of what the page says is printed stands what was printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it is started from anywhere

from helpers.pages import FENCE, blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
START = """\
# An empty folder to work in, the command line of this very environment, and its output as plain text.
import os
import sys
import tempfile

os.chdir(tempfile.mkdtemp())
os.environ.pop("FORCE_COLOR", None)
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]"""


def cells(page: str) -> list[tuple[str, str]]:
    """The kind and the source of each cell."""
    prose = FENCE.split(page)[:: FENCE.groups + 1]
    found: list[tuple[str, str]] = []
    for text, block in zip(prose, [*blocks(page), None], strict=True):
        if text.strip():
            found.append(("markdown", re.sub(r"\]\((?=[\w-]+\.md)", "](../docs/", text.strip())))
        if block is None or block.language == "text":
            continue
        if "code" not in dict(found):
            found.append(("code", START))
        body = block.body.rstrip()
        if block.title:
            body = f"%%writefile {block.title}\n{body}"
        elif block.language == "console":
            body = "%%bash\n" + "\n".join(line[2:] for line in body.splitlines() if line.startswith("$ "))
        found.append(("code", body))
    return found


def empty(page: str) -> Any:
    """The notebook before it is carried out."""
    from nbformat import v4

    new = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    made = [new[kind](source, id=f"cell-{number}") for number, (kind, source) in enumerate(cells(page))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def carry_out(notebook: Any) -> Any:
    """Run all cells in a kernel of this interpreter."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    return notebook


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


if __name__ == "__main__":
    import nbformat

    made = carry_out(empty(PAGE.read_text(encoding="utf-8")))
    made.metadata["language_info"] = {"name": "python"}
    nbformat.write(made, NOTEBOOK)
