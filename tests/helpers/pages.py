"""The code blocks of a page of the documents, carried out in order as a reader would.

A block with a title is a file to write. Other Python blocks are run in this process, and what they print is the block
``text`` that follows. In a block ``console`` the lines after ``$`` are commands, each followed by what it prints; in
``sh`` the commands stand alone. ``python tests/helpers/pages.py docs/tutorial.md`` runs a page and writes
what was printed into it; a page that uses the files of another comes after that one's name.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TOKEN = re.compile(r"\d+\.\d+|\d+|[^\W\d]+|[*~±$%]")


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    body: str
    start: int  # where its body begins in the page


@dataclass(frozen=True)
class Shown:
    """What a page says that a block prints, and what it printed."""

    written: str
    printed: str
    start: int  # where what is written begins in the page


def blocks(text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', fence[2])
        found.append(Block(fence[1], title[1] if title else "", fence[3], fence.start(3)))
    return found


def commands(text: str) -> list[str]:
    """Every line for the command line that a page has, in a block of any kind or indented by four."""
    plain = "\n".join(line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    "))
    lines = "\n".join([*(block.body for block in blocks(text)), plain]).replace("\\\n", " ").splitlines()
    return [found[1] for line in lines if (found := re.search(r"(?:^|^\$ |-m )(comfedl [a-z].*)", line))]


def write_files(text: str) -> None:
    """Write the files that a page has its reader write."""
    for block in blocks(text):
        if block.title:
            Path(block.title).write_text(block.body, encoding="utf-8")


def carry_out(text: str) -> Iterator[Shown]:
    """Carry out a page in the current folder, block by block."""
    names: dict[str, object] = {"__name__": "documented"}
    found = blocks(text)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.title:
            Path(block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            with said() as printed:
                exec(compile(block.body, "a block", "exec"), names)
            if following is not None and following.language == "text":
                yield Shown(following.body, printed.getvalue(), following.start)
        elif block.language == "toml":
            tomllib.loads(block.body)
        elif block.language == "sh":
            for line in block.body.splitlines():
                command(line)
        elif block.language == "console":
            for entry in re.finditer(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE):
                yield Shown(entry[2], command(entry[1]), block.start + entry.start(2))


def command(line: str) -> str:
    """Carry out a line for the shell in this process, which is quicker, and give back what it prints."""
    from comfedl.cli import main

    program, *arguments = shlex.split(line, comments=True)
    before = sys.argv
    try:
        with said() as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
            if program == "python":
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                assert program == "comfedl", line
                sys.argv = ["comfedl", *arguments]
                main.main()
    except SystemExit as ended:
        assert not ended.code, f"{line}\n{errors.getvalue()}"
    finally:
        sys.argv = before
    return printed.getvalue()


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


def difference(shown: Shown) -> str:
    """Where the two differ in words, in whole numbers, or in others by more than rounding may do; or nothing.

    Times are left out, and marks of what is noise. One sample of a hundred more or fewer is within the tolerance.
    """
    written, printed = (TOKEN.findall(re.sub(r"[\d.]+ s\b|[*~]", "", text)) for text in (shown.written, shown.printed))
    for mine, theirs in zip(written, printed, strict=False):
        if mine != theirs and not ("." in mine and "." in theirs and near(float(mine), float(theirs))):
            return f"the page says {mine!r} where {theirs!r} was printed:\n{shown.printed}"
    return "" if len(written) == len(printed) else f"the page says less or more than was printed:\n{shown.printed}"


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.03 + 0.03 * abs(a)


def rewrite(path: Path, before: Path | None = None) -> None:
    """Carry out a page and write into it what was printed."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, "")
        if before is not None:
            write_files(before.read_text(encoding="utf-8"))
        found = list(carry_out(text))
    for shown in reversed(found):
        printed = "".join(f"{line.rstrip()}\n" for line in shown.printed.splitlines())
        text = text[: shown.start] + printed + text[shown.start + len(shown.written) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    rewrite(pages[-1], pages[0] if len(pages) > 1 else None)
