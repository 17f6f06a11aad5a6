"""tune(): a search from its beginning, or from where it was stopped, to the best config."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from comfedl.config.schema import parse_config
from comfedl.training.run_folder import readable
from comfedl.tuning.interrupts import Stops, Whole
from comfedl.tuning.plan import Plan
from comfedl.tuning.progress import Watch
from comfedl.tuning.run_trial import INTERRUPTED, Data, Ended
from comfedl.tuning.worker_pool import run_here, run_in_processes
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.lock import release_lock, take_lock
from comfedl.utils.toml import to_toml

if TYPE_CHECKING:
    from comfedl.tuning.study import Study


@dataclass(frozen=True)
class Tuned:
    """What a search has found so far.

    Attributes:
        trials: how each trial ended, the best first.
        best: the file with the best config, where there is one.
        url: the study's, as Optuna takes it.
        interrupted: whether the search was stopped; the same again goes on with it.
    """

    plan: Plan
    trials: Sequence[Ended]
    best: Path | None
    url: str
    interrupted: bool

    @property
    def caution(self) -> str:
        """What the best value is not."""
        split = self.plan.metric.partition(".")[0]
        return (
            f"{self.plan.metric} is of {split} data, which the choice was made by; judge figures on test data, with "
            "seeds that no choice has seen."
        )

    @property
    def opening(self) -> str:
        """How to look at the study: in Python, or in a browser."""
        return f'optuna.load_study(study_name="tune", storage="{self.url}"), or: optuna-dashboard {self.url}'


def tune(plan: Plan, out: Path, jobs: int = 1, log: str = "bar") -> Tuned:
    """Run a search, or go on with the one that ``out`` holds, until it has as many trials as the plan says.

    ``out`` gets ``study.db`` and ``best.toml``. With several jobs, trials run in as many processes.
    """
    checks.at_least("jobs", jobs, 1)
    watch = Watch(plan.trials, plan.steps, plan.metric, log)
    file = out / "study.db"
    url = _url(file)
    optuna_needed()
    data = Data()
    _check_data(plan, data)
    if jobs > 1:
        data = Data()  # each process has its own
    with _folder(out), _readable_study(file), Stops() as stops:
        from comfedl.tuning.study import Study

        keep, fresh, study = True, not file.exists(), None
        try:
            with stops.held():
                study = Study(plan, out, url, watch)
            interrupted = _run(study, watch, jobs, data, stops)
            with stops.held():
                trials = study.ended()
                return Tuned(plan, trials, _write_best(plan, trials, out / "best.toml"), url, interrupted)
        except Exception:
            with stops.held():
                keep = not fresh or (study is not None and study.counted() > 0)
            raise
        finally:
            with stops.held():
                if study is not None:
                    study.close()
                if not keep:  # an error before any trial has ended leaves nothing
                    file.unlink(missing_ok=True)


def optuna_needed() -> None:
    """Say what to do where Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError("comfedl tune needs Optuna, which is not installed; pip install 'comfedl[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _run(study: Study, watch: Watch, jobs: int, data: Data, stops: Stops) -> bool:
    """Run trials; gives whether that was interrupted. However it ends, what is under way is put back."""
    asked = Whole(study, stops)
    try:
        watch.start()
        run_here(asked, data) if jobs == 1 else run_in_processes(asked, jobs)
    except KeyboardInterrupt:
        return True
    finally:
        with stops.held():
            watch.stop()
            study.put_back()
    return False


def _write_best(plan: Plan, trials: Sequence[Ended], path: Path) -> Path | None:
    if not trials or trials[0].value is None:
        return None
    best, tried = trials[0], sum(trial.state != INTERRUPTED for trial in trials)
    comment = (
        f"# The best of {tried} trials (number {best.number}): {plan.metric} is {best.value!r}"
        f"{f', the mean of {plan.seeds} seeds' if plan.seeds > 1 else ''}.\n"
        "# It was chosen by that number: judge it on test data, with seeds that no choice has seen.\n"
    )
    config = parse_config(plan.at(best.params))
    with readable(path):
        write_atomic(path, (comment + to_toml(config.resolved())).encode())
    return path


def _check_data(plan: Plan, data: Data) -> None:
    """Fetch the data once, before there are several processes, and see that there is something to choose by."""
    fed = data(plan.config, progress=True)
    split = plan.metric.partition(".")[0]
    if fed.split(split) is None:
        raise ConfigError(
            f"--metric is {plan.metric!r}, but the data have no {split} split (data.{split} is "
            f"{getattr(plan.config.data, split)}); give clients some {split} data to choose by."
        )


def _url(path: Path) -> str:
    if "?" in str(path):
        raise ConfigError(f"--out is {str(path.parent)!r}, but a study's path cannot have a question mark; rename it.")
    return f"sqlite:///{path}".replace("{", "{{").replace("}", "}}")  # Optuna fills in templates


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder, for this search alone; one that it made and left empty is taken away."""
    with readable(out):
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out)
    try:
        yield
    finally:
        release_lock(out, lock)
        for folder in made:
            if not any(folder.iterdir()):
                folder.rmdir()


@contextlib.contextmanager
def _readable_study(path: Path) -> Iterator[None]:
    """What SQLite and Optuna say of a file that they cannot use, as one sentence."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        said = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise RunFolderError(f"{path} cannot be used ({said}); see to it, or give another --out.") from error
