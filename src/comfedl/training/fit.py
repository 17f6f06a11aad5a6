"""``fit``: train a model over the clients' data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Traffic
from comfedl.algorithms.private_release import PRIVACY
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.privacy import DP
from comfedl.core.protocol import Engine
from comfedl.core.reply_validation import ReplyValidator
from comfedl.data.federated import FederatedData
from comfedl.data.outer_share import set_aside
from comfedl.data.tabular import Encoding
from comfedl.data.transform import TransformFunction, check_transform, describe_transform
from comfedl.engines import make_engine
from comfedl.engines.faults import Fault, check_faults, poisoned
from comfedl.models.losses import LossFunction, is_balanced
from comfedl.models.metrics import describe_metrics
from comfedl.secure.settings import SecureAggregation
from comfedl.training import personal_models
from comfedl.training.arguments import RequestedMetrics, add_metrics, check_fit, check_kinds, make_learner
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.client_records import ClientRows, few_as_list
from comfedl.training.client_scorer import ClientScorer
from comfedl.training.evaluation_gap import evaluation_gap
from comfedl.training.loop import Loop
from comfedl.training.options import AUTO, RunOptions
from comfedl.training.private_run import make_release, spent
from comfedl.training.result import Result
from comfedl.training.run_folder import RunFolder
from comfedl.training.secure_run import check_left_out, secured
from comfedl.training.stopping import BEST, EarlyStopping
from comfedl.training.worker_callback import WorkerCallback
from comfedl.utils import tree
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.fingerprint import hashed
from comfedl.utils.toml import describe


def fit(
    model: nn.Module | Mapping[str, Tensor],
    fed: FederatedData,
    algorithm: Algorithm,
    rounds: int = 200,
    seed: int = 0,
    loss: str | LossFunction = "cross_entropy",
    clients_per_round: int | None = None,
    eval_every: int | str = "auto",
    engine: str = "embedded",
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    *,
    eval_clients: int | None = None,
    force: bool = False,
    checkpoint_every: int | None = None,
    save_personal: bool = True,
    save_frozen: bool = True,
    quorum: float = 0.5,
    callbacks: Sequence[Callback] = (),
    settings: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    stop: EarlyStopping | None = None,
    metrics: RequestedMetrics = None,
    outer_share: float = 0.2,
    faults: Sequence[Fault] = (),
    transform: TransformFunction | Sequence[TransformFunction] | None = None,
    privacy: DP | None = None,
    secure: SecureAggregation | None = None,
) -> Result:
    """Train a model over the clients' data.

    Args:
        model: an nn.Module, which is not changed, or for a ``Composition`` a dict of tensors.
        fed: the clients' data.
        algorithm: the method, with its hyperparameters.
        rounds: the number of communication rounds.
        seed: the same seed gives the same run, bit for bit.
        loss: "cross_entropy", "bce" (two classes, one output), "mse", "mae" or "huber"; "model" for the loss in the
            model's own output; or a function (output, y) -> mean loss of the batch. A ``Composition`` does not use it.
        clients_per_round: the number of participants per round, drawn uniformly; None is all clients.
        eval_every: evaluate the clients every this many rounds, and after the last. "auto" does so as often as takes
            about a fifth of the time (see ``evaluation_gap``), and more often at the start.
        eval_clients: how many clients to evaluate, drawn once per run; None is all of them. Otherwise the records and
            the objective are of these clients only, and give their number.
        engine: "embedded", or "distributed" under torchrun, where every process makes this call, but only the first
            writes, shows progress and runs the callbacks.
        out: the folder to write the run to.
        resume: resume the run in ``out`` from its last checkpoint; the result is the same, bit for bit.
        progress: show a progress bar.
        force: replace the run in ``out``.
        checkpoint_every: write a checkpoint to ``out`` every this many rounds; None is about every 30 seconds.
        save_personal: write every client's personal model to ``out`` at the end.
        save_frozen: write the parameters that are not trained (``requires_grad=False``) as well. False saves adapters
            alone; ``load_run(out, model=...)`` then takes the others from the model that it is given.
        quorum: the fraction of a round's replies that must be usable; with fewer, the run saves its state and stops.
        callbacks: callbacks for the training loop.
        settings: the config to record in the run folder; by default these arguments.
        stop: end the run early, such as ``EarlyStopping("validation.accuracy.worst", patience=20)``.
        metrics: further metrics to record: names such as ``["f1", "auc"]``, or a dict of functions (output, y) ->
            number, each of all samples of a client, such as ``{"f1": f}``; ``Metric(f, smaller_is_better=True)`` for
            errors.
        outer_share: the share of each client's train data to set aside as its outer data, in proportion to its labels;
            only for a method whose weights are measured on outer data, and if ``fed`` has no outer data of its own.
        faults: bad and absent clients to simulate, such as ``[cf.faults.SignFlip(["a", "b"])]``.
        transform: a function ``f(x, generator)`` that returns x changed at random, or a list of such; see
            ``cf.transform`` for some. It gets every batch that clients train on, as the data give it (a tensor, tuple
            or dict), and draws from the generator, so that a resume is exact. It never gets what clients are evaluated
            on, nor whole data that weights are computed from.
        secure: simulate secure aggregation, ``cf.SecureAggregation()``: the server learns sums over the clients alone,
            so that records have means only. Some methods and options need more, and are refused.
        engine_options: options of the engine, such as ``{"vectorize": "serial"}`` (see ``Embedded``).
        privacy: differential privacy of the clients, such as ``DP(clip=1.0, noise_multiplier=1.0, delta=1e-5)``.

    Raises:
        ConfigError: if a setting is invalid.
        DataError: if the data do not fit the model.
        Diverged: if training diverged (NaN or infinity).
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
        save_frozen=save_frozen,
        engine=engine,
        out=out,
        resume=resume,
        force=force,
        progress=progress,
        callbacks=callbacks,
        stop=stop,
        metrics=tuple(metrics or ()),
        outer_share=outer_share,
        faults=check_faults(faults),
        privacy=privacy,
        secure=secure,
    )
    check_kinds(algorithm, fed)
    options.check_clients(len(fed))
    if privacy is not None and not privacy.is_plain and is_balanced(loss):
        raise ConfigError(
            'privacy is given, but loss has "balanced" weights, which count the labels of all clients; give numbers.'
        )
    method, given = options.as_run(algorithm), fed
    if algorithm.weighs_on_outer and fed.outer is None:
        fed = set_aside(fed, options.outer_share, options.seed)
    learner, initial, frozen = make_learner(model, loss, algorithm, metrics)
    first = next(iter(initial["params"].values()))
    data = fed.to(first.dtype, first.device)
    add_metrics(learner, initial, data, metrics)
    check_fit(learner, initial, data, algorithm.needs_sample_losses)
    held = poisoned(data, options.faults)  # what the clients have, and so what their scores are measured on
    clients = make_engine(
        engine,
        held,
        learner,
        method.steps(),
        options.seed,
        method.initial_client_state(initial),
        engine_options,
        options.faults,
        check_transform(transform),
    )
    if options.secure is not None:
        clients = secured(clients, options.secure, method, [*learner.metrics], options.clients_per_round)
    asked = describe_metrics(metrics)
    settings = settings or {
        **{"loss": describe(loss), "metrics": asked},
        **options.recorded(algorithm),
        "transform": describe_transform(transform),
        "algorithm": describe(algorithm),
    }
    module = model if isinstance(model, nn.Module) else None
    scorer = ClientScorer(learner, held, options.seed, reads=held.train.at_hand or options.engine != "distributed")
    return fit_on(
        *(clients, method, initial, frozen, data.contents(), settings, options, fed.encoding),
        *(module, started, scorer, given.digest, fed is given and _same_tensors(given, data)),
    )


def _same_tensors(given: FederatedData, data: FederatedData) -> bool:
    """Whether no tensor was converted for the model; data on disk are known by their files."""
    for name in ("train", "validation", "test", "outer"):
        one, other = (fed.split(name, instead="none") for fed in (given, data))
        if one is None or other is None or not one.at_hand:
            continue
        pairs = zip(tree.leaves([one.x, one.y]), tree.leaves([other.x, other.y]), strict=True)
        if one.rows is not other.rows or any(a is not b for a, b in pairs):
            return False
    return True


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
    scorer: ClientScorer | None = None,
    digest: Callable[[], str] | None = None,
    as_given: bool = False,
) -> Result:
    """Train on an engine that already holds its clients, wherever their data are.

    Args:
        initial, frozen: the model's parts, from ``make_learner``.
        contents: what must match on a resume, besides ``settings`` and the model.
        settings: the config to record in the run folder.
        encoding: how a table's rows were turned into numbers, for the run folder.
        started: when the run started, by ``time.perf_counter``.
        scorer: the clients' data, if they are in this process.
        digest: gives the digest of the data as they were given, by which ``evaluate`` knows them again.
        as_given: ``contents`` are these data, so that they need to be read for a digest only once.
    """
    started = time.perf_counter() if started is None else started
    if options.faults and not clients.simulates_faults:
        raise ConfigError(
            'faults are given, but clients at real sites have only their own; remove them, or use engine = "embedded".'
        )
    if options.resume and options.out is None:
        raise ConfigError("resume is given without out; give the folder of the run to resume.")
    count, device = len(clients.names), next(iter(initial["params"].values())).device
    if options.secure is not None:
        check_left_out(options, algorithm, count)
    if options.eval_every == AUTO:
        participants = options.clients_per_round or count
        options = replace(options, gap=evaluation_gap(clients, algorithm.steps(), participants, options.eval_clients))
    samples = {"train": clients.sizes} if scorer is None else scorer.sizes()
    counts_samples = scorer is None or scorer.counts_samples()
    callbacks: list[Callback] = list(options.callbacks) if clients.is_leader else []
    try:
        if options.progress and clients.is_leader:
            from comfedl.training.progress import Progress  # importing rich uses Python's global random generator

            callbacks.append(Progress(options.rounds))
        folder = None
        if options.out is not None and clients.is_leader:
            of_contents = hashed(contents)
            known = hashed([*frozen.values(), *tree.leaves(initial)], of_contents).hexdigest()
            of_data = None if digest is None else of_contents.hexdigest() if as_given else digest()
            folder = RunFolder(Path(options.out), settings, options, known, encoding, frozen, of_data)
            folder.can_save, folder.samples, folder.names = clients.can_save, samples, clients.names
            folder.counts_samples, folder.on_disk = counts_samples, scorer is not None and scorer.data.on_disk
            if options.save_personal and count > personal_models.MOST_FILES:
                of_each = {**initial, "frozen": frozen} if options.save_frozen else dict(initial)
                folder.personal_bytes = count * tree.nbytes(of_each)
            callbacks.insert(0, folder)
        elif options.out is not None:
            callbacks.append(WorkerCallback(options.save_personal))

        validator = ReplyValidator(initial, clients.names, options.quorum)
        loop = Loop(algorithm, clients, options, callbacks, validator)
        loop.begun = started
        algorithm.check(count, loop.participants)
        algorithm.check_aggregate(loop.participants)
        algorithm.check_names(clients.names)
        algorithm.check_rounds(options.rounds)
        state, first_round = algorithm.initial_state(initial, count), 1
        if options.privacy is not None and not options.privacy.is_plain:
            made = make_release(options.privacy, algorithm, initial, clients, loop.participants, folder)
            loop.release, loop.accountant = made
            state[PRIVACY] = loop.release.initial()
        if options.stop is not None:
            state[BEST] = options.stop.initial(initial)
        loaded = clients.broadcast(partial(_load, folder, options.resume, state, device, clients.names))
        if loaded is not None:
            saved, loop.rows, loop.client_rows = loaded
            if saved is not None:
                state = tree.map(lambda leaf, mate: leaf.to(mate.device), saved.state, state)
                first_round = saved.round + 1
                loop.begun -= saved.seconds
                loop.done = saved.round
                clients.restore(saved.clients())
                loop.traffic = Traffic(**saved.traffic)
                validator.offences = dict(saved.offences)
        loop.best = state.pop(BEST, None)
        if loop.rows and loop.rows[-1]["round"] == loop.done and not options.is_scheduled(loop.done):
            loop.observe(loop.rows[-1], algorithm.reported(state))  # a checkpoint is without it: see ``_regular_best``
        loop.check_stop()
        for callback in callbacks:
            callback.started()
        number = first_round
        while number <= options.rounds and loop.stopped is None:
            state = loop.run_round(number, state)
            number += 1
        loop.complete_round()
        final, chosen = algorithm.reported(state), loop.done
        last = Model(params={**final["params"], **frozen}, buffers=final["buffers"])
        best = chosen if loop.best is None else int(loop.best["round"])
        if loop.best is not None and options.stop is not None and options.stop.restore_best:
            final, chosen = loop.best["model"], best
        result = Result(
            params={**final["params"], **frozen},
            buffers=final["buffers"],
            rounds=loop.rows,
            clients=few_as_list(loop.client_rows),
            traffic=loop.traffic.so_far(),
            seconds=time.perf_counter() - loop.begun,
            names=clients.names,
            ask_personal=loop.personal_models(chosen, final, frozen),
            module=module,
            best_round=best,
            stopped=loop.stopped,
            round=chosen,
            last=last,
            samples=samples,
            scorer=scorer,
            counts_samples=counts_samples,
            privacy=None if loop.accountant is None else spent(loop.accountant, loop.done, options.stop is not None),
        )
        for callback in callbacks:
            callback.finished(result)
        clients.finish(None)
    except BaseException as error:
        if isinstance(error, Diverged):
            error.advice = algorithm.explain(error)
        for callback in callbacks:
            try:
                callback.failed(error)
            except Exception as second:  # the other callbacks must still clean up
                error.add_note(f"{type(callback).__name__} failed as well: {second}")
        clients.finish(error)
        raise
    return result


def _load(
    folder: RunFolder | None, resume: bool, state: State, device: torch.device, names: Sequence[str]
) -> tuple[Snapshot | None, list[Row], ClientRows] | None:
    """The state to resume from, if any."""
    return folder.load(state, device, names) if folder is not None and resume else None
