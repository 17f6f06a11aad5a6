"""What the site needs beside mkdocs: files from outside docs/, formulas as MathML, a search that works from disk.

A check warns of every page that would load something from elsewhere.

The pages are written so that they also read well where they lie, in the repository: they link to ``../results`` and
write formulas between dollars. MathML is made when the site is built, so that no page needs a script to show one.
"""

from __future__ import annotations

import html
import json
import logging
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.docs")
OUTSIDE = re.compile(r"\]\(\.\./((?:results|docs)/[^)]+\.(?:png|svg)|examples/[^)]+\.(?:py|ipynb))\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=["']?(?:https?:)?//[^\s"'>]*"""
    r"""|<link\b(?=[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?(?:https?:)?//[^\s"'>]*"""
)

# Explained wherever a page names them, as a text that appears on hovering.
WORKLOADS = """
*[W1]: 10 clients, logistic regression with 784 inputs and 10 classes, batches of 50
*[W2]: 1,000 clients, logistic regression with 784 inputs and 10 classes, batches of 20
*[W3]: 10 clients, a four-layer CNN on images of 32 by 32 pixels, batches of 32
*[W4]: W3 with one-step MAML, so two gradients per local step
"""
WORKER = """\
// Browsers do not start a worker from a file, so a page that was opened from disk gives the search its worker as text.
if (location.protocol === "file:") {
  const text = %s;
  window.Worker = class extends Worker {
    constructor() { super(URL.createObjectURL(new Blob([text], { type: "text/javascript" }))); }
  };
}
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures and examples outside docs/ that pages show or link to."""
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for page in pages for name in OUTSIDE.findall(page)}):
        source = str(ROOT / name)
        files.append(File.generated(config, name, abs_src_path=source, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to what lies outside docs/ lead to its place on the site, and explain the workloads."""
    return OUTSIDE.sub(r"](\1)", markdown).replace("](../README.md", "](index.md") + WORKLOADS


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML."""
    return FORMULA.sub(_formula, content)


def on_post_build(config: Any) -> None:
    """Write the search's worker for pages opened from disk, and look for what a page would load from another host."""
    (worker,) = Path(config.site_dir).glob("assets/javascripts/workers/search.*.min.js")
    script = WORKER % json.dumps(worker.read_text(encoding="utf-8"))
    Path(config.site_dir, "search", "iframe-worker.js").write_text(script, encoding="utf-8")
    _check_that_nothing_is_loaded_from_elsewhere(config)


def _check_that_nothing_is_loaded_from_elsewhere(config: Any) -> None:
    """Warn where a page would: with --strict that ends the build."""
    for page in Path(config.site_dir).rglob("*.html"):
        for found in LOADED.findall(page.read_text(encoding="utf-8")):
            LOG.warning("%s loads from elsewhere: %s", page.name, found)


def _formula(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
