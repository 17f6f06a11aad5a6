"""The server's part of a run over sites: an ordinary run folder, with who answered when beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from comfedl.callbacks import Callback
from comfedl.config import LOOP, Config, FlowerTable
from comfedl.engines import AT_SITES
from comfedl.engines.flower.engine import Sites
from comfedl.engines.flower.roll import Roll
from comfedl.inputs import check_counts, make_learner
from comfedl.result import Result
from comfedl.run import fit_on
from comfedl.settings import to_toml

RECORD = "sites.jsonl"


def settings_at_sites(config: Config) -> dict[str, Any]:
    """A config's settings for sites: how this process would run clients has no place there."""
    return {key: value for key, value in config.resolved().items() if key != "embedded"} | {"engine": AT_SITES}


class Attendance(Callback):
    """Writes who was asked for what, and who did not answer and why, to ``sites.jsonl`` in the run's folder."""

    def __init__(self, folder: Path | None, resume: bool) -> None:
        self._folder, self._resume = folder, resume
        self._early: list[str] | None = []

    def add(self, event: dict[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        if self._early is not None:
            self._early.append(line)
        elif self._folder is not None:
            with (self._folder / RECORD).open("a", encoding="utf-8") as file:
                file.write(line)

    def started(self) -> None:
        early, self._early = self._early or [], None
        if self._folder is not None:
            with (self._folder / RECORD).open("a" if self._resume else "w", encoding="utf-8") as file:
                file.writelines(early)

    def failed(self, error: BaseException) -> None:
        """Leave nothing where the run has left nothing."""
        if self._folder is not None and not (self._folder / "config.toml").exists():
            with contextlib.suppress(OSError):
                (self._folder / RECORD).unlink()
                self._folder.rmdir()


def serve(
    grid: Grid,
    config: Config,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a config over the sites that a grid reaches.

    A checkpoint is written after every round unless the config says otherwise: a round over sites takes seconds.
    """
    options, algorithm = config.flower or FlowerTable(), config.make_algorithm()
    roll = Roll(grid, options.sites, options.patience, options.deadline)
    check_counts(len(roll.names), config.clients_per_round, config.eval_clients)
    _, initial, frozen = make_learner(config.make_model_for(roll.shape), "cross_entropy", algorithm)
    settings = settings_at_sites(config)
    text = to_toml(settings)
    name = hashlib.blake2b(f"{text}\0{out}".encode(), digest_size=8).hexdigest()
    attendance = Attendance(out, resume)
    loop = {key: getattr(config, key) for key in LOOP if key not in ("engine", "save_personal", "checkpoint_every")}
    return fit_on(
        Sites(grid, roll, text, name, options.deadline, attendance.add),
        algorithm,
        initial,
        frozen,
        (tuple(roll.names), tuple(roll.sizes.tolist())),
        settings,
        **loop,
        checkpoint_every=config.checkpoint_every or 1,
        save_personal=False,
        out=out,
        resume=resume,
        force=force,
        callbacks=[attendance, *callbacks],
    )
