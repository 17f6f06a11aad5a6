"""fit(): the loop of rounds, with evaluation. Records and progress hang on it as callbacks; it knows no algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Round, Traffic, Used
from comfedl.core import client_statistics
from comfedl.core.client_statistics import Row
from comfedl.core.objectives import Model, Params
from comfedl.core.protocol import Diverged, Engine, Replies
from comfedl.core.reply_validation import QuorumError, Screen
from comfedl.data.federated import FederatedData
from comfedl.data.tabular import Encoding
from comfedl.engines import make_engine
from comfedl.models.losses import LossFunction
from comfedl.training import personal_models
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.client_records import ClientRows, Evaluation, few_as_list
from comfedl.training.result import Result
from comfedl.training.run_folder import RunFolder
from comfedl.training.validation import check_fit, check_kinds, check_loop, make_learner
from comfedl.training.worker_callback import Follower
from comfedl.utils import rng, tree
from comfedl.utils.errors import ConfigError
from comfedl.utils.fingerprint import fingerprint
from comfedl.utils.toml import describe


def fit(
    model: nn.Module | Mapping[str, Tensor],
    fed: FederatedData,
    algorithm: Algorithm,
    rounds: int = 200,
    seed: int = 0,
    loss: str | LossFunction = "cross_entropy",
    clients_per_round: int | None = None,
    eval_every: int = 1,
    engine: str = "embedded",
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    *,
    eval_clients: int | None = None,
    force: bool = False,
    checkpoint_every: int | None = None,
    save_personal: bool = True,
    quorum: float = 0.5,
    callbacks: Sequence[Callback] = (),
    settings: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> Result:
    """Train a model over the clients' data.

    Args:
        model: an nn.Module, which is not changed, or for a ``Composition`` a dict of tensors.
        fed: the clients' data.
        algorithm: the method, with its hyper-parameters.
        rounds: how many rounds of communication.
        seed: the same seed gives the same run, to the bit.
        loss: "cross_entropy", "bce" (two classes, one output), "mse", "mae" or "huber", or a function (output, y) ->
            mean loss of the batch; a problem of the reader's own brings its own and does not use it.
        clients_per_round: how many clients take part in a round, drawn uniformly; None is all of them.
        eval_every: evaluate the clients after every so many rounds, and after the last.
        eval_clients: how many clients are evaluated, drawn once for the run; None is all of them. The records and the
            objective are then of these clients alone, and say of how many.
        engine: where the clients live: "embedded", or "distributed" under torchrun, where every process makes this call
            and the first one alone writes, shows progress and has the callbacks.
        out: a folder to write the run to.
        resume: go on with the run that ``out`` holds, from its last checkpoint: the result is the same, to the bit.
        progress: show a progress bar.
        force: replace a run that ``out`` already holds.
        checkpoint_every: write a checkpoint to ``out`` after every so many rounds; None is about every 30 seconds.
        save_personal: write every client's personal model to ``out`` at the end.
        quorum: the share of a round's replies that must be usable; with fewer the run stops, its state saved.
        callbacks: what else hangs on the loop.
        settings: what to record in the run folder as its config; by default these arguments.
        engine_options: the engine's own arguments, such as ``{"vectorize": "serial"}`` (see ``Embedded``).

    Raises:
        ConfigError: a setting that cannot be used.
        DataError: data that cannot be used with this model.
        Diverged: training left the finite numbers.
    """
    started = time.perf_counter()
    check_loop(
        rounds, seed, clients_per_round, eval_every, eval_clients, checkpoint_every, quorum, save_personal, engine
    )
    check_kinds(algorithm, fed, clients_per_round, eval_clients)
    learner, initial, frozen = make_learner(model, loss, algorithm)
    first = next(iter(initial["params"].values()))
    data = fed.to(first.dtype, first.device)
    check_fit(learner, initial, data)
    clients = make_engine(
        engine, data, learner, algorithm.steps(), int(seed), algorithm.client_state(initial), engine_options
    )
    shown = settings or {
        "loss": describe(loss),
        "rounds": int(rounds),
        "seed": int(seed),
        "clients_per_round": clients_per_round,
        "eval_every": int(eval_every),
        "eval_clients": eval_clients,
        "checkpoint_every": checkpoint_every,
        "quorum": quorum,
        "save_personal": None if save_personal else False,
        "engine": engine,
        "algorithm": describe(algorithm),
    }
    return fit_on(
        clients,
        algorithm,
        initial,
        frozen,
        data.contents(),
        shown,
        rounds=int(rounds),
        seed=int(seed),
        clients_per_round=clients_per_round,
        eval_every=int(eval_every),
        eval_clients=eval_clients,
        out=out,
        resume=resume,
        force=force,
        progress=progress,
        checkpoint_every=checkpoint_every,
        save_personal=save_personal,
        quorum=quorum,
        callbacks=callbacks,
        encoding=fed.encoding,
        module=model if isinstance(model, nn.Module) else None,
        started=started,
    )


def fit_on(
    clients: Engine,
    algorithm: Algorithm,
    initial: Model,
    frozen: Params,
    contents: Iterable[Any],
    settings: Mapping[str, Any],
    *,
    rounds: int,
    seed: int,
    clients_per_round: int | None = None,
    eval_every: int = 1,
    eval_clients: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    checkpoint_every: int | None = None,
    save_personal: bool = True,
    quorum: float = 0.5,
    callbacks: Sequence[Callback] = (),
    encoding: Encoding | None = None,
    module: nn.Module | None = None,
    started: float | None = None,
) -> Result:
    """Train on an engine that has its clients already, wherever their data are; ``fit`` says what the rest is.

    ``initial`` and ``frozen`` are the model's parts as ``make_learner`` gives them, and ``contents`` is what a run must
    have in common with the one that it goes on with, besides ``settings`` and the model.
    """
    started = time.perf_counter() if started is None else started
    if resume and out is None:
        raise ConfigError("resume is given without out; say which run's folder to go on with.")
    count, device = len(clients.names), next(iter(initial["params"].values())).device
    watchers: list[Callback] = list(callbacks) if clients.leads else []
    try:
        if progress and clients.leads:
            from comfedl.training.progress import (
                Progress,  # rich draws from Python's global generator when it is imported
            )

            watchers.append(Progress(rounds))
        folder = None
        if out is not None and clients.leads:
            known = fingerprint(*contents, *frozen.values(), *tree.leaves(initial))
            folder = RunFolder(Path(out), settings, force, resume, known, checkpoint_every, save_personal)
            if save_personal and count > personal_models.MOST_FILES:
                folder.room = count * tree.nbytes({**initial, "frozen": frozen})
            folder.encoding = encoding
            watchers.insert(0, folder)
        elif out is not None:
            watchers.append(Follower(save_personal))

        screen = Screen(initial, clients.names, quorum)
        run = _Run(algorithm, clients, seed, clients_per_round or count, watchers, screen, eval_clients)
        algorithm.check(count, run.participants)
        state, first_round = algorithm.init(initial, count), 1
        loaded = clients.share(partial(_load, folder, resume, state, device, clients.names))
        if loaded is not None:
            saved, run.rows, run.client_rows = loaded
            if saved is not None:
                state = tree.map(lambda leaf, mate: leaf.to(mate.device), saved.state, state)
                first_round = saved.round + 1
                clients.restore(saved.clients())
                run.traffic = Traffic(**saved.traffic)
                run.screen.offences = dict(saved.offences)
        for watcher in watchers:
            watcher.started()
        for number in range(first_round, rounds + 1):
            state = run.whole_round(number, state, number % eval_every == 0 or number == rounds)
        run.close()
        final = algorithm.reported(state)
        result = Result(
            params=_with_frozen(final["params"], frozen),
            buffers=final["buffers"],
            rounds=run.rows,
            clients=few_as_list(run.client_rows),
            traffic=run.traffic.so_far(),
            seconds=time.perf_counter() - started,
            names=clients.names,
            ask_personal=run.personal_models(rounds, final, frozen),
            module=module,
        )
        for watcher in watchers:
            watcher.finished(result)
        clients.end(None)
    except BaseException as error:
        if isinstance(error, Diverged):
            error.advice = algorithm.explain(error)
        for watcher in watchers:
            try:
                watcher.failed(error)
            except Exception as second:  # one that cannot clean up must not keep the others from it
                error.add_note(f"{type(watcher).__name__} failed as well: {second}")
        clients.end(error)
        raise
    return result


def _load(
    folder: RunFolder | None, resume: bool, state: State, device: torch.device, names: Sequence[str]
) -> tuple[Snapshot | None, list[Row], ClientRows] | None:
    """What there is to go on from."""
    return folder.load(state, device, names) if folder is not None and resume else None


def _with_frozen(params: Params, frozen: Params) -> Params:
    """All of a model's parameters; those that are not trained never travel."""
    return {**params, **frozen}


class _Run:
    """The loop's own state: what has been recorded and sent so far."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        seed: int,
        participants: int,
        watchers: Sequence[Callback],
        screen: Screen,
        eval_clients: int | None,
    ) -> None:
        self.algorithm, self.engine, self.seed, self.participants = algorithm, engine, seed, participants
        self.watchers, self.screen, self.steps = watchers, screen, algorithm.steps()
        self.rows: list[Row] = []
        self.client_rows = ClientRows()
        self.traffic = Traffic()
        self.judged: Sequence[int] = range(len(engine.names))
        self.told: Row = {}
        self._open: Callable[[], None] | None = None
        if eval_clients is not None:
            generator = rng.generator(seed, "evaluated clients")
            drawn = generator.choice(len(engine.names), size=eval_clients, replace=False, shuffle=False)
            self.judged, self.told = sorted(drawn.tolist()), {"eval_clients": int(eval_clients)}

    def whole_round(self, number: int, state: State, evaluated: bool) -> State:
        """A round with its evaluation and its callbacks; those of an engine that lags come after the next round."""
        here = Round(
            number, self.seed, self.participants, self.engine, self.traffic, self.screen, self.steps, evaluated
        )
        try:
            state, used = self.algorithm.round(state, here)
        except (QuorumError, Diverged):
            self.close()  # the round before this one is whole, and the run can go on from it
            raise
        self.close()
        record = self._evaluate(number, state, used) if evaluated else None
        if record is not None and not self.engine.lags:
            record()
            record = None
        self.engine.settle()
        snapshot = Snapshot(number, state, self.engine.kept(), self.traffic.so_far(), dict(self.screen.offences))
        self._open = partial(self._done, snapshot, record)
        if not self.engine.lags:
            self.close()
        return state

    def close(self) -> None:
        """Do what is left to do of a round."""
        left, self._open = self._open, None
        if left is not None:
            left()

    def _done(self, snapshot: Snapshot, record: Callable[[], None] | None) -> None:
        if record is not None:
            record()
        for watcher in self.watchers:
            watcher.round_done(snapshot.round)
            watcher.settled(snapshot)

    def _evaluate(self, number: int, state: State, used: Used) -> Callable[[], None]:
        """Ask the clients for their scores; the function that is returned takes them and records them."""
        message = {"model": self.algorithm.reported(state)}
        answers = self.engine.later("evaluate", self.judged, message, number)
        return partial(self._record, number, used, answers, self.traffic.so_far())

    def _record(self, number: int, used: Used, answers: Callable[[], Replies], sent: Mapping[str, int]) -> None:
        replies = self.screen.passed(number, self.judged, answers(), self.steps["evaluate"].sends)
        weights: dict[int, float] = {}
        for client, weight in zip(used.clients, used.weights.tolist(), strict=True):
            weights[client] = weights.get(client, 0.0) + weight  # a client may be drawn more than once
        more = {"weight": np.array([weights.get(i, 0.0) for i in replies.clients])}
        if used.duals is not None:
            more["dual"] = used.duals.numpy()[replies.clients]
        found = Evaluation.of(number, self.engine.names, replies.clients, replies.scores("scores"), more)
        sizes = torch.from_numpy(self.engine.sizes[replies.clients])
        row: Row = {
            "round": number,
            **client_statistics.summarise_columns(found.columns(leave_out=more)),
            "objective": float(self.algorithm.combined(replies.numbers("value"), sizes)),
            "effective_clients": client_statistics.effective_clients(list(weights.values())),
            "weights_kl": client_statistics.divergence(list(weights.values())),
            "participants": len(weights),
            **sent,
            **self.told,
        }
        self.rows.append(row)
        self.client_rows.add(found)
        for watcher in self.watchers:
            watcher.evaluated(row, few_as_list(found))

    def personal_models(self, number: int, model: Model, frozen: Params) -> Callable[[Sequence[int]], Iterator[Model]]:
        """A function that gives clients' personal models as they are after this round."""

        def ask(clients: Sequence[int]) -> Iterator[Model]:
            for found in self.engine.run("personal", clients, {"model": model}, number).each("model"):
                yield Model(params=_with_frozen(found["params"], frozen), buffers=found["buffers"])

        return ask
