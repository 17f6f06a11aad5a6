"""fit(): the loop of rounds, with evaluation. Records and progress hang on it as callbacks; it knows no algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfedl import checks, metrics, tree
from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.rounds import Round, Traffic, Used
from comfedl.callbacks import Callback
from comfedl.checkpoint import Snapshot, fingerprint
from comfedl.data.federated import FederatedData
from comfedl.engines import ENGINES, make_engine
from comfedl.errors import ConfigError, DataError
from comfedl.folder import RunFolder
from comfedl.losses import LOSSES, LossFunction
from comfedl.metrics import Row
from comfedl.problem import Learner, Model, Params
from comfedl.result import Result
from comfedl.screen import Screen
from comfedl.settings import describe
from comfedl.step import Diverged, Engine


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
    force: bool = False,
    checkpoint_every: int | None = None,
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
        loss: "cross_entropy", or a function (output, y) -> mean loss of the batch; a problem of the reader's own brings
            its own and does not use it.
        clients_per_round: how many clients take part in a round, drawn uniformly; None is all of them.
        eval_every: evaluate all clients after every so many rounds, and after the last.
        engine: where the clients live.
        out: a folder to write the run to.
        resume: go on with the run that ``out`` holds, from its last checkpoint: the result is the same, to the bit.
        progress: show a progress bar.
        force: replace a run that ``out`` already holds.
        checkpoint_every: write a checkpoint to ``out`` after every so many rounds; None is about every 30 seconds.
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
    check_loop(rounds, seed, clients_per_round, eval_every, checkpoint_every, quorum, engine)
    if resume and out is None:
        raise ConfigError("resume is given without out; say which run's folder to go on with.")
    rounds, seed, eval_every = int(rounds), int(seed), int(eval_every)
    _check(algorithm, fed, clients_per_round)
    learner, initial, frozen = _learner(model, loss, algorithm)
    first = next(iter(initial["params"].values()))
    data = fed.to(first.dtype, first.device)
    _check_fit(learner, initial, data)
    clients = make_engine(
        engine, data, learner, algorithm.steps(), seed, algorithm.client_state(initial), engine_options
    )

    watchers = list(callbacks)
    if progress:
        from comfedl.progress import Progress  # rich draws from Python's global generator when it is imported

        watchers.append(Progress(rounds))
    if out is not None:
        shown = settings or {
            "loss": describe(loss),
            "rounds": rounds,
            "seed": seed,
            "clients_per_round": clients_per_round,
            "eval_every": eval_every,
            "checkpoint_every": checkpoint_every,
            "quorum": quorum,
            "engine": engine,
            "algorithm": describe(algorithm),
        }
        known = fingerprint(*data.contents(), *frozen.values(), *tree.leaves(initial))
        folder = RunFolder(Path(out), shown, force, resume, known, checkpoint_every)
        watchers.insert(0, folder)

    screen = Screen(initial, clients.names, quorum)
    run = _Run(algorithm, clients, seed, clients_per_round or len(data), watchers, screen)
    algorithm.check(len(data), run.participants)
    state, first_round = algorithm.init(initial, len(data)), 1
    try:
        if resume:
            saved, run.rows, run.client_rows = folder.load(state, first.device)
            if saved is not None:
                state, first_round = saved.state, saved.round + 1
                clients.restore(saved.clients())
                run.traffic = Traffic(**saved.traffic)
                run.screen.offences = dict(saved.offences)
        for watcher in watchers:
            watcher.started()
        for number in range(first_round, rounds + 1):
            state, used = run.round(number, state)
            if number % eval_every == 0 or number == rounds:
                run.evaluate(number, state, used)
            snapshot = Snapshot(number, state, clients.states, asdict(run.traffic), run.screen.offences)
            for watcher in watchers:
                watcher.round_done(number)
                watcher.settled(snapshot)
        final = algorithm.reported(state)
        result = Result(
            params=_with_frozen(final["params"], frozen),
            buffers=final["buffers"],
            rounds=run.rows,
            clients=run.client_rows,
            traffic=asdict(run.traffic),
            seconds=time.perf_counter() - started,
            names=clients.names,
            ask_personal=run.personal_models(rounds, final, frozen),
        )
        for watcher in watchers:
            watcher.finished(result)
    except BaseException as error:
        if isinstance(error, Diverged):
            error.advice = algorithm.explain(error)
        for watcher in watchers:
            try:
                watcher.failed(error)
            except Exception as second:  # one that cannot clean up must not keep the others from it
                error.add_note(f"{type(watcher).__name__} failed as well: {second}")
        raise
    return result


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
    ) -> None:
        self.algorithm, self.engine, self.seed, self.participants = algorithm, engine, seed, participants
        self.watchers, self.screen, self.steps = watchers, screen, algorithm.steps()
        self.rows: list[Row] = []
        self.client_rows: list[Row] = []
        self.traffic = Traffic()

    def round(self, number: int, state: State) -> tuple[State, Used]:
        here = Round(number, self.seed, self.participants, self.engine, self.traffic, self.screen, self.steps)
        return self.algorithm.round(state, here)

    def evaluate(self, number: int, state: State, used: Used) -> None:
        everybody = range(len(self.engine.names))
        replies = self.engine.run("evaluate", everybody, {"model": self.algorithm.reported(state)}, number)
        replies = self.screen.passed(number, everybody, replies, self.steps["evaluate"].sends)
        scores = [{name: float(score) for name, score in reply.items()} for reply in replies.each("scores")]
        sizes = torch.from_numpy(self.engine.sizes[replies.clients])
        weights: dict[int, float] = {}
        for client, weight in zip(used.clients, used.weights.tolist(), strict=True):
            weights[client] = weights.get(client, 0.0) + weight  # a client may be drawn more than once
        row: Row = {
            "round": number,
            **metrics.summarise_clients(scores),
            "objective": float(self.algorithm.combined(replies.numbers("value"), sizes)),
            "effective_clients": metrics.effective_clients(list(weights.values())),
            "weights_kl": metrics.divergence(list(weights.values())),
            "participants": len(weights),
            "up_bytes": self.traffic.up_bytes,
            "down_bytes": self.traffic.down_bytes,
        }
        client_rows: list[Row] = [
            {"round": number, "client": self.engine.names[i], **score, "weight": weights.get(i, 0.0)}
            for i, score in zip(replies.clients, scores, strict=True)
        ]
        if used.duals is not None:
            for i, client_row in zip(replies.clients, client_rows, strict=True):
                client_row["dual"] = float(used.duals[i])
        self.rows.append(row)
        self.client_rows.extend(client_rows)
        for watcher in self.watchers:
            watcher.evaluated(row, client_rows)

    def personal_models(self, number: int, model: Model, frozen: Params) -> Callable[[int], Model]:
        """A function that gives a client's personal model as it is after this round."""

        def ask(client: int) -> Model:
            replies = self.engine.run("personal", [client], {"model": model}, number)
            found: Model = next(replies.each("model"))
            return Model(params=_with_frozen(found["params"], frozen), buffers=found["buffers"])

        return ask


def _check(algorithm: Algorithm, fed: FederatedData, clients_per_round: int | None) -> None:
    if not isinstance(fed, FederatedData):
        raise ConfigError(f"fed is a {type(fed).__name__}, but it must be a FederatedData(train={{name: (x, y)}}).")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm is {algorithm!r}, but it must be a method such as ComFedL(outer=KL(0.2)).")
    if clients_per_round is not None and clients_per_round > len(fed):
        raise ConfigError(
            f"clients_per_round is {clients_per_round}, but there are only {len(fed)} clients; "
            f"give a number from 1 to {len(fed)}, or leave it out for all of them."
        )


def check_loop(
    rounds: int,
    seed: int,
    clients_per_round: int | None,
    eval_every: int,
    checkpoint_every: int | None,
    quorum: float,
    engine: str,
) -> None:
    """Check what needs neither data nor model."""
    checks.at_least("rounds", rounds, 1)
    checks.at_least("seed", seed, 0, 2**63 - 1)
    checks.at_least("eval_every", eval_every, 1)
    checks.not_below("quorum", quorum, 0)
    checks.at_most("quorum", quorum, 1)
    checks.one_of("engine", engine, ENGINES)
    for name, value in (("clients_per_round", clients_per_round), ("checkpoint_every", checkpoint_every)):
        if value is not None:
            checks.at_least(name, value, 1)


def _learner(
    model: nn.Module | Mapping[str, Tensor], loss: str | LossFunction, algorithm: Algorithm
) -> tuple[Learner, Model, Params]:
    """The model's functions, its initial state, and the parameters that the reader has frozen; all are copies."""
    frozen: Params = {}
    if isinstance(loss, str):
        checks.one_of("loss", loss, LOSSES)
        function, scores = LOSSES[loss]
    elif callable(loss):
        function, scores = loss, {}
    else:
        raise ConfigError(f"loss is {loss!r}, but it must be one of {', '.join(LOSSES)}, or a function (output, y).")
    own = algorithm.own_problem
    if isinstance(model, nn.Module):
        parameters = {name: (part.requires_grad, part.detach().clone()) for name, part in model.named_parameters()}
        frozen = {name: part for name, (trained, part) in parameters.items() if not trained}
        initial = Model(
            params={name: part for name, (trained, part) in parameters.items() if trained},
            buffers={name: part.detach().clone() for name, part in model.named_buffers()},
        )
        learner = Learner() if own else Learner(model, function, scores)
    elif isinstance(model, Mapping):
        for name, part in model.items():
            if not isinstance(part, Tensor) or not part.is_floating_point():
                raise ConfigError(f"The model's {name!r} is {part!r}, but it must be a tensor of real numbers.")
        if not own:
            raise ConfigError(
                "The model is a dict of tensors, which says nothing of how to apply it; "
                "use ComFedL(problem=Composition(inner, outer)), or give an nn.Module."
            )
        initial = Model(params={name: part.detach().clone() for name, part in model.items()}, buffers={})
        learner = Learner()
    else:
        raise ConfigError(f"model is a {type(model).__name__}, but it must be an nn.Module or a dict of tensors.")
    if not initial["params"]:
        raise ConfigError("The model has no parameters that require a gradient, so there is nothing to train.")
    return learner, initial, frozen


def _check_fit(learner: Learner, model: Model, data: FederatedData) -> None:
    """See that the model takes the data: its shapes, and for classification the labels' range."""
    if learner.module is None:
        return
    x, y = data.train.x[:2], data.train.y[:2]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output, _ = learner.output(model["params"], model["buffers"], x, train=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"The model cannot be applied to samples of shape {tuple(x.shape[1:])} and type {x.dtype}: {error}"
        ) from error
    if learner.loss_function is not functional.cross_entropy:
        return
    if not isinstance(output, Tensor) or output.ndim != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise DataError(f"cross_entropy needs a model that gives [samples, classes], but this one gives {shape}.")
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(
            f"cross_entropy needs one whole-number label for each sample, but y has the type {y.dtype} and samples of "
            f"shape {tuple(y.shape[1:])}; convert y, or give another loss."
        )
    classes = output.shape[1]
    for name in ("train", "validation", "test"):
        split = data.split(name)
        if split is None or (int(split.y.min()) >= 0 and int(split.y.max()) < classes):
            continue
        for i, client in enumerate(split.names):
            labels = split.whole(i)[1]
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise DataError(
                    f"Client {client!r} has the label {int(wrong[0])} in {name}, but the model has {classes} outputs, "
                    f"so labels must be from 0 to {classes - 1}; fix the labels or give the model more outputs."
                )
