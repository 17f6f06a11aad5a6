"""The training loop, for any algorithm: a round, its evaluation, and the callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext, Traffic
from comfedl.algorithms.private_release import PrivateRelease
from comfedl.core import client_statistics
from comfedl.core.accounting import Accountant
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.protocol import Engine, Replies
from comfedl.core.reply_validation import ReplyValidator
from comfedl.core.sums import SummedReplies
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.client_records import ClientRows, Evaluation, few_as_list
from comfedl.training.options import RunOptions
from comfedl.training.stopping import BEST
from comfedl.training.turnover import Turnover
from comfedl.utils import rng
from comfedl.utils.errors import ConfigError, Diverged, QuorumError
from comfedl.utils.tree import Tree


class Loop:
    """The rounds of one run, with its records and traffic so far."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        options: RunOptions,
        callbacks: Sequence[Callback],
        validator: ReplyValidator,
    ) -> None:
        self.algorithm, self.engine, self.options = algorithm, engine, options
        self.participants = options.clients_per_round or len(engine.names)
        self.callbacks, self.validator, self.steps = callbacks, validator, algorithm.steps()
        self.rows: list[Row] = []
        self.client_rows = ClientRows()
        self.traffic = Traffic()
        self._evaluated: Sequence[int] = range(len(engine.names))
        self._extra: Row = {}  # constant columns of every row
        self._pending: Callable[[], None] | None = None
        self.done = 0  # the last completed round
        self.begun = time.perf_counter()  # when the run would have begun if it had never stopped
        self.turnover = Turnover()
        self.release: PrivateRelease | None = None  # under differential privacy
        self.accountant: Accountant | None = None
        self.best: dict[str, Tree] | None = None  # of early stopping
        self._regular_best: dict[str, Tree] | None = None  # without a round that is evaluated only as the last
        self.stopped: str | None = None
        if options.eval_clients is not None:
            generator = rng.generator(options.seed, "evaluated clients")
            drawn = generator.choice(len(engine.names), size=options.eval_clients, replace=False, shuffle=False)
            self._evaluated, self._extra = sorted(drawn.tolist()), {"eval_clients": int(options.eval_clients)}

    def run_round(self, number: int, state: State) -> State:
        """A round, its evaluation and callbacks; if the engine defers replies, these two follow the next round."""
        evaluated, sent = self.options.is_evaluated(number), self.traffic.so_far()
        context = RoundContext(
            number,
            self.options.seed,
            self.participants,
            self.engine,
            self.traffic,
            self.validator,
            self.steps,
            evaluated,
            None if self.release is None else self.release.at_round(number),
        )
        try:
            method = self.algorithm.at_round(number).with_release(context.release)
            after, participation = method.round(state, context)
            self.algorithm.check_state(state, after)
            if context.release is not None:
                context.release.check_released(self.algorithm.name)
        except (QuorumError, Diverged):
            self.complete_round()  # the previous round succeeded, and the run can resume from it
            if self.stopped is None:
                raise
        else:
            self.complete_round()
        if self.stopped is not None:  # by the round before, whose scores came with this one's replies: discard this one
            self.traffic = Traffic(**sent)
            return state
        state = after
        self.turnover.add(participation)
        record = self._evaluate(number, state, participation) if evaluated else None
        if record is not None and not self.engine.defers_replies:
            record()
            record = None
        self.engine.commit_round()
        states, offences = self.engine.capture_states(), dict(self.validator.offences)
        model, seconds = self.algorithm.reported(state), time.perf_counter() - self.begun
        snapshot = Snapshot(number, state, states, self.traffic.so_far(), offences, model, seconds)
        self._pending = partial(self._done, snapshot, record)
        if not self.engine.defers_replies:
            self.complete_round()
        return state

    def complete_round(self) -> None:
        """Record the pending evaluation and run the callbacks of the last round."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _done(self, snapshot: Snapshot, record: Callable[[], None] | None) -> None:
        if record is not None:
            record()
        self.done = snapshot.round
        if self.best is not None:
            snapshot = replace(snapshot, state={**snapshot.state, BEST: self._regular_best or self.best})
            self.check_stop()
        for callback in self.callbacks:
            callback.round_done(snapshot.round)
            callback.settled(snapshot)

    def check_stop(self) -> None:
        """See whether to stop before the last round; only after an evaluation, so that the last model has its row."""
        early = self.done < self.options.rounds and self.options.is_evaluated(self.done)
        if early and self.options.stop is not None and self.best is not None:
            self.stopped = self.options.stop.reason(self.best, self.done)

    def observe(self, row: Row, model: Model) -> None:
        """Update the best round of early stopping."""
        if self.options.stop is not None and self.best is not None:
            before, self.best = self.best, self.options.stop.improved(self.best, row, model)
            scheduled = self.options.is_scheduled(int(row["round"]))  # type: ignore[arg-type]
            self._regular_best = self.best if scheduled else before

    def _evaluate(self, number: int, state: State, participation: Participation) -> Callable[[], None]:
        """Request the clients' scores; the returned function fetches and records them."""
        message = self.algorithm.evaluation(state)
        answers = self.engine.run_deferred("evaluate", self._evaluated, message, number)
        shift = partial(self.algorithm.shift, state)
        return partial(self._record, number, message["model"], participation, answers, shift, self.traffic.so_far())

    def _record(
        self,
        number: int,
        model: Model,
        participation: Participation,
        answers: Callable[[], Replies],
        shift: Callable[[Sequence[int], Sequence[str], NDArray[np.int64]], Tensor | None],
        sent: Mapping[str, int],
    ) -> None:
        replies = self.validator.validate(number, self._evaluated, answers(), self.steps["evaluate"].sends)
        found: Sequence[Row] = []
        if isinstance(replies, SummedReplies):
            row = self._row_of_sums(number, replies, participation)
        else:
            row, found = self._row_and_clients(number, replies, participation, shift)
        row |= {**sent, **self._extra, **self._spent(number)}
        for name in self.options.metrics:
            if not any(client_statistics.base(key.rpartition(".")[0]) == name for key in row):
                raise ConfigError(
                    f"The metric {name!r} is asked for, but it is defined for no client in round {number} (most need "
                    "samples of both classes at a client); leave it out of metrics."
                )
        self.observe(row, model)
        self.rows.append(row)
        if isinstance(found, Evaluation):
            self.client_rows.add(found)
        for callback in self.callbacks:
            callback.evaluated(row, few_as_list(found))

    def _row_and_clients(
        self,
        number: int,
        replies: Replies,
        participation: Participation,
        shift: Callable[[Sequence[int], Sequence[str], NDArray[np.int64]], Tensor | None],
    ) -> tuple[Row, Evaluation]:
        """A round's record, and those of its clients."""
        weights: dict[int, float] = {}
        for client, weight in zip(participation.clients, participation.weights.tolist(), strict=True):
            weights[client] = weights.get(client, 0.0) + weight  # a client may be drawn several times
        more = {"weight": np.array([weights.get(i, 0.0) for i in replies.clients])}
        if participation.duals is not None:
            more["dual"] = participation.duals.numpy()[replies.clients]
        found = Evaluation.of(number, self.engine.names, replies.clients, replies.scores("scores"), more)
        sizes, values = torch.from_numpy(self.engine.sizes[replies.clients]), replies.numbers("value")
        added = shift(replies.clients, self.engine.names, self.engine.sizes)
        values = values if added is None else values + added
        row: Row = {
            "round": number,
            **client_statistics.summarise_columns(found.columns(leave_out=more)),
            "objective": float(self.algorithm.combined(values, sizes)),
            "effective_clients": client_statistics.effective_clients(list(weights.values())),
            "weights_kl": client_statistics.divergence(list(weights.values())),
            "participants": len(weights),
        }
        return row, found

    def _row_of_sums(self, number: int, replies: SummedReplies, participation: Participation) -> Row:
        """A round's record where only sums over the clients are known: means, without the clients' rows and weights."""
        return {
            "round": number,
            **replies.columns(),
            **({} if replies.objective is None else {"objective": replies.objective}),
            "participants": len({*participation.clients}),
        }

    def _spent(self, number: int) -> Row:
        """Epsilon and delta after this round, if there is a guarantee."""
        epsilon = None if self.accountant is None else self.accountant.epsilon(number)
        if self.accountant is None or epsilon is None:
            return {}
        return {"epsilon": epsilon, "delta": self.accountant.privacy.delta}

    def personal_models(self, number: int, model: Model, frozen: Params) -> Callable[[Sequence[int]], Iterator[Model]]:
        """A function that returns clients' personal models after this round."""

        def ask(clients: Sequence[int]) -> Iterator[Model]:
            for found in self.engine.run("personal", clients, {"model": model}, number).each("model"):
                yield Model(params={**found["params"], **frozen}, buffers=found["buffers"])

        return ask
