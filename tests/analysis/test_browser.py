"""The report and the live page in a real browser: nothing overlaps, a click isolates a client, no error is logged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comfedl.analysis.report_page import write_report
from comfedl.analysis.web_server import make_server
from helpers.browser import WIDTHS, sized, until
from helpers.handmade import ODD, write_run

CLIENTS = [*ODD, "a-client-with-a-rather-long-name-of-some-hospital", *(f"client-{i}" for i in range(8))]

# Everything is inside the window, but for what lies in a box that scrolls by itself; a plot is inside its own box.
OUTSIDE = """
return [...document.querySelectorAll("body *")].filter((e) => {
  if (e.closest(".scroll") && !e.classList.contains("scroll")) return false;
  const box = e.getBoundingClientRect(), plot = e.closest(".plot");
  const room = e.matches("svg.main-svg, .plot text") ? plot.getBoundingClientRect() : { left: 0, right: innerWidth };
  if (e.closest("svg") && !e.matches("svg.main-svg, text")) return false;
  return box.width > 0 && (box.right > room.right + 1 || box.left < room.left - 1);
}).map((e) => e.tagName + "." + e.className + " " + e.textContent.slice(0, 60));
"""
# No two blocks, and no two texts within a plot, lie over each other.
OVERLAPS = """
const box = (e) => e.getBoundingClientRect();
const over = (p, q) =>
  Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1.5 &&
  Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1.5;
const shown = (e) => e.checkVisibility() && box(e).width > 0;
const pairs = (all) => all.flatMap((a, i) => all.slice(i + 1)
  .filter((b) => !a.contains(b) && !b.contains(a) && over(box(a), box(b))).map((b) => [a, b]));
const kinds = "h1, h2, h3, p, .plot, .scroll, .choice, label, #legend button, summary, li";
const blocks = [...document.querySelectorAll(kinds)].filter(shown);
const texts = [...document.querySelectorAll(".plot")].map(
  (plot) => [...plot.querySelectorAll(".main-svg text")].filter((e) => shown(e) && e.textContent));
return [blocks, ...texts].flatMap(pairs).map((pair) => pair.map((e) => e.textContent.slice(0, 40)).join(" | "));
"""
OPACITIES = (
    "return [...document.querySelectorAll('#clients .plot')].map((plot) => plot.data.map((trace) => trace.opacity))"
)
# Where the point of a trace is, in the window.
PLACE = """
const [plot, trace, point] = [document.querySelectorAll(arguments[0])[arguments[1]], arguments[2], arguments[3]];
plot.scrollIntoView({ block: "center" });
const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect(), data = plot.data[trace];
return [box.left + xaxis._offset + xaxis.d2p(data.x[point]), box.top + yaxis._offset + yaxis.d2p(data.y[point])];
"""


def drawn(browser: Any, plots: int) -> None:
    count = (
        "return [...document.querySelectorAll('.plot')].filter((e) => e._fullLayout && e.querySelector('svg')).length"
    )
    until(browser, count, lambda found: found == plots)


def point_at(browser: Any, *what: Any) -> None:
    """Move the pointer over a point (see PLACE) until the browser says whose it is."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    deadline = time.monotonic() + 60
    while not browser.execute_script("return document.querySelectorAll('.hoverlayer .hovertext').length"):
        assert time.monotonic() < deadline, what
        x, y = (round(number) for number in browser.execute_script(PLACE, *what))
        pointer = ActionBuilder(browser)
        pointer.pointer_action.move_to_location(x - 3, y).move_to_location(x, y)  # a plot looks when it moves
        pointer.perform()
        time.sleep(0.2)


def click(browser: Any, what: tuple[Any, ...], script: str, holds: Callable[[Any], bool]) -> None:
    """Click on a point and wait for what comes of it; a plot that was just being redrawn has not heard the click."""
    from selenium.webdriver.common.action_chains import ActionChains

    for attempt in range(5):
        point_at(browser, *what)
        ActionChains(browser).click().perform()
        try:
            until(browser, script, holds, 60 if attempt == 4 else 8)
            return
        except AssertionError:
            if attempt == 4:
                raise


@pytest.fixture
def report(tmp_path: Path) -> str:
    runs = [
        write_run(tmp_path / "out" / name / f"seed-{seed}", name, lift, seed, CLIENTS, rounds=(1, 2, 3, 4))
        for name, lift in (("fedavg", 0.0), ("comfedl", 1.0))
        for seed in (0, 1)
    ]
    write_report(runs, tmp_path / "report.html")
    return (tmp_path / "report.html").as_uri()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_leaves_the_window(browser: Any, report: str, width: int) -> None:
    sized(browser, width)
    browser.get(report)
    drawn(browser, 4 + 2 + 1 + 2)
    assert browser.execute_script("return innerWidth") == width
    browser.execute_script("document.getElementById('shared').open = true")
    assert browser.execute_script(OUTSIDE) == []
    assert browser.execute_script(OVERLAPS) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_isolates_a_client(browser: Any, report: str, width: int) -> None:
    sized(browser, width)
    browser.get(report)
    drawn(browser, 9)
    before = browser.execute_script(OPACITIES)
    # A line for each client and seed; the worst client of each seed is highlighted.
    assert all(len(line) == 2 * len(CLIENTS) and max(line) == 1 and line.count(1) == 2 for line in before)
    named_like_a_script = ("#clients .plot", 0, 1, 2)
    click(browser, named_like_a_script, OPACITIES, lambda found: [line.index(max(line)) for line in found] == [1, 1])
    after = browser.execute_script(OPACITIES)
    own = (1, 1 + len(CLIENTS))
    assert all(value == 1 if i in own else value < 0.1 for line in after for i, value in enumerate(line))
    assert browser.execute_script("return document.getElementById('client').value") == CLIENTS[1]
    sizes = browser.execute_script("return document.querySelector('#strip .plot').data[0].marker.size")
    assert sorted(set(sizes)) == [9, 13] and sizes.count(13) == 2  # of both seeds
    assert browser.execute_script("return document.querySelector('#weights .plot').layout.shapes.length") == 1
    assert browser.execute_script("return window.broken") is None
    click(browser, named_like_a_script, OPACITIES, lambda found: found == before)


def test_a_dot_of_the_strip_leads_to_its_client(browser: Any, report: str) -> None:
    sized(browser, 1280)
    browser.get(report)
    drawn(browser, 9)
    last = len(CLIENTS) - 1  # the worst-off one, apart from the others
    chosen = "return document.getElementById('client').value"
    click(browser, ("#strip .plot", 0, 0, last), chosen, lambda found: found == CLIENTS[last])
    heading = browser.execute_script("return document.querySelector('#clients h3').textContent")
    assert heading.startswith("fedavg client-7, ") and heading.endswith(", mean of seeds 0 and 1")


def test_pointing_at_a_line_names_the_client_as_it_is_written(browser: Any, report: str) -> None:
    sized(browser, 1280)
    browser.get(report)
    drawn(browser, 9)
    point_at(browser, "#clients .plot", 0, 2, 1)
    text = until(
        browser, "return [...document.querySelectorAll('.hoverlayer text')].map((e) => e.textContent).join(' ')"
    )
    assert CLIENTS[2] in text


def test_other_data_change_every_plot(browser: Any, report: str) -> None:
    sized(browser, 1280)
    browser.get(report)
    drawn(browser, 9)
    heads = "return [...document.querySelectorAll('#curves h3, #about-strip')].map((e) => e.textContent).join()"
    assert "validation data" in browser.execute_script(heads)
    browser.execute_script(
        "[...document.querySelectorAll('#controls button')].find((b) => b.textContent === 'train').click()"
    )
    until(browser, heads, lambda found: "train data" in found and "validation" not in found)
    browser.execute_script("document.querySelector('#legend button').click()")
    count = "return document.querySelector('#curves .plot').data.length"
    until(browser, count, lambda found: found == 2)  # one method's line with its band


CELLS = (
    "return [...document.querySelectorAll('#by-client tbody tr')].map((e) => [...e.children].map((c) => c.textContent))"
)
HEADS = "return [...document.querySelectorAll('#by-client thead button')].map((e) => e.textContent)"


def test_the_table_by_client_is_sorted_by_a_click_and_shows_any_measure(browser: Any, report: str) -> None:
    sized(browser, 1280)
    browser.get(report)
    drawn(browser, 9)
    heads = browser.execute_script(HEADS)
    assert heads == [
        "client", "train samples", "validation samples", "fedavg ↑", "comfedl", "comfedl \u2212 fedavg, points",
    ]  # fmt: skip
    rows = browser.execute_script(CELLS)
    assert sorted(row[0] for row in rows) == sorted(CLIENTS)  # also those that are named like a script
    assert rows[0][0] == CLIENTS[-1]  # the worst first
    shown = [float(row[3][:6]) for row in rows]
    assert shown == sorted(shown)
    assert all(" to " in row[3] and " to " in row[4] for row in rows)  # intervals
    for column in (3, 4, 5):  # one bold number a column, and one worst client a method
        script = f"return document.querySelectorAll('#by-client tr > :nth-child({column + 1}).best').length"
        assert browser.execute_script(script) == 1
    assert browser.execute_script("return document.querySelectorAll('#by-client td.worst').length") == 2
    browser.execute_script("document.querySelectorAll('#by-client thead button')[5].click()")
    gains = [float(row[5].replace("\u2212", "-")) for row in browser.execute_script(CELLS)]
    assert gains == sorted(gains, reverse=True)
    sorted_by = browser.execute_script("return document.querySelector('#by-client [aria-sort]').textContent")
    assert sorted_by.startswith("comfedl \u2212 fedavg")
    browser.execute_script("document.querySelectorAll('#by-client thead button')[0].click()")
    assert [row[0] for row in browser.execute_script(CELLS)] == sorted(CLIENTS, key=CLIENTS.index)
    measure = (
        "const select = document.getElementById('measure'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('change')); return document.getElementById('about-by-client').textContent"
    )
    assert browser.execute_script(measure, "loss").startswith("Loss on validation data")
    assert browser.execute_script(HEADS)[-1] == "comfedl \u2212 fedavg"
    worst_first = [float(row[3][:6]) for row in browser.execute_script(CELLS)]
    assert worst_first == sorted(worst_first, reverse=True)
    assert "Loss" in browser.execute_script("return document.getElementById('about-table').textContent")
    browser.execute_script("document.querySelectorAll('#by-client tbody button')[0].click()")
    assert browser.execute_script("return document.getElementById('client').value") == CLIENTS[-1]
    assert browser.execute_script("return window.broken") is None


def test_headline_and_cards_are_about_the_same_seeds(browser: Any, report: str) -> None:
    sized(browser, 1280)
    browser.get(report)
    drawn(browser, 9)
    headline = browser.execute_script("return document.querySelector('#verdict p').textContent")
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#clients h3 small')].map((e) => e.textContent)"
    )
    for label, method in zip(labels, ("fedavg", "comfedl"), strict=True):
        worst = label.removesuffix(", mean of seeds 0 and 1").rpartition(" ")[2]
        assert f"{worst} with {method}" in headline


def test_a_wide_table_says_that_it_scrolls(browser: Any, report: str) -> None:
    hint = """
    const box = document.getElementById("by-client").parentElement, hint = box.previousElementSibling;
    return [box.scrollWidth > box.clientWidth + 1, !hint.hidden && hint.checkVisibility() && hint.textContent];
    """
    sized(browser, 390)
    browser.get(report)
    drawn(browser, 9)
    wide, said = browser.execute_script(hint)
    assert wide and "Scroll sideways" in said
    sized(browser, 1280)
    until(browser, hint, lambda found: found == [False, False])


def test_the_report_asks_for_nothing(browser: Any, report: str) -> None:
    browser.get(report)
    drawn(browser, 9)
    assert browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)") == []


def append(folder: Path, source: Path, number: int) -> None:
    """Write a round's rows as a run does: some bytes, then the others."""
    for name in ("rounds.jsonl", "clients.jsonl"):
        lines = [line for line in (source / name).read_text().splitlines(True) if json.loads(line)["round"] == number]
        with (folder / name).open("a") as file:
            for part in ("".join(lines)[:25], "".join(lines)[25:]):
                file.write(part)
                file.flush()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_page_follows_a_run(browser: Any, tmp_path: Path, width: int) -> None:
    whole = write_run(tmp_path / "whole", clients=CLIENTS, rounds=(1, 2, 3, 4))
    run = tmp_path / "run"
    with make_server([run], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            sized(browser, width)
            browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
            state = "return document.getElementById('state').textContent"
            until(browser, state, lambda found: found == "waiting")
            run.mkdir()
            (run / "config.toml").write_bytes((whole / "config.toml").read_bytes())
            rounds = (
                "const plot = document.querySelector('#curves .plot'); return plot && plot.data ? plot.data[0].x : []"
            )
            for number in (1, 2, 3):
                append(run, whole, number)
                until(browser, rounds, lambda found, number=number: found == [*range(1, number + 1)])
            assert browser.execute_script(state) == "live"
            place = ("#clients .plot", 0, 4, 1)
            click(browser, place, OPACITIES, lambda found: found[0][4] == 1 and sorted(found[0])[-2] < 0.1)
            append(run, whole, 4)
            (run / "summary.json").write_bytes((whole / "summary.json").read_bytes())
            until(browser, state, lambda found: found == "finished")
            assert browser.execute_script(rounds) == [1, 2, 3, 4]
            # The user's selection is kept.
            assert browser.execute_script(OPACITIES)[0][4] == 1
            assert browser.execute_script(OUTSIDE) == [] and browser.execute_script(OVERLAPS) == []
        finally:
            browser.get("about:blank")
            server.shutdown()
            thread.join()
