"""The server's part of a run over sites: an ordinary run folder, with who answered when beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from comfedl.config.schema import ENGINE_TABLES, LOOP, Config, FlowerTable
from comfedl.engines import AT_SITES
from comfedl.flower.engine import Sites
from comfedl.flower.registry import Known, Roll
from comfedl.training.callbacks import Callback
from comfedl.training.fit import fit_on
from comfedl.training.result import Result
from comfedl.training.validation import check_counts, make_learner
from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.toml import to_toml

RECORD, SITES = "sites.jsonl", "sites.json"


def settings_at_sites(config: Config) -> dict[str, Any]:
    """A config's settings for sites: how this process would run clients has no place there."""
    return {key: value for key, value in config.resolved().items() if key not in ENGINE_TABLES} | {"engine": AT_SITES}


class Attendance(Callback):
    """Writes who was asked for what and when, and who did not answer and why, to ``sites.jsonl`` in the run's folder.

    ``sites.json`` beside it holds the sites themselves, so that a run can go on while one of them is away.
    """

    def __init__(self, folder: Path | None, resume: bool) -> None:
        self._folder, self._resume = folder, resume
        self.known: Known | None = None

    def before(self) -> Known | None:
        """The sites of the run that goes on; None where there is none."""
        path = None if self._folder is None else self._folder / SITES
        if not self._resume or path is None or not path.exists():
            return None
        try:
            said = json.loads(path.read_text("utf-8"))
            return Known({str(k): int(v) for k, v in said["samples"].items()}, tuple(map(int, said["shape"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path} cannot be read; start the run anew with --force.") from error

    def add(self, event: dict[str, Any]) -> None:
        if self._folder is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, **event}) + "\n"
            with (self._folder / RECORD).open("a", encoding="utf-8") as file:
                file.write(line)

    def started(self) -> None:
        if self._folder is not None and self.known is not None:
            told = {"shape": list(self.known.shape), "samples": dict(self.known.samples)}
            write_atomic(self._folder / SITES, json.dumps(told, indent=2).encode())


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
    attendance = Attendance(out, resume)
    roll = Roll(grid, options.sites, options.patience, options.deadline, attendance.before(), config.quorum)
    attendance.known = roll.known
    check_counts(len(roll.names), config.clients_per_round, config.eval_clients)
    model = config.make_model_for(roll.known.shape)
    _, initial, frozen = make_learner(model, config.loss, algorithm)
    settings = settings_at_sites(config)
    text = to_toml(settings)
    which = to_toml({key: value for key, value in settings.items() if key != "flower"})
    name = hashlib.blake2b(f"{which}\0{out}".encode(), digest_size=8).hexdigest()
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
        module=model,
    )
