"""Runs in TensorBoard and MLflow: callbacks that write what the clients' evaluation gives, and go on after a resume."""

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
    """What ``--track`` asks for, with what it keeps in the run's folder."""
    checks.one_of("--track", kind, TRACKERS)
    if kind == "tensorboard":
        return TensorBoard(folder / "tensorboard", settings, resume)
    return MLflow(settings, name, folder / "mlflow.json", resume)


def _numbers(row: Row) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key != "round" and isinstance(value, int | float)}


class TensorBoard(Callback):
    """Event files for TensorBoard: every number of an evaluated round, and how the clients are spread.

    Args:
        folder: where the event files go.
        settings: the run's config, to be shown as text.
        resume: go on with the events that the folder holds; what is in them is not written twice.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None, resume: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(f"Tracking by TensorBoard needs the package tensorboard, {NEEDED}") from None
        self._make, self._folder, self._settings, self._resume = SummaryWriter, Path(folder), settings, resume
        self._writer: SummaryWriter | None = None
        self._known: dict[str, int] = {}

    def started(self) -> None:
        there = any(self._folder.glob("events.out.tfevents.*"))
        if there and not self._resume:
            raise ConfigError(f"{self._folder} already holds events; give another folder, or resume the run.")
        self._known = _last_steps(self._folder) if there else {}
        self._writer = self._make(str(self._folder))
        if self._settings is not None and "config" not in self._known:
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
        return step > self._known.get(key.replace(".", "/"), 0)

    def finished(self, result: Result) -> None:
        if self._writer is not None:
            if "summary" not in self._known:
                self._writer.add_text("summary", f"```\n{json.dumps(result.summary(), indent=2)}\n```", 0)
            self._writer.close()

    def failed(self, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()


def _last_steps(folder: Path) -> dict[str, int]:
    """The last step of every tag that the event files hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    held = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 1}, purge_orphaned_data=False)
    held.Reload()
    tags = held.Tags()
    kinds = (("scalars", held.Scalars), ("histograms", held.Histograms))
    steps = {tag: max(event.step for event in read(tag)) for kind, read in kinds for tag in tags[kind]}
    return steps | {tag.removesuffix("/text_summary"): 0 for tag in tags["tensors"]}


class MLflow(Callback):
    """A run in MLflow: its config as parameters, every number of an evaluated round, and the summary as an artifact.

    It goes where MLflow's own settings say (``MLFLOW_TRACKING_URI``). If that cannot be reached at the start, the run
    does not begin; if it cannot be reached later, a warning says so and the training goes on.

    Args:
        settings: the run's config.
        name: the run's name in MLflow.
        keep: a file to keep the run's id in, so that a resumed run goes on with it.
        resume: go on with the run that ``keep`` names; a round that it has already is not written twice.
        experiment: MLflow's experiment, made where there is none.
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
            raise ConfigError(f"Tracking by MLflow needs the package mlflow-skinny, {NEEDED}") from None
        self._make, self._settings, self._name = MlflowClient, settings, name
        self._keep, self._resume, self._experiment = keep, resume, experiment
        self._client: MlflowClient | None = None
        self._run, self._last = "", 0

    def started(self) -> None:
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # how it makes its tables
        try:
            client = self._make()
            if self._resume and self._keep is not None and self._keep.exists():
                self._run = str(json.loads(self._keep.read_text(encoding="utf-8"))["run_id"])
                client.update_run(self._run, status="RUNNING")
                self._last = max((m.step for m in client.get_metric_history(self._run, "objective")), default=0)
            else:
                self._run = self._begin(client)
        except Exception as error:  # whatever the store raises: the network, a database, MLflow itself
            raise ConfigError(
                f"MLflow cannot be used ({_first_line(error)}); see to MLFLOW_TRACKING_URI, or track without it."
            ) from error
        self._client = client

    def _begin(self, client: Any) -> str:
        from mlflow.entities import Param

        found = client.get_experiment_by_name(self._experiment)
        where = client.create_experiment(self._experiment) if found is None else found.experiment_id
        run = str(client.create_run(where, run_name=self._name).info.run_id)
        if self._keep is not None:
            write_atomic(self._keep, (json.dumps({"run_id": run, "experiment": self._experiment}) + "\n").encode())
        params = [Param(key, str(value)[:500]) for key, value in flat(self._settings).items() if value is not None]
        for i in range(0, len(params), 100):  # as many as MLflow takes at a time
            client.log_batch(run, params=params[i : i + 100])
        return run

    def evaluated(self, row: Row, clients: Sequence[Row]) -> None:
        step = int(row["round"] or 0)
        if self._client is None or step <= self._last:
            return
        from mlflow.entities import Metric, RunTag

        now, numbers = int(time.time() * 1000), _numbers(row)
        last = {key: numbers.pop(key) for key in ("objective",) if key in numbers}  # what a resumed run looks for
        metrics = [Metric(key, value, now, step) for key, value in {**numbers, **last}.items()]
        found = seen(row, clients)
        named = {} if found is None else {"worst_client": found.worst_client, "heaviest_client": found.heaviest_client}
        tags = [RunTag(key, str(value)) for key, value in named.items() if value is not None]
        with self._going_on() as client:
            client.log_batch(self._run, metrics=metrics, tags=tags)

    def finished(self, result: Result) -> None:
        if self._client is not None:
            with self._going_on() as client:
                client.log_dict(self._run, result.summary(), "summary.json")
                client.log_text(self._run, to_toml(self._settings), "config.toml")
                client.set_terminated(self._run, "FINISHED")

    def failed(self, error: BaseException) -> None:
        if self._client is not None:
            with self._going_on() as client:
                client.set_terminated(self._run, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    @contextmanager
    def _going_on(self) -> Iterator[Any]:
        """A tracker that cannot be reached any more must not cost the training."""
        try:
            yield self._client
        except Exception as error:
            self._client = None
            warnings.warn(
                f"MLflow is not told any more ({_first_line(error)}); the run goes on without it.", stacklevel=2
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
