"""``fit``: train a model over the clients' data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Traffic
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.protocol import Engine
from comfedl.core.reply_validation import Screen
from comfedl.data.federated import FederatedData
from comfedl.data.tabular import Encoding
from comfedl.engines import make_engine
from comfedl.models.losses import LossFunction
from comfedl.training import personal_models
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.client_records import ClientRows, few_as_list
from comfedl.training.loop import Loop
from comfedl.training.options import RunOptions
from comfedl.training.result import Result
from comfedl.training.run_folder import RunFolder
from comfedl.training.validation import check_fit, check_kinds, make_learner
from comfedl.training.worker_callback import WorkerCallback
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError, Diverged
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
    options = RunOptions(
        rounds=rounds,
        seed=seed,
        clients_per_round=clients_per_round,
        eval_every=eval_every,
        eval_clients=eval_clients,
        checkpoint_every=checkpoint_every,
        quorum=quorum,
        save_personal=save_personal,
        engine=engine,
        out=out,
        resume=resume,
        force=force,
        progress=progress,
        callbacks=callbacks,
    )
    check_kinds(algorithm, fed)
    options.check_clients(len(fed))
    learner, initial, frozen = make_learner(model, loss, algorithm)
    first = next(iter(initial["params"].values()))
    data = fed.to(first.dtype, first.device)
    check_fit(learner, initial, data)
    clients = make_engine(
        engine, data, learner, algorithm.steps(), options.seed, algorithm.client_state(initial), engine_options
    )
    settings = settings or {"loss": describe(loss), **options.recorded(), "algorithm": describe(algorithm)}
    module = model if isinstance(model, nn.Module) else None
    return fit_on(
        clients, algorithm, initial, frozen, data.contents(), settings, options, fed.encoding, module, started
    )


def fit_on(
    clients: Engine,
    algorithm: Algorithm,
    initial: Model,
    frozen: Params,
    contents: Iterable[Any],
    settings: Mapping[str, Any],
    options: RunOptions,
    encoding: Encoding | None = None,
    module: nn.Module | None = None,
    started: float | None = None,
) -> Result:
    """Train on an engine that has its clients already, wherever their data are.

    Args:
        initial, frozen: the model's parts, as ``make_learner`` gives them.
        contents: what a run must have in common with the one that it resumes, besides ``settings`` and the model.
        settings: what the run's folder records as its config.
        encoding: how a table's rows became numbers, for the run's folder.
        started: when the run began, by ``time.perf_counter``.
    """
    started = time.perf_counter() if started is None else started
    if options.resume and options.out is None:
        raise ConfigError("resume is given without out; say which run's folder to go on with.")
    count, device = len(clients.names), next(iter(initial["params"].values())).device
    callbacks: list[Callback] = list(options.callbacks) if clients.leads else []
    try:
        if options.progress and clients.leads:
            from comfedl.training.progress import Progress  # importing rich draws from Python's global generator

            callbacks.append(Progress(options.rounds))
        folder = None
        if options.out is not None and clients.leads:
            known = fingerprint(*contents, *frozen.values(), *tree.leaves(initial))
            folder = RunFolder(Path(options.out), settings, options, known, encoding)
            if options.save_personal and count > personal_models.MOST_FILES:
                folder.room = count * tree.nbytes({**initial, "frozen": frozen})
            callbacks.insert(0, folder)
        elif options.out is not None:
            callbacks.append(WorkerCallback(options.save_personal))

        screen = Screen(initial, clients.names, options.quorum)
        loop = Loop(algorithm, clients, options, callbacks, screen)
        algorithm.check(count, loop.participants)
        state, first_round = algorithm.init(initial, count), 1
        loaded = clients.share(partial(_load, folder, options.resume, state, device, clients.names))
        if loaded is not None:
            saved, loop.rows, loop.client_rows = loaded
            if saved is not None:
                state = tree.map(lambda leaf, mate: leaf.to(mate.device), saved.state, state)
                first_round = saved.round + 1
                clients.restore(saved.clients())
                loop.traffic = Traffic(**saved.traffic)
                screen.offences = dict(saved.offences)
        for callback in callbacks:
            callback.started()
        for number in range(first_round, options.rounds + 1):
            state = loop.whole_round(number, state)
        loop.close()
        final = algorithm.reported(state)
        result = Result(
            params={**final["params"], **frozen},
            buffers=final["buffers"],
            rounds=loop.rows,
            clients=few_as_list(loop.client_rows),
            traffic=loop.traffic.so_far(),
            seconds=time.perf_counter() - started,
            names=clients.names,
            ask_personal=loop.personal_models(options.rounds, final, frozen),
            module=module,
        )
        for callback in callbacks:
            callback.finished(result)
        clients.end(None)
    except BaseException as error:
        if isinstance(error, Diverged):
            error.advice = algorithm.explain(error)
        for callback in callbacks:
            try:
                callback.failed(error)
            except Exception as second:  # one that cannot clean up must not keep the others from it
                error.add_note(f"{type(callback).__name__} failed as well: {second}")
        clients.end(error)
        raise
    return result


def _load(
    folder: RunFolder | None, resume: bool, state: State, device: torch.device, names: Sequence[str]
) -> tuple[Snapshot | None, list[Row], ClientRows] | None:
    """What there is to go on from."""
    return folder.load(state, device, names) if folder is not None and resume else None
