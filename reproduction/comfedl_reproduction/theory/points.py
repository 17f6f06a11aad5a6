"""Measures points in parallel; each is stored when it is finished and never measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.process_pool import init_worker, process_pool
from comfedl_reproduction.theory.extensions import Plus
from comfedl_reproduction.theory.measure import SETTINGS, Bias, Drift, Rate, Row
from comfedl_reproduction.theory.robust import ROBUST_SETTINGS, Descent, Estimate

Point = Rate | Drift | Bias | Plus | Descent | Estimate


def measure(out: Path, points: Sequence[Point], workers: int) -> list[Row]:
    """The rows of all points; stored points are not measured again."""
    files = {point: out / "theory-points" / f"{file_stem(point)}.json" for point in points}
    try:
        (out / "theory-points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written ({error.strerror}); give another --out.") from error
    found = {point: load(file) for point, file in files.items()}
    missing = [point for point in points if found[point] is None]
    with progress(sum(point.cost for point in points)) as advance:
        advance(sum(point.cost for point in points if found[point] is not None))
        for point in measure_missing(missing, files, min(workers, len(missing))):
            advance(point.cost)
    return [row for point in points for row in found[point] or load(files[point]) or []]


def file_stem(point: Point) -> str:
    """The name of a point's file, with a hash of everything that determines the measurement."""
    more = [ROBUST_SETTINGS] if isinstance(point, Descent | Estimate) else []
    key = json.dumps([type(point).__name__, asdict(point), SETTINGS, *more])
    return f"{type(point).__name__.lower()}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


def load(file: Path) -> list[Row] | None:
    """The rows of a stored point; None if it is missing or damaged."""
    try:
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return rows


def measure_one(point: Point, file: Path) -> Point:
    """Measure a point and store it."""
    write_atomic(file, json.dumps(point.rows()).encode())
    return point


def measure_missing(points: Sequence[Point], files: dict[Point, Path], workers: int) -> Iterator[Point]:
    """Measure points and yield each one as soon as it is stored."""
    if workers < 2:
        for point in points:
            yield measure_one(point, files[point])
        return
    # Ctrl-C also stops the workers, since a point has no checkpoint to write first.
    with process_pool(workers, init_worker, (1, False)) as pool:
        for future in as_completed([pool.submit(measure_one, point, files[point]) for point in points]):
            yield future.result()


@contextmanager
def progress(total: float) -> Iterator[Callable[[float], object]]:
    """A bar with the time left; silent without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("theory"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("theory", total=total)
        yield lambda cost: bar.advance(task, cost)
