"""The page and the pictures: what they hold, that names stay names, and that sizes stay sane."""

from __future__ import annotations

import builtins
import json
import re
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from comfedl.analysis.read_runs import read_methods
from comfedl.analysis.report_content import MAX_CLIENTS, ReportOptions, report_contents
from comfedl.analysis.report_page import offer_report, page, write_report
from comfedl.analysis.report_plots import draw_plots
from comfedl.core.client_statistics import summarise
from comfedl.utils.errors import ConfigError
from helpers.handmade import ODD, write_run

with warnings.catch_warnings():  # typer 0.20 imports what click 8.5 calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from comfedl.cli import main


class Parsed(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two methods over three seeds, with clients of odd names."""
    return [
        write_run(tmp_path / f"out/{name}/seed-{seed}", name, lift, seed, ODD)
        for name, lift in (("fedavg", 0.0), ("comfedl", 1.0))
        for seed in range(3)
    ]


def test_curves_have_the_mean_and_the_span_of_the_seeds(two: list[Path]) -> None:
    shown = report_contents(*read_methods(two))
    methods, _ = read_methods(two)
    for made, method in zip(shown["methods"], methods, strict=True):
        found = made["curves"]["validation.accuracy.worst"]
        assert found["rounds"] == [1, 2, 4]
        last = [run.rounds[-1]["validation.accuracy.worst"] for run in method.runs]
        assert found["mean"][-1] == pytest.approx(sum(last) / 3, rel=1e-4)
        assert (found["low"][-1], found["high"][-1]) == pytest.approx((min(last), max(last)), rel=1e-4)


def test_the_table_is_over_seeds_and_marks_the_best(two: list[Path]) -> None:
    table = report_contents(*read_methods(two))["table"]
    assert table["columns"] == [
        "average", "worst", "worst 10 %", "std over clients", "effective clients", "traffic, MB", "time, s",
    ]  # fmt: skip
    fedavg, comfedl = (dict(zip(table["columns"], row["cells"], strict=True)) for row in table["rows"])
    assert comfedl["worst"]["best"] and not fedavg["worst"]["best"] and not fedavg["worst"]["noise"]
    assert comfedl["std over clients"]["best"]  # less spread is better
    assert comfedl["effective clients"]["value"] < fedavg["effective clients"]["value"] == pytest.approx(3)
    assert fedavg["traffic, MB"]["value"] == 6 and fedavg["time, s"]["value"] == 2.5
    assert not any(cell["best"] for cell in (fedavg["traffic, MB"], comfedl["traffic, MB"]))


def test_configs_show_what_differs_first(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "one", quorum=0.5), write_run(tmp_path / "two", "comfedl", quorum=0.5)]
    found = report_contents(*read_methods(folders))["configs"]
    assert [row["key"] for row in found["differ"]] == ["algorithm.name"]
    assert found["differ"][0]["values"] == ["fedavg", "comfedl"]
    assert {"quorum", "data.name", "algorithm.lr"} <= {row["key"] for row in found["same"]}


def test_names_stay_names(two: list[Path]) -> None:
    """A client may be named like a tag: the page has as many scripts and elements as with harmless names."""
    html = page(report_contents(*read_methods(two)))
    parsed = Parsed(html)
    assert len(parsed.scripts) == 3
    held = json.loads(parsed.scripts[1])
    assert held["clients"][0]["names"] == ODD
    assert "<script>window.broken" not in html


def test_a_method_named_like_a_tag(tmp_path: Path) -> None:
    html = page(report_contents(*read_methods([write_run(tmp_path / "<b>&bold")])))
    assert '<h1 id="title">&lt;b&gt;&amp;bold</h1>' in html
    assert ("b", {}) not in Parsed(html).tags


def test_the_page_asks_nobody_for_anything(two: list[Path]) -> None:
    html = page(report_contents(*read_methods(two)))
    for tag, attributes in Parsed(html).tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:").startswith("data:")
    assert "default-src 'none'" in html and "connect-src 'none'" in html
    assert "url(" not in html[: html.index("</style>")] and "@import" not in html[: html.index("</style>")]
    assert len(html) < 8_000_000


def test_many_clients_are_shown_by_the_worst_the_best_and_a_sample(tmp_path: Path) -> None:
    names = [f"client-{i:04}" for i in range(1000)]
    shown = report_contents(*read_methods([write_run(tmp_path / "run", clients=names)]))
    (one,) = shown["clients"]
    assert len(one["names"]) <= MAX_CLIENTS
    third = MAX_CLIENTS // 3
    assert set(names[:third]) | set(names[-third:]) <= set(one["names"])  # later clients are worse off
    assert one["names"] == sorted(one["names"])
    assert any(f"Of 1,000 clients, {len(one['names'])} are shown" in note for note in shown["sampled"])
    worst = shown["table"]["rows"][0]["cells"][1]["value"]
    assert worst == pytest.approx(summarise("accuracy", [v[-1] for v in one["values"]["validation.accuracy"]])["worst"])


def test_a_page_of_many_runs_stays_small(tmp_path: Path) -> None:
    names, rounds = [f"client-{i}" for i in range(300)], range(1, 61)
    folders = [
        write_run(tmp_path / f"{name}/seed-{seed}", name, seed=seed, clients=names, rounds=rounds)
        for name in ("fedavg", "comfedl")
        for seed in range(4)
    ]
    shown = report_contents(*read_methods(folders))
    assert len(page(shown)) < 8_000_000
    assert [(one["method"], one["seed"]) for one in shown["clients"]] == [(0, 0), (1, 0)]
    assert "first seed" in " ".join(shown["sampled"])
    for one in shown["clients"]:
        assert one["rounds"][0] == 1 and one["rounds"][-1] == 60


def test_regression_has_no_accuracy(tmp_path: Path) -> None:
    metrics = ("loss", "rmse", "r2")
    folders = [
        write_run(tmp_path / name, name, lift, metrics=metrics) for name, lift in (("fedavg", 0), ("comfedl", 1))
    ]
    shown = report_contents(*read_methods(folders))
    assert shown["metric"] == "rmse" and shown["smaller"] == ["rmse", "loss"]
    fedavg, comfedl = (row["cells"][1] for row in shown["table"]["rows"])
    assert comfedl["best"] and comfedl["value"] < fedavg["value"]
    assert shown["verdict"][0].startswith("Validation rmse of the worst client: ")
    assert set(draw_plots(shown)) == {"curves.png", "clients.png", "final.png", "weights.png"}


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    """A client without validation data has no such number, and a loss may be infinite."""
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    for row in rows:
        if row["client"] == "b":
            del row["validation.accuracy"]
            row["validation.loss"] = float("inf")
    (folder / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = report_contents(*read_methods([folder]))
    assert shown["clients"][0]["values"]["validation.accuracy"][1] == [None, None, None]
    assert shown["clients"][0]["values"]["validation.loss"][1] == [None, None, None]
    json.loads(Parsed(page(shown)).scripts[1])
    draw_plots(shown)


def test_judged_as_asked(two: list[Path]) -> None:
    shown = report_contents(*read_methods(two), ReportOptions("train", "loss", ["Mind the gap."]))
    assert (shown["split"], shown["metric"]) == ("train", "loss")
    assert shown["verdict"][0].startswith("Train loss") and shown["verdict"][-1] == "Mind the gap."


def test_the_same_runs_give_the_same_files(two: list[Path], tmp_path: Path) -> None:
    for place in ("one", "two"):
        write_report(two, tmp_path / place / "report.html")
    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()


def test_without_plotly_one_sentence_says_what_to_do(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=re.escape("pip install 'comfedl[plot]'")):
        write_report(two, tmp_path / "report.html")
    monkeypatch.setattr("comfedl.analysis.report_page.find_spec", lambda name: None)
    assert offer_report(two[:1], tmp_path / "report.html").startswith("For a report with plots: pip install")
    assert not (tmp_path / "report.html").exists()


# The command.


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["comfedl", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_the_command(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, "report", "out", "--png", "figures")
    assert (code, err) == (0, "")
    assert "Validation accuracy of the worst client: " in out
    assert "Written to report.html" in out
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "clients.png", "curves.png", "final.png", "weights.png",
    ]  # fmt: skip
    for path in (tmp_path / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["out", "--split", "tset"], "--split is 'tset', but the runs have train, validation"),
        (["out", "--metric", "auc"], "--metric is 'auc'"),
        (["out", "--out", "out"], "cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(
    two: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command(monkeypatch, capsys, "report", *words)
    assert code == 2 and out == "" and err.startswith("error: ") and message in err and len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
