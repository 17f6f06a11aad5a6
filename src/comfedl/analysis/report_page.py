"""The report: one self-contained HTML file that opens offline and loads nothing from the network."""

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
from comfedl.analysis.report_content import ReportOptions, report_contents
from comfedl.training.run_folder import readable
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic

INSTALL = "pip install 'comfedl[plot]'"


def plotly_js() -> str:
    """Plotly's script, from the Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(f"A report needs Plotly, which is not installed: {INSTALL}.") from None
    return str(get_plotlyjs())


def page(contents: Mapping[str, Any], live: bool = False) -> str:
    """The page; a live one polls its own server for updates."""
    parts = resources("comfedl.analysis").joinpath
    script, style, body = (parts(f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html"))
    # A client name with "<" could end the script element; JSON allows an escape for it.
    data = json.dumps({**contents, "live": live}, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    values = {
        "title": escape(str(contents["title"])),
        "verdict": "".join(f"<p>{escape(sentence)}</p>" for sentence in contents["verdict"]),
        "connect": "'self'" if live else "'none'",
        "version": escape(__version__),
        "style": style,
        "plotly": plotly_js(),
        "data": data,
        "script": script,
    }
    out = []
    for piece in body.split("{{"):  # not str.replace, which would also fill in placeholders inside the values
        name, closed, rest = piece.partition("}}")
        out.append(values[name] + rest if closed else piece)
    return "".join(out)


def write_report(
    runs: Iterable[Path], out: Path, options: ReportOptions | None = None, png: Path | None = None
) -> tuple[list[str], list[Path]]:
    """Write the report on these runs, and PNGs if a folder for them is given; return the verdict and the files."""
    plotly_js()  # fail before reading the runs
    return write_page(*read_methods(runs), out, options, png)


def offer_report(
    runs: Sequence[Path], out: Path, options: ReportOptions | None = None, names: Mapping[Path, str] | None = None
) -> str:
    """Write a report if Plotly is installed; return a line for the user, on where it is or how to get one."""
    if not has_plotly():
        return f"For a report with plots: {INSTALL}, then comfedl report {' '.join(str(run) for run in runs)}"
    write_page(*read_methods(runs, names), out, options)
    return f"Report: {out}"


def has_plotly() -> bool:
    """Whether a report can be written."""
    return find_spec("plotly") is not None


def write_page(
    methods: Sequence[Method],
    notes: Sequence[str],
    out: Path,
    options: ReportOptions | None = None,
    png: Path | None = None,
) -> tuple[list[str], list[Path]]:
    """As ``write_report``, for runs that have been read."""
    contents = report_contents(methods, notes, options)
    files = {out: page(contents).encode()}
    if png is not None:
        from comfedl.analysis.report_plots import draw_plots

        files |= {png / name: image for name, image in draw_plots(contents).items()}
    for path, content in files.items():
        with readable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
    return list(contents["verdict"]), list(files)
