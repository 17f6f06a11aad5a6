"""The site of the documents as its readers have it: built, opened from disk in a real browser, and searched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.browser import WIDTHS, sized, until

pytest.importorskip("material", reason="Material for MkDocs is not installed: pip install '.[docs]'")
ROOT = Path(__file__).parents[2]
RESULTS = "return [...document.querySelectorAll('.md-search-result__link')].map((e) => e.getAttribute('href'))"
WIDER = """
return [...document.querySelectorAll("main *")].filter((e) => {
  const box = e.getBoundingClientRect();
  if (e.closest(".md-typeset__scrollwrap, pre, math, svg, .md-sidebar, .md-annotation")) return false;
  return box.width > 0 && box.right > innerWidth + 1;
}).map((e) => e.tagName + " " + e.textContent.slice(0, 60));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("effective clients", "glossary.html#effective-clients"),
        ("outvoted", "glossary.html#outvoted"),
    ],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_works_from_disk(browser: Any, site: Path, words: str, place: str, width: int) -> None:
    sized(browser, width)
    browser.get((site / "which-method.html").as_uri())
    browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    field = browser.find_element("css selector", ".md-search__input")
    until(browser, "return document.querySelector('.md-search__input').offsetWidth > 0")
    field.send_keys(words)
    found = until(browser, RESULTS)
    places = [f"{Path(link.path).name}#{link.fragment}" for link in map(urlsplit, found)]
    assert place in places[:12]
    browser.get(found[places.index(place)])
    marked = until(browser, "return [...document.querySelectorAll('mark')].map((e) => e.textContent.toLowerCase())")
    assert set(marked) & set(words.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window_or_asks_for_anything(browser: Any, site: Path, width: int) -> None:
    sized(browser, width)
    for page in sorted(set(site.glob("*.html")) - {site / "404.html"}):  # which only a server shows
        browser.get(page.as_uri())
        assert browser.execute_script(WIDER) == [], page.name
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page.name
        asked = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert [name for name in asked if not name.startswith(("file:", "blob:", "data:"))] == [], page.name


def test_the_workloads_are_explained_where_they_are_named(browser: Any, site: Path) -> None:
    for page in ("performance.html", "training.html"):
        browser.get((site / page).as_uri())
        said = browser.execute_script(
            "return [...document.querySelectorAll('abbr')].map((e) => e.title || e.ariaLabel)"
        )
        assert said and all(said), page
