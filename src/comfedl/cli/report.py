"""comfedl report: compare runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    split: Annotated[
        str | None, typer.Option(help="Compare on train, validation or test (default: validation).")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Compare by this metric, such as personal_accuracy (default: accuracy).")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Also write PNG plots into this folder.")] = None,
) -> None:
    """Compare runs on one HTML page that opens offline: a verdict, curves, clients, weights and a table."""
    from comfedl.analysis.report_content import ReportOptions
    from comfedl.analysis.report_page import write_report

    verdict, written = write_report(runs, out, ReportOptions(split, metric), png)
    for sentence in verdict:
        typer.echo(sentence)
    typer.echo(f"Written to {', '.join(str(path) for path in written)}")
