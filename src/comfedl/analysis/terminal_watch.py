"""A run that goes on somewhere else, followed in a terminal."""

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


class Follower:
    """Looks at a run's folder, or at those of several runs, and says what is new.

    In a terminal a run is a bar; elsewhere an evaluated round is a line.
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
        self._at: dict[Path, int] = {}
        self._ended: dict[Path, str] = {}

    def follow(self, every: float = 0.5, wait: Callable[[float], None] = time.sleep) -> None:
        """Follow a run to its end; several runs until Ctrl-C, since another may begin."""
        if not is_run(self._path):
            self._say(f"Waiting for a run in {self._path} (Ctrl-C ends)")
        with self._bar:
            while not self.look():
                wait(every)

    def look(self) -> bool:
        """Say what is new; gives whether the one run that is followed has ended."""
        try:
            folders = find_runs([self._path])
        except ComfedlError:
            return False
        for folder in folders:
            if folder not in self._ended:
                self._look_at(folder)
        return is_run(self._path) and self._path in self._ended

    def _look_at(self, folder: Path) -> None:
        held = not lock.KNOWN or (folder / ".lock").exists()  # before the records are read, lest the last are missed
        try:
            run = read_run(folder)
        except ComfedlError:
            return  # it is being replaced just now
        if run.rounds and int(run.rounds[-1]["round"] or 0) != self._at.get(folder):
            self._show(folder, run)
        if run.done or not held:
            at = self._at.get(folder, 0)
            self._ended[folder] = "finished" if run.done else f"stopped at round {at}; comfedl run --resume goes on"
            self._say(f"{self._name(folder)}: {self._ended[folder]}")

    def _show(self, folder: Path, run: Run) -> None:
        last = run.rounds[-1]
        number, rounds = int(last["round"] or 0), int(run.settings.get("rounds", 0))
        rows = last_rows(folder / "clients.jsonl")
        said = str(seen(last, rows if rows and rows[0]["round"] == number else []) or "")
        self._at[folder] = number
        if self._console.is_terminal:
            if folder not in self._tasks:
                self._tasks[folder] = self._bar.add_task(self._name(folder), total=rounds)
            self._bar.said = said
            self._bar.update(self._tasks[folder], completed=number)
        else:
            self._say(f"{self._name(folder)}: round {number}/{rounds}, {said}")

    def _name(self, folder: Path) -> str:
        return folder.name if folder == self._path else str(folder.relative_to(self._path))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
