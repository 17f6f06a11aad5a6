"""Points of a measurement: measured side by side, each stored when it is finished, and never measured twice."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic
from comfedl_reproduction.theory.extensions import Plus
from comfedl_reproduction.theory.measure import SETTINGS, Bias, Drift, Rate, Row

Point = Rate | Drift | Bias | Plus


def measured(out: Path, points: Sequence[Point], workers: int) -> list[Row]:
    """The rows of all points; those that are stored are not run again."""
    places = {point: out / "theory-points" / f"{name(point)}.json" for point in points}
    try:
        (out / "theory-points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written ({error.strerror}); give another --out.") from error
    found = {point: stored(place) for point, place in places.items()}
    missing = [point for point in points if found[point] is None]
    with progress(sum(point.cost for point in points)) as advance:
        advance(sum(point.cost for point in points if found[point] is not None))
        for point in finished(missing, places, min(workers, len(missing))):
            advance(point.cost)
    return [row for point in points for row in found[point] or stored(places[point]) or []]


def name(point: Point) -> str:
    """What a point is stored under: the same only for the same measurement."""
    key = json.dumps([type(point).__name__, asdict(point), SETTINGS])
    return f"{type(point).__name__.lower()}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


def stored(place: Path) -> list[Row] | None:
    """The rows of a finished point, or None."""
    try:
        rows: list[Row] = json.loads(place.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return rows


def finish(point: Point, place: Path) -> Point:
    """Measure a point and store it."""
    write_atomic(place, json.dumps(point.rows()).encode())
    return point


def finished(points: Sequence[Point], places: dict[Point, Path], workers: int) -> Iterator[Point]:
    """Measure points, each yielded when it is stored."""
    if workers < 2:
        for point in points:
            yield finish(point, places[point])
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=settle_in) as pool:
        futures = [pool.submit(finish, point, places[point]) for point in points]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def settle_in() -> None:
    """A worker has one thread, and ends with the process that started it, however that ends."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def progress(total: float) -> Iterator[Callable[[float], object]]:
    """A bar with the time left; nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("theory"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("theory", total=total)
        yield lambda cost: bar.advance(task, cost)
