"""What the site needs beside mkdocs: pictures from outside docs/, formulas as MathML, and a check that it is offline.

The pages are written so that they also read well where they lie, in the repository: they link to ``../results`` and
write formulas between dollars. MathML is made when the site is built, so that no page needs a script to show one.
"""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.docs")
PICTURE = re.compile(r"\]\(\.\./((?:results|docs)/[^)]+\.(?:png|svg))\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=["']?(?:https?:)?//[^\s"'>]*"""
    r"""|<link\b(?=[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?(?:https?:)?//[^\s"'>]*"""
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that pages show from outside docs/."""
    pages = [file.content_string for file in files.documentation_pages()]
    for picture in sorted({name for page in pages for name in PICTURE.findall(page)}):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to what lies outside docs/ lead to its place on the site."""
    return PICTURE.sub(r"](\1)", markdown).replace("](../README.md", "](index.md")


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML."""
    return FORMULA.sub(_formula, content)


def on_post_build(config: Any) -> None:
    """Warn of what a page would load from another host: with --strict that ends the build."""
    for page in Path(config.site_dir).rglob("*.html"):
        for found in LOADED.findall(page.read_text(encoding="utf-8")):
            LOG.warning("%s loads from elsewhere: %s", page.name, found)


def _formula(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
