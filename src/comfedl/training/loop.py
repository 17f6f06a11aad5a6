"""The loop of rounds: a round of the method, its evaluation, and the callbacks. It knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import Participation, RoundContext, Traffic
from comfedl.core import client_statistics
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.protocol import Engine, Replies
from comfedl.core.reply_validation import Screen
from comfedl.training.callbacks import Callback
from comfedl.training.checkpoint import Snapshot
from comfedl.training.client_records import ClientRows, Evaluation, few_as_list
from comfedl.training.options import RunOptions
from comfedl.utils import rng
from comfedl.utils.errors import Diverged, QuorumError


class Loop:
    """The rounds of one run, and what they have recorded and sent so far."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        options: RunOptions,
        callbacks: Sequence[Callback],
        screen: Screen,
    ) -> None:
        self.algorithm, self.engine, self.options = algorithm, engine, options
        self.participants = options.clients_per_round or len(engine.names)
        self.callbacks, self.screen, self.steps = callbacks, screen, algorithm.steps()
        self.rows: list[Row] = []
        self.client_rows = ClientRows()
        self.traffic = Traffic()
        self._evaluated: Sequence[int] = range(len(engine.names))
        self._noted: Row = {}  # what every row says besides its numbers
        self._open: Callable[[], None] | None = None
        if options.eval_clients is not None:
            generator = rng.generator(options.seed, "evaluated clients")
            drawn = generator.choice(len(engine.names), size=options.eval_clients, replace=False, shuffle=False)
            self._evaluated, self._noted = sorted(drawn.tolist()), {"eval_clients": int(options.eval_clients)}

    def whole_round(self, number: int, state: State) -> State:
        """A round with its evaluation and its callbacks; on an engine that lags, these come after the next round."""
        evaluated = number % self.options.eval_every == 0 or number == self.options.rounds
        context = RoundContext(
            number,
            self.options.seed,
            self.participants,
            self.engine,
            self.traffic,
            self.screen,
            self.steps,
            evaluated,
        )
        try:
            state, participation = self.algorithm.round(state, context)
        except (QuorumError, Diverged):
            self.close()  # the round before this one is whole, and the run can go on from it
            raise
        self.close()
        record = self._evaluate(number, state, participation) if evaluated else None
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
        for callback in self.callbacks:
            callback.round_done(snapshot.round)
            callback.settled(snapshot)

    def _evaluate(self, number: int, state: State, participation: Participation) -> Callable[[], None]:
        """Ask the clients for their scores; the function that is returned takes them and records them."""
        message = {"model": self.algorithm.reported(state)}
        answers = self.engine.later("evaluate", self._evaluated, message, number)
        return partial(self._record, number, participation, answers, self.traffic.so_far())

    def _record(
        self, number: int, participation: Participation, answers: Callable[[], Replies], sent: Mapping[str, int]
    ) -> None:
        replies = self.screen.passed(number, self._evaluated, answers(), self.steps["evaluate"].sends)
        weights: dict[int, float] = {}
        for client, weight in zip(participation.clients, participation.weights.tolist(), strict=True):
            weights[client] = weights.get(client, 0.0) + weight  # a client may be drawn more than once
        more = {"weight": np.array([weights.get(i, 0.0) for i in replies.clients])}
        if participation.duals is not None:
            more["dual"] = participation.duals.numpy()[replies.clients]
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
            **self._noted,
        }
        self.rows.append(row)
        self.client_rows.add(found)
        for callback in self.callbacks:
            callback.evaluated(row, few_as_list(found))

    def personal_models(self, number: int, model: Model, frozen: Params) -> Callable[[Sequence[int]], Iterator[Model]]:
        """A function that gives clients' personal models as they are after this round."""

        def ask(clients: Sequence[int]) -> Iterator[Model]:
            for found in self.engine.run("personal", clients, {"model": model}, number).each("model"):
                yield Model(params={**found["params"], **frozen}, buffers=found["buffers"])

        return ask
