"""TensorBoard and MLflow: callbacks that log every evaluation, and continue after a resume."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comfedl.core.client_statistics import Row
from comfedl.training.callbacks import Callback
from comfedl.training.progress import column, seen
from comfedl.training.result import Result
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError
from comfedl.utils.files import write_atomic
from comfedl.utils.toml import flat, to_toml

TRACKERS = ("tensorboard", "mlflow")
NEEDED = "which is not installed: pip install 'comfedl[track]'."


def make_tracker(kind: str, folder: Path, settings: Mapping[str, Any], name: str, resume: bool) -> Callback:
    """The callback for the option ``--track``, with its files in the run folder."""
    checks.one_of("--track", kind, TRACKERS)
    if kind == "tensorboard":
        return TensorBoard(folder / "tensorboard", settings, resume)
    return MLflow(settings, name, folder / "mlflow.json", resume)


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key != "round" and isinstance(value, int | float)}


class TensorBoard(Callback):
    """Event files for TensorBoard: every number of an evaluated round, and histograms over clients.

    Args:
        folder: the folder for the event files.
        settings: the run's config, shown as text.
        resume: continue the events in the folder, without writing any of them twice.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None, resume: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(f"Tracking with TensorBoard needs the package tensorboard, {NEEDED}") from None
        self._factory, self._folder, self._settings, self._resume = SummaryWriter, Path(folder), settings, resume
        self._writer: SummaryWriter | None = None
        self._last_steps: dict[str, int] = {}

    def started(self) -> None:
        present = any(self._folder.glob("events.out.tfevents.*"))
        if present and not self._resume:
            raise ConfigError(f"{self._folder} already holds events; give another folder, or resume the run.")
        self._last_steps = _read_last_steps(self._folder) if present else {}
        self._writer = self._factory(str(self._folder))
        if self._settings is not None and "config" not in self._last_steps:
            self._writer.add_text("config", f"```\n{to_toml(self._settings)}```", 0)

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        assert self._writer is not None
        step = int(row["round"] or 0)
        for key, value in _numbers(row).items():
            if self._is_new(key, step):
                self._writer.add_scalar(key.replace(".", "/"), value, step)
        found = seen(row, clients)
        for key in ("weight",) if found is None else ("weight", found.metric):
            values = column(clients, key)
            if values.size and self._is_new(f"clients.{key}", step):
                self._writer.add_histogram(f"clients/{key.replace('.', '/')}", values[values == values], step)
        self._writer.flush()

    def _is_new(self, key: str, step: int) -> bool:
        return step > self._last_steps.get(key.replace(".", "/"), 0)

    def finished(self, result: Result) -> None:
        if self._writer is not None:
            if "summary" not in self._last_steps:
                self._writer.add_text("summary", f"```\n{json.dumps(result.summary(), indent=2)}\n```", 0)
            self._writer.close()

    def failed(self, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()


def _read_last_steps(folder: Path) -> dict[str, int]:
    """The last step of every tag in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    held = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 1}, purge_orphaned_data=False)
    held.Reload()
    tags = held.Tags()
    kinds = (("scalars", held.Scalars), ("histograms", held.Histograms))
    steps = {tag: max(event.step for event in read(tag)) for kind, read in kinds for tag in tags[kind]}
    return steps | {tag.removesuffix("/text_summary"): 0 for tag in tags["tensors"]}


class MLflow(Callback):
    """A run in MLflow: its config as parameters, every number of an evaluated round, and the summary as an artifact.

    MLflow's settings (``MLFLOW_TRACKING_URI``) say where it is logged. If that fails at the start, the run does not
    begin; if it fails later, there is a warning and training continues.

    Args:
        settings: the run's config.
        name: the run's name in MLflow.
        keep: a file for the MLflow run's id, so that a resume can continue it.
        resume: continue the MLflow run in ``keep``, without logging any round twice.
        experiment: MLflow's experiment, created if it does not exist.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        name: str = "comfedl",
        keep: Path | None = None,
        resume: bool = False,
        experiment: str = "comfedl",
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError(f"Tracking with MLflow needs the package mlflow-skinny, {NEEDED}") from None
        self._factory, self._settings, self._name = MlflowClient, settings, name
        self._id_file, self._resume, self._experiment = keep, resume, experiment
        self._client: MlflowClient | None = None
        self._run, self._last = "", 0

    def started(self) -> None:
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # not its database migrations
        try:
            client = self._factory()
            if self._resume and self._id_file is not None and self._id_file.exists():
                self._run = str(json.loads(self._id_file.read_text(encoding="utf-8"))["run_id"])
                client.update_run(self._run, status="RUNNING")
                self._last = max((m.step for m in client.get_metric_history(self._run, "objective")), default=0)
            else:
                self._run = self._begin(client)
        except Exception as error:  # anything from the network, a database or MLflow
            raise ConfigError(
                f"MLflow cannot be used ({_first_line(error)}); check MLFLOW_TRACKING_URI, or do not track with it."
            ) from error
        self._client = client

    def _begin(self, client: Any) -> str:
        from mlflow.entities import Param

        found = client.get_experiment_by_name(self._experiment)
        where = client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = str(client.create_run(where, run_name=self._name).info.run_id)
        if self._id_file is not None:
            write_atomic(self._id_file, (json.dumps({"run_id": run, "experiment": self._experiment}) + "\n").encode())
        params = [Param(key, str(value)[:500]) for key, value in flat(self._settings).items() if value is not None]
        for i in range(0, len(params), 100):  # MLflow's limit per call
            client.log_batch(run, params=params[i : i + 100])
        return run

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        step = int(row["round"] or 0)
        if self._client is None or step <= self._last:
            return
        from mlflow.entities import Metric, RunTag

        now, numbers = int(time.time() * 1000), _numbers(row)
        last = {key: numbers.pop(key) for key in ("objective",) if key in numbers}  # by which a resume finds the round
        metrics = [Metric(key, value, now, step) for key, value in {**numbers, **last}.items()]
        found = seen(row, clients)
        named = {} if found is None else {"worst_client": found.worst_client, "heaviest_client": found.heaviest_client}
        tags = [RunTag(key, str(value)) for key, value in named.items() if value is not None]
        with self._tolerating_failures() as client:
            client.log_batch(self._run, metrics=metrics, tags=tags)

    def finished(self, result: Result) -> None:
        if self._client is not None:
            with self._tolerating_failures() as client:
                client.log_dict(self._run, result.summary(), "summary.json")
                client.log_text(self._run, to_toml(self._settings), "config.toml")
                client.set_terminated(self._run, "FINISHED")

    def failed(self, error: BaseException) -> None:
        if self._client is not None:
            with self._tolerating_failures() as client:
                client.set_terminated(self._run, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    @contextmanager
    def _tolerating_failures(self) -> Iterator[Any]:
        """Stop logging with a warning on any error, so that training continues."""
        try:
            yield self._client
        except Exception as error:
            self._client = None
            warnings.warn(
                f"Logging to MLflow has stopped ({_first_line(error)}); the run continues without it.", stacklevel=2
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
