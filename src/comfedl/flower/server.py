"""The server's side of a run over sites: an ordinary run folder, plus a record of which sites answered."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from comfedl.config.schema import ENGINE_TABLES, Config, FlowerTable, SitesConfig
from comfedl.engines import AT_SITES
from comfedl.flower.engine import Sites
from comfedl.flower.registry import KnownSites, SiteRegistry, read_shape
from comfedl.flower.reply_format import ReplyFormat
from comfedl.flower.site_keys import SiteKeys
from comfedl.flower.site_tables import gather_encoding, saved_encoding, table_question, with_encoding
from comfedl.models.losses import is_balanced
from comfedl.training.arguments import make_learner
from comfedl.training.callbacks import Callback
from comfedl.training.fit import fit_on
from comfedl.training.result import Result
from comfedl.training.secure_run import check_at_sites, codec_of
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.read_back import is_whole, read_object
from comfedl.utils.toml import to_toml

logger = logging.getLogger("comfedl")

ATTENDANCE, SITES = "sites.jsonl", "sites.json"


def settings_at_sites(config: Config) -> dict[str, Any]:
    """The settings that are sent to sites: without those of the engines that run clients in this process."""
    return {key: value for key, value in config.resolved().items() if key not in ENGINE_TABLES} | {"engine": AT_SITES}


def sent_to_sites(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what only the server uses: [privacy], and the other sites' names and baselines."""

    def kept(key: str, value: Any) -> Any:
        if key == "flower":
            return {name: part for name, part in value.items() if name == "outputs"}
        if not isinstance(value, Mapping):
            return value
        return {name: kept(name, part) for name, part in value.items() if (key, name) != ("offset", "baseline")}

    return {key: kept(key, value) for key, value in settings.items() if key != "privacy"}


class Attendance(Callback):
    """Writes to ``sites.jsonl`` in the run's folder which sites answered each step, and why the others did not.

    ``sites.json`` lists the sites themselves, so that a run can resume while one of them is offline.
    """

    def __init__(self, folder: Path | None, resume: bool) -> None:
        self._folder, self._resume = folder, resume
        self._early: list[dict[str, Any]] | None = []  # events before the run's folder is made
        self.known: KnownSites | None = None

    def load(self) -> KnownSites | None:
        """The sites of the run to resume, if there is one."""
        path = None if self._folder is None else self._folder / SITES
        if not self._resume or path is None or not path.exists():
            return None
        try:
            stored = read_object(path)
            samples, shape = stored["samples"], read_shape(stored["shape"])
            if not samples or not all(is_whole(number, 1) for number in samples.values()):
                raise ValueError("its numbers are not those of sites")
            return KnownSites(dict(samples), shape)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path} cannot be read; start a new run with --force.") from error

    def add(self, event: dict[str, Any]) -> None:
        event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}
        if self._early is not None:
            self._early.append(event)
        elif self._folder is not None:
            line = json.dumps(event) + "\n"
            with (self._folder / ATTENDANCE).open("a", encoding="utf-8") as file:
                file.write(line)

    def started(self) -> None:
        early, self._early = self._early or [], None
        for event in early:
            self.add(event)
        if self._folder is not None and self.known is not None:
            sites = {"shape": self.known.shape, "samples": dict(self.known.samples)}
            write_atomic(self._folder / SITES, json.dumps(sites, indent=2).encode())


def serve(
    grid: Grid,
    config: Config,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a config over the sites of a grid.

    Writes a checkpoint after every round by default: rounds over sites take seconds, so that costs little.
    """
    options, algorithm = config.flower or FlowerTable(), config.make_method()
    attendance = Attendance(out, resume)
    share = config.outer_share if algorithm.weighs_on_outer else None
    known = attendance.load()
    keys = None if options.keys is None else SiteKeys(Path(options.keys).expanduser())
    if keys is None:
        logger.warning("Sites are who they say they are: bind their names to keys with flower.keys (docs/flower.md).")
    question = table_question(config)
    registry = SiteRegistry(
        grid,
        options.sites,
        options.patience,
        options.deadline,
        known,
        config.quorum,
        share,
        options.max_share,
        question=question,
        keys=keys,
        record=attendance.add,
    )
    attendance.known = registry.known
    run_options = config.run_options(
        checkpoint_every=config.checkpoint_every or 1,
        save_personal=False,
        out=out,
        resume=resume,
        force=force,
        callbacks=[attendance, *callbacks],
    )
    run_options.check_clients(len(registry.names))
    if config.secure is not None:
        check_at_sites(config.secure, config.clients_per_round or len(registry.names))
        if question:
            raise ConfigError(
                "Secure aggregation is asked for, but so are tables across sites, whose sites each send a summary of "
                "their own table; encode them beforehand, or leave one of the two out."
            )
    encoding = None
    if isinstance(config, SitesConfig) and question:
        encoding = saved_encoding(out) if resume else None
        encoding = encoding or gather_encoding(grid, registry, config, options.deadline, attendance.add)
    model = config.make_model_for(registry.known.shape if encoding is None else encoding.shape)
    loss = config.make_loss()
    if is_balanced(loss):
        raise ConfigError(
            'loss has "balanced" weights, but the server does not see the labels at the sites; give numbers instead.'
        )
    learner, initial, frozen = make_learner(model, loss, algorithm, config.make_metrics(), config.task)
    settings = settings_at_sites(config)
    text = to_toml(sent_to_sites(settings))
    # A longer run is the same run: its clients keep their states.
    identity = to_toml({key: value for key, value in settings.items() if key not in ("flower", "rounds", "stop")})
    run_id = hashlib.blake2b(f"{identity}\0{out}".encode(), digest_size=8).hexdigest()
    format = ReplyFormat(algorithm.steps(), initial, frozenset(learner.metrics))
    more = with_encoding(question, encoding)
    sites = Sites(grid, registry, text, run_id, options.deadline, attendance.add, format=format, more=more)
    if config.secure is not None:
        from comfedl.flower.secure_engine import SecureSites  # needs the package cryptography

        codec = codec_of(config.secure, algorithm, [*learner.metrics], len(registry.names))
        sites = SecureSites(grid, registry, text, run_id, options.deadline, attendance.add, format=format, codec=codec)
    return fit_on(
        sites,
        algorithm,
        initial,
        frozen,
        (tuple(registry.names), tuple(registry.sizes.tolist())),
        settings,
        run_options,
        encoding=encoding,
        module=model,
    )
