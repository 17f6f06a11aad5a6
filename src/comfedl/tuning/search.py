"""tune(): run a search, or resume one, and write the best config."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from comfedl.config.schema import parse_config
from comfedl.training.run_folder import readable
from comfedl.tuning.interrupts import GuardedStudy, InterruptGuard
from comfedl.tuning.plan import Plan
from comfedl.tuning.progress import SearchProgress
from comfedl.tuning.run_trial import INTERRUPTED, DataCache, FinishedTrial
from comfedl.tuning.worker_pool import run_in_processes, run_sequentially
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.lock import NAME as LOCK, release_lock, take_lock
from comfedl.utils.toml import to_toml

if TYPE_CHECKING:
    from comfedl.tuning.study import Study


@dataclass(frozen=True)
class Tuned:
    """What a search has found so far.

    Attributes:
        trials: the finished trials, best first.
        best: the file with the best config, if any trial completed.
        url: the study's storage URL for Optuna.
        interrupted: whether the search was stopped; calling ``tune`` again resumes it.
    """

    plan: Plan
    trials: Sequence[FinishedTrial]
    best: Path | None
    url: str
    interrupted: bool

    @property
    def caution(self) -> str:
        """What not to conclude from the best value."""
        split = self.plan.metric.partition(".")[0]
        return (
            f"{self.plan.metric} comes from the {split} data that selected this config; report results on test data, "
            "with seeds that the search has not used."
        )

    @property
    def opening(self) -> str:
        """How to open the study, in Python or in a browser."""
        return f'optuna.load_study(study_name="tune", storage="{self.url}"), or: optuna-dashboard {self.url}'


def tune(plan: Plan, out: Path, jobs: int = 1, log: str = "bar") -> Tuned:
    """Run a search, or resume the one in ``out``, until it has the planned number of trials.

    Writes ``study.db`` and ``best.toml`` to ``out``. With several jobs, trials run in that many processes.
    """
    checks.at_least("jobs", jobs, 1)
    progress = SearchProgress(plan.trials, plan.steps, plan.metric, log)
    file = out / "study.db"
    url = _url(file)
    require_optuna()
    data = DataCache()
    digest = _check_data(plan, data)
    if jobs > 1:
        data = DataCache()  # frees the data: every worker loads its own
    with _locked_folder(out), _storage_errors(file), InterruptGuard() as guard:
        from comfedl.tuning.study import Study

        keep, fresh, study = True, not file.exists(), None
        try:
            with guard.deferred():
                study = Study(plan, out, url, progress, digest)
            interrupted = _run(study, progress, jobs, data, guard)
            with guard.deferred():
                trials = study.finished()
                return Tuned(plan, trials, _write_best(plan, trials, out / "best.toml"), url, interrupted)
        except Exception:
            with guard.deferred():
                keep = not fresh or (study is not None and study.count_finished() > 0)
            raise
        finally:
            with guard.deferred():
                if study is not None:
                    study.close()
                if not keep:  # an error before the first trial ended leaves no file behind
                    file.unlink(missing_ok=True)


def require_optuna() -> None:
    """Raise an error that says what to install if Optuna is missing."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("comfedl tune needs Optuna, which is not installed; pip install 'comfedl[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _run(study: Study, progress: SearchProgress, jobs: int, data: DataCache, guard: InterruptGuard) -> bool:
    """Run trials and return whether they were interrupted; either way, unfinished trials are queued again."""
    guarded = GuardedStudy(study, guard)
    try:
        progress.start()
        run_sequentially(guarded, data) if jobs == 1 else run_in_processes(guarded, jobs)
    except KeyboardInterrupt:
        return True
    finally:
        with guard.deferred():
            progress.stop()
            study.requeue_running()
    return False


def _write_best(plan: Plan, trials: Sequence[FinishedTrial], path: Path) -> Path | None:
    if not trials or trials[0].value is None:
        return None
    best, tried = trials[0], sum(trial.state != INTERRUPTED for trial in trials)
    comment = (
        f"# The best of {tried} trials (number {best.number}): {plan.metric} is {best.value!r}"
        f"{f', the mean of {plan.seeds} seeds' if plan.seeds > 1 else ''}.\n"
        "# That number selected it: report results on test data, with seeds that the search has not used.\n"
    )
    config = parse_config(plan.settings_for(best.params))
    with readable(path):
        write_atomic(path, (comment + to_toml(config.resolved())).encode())
    return path


def _check_data(plan: Plan, data: DataCache) -> str:
    """Download the data once, before any workers start, and check that they have the metric's split; their digest."""
    fed = data(plan.config, progress=True)
    split = plan.metric.partition(".")[0]
    if fed.split(split) is None:
        raise ConfigError(
            f"--metric is {plan.metric!r}, but the data have no {split} split (data.{split} is "
            f"{getattr(plan.config.data, split)}); give the clients {split} data to select by."
        )
    return fed.digest()


def _url(path: Path) -> str:
    if "?" in str(path):
        raise ConfigError(f"--out is {str(path.parent)!r}, but its path cannot contain a question mark; rename it.")
    return f"sqlite:///{path}".replace("{", "{{").replace("}", "}}")  # Optuna calls str.format() on the URL


@contextlib.contextmanager
def _locked_folder(out: Path) -> Iterator[None]:
    """Create and lock the folder for this search; new folders that stay empty are removed at the end."""
    with readable(out):
        created = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out)
    try:
        yield
    finally:
        if out.is_dir():
            release_lock(out, lock, remove=all(file.name == LOCK for file in out.iterdir()))
        for folder in created:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and Optuna about the file into a one-sentence message."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        message = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise RunFolderError(f"{path} cannot be used ({message}); fix or remove it, or give another --out.") from error
