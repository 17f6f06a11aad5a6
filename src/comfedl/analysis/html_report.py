"""One HTML file with everything in it: it opens offline and asks nobody for anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files as resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comfedl import __version__
from comfedl.analysis.read_runs import Method, read_methods
from comfedl.analysis.report_data import Asked, contents
from comfedl.training.run_folder import readable
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

MISSING = "pip install 'comfedl[plot]'"


def plotly_js() -> str:
    """Plotly's script, as the Python package brings it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(f"A report needs Plotly, which is not installed: {MISSING}.") from None
    return str(get_plotlyjs())


def page(shown: Mapping[str, Any], live: bool = False) -> str:
    """The page; a live one asks its own server for what is new."""
    parts = resources("comfedl.analysis").joinpath
    script, style, body = (parts(f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html"))
    # A "<" inside a script could end it, whatever the client's name is; in JSON it can be written otherwise.
    data = json.dumps({**shown, "live": live}, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    filled = {
        "title": escape(str(shown["title"])),
        "verdict": "".join(f"<p>{escape(sentence)}</p>" for sentence in shown["verdict"]),
        "connect": "'self'" if live else "'none'",
        "version": escape(__version__),
        "style": style,
        "plotly": plotly_js(),
        "data": data,
        "script": script,
    }
    out = []
    for piece in body.split("{{"):
        name, found, rest = piece.partition("}}")
        out.append(filled[name] + rest if found else piece)
    return "".join(out)


def write_report(
    runs: Iterable[Path], out: Path, asked: Asked | None = None, png: Path | None = None
) -> tuple[list[str], list[Path]]:
    """Write the page of these runs, and pictures where a folder for them is given; gives the verdict and the files."""
    plotly_js()  # said before anything is read
    return write_page(*read_methods(runs), out, asked, png)


def offer_report(
    runs: Sequence[Path], out: Path, asked: Asked | None = None, names: Mapping[Path, str] | None = None
) -> str:
    """Write a report where Plotly is there; gives the line that tells the reader."""
    if not has_plotly():
        return f"For a report with plots: {MISSING}, then comfedl report {' '.join(str(run) for run in runs)}"
    write_page(*read_methods(runs, names), out, asked)
    return f"Report: {out}"


def has_plotly() -> bool:
    """Whether a report can be made."""
    return find_spec("plotly") is not None


def write_page(
    methods: Sequence[Method], notes: Sequence[str], out: Path, asked: Asked | None = None, png: Path | None = None
) -> tuple[list[str], list[Path]]:
    """The same for methods that have been read."""
    shown = contents(methods, notes, asked)
    html = page(shown).encode()
    drawn: dict[str, bytes] = {}
    if png is not None:
        from comfedl.analysis.plots import pictures

        drawn = pictures(shown)
    files = {out: html} | {(png or Path()) / name: image for name, image in drawn.items()}
    for path, content in files.items():
        with readable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
    return list(shown["verdict"]), list(files)
