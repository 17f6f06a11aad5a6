"""Follow runs of other processes in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn

from comfedl.analysis.read_runs import Run, find_runs, is_run, last_rows, read_run
from comfedl.training.progress import TwoLines, seen
from comfedl.utils import lock
from comfedl.utils.errors import ComfedlError


class RunWatcher:
    """Polls a run folder, or a folder of runs, and shows progress.

    In a terminal each run has a progress bar; otherwise each evaluated round is printed as a line.
    """

    def __init__(self, path: Path, console: Console) -> None:
        self._path, self._console = path, console
        self._bar = TwoLines(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[Path, TaskID] = {}
        self._last_round: dict[Path, int] = {}
        self._ended: set[Path] = set()

    def follow(self, every: float = 0.5, wait: Callable[[float], None] = time.sleep) -> None:
        """Follow a single run to its end, or a folder of runs until Ctrl-C, since new runs may start."""
        if not is_run(self._path):
            self._print(f"Waiting for a run in {self._path} (Ctrl-C to stop)")
        with self._bar:
            while not self.poll():
                wait(every)

    def poll(self) -> bool:
        """Show what is new; return whether the watched run has ended (never for a folder of runs)."""
        try:
            folders = find_runs([self._path])
        except ComfedlError:
            return False
        for folder in folders:
            if folder not in self._ended:
                self._poll_run(folder)
        return is_run(self._path) and self._path in self._ended

    def _poll_run(self, folder: Path) -> None:
        # Checked before reading: a run that ends in between is then still seen as running, and read once more.
        running = lock.is_locked(folder)
        try:
            run = read_run(folder)
        except ComfedlError:
            return  # the folder is being replaced
        if run.rounds and int(run.rounds[-1]["round"] or 0) != self._last_round.get(folder):
            self._show(folder, run)
        if run.done or not running:
            self._ended.add(folder)
            stopped = f"stopped at round {self._last_round.get(folder, 0)}; continue with comfedl run --resume"
            self._print(f"{self._name(folder)}: {'finished' if run.done else stopped}")

    def _show(self, folder: Path, run: Run) -> None:
        last = run.rounds[-1]
        number, rounds = int(last["round"] or 0), int(run.settings.get("rounds", 0))
        rows = last_rows(folder / "clients.jsonl")
        status = str(seen(last, rows if rows and rows[0]["round"] == number else []) or "")
        self._last_round[folder] = number
        if self._console.is_terminal:
            if folder not in self._tasks:
                self._tasks[folder] = self._bar.add_task(self._name(folder), total=rounds)
            self._bar.said = status
            self._bar.update(self._tasks[folder], completed=number)
        else:
            self._print(f"{self._name(folder)}: round {number}/{rounds}, {status}")

    def _name(self, folder: Path) -> str:
        return folder.name if folder == self._path else str(folder.relative_to(self._path))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
