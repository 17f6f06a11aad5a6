"""The result of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from comfedl.core import client_statistics
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.data.client_names import find
from comfedl.models.functional import with_tensors
from comfedl.utils.errors import ConfigError, nearest

MOST_NAMED = 1000  # with more clients, error messages do not look for similar names


@dataclass
class Result:
    """The result of a run.

    Attributes:
        params: the global model's parameters, with the dtype and device of the model given.
        buffers: its buffers (BatchNorm's running statistics), empty for most models.
        rounds: one row per evaluated round: "round", "train.loss.mean", "validation.accuracy.worst", "objective",
            "effective_clients", "up_bytes", "down_bytes" and so on.
        clients: one row per evaluated round and client: "round", "client", "train.loss", "weight" and so on. A list, or
            with more than 100,000 rows a sequence that makes rows on access.
        traffic: bytes sent in training, up from the clients and down to them.
        seconds: how long the run took.
        best_round: the best round by ``EarlyStopping``; without it, the last.
        stopped: why the run stopped before its last round, in a sentence; None if it did not.
        round: the round of ``params``: the last, or with ``EarlyStopping(restore_best=True)`` the best.
        last: the model after the last round, if it is another one.
    """

    params: Params
    buffers: Params
    rounds: list[Row]
    clients: Sequence[Row]
    traffic: dict[str, int]
    seconds: float
    names: Sequence[str] = field(repr=False)
    ask_personal: Callable[[Sequence[int]], Iterator[Model]] = field(repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    best_round: int = 0
    stopped: str | None = None
    round: int = 0
    last: Model | None = field(default=None, repr=False)

    def state_dict(self, client: str | None = None) -> Params:
        """Parameters and buffers for ``model.load_state_dict``: the global model's, or a client's personal model's."""
        model = Model(params=self.params, buffers=self.buffers) if client is None else self.personal_model(client)
        return {**model["params"], **model["buffers"]}

    def to_module(self, client: str | None = None) -> nn.Module:
        """The trained model in evaluation mode: the global one, or a client's personal one."""
        if self.module is None:
            raise ConfigError("This run trained a dict of tensors, not a module; its tensors are in result.params.")
        return with_tensors(self.module, self.state_dict(client))

    def personal(self, client: str) -> Params:
        """The parameters of a client's personal model: adapted from the global one, or kept by the client."""
        return self.personal_model(client)["params"]

    def personal_model(self, client: str) -> Model:
        """A client's personal model, with its buffers."""
        place = find(self.names, client) if isinstance(client, str) else None
        if place is None:
            few = len(self.names) <= MOST_NAMED
            known = nearest(str(client), self.names) if few else f"they go from {self.names[0]!r} to {self.names[-1]!r}"
            raise ConfigError(f"{client!r} is not a client of this run; {known}.")
        return next(self.ask_personal([place]))

    @property
    def row(self) -> Row:
        """The row of the returned model's round."""
        return next((row for row in self.rounds if row["round"] == self.round), self.rounds[-1])

    def summary(self) -> dict[str, Any]:
        """The row of the returned model's round, nested, with traffic and time."""
        last = self.row
        early = self.stopped is not None or self.round != self.rounds[-1]["round"]
        stop = {"round": self.round, "best_round": self.best_round, "stopped": self.stopped}
        return {
            "rounds": self.rounds[-1]["round"],
            **(stop if early else {}),
            **client_statistics.nested(last),
            "objective": last["objective"],
            "effective_clients": last["effective_clients"],
            **({"eval_clients": last["eval_clients"]} if "eval_clients" in last else {}),
            "traffic": self.traffic,
            "seconds": round(self.seconds, 3),
        }
