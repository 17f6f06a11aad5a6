"""A run folder: config.toml, rounds.jsonl, clients.jsonl, summary.json, model.safetensors, personal/, checkpoint/.

For tables and named labels, data.json records how rows were turned into numbers. clients_table.jsonl has each client's
numbers of samples and, at the end, the 95 % intervals of its scores. data.sha256 is the digest of the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.secret_noise import KEY_BYTES
from comfedl.data.stored_array import KNOWN_BY
from comfedl.data.tabular import Encoding
from comfedl.training import checkpoint
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Records, Snapshot
from comfedl.training.client_records import ClientRows
from comfedl.training.client_scorer import MOST_SCORED
from comfedl.training.client_table import COUNTS, HIGH, LOW, MOST_IN_TABLE, SAMPLES
from comfedl.training.options import RunOptions
from comfedl.training.personal_models import model_bytes, write_personal
from comfedl.training.result import Result
from comfedl.utils import torchrun
from comfedl.utils.errors import ConfigError, DataError, Diverged, RunFolderError
from comfedl.utils.files import remove_partial_files, write_atomic
from comfedl.utils.lock import is_locked, release_lock, still_locked, take_lock
from comfedl.utils.read_back import read_object, read_rows, read_text, unreadable
from comfedl.utils.signals import install_handlers, restore_handlers
from comfedl.utils.toml import flat, to_toml
from comfedl.utils.tree import Tree

TABLE = "clients_table.jsonl"
DIGEST = "data.sha256"
NOISE_KEY = "comfedl-noise.key"  # not to be published: with it, the noise can be removed
LAST_MODEL = "last.safetensors"  # the model after the last round, if early stopping chose another
# The files of a run. A folder with any of them is not free, since they would be replaced.
FILES = (
    *("config.toml", "data.json", "rounds.jsonl", "clients.jsonl", "summary.json", "model.safetensors", LAST_MODEL),
    *("personal", "checkpoint", TABLE, DIGEST, NOISE_KEY),
    *("tensorboard", "mlflow.json"),  # of trackers
    *("sites.json", "sites.jsonl"),  # of runs over sites
    torchrun.LAUNCH_FILE,
)
# Config keys that say where a run is computed, not which run it is: another engine may resume it.
PLACES = ("engine", "embedded", "distributed", "flower")
RECORDS = ("rounds.jsonl", "clients.jsonl")
REPLACED = ".replaced-"  # begins the name of the hidden folder in which --force keeps the old run for the time being

# Seconds between checkpoints if ``checkpoint_every`` is not given.
SECONDS = 30.0


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the system into a message that says what could not be written, and what to do."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written ({error.strerror}); make room on the disk, or give another --out."
        ) from error


def check_free(path: Path, force: bool, resume: bool = False) -> None:
    """Refuse a folder with files that a run would replace, unless ``force`` or ``resume`` allows it."""
    with readable(path):
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a folder; give another --out.")
        recover_replaced(path)
        present = [name for name in FILES if (path / name).exists()]
    if present and resume and "config.toml" not in present:
        raise RunFolderError(
            f"{path} holds no run to resume (no config.toml), but files that a run would replace "
            f"({', '.join(present)}); give the folder of a run, or a new one."
        )
    if present and not force and not resume:
        raise RunFolderError(
            f"{path} already holds a run ({', '.join(present)}); give another folder, resume it (--resume), or "
            "replace it (--force)."
        )


def recover_replaced(path: Path) -> None:
    """Undo what a killed ``--force`` left: restore the run that it was to replace, unless the new one got further.

    The new run has the folder once it has a checkpoint or has finished.
    """
    left = sorted(path.glob(f"{REPLACED}*"), key=os.path.getmtime, reverse=True) if path.is_dir() else []
    if not left or is_locked(path):
        return
    lock = take_lock(path)
    try:
        for old in left:
            if (path / "config.toml").exists() and (
                (path / "summary.json").exists() or checkpoint.exists(path / "checkpoint")
            ):
                shutil.rmtree(old)
                continue
            if (path / "config.toml").exists():
                _remove_files(path)
            _restore(path, old)
    finally:
        release_lock(path, lock)


def _remove_files(path: Path) -> None:
    """Remove a run's files, its config first: without it the others are known to be leftovers."""
    for name in FILES:
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)


def _restore(path: Path, old: Path) -> None:
    """Move a replaced run back, its config last: until then ``recover_replaced`` knows that it is not complete."""
    for kept in sorted(old.iterdir(), key=lambda kept: kept.name == "config.toml"):
        target = path / kept.name
        if target.is_dir() and kept.is_dir():
            shutil.rmtree(target)
        os.replace(kept, target)
    old.rmdir()


class RunFolder(Callback):
    """Writes a run's records and checkpoints as it goes, and reads them for a resume.

    What was checkpointed is never deleted. A run that is interrupted or fails writes a checkpoint of its last round;
    one that diverges, or that cannot start or write, does not. If there is no checkpoint it leaves no files, and a run
    that it was to replace is restored.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        options: RunOptions,
        fingerprint: str = "",
        encoding: Encoding | None = None,
        frozen: Params | None = None,
        digest: str | None = None,
    ) -> None:
        if options.force and options.resume:
            raise ConfigError("force and resume are both given; force replaces the run, resume continues it: give one.")
        check_free(path, options.force, options.resume)
        self.path, self._settings, self._fingerprint = path, settings, fingerprint
        self._every, self._resumed = options.checkpoint_every, options.resume and (path / "config.toml").exists()
        self._personal, self.personal_bytes = options.save_personal, 0  # expected size of the personal models
        self._encoding, self._options, self._digest = encoding, options, digest
        self._frozen: Params = (frozen or {}) if options.save_frozen else {}
        self._left_out = frozenset() if options.save_frozen else frozenset(frozen or {})  # of every model
        self._streams: dict[str, IO[str]] = {}
        self._digests = {name: hashlib.sha256() for name in RECORDS}
        self._regular: tuple[int, Records] = 0, {}  # the records before a round that is evaluated only as the last
        self._created: list[Path] = []
        self._replaced: Path | None = None
        self._lock: IO[str] | None = None
        self._started = self._cleared = self._finished = False
        self._saved_round = 0
        self._last: Snapshot | None = None
        self._last_records: Records = {}
        self.can_save: Callable[[BaseException], bool] = lambda error: True
        """Whether the clients' states can still be had after this error."""
        self.names: Sequence[str] = ()
        self.samples: Mapping[str, NDArray[np.int64]] = {}
        """split -> the number of samples of every client."""
        self.counts_samples = True
        self.on_disk = False
        """Whether the data are known by their files alone."""
        self.noise_key: bytes | None = None
        """The key of a private run's noise, if it has one to keep."""
        self._stop: int | None = None
        self._handlers: dict[int, Any] = {}

    # Resuming.

    def load(
        self, like: Tree, device: torch.device, names: Sequence[str]
    ) -> tuple[Snapshot | None, list[Row], ClientRows]:
        """The last checkpoint, if there is one, and the records up to it."""
        if not self._resumed:
            return None, [], ClientRows()
        with readable(self.path):
            self._take_lock()
            self._check_config()
            cause = self._encoding_differs() + (KNOWN_BY if self.on_disk else "")
            saved = checkpoint.read(self.path / "checkpoint", self._fingerprint, like, device, cause)
            if saved is not None and saved.snapshot.round > self._options.rounds:
                raise RunFolderError(
                    f"{self.path} already has {saved.snapshot.round} rounds, but rounds is {self._options.rounds}; "
                    "give at least as many to make it longer, or start over with --force."
                )
            longer = saved is not None and self._options.rounds > saved.snapshot.round
            for name in RECORDS:
                size, checksum = 0, hashlib.sha256().hexdigest()
                if saved is not None:
                    size, checksum = (saved.regular if longer else saved.records)[name]
                self._digests[name] = _truncate(self.path / name, size, checksum)
            rows = list(read_rows(self.path / RECORDS[0]))
            with unreadable(self.path / RECORDS[1], "start over with --force"):
                client_rows = ClientRows.read(read_rows(self.path / RECORDS[1]), names)
            for name in ("summary.json", "model.safetensors", LAST_MODEL):  # of a finished run that gets more rounds
                (self.path / name).unlink(missing_ok=True)
            if (self.path / "personal").is_dir():
                shutil.rmtree(self.path / "personal")
        if saved is not None:
            self._saved_round = saved.snapshot.round
        return (None if saved is None else saved.snapshot), rows, client_rows

    def _check_config(self) -> None:
        """Raise if the run to resume has another config."""
        written = read_text(self.path / "config.toml")
        if not _same_run(written, self._settings):
            raise RunFolderError(
                f"{self.path} holds a run with another config ({_difference(written, self._settings)}); resume it "
                "with its own config, or start over with --force."
            )

    def read_noise_key(self) -> bytes | None:
        """The key of the noise of the run to resume; None for a run that has no checkpoint and no key yet."""
        path = self.path / NOISE_KEY
        if not self._resumed:
            return None
        with readable(self.path):
            self._check_config()
        if not path.exists() and not checkpoint.exists(self.path / "checkpoint"):
            return None
        try:
            key = bytes.fromhex(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise RunFolderError(
                f"{path}, the key of this run's noise, cannot be read; without it the run cannot be resumed: put the "
                "file back, or start over with --force."
            )
        return key

    def _write_noise_key(self) -> None:
        if self.noise_key is None or (self.path / NOISE_KEY).exists():
            return
        before = os.umask(0o077)
        try:
            write_atomic(self.path / NOISE_KEY, self.noise_key.hex().encode("ascii"))
        finally:
            os.umask(before)

    def _encoding_differs(self) -> str:
        """A sentence if the table is encoded in another way than the run's was; else nothing."""
        file = self.path / "data.json"
        if self._encoding is None or not file.exists() or read_text(file) == _described(self._encoding):
            return ""
        return (
            f" Its table was encoded in another way ({file}): its rows or options were others, or another version of "
            "comfedl began the run, which can also finish it."
        )

    # Writing.

    def started(self) -> None:
        with readable(self.path):
            self._started = True
            self._created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            remove_partial_files(self.path, FILES)
            self._check_disk_space()
            if not self._resumed:
                self._set_aside()
            # The config first: a folder without one holds no file of a run.
            write_atomic(self.path / "config.toml", to_toml(self._settings).encode())
            self._write_noise_key()
            if self._encoding is not None:
                write_atomic(self.path / "data.json", _described(self._encoding).encode())
            if self._digest is not None:
                write_atomic(self.path / DIGEST, f"{self._digest}\n".encode())
            self._write_table()
            torchrun.record_launch(self.path)
            for name in RECORDS:
                self._streams[name] = (self.path / name).open("a" if self._resumed else "w", encoding="utf-8")
        self._catch_signals()
        self._saved_at = time.monotonic()

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        number = int(row["round"])  # type: ignore[arg-type]
        if not self._options.is_scheduled(number):
            self._regular = number, self._written()
        with readable(self.path):
            for name, rows in zip(RECORDS, ([row], clients), strict=True):
                left = iter(rows)
                while text := "".join(json.dumps(each) + "\n" for each in islice(left, 10_000)):
                    self._streams[name].write(text)
                    self._digests[name].update(text.encode())
                self._streams[name].flush()

    def _write_table(self, number: int = 0, bounds: Mapping[str, Row] | None = None) -> None:
        """Every client's numbers of samples and, after the last round, the bounds of its scores."""
        if not 0 < len(self.names) <= MOST_IN_TABLE:
            return
        lines = []
        for place, client in enumerate(self.names):
            counts = {f"{split}{SAMPLES}": int(sizes[place]) for split, sizes in self.samples.items()}
            known = counts if self.counts_samples else {**counts, COUNTS: False}
            lines.append(json.dumps({"round": number, "client": client, **known, **(bounds or {}).get(client, {})}))
        write_atomic(self.path / TABLE, "".join(f"{line}\n" for line in lines).encode())

    def _bounds_if_possible(self, result: Result) -> dict[str, Row]:
        """The bounds, or none with a warning: a run that has trained must not fail for want of them."""
        try:
            return self._bounds(result)
        except Exception as error:  # of a user's model or loss, or of too little memory
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            warnings.warn(
                f"The run in {self.path} has no confidence intervals, since they failed ({reason}).", stacklevel=2
            )
            return {}

    def _bounds(self, result: Result) -> dict[str, Row]:
        """The bounds of the clients' scores on held-out data, or else on train data."""
        found: dict[str, Row] = {}
        # With ``eval_clients``, maybe no client that was evaluated has data of some split.
        for split in result.judged_splits:
            table = result.table_at_end(split)
            for row in table:
                bounds = {
                    f"{split}.{name}{end}": row[name + end]
                    for name in table.columns
                    for end in (LOW, HIGH)
                    if name + end in row
                }
                found.setdefault(str(row["client"]), {}).update(bounds)
        return found

    def settled(self, snapshot: Snapshot) -> None:
        due = time.monotonic() - self._saved_at >= SECONDS if self._every is None else snapshot.round % self._every == 0
        self._last, self._last_records = snapshot, self._written()
        if due or self._stop is not None:
            self._save(snapshot)
        if self._stop is not None:
            raise KeyboardInterrupt(f"stopped by {signal.Signals(self._stop).name} after round {snapshot.round}")

    def _save(self, snapshot: Snapshot) -> None:
        with readable(self.path):
            self._check_lock()
            for stream in self._streams.values():
                os.fsync(stream.fileno())
            records = self._last_records
            regular = self._regular[1] if self._regular[0] == snapshot.round else records
            checkpoint.write(self.path / "checkpoint", snapshot, records, self._fingerprint, regular, self._frozen)
        self._saved_at, self._saved_round = time.monotonic(), snapshot.round

    def _written(self) -> Records:
        """The records so far."""
        return {
            name: (os.fstat(stream.fileno()).st_size, self._digests[name].hexdigest())
            for name, stream in self._streams.items()
        }

    def finished(self, result: Result) -> None:
        if self._last is not None and self._saved_round < self._last.round:
            self._save(self._last)  # so that the run can be made longer
        with readable(self.path):
            self._check_lock()
            self._close()
            whole, left_out = Model(params=result.params, buffers=result.buffers), self._left_out
            write_atomic(self.path / "model.safetensors", model_bytes(whole, left_out))
            if result.last is not None and result.round != result.rounds[-1]["round"]:
                write_atomic(self.path / LAST_MODEL, model_bytes(result.last, left_out))
            if self._personal:
                write_personal(self.path / "personal", result, left_out)
            if len(self.names) <= MOST_SCORED:
                self._write_table(result.round, self._bounds_if_possible(result))
            self._check_lock()
            write_atomic(self.path / "summary.json", (json.dumps(result.summary(), indent=2) + "\n").encode())
            self._finished = True
            if self._replaced is not None:
                shutil.rmtree(self._replaced)
        self._release()

    def failed(self, error: BaseException) -> None:
        unusable = isinstance(error, Diverged | ConfigError | DataError | RunFolderError)
        newer = self._last if self._last is not None and self._last.round > self._saved_round else None
        # A run that it was to replace comes back instead, unless this one has a checkpoint already.
        keep = self._replaced is None and not self._finished and not unusable
        if newer is not None and keep and self.can_save(error):
            with contextlib.suppress(OSError):
                self._save(newer)  # the run can be used as it is, and resumed
        with contextlib.suppress(OSError):
            self._close()
        try:
            if self._started and not self._finished and still_locked(self.path, self._lock):
                self._clean_up()
        finally:
            self._release(error)
        self._remove_created()

    def _clean_up(self) -> None:
        """Keep a run that has a checkpoint; otherwise restore what was there before."""
        if self._resumed or self._saved_round:
            if self._replaced is not None:
                shutil.rmtree(self._replaced)
            return
        if not os.path.isdir(self.path):
            return
        if self._cleared:  # before the old run was set aside, these are its files
            _remove_files(self.path)
        if self._replaced is not None:
            _restore(self.path, self._replaced)

    # Helpers.

    def _set_aside(self) -> None:
        """Move a run that is to be replaced into a hidden folder, until this one has succeeded."""
        old = [name for name in FILES if (self.path / name).exists()]
        if old:
            self._replaced = Path(tempfile.mkdtemp(dir=self.path, prefix=REPLACED))
            for name in old:
                os.replace(self.path / name, self._replaced / name)
        self._cleared = True

    def _check_disk_space(self) -> None:
        """Check before training that the personal models will fit on the disk."""
        free = shutil.disk_usage(self.path).free
        if self.personal_bytes > free:
            raise RunFolderError(
                f"The clients' personal models will take {self.personal_bytes / 1e9:.3g} GB, but {self.path} has only "
                f"{free / 1e9:.3g} GB free; make room, give another --out, or set save_personal = false."
            )

    def _remove_created(self) -> None:
        """Remove the folders that this run created, if they are empty."""
        for folder in self._created:
            if os.path.isdir(folder) and not any(folder.iterdir()):
                folder.rmdir()

    def _close(self) -> None:
        """Close both streams, even if the first one fails."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.callback(stream.close)

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = take_lock(self.path)

    def _check_lock(self) -> None:
        """Refuse to write if the folder was removed or replaced meanwhile: what is there may be another run."""
        if not still_locked(self.path, self._lock):
            raise RunFolderError(
                f"{self.path} was removed or replaced while this run was writing to it, so nothing more is written; "
                "start it again with another --out."
            )

    def _release(self, error: BaseException | None = None) -> None:
        restore_handlers(self._handlers, error)
        self._handlers = {}
        # A folder without a run needs no lock: this process has left nothing behind.
        release_lock(self.path, self._lock, remove=not any(os.path.exists(self.path / name) for name in FILES))
        self._lock = None

    def _catch_signals(self) -> None:
        """On SIGINT or SIGTERM finish the round and write a checkpoint; on a second signal stop at once."""

        def stop(number: int, frame: types.FrameType | None) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = number
            if not self._handlers:  # the run has ended already, since another process died
                return
            sys.stderr.write("stopping after this round, with a checkpoint; interrupt again to stop at once\n")

        self._handlers = install_handlers(stop)


def _same_run(written: str, settings: Mapping[str, Any]) -> bool:
    """Whether a recorded config is of the same run, on whichever engine."""
    try:
        recorded, given = tomllib.loads(written), tomllib.loads(to_toml(settings))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return False
    # Another number of rounds makes it longer; of early stopping, only the measure must stay.
    stops = [settings.get("stop", {}) for settings in (recorded, given)]
    measures = [stop.get("metric") if isinstance(stop, dict) else None for stop in stops]
    for settings in (recorded, given):  # how much of the data is in memory at a time changes nothing
        if isinstance(settings.get("data"), dict):
            settings["data"].pop("memory_mb", None)
    keys = {*recorded, *given} - {*PLACES, "rounds", "stop"}
    return measures[0] == measures[1] and all(recorded.get(key) == given.get(key) for key in keys)


def _truncate(path: Path, size: int, checksum: str) -> hashlib._Hash:
    """Truncate a record file to its size at a checkpoint, and verify its checksum."""
    with path.open("ab") as file:
        length = file.tell()
        file.truncate(min(size, length))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != checksum:
        raise RunFolderError(f"{path} has changed since its checkpoint was written; start over with --force.")
    return digest


def read_digest(path: Path) -> str | None:
    """The digest of a run's data; None if an earlier version, which kept none, began the run."""
    return read_text(path / DIGEST, 1000).strip() if (path / DIGEST).exists() else None


def finished_row(path: Path, settings: Mapping[str, Any], digest: str) -> Row | None:
    """The row of the model of a finished run with exactly these settings; None if there is no such run.

    Raises:
        RunFolderError: if its data had another digest.
    """
    if not (path / "summary.json").exists() or read_text(path / "config.toml") != to_toml(settings):
        return None
    if read_digest(path) not in (None, digest):
        raise RunFolderError(
            f"{path} holds a finished run whose data were others, although its config is the same; restore the data, "
            "start over with --force, or give another --out."
        )
    rows, chosen = list(read_rows(path / "rounds.jsonl")), read_object(path / "summary.json").get("round")
    if not rows:
        raise RunFolderError(f"{path / 'rounds.jsonl'} has no rows, but the run has finished; give another --out.")
    return with_all_spent(next((row for row in rows if row["round"] == chosen), rows[-1]), rows)


def with_all_spent(row: Row, rows: Sequence[Row]) -> Row:
    """A row with the epsilon of all rounds: those after the model's round have used the clients' data, too."""
    return {**row, "epsilon": rows[-1]["epsilon"]} if "epsilon" in rows[-1] else row


def _described(encoding: Encoding) -> str:
    """The text of data.json."""
    return json.dumps({"version": 1, **encoding.to_dict()}, indent=1) + "\n"


def _difference(written: str, settings: Mapping[str, Any]) -> str:
    """The first value in which two configs differ, of those that may not change on a resume."""
    try:
        recorded, given = (flat(tomllib.loads(text)) for text in (written, to_toml(settings)))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return "which is not TOML"
    for key in [*given, *recorded]:
        may_differ = key in ("rounds", "data.memory_mb") or (
            key.partition(".")[0] in (*PLACES, "stop") and key != "stop.metric"
        )
        if recorded.get(key) != given.get(key) and not may_differ:
            values = [f"{key} = {found[key]!r}" if key in found else f"no {key}" for found in (recorded, given)]
            return f"{values[0]} in the folder, {values[1]} given"
    return "in the order of its tables"
